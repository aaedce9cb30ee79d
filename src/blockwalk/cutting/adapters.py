"""LoRA adapters and prefixes, as a caller gives them: settings, a PEFT configuration, the folder of
saved ones, or a model in memory that carries some.

How PEFT makes them is :mod:`blockwalk.cutting.peft_models`, their files are
:mod:`blockwalk.cutting.saved_adapters`. A prefix (``PrefixTuningConfig``) is made of settings, or
kept where a model is given with one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from blockwalk.cutting.adapter_names import Places, require_matches, require_patterns
from blockwalk.cutting.anatomy import canonical_name
from blockwalk.cutting.live_adapters import of_adapters
from blockwalk.cutting.lora_forward import weight_norms
from blockwalk.cutting.peft_models import add_adapter, lora_config, prompt_encoder, refuse_config
from blockwalk.cutting.saved_adapters import load_adapter
from blockwalk.cutting.skeleton import persistent_buffers
from blockwalk.numerics.codecs.weights import DenseWeight, Value
from blockwalk.plan.choices import OF_PEFT, Adapters, LoraSettings, PrefixSettings
from blockwalk.plan.parsing import adapter_settings
from blockwalk.system.deferred_imports import deferred_imports


def as_adapters(lora: Any) -> Adapters | str | os.PathLike[str] | None:
    """Return a caller's adapters in one form: settings, a mapping of their fields or a PEFT
    configuration as settings; a folder as it is; True for those of the defaults; None for none, and
    for False.

    Raises:
        ValueError: something else, or a field that Blockwalk cannot honour.
    """
    if isinstance(lora, bool):
        return LoraSettings() if lora else None
    if lora is None or isinstance(lora, LoraSettings | PrefixSettings | str | os.PathLike):
        return lora
    if isinstance(lora, Mapping):
        return adapter_settings(lora)
    from peft import LoraConfig

    if not isinstance(lora, LoraConfig):
        raise ValueError(
            f"lora is {lora!r}; it takes true, false, a blockwalk.LoraSettings or PrefixSettings,"
            " a mapping such as {'rank': 8} or {'num_virtual_tokens': 5}, a peft.LoraConfig, or the"
            " folder of a saved adapter"
        )
    refuse_config(lora)
    if lora.task_type not in (None, "CAUSAL_LM"):
        raise ValueError(
            f"the LoraConfig's task_type is {lora.task_type}; Blockwalk trains causal language"
            " models: CAUSAL_LM"
        )
    if lora.target_modules is None:
        raise ValueError(
            "the LoraConfig's target_modules is None; name the modules, or set it to 'all-linear'"
        )
    values = {field.name: getattr(lora, field.name) for field in dataclasses.fields(lora)}
    values = {
        name: sorted(value) if isinstance(value, set) else value for name, value in values.items()
    }
    settings = {setting: values.pop(field) for field, setting in OF_PEFT.items()}
    default = lora_config()
    options = {
        name: value
        for name, value in values.items()
        if value is not None and value != getattr(default, name)
    }
    return adapter_settings({**settings, "options": options})


@deferred_imports()
def adapt(
    model: nn.Module,
    lora: Adapters | str | os.PathLike[str],
    *,
    seed: int = 0,
    revision: str | None = None,
    read: Callable[[str], Value] | None = None,
    read_original: Callable[[str], Value] | None = None,
) -> Any:
    """Put adapters on a model: new ones from settings, or those of a folder.

    Args:
        model: a model, or a skeleton of one.
        lora: the settings of new adapters, or the folder of saved ones.
        seed: of new adapters' values.
        revision: of the hub's repository that the model is from.
        read: gives a skeleton's base weights by canonical name as a walk reads them, for adapters
            that begin from them.
        read_original: gives any model's as they came, where that is not the same.
    """
    if isinstance(lora, str | os.PathLike):
        return load_adapter(model, os.fspath(lora), read=read_original or read)
    if isinstance(lora, PrefixSettings):
        return _add_prefix(model, lora, seed, revision, read_original or read)
    options = {"revision": revision, **lora.options}
    config = lora_config(lora.rank, lora.alpha, lora.target_modules, lora.dropout, **options)
    places = Places.of(model)
    try:
        wrapped = add_adapter(model, config, seed=seed)
    except ValueError:
        # PEFT says which names it looked for, and not which there are
        require_matches(config, places)
        raise
    require_matches(wrapped.peft_config["default"], places)
    require_patterns(lora, wrapped.base_model.targeted_module_names)
    refuse_tied_lora(wrapped)
    if read is not None:
        _read_norms(wrapped, read)
    return wrapped


def _add_prefix(
    model: nn.Module,
    prefix: PrefixSettings,
    seed: int,
    revision: str | None,
    read: Callable[[str], Value] | None,
) -> Any:
    """Put a prefix on a model, with the values that its settings name; those of tokens where
    ``read`` gives the weights."""
    from peft import PrefixTuningConfig

    from blockwalk.cutting.prefixes import keys_and_values

    tokens = prefix.num_virtual_tokens
    fields: dict[str, Any] = {
        "num_virtual_tokens": tokens,
        "init_weights": "zero" if prefix.init_weights == "zero" else None,
        "revision": revision,
    }
    wrapped = add_adapter(model, PrefixTuningConfig(task_type="CAUSAL_LM", **fields), seed=seed)
    if read is not None and prefix.init_weights == "tokens":
        (param,) = prompt_encoder(wrapped).values()
        values = keys_and_values(model, tokens, seed, read)
        if values.shape != param.shape:
            raise ValueError(
                f"{type(model).__name__} does not keep {tokens} keys and values of one width in"
                " every layer"
            )
        param.data = values
    return wrapped


def _read_norms(wrapped: Any, read: Callable[[str], Value]) -> None:
    """Give new adapters what PEFT computes of the base weights: DoRA's magnitudes, which are the
    norms of W's rows."""
    for name, module in wrapped.named_modules():
        for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
            weight = read(f"{canonical_name(name)}.weight")
            weight = DenseWeight(weight) if isinstance(weight, Tensor) else weight
            magnitude.weight.data = weight_norms(weight, transposed=module.fan_in_fan_out).float()


