"""A model with no weights: every parameter on the meta device, every buffer real and right.

And the same configuration with small dimensions, on which the cutting of a model is checked.
"""

from __future__ import annotations

import copy
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from blockwalk.models.model_source import model_source
from blockwalk.system.deferred_imports import deferred_imports

_LARGE = 1 << 16
"""Elements: more than a buffer that a constructor leaves empty to fill it."""
_POSITIONS = re.compile(r"(^|\.)(wpe|\w*positions?(_embed\w*)?)$")
"""Names of embeddings of positions: GPT-2's wpe, OPT's embed_positions, the first GPT's
positions_embed."""


def load_config(path_or_config: Any) -> Any:
    """Return the ``transformers`` configuration of a named model or of a ``config.json`` (or the
    configuration itself), copied.

    Raises:
        ValueError: as :meth:`blockwalk.models.model_source.ModelSource.configuration`.
    """
    if not isinstance(path_or_config, str | Path):
        return copy.deepcopy(path_or_config)
    return model_source(path_or_config).configuration()


def vocabulary_rows(path_or_config: Any) -> int:
    """Return the rows of a model's token embeddings; where its configuration has no ``vocab_size``,
    more than any token's id."""
    rows = getattr(load_config(path_or_config).get_text_config(), "vocab_size", None)
    return sys.maxsize if rows is None else int(rows)


@deferred_imports()
def model_class(config: Any) -> type[nn.Module]:
    """Return the class of a configuration's model: of those that answer text, with pictures or
    without, the one that its checkpoint names, else the causal language model; no other modelling
    module is imported.

    Raises ValueError where ``transformers`` has none.
    """
    from transformers.models.auto import modeling_auto as auto

    mappings = (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    rows: list[Any] = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    if not rows:
        raise ValueError(
            f"transformers has no causal language model for model_type {config.model_type!r};"
            " Blockwalk trains decoders that AutoModelForCausalLM or AutoModelForImageTextToText"
            " knows"
        )
    classes: list[type[nn.Module]] = [
        row[0] if isinstance(row, list | tuple) else row for row in rows
    ]
    return next(
        (cls for cls in classes if cls.__name__ in (config.architectures or ())), classes[0]
    )


def model_config(config: Any, cls: type[nn.Module]) -> Any:
    """Return the part of a configuration that a class is built from: its text configuration where
    the class wants only that."""
    text = config.sub_configs.get("text_config")
    return (
        config.get_text_config()
        if text is not None and getattr(cls, "config_class", None) is text
        else config
    )


_DRAWS = frozenset(
    getattr(torch.Tensor, f"{name}_")
    for name in (
        "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random",
        "uniform",
    )
)  # fmt: skip
"""Operators that fill a tensor with random numbers."""
_INITIALISERS = ("torch.nn.init", "transformers.initialization")
"""Modules whose functions fill the tensor that they are given first, and return it."""


class _NothingOnMeta(TorchFunctionMode):
    """``torch.empty`` of a weight's size answers on the meta device unless a device is asked for,
    and a tensor there is drawn without a call of torch, whose kernels for it load a compiler (25
    MB)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS or getattr(func, "__module__", None) in _INITIALISERS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        if func is torch.empty and kwargs.get("device") is None:
            on_meta = func(*args, **{**kwargs, "device": "meta"})
            return on_meta if on_meta.numel() >= _LARGE else func(*args, **kwargs)
        return func(*args, **kwargs)


class _Building(threading.local):
    """Whether this thread makes a model without its weights."""

    without_weights = False


_BUILDING = _Building()


def _to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> Any:
    """Return the placeholder of a parameter that a module registers, in a thread that makes a model
    without its weights; None leaves it as it is."""
    if not _BUILDING.without_weights or param is None or param.is_meta:
        return None
    return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)


# torch's own hook, for good: modules of other threads pass it, and none of them sees it come or go
register_module_parameter_registration_hook(_to_meta)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Send each parameter that this thread makes to the meta device as soon as a module registers
    it.

    Buffers stay where they are made, so those that a constructor computes (rotary frequencies) are
    right. Initialisers run after registration, on meta. A large ``torch.empty`` is on meta from the
    start: even untouched, weights that come and go would leave the allocator an address range of
    the model's size to scatter later temporaries over (measured on Qwen2.5-0.5B: +50 MB of touched
    pages in a training step)."""
    outer = _BUILDING.without_weights
    _BUILDING.without_weights = True
    try:
        with _NothingOnMeta():
            yield
    finally:
        _BUILDING.without_weights = outer


def persistent_buffers(model: nn.Module) -> tuple[str, ...]:
    """Return names of the buffers that ``state_dict`` stores."""
    return tuple(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    )


def stays_float32(model: Any, dtype: torch.dtype, name: str) -> bool:
    """Return whether ``from_pretrained(dtype=dtype)`` loads a parameter or buffer in float32
    (``_keep_in_fp32_modules``)."""
    return any(re.search(glob.replace("*", ".*"), name) for glob in model._get_dtype_plan(dtype))


def build_skeleton(
    path_or_config: Any, dtype: torch.dtype | None = None, cls: type[nn.Module] | None = None
) -> nn.Module:
    """Build the causal language model of a checkpoint folder or configuration without its weights:
    parameters are on the meta device, persistent buffers hold initial values until a source fills
    them.

    ``dtype`` is that of the parameters (None: the configuration's own), ``cls`` the model's class
    where it is not the one that ``transformers`` has for the configuration. The model is in
    training mode, as a constructor leaves it. Raises ValueError for a model that is no causal
    language model of ``transformers``."""
    config = load_config(path_or_config)
    if cls is None:
        cls = model_class(config)
        config = model_config(config, cls)
    dtype = dtype or config.dtype or torch.float32
    with _parameters_on_meta():
        model: nn.Module = cls._from_config(config, dtype=dtype)  # type: ignore[attr-defined]
    for name, param in model.named_parameters():
        if stays_float32(model, dtype, name):
            param.data = param.data.to(torch.float32)
    strays = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if strays:
        raise ValueError(
            f"{cls.__name__} leaves its buffers {strays[:3]} unset; Blockwalk cannot build it"
            " without weights"
        )
    return model


def require_positions(folder: str | Path, tokens: int) -> None:
    """Raise ValueError where a model has learnt fewer positions than a sequence has tokens."""
    model: Any = build_skeleton(folder)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _POSITIONS.search(name):
            learnt = module.num_embeddings - int(getattr(module, "offset", 0))
            if tokens > learnt == positions:  # others are of pictures
                raise ValueError(
                    f"sequences have up to {tokens} tokens, and the model has learnt {learnt}"
                    f" positions ({name}): lower data.max_length to {learnt}"
                )
