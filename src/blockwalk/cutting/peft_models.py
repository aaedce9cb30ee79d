"""PEFT's adapters on models whose base weights are not there.

A ``LoraConfig`` is carried where base weights are read a range at a time (DoRA's norms) or trained
where they stand (``modules_to_save``); one that would change frozen ones is refused, with the
reason."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn

from blockwalk.cutting.adapter_patterns import require_ends
from blockwalk.cutting.anatomy import canonical_name
from blockwalk.cutting.live_adapters import of_adapters
from blockwalk.cutting.lora_forward import fuse
from blockwalk.numerics.drawing import DrawingFrom
from blockwalk.plan.parsing import did_you_mean
from blockwalk.plan.table import LOOSE

_ACCEPTED = """
    task_type peft_type auto_mapping peft_version base_model_name_or_path revision
    inference_mode r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias
    use_rslora init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern
    loftq_config runtime_config lora_bias target_parameters use_dora modules_to_save
    ensure_weight_tying
"""
"""Fields of a ``LoraConfig`` that Blockwalk honours; any other must be as PEFT leaves it."""

_WHY = {
    "trainable_token_indices": "it trains rows of the embedding beside it; modules_to_save:"
    " [embed_tokens] trains the embedding where it stands",
    "layer_replication": "it changes the sequence of layers",
}

STARTS = (True, False, "gaussian")
"""``init_lora_weights`` that need no base weights."""


def refuse_config(config: Any) -> None:
    """Raise ValueError for a ``LoraConfig`` that does not leave the base weights alone."""
    if config.init_lora_weights not in STARTS:
        raise ValueError(
            f"init_lora_weights = {config.init_lora_weights!r} computes the adapter from the base"
            " weights or changes them; give the Walker the model that PEFT makes (get_peft_model),"
            " or set it to True (its default), 'gaussian' or False"
        )
    if config.bias != "none":
        raise ValueError(f"bias = {config.bias!r} trains base parameters; set it to 'none'")
    plain = type(config)()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _ACCEPTED.split() and value != getattr(plain, field.name) and value:
            why = _WHY.get(field.name, "Blockwalk trains plain LoRA")
            raise ValueError(f"{field.name} = {value!r} is not supported: {why}")


@contextmanager
def _weightless(model: nn.Module) -> Iterator[None]:
    """Let PEFT see float32 weights on the CPU where there are none, so that it makes real adapters
    in float32.

    Each stand-in takes one element of memory. PEFT's decision what is trained is carried over to
    the placeholders."""
    stand_ins: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
    twins: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, param in module._parameters.items():
            if param is not None and param.is_meta:
                twin = twins.setdefault(
                    id(param), nn.Parameter(torch.zeros(()).expand(param.shape))
                )
                stand_ins.append((module, leaf, param, twin))
                module._parameters[leaf] = twin
    try:
        with warnings.catch_warnings():  # PEFT asks transformers for it by this name
            warnings.filterwarnings(
                "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
            )
            yield
    finally:
        for module, leaf, param, twin in stand_ins:
            param.requires_grad_(twin.requires_grad)
            module._parameters[leaf] = param


def lora_config(
    rank: int = 8,
    alpha: float = 16.0,
    target_modules: str | Sequence[str] = "all-linear",
    dropout: float = 0.0,
    **settings: Any,
) -> Any:
    """Return a PEFT ``LoraConfig`` for a causal language model; ``settings`` are further fields of
    it."""
    from peft import LoraConfig
    from peft.utils.constants import DUMMY_TARGET_MODULES

    fields = [field.name for field in dataclasses.fields(LoraConfig)]
    for name in settings:
        if name not in fields:
            raise ValueError(
                f"PEFT's LoraConfig has no field {name!r}"
                f" (lora.options){did_you_mean(name, fields, LOOSE)}"
            )
    targets = (
        target_modules if isinstance(target_modules, str) else list(target_modules)
    ) or DUMMY_TARGET_MODULES
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]
        target_modules=targets,
        lora_dropout=dropout,
        **settings,
    )


def add_adapter(model: nn.Module, config: Any, *, seed: int = 0, saved: str = "") -> Any:
    """Put a LoRA adapter, or a prefix, on a model (a skeleton or one with weights): a ``PeftModel``
    with a frozen base.

    The adapter's parameters are real, float32, with PEFT's own initialisation drawn under ``seed``:
    the values that ``get_peft_model`` gives a float32 model after ``torch.manual_seed(seed)``.
    ``all-linear`` leaves out what a pass over text never calls, and experts with their routers.
    ``saved`` names the folder of an adapter that was trained before. Raises ValueError for what is
    no ``LoraConfig`` or ``PrefixTuningConfig``, or does not leave the base weights alone."""
    from peft import LoraConfig, PrefixTuningConfig, get_peft_model

    lora = isinstance(config, LoraConfig)
    if not lora and not isinstance(config, PrefixTuningConfig):
        raise ValueError(
            "an adapter is a peft.LoraConfig or a PrefixTuningConfig, not a"
            f" {type(config).__name__}"
        )
    if lora:
        refuse_config(config)
    require_ends(config, model, f"{saved}/adapter_config.json" if saved else "lora")
    config = copy.deepcopy(config)  # PEFT adds to it
    if (
        lora
        and isinstance(config.target_modules, str)
        and config.target_modules.lower() == "all-linear"
    ):
        config = _all_linear(config, model)
    with DrawingFrom(torch.Generator().manual_seed(seed)), _weightless(model):
        try:
            # what was saved comes with its values: none are made before their shapes are compared
            wrapped: Any = get_peft_model(model, config, low_cpu_mem_usage=bool(saved))
        except ValueError as error:
            if not lora:
                raise
            reason = str(error).rstrip(".")
            raise ValueError(f"lora.target_modules: {reason}. {_fitting(config, model)}") from error
    if not lora:
        return wrapped
    _train_in_place(wrapped, saved)
    fuse(wrapped)
    for name, param in wrapped.named_parameters():
        if ".lora_" in name and param.dtype != torch.float32:
            param.data = param.data.float()
    return wrapped


def _fitting(config: Any, model: Any) -> str:
    """Return a sentence on the names of linear layers that PEFT takes in this model."""
    from transformers.pytorch_utils import Conv1D

    names = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)
    ]
    leaves = {name.rpartition(".")[2] for name in names} - _refused_leaves(config, model, names)
    return f"Names that fit: {', '.join(sorted(leaves))}"


def _train_in_place(wrapped: Any, saved: str) -> None:
    """Train ``modules_to_save`` where they stand: PEFT's copies give way to the modules that they
    were made of.

    Raises ValueError where one of two tied weights would be trained by itself.
    """
    from peft.utils.other import ModulesToSaveWrapper

    modules = dict(wrapped.named_modules(remove_duplicate=False))
    leaves = sorted({name.rpartition(".")[2] for name in modules})
    copied = {
        name: module for name, module in modules.items() if isinstance(module, ModulesToSaveWrapper)
    }
    for name, module in copied.items():
        parent, _, leaf = name.rpartition(".")
        setattr(modules[parent], leaf, module.original_module.requires_grad_(True))
    for leaf in wrapped.active_peft_config.modules_to_save or ():
        if not any(name.endswith(leaf) for name in copied):
            raise ValueError(
                f"modules_to_save has {leaf}, and no module's name ends"
                f" so{did_you_mean(leaf, leaves, LOOSE)}"
            )
    adapted = tuple(f"{module}." for module in copied)
    for name, param in wrapped.named_parameters(remove_duplicate=False):
        if param.requires_grad and ".lora_" not in name and not name.startswith(adapted):
            cure = (
                "set ensure_weight_tying: true (lora.options), which trains both as the one that"
                " they are"
            )
            if saved:
                cure = f"write a model that has both (blockwalk merge MODEL {saved} OUT)"
                cure += ", and name OUT"
            raise ValueError(
                f"modules_to_save has one of two tied weights, and {canonical_name(name)} is the"
                f" other; {cure}"
            )


def _all_linear(config: Any, model: Any) -> Any:
    """Expand ``all-linear`` to explicit names, where not every linear layer is meant.

    Left out is what a pass over text never calls, such as a vision tower. Of a mixture the experts
    and their router are left out, what stands beside them, and what has a name of these at their
    place in another layer: PEFT takes ``gate_proj`` of a shared expert, or of a dense layer, for
    the routed ones'. So is what PEFT refuses in this model: ``out_proj`` of Mamba's layers,
    ``gate_proj`` of AFMoE's attention."""
    from transformers.pytorch_utils import Conv1D

    from blockwalk.cutting.ownership import find_parts
    from blockwalk.cutting.verify import certified_anatomy

    units = find_parts(model, certified_anatomy(model), str)
    layers = {part.name for part in units.layers}
    linear = {
        name: name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    refused = _refused_leaves(config, model, [*linear])
    idle = _below(units.idle)
    routed = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in _ROUTED]
    head = model.get_output_embeddings()
    carried = {
        name: leaf
        for name, leaf in linear.items()
        if not (leaf in refused or idle.fullmatch(name) or model.get_submodule(name) is head)
    }
    if not (refused or units.idle or routed):
        return config
    config.target_modules = _beside_mixtures(carried, linear, routed, layers) or {
        name for name in carried if not _below(routed).fullmatch(name)
    }
    return config


