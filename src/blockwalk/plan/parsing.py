"""Settings as text: values from YAML or flags by their types, sizes in bytes, and what was probably
meant."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import os
import re
import string
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import StrEnum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from blockwalk.plan import data_source
from blockwalk.plan.choices import Adapters, LoraSettings, PrefixSettings
from blockwalk.plan.codecs import CODECS
from blockwalk.plan.data_source import Source
from blockwalk.plan.foreign_names import SETTINGS, find
from blockwalk.plan.placement import NOBODY, NODE, WORLD, Codec, Placement, Tier
from blockwalk.plan.row_settings import RowChoice
from blockwalk.plan.table import RowName
from blockwalk.plan.tiers import TIERS


class Refused(ValueError):
    """A value that its setting does not take, with a message of its own."""


def adapter_settings(settings: Mapping[str, Any]) -> Adapters:
    """Return the adapters that a mapping describes: ``{"rank": 8, "options": {"use_rslora":
    True}}``, or a prefix: ``{"num_virtual_tokens": 5}``.

    Raises:
        ValueError: an unknown name, or a value that makes no sense.
    """
    is_prefix = "num_virtual_tokens" in settings
    cls, name = (PrefixSettings, "prefix") if is_prefix else (LoraSettings, "lora")
    names = [f"{name}.{setting_of(f.name)}" for f in dataclasses.fields(cls)]
    dotted = {f"{name}.{key}": value for key, value in settings.items()}
    for key in dotted:
        if key not in names:
            raise ValueError(f"unknown setting {key!r}{did_you_mean(key, names)}")
    adapters: Adapters = section(cls, name, dotted)
    return adapters


WHOLE = ("data.train", "data.eval", "data.columns")
"""Settings that may be given as a mapping, which is one value."""
OPEN = ("lora.options", "data.chat_template_arguments")
"""Settings whose parts have names that are not ours: those of a library, or of a template."""


def is_open(key: str) -> bool:
    """Return whether a dotted name is a part of one of :data:`OPEN`."""
    return key.startswith(tuple(f"{name}." for name in OPEN))


def setting_of(field: str) -> str:
    """Return the name of a field as a setting: a word of Python's, such as ``from``, has a line
    behind it as a field."""
    return field.removesuffix("_")


def section(cls: type, name: str, settings: dict[str, Any]) -> Any:
    """Take the settings of one section out of ``settings`` and build its value."""
    hints = {setting_of(name): hint for name, hint in hints_of(cls).items()}
    fields: dict[str, Any] = {}
    for key in [k for k in settings if k.startswith(f"{name}.")]:
        value = settings.pop(key)
        short = key.removeprefix(f"{name}.")
        field, _, option = short.partition(".")
        if option and f"{name}.{field}" in OPEN:
            # as a flag it is read as YAML, for its type is not ours to know
            typed = _as_yaml(key, value) if isinstance(value, str) else value
            fields[field] = {**fields.get(field, {}), option: typed}
        else:
            fields[short] = coerce(key, value, hints[short])
    names = {setting_of(field.name): field.name for field in dataclasses.fields(cls)}
    return cls(**{names[setting]: value for setting, value in fields.items()})


def _as_yaml(key: str, text: str) -> Any:
    """Return a text as YAML.

    Raises:
        ValueError: it is none.
    """
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError:
        raise ValueError(
            f"{key} is {text!r}, which is not valid YAML; put quotes around it"
        ) from None


def plain_values(value: Any) -> Any:
    """Return dataclasses, enumerations and tuples as the types that YAML has."""
    if isinstance(value, Placement):
        rows = {"tier": str(value.tier), "codec": str(value.codec)}
        parts = {name: RowChoice(row) for name, row in rows.items() if "(" in row}
        if not parts:
            return str(value)
        return {**rows, "group": value.group} | {n: plain_values(row) for n, row in parts.items()}
    if isinstance(value, Source):
        return data_source.plain(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {
            setting_of(f.name): plain_values(getattr(value, f.name))
            for f in dataclasses.fields(value)
        }
        row = values.get("name")
        if isinstance(row, dict) and values.keys() & row.keys() == {"name"}:
            return {**values, **row}  # beside the row's name, as in a section of its own
        return values
    if isinstance(value, RowChoice):
        return {"name": value.name, **plain_values(value.settings)}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list | tuple):
        return [plain_values(v) for v in value]
    if isinstance(value, Mapping):
        return {k: plain_values(v) for k, v in value.items()}
    return value


def names_words(hint: Any) -> bool:
    """Return whether a type is that of a few words: an enumeration, or the names of a table."""
    return isinstance(hint, type) and issubclass(hint, StrEnum | RowName)


def words_in(hint: Any) -> list[str]:
    """Return the words of such a type: of a table the names of its rows."""
    return [str(word) for word in getattr(hint, "table", hint)]


hints_of: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)
"""The types of a dataclass's fields, by name."""


