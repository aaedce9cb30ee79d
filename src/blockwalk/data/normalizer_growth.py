"""The growth of a text in a tokenizer's normalizer, tried on its own rules.

A rule replaces a string by another, and a list of rules may multiply a text without end: 36 rules
that double a letter make 2³⁶ of it. The library that applies them has no bound, and answers no
signal meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from blockwalk.system.bounds import Endless, bounded

TIMES = 1000
"""Times that a normalizer may lengthen a text; NFKD makes 18 characters of one at most."""
SECONDS = 10.0
"""Seconds that the rules have to be tried."""
_KEY = re.compile(rb'"normalizer"\s*:\s*(?=\{)')


def require_bounded_file(file: Path) -> None:
    """Check the normalizer in a ``tokenizer.json``, which is applied as soon as the file is loaded.

    Raises:
        ValueError: its rules lengthen a text more than :data:`TIMES` times; the file is named.
    """
    content = file.read_bytes()
    for key in _KEY.finditer(content):
        text = content[key.end() :].decode("utf-8", "replace")
        try:
            rules, _ = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return  # which is said when the file is loaded
        require_bounded(rules, file)


def require_bounded(normalizer: dict[str, Any], source: Path) -> None:
    """Check a normalizer, as JSON has it.

    Each rule's strings are handed to the rule and to all that follow it: a rule that multiplies
    what another makes is found by what that one makes.

    Raises:
        ValueError: as :func:`require_bounded_file`.
    """
    from tokenizers import normalizers

    rules = list(_flat(normalizer))
    texts = [_strings(rule) for rule in rules]
    longest = max((len(text) for of_rule in texts for text in of_rule), default=0)
    try:
        if longest > TIMES:
            raise OverflowError
        steps = []
        for rule in rules:
            step: Any = normalizers.Sequence([])
            step.__setstate__(json.dumps(rule).encode())
            steps.append(step)
        with bounded(SECONDS):
            for number, of_rule in enumerate(texts):
                for text in of_rule:
                    _lengthened(text, steps[number:])
    except (OverflowError, Endless):
        raise ValueError(
            f"{source}: the rules of its normalizer lengthen a text more than {TIMES:,} times: the"
            " file is damaged, or is meant to take all memory; take the tokenizer from its source"
        ) from None
    except Exception as error:  # tokenizers raises no class of its own
        raise ValueError(f"{source}: its normalizer is none: {error}") from None


def _lengthened(text: str, steps: Sequence[Any]) -> None:
    """Raise OverflowError if normalizers make a text too long."""
    bound = TIMES * max(1, len(text))
    for step in steps:
        text = step.normalize_str(text)
        if len(text) > bound:
            raise OverflowError


def _flat(normalizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the rules of a normalizer in order."""
    if not isinstance(normalizer, dict):
        return
    if normalizer.get("type") == "Sequence":
        for rule in normalizer.get("normalizers") or ():
            yield from _flat(rule)
    else:
        yield normalizer


def _strings(rule: dict[str, Any]) -> list[str]:
    """Return what a rule replaces, what by, and the characters of both."""
    pattern = rule.get("pattern")
    parts = [rule.get("content"), rule.get("prepend")]
    parts += list(pattern.values()) if isinstance(pattern, dict) else [pattern]
    strings = [part for part in parts if isinstance(part, str) and part]
    return [*strings, *dict.fromkeys(character for text in strings for character in text[:64])]
