"""Refusals of objects that no walk can take for a model, before anything is made of them."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from blockwalk.models.model_source import ModelSource

WRAPPERS = {"_orig_mod": "torch.compile", "module": "DataParallel, DistributedDataParallel or FSDP"}
"""Attributes in which wrappers hold a model, with who wraps so."""


def require_model(model: Any, *, on_paper: bool = False) -> None:
    """Check what a caller hands over as a model.

    Args:
        on_paper: whether it is walked on torch's meta device, where nothing has values.

    Raises:
        ValueError: no name, folder or model; one in a wrapper, or without a configuration; adapters
            without their ``PeftModel``; parameters without values, or made in inference mode.
    """
    if isinstance(model, str | os.PathLike | ModelSource):
        return
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is of type {kind}; it takes the name or the folder of a model, or a"
            " transformers model in memory"
        )
    children = dict(model.named_children())
    for name, wrapper in WRAPPERS.items():
        if name in children and len(children) == 1:
            raise ValueError(
                f"model is of type {kind}, the wrapper of {wrapper}: hand over the model in it, as"
                f" in model.{name}"
            )
    if not hasattr(model, "config"):
        raise ValueError(
            f"model is of type {kind}, without a config; a walk takes models of transformers, such"
            " as AutoModelForCausalLM.from_pretrained gives"
        )
    adapters: Any = getattr(model, "peft_config", {})
    if adapters and not hasattr(model, "get_base_model"):
        raise ValueError(
            f"the adapters of {kind} ({', '.join(adapters)}) were put into the model"
            " itself (add_adapter, inject_adapter_in_model, mixed=True), and a walk takes them in a"
            " PeftModel: give peft.get_peft_model(model, config), or the plain model and the"
            " LoraConfig as lora"
        )
    for name, tensor in model.named_parameters():
        if tensor.is_meta and not on_paper:
            raise ValueError(
                f"{name} of the model in memory has no values (device meta), as device_map and"
                " init_empty_weights leave it: give the model's name or folder, whose weights a"
                " walk reads itself, or a model that was loaded whole"
            )
        if tensor.is_inference():
            raise ValueError(
                f"{name} of the model in memory was made in torch.inference_mode, where autograd"
                " cannot follow it: load the model outside of it"
            )
