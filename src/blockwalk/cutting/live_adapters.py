"""The state of adapters in a model in memory: what of it a walk follows, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_UNFOLLOWED = {"bias": "none", "layer_replication": None, "alora_invocation_tokens": None}
"""Fields of an adapter's configuration that change more than its layers, and the value of each that
does not."""


def _adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers of a model that carry an adapter, with their names."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def of_adapters(model: Any) -> frozenset[int]:
    """Return the identities of a ``PeftModel``'s parameters and buffers that are not its base's;
    none of a plain model."""
    if not hasattr(model, "peft_config"):
        return frozenset()
    base = model.get_base_model()
    of_base = {id(tensor) for tensor in (*base.parameters(), *base.buffers())}
    for _, layer in _adapted_layers(model):
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if not name.startswith("base_layer."):
                of_base.discard(id(tensor))
    tensors = (*model.parameters(), *model.buffers())
    return frozenset(id(tensor) for tensor in tensors) - of_base


def refuse_adapter_state(model: nn.Module) -> None:
    """Raise ValueError for adapters in memory whose state no walk follows: merged, several at
    work, with a loss of their own, or with more than layers of their own."""
    peft_model: Any = model
    if not hasattr(model, "peft_config"):
        return
    for name, layer in _adapted_layers(model):
        if getattr(layer, "merged", False):
            raise ValueError(
                f"the adapter of {name} is merged into its base weight ({layer.merged_adapters}),"
                " where no gradient reaches it: call unmerge_adapter() on the PeftModel"
            )
        if len(active := layer.active_adapters) > 1:
            raise ValueError(
                f"{len(active)} adapters are active in {name} ({', '.join(active)}), and Blockwalk"
                " trains one: choose it with set_adapter, or join them (add_weighted_adapter)"
            )
    for config in peft_model.peft_config.values():
        for field, plain in _UNFOLLOWED.items():
            value = getattr(config, field, None)
            if value and value != plain:
                raise ValueError(
                    f"the adapter's {field} is {value!r}, which a walk does not follow or save;"
                    " make the adapter without it"
                )
    from peft.tuners.tuners_utils import BaseTuner

    tuner: Any = type(peft_model.base_model)
    if issubclass(tuner, BaseTuner) and tuner.forward is not BaseTuner.forward:
        raise ValueError(
            f"the forward of {tuner.__name__} adds a computation over all layers (its loss, or its"
            " routing) to the model's own, which a walk block by block cannot: take LoRA, or"
            " another adapter whose layers answer by themselves"
        )
