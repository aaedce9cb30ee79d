"""The record of a pass up to a model's last layer: the arguments of every layer, and the shapes
that the modules before them answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.cutting.calls import BlockCall, Handed, Prologue, rebuild, tensors_of
from blockwalk.cutting.ownership import Part


class Recording:
    """The record of one pass, layer by layer.

    Args:
        attention_mode: the context in which blocks compute their attention.
        live: whether blocks write into a cache that they are called with, as in generation.
        hands_on: whether blocks may hand each other more than the hidden state.
    """

    def __init__(self, attention_mode: Any, *, live: bool, hands_on: bool) -> None:
        self.attention_mode = attention_mode
        self.live = live
        self.hands_on = hands_on
        self.calls: list[BlockCall] = []
        self._embedded: Tensor | None = None
        """The hidden state that the first layer was called with."""
        self._leaf_of: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors with a graph behind them, and the leaf that stands for each; by id."""
        self._outputs: dict[str, list[Any]] = {}
        self._handed = Handed()

    def record_call(self, layer: Part, arguments: Mapping[int | str, Any]) -> Tensor:
        """Record the call of a layer, and return its hidden state.

        Args:
            arguments: the layer's, by position or keyword.

        Raises:
            ValueError: another layer was due, or the hidden state is not among its arguments.
        """
        due = len(self.calls) + 1
        name = layer.canonical
        if layer.unit != due:
            raise ValueError(
                f"layer {name} was called as number {due} where number {layer.unit} was due: the"
                " model does not run its layers once each, in order"
            )
        hidden_at = self._hidden_at(arguments, name)
        hidden_BSD: Tensor = arguments[hidden_at]
        if self._embedded is None:
            self._embedded = hidden_BSD
        recorded = {
            key: rebuild(value, self._leaf, f"argument {key} of {name}", share_caches=self.live)
            for key, value in {**arguments, hidden_at: None}.items()
        }
        leaves = {id(t): t for t in tensors_of(recorded) if t.requires_grad}
        call = BlockCall(
            due,
            layer.module,
            hidden_at,
            recorded,
            tuple(leaves.values()),
            self.attention_mode,
            self.live,
            self._handed,
            self.hands_on,
        )
        self.calls.append(call)
        return hidden_BSD

    def hook_of(self, name: str) -> Callable[..., None]:
        """Return a forward hook that notes the shapes of what a module answers."""

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            shapes = rebuild(output, partial(torch.empty_like, device="meta"), name)
            self._outputs.setdefault(name, []).append(shapes)

        return hook

    def prologue(self) -> Prologue:
        """Return what was recorded, once the first layer was called."""
        assert self._embedded is not None, "no layer was called"
        return Prologue(
            self._embedded,
            tuple(self.calls),
            tuple(source for source, _ in self._leaf_of.values()),
            tuple(stand for _, stand in self._leaf_of.values()),
            {name: tuple(values) for name, values in self._outputs.items()},
        )

    def _leaf(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in self._leaf_of:
            self._leaf_of[id(tensor)] = (tensor, tensor.detach().requires_grad_(True))
        return self._leaf_of[id(tensor)][1]

    def _hidden_at(self, arguments: Mapping[int | str, Any], name: str) -> int | str:
        """Return the position or keyword of the hidden state among a layer's arguments; from the
        second layer on it must be the very tensor that the first was given, or all of it under
        another name (a slice that leaves nothing out)."""
        if self._embedded is None:
            for place in (0, "hidden_states"):
                if isinstance(arguments.get(place), Tensor):
                    return place
            raise ValueError(f"{name} is called with no hidden state among {list(arguments)}")
        for place, value in arguments.items():
            if value is self._embedded:
                return place
        for place, value in arguments.items():
            if isinstance(value, Tensor) and _same_elements(value, self._embedded):
                return place
        raise ValueError(f"the model works on the hidden state before {name}, outside its layers")


def _same_elements(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory, in the same order."""
    layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
    other_layout = (other.shape, other.stride(), other.storage_offset(), other.dtype)
    if layout != other_layout:
        return False
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)
