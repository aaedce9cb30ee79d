"""LoRA adapters and prefixes through PEFT, on models whose base weights are not there.

A ``LoraConfig`` is carried where base weights are read a range at a time (DoRA's norms) or trained where they stand
(``modules_to_save``); one that would change frozen ones is refused, with the reason. A prefix (``PrefixTuningConfig``) is made
of settings, or kept where a model is given with one.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.cutting.anatomy import canonical_name
from blockwalk.cutting.skeleton import persistent_buffers
from blockwalk.models.safetensors_file import Entry, write
from blockwalk.numerics.codecs.weights import DenseWeight, LowRankSum, Value, Weight
from blockwalk.numerics.lazy_linear import lora_linear, unread
from blockwalk.numerics.lazy_parameter import LazyParameter
from blockwalk.plan.choices import OF_PEFT, Adapters, LoraSettings, PrefixSettings
from blockwalk.plan.parsing import LOOSE, adapter_settings, did_you_mean
from blockwalk.plan.sizes import DECODE_BYTES, spans
from blockwalk.system.atomic_files import reading
from blockwalk.system.lfs import refuse_pointer

WEIGHTS_FILE = "adapter_model.safetensors"
"""PEFT's name for the adapter's weights; its configuration is ``adapter_config.json`` beside it."""

# fmt: off
_ACCEPTED = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out",
    "bias", "use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "loftq_config", "runtime_config", "lora_bias", "target_parameters", "use_dora", "modules_to_save",
    "ensure_weight_tying",
}
# fmt: on
"""Fields of a ``LoraConfig`` that Blockwalk honours; any other must be as PEFT leaves it."""
_WHY = {
    "trainable_token_indices": "it trains rows of the embedding beside it; modules_to_save: [embed_tokens] trains the"
    " embedding where it stands",
    "layer_replication": "it changes the sequence of layers",
}


_STARTS = (True, False, "gaussian")
"""``init_lora_weights`` that need no base weights."""
_LEAVES_BASE = ("orthogonal", "eva")
"""Further ones that leave the base weights as they are, so that a saved adapter is plain LoRA."""


def _refuse(config: Any) -> None:
    """Raise ValueError for a ``LoraConfig`` that does not leave the base weights alone."""
    if config.init_lora_weights not in _STARTS:
        raise ValueError(
            f"init_lora_weights = {config.init_lora_weights!r} computes the adapter from the base weights or changes them;"
            " give the Walker the model that PEFT makes (get_peft_model), or set it to True (its default), 'gaussian' or False"
        )
    if config.bias != "none":
        raise ValueError(f"bias = {config.bias!r} trains base parameters; set it to 'none'")
    plain = type(config)()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _ACCEPTED and value != getattr(plain, field.name) and value:
            why = _WHY.get(field.name, "Blockwalk trains plain LoRA")
            raise ValueError(f"{field.name} = {value!r} is not supported: {why}")


@contextmanager
def _weightless(model: nn.Module) -> Iterator[None]:
    """Let PEFT see float32 weights on the CPU where there are none, so that it makes real adapters in float32.

    Each stand-in takes one element of memory. PEFT's decision what is trained is carried over to the placeholders.
    """
    stand_ins: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
    twins: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, param in module._parameters.items():
            if param is not None and param.is_meta:
                twin = twins.setdefault(id(param), nn.Parameter(torch.zeros(()).expand(param.shape)))
                stand_ins.append((module, leaf, param, twin))
                module._parameters[leaf] = twin
    try:
        with warnings.catch_warnings():  # PEFT asks transformers for it by this name
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
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
    """A PEFT ``LoraConfig`` for a causal language model; ``settings`` are further fields of it."""
    from peft import LoraConfig
    from peft.utils.constants import DUMMY_TARGET_MODULES

    known = [field.name for field in dataclasses.fields(LoraConfig)]
    for name in settings:
        if name not in known:
            raise ValueError(
                f"PEFT's LoraConfig has no field {name!r} (lora.options){did_you_mean(name, known, LOOSE)}"
            )
    targets = (target_modules if isinstance(target_modules, str) else list(target_modules)) or DUMMY_TARGET_MODULES
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]
        target_modules=targets,
        lora_dropout=dropout,
        **settings,
    )


def add_adapter(model: nn.Module, config: Any, *, seed: int = 0, saved: str = "") -> Any:
    """Put a LoRA adapter, or a prefix, on a model (a skeleton or one with weights): a ``PeftModel`` with a frozen base.

    The adapter's parameters are real, float32, with PEFT's own initialisation drawn under ``seed``: the values that
    ``get_peft_model`` gives a float32 model after ``torch.manual_seed(seed)``. ``all-linear`` leaves out what a pass over text
    never calls, and experts with their routers. ``saved`` names the folder of an adapter that was trained before. Raises
    ValueError for what is no ``LoraConfig`` or ``PrefixTuningConfig``, or does not leave the base weights alone.
    """
    from peft import LoraConfig, PrefixTuningConfig, get_peft_model

    lora = isinstance(config, LoraConfig)
    if not lora and not isinstance(config, PrefixTuningConfig):
        raise ValueError(f"an adapter is a peft.LoraConfig or a PrefixTuningConfig, not a {type(config).__name__}")
    if lora:
        _refuse(config)
    config = copy.deepcopy(config)  # PEFT adds to it
    if lora and isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        config = _all_linear(config, model)
    with torch.random.fork_rng(devices=[]), _weightless(model):
        torch.default_generator.manual_seed(seed)
        wrapped: Any = get_peft_model(model, config)
    if not lora:
        return wrapped
    _train_in_place(wrapped, saved)
    _fuse(wrapped)
    for name, param in wrapped.named_parameters():
        if ".lora_" in name and param.dtype != torch.float32:
            param.data = param.data.float()
    return wrapped


def refuse_copies(model: Any) -> None:
    """Raise ValueError for a ``PeftModel`` that trains copies of base modules beside them."""
    for config in getattr(model, "peft_config", {}).values():
        for field in ("modules_to_save", "trainable_token_indices"):
            if getattr(config, field, None):
                raise ValueError(
                    f"the PeftModel trains a copy of what its {field} names; give the plain model, and the LoraConfig as lora:"
                    " what it names is then trained where it stands"
                )


def _train_in_place(wrapped: Any, saved: str) -> None:
    """Train ``modules_to_save`` where they stand: PEFT's copies give way to the modules that they were made of.

    Raises ValueError where one of two tied weights would be trained by itself.
    """
    from peft.utils.other import ModulesToSaveWrapper

    modules = dict(wrapped.named_modules(remove_duplicate=False))
    leaves = sorted({name.rpartition(".")[2] for name in modules})
    copied = {name: module for name, module in modules.items() if isinstance(module, ModulesToSaveWrapper)}
    for name, module in copied.items():
        parent, _, leaf = name.rpartition(".")
        setattr(modules[parent], leaf, module.original_module.requires_grad_(True))
    asked = wrapped.active_peft_config.modules_to_save or ()
    if none := [leaf for leaf in asked if not any(name.endswith(leaf) for name in copied)]:
        raise ValueError(
            f"modules_to_save has {none[0]}, and no module's name ends so{did_you_mean(none[0], leaves, LOOSE)}"
        )
    for name, param in wrapped.named_parameters(remove_duplicate=False):
        theirs = ".lora_" in name or name.startswith(tuple(f"{module}." for module in copied))
        if param.requires_grad and not theirs:
            cure = (
                f"write a model that has both (blockwalk merge MODEL {saved} OUT), and name OUT"
                if saved
                else "set ensure_weight_tying: true (lora.options), which trains both as the one that they are"
            )
            raise ValueError(
                f"modules_to_save has one of two tied weights, and {canonical_name(name)} is the other; {cure}"
            )


def _read_norms(wrapped: Any, read: Callable[[str], Value]) -> None:
    """Give new adapters what PEFT computes of the base weights: DoRA's magnitudes, which are the norms of W's rows."""
    for name, module in wrapped.named_modules():
        for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
            weight = read(f"{canonical_name(name)}.weight")
            weight = DenseWeight(weight) if isinstance(weight, Tensor) else weight
            magnitude.weight.data = _norms(weight, transposed=module.fan_in_fan_out).float()


def _norms(weight: Weight, *, transposed: bool) -> Tensor:
    """The norms [N] of the rows of W [N, D] (transposed: of the columns of W [D, N]), a range at a time, in its dtype."""
    if transposed:
        take, (inputs, outputs) = weight.columns, weight.shape
    else:
        take, (outputs, inputs) = weight.rows, weight.shape
    some = max(1, DECODE_BYTES["cpu"] // (inputs * weight.dtype.itemsize))
    parts = (take(*span) for span in spans(0, outputs, some))
    return torch.cat([torch.linalg.vector_norm(part, dim=int(not transposed)) for part in parts])


def _all_linear(config: Any, model: Any) -> Any:
    """The configuration with the names of the layers that ``all-linear`` means, where it is not all of them: left out is what a
    pass over text never calls, such as a vision tower, and of a mixture the experts, their router, and what stands at that
    place in any layer (PEFT takes ``gate_proj`` of a shared expert, or of a dense layer, for the routed ones')."""
    from transformers.pytorch_utils import Conv1D

    from blockwalk.cutting.ownership import find_parts
    from blockwalk.cutting.verify import certified_anatomy

    units = find_parts(model, certified_anatomy(model), str)
    layers, out = {part.name for part in units.layers}, [re.escape(name) for name in units.idle]
    for name, _ in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        if leaf in ("experts", "router"):
            out.append(re.sub(r"\d+", r"\\d+", re.escape(name if parent in layers else parent)))
    left_out = re.compile(rf"({'|'.join(dict.fromkeys(out))})(\..*)?" if out else "(?!)")
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    reached = {name for name in linear if not left_out.fullmatch(name)}
    if len(reached) == len(linear) and not out:
        return config
    head = model.get_output_embeddings()
    config.target_modules = {name for name in reached if model.get_submodule(name) is not head}
    return config


def as_adapters(lora: Any) -> Adapters | str | os.PathLike[str] | None:
    """A caller's adapters in one form: settings, a mapping of their fields or a PEFT configuration as settings; a folder as
    it is; None for none.

    Raises:
        ValueError: something else, or a field that Blockwalk cannot honour.
    """
    if lora is None or isinstance(lora, LoraSettings | PrefixSettings | str | os.PathLike):
        return lora
    if isinstance(lora, Mapping):
        return adapter_settings(lora)
    from peft import LoraConfig

    if not isinstance(lora, LoraConfig):
        raise ValueError(
            f"lora is {lora!r}; it takes a blockwalk.LoraSettings or PrefixSettings, a mapping such as {{'rank': 8}} or"
            " {'num_virtual_tokens': 5}, a peft.LoraConfig, or the folder of a saved adapter"
        )
    _refuse(lora)
    if lora.task_type not in (None, "CAUSAL_LM"):
        raise ValueError(
            f"the LoraConfig's task_type is {lora.task_type}; Blockwalk trains causal language models: CAUSAL_LM"
        )
    if lora.target_modules is None:
        raise ValueError("the LoraConfig's target_modules is None; name the modules, or set it to 'all-linear'")
    given = {f.name: getattr(lora, f.name) for f in dataclasses.fields(lora)}
    given = {name: sorted(value) if isinstance(value, set) else value for name, value in given.items()}
    own = {ours: given.pop(theirs) for theirs, ours in OF_PEFT.items()}
    plain = lora_config()
    options = {name: value for name, value in given.items() if value is not None and value != getattr(plain, name)}
    return adapter_settings({**own, "options": options})


def adapt(
    model: nn.Module,
    lora: Adapters | str | os.PathLike[str],
    *,
    seed: int = 0,
    revision: str | None = None,
    read: Callable[[str], Value] | None = None,
    given: Callable[[str], Value] | None = None,
) -> Any:
    """Put adapters on a model, of a hub's ``revision``: new ones from settings, or those of a folder. For those that begin from
    base weights, ``read`` gives a skeleton's by canonical name as a walk reads them, ``given`` any model's as
    it came, where that is not the same."""
    if isinstance(lora, str | os.PathLike):
        return load_adapter(model, os.fspath(lora), read=given or read)
    if isinstance(lora, PrefixSettings):
        return _add_prefix(model, lora, seed, revision, given or read)
    options = {"revision": revision, **lora.options}
    config = lora_config(lora.rank, lora.alpha, lora.target_modules, lora.dropout, **options)
    places = _Places.of(model)
    try:
        wrapped = add_adapter(model, config, seed=seed)
    except ValueError:
        _require_matches(config, places)  # PEFT says which names it looked for, and not which there are
        raise
    _require_matches(wrapped.peft_config["default"], places)
    _require_patterns(lora, wrapped.base_model.targeted_module_names)
    refuse_tied_lora(wrapped)
    if read is not None:
        _read_norms(wrapped, read)
    return wrapped


@dataclasses.dataclass(frozen=True, slots=True)
class _Places:
    """The names in a plain model that an adapter's settings may mean."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    linears: tuple[str, ...]
    """The last parts of the names of its linear layers, sorted."""
    layers: int

    @staticmethod
    def of(model: Any) -> _Places:
        from transformers.pytorch_utils import Conv1D

        linears = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
        return _Places(
            tuple(name for name, _ in model.named_modules()),
            tuple(name for name, _ in model.named_parameters(remove_duplicate=False)),
            tuple(sorted(linears)),
            int(getattr(model.config.get_text_config(), "num_hidden_layers", 0)),
        )


def _require_matches(config: Any, places: _Places) -> None:
    """Raise ValueError where a name, a pattern or a layer's number in a ``LoraConfig`` means nothing in the model: PEFT would
    pass over it as long as another one means something."""
    from peft.utils.constants import DUMMY_TARGET_MODULES

    fields = (
        ("target_modules", "lora", places.modules),
        ("exclude_modules", "lora.options", places.modules),
        ("target_parameters", "lora.options", places.parameters),
    )
    for field, section, names in fields:
        wanted = getattr(config, field, None) or ()
        if isinstance(wanted, str):
            all_or_none = wanted.lower() == "all-linear" or wanted == DUMMY_TARGET_MODULES
            if not all_or_none and not any(re.fullmatch(wanted, name) for name in names):
                raise ValueError(
                    f"{section}.{field} is {wanted!r}, a pattern for whole names, and no name matches it; a list names"
                    f" modules by their ends. The model's linear layers are {', '.join(places.linears)}"
                )
            continue
        for end in sorted(wanted):
            if not any(name == end or name.endswith(f".{end}") for name in names):
                leaves = {name.rpartition(".")[2] for name in names}
                hint = did_you_mean(end, sorted(leaves), LOOSE)
                raise ValueError(
                    f"{section}.{field} has {end!r}, and no name in the model ends so{hint};"
                    f" its linear layers are {', '.join(places.linears)}"
                )
    numbers = getattr(config, "layers_to_transform", None)
    numbers = [numbers] if isinstance(numbers, int) else numbers or ()
    if beyond := [number for number in numbers if places.layers and not 0 <= number < places.layers]:
        raise ValueError(
            f"lora.options.layers_to_transform has {beyond[0]}, and the model's layers are 0 to {places.layers - 1}"
        )


def _require_patterns(lora: LoraSettings, adapted: Sequence[str]) -> None:
    """Raise ValueError for a rank or an alpha of modules that have no adapter."""
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in lora.options.get(field) or ():
            if not any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in adapted):
                leaves = sorted({name.rpartition(".")[2] for name in adapted})
                raise ValueError(
                    f"lora.options.{field} has {pattern!r}, and no module with an adapter is named so; they end in"
                    f" {', '.join(leaves)}"
                )


def _ties_its_ends(base: Any) -> bool:
    """Whether a plain model's embedding and head, adapted or not, are one weight."""
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    first, second = (getattr(getattr(end, "base_layer", end), "weight", None) for end in ends)
    return first is not None and first is second


def refuse_tied_lora(model: Any) -> None:
    """Raise ValueError for LoRA on both ends of a model with ``ensure_weight_tying``, where it is to be trained.

    PEFT keeps one pair of factors, of which the head reads the transposes, and ties a file's two pairs when it loads them;
    the walk trains each factor by itself."""
    for config in getattr(model, "peft_config", {}).values():
        base = model.get_base_model()
        ends = (base.get_input_embeddings(), base.get_output_embeddings())
        if getattr(config, "ensure_weight_tying", False) and all(
            getattr(end, "lora_A", None) is not None for end in ends
        ):
            raise ValueError(
                "ensure_weight_tying ties the LoRA of the embedding to the LoRA of the head, which the walk cannot train as"
                " one; leave ensure_weight_tying out (two adapters, which PEFT keeps apart as well), or train the weight"
                " itself: take both out of lora.target_modules and set lora.options.modules_to_save: [embed_tokens] with"
                " ensure_weight_tying: true"
            )


def _add_prefix(
    model: nn.Module, prefix: PrefixSettings, seed: int, revision: str | None, given: Callable[[str], Value] | None
) -> Any:
    """Put a prefix on a model, with the values that its settings name; those of tokens where ``given`` reads the weights."""
    from peft import PrefixTuningConfig

    from blockwalk.cutting.prefixes import keys_and_values

    begun, tokens = "zero" if prefix.init_weights == "zero" else None, prefix.num_virtual_tokens
    own: dict[str, Any] = {"num_virtual_tokens": tokens, "init_weights": begun, "revision": revision}
    wrapped = add_adapter(model, PrefixTuningConfig(task_type="CAUSAL_LM", **own), seed=seed)
    if given is not None and prefix.init_weights == "tokens":
        (param,) = _prompt_encoder(wrapped).values()
        values = keys_and_values(model, tokens, seed, given)
        if values.shape != param.shape:
            raise ValueError(
                f"{type(model).__name__} does not keep {tokens} keys and values of one width in every layer"
            )
        param.data = values
    return wrapped


def _fuse(wrapped: Any) -> None:
    """Let LoRA and DoRA layers answer by :func:`lora_linear` where their base weight is decoded when it is used."""
    from peft.tuners.lora import Embedding, Linear

    for name, module in wrapped.named_modules():
        if isinstance(module, Embedding) and module.lora_variant:
            raise ValueError(
                f"use_dora reads all of {canonical_name(name)} at every step; leave it out of lora.target_modules"
            )
        if isinstance(module, Linear):
            module.__dict__["forward"] = functools.partial(_fused_forward, module, module.forward)


def unfuse(model: nn.Module) -> None:
    """Let LoRA layers answer by PEFT's own forward again: a compiler makes one graph of it for all layers, where a function
    bound to each of them is another each."""
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "func", None) is _fused_forward:
            del module.__dict__["forward"]


