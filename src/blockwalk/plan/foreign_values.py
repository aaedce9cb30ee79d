"""Values that other tools' settings take, as ours: each function answers the name and the value of
a setting of ours for a value of theirs, or None where no value of ours does it.

``given`` holds every setting of the run by its name, theirs and ours: some of ours need two of
theirs."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from blockwalk.plan.choices import OptimizerSettings
from blockwalk.plan.objectives import SFT
from blockwalk.plan.placement import Codec
from blockwalk.plan.schedules import SCHEDULES
from blockwalk.plan.update_rules import RULES

Pair = tuple[str, Any]
"""A setting's name and its value."""

Line = Callable[[Any, Mapping[str, Any]], Pair | None]
"""A function of their value and of all settings that are given."""


def word(value: Any) -> str:
    """Return a value as a word in lower case: flags give text, YAML gives true and null."""
    return str(value).strip().lower()


def is_off(value: Any) -> bool:
    """Return whether a value switches something off."""
    return (
        value is None
        or value in ([], {})
        or word(value) in ("false", "no", "none", "null", "off", "0", "0.0", "")
    )


def number(value: Any) -> int | float:
    """Return the number that a value holds, whole where it is.

    Raises:
        ValueError, TypeError: it holds none.
    """
    result = float(value)
    return int(result) if result.is_integer() else result


def same(name: str) -> Line:
    """Return the value itself under our name."""
    return lambda value, given: (name, value)


def always(name: str, ours: Any) -> Line:
    """Return one value of ours, whatever theirs is."""
    return lambda value, given: (name, ours)


def switch(name: str, on: Any, off: Any = None) -> Line:
    """Return one value of ours where theirs is on, and another where it is off; None: nothing to
    write."""

    def line(value: Any, given: Mapping[str, Any]) -> Pair | None:
        answer = off if is_off(value) else on
        return None if answer is None else (name, answer)

    return line


def words(name: str, table: Mapping[str, Any], otherwise: Any = None) -> Line:
    """Return the value of ours by a table of theirs; ``otherwise`` for those that are not in it."""

    def line(value: Any, given: Mapping[str, Any]) -> Pair | None:
        answer = table.get(word(value), otherwise)
        return None if answer is None else (name, answer)

    return line


def whole_batch(value: Any, given: Mapping[str, Any]) -> Pair:
    """Return the sequences of a step: those of one device, times accumulation, times ranks."""
    return "batch_size", number(value) * _times(given, *ACCUMULATION) * _times(
        given, "mesh.world", "world_size"
    )


def evaluated_together(value: Any, given: Mapping[str, Any]) -> Pair:
    """Return the sequences of an evaluation batch: those of one device times ranks."""
    return "eval_batch_size", number(value) * _times(given, "mesh.world", "world_size")


def visitors(value: Any, given: Mapping[str, Any]) -> Pair | None:
    """Return the micro-batches that visit a block together, for an order of accumulation."""
    counts = {"block": _times(given, *ACCUMULATION), "micro_batch": 1}
    order = word(value)
    return ("together", counts[order]) if order in counts else None


ACCUMULATION = ("gradient_accumulation_steps", "grad_accumulation_steps", "gradient_accumulation")


def _times(given: Mapping[str, Any], *names: str) -> int | float:
    return next((number(given[name]) for name in names if name in given), 1)


def betas(value: Any, given: Mapping[str, Any]) -> Pair:
    """Return Adam's two decays of which a setting of theirs holds one."""
    beta1 = given.get("adam_beta1", given.get("beta1", 0.9))
    beta2 = given.get("adam_beta2", given.get("beta2", 0.999))
    return "optimizer.betas", [number(beta1), number(beta2)]


def last_rate(value: Any, given: Mapping[str, Any]) -> Pair:
    """Return the last learning rate over the highest."""
    names = ("optimizer.learning_rate", "learning_rate", "lr")
    highest = next((number(given[name]) for name in names if name in given), 1e-4)
    return "optimizer.min_ratio", number(value) / highest


