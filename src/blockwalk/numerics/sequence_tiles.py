"""Functions that act on each position of a sequence by itself, computed by tiles of it.

Forward, a tile's answer is written into its place of the whole one. Backward differentiates a tile
at a time: by its graph, where tiles keep theirs, or by one that is made again from the inputs, of
which alone the memory then is. Gradients of parameters add up over the tiles in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from blockwalk.plan.sizes import spans

OfTile = Callable[[slice, Sequence[Tensor]], Sequence[Tensor]]
"""The answers of a tile, from its positions and its parts of the inputs."""


@dataclass(frozen=True, slots=True)
class Positionwise:
    """A function that acts on each position by itself."""

    of_tile: OfTile
    takes: Sequence[int]
    """The dimension of each input along which the sequence lies."""
    gives: Sequence[int]
    """The dimension of each answer along which the sequence lies."""
    around: Callable[[], AbstractContextManager[object]]
    """The context of a tile, in backward too."""

    def part(self, tensor: Tensor, dim: int, tile: slice) -> Tensor:
        """Return a tile's part of a tensor."""
        return tensor.narrow(dim, tile.start, tile.stop - tile.start)


def tiles(length: int, size: int) -> list[slice]:
    """Return the tiles of a sequence, of ``size`` positions each but for the last."""
    return [slice(*span) for span in spans(0, length, size)]


def by_tiles(
    function: Positionwise,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    size: int,
    *,
    keeps_graphs: bool = False,
    uses_up: bool = False,
) -> tuple[Tensor, ...]:
    """Return the answers of a function, computed by tiles of ``size`` positions.

    Args:
        inputs: tensors that are cut into tiles.
        parameters: leaves that the function reads whole, whose gradients add up in float32.
        keeps_graphs: whether tiles keep their graphs for backward, which computes them again
            otherwise.
        uses_up: whether backward may use the first answer's gradient up: that of the first input,
            where it is of the same shape, is written over it, a tile at a time.
    """
    arguments = (function, size, keeps_graphs, uses_up, len(inputs), *inputs, *parameters)
    outs: tuple[Tensor, ...] = _ByTiles.apply(*arguments)  # type: ignore[no-untyped-call]
    return outs


def unread_answer(
    function: Positionwise,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    size: int,
    like: Tensor,
) -> Tensor:
    """Return zeros in place of the one answer, which nobody reads: its gradients are those of
    :func:`by_tiles`, which ``uses_up`` the answer's."""
    arguments = (function, size, len(inputs), *inputs, *parameters)
    out: Tensor = _Unread.apply(like, *arguments)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True)
class _TileGraph:
    """A tile's graph, by its edges: it holds what its operations save, and no inputs or answers
    beside."""

    starts: list[GradientEdge | None]
    """The edge at which the gradient of each input ends; None of one that needs none."""
    ends: list[GradientEdge | None]
    """The edge that the gradient of each answer comes in by; None of one that has no gradient."""


