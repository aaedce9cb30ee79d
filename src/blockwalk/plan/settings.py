"""Settings as text: dotted names and values from YAML or flags, sizes in bytes, and what was
probably meant."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from blockwalk.plan.choices import CacheSettings, ContextSettings, MeshSettings, PipelineSettings
from blockwalk.plan.parsing import coerce, did_you_mean, hints_of, placement_parts
from blockwalk.plan.placement import NOBODY, Codec, Placement
from blockwalk.plan.plan import Plan


def override(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """Return ``plan`` with dotted settings changed: ``{"optimizer.learning_rate": 1e-4, "prefetch":
    2}``; nested mappings work too. A placement whose group is left out keeps that of the plan.

    Raises:
        ValueError: an unknown key (with the nearest known one) or a value of the wrong type.
    """
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
    """Return every dotted name that :func:`override` takes, in the order of the dataclass."""
    names: list[str] = []
    values = plan or Plan()
    for f in dataclasses.fields(Plan):
        current = getattr(values, f.name)
        if dataclasses.is_dataclass(current):
            names += [f"{f.name}.{inner.name}" for inner in dataclasses.fields(current)]
        else:
            names.append(f.name)
    return names
