"""A JSON Schema of a run's YAML file, for editors: values, range, default and sentence of each
setting, from the tables that parsing reads. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from blockwalk.cli import settings_help
from blockwalk.plan import ranges, row_settings, run_config
from blockwalk.plan.codecs import CODECS
from blockwalk.plan.data_source import Source
from blockwalk.plan.parsing import OPEN, hints_of, names_words, placement_pattern, words_in
from blockwalk.plan.placement import Placement
from blockwalk.plan.tiers import TIERS
from blockwalk.train import config

FILE = "blockwalk.schema.json"
"""The name of a schema beside a run's file, which the first line of a new one then points to."""

Schema = dict[str, Any]
"""A schema, or a part of one, as JSON has it."""

_TEXT: Schema = {"type": "string"}
_TEXTS: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}
_MAPPING: Schema = {"type": "object"}
_SWITCH: Schema = {"enum": [True, False, "yes", "no", "on", "off"]}
_SIZE: Schema = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": r"^\s*[0-9.]+\s*([kKmMgGtT]?[iI]?[bB])?\s*$"},
        {"type": "null"},
    ]
}
_SOURCES: Schema = {
    "anyOf": [_TEXT, _MAPPING, {"type": "array", "items": {"anyOf": [_TEXT, _MAPPING]}}]
}


def _codecs() -> Schema:
    """Return the values of a codec, of those that there are."""
    return _of_rows("frozen.codec", {"enum": [*CODECS]})


def _place() -> Schema:
    """Return the values of a placement, of the tiers and codecs that there are."""
    parts: Schema = {
        "tier": {"enum": [*TIERS]},
        "codec": _codecs(),
        "group": _TEXT,
    }
    return {
        "anyOf": [
            {"type": "string", "pattern": rf"^\s*{placement_pattern()}\s*$"},
            {"type": "object", "properties": parts, "additionalProperties": False},
            {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 3},
        ]
    }


def schema() -> Schema:
    """Return the schema of a run's file."""
    names = [
        name for _, group, _ in settings_help.GROUPS for name in settings_help.settings_of(group)
    ]
    properties: Schema = {}
    defaults = settings_help.defaults()
    tables = config.row_tables()
    for name in dict.fromkeys(names):
        if name.rpartition(".")[0] in tables:
            continue  # it stands among the values of the setting that names its row
        _, sentence = settings_help.described(name)
        part: Schema = {**_values(name), "description": sentence}
        if defaults.get(name) not in ("", None, [], {}):
            part["default"] = defaults[name]
        section, _, field = name.rpartition(".")
        if section:
            _section(properties, section)["properties"][field] = part
        else:
            properties.setdefault(name, part)
    sections = [name for name, part in properties.items() if "properties" in part]
    lora = properties["lora"]
    properties["lora"] = {
        "description": settings_help.described("lora")[1],
        "anyOf": [_SWITCH, lora],
    }
    dotted = [*sections, *config.PLACEMENTS, *tables]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A run of Blockwalk",
        "type": "object",
        "properties": properties,
        "patternProperties": {rf"^({'|'.join(map(re.escape, dotted))})\.": {}},
        "additionalProperties": False,
    }


def _section(properties: Schema, name: str) -> Schema:
    """Return the part of a section, which is made where there is none."""
    if "properties" not in properties.get(name, {}):
        opened = [key.removeprefix(f"{name}.") for key in OPEN if key.startswith(f"{name}.")]
        properties[name] = {"type": "object", "properties": {}, "additionalProperties": False}
        if opened:
            properties[name]["patternProperties"] = {rf"^({'|'.join(opened)})\.": {}}
    part: Schema = properties[name]
    return part


def _of_rows(name: str, words: Schema) -> Schema:
    """Return the values of a setting that names a row: a name, and for rows with settings of their
    own a name with these."""
    table = config.row_tables()[name]
    row_settings = table.own_settings()
    if not row_settings:
        return words
    rows = [row for row in table if table.settings_of(row) is not None]
    if name.endswith(".name"):  # the settings stand beside the name
        return {"anyOf": [words, {"type": "string", "pattern": _with_brackets(rows)}]}
    parts = {
        field: {
            **_own_values(next(iter(owners.values())), field),
            "description": settings_help.described(f"{name}.{field}")[1],
        }
        for field, owners in row_settings.items()
    }
    row = {"enum": [*table]}
    properties = {"name": row, **parts}
    mapping = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"anyOf": [words, mapping, {"type": "string", "pattern": _with_brackets(rows)}]}


def _with_brackets(rows: Sequence[str]) -> str:
    return rf"^({'|'.join(map(re.escape, rows))})\("


def _own_values(cls: type, field: str) -> Schema:
    """Return the values of a setting that a row has of its own."""
    hint = hints_of(cls)[field]
    if words := row_settings.words_of(cls, field):
        return {"enum": [*words]}
    if hint not in (int, float):
        return dict(_BY_TYPE.get(hint, {"anyOf": [{"type": "array"}, _TEXT]}))
    limits = row_settings.limits_of(cls, field)
    keys = {
        "least": "minimum",
        "most": "maximum",
        "above": "exclusiveMinimum",
        "below": "exclusiveMaximum",
    }
    ranges_of = {keys[limit]: number for limit, number in limits.items()}
    return {"type": "integer" if hint is int else "number", **ranges_of}


def _values(name: str) -> Schema:
    """Return the values that a setting takes."""
    if owners := config.owners_of(name):
        return _own_values(next(iter(owners.values())), name.rpartition(".")[2])
    words = _of_field(name)
    return _of_rows(name, words) if name in config.row_tables() else words


def _of_field(name: str) -> Schema:
    """Return the values of a setting that is a field, by its type."""
    hint: Any = bool if name == "lora" else settings_help.hint_of(name)
    if names_words(hint):
        return {"enum": words_in(hint)}
    if choices := settings_help.choices_of(name):
        return {"enum": [*choices, *_SHORT.get(name, ())]}
    if hint is Placement:
        return _place()
    if hint in (int, float, int | float):
        return _number(name, whole=hint is int)
    if hint == tuple[float, float]:
        numbers = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
        return {"anyOf": [numbers, {"type": "string", "pattern": ","}]}
    if hint in (tuple[float, ...], tuple[int, ...]):
        number = {"type": "number" if hint == tuple[float, ...] else "integer"}
        return {"anyOf": [{"type": "array", "items": number}, _TEXT, number]}
    return dict(_BY_TYPE[hint])


_SHORT = {"compute_dtype": ("fp32", "bf16", "fp16")}
"""Short words beside those that a setting is kept as."""

_BY_TYPE: dict[Any, Schema] = {
    str: _TEXT,
    bool: _SWITCH,
    int | None: _SIZE,
    int | str: {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    tuple[str, ...]: _TEXTS,
    str | tuple[str, ...]: _TEXTS,
    str | tuple[str | Source, ...]: _SOURCES,
    Sequence[str]: _TEXTS,
    Mapping[str, Any]: _MAPPING,
}
"""Values by the type of a field, as far as a type says them."""


def _number(name: str, *, whole: bool) -> Schema:
    """Return the range of a setting that is a number."""
    maximum = ranges.SMALLER.get(name, row_settings.MOST[int if whole else float])
    minimum = {**ranges.LEAST, **run_config.LEAST}.get(name, -maximum)
    return {"type": "integer" if whole else "number", "maximum": maximum, "minimum": minimum}