class _Begin(torch.autograd.Function):
    """The part of an input that a tile's graph begins with. A leaf would be held by its graph; this
    hangs on an empty one instead."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, part: Tensor) -> Tensor:
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> None:
        raise AssertionError("gradients end here")


def _with_graph(
    function: Positionwise, tile: slice, inputs: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[_TileGraph, Sequence[Tensor]]:
    """Compute a tile with its graph; beside it the answers."""
    with torch.enable_grad(), function.around():
        anchor = torch.empty(0, requires_grad=True)
        parts = [
            _begin(anchor, function.part(whole, dim, tile).detach(), needs=needs)
            for whole, dim, needs in zip(inputs, function.takes, needed, strict=True)
        ]
        answers = function.of_tile(tile, parts)
    return _TileGraph(_edges(parts), _edges(answers)), answers


def _begin(anchor: Tensor, part: Tensor, *, needs: bool) -> Tensor:
    """Return a part of an input, with a graph that ends there where it needs a gradient."""
    begun: Tensor = _Begin.apply(anchor, part) if needs else part  # type: ignore[no-untyped-call]
    return begun


def _edges(tensors: Sequence[Tensor]) -> list[GradientEdge | None]:
    return [get_gradient_edge(t) if t.requires_grad else None for t in tensors]


class _ByTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Positionwise,
        size: int,
        keeps_graphs: bool,
        uses_up: bool,
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        inputs = tensors[:count]
        _keep(ctx, function, size, count, tensors)
        ctx.uses_up = uses_up
        needed = ctx.needs_input_grad[5 : 5 + count]
        length = inputs[0].shape[function.takes[0]]
        wholes: list[Tensor] = []
        for tile in tiles(length, size):
            if keeps_graphs:
                graph, answers = _with_graph(function, tile, inputs, needed)
                ctx.graphs.append(graph)
            else:
                parts = [
                    function.part(whole, dim, tile)
                    for whole, dim in zip(inputs, function.takes, strict=True)
                ]
                with function.around():
                    answers = function.of_tile(tile, parts)
            if not wholes:
                wholes = [
                    _lengthened(answer, dim, length)
                    for answer, dim in zip(answers, function.gives, strict=True)
                ]
            for whole, dim, answer in zip(wholes, function.gives, answers, strict=True):
                function.part(whole, dim, tile).copy_(answer)
            del answers
        return tuple(wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        used_up = grads[0] if ctx.uses_up else None
        return (None, None, None, None, None, *_gradients(ctx, grads, used_up))


class _Unread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, like: Tensor, function: Positionwise, size: int, count: int, *tensors: Tensor
    ) -> Tensor:
        _keep(ctx, function, size, count, tensors)
        return like.new_zeros(()).expand(like.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, None, *_gradients(ctx, (grad,), grad))


def _keep(
    ctx: Any, function: Positionwise, size: int, count: int, tensors: Sequence[Tensor]
) -> None:
    ctx.function = function
    ctx.size = size
    ctx.graphs = list[_TileGraph]()
    ctx.save_for_backward(*tensors[:count])
    ctx.parameters = tensors[count:]
    ctx.set_materialize_grads(False)


def _lengthened(answer: Tensor, dim: int, length: int) -> Tensor:
    """Return an empty tensor of a tile's kind for the whole sequence, its dimensions in the same
    order in memory."""
    order = sorted(range(answer.dim()), key=answer.stride, reverse=True)
    shape = [length if d == dim else answer.shape[d] for d in order]
    return answer.new_empty(shape).permute([order.index(d) for d in range(answer.dim())])


def _gradients(
    ctx: Any, grads: Sequence[Tensor | None], used_up: Tensor | None
) -> list[Tensor | None]:
    """Return gradients of the inputs and of the parameters, a tile at a time; that of the first
    input in the memory of a gradient that is ``used_up``, where it fits."""
    function: Positionwise = ctx.function
    inputs: Sequence[Tensor] = ctx.saved_tensors
    count = len(inputs)
    needed = ctx.needs_input_grad[-count - len(ctx.parameters) :]
    read = needed[:count]
    trained = [p for p, needs in zip(ctx.parameters, needed[count:], strict=True) if needs]
    wholes = _wholes(function, inputs, read, used_up)
    sums: list[Tensor | None] = [None] * len(trained)
    kept = iter(ctx.graphs)
    for tile in tiles(inputs[0].shape[function.takes[0]], ctx.size):
        graph = next(kept, None) or _with_graph(function, tile, inputs, read)[0]
        ends = [
            (edge, function.part(grad, dim, tile))
            for edge, dim, grad in zip(graph.ends, function.gives, grads, strict=True)
            if grad is not None and edge is not None
        ]
        outputs, seeds = zip(*ends, strict=True)
        starts = [edge for edge in graph.starts if edge is not None]
        of_tile = torch.autograd.grad(outputs, [*starts, *trained], seeds, allow_unused=True)
        del graph, outputs, starts, ends
        gradients = iter(of_tile)
        for whole, dim in zip(wholes, function.takes, strict=True):
            if whole is not None:
                part = function.part(whole, dim, tile)
                grad_part = next(gradients)
                part.zero_() if grad_part is None else part.copy_(grad_part)
        for place, grad_part in enumerate(gradients):
            sums[place] = added(sums[place], grad_part)
    of_trained = iter(
        None if total is None else total.to(p.dtype) for total, p in zip(sums, trained, strict=True)
    )
    return [*wholes, *(next(of_trained) if needs else None for needs in needed[count:])]


def _wholes(
    function: Positionwise, inputs: Sequence[Tensor], read: Sequence[bool], used_up: Tensor | None
) -> list[Tensor | None]:
    """Return memory for the gradients of the inputs that need one: of the first that of a gradient
    which is used up, where a tile of the one may be written over a tile of the other."""
    first = inputs[0]
    reuses = (
        used_up is not None
        and read[0]
        and (used_up.shape, used_up.dtype) == (first.shape, first.dtype)
        and function.takes[0] == function.gives[0]
        and used_up.is_contiguous()
    )
    wholes = [used_up if reuses else torch.empty_like(first) if read[0] else None]
    others = zip(inputs[1:], read[1:], strict=True)
    return wholes + [torch.empty_like(t) if needs else None for t, needs in others]


def added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Return a sum with a gradient added, in float32 at least."""
    if grad is None:
        return total
    if total is None:
        return grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
    return total.add_(grad)
