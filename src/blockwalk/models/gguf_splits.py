"""The ways in which llama.cpp splits text before it joins byte pairs, by their names in GGUF, as
steps of a tokenizer.json.

A table for both directions: ``blockwalk gguf`` finds the name of a tokenizer's steps, and a file
that is read gets the steps of its name. No torch, no transformers.

Source: the patterns of the models' own tokenizers (Llama 3, Qwen2, Qwen3.5, Mistral Nemo, GPT-4o),
which llama.cpp knows by ``tokenizer.ggml.pre``."""

from __future__ import annotations

from typing import Any

_SHORTENED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_LLAMA3 = ("Split", rf"{_SHORTENED}|{_LETTERS}|\p{{N}}{{1,3}}|{_OTHERS}|{_BLANKS}")
_QWEN2 = ("Split", rf"{_SHORTENED}|{_LETTERS}|\p{{N}}|{_OTHERS}|{_BLANKS}")
_QWEN35 = (
    "Split",
    rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",
)
_TEKKEN = ("Split", rf"{_MARKED[0]}|{_MARKED[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}")
_GPT4O = (
    "Split",
    rf"{_MARKED[0]}{_SHORTENED}?|{_MARKED[1]}{_SHORTENED}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}",
)
_GPT2 = ("ByteLevel", "regex")
_DIGITS = ("Digits", "single")

Steps = tuple[tuple[str, str], ...]
"""A way to split: each step's kind, and its pattern or manner."""

SPLITS: dict[str, Steps] = {
    "gpt-2": (_GPT2,),
    "smollm": (_DIGITS, _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT4O,),
}
"""The steps of each way, by its name, which is written."""
_ALIASES = {
    "gpt-2": ("mpt", "olmo", "jais", "phi-2", "trillion", "granite-docling"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"),
    "qwen2": ("stablelm2", "hunyuan", "deepseek-r1-qwen", "megrez"),
    "gpt-4o": ("llama4",),
}
_NAMES = {alias: name for name, aliases in _ALIASES.items() for alias in aliases}
WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
"""The names under which llama.cpp takes a word that is a token as it is, whether or not merges lead
to it."""
_UNSAID = ("", "default")
"""The names under which a file leaves open how it splits, as those of before May 2024 do."""


def pre_tokenizer(name: str) -> dict[str, Any] | None:
    """Return the steps of a name in the form of tokenizer.json; None where a file leaves them open.

    Raises:
        ValueError: a name that is not known here.
    """
    if name in _UNSAID:
        return None
    steps = SPLITS.get(_NAMES.get(name, name))
    if steps is None:
        raise ValueError(
            f"splits text as {name!r} (tokenizer.ggml.pre), which is not known here, and its"
            f" tokens would be others; known are {', '.join(sorted({*SPLITS, *_NAMES}))}"
        )
    parts: list[dict[str, Any]] = []
    for kind, pattern in steps:
        if kind == "Split":
            parts.append(
                {
                    "type": kind,
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                }
            )
        elif kind == "Digits":
            parts.append({"type": kind, "individual_digits": True})
    letters = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": _GPT2 in steps,
    }
    return {"type": "Sequence", "pretokenizers": [*parts, letters]}


def in_order(tokenizer: dict[str, Any], model: str, name: str, *, blank: bool) -> dict[str, Any]:
    """Return a tokenizer.json that splits text as llama.cpp does.

    Args:
        tokenizer: what transformers made of a GGUF file's vocabulary.
        model: the kind of vocabulary, ``tokenizer.ggml.model``.
        name: the way to split, ``tokenizer.ggml.pre``.
        blank: whether pieces of text get a blank before them, ``tokenizer.ggml.add_space_prefix``.

    Raises:
        ValueError: as :func:`pre_tokenizer`.
    """
    if tokenizer.get("model", {}).get("type") != "BPE":
        return tokenizer
    if model == "gpt2":
        steps = pre_tokenizer(name)
        if steps is None:
            return tokenizer
        pairs = {**tokenizer["model"], "ignore_merges": name in WHOLE_WORDS}
        return {**tokenizer, "model": pairs, "pre_tokenizer": steps}
    if model != "llama":
        return tokenizer
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if blank:
        prepend = {"type": "Prepend", "prepend": "▁"}
        normalizer = {"type": "Sequence", "normalizers": [prepend, replace]}
        return {**tokenizer, "normalizer": normalizer, "pre_tokenizer": None}
    decoder: dict[str, Any] = dict(tokenizer.get("decoder") or {})
    if "decoders" in decoder:  # a Strip takes off the blank that was put before
        decoder["decoders"] = [step for step in decoder["decoders"] if step["type"] != "Strip"]
    return {
        **tokenizer,
        "normalizer": replace,
        "pre_tokenizer": None,
        "decoder": decoder or None,
    }