def from_plain(hint: Any, value: Any) -> Any:
    """Return the value of a type that JSON holds taken apart: a dataclass of such values, an
    enumeration, a tuple, one of these where it may be None; others as they are.

    Raises:
        TypeError, LookupError, AttributeError, ValueError: it is none.
    """
    if isinstance(hint, UnionType):
        if value is None:
            return None
        hint, _ = get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = hints_of(hint)
        fields = {name: from_plain(hints[name], part) for name, part in value.items()}
        return hint(**fields)  # type: ignore[operator]
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        return tuple(from_plain(kind, part) for kind, part in zip(kinds, value, strict=True))
    return hint(value) if names_words(hint) else value


def flat(values: Mapping[str, Any], separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their joined names; a mapping that is empty is a
    value."""
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flattened |= flat(value, separator, f"{prefix}{name}{separator}")
        else:
            flattened[f"{prefix}{name}"] = value
    return flattened


class NoAliases(yaml.SafeLoader):
    """YAML's plain values without its aliases: a file of a kilobyte can name a billion values with
    them."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not read", None)
        return super().compose_node(parent, index)


class Loader(NoAliases):
    """YAML 1.2's plain scalars: ``1e-4`` is a number, ``no`` and ``off`` are words; a key given
    twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return the patterns of plain scalars, by the first character."""
    number = r"[0-9]+[eE][-+]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
    table = (
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
        (
            "float",
            rf"[-+]?({number}|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
            list("-+.0123456789"),
        ),
    )
    resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, characters in table:
        resolver = (f"tag:yaml.org,2002:{tag}", re.compile(rf"^(?:{pattern})$"))
        for character in characters:
            resolvers.setdefault(character, []).append(resolver)
    return resolvers


Loader.yaml_implicit_resolvers = _resolvers()


NEAR = 0.84
"""The least similarity (difflib's ratio) at which a setting is guessed by spelling. 0.6 leads 31 of
108 names of other tools to a wrong setting, 0.8 two, this none; and one wrong letter in a name of
ours is still found 96 times of 100."""


def did_you_mean(key: str, known: list[str], cutoff: float = NEAR) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name that does what ``key`` does in another
    tool, or for the nearest one; or nothing."""
    match = find(key)
    if match is not None and not SETTINGS.isdisjoint(known):
        return f"; did you mean {match.row.ours!r}?" if match.row.ours in known else ""
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    matches = difflib.get_close_matches(key, known, n=1, cutoff=cutoff)
    if not matches and "." not in key:  # the section is missing
        near_leaves = difflib.get_close_matches(key, leaves, n=1, cutoff=cutoff)
        matches = [leaves[leaf] for leaf in near_leaves]
    return f"; did you mean {matches[0]!r}?" if matches else ""


def parse_bytes(text: str | int) -> int:
    """Return ``"18GB"``, ``"512MiB"`` or a number, in bytes (GB = 10⁹, GiB = 2³⁰)."""
    if isinstance(text, int):
        return text
    units = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "": 1}
    stripped = text.strip().lower()
    number = stripped.rstrip("bikmgt ")
    unit = stripped[len(number) :].strip()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError):
        raise ValueError(
            f"{text!r} is no size; write it like 18GB, 512MiB or a number of bytes"
        ) from None


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of ``host:port``; an IPv6 address may stand in brackets, as in
    ``[::1]:29600``.

    Raises:
        ValueError: it has no host, or no port from 1 to 65535.
    """
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not (port.isascii() and port.isdigit() and 1 <= int(port[:9]) <= 65535):
        raise ValueError(
            f"{address!r}: it must be an address, such as 127.0.0.1:29600 or [::1]:29600, with a"
            " port from 1 to 65535"
        )
    return host, int(port)