def every(name: str, *steps: str, most: int = 100) -> Line:
    """Return a count of steps for a strategy: none for *no*, the one that another setting gives, or
    a usual one."""

    def line(value: Any, given: Mapping[str, Any]) -> Pair:
        if is_off(value):
            return name, 0
        return name, next(
            (number(given[other]) for other in (*steps, name) if other in given), most
        )

    return line


def rule(value: Any, given: Mapping[str, Any]) -> Pair:
    """Return the update rule by transformers' names and torch's: ``paged_adamw_8bit`` has a rule's
    name in it."""
    kind = word(value)
    parts = re.split(r"[\W_]+", kind)
    return "optimizer.name", next(
        (name for name in RULES if kind.startswith(name) or name in parts),
        OptimizerSettings().name,
    )


def same_rule(value: Any) -> bool:
    """Return whether the rule of a name elsewhere is exactly one of ours."""
    return word(value) in (
        *RULES,
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_hf",
        "adamw_apex_fused",
        "torch_adamw",
    )


def schedule(value: Any, given: Mapping[str, Any]) -> Pair:
    """Return the schedule by the names that others have."""
    kind = word(value)
    if kind in SCHEDULES:
        return "optimizer.schedule", kind
    table = {
        "linear_schedule": "linear",
        "warmuplr": "constant",
        "warmupdecaylr": "linear",
        "wsd": "warmup_stable_decay",
    }
    return "optimizer.schedule", table.get(kind, "cosine")


def same_schedule(value: Any) -> bool:
    """Return whether a schedule has the same name here."""
    return word(value) in SCHEDULES


OTHER_RULES = re.compile(r"ada|paged|sgd_|lion|lomo|galore|apollo|muon|rmsprop|torch|schedule_free")
"""Beginnings of the names of other tools' rules. A row that is added here may have one of them."""


def other_rule(value: Any) -> bool:
    """Return whether a value is an update rule of other tools, and none of ours."""
    return word(value) not in RULES and OTHER_RULES.match(word(value)) is not None


def other_schedule(value: Any) -> bool:
    """Return whether a value is a schedule of other tools, and none of ours."""
    families = (
        "cosine_",
        "reduce_",
        "greedy",
        "one_cycle",
        "rex",
        "wsd",
        "linear_",
        "exponential",
        "step_",
        "warmup",
    )
    return word(value) not in SCHEDULES and word(value).startswith(families)


def below_one(value: Any) -> bool:
    """Return whether a value is a share of the run's steps: from 0, below 1."""
    try:
        return 0 <= number(value) < 1
    except (TypeError, ValueError):
        return False


def share(name: str) -> Line:
    """Return a share of the run's steps; none where the value is no share."""
    return lambda value, given: (name, number(value)) if below_one(value) else None


DTYPES = {
    **dict.fromkeys(("float32", "fp32", "32", "32-true", "no", "torch.float32"), "float32"),
    **dict.fromkeys(
        ("bfloat16", "bf16", "bf16-true", "bf16-mixed", "torch.bfloat16", "true"), "bfloat16"
    ),
    **dict.fromkeys(
        ("float16", "fp16", "half", "16", "16-true", "16-mixed", "torch.float16"), "bfloat16"
    ),
    "auto": "auto",
}
"""Names of dtypes elsewhere, and ``compute_dtype``: float16 has no scale of the loss here, so that
it becomes bfloat16."""


def same_dtype(value: Any) -> bool:
    """Return whether a name of a dtype means the same in ``compute_dtype``."""
    return word(value) in ("auto", "float32", "bfloat16", "fp32", "bf16")


CODECS = {
    "4": "int4a",
    "8": "int8",
    "nf4": "nf4",
    "fp4": "nf4",
    "int4": "int4",
    "int8": "int8",
    "fp8": "fp8",
    "16": "raw",
}
"""Kinds of quantisation elsewhere, and ``frozen.codec``."""

