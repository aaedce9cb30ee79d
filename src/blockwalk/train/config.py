"""A run's configuration: a typed value read from YAML, overridden by flags of the same dotted
names.

Beside the run's own settings stands every setting of :class:`~blockwalk.plan.plan.Plan`, at top
level and under the same name: ``optimizer: {learning_rate: 1e-4}`` in YAML is
``--optimizer.learning_rate 1e-4`` on the command line. Unknown keys are errors. Nothing here
imports torch, but for ``method: auto``."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
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
from blockwalk.plan.settings import override, unnamed_codec, with_rows
from blockwalk.plan.table import Table
from blockwalk.plan.words import counted
from blockwalk.system import row_modules
from blockwalk.system.atomic_files import read_yaml
from blockwalk.system.temporary import require_temporary
from blockwalk.train.foreign_settings import ForeignSettings, Note, translated

_SECTIONS: dict[str, type] = {"data": DataSettings, "lora": LoraSettings, "prefix": PrefixSettings}
PLACEMENTS = [
    f.name for f in dataclasses.fields(Plan) if isinstance(getattr(Plan(), f.name), Placement)
]
"""Settings that may be given whole (``disk × int4a``) or in parts (``frozen.tier``)."""
_OWN = {
    setting_of(f.name): f.name
    for f in dataclasses.fields(RunConfig)
    if f.name not in ("plan", "named", *_SECTIONS)
}
"""The fields of a run itself, by setting."""
IMPORT = "import"
"""The setting that names modules with rows: a file's and the command line's add up."""


METHOD = "method"
DEFAULT_METHOD = "mebp"


def row_tables() -> dict[str, Table[Any]]:
    """Return the tables of rows by the setting that names a row."""
    return {METHOD: METHODS, **plan_settings.tables()}


def owners_of(name: str) -> dict[str, type]:
    """Return the rows that have a setting of their own by this dotted name, each with the class of
    its settings; none where it is another setting."""
    setting, own_name = plan_settings.own_names(row_tables()).get(name, ("", ""))
    return row_tables()[setting].own_settings()[own_name] if setting else {}


def setting_names() -> list[str]:
    """Return every dotted name that a YAML file or a flag may set."""
    sections = [
        f"{name}.{setting_of(f.name)}"
        for name, cls in _SECTIONS.items()
        for f in dataclasses.fields(cls)
    ]
    of_methods = plan_settings.own_names({METHOD: METHODS})
    return [*_OWN, "lora", *sections, *PLACEMENTS, *plan_settings.setting_names(), *of_methods]


@functools.cache
def _switches() -> frozenset[str]:
    """Return the settings of a run and of its sections that are true or false."""
    sections = {"": RunConfig, **{f"{name}.": cls for name, cls in _SECTIONS.items()}}
    return frozenset(
        f"{prefix}{setting_of(name)}"
        for prefix, cls in sections.items()
        for name, hint in hints_of(cls).items()
        if hint is bool
    )


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
            f"{path} holds {type(raw).__name__}; a mapping of settings is needed, such as"
            " 'model: ...'"
        )
    overrides = list(overrides)
    try:
        run = from_mapping(raw, overrides, as_flags=as_flags)
    except ForeignSettings as error:
        raise ForeignSettings(error.problems, error.names, path) from None
    return _with_room_to_warm_up(run, {name for name, _ in overrides}, path)


SHORTENS = frozenset(("max_steps", "epochs", "batch_size", "data.train"))
"""Settings that make a run shorter, on the command line, than the file meant it."""


def _with_room_to_warm_up(run: RunConfig, named: set[str], path: str | Path) -> RunConfig:
    """Cut the warm-up of a run whose steps the command line made fewer than it: the learning rate
    climbs through all of them, as a note says. Where one place says both, the run is refused later
    on."""
    from blockwalk.train.preflight import steps_of

    rate = run.plan.optimizer
    says_warmup = {"optimizer", "optimizer.warmup_steps", "optimizer.total_steps"} & named
    if says_warmup or not named & SHORTENS:
        return run
    if SCHEDULES[rate.schedule].endless or rate.warmup_steps < 1 or rate.total_steps:
        return run
    steps = steps_of(run)
    if not 0 < steps < rate.warmup_steps:
        return run
    warnings.warn(
        f"optimizer.warmup_steps is {rate.warmup_steps:g} in {path}, and this run has"
        f" {counted(steps, 'step')}: the learning rate climbs through all of it",
        Note,
        stacklevel=2,
    )
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
    pairs = list(pairs)
    modules = imported([value for name, value in pairs if name == IMPORT])
    settings = _winning(pair for pair in pairs if pair[0] != IMPORT)
    values = _run_values(settings)
    values[_OWN[IMPORT]] = modules
    require_temporary(values.get("output_dir", "."))
    data = section(DataSettings, "data", settings)
    values["prefix"] = section(PrefixSettings, "prefix", settings)
    lora, wants_lora = _lora(settings)
    name = _method(settings)
    if name == "auto":
        adapters = lora if wants_lora else None
        plan = _chosen(values, data, adapters, _with_rows(name, settings))
        return RunConfig(plan=plan, data=data, lora=adapters, **values)
    settings = _with_rows(name, settings)
    plan = _plan(name, settings, values)
    if wants_lora is None:
        # Weights in a block codec cannot be trained: a row that has them, or is given them, means
        # LoRA.
        codecs = (method(name).frozen.codec, plan.frozen.codec)
        rounded = any(codec.encoded or codec.facts.chosen_later for codec in codecs)
        wants_lora = rounded and not values["prefix"]
    adapters = lora if wants_lora else None
    return RunConfig(plan=plan, data=data, lora=adapters, named=frozenset(settings), **values)


def imported(lists: Iterable[Any]) -> tuple[str, ...]:
    """Return the modules that lists of them name, each once, with the digest that it has now. A
    note says where it had another one.

    Raises:
        ValueError: one of them is not imported.
    """
    stamps: dict[str, str] = {}
    for value in lists:
        for entry in coerce(IMPORT, value, tuple[str, ...]):
            module = row_modules.require(entry, IMPORT)
            digest = row_modules.digest_in(entry)
            if digest and not module.digest.startswith(digest):
                warnings.warn(
                    f"{module.file} has changed since these settings were written: {entry}, now"
                    f" {module.stamp}",
                    Note,
                    stacklevel=2,
                )
            stamps[module.name] = module.stamp
    return tuple(stamps.values())


def _winning(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return settings by dotted name, the later ones winning: a whole replaces earlier parts, and a
    part changes an earlier placement.

    Raises:
        ValueError: a name is unknown, or that of a group of settings.
    """
    names = setting_names()
    settings: dict[str, Any] = {}
    for key, value in pairs:
        _require_name(key, value, names)
        for earlier in list(settings):
            is_part = earlier.startswith(f"{key}.")
            # a setting of the row that was named before leaves its name
            stays = earlier in PLACEMENTS or (earlier in row_tables() and key != f"{earlier}.name")
            is_whole = key.startswith(f"{earlier}.") and not stays
            if is_part or is_whole:
                del settings[earlier]
        settings[key] = value
    return settings


