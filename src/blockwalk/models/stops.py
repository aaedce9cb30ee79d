"""The tokens at which generation stops, and the ends of turns that training teaches beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from blockwalk.models.model_source import model_source
from blockwalk.plan.words import counted
from blockwalk.system import atomic_files
from blockwalk.system.paths import StrPath

GENERATION = "generation_config.json"
"""The file that names the tokens which end generation, beside a model and, where training adds one,
beside an adapter."""


def stop_ids(folder: StrPath, tokenizer: Any, adapter: StrPath | None = None) -> set[int]:
    """Return the tokens that end a text: the tokenizer's own, and those that the model's folder
    names for generation, as the end of a turn (``generation_config.json``, else ``config.json``);
    and those that training left beside an adapter."""
    from transformers import GenerationConfig

    source = model_source(folder)
    try:
        named = GenerationConfig.from_pretrained(source.folder).eos_token_id
    except OSError:
        named = getattr(source.configuration().get_text_config(), "eos_token_id", None)
    learnt = learnt_stops(adapter) if adapter else []
    return {int(i) for i in (tokenizer.eos_token_id, *_listed(named), *learnt) if i is not None}


def learnt_stops(adapter: StrPath) -> list[int]:
    """Return the tokens that training left beside an adapter as ends of turns; none where it left
    no file."""
    file = Path(adapter) / GENERATION
    if not file.is_file():
        return []
    with atomic_files.reading(file):
        named = _listed(atomic_files.read_json(file).get("eos_token_id"))
    return [int(i) for i in named if i is not None]


def with_stops(folder: StrPath, stops: Collection[int]) -> bytes:
    """Return the ``generation_config.json`` of a folder, or a new one, that also stops at
    ``stops``."""
    file = Path(folder) / GENERATION
    values: dict[str, Any] = atomic_files.read_json(file) if file.is_file() else {}
    config = Path(folder) / "config.json"
    if "eos_token_id" not in values and config.is_file():
        values["eos_token_id"] = atomic_files.read_json(config).get("eos_token_id")
    named = [int(i) for i in _listed(values.get("eos_token_id")) if i is not None]
    values["eos_token_id"] = [*named, *(stop for stop in stops if stop not in named)]
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def of_tokenizer(tokenizer: Any) -> set[int]:
    """Return the tokens that end a text by the tokenizer, and by the folder that it was read from,
    where that is here."""
    folder = os.fspath(getattr(tokenizer, "name_or_path", "") or "")
    if folder and (Path(folder) / "config.json").is_file():
        return stop_ids(folder, tokenizer)
    return set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}


def texts_of_stops(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts of the added tokens at which generation stops, as a chat template writes
    them."""
    names = {token: text for text, token in tokenizer.get_added_vocab().items()}
    return tuple(names[token] for token in sorted(of_tokenizer(tokenizer)) if token in names)


def stray_ends(turn_ends: Mapping[int, int], stops: Collection[int]) -> list[int]:
    """Return the tokens that turns are learnt to end with, the most frequent first, at which
    generation does not stop."""
    return [token for token in sorted(turn_ends, key=lambda i: -turn_ends[i]) if token not in stops]


def end_note(turn_ends: Mapping[int, int], tokenizer: Any) -> tuple[list[int], str]:
    """Return marks that turns are learnt to end with, at which generation does not stop of itself,
    and a sentence about it.

    A turn that is learnt to end in plain text has no mark: the sentence says that nothing ends an
    answer."""
    stops = of_tokenizer(tokenizer)
    stray = stray_ends(turn_ends, stops)
    if not stray:
        return [], ""
    named = (
        " or ".join(repr(tokenizer.convert_ids_to_tokens(i)) for i in sorted(stops)) or "no token"
    )
    marks = [token for token in stray if token in set(tokenizer.get_added_vocab().values())]
    if marks:
        learnt = " or ".join(repr(tokenizer.convert_ids_to_tokens(i)) for i in marks)
        return marks, (
            f"turns are learnt to end with {learnt}, and the model's generation stops at {named}:"
            " generate stops at both with this adapter, and merge writes both into"
            " generation_config.json"
        )
    count = sum(turn_ends[i] for i in stray)
    final_text = tokenizer.decode([stray[0]])
    return [], (
        f"{count} of {counted(sum(turn_ends.values()), 'turn')} are learnt without an end: the"
        f" last learnt token, as {final_text!r}, is plain text, and generation stops at {named}; an"
        " answer may go on until max_new_tokens"
    )


def _listed(named: Any) -> list[Any]:
    return named if isinstance(named, list) else [named]
