"""The settings that a row has of its own: a frozen dataclass, each field with its range.

    @dataclass(frozen=True)
    class FocalSettings:
        gamma: float = setting(2.0, least=0, help="The power of what the label lacks.")

A row that is named with settings is a text, ``focal(gamma=2.0)``: it is compared, kept in files and
sent to other ranks as any name is."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

MOST = {int: 2**40, float: 1e18}
"""The most that any number among the settings may be, by its type: far beyond what fits a machine,
and taken by every library."""
TYPES: tuple[Any, ...] = (
    *(bool, int, float, str),
    *(tuple[int, ...], tuple[float, ...], tuple[str, ...]),
)
"""The types of a row's settings."""
REQUIRED = "required"
LEAST_SIMILAR = 0.6


def setting(
    default: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    words: tuple[str, ...] = (),
    required: bool = False,
    help: str = "",
) -> Any:
    """Return a field of a row's settings.

    Args:
        default: its value unless given; of a required one an example, with which the row is
            described.
        least, most, above, below: its range, of a list that of each number.
        words: the words that it may be.
        required: whether a run must give it.
        help: a sentence, where no docstring stands below the field.
    """
    facts = {"least": least, "most": most, "above": above, "below": below}
    limits = {name: limit for name, limit in facts.items() if limit is not None}
    metadata = {"limits": limits, "words": words, REQUIRED: required, "help": help}
    return dataclasses.field(default=default, metadata=metadata)


class RowChoice(str):
    """The name of a row with its settings, as a text: ``focal(gamma=2.0)``."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The row's name."""
        return bare(self)

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting of the row, by name."""
        return taken_apart(self)[1]


def bare(text: str) -> str:
    """Return the name in a text that may have settings.

    >>> bare("focal(gamma=2.0)")
    'focal'
    """
    return text.partition("(")[0].strip()


def taken_apart(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name in a text, and the settings behind it.

    >>> taken_apart("focal(gamma=2.0, labels=('a', 'b'))")
    ('focal', {'gamma': 2.0, 'labels': ('a', 'b')})

    Raises:
        ValueError: they are not written in this way.
    """
    name, bracket, _ = text.partition("(")
    if not bracket:
        return text.strip(), {}
    try:
        call = ast.parse(f"row{text[len(name) :].strip()}", mode="eval").body
        assert isinstance(call, ast.Call)
        assert not call.args
        values = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise ValueError(
            f"{text!r} is no row with settings; write {name.strip()}(setting=value), or {{name:"
            f" {name.strip()}, setting: value}}"
        ) from None
    return name.strip(), values


def joined(name: str, values: Mapping[str, Any]) -> RowChoice:
    """Return a name and settings as one text."""
    return RowChoice(f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})")


def require_fields(section: str, cls: type, names: Iterable[str]) -> None:
    """Raise ValueError where a row reads a setting that its section has not got."""
    fields = [field.name for field in dataclasses.fields(cls)]
    for name in names:
        if name not in fields:
            raise ValueError(
                f"a row reads {section}.{name}, and {section} has no such setting: give the row"
                " settings of its own (register(name, row, settings=...))"
            )


def require_settings(cls: type) -> None:
    """Raise ValueError where a class does not describe a row's settings."""
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise ValueError(f"{cls.__name__} must be a frozen dataclass")
    for field in dataclasses.fields(cls):
        hint = hints_of(cls)[field.name]
        if hint not in TYPES:
            names = "bool, int, float, str, or a tuple[X, ...] of the last three"
            raise ValueError(f"{cls.__name__}.{field.name} is {hint}; it must be {names}")
        if field.default is dataclasses.MISSING:
            raise ValueError(f"{cls.__name__}.{field.name} has no default; see setting()")


hints_of: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)
"""The types of a dataclass's fields, by name."""