def refuse_tied_lora(model: Any) -> None:
    """Raise ValueError for LoRA on both ends of a model with ``ensure_weight_tying``, where it is
    to be trained.

    PEFT keeps one pair of factors, of which the head reads the transposes, and ties a file's two
    pairs when it loads them; the walk trains each factor by itself."""
    for config in getattr(model, "peft_config", {}).values():
        base = model.get_base_model()
        ends = (base.get_input_embeddings(), base.get_output_embeddings())
        if getattr(config, "ensure_weight_tying", False) and all(
            getattr(end, "lora_A", None) is not None for end in ends
        ):
            raise ValueError(
                "ensure_weight_tying ties the LoRA of the embedding to the LoRA of the head, which"
                " the walk cannot train as one; leave ensure_weight_tying out (two adapters, which"
                " PEFT keeps apart as well), or train the weight itself: take both out of"
                " lora.target_modules and set lora.options.modules_to_save: [embed_tokens] with"
                " ensure_weight_tying: true"
            )


def refuse_copies(model: Any) -> None:
    """Raise ValueError for a ``PeftModel`` that trains copies of base modules beside them."""
    for config in getattr(model, "peft_config", {}).values():
        for field in ("modules_to_save", "trainable_token_indices"):
            if getattr(config, field, None):
                raise ValueError(
                    f"the PeftModel trains a copy of what its {field} names; give the plain"
                    " model, and the LoraConfig as lora: what it names is then trained where it"
                    " stands"
                )


def base_tensors(model: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the plain model in a model in memory (itself, or the base of a ``PeftModel``), and the
    base's own parameters and persistent buffers, by canonical name."""
    adapters = tuple(getattr(model, "peft_config", ()))
    base = model.get_base_model() if adapters else model
    tensors = {
        **dict(base.named_parameters()),
        **{name: base.get_buffer(name) for name in persistent_buffers(base)},
    }
    excluded = of_adapters(model)
    return base, {
        canonical_name(name, adapters, ""): tensor
        for name, tensor in tensors.items()
        if id(tensor) not in excluded
    }