def _beside_mixtures(
    carried: Mapping[str, str], linear: Mapping[str, str], routed: Sequence[str], layers: set[str]
) -> set[str]:
    """Return names of linear layers that are no part of a mixture and stand at no place of one
    under a name of its own; empty where all are, as keys and values in JetMoE's attention.

    Args:
        carried: names of layers that PEFT takes, each with its end.
        linear: those of all linear layers.
        routed: names of experts and routers.
        layers: names of the model's blocks.
    """
    places = [name if (parent := name.rpartition(".")[0]) in layers else parent for name in routed]
    mixtures = _below(places)
    of_mixtures = {leaf for name, leaf in linear.items() if mixtures.fullmatch(name)}
    in_any_layer = _below(places, any_layer=True)
    return {
        name
        for name, leaf in carried.items()
        if not mixtures.fullmatch(name)
        and not (leaf in of_mixtures and in_any_layer.fullmatch(name))
    }


_ROUTED = ("experts", "router")
"""Names of a mixture's parts."""


def _below(places: Iterable[str], *, any_layer: bool = False) -> re.Pattern[str]:
    """Return a pattern of the names of some modules and of all below them; with ``any_layer`` at
    their places in each layer."""
    patterns = [re.escape(place) for place in dict.fromkeys(places)]
    if any_layer:
        patterns = [re.sub(r"\d+", r"\\d+", pattern) for pattern in patterns]
    return re.compile(rf"({'|'.join(patterns)})(\..*)?" if patterns else "(?!)")