def complete(cls: type, row: str, place: str, values: Mapping[str, Any]) -> Any:
    """Return the settings of a row with every value checked.

    Args:
        row: the row's name, for messages.
        place: the beginning of the settings' names, such as ``loss``.
        values: those that are given, as YAML or Python has them.

    Raises:
        ValueError: one is unknown, missing, of another type or out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name, value in values.items():
        if name not in fields:
            raise ValueError(unknown(f"{place}.{name}", value, row, list(fields)))
    checked = {}
    for name, field in fields.items():
        if name not in values and field.metadata.get(REQUIRED):
            raise ValueError(
                f"{place}.{name} is missing: {row} needs it, {described(cls, name)}, such as"
                f" {field.default}"
            )
        value = values.get(name, field.default)
        checked[name] = _read(cls, name, f"{place}.{name}", value)
    return cls(**checked)


def unknown(setting: str, value: Any, row: str, names: list[str]) -> str:
    """Return the message about a setting that a row has not got."""
    similar = difflib.get_close_matches(setting.rpartition(".")[2], names, 1, LEAST_SIMILAR)
    hint = f"; did you mean {similar[0]!r}?" if similar else ""
    has = f"it has {', '.join(names)}" if names else "it has none"
    return f"unknown setting {setting!r} ({value!r}): {row} has no such setting, {has}{hint}"


def described(cls: type, name: str) -> str:
    """Return what a setting may be, in words: ``a number of at least 0``."""
    hint = hints_of(cls)[name]
    metadata = _field(cls, name).metadata
    if words := metadata.get("words"):
        return f"one of {', '.join(words)}"
    nouns = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    several = {tuple[int, ...]: "whole numbers", tuple[float, ...]: "numbers"}
    noun = nouns.get(hint) or f"a list of {several.get(hint, 'texts')}"
    phrases = {"least": "at least", "most": "at most", "above": "above", "below": "below"}
    limits = metadata.get("limits", {})
    ranges = " and ".join(f"{phrases[word]} {limit:g}" for word, limit in limits.items())
    return f"{noun}{' of ' if ranges.startswith('at') else ' '}{ranges}".strip()


def limits_of(cls: type, name: str) -> Mapping[str, float]:
    """Return the limits of a setting, by the names of :func:`setting`'s arguments."""
    limits: Mapping[str, float] = _field(cls, name).metadata.get("limits", {})
    return limits


def words_of(cls: type, name: str) -> tuple[str, ...]:
    """Return the words that a setting may be; none where it may be others."""
    words: tuple[str, ...] = _field(cls, name).metadata.get("words", ())
    return words


def help_of(cls: type, name: str) -> str:
    """Return the sentence of a setting that :func:`setting` was given."""
    return str(_field(cls, name).metadata.get("help", ""))


def _field(cls: type, name: str) -> dataclasses.Field[Any]:
    return next(field for field in dataclasses.fields(cls) if field.name == name)


def _read(cls: type, name: str, setting: str, value: Any) -> Any:
    """Return a value as its type has it.

    Raises:
        ValueError: it is of another type, or out of range.
    """
    hint = hints_of(cls)[name]
    typed = _typed(hint, value)
    words = words_of(cls, name)
    items = typed if isinstance(typed, tuple) else (typed,)
    inside = typed is not None and all(_inside(item, limits_of(cls, name)) for item in items)
    if not inside or (words and not set(items) <= set(words)):
        raise ValueError(f"{setting} is {value!r}; it must be {described(cls, name)}")
    return typed


def _typed(hint: Any, value: Any) -> Any:
    """Return a value as a type has it; None where it is none."""
    if hint not in (bool, int, float, str):
        if not isinstance(value, list | tuple):
            return None
        items = [_typed(hint.__args__[0], item) for item in value]
        return None if any(item is None for item in items) else tuple(items)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value if type(value) is hint or (hint is str and isinstance(value, str)) else None


_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "least": lambda number, limit: number >= limit,
    "most": lambda number, limit: number <= limit,
    "above": lambda number, limit: number > limit,
    "below": lambda number, limit: number < limit,
}


def _inside(value: Any, limits: Mapping[str, float]) -> bool:
    """Return whether a number is finite and within its limits; what is no number has none."""
    if isinstance(value, bool | str):
        return True
    finite = abs(value) <= MOST[type(value)]  # NaN is not
    return finite and all(_HOLDS[name](value, limit) for name, limit in limits.items())
