"""Settings under the names of other tools: those that mean the same are taken, with a warning; the
others are refused with the line to write instead, which is tried before it is said."""

from __future__ import annotations

import dataclasses
import json
import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from blockwalk.plan import settings as plan_settings
from blockwalk.plan.foreign_names import BY_NAME, VALUES, find
from blockwalk.plan.foreign_rows import Foreign
from blockwalk.plan.foreign_values import Pair, is_off, same
from blockwalk.plan.parsing import placement_parts

WRITE = "Write: "
"""The words before the line of an error that can be pasted, which is the error's end."""


BESIDE = {"data.weights": "data.train", "together": "gradient_accumulation_steps"}
"""Settings that can only be read beside another, and which."""


class Note(UserWarning):
    """A remark on a setting that was read otherwise than it was written."""


SHOWN = 3
"""Problems of a file that an error says in full; of more it says the names."""


class ForeignSettings(ValueError):
    """Settings that are not taken as they stand: a line for each, or one line for all of a file's.

    Args:
        problems: an error for each.
        names: their names as they were written.
        path: the file that they are in; None where they are in none.
    """

    def __init__(self, problems: list[str], names: list[str], path: object = None) -> None:
        self.problems = problems
        self.names = names
        text = "\n".join(problems)
        if path is not None and len(problems) > 1:
            way_out = (
                f"blockwalk convert-config {shlex.quote(str(path))} writes a run's file with the"
                " names here"
            )
            text += f"\n{way_out}"
            if len(problems) > SHOWN:
                text = (
                    f"{path} has {len(problems)} settings that are not taken as they stand"
                    f" ({', '.join(names)}): {way_out}"
                )
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class Reader:
    """The means to tell whether a line can be read."""

    settings: Mapping[str, Any]
    """Every setting of the run by its name, theirs and ours."""
    names: frozenset[str]
    """Our names."""
    reads: Callable[[Mapping[str, Any]], bool]
    """A function that tries whether settings of our names can be read."""

    def tries(self, name: str, value: Any) -> bool:
        """Return whether a setting can be read beside the run's method; that of an adapter's
        folder, wherever it is."""
        if name == "lora.from":
            return isinstance(value, str) and value != ""
        method = self.settings.get("method", "auto")
        context = {"method": method} if method != "auto" and self.reads({"method": method}) else {}
        beside = BESIDE.get(name, "")
        if beside in self.settings:
            context[beside] = self.settings[beside]
        return self.reads({**context, name: value})


def translated(
    raw: list[Pair],
    overrides: list[Pair],
    names: Iterable[str],
    reads: Callable[[Mapping[str, Any]], bool],
    *,
    as_flags: bool = False,
) -> list[Pair]:
    """Return the settings of a file, then those that override them, under our names.

    Args:
        names: our names.
        reads: a function that tries whether settings of our names can be read.
        as_flags: errors write what overrides as flags.

    Raises:
        ForeignSettings: names that are not ours and mean something else, or nothing here; one
            setting under two names.
    """
    settings = {key: value for key, value in [*raw, *overrides] if value is not None}
    reader = Reader(settings, frozenset(names), reads)
    result: list[Pair] = []
    problems: list[tuple[str, str]] = []
    for pairs, flag in ((raw, False), (overrides, as_flags)):
        pairs = [pair for pair in pairs if not is_absent(*pair, reader.names)]
        spelling = {key: key for key, _ in pairs if key in reader.names}
        problems += _named(contradictions(pairs, reader.names, flag=flag))
        for key, value in grouped(pairs, reader.names):
            name, row, exact = row_of(key, reader.names)
            if row is None and name == key:
                problems += _named(value_problem(key, value, reader, flag=flag))
                result.append((key, value))
            elif row is not None and value is None:
                _note(f"{_as_text(key, flag=flag)} is left out, for it has no value")
            elif row is None or (
                exact and name in reader.names and row.same is not None and row.same(value)
            ):
                if name in spelling:
                    names_of_one = f"{spelling[name]} and {key} are both given"
                    problems.append((key, f"{names_of_one}, and mean the same; leave one out"))
                spelling[name] = key
                _note(
                    f"{_as_text(key, flag=flag)} is {_as_text(name, flag=flag)} here, and is"
                    " taken as that"
                )
                result.append(pair_of(row, value, reader) or (name, value))
            elif row.idle is not None and row.idle(value):
                _note(
                    f"{_as_text(key, value, flag=flag)} is left out, for it changes nothing here."
                    f" {row.sentence}"
                )
            else:
                problems.append((key, _name_problem(key, value, row, reader, flag=flag)))
    _refuse(problems)
    return result


