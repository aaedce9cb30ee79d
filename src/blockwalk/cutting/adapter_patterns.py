"""The patterns of an adapter's configuration, tried within a time.

PEFT matches them with the names of a model's modules, by Python's ``re``, which takes
exponential time for some: ``(([a-z]|[._0-9])+)+!`` has 20 characters and finds no end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from blockwalk.system.bounds import Endless, bounded

SECONDS = 10.0
"""Seconds that all patterns of an adapter have for the names of all modules: some milliseconds
are usual."""


def require_ends(config: Any, model: nn.Module, source: str) -> None:
    """Match the patterns of a PEFT configuration with the names of a model's modules, as PEFT will.

    Args:
        source: where the configuration is from, in messages.

    Raises:
        ValueError: a pattern is none, or comes to no end within :data:`SECONDS`; its field.
    """
    names = [name for name, _ in model.named_modules()]
    for field, pattern in _patterns(config):
        try:
            with bounded(SECONDS):
                compiled = re.compile(pattern)
                for name in names:
                    compiled.match(name)
        except re.error as error:
            raise ValueError(f"{source}: {field} has no pattern of Python's: {error}") from None
        except (Endless, RecursionError):
            raise ValueError(
                f"{source}: {field} has a pattern that does not come to an end within"
                f" {SECONDS:g} s on the names of this model's {len(names):,} modules"
            ) from None


def _patterns(config: Any) -> Iterator[tuple[str, str]]:
    """Yield each pattern of a configuration in the form in which PEFT matches it, with its
    field."""
    for field in ("target_modules", "exclude_modules"):
        value = getattr(config, field, None)
        if isinstance(value, str) and value.lower() != "all-linear":
            yield field, rf"(?:{value})\Z"
    for field in ("rank_pattern", "alpha_pattern"):
        keys: Mapping[str, Any] = getattr(config, field, None) or {}
        for key in keys:
            yield field, rf"(.*\.)?({key})$"
    for name in _listed(getattr(config, "modules_to_save", None)):
        yield "modules_to_save", rf"(^|.*\.){name}($|\..*)"
    for name in _listed(getattr(config, "layers_pattern", None)):
        yield "layers_pattern", rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\."


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
