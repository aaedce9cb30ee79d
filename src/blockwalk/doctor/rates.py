"""Rates at several sizes: products, element-wise passes, attention, updates, starts, memory that is
touched first.

They become the :class:`~blockwalk.simulate.hardware.Curve`s of the machine. Every figure is the
mean of several short runs, and the middle one of several rounds: a shared machine has seconds at
half its speed."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from blockwalk.numerics.codecs.layout import name_of
from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.numerics.noise.noise import stochastic_round
from blockwalk.numerics.row_tiles import multiplied_in, narrow_products
from blockwalk.numerics.updates import UPDATE_CHUNK, Rule, global_norm
from blockwalk.plan.choices import OptimizerSettings
from blockwalk.plan.sizes import UPDATE_ELEMENTS
from blockwalk.plan.update_rules import RULES
from blockwalk.simulate.hardware import Curve

TOKENS = 512
"""Rows of the products that are measured."""

WIDTHS = (64, 128, 256, 512, 1024, 2048)
THIN_WIDTHS = (256, 1024, 4096)
RANK = 8
PASS_BYTES = tuple(1 << power for power in range(12, 28, 2))
UPDATED = 1 << 24
POOL_BYTES = 40 << 20
PASSED_BYTES = 96 << 20
"""Bytes of the matrices, and of the tensors that are passed over: they are used in turn, so that no
nearer cache holds them."""
ROUNDS = 3
DTYPES = (torch.float32, torch.bfloat16)


def typical(work: Callable[[], object], *, seconds: float = 0.02) -> float:
    """Return seconds of a run on a processor, the mean of several."""
    work()
    began = time.perf_counter()
    runs = 0
    while runs < 2 or time.perf_counter() - began < seconds:
        work()
        runs += 1
    return (time.perf_counter() - began) / runs


def measure(more: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, Any]:
    """Return every rate of this module, and ``more``, by its field in
    :class:`~blockwalk.simulate.hardware.Hardware`: the middle one of so many rounds."""
    rates: dict[str, Callable[[], Any]] = {
        "products": products,
        "thin": thin,
        "passes": passes,
        "attention": attention,
        "update_rate": updates,
        "fresh_bandwidth": fresh_bandwidth,
        **more,
    }
    rounds_measured = [{name: rate() for name, rate in rates.items()} for _ in range(rounds)]
    return {name: _middle([measured[name] for measured in rounds_measured]) for name in rates}


def _middle(results: Sequence[Any]) -> Any:
    """Return the median of numbers, point by point of curves, name by name of mappings."""
    sample = results[0]
    if isinstance(sample, dict):
        return {name: _middle([result[name] for result in results]) for name in sample}
    if isinstance(sample, Curve):
        seconds = zip(
            *([seconds for _, seconds in result.points] for result in results), strict=True
        )
        return Curve(
            tuple(
                (size, median(result))
                for (size, _), result in zip(sample.points, seconds, strict=True)
            )
        )
    return median(results)


def _cold(work: Callable[[int], object], tensors: int) -> float:
    """Return seconds of one of so many runs, each on tensors of its own: what a step reads comes
    from memory, not from cache."""
    return typical(lambda: [work(index) for index in range(tensors)]) / tensors


def _pool(nbytes: int, most: int) -> int:
    return max(2, min(16, most // nbytes))


def _curves(
    sizes: Sequence[int], point: Callable[[int, torch.dtype], tuple[float, float]]
) -> dict[str, Curve]:
    """Return a curve for each dtype, through the point (size of the work, seconds) of each of
    ``sizes``."""
    return {name_of(dtype): Curve(tuple(point(size, dtype) for size in sizes)) for dtype in DTYPES}


def products() -> dict[str, Curve]:
    """Return seconds of x·Wᵀ, dY·W and dYᵀ·x, their mean, by FLOPs of one."""

    def point(width: int, dtype: torch.dtype) -> tuple[float, float]:
        dtype = multiplied_in(dtype)
        count = _pool(width * (TOKENS + width) * dtype.itemsize, POOL_BYTES)
        xs = [torch.ones(TOKENS, width, dtype=dtype) for _ in range(count)]
        ws = [torch.ones(width, width, dtype=dtype) for _ in range(count)]
        seconds = _cold(lambda i: torch.mm(xs[i], ws[i].t()), count) + _cold(
            lambda i: torch.mm(xs[i], ws[i]), count
        )
        seconds += _cold(lambda i: torch.mm(xs[i].t(), xs[i - 1]), count)
        return 2.0 * TOKENS * width * width, seconds / 3

    return _curves(WIDTHS, point)


def thin() -> dict[str, Curve]:
    """Return seconds of an adapter's products x·Aᵀ, t·Bᵀ and tᵀ·y, their mean, by FLOPs of one."""

    def point(width: int, dtype: torch.dtype) -> tuple[float, float]:
        dtype = multiplied_in(dtype)
        x = torch.ones(TOKENS, width, dtype=dtype)
        t = torch.ones(TOKENS, RANK, dtype=dtype)
        a = torch.ones(RANK, width, dtype=dtype)
        seconds = sum(
            typical(partial(torch.mm, *pair)) for pair in ((x, a.t()), (t, a), (t.t(), x))
        )
        return 2.0 * TOKENS * width * RANK, seconds / 3

    return _curves(THIN_WIDTHS, point)