def _require_name(key: str, value: Any, names: list[str]) -> None:
    """Raise ValueError where a setting's name is none of ours."""
    if key in names or key.startswith(tuple(f"{name}." for name in row_tables())):
        return  # with_rows knows whose setting it is
    if parts := [name for name in names if name.startswith(f"{key}.")]:
        raise ValueError(f"{key} is {value!r}; it takes a group of settings, such as {parts[0]}")
    if not is_open(key) and not (key in (*OPEN, *WHOLE) and isinstance(value, Mapping)):
        hint = _of_value(key, value, names) or did_you_mean(key, names)
        raise ValueError(f"unknown setting {key!r}{hint}")


def _run_values(settings: dict[str, Any]) -> dict[str, Any]:
    """Take out the settings that are fields of the run itself, and return their values."""
    resume = str(settings.get("resume_from_checkpoint")).lower()
    if resume in ("true", "false"):
        settings["resume_from_checkpoint"] = "latest" if resume == "true" else ""
    hints = hints_of(RunConfig)
    fields = {name: _OWN[name] for name in settings if name in _OWN}
    values = {
        field: coerce(name, settings.pop(name), hints[field]) for name, field in fields.items()
    }
    if values.get("model"):
        values["model"] = model_source(os.path.expanduser(values["model"]))
    return values