def _fused_forward(module: Any, original: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """PEFT's LoRA forward in fewer tensors; its own wherever it is more than W·x + b + s·B·A·x with 16 or 32 bits alike. DoRA
    multiplies the product, without the bias, by magnitude / norm of W + s·B·A, which counts as a constant."""
    adapter = module.active_adapters[0]
    base, dora = module.base_layer, module.use_dora.get(adapter, False)
    keeps_in_out = type(base).__name__ == "Conv1D"
    linear = keeps_in_out or type(base).forward is nn.Linear.forward
    lazy = linear and (dora or isinstance(base.weight, LazyParameter)) and not args and not kwargs
    odd = module.disable_adapters or module.merged or (module.lora_variant and not dora)
    plain = not odd and adapter in module.lora_A and "forward" not in module.lora_A[adapter].__dict__  # answers by part
    with unread(()) if dora else nullcontext():  # the gradient of DoRA's magnitudes reads the product
        if not lazy or not plain or not isinstance(module.lora_dropout[adapter], nn.Identity):
            return original(x, *args, **kwargs)
        a_RD, b_NR = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        odd = module.lora_B[adapter].bias is not None or any(isinstance(each, LazyParameter) for each in (a_RD, b_NR))
        if odd or {a_RD.dtype, base.weight.dtype} != {x.dtype} or (base.bias is not None and base.bias.requires_grad):
            return original(x)
        weight = base.weight.weight if isinstance(base.weight, LazyParameter) else DenseWeight(base.weight.detach())
        scaling, bias = float(module.scaling[adapter]), None if dora else base.bias
        y = lora_linear(x, weight, bias, a_RD, b_NR, scaling, transposed=keeps_in_out)
    if not dora:
        return y
    left, right = a_RD.detach().t(), scaling * b_NR.detach()
    norms_N = _norms(LowRankSum(weight, *((left, right) if keeps_in_out else (right, left))), transposed=keeps_in_out)
    y = y * (module.lora_magnitude_vector[adapter].weight / norms_N)
    return y if base.bias is None else y + base.bias


def base_tensors(model: Any) -> tuple[Any, dict[str, Tensor]]:
    """The plain model in a model in memory (itself, or the base of a ``PeftModel``), and the base's own parameters and
    persistent buffers, by canonical name."""
    adapters = tuple(getattr(model, "peft_config", ()))
    base = model.get_base_model() if adapters else model
    tensors = {**dict(base.named_parameters()), **{name: base.get_buffer(name) for name in persistent_buffers(base)}}
    return base, {canonical_name(n, adapters, ""): t for n, t in tensors.items() if ".lora_" not in n}


def adapt_alike(model: nn.Module, adapted: Any) -> Any:
    """Put what a ``PeftModel`` carries, a LoRA adapter or a prefix, on another instance of its base (a skeleton, say)."""
    (config,) = adapted.peft_config.values()
    config = copy.deepcopy(config)
    begun = getattr(config, "init_lora_weights", True)
    config.init_lora_weights = True  # it comes with its values, and so does the base
    wrapped = add_adapter(model, config)
    wrapped.peft_config["default"].init_lora_weights = begun
    carried = dict(adapted.named_parameters())
    for name, param in wrapped.named_parameters():
        if param.requires_grad:
            param.data = carried[name].detach().to("cpu", torch.float32, copy=True)
    return wrapped


def adapter_parameters(model: Any) -> dict[str, nn.Parameter]:
    """The adapter's own parameters of a ``PeftModel`` and the base's that are trained, by canonical name; tied ones by each."""
    adapters, named = tuple(model.peft_config), model.named_parameters(remove_duplicate=False)
    own = {n: p for n, p in named if ".lora_" in n or (p.requires_grad and not n.startswith("prompt_encoder."))}
    return {canonical_name(name, adapters): param for name, param in own.items()}


def _in_file(name: str) -> str:
    """PEFT's name of an adapter's parameter, or of the embeddings that are a prefix, in its files."""
    if name == "prompt_encoder.embedding.weight":
        return "prompt_embeddings"
    whole = f"base_model.model.{name}"
    return whole.removesuffix(".weight") if whole.endswith(".lora_magnitude_vector.weight") else whole


def save_adapter(model: Any, state: Mapping[str, Tensor], folder: str | Path) -> None:
    """Write an adapter in PEFT's format (``adapter_model.safetensors``, ``adapter_config.json``).

    ``state`` holds the adapter's parameters by canonical name; names of other parameters are ignored. Raises
    ValueError where one of the adapter's parameters is missing.
    """
    names = adapter_parameters(model)
    if not names:
        names = {n: p for n, p in _prompt_encoder(model).items() if p.requires_grad}
    alias = getattr(model.get_base_model(), "all_tied_weights_keys", None) or {}
    kept = {name: name if name in state else alias.get(name, name) for name in names}
    missing = sorted(set(kept.values()) - state.keys())
    if missing:
        raise ValueError(f"{len(missing)} of {len(names)} adapter parameters are missing, the first is {missing[0]}")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if not next(iter(names)).startswith("prompt_encoder."):
        tied = {name: state[own].detach().to("cpu", copy=name != own) for name, own in kept.items()}
        tensors = {_in_file(name): tensor.contiguous() for name, tensor in tied.items()}
    else:
        tensors = {"prompt_embeddings": _prompt(model, state)}
    entries = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(tensors.items())}
    write(target / WEIGHTS_FILE, entries, (tensors[name] for name in entries))
    (config,) = model.peft_config.values()
    was, config.inference_mode = config.inference_mode, True
    try:
        config.save_pretrained(str(target))
    finally:
        config.inference_mode = was