def passes() -> dict[str, Curve]:
    """Return seconds of element-wise operations with an output of their own, by bytes read and
    written: two products for each of the dearer kind (an activation)."""
    torch.ones(31 << 18)  # once freed, the allocator keeps blocks of that size, as it does in a run

    def point(nbytes: int, dtype: torch.dtype) -> tuple[float, float]:
        count = _pool(nbytes, PASSED_BYTES)
        xs = [torch.ones(nbytes // dtype.itemsize, dtype=dtype) for _ in range(count)]
        cheap = _cold(lambda i: torch.mul(xs[i], xs[i - 1]), count) / 3
        dear = _cold(lambda i: torch.nn.functional.silu(xs[i]), count) / 2
        return float(nbytes), (2 * cheap + dear) / 3

    in_place = Curve(tuple((float(nbytes), _in_place(nbytes)) for nbytes in PASS_BYTES))
    return {**_curves(PASS_BYTES, point), "in place": in_place}


def _in_place(nbytes: int) -> float:
    """Return seconds of an operation that reads and writes so many bytes of a float32 tensor where
    they are: the mean of a difference by rows and an exponential, as in a softmax."""
    rows = torch.zeros(max(nbytes // (1 << 16), 1), min(nbytes, 1 << 16) // 8)
    row_maximum = torch.ones(
        len(rows), 1
    )  # of exp(x − 1) the values stay what they are: between 0 and 1
    return typical(lambda: rows.sub_(row_maximum).exp_()) / 2


def attention() -> dict[str, float]:
    """Return FLOP/s of fused attention, forward and backward together."""
    rates = {}
    for dtype in DTYPES:
        q = torch.ones(2, 8, 256, 64, dtype=dtype).requires_grad_()

        def run(q: Tensor = q) -> None:
            with narrow_products(q):
                out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            torch.autograd.grad(out, q, torch.ones_like(out))

        rates[name_of(dtype)] = 3.5 * 4 * 2 * 8 * 256 * 256 * 64 / typical(run, seconds=0.1)
    return rates


def updates() -> dict[str, float]:
    """Return elements/s of each update rule and of the gradients' norm.

    Beside them those of a 16-bit parameter's chunks that are lifted to float32 and written back,
    rounded to nearest ("lift") or stochastically ("round")."""
    param = torch.ones(UPDATED)
    grad = torch.ones(UPDATED)
    rates = {"norm": UPDATED / typical(lambda: global_norm([grad]))}
    for name, facts in RULES.items():
        rule = Rule(OptimizerSettings(name=name))
        state = {key: torch.zeros(UPDATED) for key in facts.states}
        seconds = typical(partial(rule.apply_, param, grad, state, step=1, lr=1e-9))
        rates[name] = UPDATED / seconds
    master = param.to(torch.bfloat16)
    key = NoiseKey(0, 1, 0, "doctor", "rounding")

    def through(size: int, write: Callable[[Tensor, Tensor], object]) -> float:
        pieces = master.view(-1, size)
        return UPDATED / typical(
            lambda: [write(param[:size].copy_(piece), piece) for piece in pieces]
        )

    rates["lift"] = through(UPDATE_CHUNK, lambda exact, piece: piece.copy_(exact))
    rates["round"] = through(
        UPDATE_ELEMENTS["cpu"], lambda exact, piece: stochastic_round(exact, piece, key)
    )
    return rates


def fresh_bandwidth() -> float:
    """Return bytes/s at which memory just given by the system is first written."""
    size = 32 << 20

    def touch() -> None:
        with mmap.mmap(-1, size) as fresh:
            torch.frombuffer(fresh, dtype=torch.uint8).fill_(1)

    return size / typical(touch, seconds=0.2)