IN_4_BITS: dict[str, Any] = {
    "trl": "load_in_4bit",
    "axolotl": "load_in_4bit",
    "other": "use_qlora use_4bit qlora",
}
"""Names of a switch for four bits, by tool."""
IN_8_BITS: dict[str, Any] = {"trl": "load_in_8bit", "axolotl": "load_in_8bit"}
"""Names of a switch for eight bits, by tool."""
KINDS_OF_BITS: dict[str, Any] = {
    "trl": "bnb_4bit_quant_type",
    "factory": "quantization_bit",
    "other": "quantization quantize quant_bits bits quantization_type",
}
"""Names of a setting that holds a kind of quantisation, by tool."""

KINDS_OF_TRAINING: dict[str, Any] = {
    "trl": "use_peft peft_type",
    "axolotl": "adapter",
    "factory": "finetuning_type",
    "mlx": "fine_tune_type",
    "other": "train_type use_lora peft tuner_type",
}
"""Names of a setting that holds a kind of training, by tool."""


def quantised(value: Any, given: Mapping[str, Any]) -> Pair | None:
    """Return the codec of frozen weights by all settings that name one: a file of theirs has
    several for one thing, and each leads to the same line. None where they contradict one
    another."""
    switched = {
        bits: any(_last(name) in _all(names) and not is_off(on) for name, on in given.items())
        for bits, names in (("4", IN_4_BITS), ("8", IN_8_BITS))
    }
    words_given = [word(kind) for name, kind in given.items() if _last(name) in _all(KINDS_OF_BITS)]
    kinds = [kind for kind in words_given if kind in CODECS]
    trainings = [kind for name, kind in given.items() if _last(name) in _all(KINDS_OF_TRAINING)]
    has_qlora = any(word(kind) in ("qlora", "qdora") for kind in (value, *trainings))
    in_4 = switched["4"] or has_qlora or "4" in kinds
    in_8 = switched["8"] or "8" in kinds
    named = [kind for kind in kinds if kind not in ("4", "8", "16")]
    if in_4 and in_8:
        return None
    kind = "8" if in_8 else (*named, "4" if in_4 else "16")[0]
    return "frozen.codec", CODECS.get(kind)


def _last(name: str) -> str:
    return name.rpartition(".")[2].replace("-", "_")


def _all(names: Mapping[str, Any]) -> list[str]:
    return " ".join(names.values()).split()


MEMORIES = {
    "cpu": "host",
    "ram": "host",
    "nvme": "disk",
    "ssd": "disk",
    "gpu": "device",
    "cuda": "device",
}
"""Names of memories elsewhere, and tiers."""


def is_a_part(value: Any) -> bool:
    """Return whether a value names a codec alone, or a memory by another name than a tier's."""
    return word(value) in {*MEMORIES, *CODECS, *Codec}


def placed(value: Any, given: Mapping[str, Any]) -> Pair:
    """Return the part of ``frozen`` that a word names: a tier, or else a codec."""
    if word(value) in MEMORIES:
        return "frozen.tier", MEMORIES[word(value)]
    return "frozen.codec", CODECS.get(word(value), word(value))


def offloaded(kind: str) -> Line:
    """Return the tier of a kind of state by the device that others offload it to."""
    tiers = {
        "cpu": "host",
        "nvme": "disk",
        "disk": "disk",
        "true": "host",
        "auto": "host",
        "none": "device",
        "cuda": "device",
    }
    return words(f"{kind}.tier", tiers, "host")


def modules(value: Any, given: Mapping[str, Any]) -> Pair:
    """Return the modules with adapters; *all* is PEFT's all-linear."""
    if word(value) in ("all", "all-linear", "all_linear", "true"):
        return "lora.target_modules", "all-linear"
    return "lora.target_modules", value


def same_modules(value: Any) -> bool:
    """Return whether names of modules are PEFT's: a list, a pattern, or all-linear."""
    return word(value) not in ("all", "all_linear", "true", "false", "none")


