"""The tokens that begin and end a text, as a GGUF file says them: one before it, one behind it, and
three that end generation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from blockwalk.models.stops import stop_ids
from blockwalk.plan.words import counted


def add_marks(writer: Any, folder: Path, special: Any) -> None:
    """Write the special tokens and the ends of generation.

    Args:
        writer: gguf's.
        folder: the model's.
        special: gguf's ``SpecialVocab`` of the folder.

    Raises:
        ValueError: other tokens around a text, or more ends of generation, than a file can say.
    """
    ids: dict[str, int] = special.special_token_ids
    _require_plain(folder / "tokenizer.json", ids)
    stops = stop_ids(folder, SimpleNamespace(eos_token_id=ids.get("eos")))
    if stops and "eos" not in ids:
        ids["eos"] = min(stops)
    further = sorted(stops - {ids.get("eos")}, key=lambda stop: (stop == ids.get("eom"), stop))
    if len(further) > 2:
        raise ValueError(
            f"{folder} ends generation at {counted(len(stops), 'token')} ({sorted(stops)} in"
            " generation_config.json and the tokenizer), and a GGUF file can name 3 (eos, eot,"
            " eom): leave fewer of them in eos_token_id of generation_config.json"
        )
    # llama.cpp ends generation at each of the three, whatever it is called
    for stop, add in zip(further, (writer.add_eot_token_id, writer.add_eom_token_id), strict=False):
        add(stop)
    special.add_to_gguf(writer, quiet=True)


def _require_plain(file: Path, ids: dict[str, int]) -> None:
    """Raise ValueError where a tokenizer puts other tokens before a text than its begin, or others
    behind it than its end."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a").ids
    if not plain:
        return
    start = next(i for i in range(len(framed)) if framed[i : i + len(plain)] == plain)
    for verb, tokens, kind in (
        ("begins", framed[:start], "bos"),
        ("ends", framed[start + len(plain) :], "eos"),
    ):
        if tokens and tokens != [ids.get(kind)]:
            names = ", ".join(repr(tokenizer.id_to_token(token)) for token in tokens)
            raise ValueError(
                f"{file} {verb} every text with {names}, and a GGUF file can name one token, the"
                f" {kind}: llama.cpp would read other tokens than the model has learnt"
            )
