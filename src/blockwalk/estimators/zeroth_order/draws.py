"""The noise of a step by parameter: z of any range of it, in whichever way ``zo.noise`` makes it.

``gaussian`` and ``rademacher`` draw each element by itself (:mod:`blockwalk.numerics.noise.noise`).
``lowrank`` gives a matrix [N, D] z = A·Bᵀ/√r, whose factors A [N, r] and B [D, r] are Gaussian and
drawn in that way; B stays for ``zo.noise_interval`` steps (Chen et al., "Enhancing Zeroth-order
Fine-tuning for Language Models with Low-rank Structures", 2024, algorithm 1, whose U·Vᵀ is √r times
this one: ε and the projected gradient take the √r, and its update is this one). Elements have
variance 1, so ε and learning rates are those of Gaussian noise. Vectors, and matrices with no more
than r rows or columns, are Gaussian. ``torch`` hands out torch's own generator,
:mod:`blockwalk.estimators.zeroth_order.stream`.

With ``zo.seed_pool`` K, there are K directions, and each query takes one of them, so that K numbers
say what a run learnt (Qin et al., "Federated Full-Parameter Tuning of Billion-Sized Language Models
with Communication Cost under 18 Kilobytes", 2024)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from blockwalk.estimators.zeroth_order.stream import Streams
from blockwalk.numerics.noise.key import NoiseKey, NoiseKind, derive_seed
from blockwalk.numerics.noise.noise import Where, add_products_, fill_
from blockwalk.plan.choices import ZerothOrderSettings
from blockwalk.plan.model_spec import ParamSpec
from blockwalk.plan.noise_kinds import NOISES
from blockwalk.plan.table import resolved

REMEMBERED = 1 << 12
"""Noises that are remembered: those of the last few steps of a model of some hundred parameters."""


class Noise(Protocol):
    """The z of one parameter at one query of one step."""

    def fill_(self, out: Tensor, start: int = 0, **where: Unpack[Where]) -> Tensor:
        """Return ``out`` (float32) = that range of z, whose place the arguments say as in
        :mod:`blockwalk.numerics.noise.noise`."""
        ...


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Noise whose elements are drawn each by itself: kernels may add it without making it."""

    key: NoiseKey
    kind: NoiseKind

    def fill_(self, out: Tensor, start: int = 0, **where: Unpack[Where]) -> Tensor:
        return fill_(out, self.key, start, self.kind, **where)


@dataclass(frozen=True, slots=True)
class LowRank:
    """Noise A·Bᵀ/√r of a parameter with ``columns`` elements in a row."""

    row_key: NoiseKey
    column_key: NoiseKey
    rank: int
    columns: int

    def factors(
        self, rows: Tensor | range, columns: range, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """A/√r of these rows [R, r], and B of these columns [D, r], float32."""
        a_Rr = torch.empty(len(rows), self.rank, device=device)
        b_Dr = torch.empty(len(columns), self.rank, device=device)
        if isinstance(rows, range):
            fill_(a_Rr, self.row_key, rows.start * self.rank)
        else:
            fill_(a_Rr, self.row_key, 0, pitch=self.rank, rows=rows)
        return a_Rr.mul_(self.rank**-0.5), fill_(b_Dr, self.column_key, columns.start * self.rank)

    def fill_(self, out: Tensor, start: int = 0, **where: Unpack[Where]) -> Tensor:
        return add_low_rank_(out.zero_(), [self], [1.0], start, **where)


def add_low_rank_(
    out: Tensor,
    noises: Sequence[LowRank],
    scales: Sequence[float],
    start: int = 0,
    **where: Unpack[Where],
) -> Tensor:
    """Return ``out`` (float32, contiguous) += scale·z for each of one parameter's noises in turn,
    of the range that the arguments say as in :meth:`LowRank.fill_`, without a z of its size."""
    length = noises[0].columns
    row, column = divmod(start, length)
    rows: Tensor | range
    target_RD = out
    if where.get("pitch") is not None:
        named = where.get("rows")
        rows = range(row, row + len(out)) if named is None else named
        columns = range(column, column + out.shape[1])
    else:  # a run of elements is a part of these rows
        rows = range(row, -(-(start + out.numel()) // length))
        columns = range(length)
        missing = len(rows) * length - out.numel()
        padded = F.pad(out.view(-1), (column, missing - column)) if missing else out
        target_RD = padded.view(-1, length)
    pairs = [noise.factors(rows, columns, out.device) for noise in noises]
    add_products_(target_RD, [a for a, _ in pairs], [b for _, b in pairs], scales)
    if target_RD.numel() == out.numel():
        return out
    return out.copy_(target_RD.view(-1)[column:][: out.numel()].view_as(out))


class DrawKey(NamedTuple):
    """The place of one z among all: seed, step and query, and the parameter."""

    seed: int
    step: int
    query: int
    name: str


class Draws:
    """The noise of every parameter at every query and step.

    Args:
        zo: which noise, and its settings.
        parameters: the trainables by canonical name, in the order of the deduplicated
            ``named_parameters()``.
        steps: steps that may be asked for in turn, again and again, before the next one.
    """

    def __init__(
        self, zo: ZerothOrderSettings, parameters: Mapping[str, ParamSpec], steps: int = 1
    ) -> None:
        self.zo = zo
        self.noise = NOISES[zo.noise]
        self.parameters = parameters
        self.streams = Streams(parameters.values(), steps + 1)
        self._make = resolved(self.noise.implementation or _MAKERS[self.zo.noise])
        # the forwards of a query read the same noise, and so does its update
        self._remembered = lru_cache(REMEMBERED)(self._noise)

    def __call__(self, seed: int, step: int, query: int, name: str) -> Noise:
        return self._remembered(seed, step, query, name)

    def _noise(self, seed: int, step: int, query: int, name: str) -> Noise:
        if pool := self.zo.seed_pool:
            query = derive_seed("pool", seed, step, query) % pool
            step = 0
        noise: Noise = self._make(self, DrawKey(seed, step, query, name))
        return noise


def _elementwise(draws: Draws, key: DrawKey) -> Noise:
    element: NoiseKind = "rademacher" if draws.noise.element == "rademacher" else "gaussian"
    return Elementwise(NoiseKey(*key), element)


def _low_rank(draws: Draws, key: DrawKey) -> Noise:
    param = draws.parameters[key.name]
    rank = draws.zo.noise_rank
    columns = param.shape[-1] if len(param.shape) > 1 else 1
    if min(columns, param.numel // columns) <= rank:
        return _elementwise(draws, key)
    since = max(key.step - 1, 0) // draws.zo.noise_interval
    return LowRank(
        NoiseKey(*key, "left"), NoiseKey(*key._replace(step=since), "right"), rank, columns
    )


def stream(draws: Draws, key: DrawKey) -> Noise:
    seed = derive_seed(key.seed, key.query) if key.query else key.seed
    return draws.streams.of(seed, key.name)


_MAKERS: dict[str, Callable[[Draws, DrawKey], Noise]] = {
    "gaussian": _elementwise,
    "rademacher": _elementwise,
    "lowrank": _low_rank,
    "torch": stream,
}
"""The noise of one parameter by ``zo.noise``."""