def _prompt_encoder(model: Any) -> dict[str, nn.Parameter]:
    """The parameters that a prefix is made of, by canonical name; none where the model has no prefix."""
    adapters = tuple(model.peft_config)
    encoder = getattr(model, "prompt_encoder", nn.ModuleDict())
    return {canonical_name(f"prompt_encoder.{name}", adapters): p for name, p in encoder.named_parameters()}


def _prompt(model: Any, state: Mapping[str, Tensor]) -> Tensor:
    """The tensor that PEFT keeps of a prefix: the encoder's answer [virtual tokens, 2·layers·D], not the encoder."""
    (name,) = model.peft_config
    encoder, config = model.prompt_encoder[name], model.peft_config[name]
    values = {n: state[canonical_name(f"prompt_encoder.{name}.{n}", (name,))] for n, _ in encoder.named_parameters()}
    tokens = torch.arange(config.num_virtual_tokens).unsqueeze(0)
    with torch.no_grad():
        prompt: Tensor = torch.func.functional_call(encoder, values, (tokens,))[0]
    return prompt.cpu().contiguous()


def load_adapter(model: nn.Module, folder: str | Path, *, read: Callable[[str], Value] | None = None) -> Any:
    """Put a saved adapter on a model: what :func:`add_adapter` answers, with the saved values (the adapter's in float32). A
    prefix that was computed is one now: its values are what PEFT keeps.

    A file may hold copies of base weights beside the adapter (PEFT writes the embedding and the head where they carry one, as
    ``base_layer``): they must be the model's own, which ``given`` reads by canonical name. Without it those of a skeleton are
    not compared. Names of older versions of transformers are read as PEFT reads them.

    Raises ValueError where the folder's tensors are not those that its configuration asks for.
    """
    from peft import PeftConfig
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no PEFT adapter: there is no {WEIGHTS_FILE}{_where_it_is(Path(folder))}")
    with reading(Path(folder) / "adapter_config.json"):
        config = PeftConfig.from_pretrained(str(folder))
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        refuse_pointer(path)
        raise ValueError(f"{path} is no safetensors file, or truncated: {error}") from None
    refuse_saved(folder, config)
    config.inference_mode = config.prefix_projection = False
    begun = getattr(config, "init_lora_weights", True)
    if begun not in _STARTS:
        config.init_lora_weights = True  # it comes with its values
    wrapped = add_adapter(model, config, saved=os.fspath(folder))
    if begun not in _STARTS:
        wrapped.peft_config["default"].init_lora_weights = begun
    params = adapter_parameters(wrapped) or _prompt_encoder(wrapped)
    if not tensors.keys() >= {_in_file(name) for name in params}:
        tensors = present_names(wrapped, config, tensors)
    saved = {name: tensors.pop(_in_file(name)) for name in params if _in_file(name) in tensors}
    tensors = _without_copies(wrapped, tensors, read, path)
    if odd := sorted(tensors.keys() | params.keys() - saved.keys()):
        raise ValueError(f"{path} does not fit this model: {len(odd)} names differ, the first is {odd[0]}")
    first_name: dict[int, str] = {}
    for name, param in params.items():
        if param.shape != saved[name].shape:
            rows = RESIZED if ".lora_" not in name and param.ndim == 2 else ""
            raise ValueError(
                f"{name} is {list(saved[name].shape)} in {path} and {list(param.shape)} in this model{rows}"
            )
        first = first_name.setdefault(id(param), name)
        if not torch.equal(saved[first], saved[name]):
            raise ValueError(
                f"{path} has two different copies of one weight, {first} and {name}, which this model ties: PEFT trained them"
                f" apart. Write a model that has both (blockwalk merge MODEL {os.fspath(folder)} OUT), and name OUT"
            )
    refuse_parted(wrapped.get_base_model(), saved, config.to_dict(), path)
    for name, param in params.items():
        value = saved[name].to(torch.float32 if ".lora_" in name else param.dtype)
        if param.is_meta:  # a placeholder has no data
            torch.utils.swap_tensors(param, nn.Parameter(value))  # type: ignore[no-untyped-call]
        else:
            param.data = value
    return wrapped