def _refuse(problems: list[tuple[str, str]]) -> None:
    """Raise ForeignSettings where there are problems."""
    if problems:
        raise ForeignSettings([text for _, text in problems], [key for key, _ in problems])


def _named(problems: list[str]) -> list[tuple[str, str]]:
    """Return problems with the setting that each begins with."""
    return [(problem.split()[0].strip(":-"), problem) for problem in problems]


def contradictions(pairs: list[Pair], names: frozenset[str], *, flag: bool = False) -> list[str]:
    """Return an error for each setting that has two values: under one name twice, as a whole and in
    parts, or off beside settings of its own. A flag that is given again wins over the earlier."""
    problems: list[str] = []
    written: dict[str, tuple[str, Any, Any]] = {}
    for key, value in pairs:
        name = key.replace("-", "_")
        if value is None or not _is_ours(name, names):
            continue
        for part, part_value in _parts(name, value, names):
            other, other_value, earlier = written.get(part, (name, value, part_value))
            wins = flag and other == name
            if not wins and str(earlier) != str(part_value):
                problems.append(
                    f"{_as_text(other, other_value, flag=flag)} and"
                    f" {_as_text(name, value, flag=flag)} are both given, and contradict each other"
                    f" ({part}); leave one out"
                )
            written[part] = (name, value, part_value)
    return problems


def is_absent(key: str, value: Any, names: frozenset[str]) -> bool:
    """Return whether a setting of ours, or a group of them, has no value: it is as if it were
    absent. Names that other tools have too are left out with a note."""
    name = key.replace("-", "_")
    return value is None and (name in names or (find(key) is None and _is_ours(name, names)))


def _parts(name: str, value: Any, names: frozenset[str]) -> list[Pair]:
    """Return the settings that a name and its value decide: the parts of a placement, and whether a
    section is on."""
    if f"{name}.tier" in names:
        parts = zip(("tier", "codec", "group"), placement_parts(value), strict=False)
        return [(f"{name}.{part}", text) for part, text in parts]
    section = name.partition(".")[0]
    if section in names and section != name and f"{section}.tier" not in names:
        return [(section, True), (name, value)]
    if any(other.startswith(f"{name}.") for other in names):
        return [(name, not is_off(value))]
    return [(name, value)]


def _is_ours(name: str, names: frozenset[str]) -> bool:
    """Return whether a name is that of a setting of ours, or of a group of them."""
    return name in names or any(other.startswith(f"{name}.") for other in names)


def grouped(pairs: list[Pair], names: frozenset[str]) -> list[Pair]:
    """Return the settings, with mappings of other tools whole again where the table knows them and
    not their parts."""
    sections = {name.partition(".")[0] for name in names}
    result: dict[str, Any] = {}
    for key, value in pairs:
        section, _, field = key.partition(".")
        is_foreign = section not in sections and section in BY_NAME
        if field and is_foreign and row_of(key, names)[:2] == (key, None):
            result.setdefault(section, {})[field] = value
        else:
            result.pop(key, None)  # the later one, in its place
            result[key] = value
    return list(result.items())


