"""The trial of which kinds of blocks of a model, and whether its last norm, are computed by tiles
of the sequence: outputs and every gradient by tiles of two sizes, against those of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.cutting.block_tiles import EPILOGUE, BlockTiles, kind_of
from blockwalk.cutting.calls import BlockCall, Prologue
from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.small_instance import SEED, difference
from blockwalk.numerics import sequence_tiles

TILES = (3, 4)
"""Positions of the tiles that are tried; rows of 11 tokens end inside one of each."""
CLOSE = 1e-5
"""The largest relative difference between tiles and the whole, in float32: rounding alone."""


@dataclass(frozen=True, slots=True)
class TileVerdict:
    """The outcome of a model's trial."""

    reason: str
    """The reason for which something stays whole, the first that was found; empty: nothing does."""
    by_tiles: tuple[str, ...] = ()
    """Kinds (:func:`blockwalk.cutting.block_tiles.kind_of`) that are computed by tiles."""
    attended: tuple[str, ...] = ()
    """Paths of the linear layers inside a block that attention alone reads."""


def try_tiles(cut: CutModel, batch: Mapping[str, Tensor]) -> TileVerdict:
    """Return what of a model may be computed by tiles.

    Args:
        cut: a small instance in evaluation mode, with its parameters in place.
        batch: what it is run on, under its padding and without.
    """
    attended: dict[str, bool] = {}
    reasons: dict[str, str] = {}
    # whatever a model raises is the reason to leave it whole
    try:
        _try(cut, batch, reasons, attended)
    except Exception as error:
        return TileVerdict(_raised(error))
    shown = tuple(sorted(kind for kind, reason in reasons.items() if not reason))
    paths = tuple(sorted(path for path, is_so in attended.items() if is_so))
    return TileVerdict(next(filter(None, reasons.values()), ""), shown, paths if shown else ())


def _raised(error: Exception) -> str:
    return f"it does not run on tiles ({type(error).__name__}: {error})"


def _try(
    cut: CutModel, batch: Mapping[str, Tensor], reasons: dict[str, str], attended: dict[str, bool]
) -> None:
    """Try every block and the last norm. The reason against each kind is noted in ``reasons``,
    empty where there is none, and whether attention alone reads a linear layer of a block in
    ``attended``."""
    padded = {name: tensor for name, tensor in batch.items() if name != "labels"}
    for inputs in (padded, {"input_ids": batch["input_ids"]}):
        prologue = cut.prologue(inputs, SEED)
        hidden_BSD = prologue.hidden_BSD.detach()
        for call in prologue.calls:
            kind = kind_of(call.module)
            if not reasons.get(kind):
                reason = _of_block(cut, call, hidden_BSD, attended)
                reasons[kind] = f"{cut.layer_name(call.unit)} {reason}" if reason else ""
            with torch.no_grad():
                hidden_BSD = cut.forward(call, hidden_BSD, SEED)
        if not reasons.get(EPILOGUE):
            of_norm = "" if cut.head.custom else _of_norm(cut, prologue, hidden_BSD, inputs)
            reasons[EPILOGUE] = of_norm


def _of_block(cut: CutModel, call: BlockCall, hidden_BSD: Tensor, attended: dict[str, bool]) -> str:
    """Return the reason against one block; whether attention alone reads a linear layer is noted in
    ``attended``."""
    # whatever a block raises on a tile is the reason to leave it whole
    try:
        return _compared(cut, call, hidden_BSD, attended)
    except Exception as error:
        return _raised(error)