def _where_it_is(folder: Path) -> str:
    """A hint for the folder of a run, or of one of its checkpoints, in place of its adapter's."""
    if (folder / "adapter" / WEIGHTS_FILE).is_file():
        return f"; did you mean {folder / 'adapter'}?"
    if (folder / "state.json").is_file():
        return "; a checkpoint goes on with --resume_from_checkpoint, and a run's adapter is written at its end"
    return ""


def refuse_saved(folder: str | Path, config: Any) -> None:
    """Raise ValueError for a saved adapter that changes the model itself, with the way to use it all the same."""
    if getattr(config, "bias", "none") != "none":
        raise ValueError(
            f"{folder} was trained with bias = {config.bias!r}: it holds biases of the model itself. Write a model that has"
            f" them (blockwalk merge MODEL {folder} OUT), and name OUT"
        )
    start = getattr(config, "init_lora_weights", True)
    if start not in (*_STARTS, None, *_LEAVES_BASE):
        raise ValueError(
            f"{folder} began with init_lora_weights = {start!r}, which changed the model's own weights; save it as plain LoRA"
            " with PEFT: save_pretrained(FOLDER, path_initial_model_for_weight_conversion=...)"
        )
    if getattr(config, "trainable_token_indices", None):
        raise ValueError(
            f"{folder} has trainable_token_indices: it trained rows of the embedding beside it. Merge it with PEFT"
            " (merge_and_unload), and name the merged model"
        )


