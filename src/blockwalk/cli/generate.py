"""``blockwalk generate``: the continuation of a prompt, or the answer of a conversation, printed as
it comes."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

from blockwalk.checkpoints.marks import Learnt
from blockwalk.cli.speaker import Speaker, note_unlearnt_chat, opened
from blockwalk.data.prompt_layout import filled, prompts_of
from blockwalk.plan.run_config import DataSettings, RunConfig
from blockwalk.system.atomic_files import read_json, reading
from blockwalk.system.terminal import say


def generate(run: RunConfig, arguments: argparse.Namespace) -> None:
    """Print the continuation of a prompt."""
    text = _prompt(arguments)
    turns = _turns(arguments, text)
    if not (turns or arguments.raw):
        text = _in_layout(run.data, text)
    with opened(run, arguments) as speaker:
        if not turns and not arguments.raw:
            turns = _as_learnt(speaker, text)
        if turns:
            note_unlearnt_chat(run.data, speaker.learnt)
            text = speaker.conversation(turns)
        ids_BS = speaker.tokens(text, special=not turns)
        speaker.require_room(ids_BS.shape[1], arguments.max_new_tokens)
        settings = {"temperature": arguments.temperature, "seed": run.plan.seed}
        tell = functools.partial(say, end="")
        answer = speaker.answer(ids_BS, arguments.max_new_tokens, tell, **settings)
    say("")
    if not answer.strip():
        say("note: the answer is empty: the model ended the text at once", file=sys.stderr)


def _prompt(arguments: argparse.Namespace) -> str:
    """Return the text of ``--prompt``; empty where ``--messages`` stands for it.

    Raises:
        ValueError: neither is given, or the text is no text.
    """
    from blockwalk.data.records import half_character

    if arguments.prompt is None and not arguments.messages:
        raise ValueError(
            "--prompt is missing: the text to continue, or - for standard input; or give"
            " --messages FILE"
        )
    text: str = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt or ""
    if half_character(text):
        raise ValueError(
            "--prompt holds bytes that are no UTF-8, or half a character (a lone surrogate):"
            " write it whole"
        )
    return text


def _as_learnt(speaker: Speaker, text: str) -> list[dict[str, Any]]:
    """Return a prompt as a user's turn where the run learnt conversations; nothing elsewhere, with
    a note where another way of asking fits what was learnt."""
    if speaker.learnt is Learnt.CHATS and speaker.tokenizer.chat_template:
        say(
            "note: the run learnt conversations: the prompt is a user's turn (--raw continues it as"
            " it stands)",
            file=sys.stderr,
        )
        return [{"role": "user", "content": text}]
    if speaker.learnt is None and speaker.tokenizer.chat_template:
        say(
            "note: the prompt is continued as it stands; the model has a chat template, in which"
            " --chat asks it",
            file=sys.stderr,
        )
    return []


def _in_layout(data: DataSettings, text: str) -> str:
    """Return a prompt in the layout of ``data.prompt``, and print that it is; as it stands, with a
    note, where that has several columns, and where ``data.template`` is the layout."""
    layouts = [("data.prompt", prompt) for prompt in prompts_of(data)]
    layouts += [("data.template", data.template)] * bool(data.template)
    if not layouts:
        return text
    name, layout = layouts[0]
    in_layout = filled(data, text) if name == "data.prompt" else None
    if in_layout is None:
        say(
            f"note: trained with {name} {layout!r}; write the prompt in that layout",
            file=sys.stderr,
        )
        return text
    if in_layout != text:
        say(f"note: the prompt, in the layout of data.prompt: {in_layout!r}", file=sys.stderr)
    return in_layout


def _turns(arguments: argparse.Namespace, text: str) -> list[dict[str, Any]]:
    """Return the turns of a conversation that is answered; none where the prompt is continued as it
    stands."""
    if arguments.raw and (arguments.messages or arguments.chat or arguments.system):
        raise ValueError(
            "--raw continues a prompt as it stands, and --chat, --system and --messages ask in the"
            " chat template: leave one out"
        )
    turns = _read_messages(Path(arguments.messages)) if arguments.messages else []
    if not (turns or arguments.chat or arguments.system):
        return []
    if arguments.system:
        turns = [{"role": "system", "content": arguments.system}, *turns]
    if arguments.prompt is not None:
        turns = [*turns, {"role": "user", "content": text}]
    if turns[-1]["role"] in ("assistant", "system"):
        raise ValueError(
            f"the last turn has the role {turns[-1]['role']!r}, and an answer follows a user: end"
            f" {arguments.messages} with a user's turn, or add one with --prompt"
        )
    return turns


def _read_messages(path: Path) -> list[dict[str, Any]]:
    """Return the turns in a file of JSON: a list of them, or an object whose ``messages`` it is.

    Raises:
        ValueError: it holds none.
    """
    with reading(path):
        content = read_json(path)
    turns = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(turns, list) or not turns:
        raise ValueError(
            f"{path}: a list of turns is expected, or an object with them as 'messages'"
        )
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not all(
            isinstance(turn.get(name), str) for name in ("role", "content")
        ):
            raise ValueError(
                f"{path}: turn {number} must be an object with 'role' and 'content', both texts"
            )
    return turns
