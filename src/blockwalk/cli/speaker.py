"""A model that continues texts at the command line: opened once, with its adapter, for ``generate``
and ``chat``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockwalk.checkpoints.marks import Learnt, learnt_of
from blockwalk.cli.adapters import opened_adapter, trained_by
from blockwalk.cli.reading import packed_model, plan_to_read
from blockwalk.data.prompt_layout import prompts_of
from blockwalk.plan.data_source import listed
from blockwalk.plan.run_config import DataSettings, RunConfig
from blockwalk.system.terminal import say


@dataclass(frozen=True, slots=True)
class Speaker:
    """An open model, its tokenizer, and the limits of what it writes."""

    walker: Any
    tokenizer: Any
    stops: frozenset[int]
    positions: int
    """Tokens of a prompt and its answer at most; 0: not known."""
    model: str
    learnt: Learnt | None = None
    """The kind of texts that a run has taught the model; None: no run, or it does not say."""
    adapter: str = ""
    """The adapter as it is named, or found in the run's folder; empty: none."""

    def tokens(self, text: str, *, special: bool) -> Any:
        """Return the token ids of a text, int64 [1, S]; ``special``: behind the tokens that begin a
        text, as in training.

        Raises:
            ValueError: the text is no text, or the model has no row for one of its tokens.
        """
        import torch

        from blockwalk.cutting.skeleton import vocabulary_rows
        from blockwalk.data.tokenizer import require_rows
        from blockwalk.data.tokens_around import tokens_around

        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if special:
            ids, _ = tokens_around(self.tokenizer).prefixed(ids)
        largest = max(ids, default=-1)
        require_rows((largest, "prompt"), self.tokenizer, vocabulary_rows(self.model), "--prompt")
        return torch.tensor([ids], dtype=torch.int64)

    def conversation(self, turns: Sequence[Mapping[str, Any]]) -> str:
        """Return turns as the chat template writes them, as far as the assistant's next one.

        Raises:
            ValueError: there is no template, or it refuses the turns.
        """
        from blockwalk.data.chat_template import render_chat

        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{self.model} has no chat template: leave --chat, --system and --messages out,"
                " or give one with --data.chat_template (chatml, llama3, gemma, phi3, mistral or a"
                " file)"
            )
        try:
            return render_chat(self.tokenizer, list(map(dict, turns)), add_generation_prompt=True)
        except Exception as error:
            raise ValueError(f"the chat template refused the conversation: {error}") from error

    def room(self, prompt_tokens: int) -> int:
        """Return tokens that an answer may have after a prompt; very many where the model does not
        say."""
        return self.positions - prompt_tokens if self.positions else sys.maxsize

    def require_room(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Raise ValueError where a prompt and its answer would pass the positions that the model
        was made for."""
        room = self.room(prompt_tokens)
        if room < max_new_tokens:
            way_out = f"lower --max_new_tokens to {room}" if room > 0 else "shorten the prompt"
            raise ValueError(
                f"a prompt of {prompt_tokens} tokens with --max_new_tokens {max_new_tokens}"
                f" passes the {self.positions} positions that the model was made for; {way_out}"
            )

    def answer(
        self,
        ids_BS: Any,
        max_new_tokens: int,
        tell: Callable[[str], None],
        *,
        temperature: float = 0.0,
        seed: int = 0,
        ends: Callable[[], bool] = lambda: False,
    ) -> str:
        """Continue a prompt, and answer the text; ``tell`` is given its pieces as they come, and
        where ``ends`` answers True no further token is computed."""
        from blockwalk.data.text_stream import TextStream

        stream = TextStream(self.tokenizer)

        def watch(token_B: Any) -> bool:
            tell(stream.add(int(token_B[0])))
            return ends()

        settings = {"temperature": temperature, "seed": seed}
        self.walker.generate(ids_BS, max_new_tokens, stop_ids=self.stops, watch=watch, **settings)
        tell(stream.end())
        return stream.text


@contextmanager
def opened(run: RunConfig, arguments: argparse.Namespace) -> Iterator[Speaker]:
    """Open the model of a run with the adapter that the command line names, or that the run has
    trained."""
    from blockwalk.data.tokenizer import tokenizer_of
    from blockwalk.models.model_source import model_source
    from blockwalk.models.stops import stop_ids
    from blockwalk.walk.walker import Walker

    run, named = trained_by(run, arguments)
    with opened_adapter(named, run.model) as adapter:
        own_template = "data.chat_template" in arguments.named
        tokenizer = tokenizer_of(run.model, run.data, None if own_template else adapter)
        stops = frozenset(stop_ids(run.model, tokenizer, adapter))
        plan = plan_to_read(run, adapter, arguments)
        if plan.frozen.codec.encoded and not model_source(run.model).packed:
            say(
                f"note: over weights in {plan.frozen.codec}; --frozen disk reads the model's own",
                file=sys.stderr,
            )
        with Walker(packed_model(run, plan), plan, lora=adapter, training=False) as walker:
            learnt = learnt_by(run, adapter)
            positions = model_source(run.model).positions
            name = named if adapter and named else ""
            yield Speaker(walker, tokenizer, stops, positions, run.model, learnt, name)


def learnt_by(run: RunConfig, adapter: Path | None) -> Learnt | None:
    """Return the kind of texts that an adapter, or a run's model, has learnt: as its folder says,
    else as the run's data do, where they are here; None where neither says it."""
    from blockwalk.data.formats import learns_chats
    from blockwalk.data.sources import read_records

    folder = adapter or Path(run.model)
    learnt = learnt_of(folder) if folder.is_dir() else None
    sources = listed(run.data.train)
    if learnt is not None or adapter is None or not sources or run.data.task:
        return learnt
    if run.data.template or prompts_of(run.data) or not Path(sources[0].path).exists():
        return None
    records = read_records(sources[0].path, columns=sources[0].columns or run.data.columns)
    kind = sources[0].format or run.data.format
    chats = learns_chats(next(iter(records)), kind, run.plan.objective_facts)
    return Learnt.CHATS if chats else Learnt.TEXTS


def note_unlearnt_chat(data: DataSettings, learnt: Learnt | None) -> None:
    """Print that a run of such data learns no conversation, where its settings or its weights say
    so."""
    layouts = [("data.prompt", prompt) for prompt in prompts_of(data)]
    layouts += [("data.template", data.template)] * bool(data.template)
    if layouts:
        name, layout = layouts[0]
        say(
            f"note: a run with {name} {layout!r} learns no conversation; generate --prompt"
            " continues a text",
            file=sys.stderr,
        )
    elif learnt is Learnt.TEXTS:
        say(
            "note: the run learnt texts, and no conversation; generate --prompt continues a text",
            file=sys.stderr,
        )