def coerce(key: str, value: Any, hint: Any) -> Any:
    """Return ``value`` as the type of the setting ``key``: flags give text; YAML numbers, words,
    lists and mappings.

    Raises:
        ValueError: it is none; the message says what the setting takes.
    """
    reader: Callable[[Any], Any]
    if names_words(hint):
        form = f"one of {', '.join(words_in(hint))}"
        reader = hint
    elif hint not in READERS:
        raise ValueError(f"{key} takes a group of settings, such as {key}.name, not {value!r}")
    else:
        _, form, reader = READERS[hint]
    try:
        return reader(value)
    except Refused:
        raise
    except (TypeError, ValueError, OverflowError):
        names = {"tiers": TIERS.choices, "codecs": CODECS.choices}
        raise ValueError(f"{key} is {value!r}; it takes {filled(form, names)}") from None


def filled(sentence: str, texts: Mapping[str, str]) -> str:
    """Return a sentence with texts in place of their names in braces; other braces stay."""
    for name, text in texts.items():
        sentence = sentence.replace(f"{{{name}}}", text)
    return sentence


def _text(value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise ValueError
    return value


def _boolean(value: Any) -> bool:
    word = str(value).lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError
    return word in _TRUE


def _integer(value: Any) -> int:
    """Return a whole number; ``1e3`` is one too."""
    with contextlib.suppress(ValueError):
        return int(_text(value))
    if not _number(value).is_integer():
        raise ValueError
    return int(value) if isinstance(value, int) else int(float(value))


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _steps(value: Any) -> int | float:
    """Return a number of steps, or a share of them; a whole number is an int."""
    number = _number(value)
    return int(number) if number.is_integer() else number


def _count(value: Any) -> int | str:
    if value is False:  # YAML's off
        return "off"
    if isinstance(value, str) and not value.strip().isdigit():
        return value
    return _integer(value)


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping):  # data.columns
        try:
            return tuple(map(_text, data_source.columns_of(value)))
        except TypeError:
            shown = ", ".join(map(str, value))
            raise Refused(
                f"data.columns is {{{shown}}}, which has a field without a column; write"
                " [prompt=question, completion=answer], or {prompt: question} with a space behind"
                " the colon"
            ) from None
    if isinstance(value, str):
        return tuple(text.strip() for text in value.split(","))
    return tuple(map(_text, value))


def _pattern_or_texts(value: Any) -> str | tuple[str, ...]:
    """Return names with commas between them as a list, as in every other setting; a pattern stays
    one text."""
    if isinstance(value, os.PathLike):
        return str(_text(value))
    several = not isinstance(value, str) or re.fullmatch(r"[\w.-]+(\s*,\s*[\w.-]+)+", value)
    return _texts(value) if several else str(value)


def _sources(value: Any) -> str | tuple[str | Source, ...]:
    """Return a source, or several; each a text, or a mapping of the fields of :class:`Source`."""
    if isinstance(value, str | os.PathLike):
        return _pattern_or_texts(value)
    listed = [value] if isinstance(value, Mapping) else value
    return tuple(
        _source(source) if isinstance(source, Mapping) else _text(source) for source in listed
    )


def _source(settings: Mapping[str, Any]) -> Source:
    """Build a source of its settings.

    Raises:
        Refused: one of them is unknown, or of the wrong type.
    """
    hints = hints_of(Source)
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if value is None and name in hints:
            continue  # as if it were absent
        key = f"data.train.{name}"
        if name not in hints:
            raise Refused(
                f"a source in data.train or data.eval has {name!r}, which it cannot"
                f" set{did_you_mean(str(name), list(hints))};"
                f" it takes {', '.join(hints)}"
            )
        if name == "prompt":
            values[name] = _prompts(value)
        elif name == "weight":
            values[name] = coerce(key, value, float)
        else:
            values[name] = coerce(key, value, hints[name])
    if "path" not in values:
        raise Refused(
            f"a source in data.train or data.eval has {', '.join(map(str, settings))} and no"
            " path: give path, a file or a hub"
            " name"
        )
    return Source(**values)


