"""Settings as text: dotted names and values from YAML or flags, sizes in bytes, and what was
probably meant."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from blockwalk.plan.choices import CacheSettings, ContextSettings, MeshSettings, PipelineSettings
from blockwalk.plan.parsing import coerce, did_you_mean, flat, hints_of, placement_parts
from blockwalk.plan.placement import NOBODY, Codec, Placement
from blockwalk.plan.plan import Plan
from blockwalk.plan.ranges import CHOICES
from blockwalk.plan.table import RowName, Table


def override(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """Return ``plan`` with dotted settings changed: ``{"optimizer.learning_rate": 1e-4, "prefetch":
    2}``; nested mappings work too. A placement whose group is left out keeps that of the plan.

    Raises:
        ValueError: an unknown key (with the nearest known one) or a value of the wrong type.
    """
    settings = with_rows(settings, tables(), plan)
    changes: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    fields = {f.name for f in dataclasses.fields(plan)}
    for key, value in settings.items():
        head, _, part = key.partition(".")
        if head not in fields:
            raise ValueError(f"unknown setting {key!r}{did_you_mean(key, setting_names(plan))}")
        if part:
            nested.setdefault(head, {})[part] = value
        elif isinstance(value, Mapping):
            nested.setdefault(head, {}).update(value)
        else:
            change = coerce(key, value, hints_of(type(plan))[head])
            in_words = isinstance(change, Placement) and not isinstance(value, Placement)
            if in_words and len(placement_parts(value)) < 3:
                change = dataclasses.replace(change, group=getattr(plan, head).group)
            changes[head] = change
    for head, inner in nested.items():
        current = changes.get(head, getattr(plan, head))
        if not dataclasses.is_dataclass(current):
            raise ValueError(f"setting {head!r} has no parts; it was given {', '.join(inner)}")
        hints = hints_of(type(current))
        for key in (f"{head}.{name}" for name in inner if name not in hints):
            raise ValueError(f"unknown setting {key!r}{did_you_mean(key, setting_names(plan))}")
        typed = {k: coerce(f"{head}.{k}", v, hints[k]) for k, v in inner.items()}
        changes[head] = dataclasses.replace(current, **typed)  # type: ignore[type-var]
    return dataclasses.replace(plan, **changes)


@functools.cache
def tables() -> dict[str, Table[Any]]:
    """Return the tables of rows by the setting that names a row: ``loss``, ``frozen.codec``."""
    by_setting = {name: words for name, words in CHOICES.items() if isinstance(words, Table)}
    for name, hint in hints_of(Plan).items():
        parts = {name: hint}
        if hint is Placement:
            parts = {f"{name}.{part}": inner for part, inner in hints_of(hint).items()}
        by_setting |= {
            setting: inner.table
            for setting, inner in parts.items()
            if isinstance(inner, type) and issubclass(inner, RowName)
        }
    return by_setting


def own_names(tables_of: Mapping[str, Table[Any]]) -> dict[str, tuple[str, str]]:
    """Return the settings of rows' own by dotted name, such as ``loss.gamma``, each with the
    setting that names the row, and its own name."""
    return {
        f"{place_of(setting)}.{name}": (setting, name)
        for setting, table in tables_of.items()
        for name in table.own_settings()
    }


def place_of(setting: str) -> str:
    """Return the beginning of the names of a row's own settings: ``loss``; of ``optimizer.name``
    ``optimizer``."""
    return setting.removesuffix(".name")


def with_rows(
    settings: Mapping[str, Any], tables_of: Mapping[str, Table[Any]], plan: Plan
) -> dict[str, Any]:
    """Return settings by dotted name, with rows' own settings in the rows' names: ``{"loss":
    {"name": "focal", "gamma": 2}}`` is ``{"loss": "focal(gamma=2.0)"}``. A row that is not named is
    the plan's.

    Raises:
        ValueError: a row or one of its settings is unknown, or a value out of range.
    """
    dotted = flat(settings)
    names = own_names(tables_of)
    for setting, table in tables_of.items():
        values: dict[str, Any] = {}
        row = None
        for key in list(dotted):
            part = names[key][1] if names.get(key, ("",))[0] == setting else ""
            if key.startswith(f"{setting}.") and not part:
                part = key.removeprefix(f"{setting}.")
            if part == "name" and key != setting:
                row = dotted.pop(key)
            elif part:
                values[part] = dotted.pop(key)
        if row is None and not values:
            continue
        text = str(row or dotted.get(setting) or _current(setting, dotted, plan))
        place = place_of(setting)
        dotted[setting] = table.choice(text, _typed(table, text, place, values), place)
    return dotted


def _current(setting: str, settings: Mapping[str, Any], plan: Plan) -> Any:
    """Return the row that a plan names, or the placement among its settings."""
    field, _, part = setting.partition(".")
    value = getattr(plan, field, "")
    if isinstance(value, Placement) and field in settings:
        value = coerce(field, settings[field], Placement)
    return getattr(value, part) if part else value


def _typed(table: Table[Any], row: str, place: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a row in their types, where a flag gives them as text."""
    cls = table.settings_of(row)
    hints = {} if cls is None else hints_of(cls)
    return {
        name: coerce(f"{place}.{name}", value, hints[name])
        if isinstance(value, str) and name in hints
        else value
        for name, value in values.items()
    }


def on_one_rank(plan: Plan) -> Plan:
    """Return the plan of one process, which holds and computes everything, for a model that is read
    and not trained. Tiers and codecs stay."""
    placements: dict[str, Any] = {
        field.name: dataclasses.replace(placement, group=NOBODY)
        for field in dataclasses.fields(plan)
        if isinstance(placement := getattr(plan, field.name), Placement)
    }
    changes: dict[str, Any] = {
        "mesh": MeshSettings(),
        "context": ContextSettings(),
        "pipeline": PipelineSettings(),
        "cache": CacheSettings(),
    }
    return dataclasses.replace(plan, **placements, **changes)


def unnamed_codec(plan: Plan) -> Plan:
    """Return the plan of a run whose settings name no codec of frozen weights: a row that rounds
    them off the device leaves the codec to be chosen by the model and the machine."""
    if not plan.frozen.codec.encoded or plan.frozen.tier.facts.resident:
        return plan
    return override(plan, {"frozen.codec": str(Codec.AUTO)})


def setting_names(plan: Plan | None = None) -> list[str]:
    """Return every dotted name that :func:`override` takes, in the order of the dataclass, then
    those of rows' own settings."""
    names: list[str] = []
    values = plan or Plan()
    for f in dataclasses.fields(Plan):
        current = getattr(values, f.name)
        if dataclasses.is_dataclass(current):
            names += [f"{f.name}.{inner.name}" for inner in dataclasses.fields(current)]
        else:
            names.append(f.name)
    return [*names, *(name for name in own_names(tables()) if name not in names)]
