"""A source of a data set with settings of its own, as ``data.train`` and ``data.eval`` take it
beside plain names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Source:
    """A file, a folder or a hub name, and what differs for it from the settings of ``data``."""

    path: str
    """The source itself."""
    weight: float | None = None
    """Its share in a mixture, relative to the other sources'; None: 1, where another source has
    one."""
    format: str = ""
    columns: tuple[str, ...] = ()
    subset: str = ""
    split: str = ""
    prompt: Sequence[str] = ()

    def changes(self) -> dict[str, Any]:
        """Return the settings that it has of its own, by their names in ``data``."""
        return {name: value for name in OWN if (value := getattr(self, name))}


OWN = ("format", "columns", "subset", "prompt")
"""Settings that a source may have instead of those of the same names in ``data``."""

Sources: TypeAlias = str | tuple[str | Source, ...]
"""One source, or several."""


def listed(sources: Sources) -> tuple[Source, ...]:
    """Return every source as a value; none for an empty text."""
    names = (sources,) if isinstance(sources, str) else sources
    return tuple(Source(name) if isinstance(name, str) else name for name in names if name)


def weights_of(sources: Sources) -> tuple[float, ...]:
    """Return the weights that sources have of their own; empty where none has one."""
    weights = [source.weight for source in listed(sources)]
    if all(weight is None for weight in weights):
        return ()
    return tuple(1.0 if weight is None else weight for weight in weights)


def plain(source: Source) -> dict[str, Any]:
    """Return a source as a mapping of the settings that it has, in YAML's types."""
    values = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    kept = {name: value for name, value in values.items() if value not in ("", None, ())}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()
    }


def columns_of(value: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a mapping of fields to columns as the list that ``data.columns`` is.

    Raises:
        TypeError: a field without a column, which YAML reads in ``{prompt:question}``: a colon
            needs a space.
    """
    if None in value.values():
        raise TypeError
    return tuple(f"{field}={column}" for field, column in value.items())


def names_of(sources: Sources) -> tuple[str, ...]:
    """Return the paths and names of sources."""
    return tuple(source.path for source in listed(sources))


def joined(sources: Sources) -> str:
    """Return the names of sources as one text."""
    return ", ".join(names_of(sources))


def shown(sources: Sequence[Any] | str, name: Callable[[str], str]) -> Any:
    """Return sources in plain types (texts, and mappings with a ``path``) with each path as the
    function ``name`` gives it."""
    if isinstance(sources, str):
        return name(sources)
    return [
        {**source, "path": name(source["path"])} if isinstance(source, Mapping) else name(source)
        for source in sources
    ]
