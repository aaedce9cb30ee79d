"""The check that a model's forward in training mode leaves its parameters alone: frozen weights are
read-only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class _ParameterWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Parameters that operations write into, by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
        self.written: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = {
            **dict(zip([a.name for a in func._schema.arguments], args, strict=False)),
            **(kwargs or {}),
        }
        for argument in func._schema.arguments:
            value = values.get(argument.name)
            if (
                isinstance(value, Tensor)
                and argument.alias_info is not None
                and argument.alias_info.is_write
            ):
                name = self._names.get(value.untyped_storage().data_ptr())
                if name is not None:
                    self.written.add(name)
        return func(*args, **(kwargs or {}))


def refuse_writes(model: Any, batch: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a model whose forward in training mode writes into its own parameters:
    they are read-only."""
    with torch.no_grad(), _ParameterWrites(model) as writes:
        model(**batch, use_cache=False)
    if writes.written:
        raise ValueError(
            "its forward in training mode writes into its parameters, such as"
            f" {min(writes.written)}, and frozen weights"
            " are read-only"
        )
