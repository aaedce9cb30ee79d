"""A JSON Schema of a run's YAML file, for editors: values, range, default and sentence of each
setting, from the tables that parsing reads. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockwalk.cli import settings_help
from blockwalk.plan import ranges, run_config
from blockwalk.plan.codecs import CODECS
from blockwalk.plan.data_source import Source
from blockwalk.plan.parsing import OPEN, names_words, placement_pattern
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


def _place() -> Schema:
    """Return the values of a placement, of the tiers and codecs that there are."""
    parts: Schema = {
        "tier": {"enum": [*TIERS]},
        "codec": {"enum": [*CODECS]},
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
    for name in names:
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
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A run of Blockwalk",
        "type": "object",
        "properties": properties,
        "patternProperties": {rf"^({'|'.join([*sections, *config.PLACEMENTS])})\.": {}},
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


def _values(name: str) -> Schema:
    """Return the values that a setting takes."""
    hint: Any = bool if name == "lora" else settings_help.hint_of(name)
    if names_words(hint):
        return {"enum": [str(word) for word in hint]}
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
    maximum = ranges.SMALLER.get(name, ranges.MOST[int if whole else float])
    minimum = {**ranges.LEAST, **run_config.LEAST}.get(name, -maximum)
    return {"type": "integer" if whole else "number", "maximum": maximum, "minimum": minimum}
