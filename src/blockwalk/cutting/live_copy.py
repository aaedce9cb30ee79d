"""A copy of a model in memory without its weights, in all else the model that its owner made: its
modules' classes and settings, hooks, patched forwards, buffers and adapters.

A model made anew from the configuration would be another one where its owner changed something."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.cutting.live_adapters import of_adapters
from blockwalk.cutting.skeleton import stays_float32

_CONTAINERS = (dict, OrderedDict, list, tuple, set)
"""Types of values that may hold modules, and are copied with them."""


def without_weights(model: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a model in memory, or of a ``PeftModel``, whose base weights lie on the meta
    device.

    An adapter's own parameters are float32 copies on the CPU. What refers to modules of the model
    (bound methods, closures, lists) refers to those of the copy.

    Args:
        model: stays as it is.
        dtype: that of the base's floating-point parameters, but for those that transformers keeps
            in float32.
    """
    outer: Any = model
    base = outer.get_base_model() if hasattr(model, "peft_config") else outer
    adapters = of_adapters(model)
    names = {id(param): name for name, param in base.named_parameters()}

    def placeholder(param: nn.Parameter) -> nn.Parameter:
        if id(param) in adapters:
            value = param.detach().to("cpu", torch.float32, copy=True)
        else:
            exact = stays_float32(base, dtype, names.get(id(param), ""))
            plain = torch.float32 if exact else dtype
            value = torch.empty(
                param.shape,
                dtype=plain if param.is_floating_point() else param.dtype,
                device="meta",
            )
        twin = nn.Parameter(value, requires_grad=param.requires_grad)
        for hook in (param._backward_hooks or {}).values() if param.requires_grad else ():
            twin.register_hook(hook)  # type: ignore[no-untyped-call]
        return twin

    duplicate = _Duplicate(placeholder).of(model)
    plain = duplicate.get_base_model() if hasattr(model, "peft_config") else duplicate
    plain.config.dtype = dtype
    return duplicate


def with_one_adapter(model: nn.Module) -> nn.Module:
    """Return a model, or of one that carries several adapters a copy with the one that is at work;
    its parameters are the model's own."""
    if len(getattr(model, "peft_config", ())) < 2:
        return model
    duplicate: Any = _Duplicate(lambda param: param).of(model)
    (active,) = duplicate.active_adapters
    for name in [name for name in duplicate.peft_config if name != active]:
        duplicate.delete_adapter(name)
    return duplicate  # type: ignore[no-any-return]


def plain_base(model: Any) -> Any:
    """Return a copy of a model in which the layers that PEFT adapts are those it put adapters
    around; parameters are the model's own."""
    outer: Any = model
    base = outer.get_base_model() if hasattr(model, "peft_config") else outer
    duplicate = _Duplicate(lambda param: param, unwraps=True).of(base)
    duplicate.__dict__.pop("peft_config", None)  # PEFT notes its configuration on the base too
    return duplicate


class _Duplicate:
    """The copy of a model in the making: what stands for what.

    Args:
        parameter: gives the parameter that takes another's place.
        unwraps: True where an adapted layer is copied without its adapter.
    """

    def __init__(
        self, parameter: Callable[[nn.Parameter], nn.Parameter], *, unwraps: bool = False
    ) -> None:
        self._parameter = parameter
        self._unwraps = unwraps
        self._twins: dict[int, Any] = {}
        self._originals: list[Any] = []
        """Objects whose ids are keys of the twins: they must not go meanwhile."""

    def of(self, value: Any) -> Any:
        """Return what stands for a value: itself, where it holds nothing of the model."""
        if id(value) in self._twins:
            return self._twins[id(value)]
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, nn.Parameter):
            return self._noted(value, self._parameter(value))
        if type(value) in _CONTAINERS:
            return self._container(value)
        if isinstance(value, MethodType):
            owner = self.of(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            return functools.partial(
                self.of(value.func), *self.of(value.args), **self.of(value.keywords)
            )
        if isinstance(value, FunctionType):
            return self._function(value)
        if type(value).__name__.endswith("Config"):
            return self._noted(value, copy.deepcopy(value))
        if any(isinstance(part, nn.Module) for part in getattr(value, "__dict__", {}).values()):
            twin = self._noted(value, copy.copy(value))  # a hook that is an object
            twin.__dict__.update({n: self.of(part) for n, part in vars(value).items()})
            return twin
        return value

    def _noted(self, value: Any, twin: Any) -> Any:
        self._twins[id(value)] = twin
        self._originals.append(value)
        return twin

    def _module(self, module: nn.Module) -> Any:
        if self._unwraps and "base_layer" in module._modules:
            return self._noted(module, self.of(module._modules["base_layer"]))
        kind: Any = type(module)
        twin: nn.Module = self._noted(module, kind.__new__(kind))
        for name, value in vars(module).items():
            twin.__dict__[name] = self._buffers(value) if name == "_buffers" else self.of(value)
        return twin

    def _buffers(self, buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return copies of buffers: a walk may move them, and a forward may write into them."""
        for buffer in buffers.values():
            if buffer is not None and id(buffer) not in self._twins:
                self._noted(buffer, buffer.detach().clone())
        return {name: None if b is None else self._twins[id(b)] for name, b in buffers.items()}

    def _container(self, value: Any) -> Any:
        """Return a copy of a container, with what stands for its entries."""
        if isinstance(value, dict):
            return type(value)((key, self.of(entry)) for key, entry in value.items())
        return type(value)(map(self.of, value))

    def _function(self, function: FunctionType) -> Any:
        """Return a function whose closure and defaults refer to the copy; itself, where they refer
        to nothing of the model."""
        cells = function.__closure__ or ()
        contents = [_content(cell) for cell in cells]
        self._noted(function, function)  # it may be in its own closure
        twins = [self.of(content) for content in contents]
        defaults = self.of(function.__defaults__)
        same = all(
            _same(twin, content) for twin, content in zip(twins, contents, strict=True)
        ) and _same(defaults, function.__defaults__)
        if same:
            return function
        twin = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            defaults,
            tuple(
                cell if _same(twin, content) else CellType(twin)
                for cell, twin, content in zip(cells, twins, contents, strict=True)
            ),
        )
        twin.__kwdefaults__ = function.__kwdefaults__
        twin.__dict__.update(function.__dict__)
        return self._noted(function, twin)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not assigned yet
        return None


def _same(twin: Any, value: Any) -> bool:
    """Return whether what stands for a value is that value, or a container of the same ones."""
    if twin is value:
        return True
    if type(value) not in _CONTAINERS or type(twin) is not type(value):
        return False
    if isinstance(value, dict):
        return all(_same(twin[key], entry) for key, entry in value.items())
    return all(_same(one, other) for one, other in zip(twin, value, strict=True))