def option(name: str) -> Line:
    """Return one of PEFT's own fields, or None where it is off; a text with commas is a list of
    names where PEFT takes a list."""

    def line(value: Any, given: Mapping[str, Any]) -> Pair | None:
        if is_off(value):
            return None
        if name == "modules_to_save":
            value = value.split(",") if isinstance(value, str) else value
            return f"lora.options.{name}", [str(module).strip() for module in value]
        if word(value) == "true":
            return f"lora.options.{name}", True
        return f"lora.options.{name}", value

    return line


def scale(value: Any, given: Mapping[str, Any]) -> Pair:
    """Return LoRA's alpha from alpha over rank."""
    names = ("lora.rank", "lora_parameters.rank", "lora_rank", "lora_r")
    rank = next((number(given[name]) for name in names if name in given), 8)
    return "lora.alpha", number(number(value) * rank)


def adapter(value: Any, given: Mapping[str, Any]) -> Pair | None:
    """Return adapters or all parameters, by the kinds of training that others name."""
    kind = word(value)
    if kind in ("qlora", "qdora"):
        return quantised(value, given)
    if kind == "dora":
        return "lora.options.use_dora", True
    return "lora", kind not in ("full", "none", "false", "freeze", "null", "")


def paths(name: str) -> Line:
    """Return data sources: a name, several with commas, or a list of names or of mappings with a
    path."""

    def line(value: Any, given: Mapping[str, Any]) -> Pair:
        if is_off(value):
            raise ValueError("no source is named")
        if isinstance(value, str) and value[:1] == "[":
            value = ast.literal_eval(value)
        if isinstance(value, str):
            value = value.split(",")
        sources = value if isinstance(value, list) else [value]
        paths = [
            source_of(source) if isinstance(source, Mapping) else str(source).strip()
            for source in sources
        ]
        return name, paths[0] if len(paths) == 1 else paths

    return line


SOURCE_FIELDS = {"split": "split", "name": "subset", "subset": "subset"}
"""Fields of a source elsewhere, and of ours."""
SOURCE_COLUMNS = {
    "field": "text",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_messages": "messages",
}
"""Fields of a source that name a column, and the field of a record that it holds."""
SOURCE_KINDS = ("alpaca", "completion", "chat_template", "sharegpt")
"""Kinds of records that are known by their columns here."""


def source_of(source: Mapping[str, Any]) -> str | dict[str, Any]:
    """Return a source of axolotl as ours: its path alone where it says no more.

    Raises:
        LookupError: it has no path.
    """
    files = source.get("data_files")
    path = str((files if isinstance(files, str) else None) or source["path"]).strip()
    kind = source.get("type")
    named = {**source, **kind} if isinstance(kind, Mapping) else source
    fields = {field: named[name] for name, field in SOURCE_FIELDS.items() if named.get(name)}
    columns = {
        field: named[name]
        for name, field in SOURCE_COLUMNS.items()
        if named.get(name) not in (None, field)
    }
    if columns:
        fields["columns"] = columns
    return {"path": path, **fields} if fields else path


def unread_of_source(source: Any) -> dict[str, Any]:
    """Return what :func:`source_of` does not follow of a source."""
    if not isinstance(source, Mapping):
        return {}
    followed = {"path", "ds_type", "data_files", *SOURCE_FIELDS, *SOURCE_COLUMNS}
    usual = {"type": SOURCE_KINDS, "message_field_role": ("role",), "train_on_split": ("train",)}
    usual["message_field_content"] = ("content",)
    fields = dict(source)
    if isinstance(kind := source.get("type"), Mapping):
        del fields["type"]
        fields |= {f"type.{name}": part for name, part in kind.items()}
    return {
        name: value
        for name, value in fields.items()
        if name.removeprefix("type.") not in followed
        and not is_off(value)
        and word(value) not in usual.get(name, ())
    }


def is_text(value: Any) -> bool:
    """Return whether a value is one name."""
    return isinstance(value, str) and value != ""


