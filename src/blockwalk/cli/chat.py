"""``blockwalk chat``: a conversation in the terminal, or line in and line out where there is
none."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from blockwalk.cli.speaker import Speaker, note_unlearnt_chat, opened
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.words import counted, is_or_are
from blockwalk.system.signals import handled
from blockwalk.system.terminal import is_terminal, say

NEW = "/new"
"""The line that begins a new conversation."""
HELP = "/help"
"""The line that lists what can be typed."""
QUIT = "/quit"
"""The line that ends a chat."""
COMMANDS = (
    f"{NEW}    begins a new conversation",
    f"{HELP}   prints these lines",
    "Ctrl-C  ends an answer; while you type, the program",
    f"{QUIT}   ends the program; Ctrl-D, too",
)
"""Lines on what can be typed in a chat."""
MARK = "> "
"""The sign before the user's line, on a terminal."""
LEAST_ROOM = 64
"""Tokens that an answer needs at least, before the oldest turns of a conversation are left out for
it."""


def chat(run: RunConfig, arguments: argparse.Namespace) -> None:
    """Answer the lines of standard input as turns of one conversation, until it ends."""
    with opened(run, arguments) as speaker:
        note_unlearnt_chat(run.data, speaker.learnt)
        talk = _Talk(speaker, arguments, run.plan.seed)
        # A template that takes no such turns is refused before the first question.
        speaker.conversation([*talk.turns, {"role": "user", "content": "Hello"}])
        on_terminal = is_terminal(sys.stdin) and is_terminal(sys.stdout)
        if on_terminal:
            say(f"{_who(run, speaker)}. {HELP} lists what you can type.")
        for line in _lines(on_terminal):
            if line.strip() == QUIT:
                break
            if line.strip() == NEW:
                talk.begin()
            elif re.fullmatch(r"/\w+", line.strip()):
                # a mistyped command is no question to a model
                say(*COMMANDS)
            elif line.strip():
                talk.answer(line)


def _who(run: RunConfig, speaker: Speaker) -> str:
    """Return the name of the model that answers, and of what has been trained of it."""
    if speaker.model != run.model:
        return f"{speaker.model}, trained from {run.model}"
    return f"{run.model} with {speaker.adapter}" if speaker.adapter else str(run.model)


def _lines(on_terminal: bool) -> Iterator[str]:
    """Yield the user's lines: with a mark before each, and with editing, on a terminal."""
    if not on_terminal:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # input() edits lines with it
    while True:
        try:
            yield input(MARK)
        except EOFError:
            say("")
            return


@dataclass(slots=True)
class _Talk:
    """A conversation in progress."""

    speaker: Speaker
    arguments: argparse.Namespace
    seed: int
    turns: list[dict[str, Any]] = field(default_factory=list)
    questions: int = 0
    """Questions so far: each draws anew."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget all turns but the system's."""
        system = self.arguments.system
        self.turns = [{"role": "system", "content": system}] if system else []

    def answer(self, line: str) -> None:
        """Answer a line, printing tokens as they come; the answer becomes a turn."""
        self.turns.append({"role": "user", "content": line})
        ids_BS = self._fitting()
        if ids_BS is None:
            self.turns.pop()
            return
        max_new_tokens = min(self.arguments.max_new_tokens, self.speaker.room(ids_BS.shape[1]))
        stop = _Stop()
        with handled(stop.act, (signal.SIGINT,)) as previous:
            stop.previous = previous.get(signal.SIGINT)
            text = self.speaker.answer(
                ids_BS,
                max_new_tokens,
                lambda piece: say(piece, end=""),
                temperature=self.arguments.temperature,
                seed=self.seed + self.questions,
                ends=lambda: stop.requested,
            )
        say("")
        self.questions += 1
        self.turns.append({"role": "assistant", "content": text})

    def _fitting(self) -> Any:
        """Return the tokens of the conversation, without its oldest turns where the model's
        positions have no room for them; None where the last turn alone has none."""
        least = min(self.arguments.max_new_tokens, LEAST_ROOM)
        left_out = 0
        while True:
            ids_BS = self.speaker.tokens(self.speaker.conversation(self.turns), special=False)
            if self.speaker.room(ids_BS.shape[1]) >= least:
                break
            oldest = 1 if self.turns[0]["role"] == "system" else 0
            if len(self.turns) - oldest < 3:
                say(
                    f"note: {ids_BS.shape[1]} tokens leave no room for an answer in the"
                    f" {self.speaker.positions} positions that the model was made for: ask in"
                    " fewer words",
                    file=sys.stderr,
                )
                return None
            del self.turns[oldest : oldest + 2]
            left_out += 2
        if left_out:
            say(
                f"note: the oldest {counted(left_out, 'turn')} {is_or_are(left_out)} left out:"
                f" the model was made for {self.speaker.positions} positions",
                file=sys.stderr,
            )
        return ids_BS


@dataclass(slots=True)
class _Stop:
    """The answer to Ctrl-C while a text is written: it ends after the token in progress, and a
    second one ends the program."""

    requested: bool = False
    previous: Any = None

    def act(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            signal.signal(number, self.previous)
            raise KeyboardInterrupt
        self.requested = True