def _refused_leaves(config: Any, model: Any, names: Sequence[str]) -> set[str]:
    """Return the ends of names of linear layers that PEFT refuses as targets in this model, or
    takes for fused experts."""
    refused = set()
    for name in {name.rpartition(".")[2]: name for name in names}.values():
        leaf = name.rpartition(".")[2]
        trial = copy.copy(config)
        trial.target_modules = {name}
        trial.target_parameters = None
        trial.rank_pattern = {}
        trial.alpha_pattern = {}
        try:
            _as_peft_takes(trial, model, leaf)
        except ValueError:
            refused.add(leaf)
            continue
        if set(trial.target_modules) != {name}:
            refused.add(leaf)
    return refused


def _as_peft_takes(config: Any, model: Any, leaf: str) -> None:
    """Let PEFT's own checks see a target, and change the configuration as they do, where this
    version of PEFT has them. Raises what they raise."""
    for module, check, arguments in (
        ("tuners.tuners_utils", "_check_lora_target_modules_mamba", (config, model, leaf)),
        (
            "utils.transformers_weight_conversion",
            "convert_peft_config_for_transformers",
            (config, model, None),
        ),
    ):
        with contextlib.suppress(ImportError):
            function = getattr(import_module(f"peft.{module}"), check, None)
            if function is not None:
                function(*arguments)


def adapter_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the adapter's own parameters of a ``PeftModel`` and the base's that are trained, by
    canonical name; tied ones by each."""
    adapters = tuple(model.peft_config)
    named = model.named_parameters(remove_duplicate=False)
    of_adapter = of_adapters(model)
    return {
        canonical_name(name, adapters): param
        for name, param in named
        if not name.startswith("prompt_encoder.")
        and (id(param) in of_adapter or param.requires_grad)
    }


def prompt_encoder(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that a prefix is made of, by canonical name; none where the model has
    no prefix."""
    adapters = tuple(model.peft_config)
    encoder = getattr(model, "prompt_encoder", nn.ModuleDict())
    return {
        canonical_name(f"prompt_encoder.{name}", adapters): p
        for name, p in encoder.named_parameters()
    }


def ties_its_ends(base: Any) -> bool:
    """Whether a plain model's embedding and head, adapted or not, are one weight."""
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    embedding, head = (getattr(getattr(end, "base_layer", end), "weight", None) for end in ends)
    return embedding is not None and embedding is head