def row_of(key: str, names: frozenset[str]) -> tuple[str, Foreign | None, bool]:
    """Return our name for a name; the row that says so, None where the name is ours but for its
    dashes, or unknown; and whether the name may be taken as it is."""
    name = key.replace("-", "_")
    section, _, field = key.partition(".")
    if f"{section}.{field.partition('.')[0]}" in names and "." in field:
        return key, None, True  # a part of a mapping, whose names are not ours
    if key in names or name in names:
        return (key if key in names else name), None, True
    if (match := find(key)) is not None:
        return match.row.ours, match.row, match.exact
    field = name.partition(".")[2]
    if field in names:
        return field, Foreign(field, "The setting stands by itself here.", {}, same(field)), False
    return key, None, True


def _name_problem(key: str, value: Any, row: Foreign, reader: Reader, *, flag: bool) -> str:
    """Return the error for a name that may not be taken as it is."""
    text = f"unknown setting {key!r}: {row.sentence}"
    if not row.ours:
        written = _of_a_row(key, value, flag=flag)
        return f"{text} {WRITE}{written}" if written else f"{text} Leave it out."
    if row.ours not in reader.names:
        return f"{text} This version has no such setting; leave it out."
    return f"{text} {_line(row, value, reader, flag=flag) or f'The setting is {row.ours}.'}"


ENDINGS = ("alpha", "coef", "epsilon", "factor", "rate", "weight")
"""Words behind the name of a loss or rule in other tools' settings of its number."""


def _of_a_row(key: str, value: Any, *, flag: bool) -> str:
    """Return the line that names the row which another tool's setting is called after, with its
    value where the row has one setting of its own; empty where there is no such row."""
    name = key.rpartition(".")[2].replace("-", "_").lower()
    for setting, table in plan_settings.tables().items():
        for row in table:
            if name not in (row, *(f"{row}_{ending}" for ending in ENDINGS)):
                continue
            cls = table.settings_of(row)
            own = [] if cls is None else [field.name for field in dataclasses.fields(cls)]
            lines = [_as_text(setting, row, flag=flag)]
            if len(own) == 1:
                place = plan_settings.place_of(setting)
                lines.append(_as_text(f"{place}.{own[0]}", value, flag=flag))
            return (" " if flag else " and ").join(lines)
    return ""


def value_problem(key: str, value: Any, reader: Reader, *, flag: bool) -> list[str]:
    """Return the error for a value of another tool under a name of ours; none where the value is
    ours."""
    row, is_theirs = VALUES.get(key, (None, None))
    if (
        row is None
        or is_theirs is None
        or isinstance(value, Mapping | list)
        or not is_theirs(value)
    ):
        return []
    line = _line(row, value, reader, flag=flag)
    return [f"{key} is {value!r}: {row.sentence} {line}"] if line else []


def _line(row: Foreign, value: Any, reader: Reader, *, flag: bool) -> str:
    """Return the line to write for a value of theirs, or else for the row's example; empty where
    neither can be read here."""
    for foreign_value in (value, row.example):
        pair = pair_of(row, foreign_value, reader)
        if pair is not None and reader.tries(*pair):
            return WRITE + _as_text(*pair, flag=flag)
    return ""


def pair_of(row: Foreign | None, value: Any, reader: Reader) -> Pair | None:
    """Return the setting of ours and its value for a value of theirs; None where there is none, or
    theirs is of no such kind."""
    if row is None or row.line is None:
        return None
    try:
        return row.line(value, reader.settings)
    except (TypeError, ValueError, LookupError, ArithmeticError, SyntaxError):
        return None


def _as_text(name: str, *value: Any, flag: bool) -> str:
    """Return a setting as a line of YAML or as a flag; its name alone where there is no value."""
    if flag:
        texts = (text if isinstance(text, str) else _shown(text) for text in value)
        return " ".join([f"--{name}", *map(shlex.quote, texts)])
    return ": ".join([name, *map(_shown, value)])


def _shown(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...")
    return text if len(text.splitlines()) <= 1 else json.dumps(value)


def _note(text: str) -> None:
    warnings.warn(text, Note, stacklevel=4)