RESIZED = (
    ": the vocabulary was resized before the adapter was trained; resize the model in the same way (resize_token_embeddings),"
    " save it, and name that one"
)
"""The end of a message about an embedding or a head that has another number of rows in an adapter's file."""


def present_names(model: Any, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapter's tensors under the names of PEFT's files for this version of transformers, as PEFT itself renames them when
    it loads: models with pictures had other names before transformers 4.52."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
    except ImportError:  # an older PEFT renames nothing
        return dict(tensors)
    renamed: dict[str, Tensor] = convert_peft_adapter_state_dict_for_transformers(
        model=model, peft_config=config, adapter_state_dict=dict(tensors), adapter_name="default"
    )
    return renamed


def _without_copies(
    wrapped: Any, tensors: Mapping[str, Tensor], read: Callable[[str], Value] | None, path: Path
) -> dict[str, Tensor]:
    """The tensors of a file without those that are copies of the model's own weights.

    Raises ValueError for one of another shape or with other values: PEFT would load it into the model.
    """
    adapters = tuple(wrapped.peft_config)
    first_name: dict[int, str] = {}
    base: dict[str, nn.Parameter] = {}
    for name, param in wrapped.named_parameters(remove_duplicate=False):
        if ".lora_" not in name:
            base[canonical_name(name, adapters)] = param
            first_name.setdefault(id(param), canonical_name(name, adapters))
    others = {}
    for key, tensor in tensors.items():
        name = re.sub(r"\.(base_layer|original_module|modules_to_save)\.", ".", key.removeprefix("base_model.model."))
        if name not in base:
            others[key] = tensor
            continue
        param = base[name]
        if tensor.shape != param.shape:
            raise ValueError(f"{name} is {list(tensor.shape)} in {path} and {list(param.shape)} in this model{RESIZED}")
        base_value: Value | None = None if param.is_meta else param.detach()
        if base_value is None and read is not None:
            base_value = read(first_name[id(param)])
        if base_value is not None and not _is_copy(tensor, base_value):
            raise ValueError(
                f"{path} holds {name} with other values than this model's. Write a model that has them"
                f" (blockwalk merge MODEL {path.parent} OUT), and name OUT"
            )
    return others


def _is_copy(tensor: Tensor, value: Value) -> bool:
    """Whether a saved tensor has a weight's values, up to the rounding of either dtype."""
    if isinstance(value, Tensor) and value.ndim < 2:
        return torch.equal(tensor.to(value.dtype), value)
    weight = DenseWeight(value) if isinstance(value, Tensor) else value
    some = max(1, DECODE_BYTES["cpu"] // (tensor.shape[1] * weight.dtype.itemsize))
    for start, stop in spans(0, tensor.shape[0], some):
        theirs_ND = tensor[start:stop]
        ours_ND = weight.rows(start, stop).to("cpu")
        if not (
            torch.equal(theirs_ND.to(ours_ND.dtype), ours_ND) or torch.equal(ours_ND.to(theirs_ND.dtype), theirs_ND)
        ):
            return False
    return True


def refuse_parted(model: Any, saved: Mapping[str, Tensor], config: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError where a file's two pairs of factors, of the embedding and of the head, differ that PEFT ties: of these
    it takes one. ``saved`` has them by their names in ``model``, the plain one."""
    if not config.get("ensure_weight_tying") or not _ties_its_ends(model):
        return
    ends = {module: canonical_name(name, ("default",), "") for name, module in model.named_modules()}
    embedding = ends.get(model.get_input_embeddings())
    head = ends.get(model.get_output_embeddings())
    for factor, other in (("A", "B"), ("B", "A")):
        left = saved.get(f"{embedding}.lora_embedding_{factor}")
        right = saved.get(f"{head}.lora_{other}.weight")
        if left is not None and right is not None and not torch.equal(left.t(), right):
            raise ValueError(
                f"{path} has ensure_weight_tying, and its LoRA of {embedding} is not that of {head}: PEFT would take one of"
                " them for both. Set ensure_weight_tying to false in its adapter_config.json, if they were trained apart"
            )
