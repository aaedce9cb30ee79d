"""A run's configuration: a typed value read from YAML, overridden by flags of the same dotted names.

Beside the run's own settings stands every setting of :class:`~blockwalk.plan.Plan`, at top level and under the same
name: ``optimizer: {learning_rate: 1e-4}`` in YAML is ``--optimizer.learning_rate 1e-4`` on the command line. Unknown
keys are errors. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from blockwalk import settings as plan_settings
from blockwalk.methods import METHODS, method
from blockwalk.plan import Estimator, Plan
from blockwalk.settings import coerce, did_you_mean, override
from blockwalk.state import Placement

OF_PEFT = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules"}
"""PEFT's names of the fields of :class:`LoraSettings`."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Low-rank adapters (``lora.*``); see PEFT's ``LoraConfig``."""

    rank: int = 8
    """Columns of A and rows of B of each adapter; its size is in proportion."""
    alpha: float = 16
    """An adapter's answer is multiplied by alpha / rank."""
    dropout: float = 0.0
    """The share of an adapter's inputs that training leaves out, drawn anew for each step."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the modules that get an adapter, or a pattern; all-linear: every linear layer but the head."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of PEFT's ``LoraConfig``, under its own names: ``{use_rslora: true}``."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank is {self.rank}; it must be at least 1 (lora: false trains everything)")
        for theirs, ours in OF_PEFT.items():
            if theirs in self.options:
                raise ValueError(f"lora.options.{theirs} is PEFT's name of lora.{ours}; set that")


@dataclass(frozen=True, slots=True)
class DataSettings:
    """What is read, and how records become tokens (``data.*``)."""

    train: str = ""
    """JSONL or Parquet file (or a folder of them), or a hub name."""
    eval: str = ""
    """Held-out records in the same form; empty: no evaluation."""
    eval_limit: int = 200
    """Records of ``data.eval`` that a training run evaluates, spread evenly; 0: all, as ``blockwalk eval`` always does."""
    subset: str = ""
    """Of a hub data set, its configuration; empty: the only one."""
    train_split: str = "train"
    """Of a hub data set, the split that is trained on."""
    eval_split: str = "validation"
    """Of a hub data set, the split that is evaluated on."""
    format: str = ""
    """messages, completion, classification or text; empty: what the first record looks like."""
    template: str = ""
    """Classification: the text with record fields in braces and the label's place, as in ``{text} It was {label}.``"""
    label_words: tuple[str, ...] = ()
    """Classification: the word of each class, in the order of the classes' numbers."""
    label_field: str = "label"
    """Classification: the record's field that holds the class, as a number or as its word."""
    label_scores: str = "mean"
    """Classification: what label words are ranked by, in evaluation and by ``zo.objective``: the mean of the log-probabilities
    of a word's tokens (as MeZO does), or their sum."""
    max_length: int = 512
    """Tokens a sequence; longer records are cut, and counted."""
    packing: bool = False
    """Join records end to end, whatever their length, and cut that into rows of ``max_length``: no token is padding or lost."""
    padding_multiple: int = 8
    """Sequences are padded to a multiple of this many tokens, for fewer shapes."""
    shuffle: bool = True
    """Take records in an order drawn anew for each epoch; false: in the file's."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything that ``blockwalk train`` needs.

    Raises:
        ValueError: a setting out of range; the message names it.
    """

    model: str = ""
    """The folder of a model (config.json, safetensors), or a block store."""
    plan: Plan = field(default_factory=lambda: method("mebp"))
    data: DataSettings = field(default_factory=DataSettings)
    lora: LoraSettings | None = None
    """Train adapters (true, or any of the settings below); false: all parameters. Unless given, as the method needs."""
    batch_size: int = 8
    """Sequences an optimizer step, whatever ``gradient_accumulation_steps`` cuts them into."""
    eval_batch_size: int = 0
    """Sequences an evaluation batch, which ranks share; 0: those of a micro-batch."""
    max_steps: int = 0
    """Optimizer steps; 0: as many as ``epochs`` takes."""
    epochs: int = 1
    """Times that every record is trained on, where ``max_steps`` is 0."""
    eval_every: int = 0
    """Steps between evaluations; 0: only before the first step and after the last."""
    eval_first: bool = True
    """Evaluate before the first step."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end, and on SIGTERM."""
    keep_checkpoints: int = 2
    """Checkpoints that stay; older ones are removed."""
    log_every: int = 10
    """Steps between lines where standard output is no terminal."""
    start_timeout: float = 120.0
    """Seconds that a rank waits at the start for all others to come."""
    output_dir: str = "runs/blockwalk"
    """The folder of the run: its configuration, metrics, checkpoints, and what it trained."""
    overwrite_output_dir: bool = False
    """Replace an earlier run's checkpoints, ledger and metrics; they stay in ``output_dir/replaced`` until this run's first
    checkpoint is whole."""
    resume_from_checkpoint: str = ""
    """A checkpoint's folder, or ``latest``: the newest whole one in ``output_dir``, if there is any."""

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_size", 1),
            ("eval_batch_size", 0),
            ("max_steps", 0),
            ("epochs", 1),
            ("eval_every", 0),
            ("save_every", 0),
            ("keep_checkpoints", 1),
            ("log_every", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.start_timeout <= 0:
            raise ValueError(f"start_timeout is {self.start_timeout}; it must be above 0 seconds")
        if self.data.eval_limit < 0:
            raise ValueError(f"data.eval_limit is {self.data.eval_limit}; it must be at least 0, which evaluates all records")
        if self.data.max_length < 2:
            raise ValueError(f"data.max_length is {self.data.max_length}; it must be at least 2")
        if self.data.label_scores not in ("mean", "sum"):
            raise ValueError(f"data.label_scores is {self.data.label_scores!r}; it must be mean or sum")
        if self.data.padding_multiple < 1:
            raise ValueError(f"data.padding_multiple is {self.data.padding_multiple}; it must be at least 1")
        if bool(self.data.template) != bool(self.data.label_words):
            raise ValueError("classification needs both data.template and data.label_words; one of them is missing")
        if self.batch_size % self.plan.gradient_accumulation_steps:
            raise ValueError(
                f"batch_size is {self.batch_size} sequences a step, which gradient_accumulation_steps="
                f"{self.plan.gradient_accumulation_steps} does not divide; change one of them"
            )
        mesh, steps = self.plan.mesh, self.plan.gradient_accumulation_steps
        if self.plan.estimator is Estimator.ZEROTH_ORDER and self.batch_size % (steps * mesh.data):
            raise ValueError(
                f"batch_size is {self.batch_size} sequences a step, which mesh.data={mesh.data} parts of"
                f" gradient_accumulation_steps={steps} micro-batches do not divide; change batch_size, or share the forwards"
                f" instead (mesh.perturb: up to {self.plan.forward_passes})"
            )

    @property
    def micro_batch_rows(self) -> int:
        """Rows that one rank walks at once in training: its part of a micro-batch, with every label word of each sequence where
        ``zo.objective`` ranks them."""
        plan = self.plan
        zeroth_order = plan.estimator is Estimator.ZEROTH_ORDER
        cuts = plan.gradient_accumulation_steps * (plan.mesh.data if zeroth_order else plan.mesh.world)
        words = len(self.data.label_words) if zeroth_order and plan.zo.objective != "loss" else 1
        return -(-self.batch_size // cuts) * words

    def to_mapping(self) -> dict[str, Any]:
        """Every setting, nested as in YAML, in plain types: ``from_mapping(config.to_mapping()) == config``."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("plan", "lora")]
        own = {name: _plain(getattr(self, name)) for name in names}
        lora = False if self.lora is None else _plain(self.lora)
        plan = {f.name: _plain(getattr(self.plan, f.name)) for f in dataclasses.fields(Plan)}
        return {"model": own.pop("model"), "method": plan.pop("method"), **own, "lora": lora, **plan}

    def shared(self) -> dict[str, Any]:
        """What must be equal on all ranks of a run: every setting but the places where each finds model, data and output."""
        found = self.to_mapping()
        data = {name: value for name, value in found["data"].items() if name not in ("train", "eval")}
        return {**{name: value for name, value in found.items() if name not in ("model", "output_dir")}, "data": data}

    def digest(self) -> str:
        """SHA-256 of the resolved settings, in hex."""
        return hashlib.sha256(json.dumps(self.to_mapping(), sort_keys=True).encode()).hexdigest()


_SECTIONS: dict[str, type] = {"data": DataSettings, "lora": LoraSettings}
PLACEMENTS = [f.name for f in dataclasses.fields(Plan) if isinstance(getattr(Plan(), f.name), Placement)]
"""Settings that may be given whole (``disk × int4``) or in parts (``frozen.tier``)."""
_OWN = [f.name for f in dataclasses.fields(RunConfig) if f.name not in ("plan", *_SECTIONS)]


def setting_names() -> list[str]:
    """Every dotted name that a YAML file or a flag may set."""
    sections = [f"{name}.{f.name}" for name, cls in _SECTIONS.items() for f in dataclasses.fields(cls)]
    return [*_OWN, "lora", *sections, *PLACEMENTS, *plan_settings.setting_names()]


def load(path: str | Path | None, overrides: Iterable[tuple[str, Any]] = ()) -> RunConfig:
    """The configuration in a YAML file (or the defaults), with dotted ``overrides`` winning.

    Raises:
        ValueError: no valid YAML, an unknown key, a value of the wrong type, or settings that make no sense together.
        FileNotFoundError: no such file.
    """
    if path is None:
        return from_mapping({}, overrides)
    try:
        raw = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, Mapping):
        raise ValueError(f"{path} holds {type(raw).__name__}; a mapping of settings is needed, such as 'model: ...'")
    return from_mapping(raw, overrides)


def from_mapping(raw: Mapping[str, Any], overrides: Iterable[tuple[str, Any]] = ()) -> RunConfig:
    """The configuration that nested or dotted settings describe; see :func:`load`."""
    known = setting_names()
    settings: dict[str, Any] = {}
    for key, value in [*_flatten(raw), *(pair for k, v in overrides for pair in _flatten({k: v}))]:
        is_option = key.startswith("lora.options.") or (key == "lora.options" and isinstance(value, Mapping))
        parts = [name for name in known if name.startswith(f"{key}.")]
        if parts and key not in known:
            raise ValueError(f"{key} is {value!r}; it takes a group of settings, such as {parts[0]}")
        if key not in known and not is_option:
            raise ValueError(f"unknown setting {key!r}{did_you_mean(key, known)}")
        for other in list(settings):  # a later whole replaces earlier parts; a later part changes an earlier placement
            if other.startswith(f"{key}.") or (key.startswith(f"{other}.") and other not in PLACEMENTS):
                del settings[other]
        settings[key] = value

    if str(resume := settings.get("resume_from_checkpoint")).lower() in ("true", "false"):
        settings["resume_from_checkpoint"] = "latest" if str(resume).lower() == "true" else ""
    own = {k: coerce(k, settings.pop(k), get_type_hints(RunConfig)[k]) for k in list(settings) if k in _OWN}
    data = _section(DataSettings, "data", settings)
    lora_given = "lora" in settings or any(k.startswith("lora.") for k in settings)
    wants_lora = coerce("lora", settings.pop("lora", True), bool)
    lora = _section(LoraSettings, "lora", settings)
    name = str(settings.pop("method", "mebp"))
    if name == "auto":
        plan = _chosen(own, data, lora if lora_given and wants_lora else None, settings)
        return RunConfig(plan=plan, data=data, lora=lora if lora_given and wants_lora else None, **own)
    if name not in METHODS:
        raise ValueError(
            f"unknown method {name!r}{did_you_mean(name, list(METHODS))}; known: auto, {', '.join(METHODS)}"
        )
    plan = method(name, **settings)
    if not lora_given:  # weights in a block codec cannot be trained: a row that has them, or is given them, means LoRA
        codecs = (METHODS[name]().frozen.codec, plan.frozen.codec)
        wants_lora = any(codec.encoded for codec in codecs)
    return RunConfig(plan=plan, data=data, lora=lora if wants_lora else None, **own)


def lora_settings(given: Mapping[str, Any]) -> LoraSettings:
    """The adapters that a mapping describes: ``{"rank": 8, "options": {"use_rslora": True}}``.

    Raises:
        ValueError: an unknown name, or a value that makes no sense.
    """
    names = [f"lora.{f.name}" for f in dataclasses.fields(LoraSettings)]
    for key in given:
        if f"lora.{key}" not in names:
            raise ValueError(f"unknown setting 'lora.{key}'{did_you_mean(f'lora.{key}', names)}")
    found: LoraSettings = _section(LoraSettings, "lora", {f"lora.{key}": value for key, value in given.items()})
    return found


def _chosen(own: Mapping[str, Any], data: DataSettings, lora: LoraSettings | None, settings: Mapping[str, Any]) -> Plan:
    """The plan of ``method: auto``: the planner's best for the machine that ``blockwalk doctor`` described, with the
    settings that were given."""
    from blockwalk import planner
    from blockwalk.simulate import analytic, hardware

    if not own.get("model"):
        raise ValueError("method: auto reads the model's configuration; give model")
    given = override(Plan(), settings)
    task = planner.Task(
        config=analytic.read_config(own["model"]),
        hardware=hardware.load("here"),
        batch=own.get("batch_size", RunConfig().batch_size) // given.gradient_accumulation_steps,
        sequence=data.max_length,
        lora_rank=None if lora is None else lora.rank,
        budget=given.budget,
    )
    return override(planner.choose(task, world=given.mesh.world), settings)


def dump(config: RunConfig) -> str:
    """``config`` as YAML that :func:`load` reads back to an equal value."""
    return yaml.dump(config.to_mapping(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def parse_flags(arguments: list[str]) -> list[tuple[str, Any]]:
    """``["--optimizer.learning_rate", "1e-4", "--prefetch=2"]`` as pairs of dotted name and value.

    Raises:
        ValueError: an argument that is no flag, or a flag without a value.
    """
    pairs: list[tuple[str, Any]] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--"):
            raise ValueError(f"unexpected argument {argument!r}; settings are given as --name value")
        name, equals, text = argument[2:].partition("=")
        if not equals:
            following = next(rest, None)
            if following is None or following.startswith("--"):
                raise ValueError(f"--{name} needs a value (known settings: blockwalk train --help)")
            text = following
        pairs.append((name, _flag_value(text)))
    return pairs


def _flag_value(text: str) -> Any:
    """Brackets and braces are read as YAML; anything else stays text, and the setting's type decides."""
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
        if isinstance(value, Mapping) and f"{prefix}{key}" != "lora.options":
            pairs += _flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def _section(cls: type, name: str, settings: dict[str, Any]) -> Any:
    """Take the settings of one section out of ``settings`` and build its value."""
    hints = get_type_hints(cls)
    given: dict[str, Any] = {}
    for key in [k for k in settings if k.startswith(f"{name}.")]:
        value, short = settings.pop(key), key.removeprefix(f"{name}.")
        if short.startswith("options."):  # one option as a flag: read as YAML, for PEFT's types are not ours to know
            typed = yaml.load(value, Loader=Loader) if isinstance(value, str) else value
            given["options"] = {**given.get("options", {}), short.removeprefix("options."): typed}
        else:
            given[short] = coerce(key, value, hints[short])
    return cls(**given)


def _plain(value: Any) -> Any:
    """Dataclasses, enumerations and tuples as the types that YAML has."""
    if isinstance(value, Placement):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return value


class Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars: ``1e-4`` is a number, ``no`` and ``off`` are words; a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what :class:`Loader` would read as something other than text."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        unusual = any(mark in data for mark in "\x85\u2028\u2029\ufeff")  # plain, they would be read as line breaks
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if unusual else None)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table = (
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
        (
            "float",
            r"[-+]?([0-9]+[eE][-+]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
            list("-+.0123456789"),
        ),
    )
    found: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, firsts in table:
        for first in firsts:
            found.setdefault(first, []).append((f"tag:yaml.org,2002:{tag}", re.compile(rf"^(?:{pattern})$")))
    return found


_Dumper.add_representer(str, _Dumper.represent_str)
Loader.yaml_implicit_resolvers = _resolvers()
_Dumper.yaml_implicit_resolvers = _resolvers()
