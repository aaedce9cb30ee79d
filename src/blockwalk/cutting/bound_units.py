"""The units of a model, whose parameters come and go.

The modules stay. Where a unit's parameters are not, placeholders without storage stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from blockwalk.cutting.anatomy import Anatomy, canonical_name, head_spec
from blockwalk.cutting.decay import spared_by_decay
from blockwalk.cutting.ownership import find_parameters, find_parts
from blockwalk.numerics.codecs.weights import Value
from blockwalk.numerics.lazy_parameter import LazyParameter
from blockwalk.plan.model_spec import ModelSpec


def base_of(model: nn.Module) -> Any:
    """Return the model of transformers, without PEFT's around it."""
    outer: Any = model
    return outer.get_base_model() if hasattr(model, "peft_config") else outer


def gradient_hooks(
    parameters: Mapping[str, nn.Parameter],
) -> dict[str, tuple[Callable[[Tensor], Tensor | None], ...]]:
    """Return the functions that are hooked to gradients of trainable parameters, by name.

    Raises:
        ValueError: a hook reads the parameter after its gradient was accumulated: a walk has no
            parameter with a gradient.
    """
    hooks = {}
    for name, param in parameters.items():
        if not param.requires_grad:
            continue
        if getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name} has a register_post_accumulate_grad_hook, which reads the parameter beside"
                " its gradient; a walk follows register_hook, which is given the gradient alone"
            )
        if param._backward_hooks:
            hooks[name] = tuple(param._backward_hooks.values())
    return hooks


