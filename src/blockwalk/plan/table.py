"""Open tables: the rows that a setting may name, and the names as values.

A row is registered under a name, here or by whoever uses Blockwalk, and holds every fact that a
decision needs. Parsing, ``--help``, messages, the planner and the JSON schema read the table.

A row with settings of its own is a function of their value, which returns the row. Whatever looks
up ``focal(gamma=2.0)`` gets the row that the function returns for it."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self, TypeVar, overload

from blockwalk.plan import row_settings
from blockwalk.plan.row_settings import bare, complete, joined, taken_apart

Row = TypeVar("Row")

LOOSE = 0.6
"""The least similarity (difflib's ratio) at which a name is guessed: the lists are short, and
printed."""


class UnknownName(KeyError, ValueError):
    """A name that a table has no row of; the message names the setting and the names there are."""

    def __str__(self) -> str:
        return str(self.args[0])


class Table(Mapping[str, Row]):
    """Rows by name, in the order in which they were registered.

    Args:
        setting: the setting that names a row, for messages.
        rows: the rows to begin with.
    """

    def __init__(self, setting: str, rows: Mapping[str, Row] | None = None) -> None:
        self.setting = setting
        self._rows: dict[str, Row] = dict(rows or {})
        self._made: dict[str, Callable[[Any], Row]] = {}
        self._settings: dict[str, type] = {}
        self._by_text: dict[str, Row] = {}

    @property
    def place(self) -> str:
        """The beginning of the names of rows' own settings: ``loss`` of ``loss.gamma``,
        ``optimizer`` of ``optimizer.rho`` where ``optimizer.name`` names the row."""
        return self.setting.removesuffix(".name")

    @overload
    def register(self, name: str, row: Row) -> Row: ...
    @overload
    def register(self, name: str, row: Callable[[Any], Row], settings: type) -> Row: ...
    def register(self, name: str, row: Any, settings: type | None = None) -> Row:
        """Add a row, and return it.

        Args:
            row: the row; with settings the function that returns it for their value.
            settings: the frozen dataclass of the row's own settings; see
                :mod:`blockwalk.plan.row_settings`.

        Raises:
            ValueError: the name is taken, or cannot be one.
        """
        if name in self._rows:
            raise ValueError(f"{self.setting} has a row {name!r} already; choose another name")
        if "(" in name:
            raise ValueError(f"{self.setting}: {name!r} has a bracket, and settings begin with one")
        if settings is None:
            self._rows[str(name)] = row
            return self._rows[name]
        row_settings.require_settings(settings)
        self._rows[str(name)] = row(settings())  # as it is described, with every default
        self._made[name] = functools.cache(row)
        self._settings[name] = settings
        return self._rows[name]

    def unregister(self, name: str) -> None:
        """Take a row out again."""
        del self._rows[name]
        self._made.pop(name, None)
        self._settings.pop(name, None)
        self._by_text.clear()

    def settings_of(self, name: str) -> type | None:
        """Return the class of a row's own settings; None where it has none."""
        return self._settings.get(bare(name))

    def own_settings(self) -> dict[str, dict[str, type]]:
        """Return the classes of rows' own settings, by the name of a setting and of the rows that
        have it."""
        owners: dict[str, dict[str, type]] = {}
        for row, cls in self._settings.items():
            for field in dataclasses.fields(cls):
                owners.setdefault(field.name, {})[row] = cls
        return owners

    def choice(
        self, text: str, values: Mapping[str, Any] | None = None, place: str | None = None
    ) -> str:
        """Return a row's name with every setting of its own, those that are not given at their
        defaults; of a row without settings, the name.

        Args:
            text: a name, or one with settings: ``focal(gamma=2.0)``.
            values: settings that win over those of the text.
            place: the beginning of the settings' names, if it is not the table's.

        Raises:
            ValueError: a setting is unknown, missing or out of range.
        """
        if not values and text in self._rows and text not in self._settings:
            return text
        place = place or self.place
        name, written = taken_apart(text)
        merged = {**written, **(values or {})}
        if name not in self._rows:
            raise UnknownName(self.unknown(name))
        cls = self._settings.get(name)
        if cls is None:
            for key, value in merged.items():
                message = row_settings.unknown(f"{place}.{key}", value, name, [])
                owners = self.own_settings().get(key, {})
                raise ValueError(f"{message}; {spoken(owners)} has it" if owners else message)
            return name
        checked = complete(cls, name, place, merged)
        return joined(name, {f.name: getattr(checked, f.name) for f in dataclasses.fields(cls)})

    def __getitem__(self, name: str) -> Row:
        if name in self._by_text:
            return self._by_text[name]
        row, values = taken_apart(name)
        if row in self._made and values:
            settings = complete(self._settings[row], row, self.place, values)
            self._by_text[name] = self._made[row](settings)
            return self._by_text[name]
        try:
            return self._rows[name]
        except KeyError:
            raise UnknownName(self.unknown(name)) from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bare(name) in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def choices(self) -> str:
        """The names as one text, for messages."""
        return ", ".join(self._rows)

    @property
    def help(self) -> str:
        """The names as a sentence, and what each row says of itself."""
        said = {name: getattr(row, "help", "") for name, row in self._rows.items()}
        explained = (f"{name}: {text}" for name, text in said.items() if text)
        return ". ".join([spoken(self._rows), *explained])

    def nearest(self, name: object) -> str:
        """Return ``"; did you mean 'x'?"`` for the name that is most alike, or nothing."""
        matches = difflib.get_close_matches(str(name), self._rows, n=1, cutoff=LOOSE)
        return f"; did you mean {matches[0]!r}?" if matches else ""

    def unknown(self, name: object) -> str:
        """Return the message about a name that no row has."""
        hint = self.nearest(name) or "; --import MODULE brings rows of your own"
        return f"{self.setting} is {name!r}; it must be one of {self.choices}{hint}"


Reference = Callable[..., Any] | str
"""A function, or the ``"module:name"`` of one that is imported when it is used: a plan loads no
torch."""


def resolved(reference: Reference) -> Any:
    """Return what a row refers to: itself, or the object that ``"module:name"`` names. The module
    is imported now, so that a row may name what a plan never loads."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def spoken(names: Iterable[str], joint: str = "or") -> str:
    """Return names as a text: ``a, b or c``."""
    *leading, final = names
    return f"{', '.join(leading)} {joint} {final}" if leading else str(final)


class _Members(type):
    """The class side of :class:`RowName`: members as constants, and one by one."""

    table: Table[Any]

    def __iter__(cls: type[Name]) -> Iterator[Name]:  # type: ignore[misc]
        return (cls(name) for name in cls.table)

    def __getattr__(cls: type[Name], constant: str) -> Name:  # type: ignore[misc]
        if constant.isupper() and not constant.startswith("_"):
            for name in (constant, constant.lower(), constant.lower().replace("_", "-")):
                if name in cls.table:
                    member = cls(name)
                    setattr(cls, constant, member)
                    return member
        raise AttributeError(f"{cls.__name__} has no row {constant!r}")


class RowName(str, metaclass=_Members):
    """The name of a row as the value of a setting: a text that has the row at hand.

    A subclass says its ``table``. ``Codec("int4a")`` and ``Codec.INT4A`` are the same object, and
    ``Codec`` is iterated over in the table's order.

    Raises:
        ValueError: the table has no row of this name.
    """

    table: ClassVar[Table[Any]]
    facts: Any
    """The row."""
    _members: ClassVar[dict[str, RowName]]

    def __init_subclass__(cls) -> None:
        cls._members = {}

    def __new__(cls, name: str) -> Self:
        if name not in cls.table:
            raise ValueError(cls.table.unknown(name))
        name = cls.table.choice(name)
        facts = cls.table[name]
        member = cls._members.get(name)
        if member is None or member.facts is not facts:
            member = str.__new__(cls, name)
            member.facts = facts
            cls._members[str(name)] = member
        return member  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)


Name = TypeVar("Name", bound=RowName)