def _method(settings: dict[str, Any]) -> str:
    """Take out the method's name, and settings of its own."""
    method_settings = {
        key: settings.pop(key)
        for key in list(settings)
        if key == METHOD or key.startswith(f"{METHOD}.")
    }
    named = with_rows(method_settings, {METHOD: METHODS}, Plan(method=DEFAULT_METHOD))
    return str(named.get(METHOD, DEFAULT_METHOD))


def _with_rows(method_name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which rows have those of their own: what a later decision asks of a name
    (:data:`RunConfig.named`) is then known."""
    tables = plan_settings.tables()
    names = {*PLACEMENTS, *tables, *plan_settings.own_names(tables)}
    beginnings = tuple(f"{name}." for name in tables)
    of_rows = {k: v for k, v in settings.items() if k in names or k.startswith(beginnings)}
    base = method(method_name) if method_name in METHODS else Plan()
    of_run = {k: v for k, v in settings.items() if k not in of_rows}
    return {**of_run, **with_rows(of_rows, tables, base)}


def _lora(settings: dict[str, Any]) -> tuple[LoraSettings, bool | None]:
    """Take out the settings of LoRA. Return them, and whether it is wanted; None where they do not
    tell."""
    names = {name.partition(".")[2] for name in settings if name.startswith("lora.")}
    wants_lora = True if names else None
    if "lora" in settings:
        wants_lora = coerce("lora", settings.pop("lora"), bool)
    lora = section(LoraSettings, "lora", settings)
    if lora.from_:
        from blockwalk.cutting.going_on import settings_from  # it imports torch

        lora = settings_from(lora, {name.partition(".")[0] for name in names})
    return lora, wants_lora


def _plan(name: str, settings: Mapping[str, Any], values: Mapping[str, Any]) -> Plan:
    """Return the plan of a method with settings; the model's own codec where none is named."""
    if name not in METHODS:
        raise ValueError(
            f"unknown method {name!r}{METHODS.nearest(name)}; known: auto, {METHODS.choices}"
        )
    plan = method(name, **settings)
    if not {"frozen", "frozen.codec"} & settings.keys():
        plan = unnamed_codec(plan)
    if plan.frozen.codec.facts.chosen_later and _is_here(values):
        from blockwalk.engine.frozen_codec import with_stored_codec  # it imports torch

        plan = with_stored_codec(plan, values["model"])
    return plan


EXAMPLES = {
    "data.columns": "[prompt=question, completion=answer]",
    "data.train": "{path: a.jsonl, weight: 2}",
    "data.eval": "{path: a.jsonl}",
}
"""Settings that take a list or a mapping as one value, each with one."""


def _of_value(key: str, value: Any, names: Collection[str]) -> str:
    """Return what to write where a name is a part of a setting that has none; empty where it is no
    such part."""
    setting = next((name for name in names if key.startswith(f"{name}.")), "")
    if setting in EXAMPLES:
        return f": {setting} is one value, such as {EXAMPLES[setting]}"
    if setting and value is None and not any(name.startswith(f"{setting}.") for name in names):
        text = key.removeprefix(f"{setting}.")
        return f": YAML reads braces as a mapping; put the text in quotes: {setting}: '{{{text}}}'"
    return ""


def reads(settings: Mapping[str, Any]) -> bool:
    """Return whether settings of our own names can be read."""
    try:
        _from_pairs(_flatten(settings))
    except ValueError:
        return False
    return True


def _is_here(values: Mapping[str, Any]) -> bool:
    """Whether a model is named that can be looked at while settings are read."""
    name = str(values.get("model", ""))
    return name.partition("@")[0].endswith(".gguf") or (name != "" and Path(name).is_dir())


def _chosen(
    values: Mapping[str, Any],
    data: DataSettings,
    lora: LoraSettings | None,
    settings: Mapping[str, Any],
) -> Plan:
    """Return the plan of ``method: auto``: the planner's best for the machine that ``blockwalk
    doctor`` described, with the settings that were given."""
    from blockwalk.program.program import Shape
    from blockwalk.report import advice
    from blockwalk.simulate import hardware, planner

    if not values.get("model"):
        raise ValueError("method: auto reads the model's configuration; give model")
    plan = override(Plan(), settings)
    steps = plan.gradient_accumulation_steps
    batch_size = values.get("batch_size", RunConfig().batch_size)
    task = advice.task(
        values["model"],
        lora or values["prefix"] or None,
        hardware.load("here"),
        Shape(batch_size // steps * plan.objective_facts.group, data.max_length),
        budget=plan.budget,
        micro_batches=steps,
    )
    return override(planner.choose(task, world=plan.mesh.world), settings)


def dump(config: RunConfig) -> str:
    """Return ``config`` as YAML that :func:`load` reads back to an equal value."""
    return as_yaml(config.to_mapping())


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Return settings as YAML."""
    return yaml.dump(dict(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def as_yaml_line(name: str, value: Any) -> str:
    """Return one setting as a line of YAML."""
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=10**6,
    )
    line = text.removesuffix("\n").removesuffix("\n...")
    return f"{name}: {line}"


def split_flags(
    arguments: Iterable[str], options: Collection[str] = ()
) -> tuple[list[tuple[str, Any]], list[str]]:
    """Return the settings among ``["run.yaml", "--optimizer.learning_rate", "1e-4",
    "--prefetch=2"]`` as pairs of dotted name and value, and the other arguments. Names that other
    tools have for a setting are settings too, but for those of ``options``; one of these without a
    value is true, and so is a setting that is true or false.

    Raises:
        ValueError: a setting without a value.
    """
    names = set(setting_names())
    words = deque(arguments)
    pairs: list[tuple[str, Any]] = []
    positional: list[str] = []
    while words:
        word = words.popleft()
        name, equals, text = word.removeprefix("--").partition("=")
        foreign = name not in names and "." not in name
        is_option = foreign and (name in options or not _has_ours(name, names))
        if not word.startswith("--") or is_option:
            positional.append(word)
            continue
        if not equals:
            has_value = bool(words) and not words[0].startswith("--")
            if not (has_value or foreign or name in _switches()):
                raise ValueError(f"--{name} needs a value (known settings: blockwalk train --help)")
            text = words.popleft() if has_value else "true"
        is_text = text.startswith("{") and _takes_no_mapping(name, names)
        pairs.append((name, text if is_text else _flag_value(text)))
    return pairs, positional


def _takes_no_mapping(name: str, names: Collection[str]) -> bool:
    """Return whether a setting of ours has neither parts nor a mapping as its value: braces are
    text then."""
    has_parts = any(other.startswith(f"{name}.") for other in names)
    return name in names and not has_parts and name not in (*OPEN, *WHOLE)


def _has_ours(name: str, names: Collection[str]) -> bool:
    """Return whether a name that is not ours is one of another tool's, or ours with dashes."""
    return name.replace("-", "_") in names or find(name) is not None


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
        # Plain, these characters would be read as line breaks.
        unusual = any(character in data for character in "\x85\u2028\u2029\ufeff")
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if unusual else None)


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_multi_representer(str, _Dumper.represent_str)  # texts that know more, such as a model
_Dumper.yaml_implicit_resolvers = _resolvers()