class BoundUnits:
    """Prologue, blocks and epilogue of a model: the modules of each, and the parameters that are
    bound to them.

    Args:
        model: the model, or a ``PeftModel`` around it.
        anatomy: what is called in which order.

    Raises:
        ValueError: the model carries several adapters.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy) -> None:
        self.model = model
        self.base = base_of(model)
        self.adapters: tuple[str, ...] = tuple(getattr(model, "peft_config", ()))
        if len(self.adapters) > 1:
            raise ValueError(
                f"the model carries {len(self.adapters)} adapters {self.adapters}; Blockwalk"
                " trains one"
            )
        self.device = torch.device("cpu")
        prefix = "".join(
            f"{name}." for name, module in model.named_modules() if name and module is self.base
        )

        def canonical(name: str) -> str:
            return canonical_name(name, self.adapters, prefix)

        self._units = find_parts(model, anatomy, canonical)
        self._spec = find_parameters(model, self.base, self._units, canonical)
        names = {id(param): name for name, param in self._units.placeholders.items()}
        tied = {name for _, name in self._spec.tied}
        self.head = head_spec(model, self.base, anatomy, names, tied)
        self.spared_by_decay = spared_by_decay(model, canonical)
        """The norms and biases, which weight decay spares, by canonical name."""
        self.gradient_hooks = gradient_hooks(self._units.placeholders)
        """The functions that a parameter's owner hooked to its gradient, by canonical name."""
        self._bound: set[int] = set()
        self._modules = tuple(model.modules())
        self._modules_of_blocks = tuple(tuple(part.module.modules()) for part in self._units.layers)

    def set_training(self, training: bool) -> None:
        """Put the model in training or in evaluation mode, where a module of it is not yet: torch
        goes through all modules, which takes longer than their forwards."""
        for module in self._modules:
            if module.training is not training:
                self.model.train(training)
                return

    def spec(self) -> ModelSpec:
        """Return units in execution order with their parameters."""
        return self._spec

    @property
    def epilogue_index(self) -> int:
        """The epilogue's unit index, L + 1."""
        return self._units.epilogue

    def modules(self, unit: int) -> list[nn.Module]:
        """Return the unit's outermost modules."""
        return [
            part.module for part in (*self._units.layers, *self._units.pieces) if part.unit == unit
        ]

    def tensors(self, block: int) -> list[Tensor]:
        """Return the parameters and buffers that a block's modules hold now, placeholders among
        them; by unit, 1 the first block."""
        members = [
            holder
            for module in self._modules_of_blocks[block - 1]
            for holder in (module._parameters, module._buffers)
            if holder
        ]
        return [tensor for holder in members for tensor in holder.values() if tensor is not None]

    def to(self, device: torch.device | str) -> Self:
        """Move the buffers; parameters are wherever they are bound from."""
        self.device = torch.device(device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)
        return self

    def take_parameters(self) -> dict[str, Tensor]:
        """Hand over the real parameters that the modules hold, by canonical name; placeholders take
        their places."""
        assert not self._bound, f"units {self._bound} are bound"
        placeholders = self._units.placeholders
        parameters = {}
        for name, param in placeholders.items():
            if not param.is_meta:
                parameters[name] = param.detach()
                empty = torch.empty_like(param, device="meta")
                placeholders[name] = nn.Parameter(empty, requires_grad=param.requires_grad)
        for unit in range(self.epilogue_index + 1):
            self._put_back(unit, self._units.places[unit])
        return parameters

    def bind(self, unit: int, values: Mapping[str, Value]) -> dict[str, Tensor]:
        """Put parameters in their places: tensors, or weights that are decoded when used (2-D;
        frozen, or without a graph).

        Answers the bound trainable tensors by name: the leaves whose gradients are the parameters'.
        A tensor that does not require a gradient is given a leaf that does, over the same memory.
        The epilogue accepts a tied head's weight."""
        places = self._units.places[unit]
        trainable = self._units.trainable
        leaves: dict[str, Tensor] = {}
        self._bound.add(unit)
        for name, value in values.items():
            placed: Tensor
            # a class is asked for before an instance: a block has dozens of parameters
            if type(value) is not Tensor and not isinstance(value, Tensor):
                assert name not in trainable or not torch.is_grad_enabled(), (
                    f"{name} is trained: bind a tensor"
                )
                placed = self._placed(value)
            elif name in trainable:
                placed = leaves[name] = (
                    value if value.requires_grad else value.detach().requires_grad_(True)
                )
            else:
                # A Parameter, as PEFT's parametrizations of expert weights ask for. They count as
                # writes to it, which must not count for its neighbours in the file: .data has a
                # version of its own.
                placed = nn.Parameter(value.data, requires_grad=False)
            for place in places[name]:
                place.module._parameters[place.leaf] = placed  # type: ignore[assignment]
        return leaves

    def _placed(self, value: Value) -> Tensor:
        return value if isinstance(value, Tensor) else LazyParameter(value, self.device)

    def unbind(self, unit: int, names: Sequence[str] | None = None) -> None:
        """Put placeholders back, so that nothing here refers to what was bound: of all parameters,
        or of those named."""
        if unit not in self._bound:
            return
        if names is None:
            self._bound.remove(unit)
        self._put_back(unit, self._units.places[unit] if names is None else names)

    def _put_back(self, unit: int, names: Iterable[str]) -> None:
        for name in names:
            for place in self._units.places[unit][name]:
                place.module._parameters[place.leaf] = self._units.placeholders[name]

    def linears(self, unit: int) -> dict[str, nn.Linear]:
        """Return a unit's linear layers, by the canonical name of their weight."""
        return {
            name: place.module
            for name, places in self._units.places[unit].items()
            for place in places
            if place.leaf == "weight" and isinstance(place.module, nn.Linear)
        }

    def layer_name(self, unit: int) -> str:
        """Return the canonical name of a block's module."""
        return self._units.layers[unit - 1].canonical

    @contextmanager
    def zeros_in_prologue(self) -> Iterator[None]:
        """Let prologue parameters that are not bound read as zeros (of one element of memory) for
        the time of a pass: one whose outcome of the prologue is forgotten."""
        empty = [
            (place, param)
            for places in self._units.places[0].values()
            for place in places
            if (param := place.module._parameters[place.leaf]) is not None and param.is_meta
        ]
        try:
            for place, param in empty:
                zeros = torch.zeros((), dtype=param.dtype, device=self.device).expand(param.shape)
                place.module._parameters[place.leaf] = zeros  # type: ignore[assignment]
            yield
        finally:
            for place, param in empty:
                place.module._parameters[place.leaf] = param
