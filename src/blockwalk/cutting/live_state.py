"""The state of a model in memory, put back after a trial run of it: attributes of its modules,
their buffers, containers that its hooks write to, and the generators of random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.numerics.drawing import own_draws

_CONTAINERS = (dict, list, set)
_OF_TORCH = frozenset(nn.Module().__dict__)
"""Attributes that every module has, most of them empty."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that keep the functions that are called beside its forward."""


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Let a trial run of a model leave no trace.

    Buffers are copies meanwhile, float32 in the place of 16 bits. Attributes of modules, and of
    the objects and containers that their hooks refer to, are as before when the context ends."""
    import numpy

    attributes: dict[int, tuple[Any, dict[str, Any]]] = {}
    contents: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        _note(module, attributes, contents)
        for function in functions_of(module):
            _note_function(function, attributes, contents)
    numpy_state = numpy.random.get_state()
    python_state = random.getstate()
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
    kind = accelerators[0].type if accelerators else "cpu"
    try:
        with own_draws(), torch.random.fork_rng(accelerators, device_type=kind):
            copies: dict[int, Tensor] = {}
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = copies.setdefault(id(buffer), _copied(buffer))
            yield
    finally:
        for container, content in contents.values():
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
        for owner, values in attributes.values():
            owner.__dict__.clear()
            owner.__dict__.update(values)
        numpy.random.set_state(numpy_state)
        random.setstate(python_state)


def functions_of(module: nn.Module) -> Iterator[Any]:
    """Yield the functions that a module's owner put on it: hooks, and a forward of its own."""
    for hooks in HOOKS:
        yield from getattr(module, hooks).values()
    if "forward" in module.__dict__:
        yield module.__dict__["forward"]


def code_of(function: Any) -> Any:
    """Return the code object that runs when a hook is called; None of what has none."""
    while hasattr(function, "func"):
        function = function.func
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__")
    return getattr(function, "__code__", None)


def _copied(buffer: Tensor) -> Tensor:
    copy = buffer.detach().clone()
    in_16_bits = copy.is_floating_point() and copy.dtype.itemsize == 2
    return copy.float() if in_16_bits else copy


def _note(owner: Any, attributes: dict[int, Any], contents: dict[int, Any]) -> None:
    """Note the attributes of an object, and the contents of the containers among them."""
    if id(owner) in attributes:
        return
    attributes[id(owner)] = (owner, dict(owner.__dict__))
    for name, value in owner.__dict__.items():
        if name not in _OF_TORCH or (isinstance(value, dict) and value):
            _note_container(value, contents)


def _note_container(value: Any, contents: dict[int, Any]) -> None:
    if isinstance(value, _CONTAINERS) and id(value) not in contents:
        contents[id(value)] = (value, value.copy())


def _note_function(function: Any, attributes: dict[int, Any], contents: dict[int, Any]) -> None:
    """Note what a hook may write to: the object that it is a method of, and its closure."""
    owner: Any = function.__self__ if isinstance(function, MethodType) else function
    if not isinstance(owner, FunctionType):
        if hasattr(owner, "__dict__"):
            _note(owner, attributes, contents)
        return
    for cell in owner.__closure__ or ():
        value = _cell_value(cell)
        _note_container(value, contents)
        plain = not isinstance(value, type | FunctionType | MethodType | Tensor)
        if plain and type(value).__module__ not in ("builtins", "torch") and _has_state(value):
            _note(value, attributes, contents)


def _has_state(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict)


def _cell_value(cell: Any) -> Any:
    """Return what a closure's cell holds; None of a name that is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
