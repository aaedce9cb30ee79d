"""The settings that a resumed run changes, and those that it may not change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import RunConfig

SAME_WEIGHTS = (
    "; the same content, by a digest of its configuration and weights (of a block store, its index)"
)
FIXED = (
    *("model", "method", "seed", "batch_size", "lora", "prefix", "data"),
    *("objective", "reference"),
)
"""Settings without which the saved state means something else; any other may change when a run is
resumed, and what is evaluated (:data:`ONLY_EVALUATION`) too."""
ONLY_EVALUATION = (
    "data.eval",
    "data.shots",
    "data.task_part",
    "data.task_eval",
    "data.show_first",
    "data.appended",
)
"""The beginnings of names of settings that no training step reads."""
NEVER_COMPARED = ("resume_from_checkpoint", "output_dir", "overwrite_output_dir")
"""Settings that say where a run is, not what it computes."""
WORDS = ("data.template", "data.label_", "data.task")
"""The beginnings of names of settings that say which words are ranked, by ``zo.objective`` in
training too: the digest of the examples has the right words alone."""


def changed_settings(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    any_method: bool = False,
    same_model: bool = False,
    same_data: bool = False,
) -> list[str]:
    """Return the settings that a resumed run changes, as ``name: old → new``. Settings that the
    checkpoint does not know, for it is older, had their defaults.

    Args:
        any_method: the run goes on under any first-order method.
        same_model: the model's content is that of the checkpoint's run, whatever its name.
        same_data: the examples are those of the checkpoint's run, whatever the settings that they
            are made by.

    Raises:
        ValueError: one of :data:`FIXED` changes, and not in name alone.
    """
    words = WORDS if (now.get("zo") or {}).get("objective", "loss") != "loss" else ()
    changes = []
    for name, key, old, new in _differing(saved, now):
        note = ""
        if name == "model" and same_model:
            note = SAME_WEIGHTS
        elif name == "data" and same_data and not key.startswith(words):
            note = "; the same examples"
        is_free = key.startswith(ONLY_EVALUATION) or (any_method and name == "method")
        if name in FIXED and not note and not is_free:
            raise ValueError(
                f"the checkpoint was made with {key}: {old}, and the run has {new}; they must agree"
            )
        changes.append(f"{key}: {old} → {new}{note}")
    return changes


MOST_CAUSES = 3
"""The most lines about changed settings."""


def by_cause(changes: Sequence[str], now: Mapping[str, Any]) -> list[str]:
    """Return the changes of a resumed run in at most :data:`MOST_CAUSES` lines.

    Few changes have a line each. Of many the method comes first, with the settings that have its
    defaults; then the mesh of ranks; then the others.

    Args:
        changes: as :func:`changed_settings` returns them.
        now: the settings of the run.
    """
    if len(changes) <= MOST_CAUSES:
        return list(changes)
    texts = {change.partition(": ")[0]: change for change in changes}
    default = RunConfig(plan=method(now["method"])).to_mapping()
    of_plan = {field.name for field in fields(Plan)} - {"method", "mesh"}
    follow = []
    for name in texts if "method" in texts else ():
        section, _, part = name.partition(".")
        values = [mapping.get(section) for mapping in (now, default)]
        if part:
            values = [value.get(part) if isinstance(value, Mapping) else None for value in values]
        if section in of_plan and values[0] == values[1]:
            follow.append(name)
    remaining = [name for name in texts if name not in ("method", *follow)]
    of_mesh = [texts[name] for name in remaining if name.startswith("mesh.")]
    unrelated = [texts[name] for name in remaining if not name.startswith("mesh.")]
    of_method = texts.get("method", "")
    if of_method and follow:
        of_method += f", and with it {', '.join(follow)}"
    return list(filter(None, (of_method, ", ".join(of_mesh), ", ".join(unrelated))))


def _differing(
    saved: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield each setting that differs: its section's name, its own, the old value and the new."""
    default = RunConfig(lora=LoraSettings()).to_mapping()
    for name, new in now.items():
        if name in NEVER_COMPARED:
            continue
        old = saved.get(name, default.get(name))
        if isinstance(new, Mapping) and isinstance(old, Mapping):
            defaults = default.get(name)
            parts = defaults if isinstance(defaults, Mapping) else {}
            pairs = {
                f"{name}.{part}": (old.get(part, parts.get(part)), value)
                for part, value in new.items()
            }
        else:
            pairs = {name: (old, new)}
        for key, (old_value, new_value) in pairs.items():
            for setting, before, after in _of_row(key, old_value, new_value):
                if before != after:
                    yield name, setting, before, after


def _of_row(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting of a row's own that two runs have, where they have the same row."""
    if (
        not (isinstance(old, Mapping) and isinstance(new, Mapping))
        or old.get("name") is None
        or old.get("name") != new.get("name")
    ):
        yield key, old, new
    else:
        yield from ((f"{key}.{part}", old.get(part), value) for part, value in new.items())
