"""A run's configuration: a typed value read from YAML, overridden by flags of the same dotted
names.

Beside the run's own settings stands every setting of :class:`~blockwalk.plan.plan.Plan`, at top
level and under the same name: ``optimizer: {learning_rate: 1e-4}`` in YAML is
``--optimizer.learning_rate 1e-4`` on the command line. Unknown keys are errors. Nothing here
imports torch, but for ``method: auto``."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from blockwalk.models.model_source import model_source
from blockwalk.plan import settings as plan_settings
from blockwalk.plan.choices import LoraSettings, PrefixSettings
from blockwalk.plan.foreign_names import find
from blockwalk.plan.methods import METHODS, method
from blockwalk.plan.parsing import (
    OPEN,
    WHOLE,
    Loader,
    _resolvers,
    coerce,
    did_you_mean,
    hints_of,
    is_open,
    section,
    setting_of,
)
from blockwalk.plan.placement import Placement
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import DataSettings, RunConfig
from blockwalk.plan.schedules import SCHEDULES
from blockwalk.plan.settings import override, unnamed_codec
from blockwalk.plan.words import counted
from blockwalk.system.atomic_files import read_yaml
from blockwalk.train.foreign_settings import translated

log = logging.getLogger(__name__)

_SECTIONS: dict[str, type] = {"data": DataSettings, "lora": LoraSettings, "prefix": PrefixSettings}
PLACEMENTS = [
    f.name for f in dataclasses.fields(Plan) if isinstance(getattr(Plan(), f.name), Placement)
]
"""Settings that may be given whole (``disk × int4a``) or in parts (``frozen.tier``)."""
_OWN = [
    f.name for f in dataclasses.fields(RunConfig) if f.name not in ("plan", "named", *_SECTIONS)
]


def setting_names() -> list[str]:
    """Return every dotted name that a YAML file or a flag may set."""
    sections = [
        f"{name}.{setting_of(f.name)}"
        for name, cls in _SECTIONS.items()
        for f in dataclasses.fields(cls)
    ]
    return [*_OWN, "lora", *sections, *PLACEMENTS, *plan_settings.setting_names()]


def load(
    path: str | Path | None, overrides: Iterable[tuple[str, Any]] = (), *, as_flags: bool = False
) -> RunConfig:
    """Return the configuration in a YAML file (or the defaults), with dotted ``overrides`` winning;
    errors write these as flags where they are.

    Raises:
        ValueError: no valid YAML, an unknown key, a value of the wrong type, or settings that make
            no sense together.
        FileNotFoundError: no such file.
    """
    if path is None:
        return from_mapping({}, overrides, as_flags=as_flags)
    raw = read_yaml(Path(path), Loader)
    if not isinstance(raw, Mapping):
        raise ValueError(
            f"{path} holds {type(raw).__name__}; a mapping of settings is needed, such as 'model:"
            " ...'"
        )
    overrides = list(overrides)
    return _with_room_to_warm_up(
        from_mapping(raw, overrides, as_flags=as_flags), {name for name, _ in overrides}, path
    )


SHORTENS = frozenset(("max_steps", "epochs", "batch_size", "data.train"))
"""Settings that make a run shorter, on the command line, than the file meant it."""


def _with_room_to_warm_up(run: RunConfig, named: set[str], path: str | Path) -> RunConfig:
    """Cut the warm-up of a run whose steps the command line made fewer than it: the learning rate
    climbs through all of them, as a line on standard error says. Where one place says both, the run
    is refused later on."""
    from blockwalk.train.preflight import steps_of

    rate = run.plan.optimizer
    warms = {"optimizer", "optimizer.warmup_steps", "optimizer.total_steps"} & named
    if (
        SCHEDULES[rate.schedule].endless
        or rate.warmup_steps < 1
        or rate.total_steps
        or warms
        or not named & SHORTENS
    ):
        return run
    steps = steps_of(run)
    if not 0 < steps < rate.warmup_steps:
        return run
    log.warning(
        "optimizer.warmup_steps is %g in %s, and this run has %s: the learning rate climbs"
        " through all of it",
        rate.warmup_steps, path, counted(steps, "step"),
    )  # fmt: skip
    return dataclasses.replace(run, plan=override(run.plan, {"optimizer.warmup_steps": steps}))


def from_mapping(
    raw: Mapping[str, Any], overrides: Iterable[tuple[str, Any]] = (), *, as_flags: bool = False
) -> RunConfig:
    """Return the configuration that nested or dotted settings describe; see :func:`load`. Names of
    other tools that mean the same as ours are taken, with a warning that names ours."""
    flags = [pair for k, v in overrides for pair in _flatten({k: v})]
    return _from_pairs(translated(_flatten(raw), flags, setting_names(), reads, as_flags=as_flags))


def of(
    run: RunConfig | Mapping[str, Any] | str | Path | None, settings: Mapping[str, Any]
) -> RunConfig:
    """Return the configuration of a value, a mapping or a YAML file, with ``settings`` winning; see
    :func:`load`."""
    if isinstance(run, RunConfig):
        run = run.to_mapping()
    if isinstance(run, Mapping):
        return from_mapping(run, settings.items())
    return load(run, settings.items())


def _from_pairs(pairs: Iterable[tuple[str, Any]]) -> RunConfig:
    """Return the configuration that dotted settings of our own names describe, the later ones
    winning."""
    known = setting_names()
    settings: dict[str, Any] = {}
    for key, value in pairs:
        is_option = is_open(key) or (key in (*OPEN, *WHOLE) and isinstance(value, Mapping))
        parts = [name for name in known if name.startswith(f"{key}.")]
        if parts and key not in known:
            raise ValueError(
                f"{key} is {value!r}; it takes a group of settings, such as {parts[0]}"
            )
        if key not in known and not is_option:
            raise ValueError(
                f"unknown setting {key!r}{_of_value(key, value, known) or did_you_mean(key, known)}"
            )
        for other in list(
            settings
        ):  # a later whole replaces earlier parts; a later part changes an earlier placement
            if other.startswith(f"{key}.") or (
                key.startswith(f"{other}.") and other not in PLACEMENTS
            ):
                del settings[other]
        settings[key] = value

    if str(resume := settings.get("resume_from_checkpoint")).lower() in ("true", "false"):
        settings["resume_from_checkpoint"] = "latest" if str(resume).lower() == "true" else ""
    own = {
        k: coerce(k, settings.pop(k), hints_of(RunConfig)[k]) for k in list(settings) if k in _OWN
    }
    if own.get("model"):
        own["model"] = model_source(os.path.expanduser(own["model"]))
    data = section(DataSettings, "data", settings)
    own["prefix"] = section(PrefixSettings, "prefix", settings)
    lora_given = "lora" in settings or any(k.startswith("lora.") for k in settings)
    wants_lora = coerce("lora", settings.pop("lora", True), bool)
    lora_named = {key.split(".")[1] for key in settings if key.startswith("lora.")}
    lora = section(LoraSettings, "lora", settings)
    if lora.from_:
        from blockwalk.cutting.going_on import settings_from  # it imports torch

        lora = settings_from(lora, lora_named)
    name = str(settings.pop("method", "mebp"))
    if name == "auto":
        asked = lora if lora_given and wants_lora else None
        return RunConfig(plan=_chosen(own, data, asked, settings), data=data, lora=asked, **own)
    if name not in METHODS:
        raise ValueError(
            f"unknown method {name!r}{METHODS.nearest(name)}; known: auto, {METHODS.choices}"
        )
    plan = method(name, **settings)
    named = {"frozen", "frozen.codec"} & settings.keys()
    if not named:
        plan = unnamed_codec(plan)
    if plan.frozen.codec.facts.chosen_later and _is_here(own):
        from blockwalk.engine.frozen_codec import with_stored_codec  # it imports torch

        plan = with_stored_codec(plan, own["model"])
    # weights in a block codec cannot be trained: a row that has them, or is given them, means LoRA
    if not lora_given:
        codecs = (METHODS[name]().frozen.codec, plan.frozen.codec)
        wants_lora = (
            any(codec.encoded or codec.facts.chosen_later for codec in codecs) and not own["prefix"]
        )
    return RunConfig(
        plan=plan, data=data, lora=lora if wants_lora else None, named=frozenset(settings), **own
    )


EXAMPLES = {
    "data.columns": "[prompt=question, completion=answer]",
    "data.train": "{path: a.jsonl, weight: 2}",
    "data.eval": "{path: a.jsonl}",
}
"""Settings that take a list or a mapping as one value, each with one."""


def _of_value(key: str, value: Any, known: Collection[str]) -> str:
    """Return what to write where a name is a part of a setting that has none; empty where it is no
    such part."""
    whole = next((name for name in known if key.startswith(f"{name}.")), "")
    if whole in EXAMPLES:
        return f": {whole} is one value, such as {EXAMPLES[whole]}"
    if whole and value is None and not any(name.startswith(f"{whole}.") for name in known):
        text = key.removeprefix(f"{whole}.")
        return f": YAML reads braces as a mapping; put the text in quotes: {whole}: '{{{text}}}'"
    return ""


def reads(settings: Mapping[str, Any]) -> bool:
    """Return whether settings of our own names can be read."""
    try:
        _from_pairs(_flatten(settings))
    except ValueError:
        return False
    return True


def _is_here(own: Mapping[str, Any]) -> bool:
    """Whether a model is named that can be looked at while settings are read."""
    name = str(own.get("model", ""))
    return name.partition("@")[0].endswith(".gguf") or (name != "" and Path(name).is_dir())


def _chosen(
    own: Mapping[str, Any],
    data: DataSettings,
    lora: LoraSettings | None,
    settings: Mapping[str, Any],
) -> Plan:
    """Return the plan of ``method: auto``: the planner's best for the machine that ``blockwalk
    doctor`` described, with the settings that were given."""
    from blockwalk.program.program import Shape
    from blockwalk.report import advice
    from blockwalk.simulate import hardware, planner

    if not own.get("model"):
        raise ValueError("method: auto reads the model's configuration; give model")
    given = override(Plan(), settings)
    steps = given.gradient_accumulation_steps
    machine = hardware.load("here")
    shape = Shape(own.get("batch_size", RunConfig().batch_size) // steps, data.max_length)
    trained = lora or own["prefix"] or None
    task = advice.task(
        own["model"], trained, machine, shape, budget=given.budget, micro_batches=steps
    )
    return override(planner.choose(task, world=given.mesh.world), settings)


def dump(config: RunConfig) -> str:
    """Return ``config`` as YAML that :func:`load` reads back to an equal value."""
    return as_yaml(config.to_mapping())


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Return settings as YAML."""
    return yaml.dump(dict(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def split_flags(
    arguments: Iterable[str], options: Collection[str] = ()
) -> tuple[list[tuple[str, Any]], list[str]]:
    """Return the settings among ``["run.yaml", "--optimizer.learning_rate", "1e-4",
    "--prefetch=2"]`` as pairs of dotted name and value, and the other arguments. Names that other
    tools have for a setting are settings too, but for those of ``options``; one of these without a
    value is true.

    Raises:
        ValueError: a setting without a value.
    """
    known = set(setting_names())
    rest = deque(arguments)
    pairs: list[tuple[str, Any]] = []
    others: list[str] = []
    while rest:
        argument = rest.popleft()
        name, equals, text = argument.removeprefix("--").partition("=")
        theirs = name not in known and "." not in name
        if not argument.startswith("--") or (
            theirs and (name in options or not _has_ours(name, known))
        ):
            others.append(argument)
            continue
        if not equals:
            has_value = bool(rest) and not rest[0].startswith("--")
            if not (has_value or theirs):
                raise ValueError(f"--{name} needs a value (known settings: blockwalk train --help)")
            text = rest.popleft() if has_value else "true"
        pairs.append(
            (
                name,
                text
                if text.startswith("{") and _takes_no_mapping(name, known)
                else _flag_value(text),
            )
        )
    return pairs, others


def _takes_no_mapping(name: str, known: Collection[str]) -> bool:
    """Return whether a setting of ours has neither parts nor a mapping as its value: braces are
    text then."""
    has_parts = any(other.startswith(f"{name}.") for other in known)
    return name in known and not has_parts and name not in (*OPEN, *WHOLE)


def _has_ours(name: str, known: Collection[str]) -> bool:
    """Return whether a name that is not ours is one of another tool's, or ours with dashes."""
    return name.replace("-", "_") in known or find(name) is not None


def _flag_value(text: str) -> Any:
    """Brackets and braces are read as YAML; anything else stays text, and the setting's type
    decides."""
    if text[:1] not in ("[", "{"):
        return text
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError:
        return text  # a template may begin with a brace


def _flatten(raw: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in raw.items():
        if not isinstance(key, str):
            raise ValueError(f"setting {prefix}{key!r} is no name; settings are words")
        if isinstance(value, Mapping) and f"{prefix}{key}" not in (*OPEN, *WHOLE):
            pairs += _flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


class _Dumper(yaml.SafeDumper):
    """A writer of YAML that quotes texts which :class:`Loader` would read as something else."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        unusual = any(
            mark in data for mark in "\x85\u2028\u2029\ufeff"
        )  # plain, they would be read as line breaks
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if unusual else None)


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.yaml_implicit_resolvers = _resolvers()