def _compared(cut: CutModel, call: BlockCall, hidden_BSD: Tensor, attended: dict[str, bool]) -> str:
    if call.leaves or call.handed.entries:
        return "takes more than its hidden state that is differentiated"
    leaf_BSD = hidden_BSD.clone().requires_grad_()
    parameters = [p for p in call.module.parameters() if p.requires_grad]
    expected = _gradients([leaf_BSD, *parameters], cut.run(call, leaf_BSD, SEED).hidden_BSD)
    for path, is_so in _read_by_attention(call, hidden_BSD).items():
        attended[path] = is_so and attended.get(path, True)
    idle = [path for path, is_so in attended.items() if is_so]
    worst = 0.0
    for size, reads_answer in itertools.product(TILES, (True, False)):
        leaf_BSD = hidden_BSD.clone().requires_grad_()
        tiles = _tiles(call, leaf_BSD, size, idle)
        answer_BSD = tiles.run(reads_answer=reads_answer, uses_up=True)
        on_tiles = _gradients([leaf_BSD, *parameters], answer_BSD)
        first = 0 if reads_answer else 1
        pairs = zip(on_tiles[first:], expected[first:], strict=True)
        worst = max(worst, *(_apart(a, b, expected[1:]) for a, b in pairs))
    return "" if worst <= CLOSE else f"differs by {worst:.1e} on tiles"


def _of_norm(
    cut: CutModel, prologue: Prologue, hidden_BSD: Tensor, batch: Mapping[str, Tensor]
) -> str:
    """Return the reason against what lies between the last block and the head."""
    parameters = [p for p in cut.model.parameters() if p.requires_grad]

    def run(size: int) -> list[Tensor | None]:
        leaf_BSD = hidden_BSD.clone().requires_grad_()
        parts = [
            cut.head_input(prologue, leaf_BSD[:, tile], batch, SEED, tile)
            for tile in sequence_tiles.tiles(leaf_BSD.shape[1], size)
        ]
        return _gradients([leaf_BSD, *parameters], torch.cat(parts, 1))

    leaf_BSD = hidden_BSD.clone().requires_grad_()
    whole_BSD = cut.head_input(prologue, leaf_BSD, batch, SEED)
    expected = _gradients([leaf_BSD, *parameters], whole_BSD)
    worst = max(
        _apart(a, b, expected[1:])
        for size in TILES
        for a, b in zip(run(size), expected, strict=True)
    )
    return "" if worst <= CLOSE else f"the last norm differs by {worst:.1e} on tiles"


def _tiles(call: BlockCall, hidden_BSD: Tensor, size: int, idle: Sequence[str] = ()) -> BlockTiles:
    args, kwargs = call.view(hidden_BSD)
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    return BlockTiles(call.module, arguments, call.hidden_at, size, nullcontext, idle)


def _gradients(inputs: Sequence[Tensor], answer_BSD: Tensor) -> list[Tensor | None]:
    """Return an answer and its gradients."""
    generator = torch.Generator().manual_seed(SEED)
    seed_BSD = torch.randn(answer_BSD.shape, generator=generator, dtype=answer_BSD.dtype)
    grads = torch.autograd.grad(answer_BSD, inputs, seed_BSD, allow_unused=True)
    return [answer_BSD.detach(), *grads]


def _apart(tensor: Tensor | None, expected: Tensor | None, all_of: Sequence[Any]) -> float:
    """Return the relative difference of two gradients; rounding noise in one that is zero in exact
    arithmetic (a key's bias) is none."""
    largest = max(float(grad.norm()) for grad in all_of if grad is not None)
    norms = [0.0 if grad is None else float(grad.norm()) for grad in (tensor, expected)]
    if tensor is None or expected is None:
        return max(norms) / largest
    if max(norms) < 1e-4 * largest:
        return float((tensor - expected).norm()) / largest
    return difference(tensor, expected)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _read_by_attention(call: BlockCall, hidden_BSD: Tensor) -> dict[str, bool]:
    """Return whether nothing but attention reads the output of each linear layer of a block: it is
    called before, and zeros in its place change no bit once attention has answered."""
    layers = {path: m for path, m in call.module.named_modules() if _is_linear(m)}
    length = hidden_BSD.shape[1]
    called: list[nn.Module] = []
    handles = [
        module.register_forward_hook(lambda module, *_: called.append(module))
        for module in layers.values()
    ]
    with torch.no_grad():
        run = _tiles(call, hidden_BSD, length)
        before = run.before_attention(slice(0, length), [hidden_BSD])
        assert before
        first = set(called)
        for handle in handles:
            handle.remove()
        expected = run.run(reads_answer=True)
        return {
            path: module in first
            and torch.equal(
                _tiles(call, hidden_BSD, length, [path]).run(reads_answer=True), expected
            )
            for path, module in layers.items()
        }