def column(field: str) -> Line:
    """Return the column that holds a field of a record."""
    return lambda value, given: ("data.columns", [f"{field}={value}"])


def numbers(name: str) -> Line:
    """Return several numbers, which commas may divide."""

    def line(value: Any, given: Mapping[str, Any]) -> Pair:
        parts = value.split(",") if isinstance(value, str) else value
        return name, [number(part) for part in parts]

    return line


def revision(value: Any, given: Mapping[str, Any]) -> Pair:
    """Return the model at a revision of the hub."""
    names = ("model", "model_name_or_path", "base_model", "model_name")
    model = next((given[name] for name in names if name in given), "OWNER/NAME")
    return "model", f"{str(model).partition('@')[0]}@{value}"


OF_PLAIN_TRAINING = (SFT, "none", "null", "false", "pt", "normal")
"""Words elsewhere for training without an objective of its own."""
_OBJECTIVES = {name: name for name in ("dpo", "ipo", "simpo", "orpo", "cpo", "kto")}
"""Objectives that have the same name elsewhere."""
_OBJECTIVE_NAMES = ("stage", "rl", "train_mode", "training_mode")
"""Settings elsewhere that name an objective."""
_PAIR_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
"""Losses of LLaMA-Factory's stage of pairs, and the objectives that they are."""
_OBJECTIVE_SETTINGS = {
    "pref_beta": "beta",
    "rl_beta": "beta",
    "orpo_alpha": "beta",
    "simpo_gamma": "gamma",
    "cpo_alpha": "cpo_alpha",
    "dpo_label_smoothing": "label_smoothing",
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
}
"""Settings elsewhere of an objective, and ours."""


def objective(value: Any, given: Mapping[str, Any]) -> Pair | None:
    """Return the objective that all of their settings make together: plain fine-tuning where none
    of them names another, as elsewhere; None for one that we have not."""
    named = next((word(given[name]) for name in _OBJECTIVE_NAMES if name in given), SFT)
    if named in OF_PLAIN_TRAINING:
        return "objective", SFT
    name = _OBJECTIVES.get(named)
    if name == "dpo" and "pref_loss" in given:
        name = _PAIR_LOSSES.get(word(given["pref_loss"]))
    if name is None:
        return None
    settings = {
        ours: number(given[theirs])
        for theirs, ours in _OBJECTIVE_SETTINGS.items()
        if theirs in given
    }
    return "objective", {"name": name, **settings} if settings else name


def repository(value: Any, given: Mapping[str, Any]) -> Pair:
    """Return the repository that a run is uploaded to."""
    return "push_to_hub", "" if is_off(value) else str(given.get("hub_model_id") or "OWNER/NAME")


def memory(value: Any, given: Mapping[str, Any]) -> Pair:
    """Return a budget of bytes: a number is of gibibytes, a text has its unit."""
    return "budget", f"{value}GiB" if word(value).replace(".", "").isdigit() else str(value)


def ranks(value: Any, given: Mapping[str, Any]) -> Pair:
    """Return the method that spreads parameters, gradients and optimizer states over ranks."""
    return "method", "zero3"


def is_by_epoch(key: str, value: Any) -> bool:
    """Return whether a setting counts epochs, or parts of them, where ours counts steps."""
    return key.endswith("_per_epoch") or word(value) in ("epoch", "best")


def registered_columns(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of an entry in LLaMA-Factory's register that have other names here."""
    columns = entry.get("columns", {})
    tags = entry.get("tags", {})
    speaks_roles = tags.get("role_tag", "from") == "role"
    turns = "messages" if speaks_roles else "conversations"
    is_chat = entry.get("formatting") == "sharegpt"
    fields = {"messages": turns} if is_chat else {}
    if not is_chat:
        fields = {"prompt": "instruction", "query": "input", "response": "output"}
    fields |= {"chosen": "chosen", "rejected": "rejected"} if entry.get("ranking") else {}
    named = {field: columns[name] for name, field in fields.items() if columns.get(name)}
    return {field: column for field, column in named.items() if field != column}