def _prompts(value: Any) -> tuple[str, ...]:
    """Read prompts: a text with commas in it is one prompt; a list is several."""
    return (value,) if isinstance(value, str) and value else tuple(map(_text, value))


def fields_of(text: str, setting: str) -> list[str]:
    """Return names in braces, in order.

    Raises:
        ValueError: braces that do not close, or with more in them than a name.
    """
    try:
        parts = list(string.Formatter().parse(text))
        for _, name, form, conversion in parts:
            if form or conversion:
                raise ValueError(
                    f"{{{name}}} takes a field's name alone, without what follows it (! or :)"
                )
        return [name for _, name, _, _ in parts if name is not None]
    except ValueError as error:
        raise ValueError(f"{setting} {text!r}: {error}") from None


def _numbers(value: Any) -> tuple[float, ...]:
    return tuple(map(_number, value.split(",") if isinstance(value, str) else value))


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(map(_integer, value.split(",") if isinstance(value, str) else value))


def _pair(value: Any) -> tuple[float, float]:
    beta1, beta2 = _numbers(value)
    return beta1, beta2


def _size(value: Any) -> int | None:
    return None if value in (None, "") else parse_bytes(value)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError
    return dict(value)


def _placement(value: Any) -> Placement:
    if isinstance(value, Placement):
        return value
    parts = placement_parts(value)
    tier, codec, group = parts + [Codec.RAW, NOBODY][len(parts) - 1 :]
    return Placement(Tier(tier), Codec(codec), _text(group))


SETTINGS_PATTERN = r"(?:\((?:[^()]|\([^()]*\))*\))?"
"""The settings behind a row's name."""


def placement_pattern() -> str:
    """Return the regular expression of a placement as a text, of the tiers and codecs that there
    are."""
    tiers, codecs = (
        "|".join(
            re.escape(name) + (SETTINGS_PATTERN if table.settings_of(name) else "")
            for name in table
        )
        for table in (TIERS, CODECS)
    )
    return rf"({tiers})(?:\s*[x×]\s*({codecs})(?:\s*[x×]\s*([^×]+))?)?"


def placement_parts(value: Any) -> list[Any]:
    """Return the tier, codec and group of a placement, as far as it names them. A × or an x divides
    them; an x inside a name, as in mxfp4 or a group called box, does not."""
    if isinstance(value, list):
        return value
    match = re.fullmatch(placement_pattern(), str(value).strip())
    return [part for part in match.groups() if part is not None] if match else [value]


_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_PLACE = (
    f"tier × codec × group: {{tiers}}; {{codecs}}; {NOBODY}, {NODE}, {WORLD} or one of mesh.groups"
)
READERS: dict[Any, tuple[str, str, Callable[[Any], Any]]] = {
    str: ("TEXT", "text (put quotes around it)", _text),
    bool: ("true|false", "true or false", _boolean),
    int: ("N", "a whole number", _integer),
    float: ("X", "a number", _number),
    int | float: ("N|SHARE", "a number of steps, or a share of them below 1, such as 0.03", _steps),
    int | str: ("N|WORD", "a whole number, or a word such as auto", _count),
    int | None: ("SIZE", "a size, such as 18GB, 512MiB or a number of bytes", _size),
    tuple[float, float]: ("X,X", "two numbers, such as [0.9, 0.95]", _pair),
    tuple[int, ...]: ("N,...", "a list of whole numbers, such as [5, 6]", _integers),
    tuple[float, ...]: ("X,...", "a list of numbers, such as [0.7, 0.3]", _numbers),
    tuple[str, ...]: ("TEXT,...", "a list of texts, such as [yes, no]", _texts),
    str | tuple[str, ...]: ("TEXT,...", "a text, or a list of texts", _pattern_or_texts),
    str | tuple[str | Source, ...]: (
        "DATA,...",
        "a file or a hub name, a list of them, or of {path: ..., weight: ...}",
        _sources,
    ),
    Sequence[str]: (
        "TEXT",
        "a text with columns in braces, or a list of such texts (put quotes around each)",
        _prompts,
    ),
    Mapping[str, Any]: ("{NAME: VALUE}", "a mapping", _mapping),
    Placement: ("TIER×CODEC×GROUP", _PLACE, _placement),
}
"""Readers of settings by type: the values that a setting takes, in a word and in words, and the
function that reads it."""
