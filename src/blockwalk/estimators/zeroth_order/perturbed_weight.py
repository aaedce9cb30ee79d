"""A perturbed weight: θ + s·z a range at a time, generated when it is read. The master is never
changed, z never stored.

It answers ``cast(float32(master) + float32(s)·z)``, with the kind's direction in place of z where
it has one; with s = 0, the master alone. The noise of any range is that range of the whole's
(:mod:`blockwalk.numerics.noise.noise`), so the same bits come out in whatever ranges they are
read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack

import torch
from torch import Tensor

from blockwalk.engine.bucket_tensors import BucketTensor
from blockwalk.estimators.zeroth_order.draws import Draws, Elementwise, LowRank, Noise
from blockwalk.estimators.zeroth_order.kind import Direction
from blockwalk.numerics.codecs import codecs
from blockwalk.numerics.codecs.weights import LowRankSum, Weight
from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.numerics.noise.noise import Where, add_run, perturbed, stochastic_round
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.sizes import DECODE_BYTES


@dataclass(frozen=True, slots=True)
class Perturbation:
    """The term that one forward adds to every parameter: scale·z of one query of one step."""

    seed: int
    step: int
    query: int
    scale: float
    """±ε, or 0 for the weights as they are."""
    stochastic: bool = False
    """Whether the sum is rounded stochastically to 16 bits."""

    def noise(self, draws: Draws, name: str) -> Noise:
        """Return the z of one parameter."""
        return draws(self.seed, self.step, self.query, name)

    def rounding(self, name: str) -> NoiseKey | None:
        """Return the draws of one parameter's rounding: one and the same for all forwards of a
        step."""
        return NoiseKey(self.seed, self.step, 0, name, "forward") if self.stochastic else None


@dataclass(frozen=True, slots=True)
class PerturbedWeight:
    """One 2-D parameter under a perturbation, materialised a range at a time in ``dtype`` (a
    :class:`Weight`).

    ``master`` lies on the device, ``states`` are the tensors beside it that the kind's direction
    reads. Ranges are scratch of ``scratch``, shared by all weights of a walk: they hold until the
    next range of any of them."""

    master: BucketTensor
    noise: Noise
    scale: float
    """The factor of the noise; with 0 none is drawn."""
    dtype: torch.dtype
    scratch: ScratchArena
    states: Mapping[str, BucketTensor] = field(default_factory=dict)
    direction_: Direction | None = None
    rounding: NoiseKey | None = None
    """The draws by which a range is rounded to 16 bits; None rounds to nearest."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.master.layout.rows, self.master.layout.columns

    def rows(self, start: int, stop: int) -> Tensor:
        if self.scale and self.direction_ is None and self.master.dense:
            if isinstance(self.noise, Elementwise):
                return self._run(self.noise, start, stop)
            return self._some_rows(start, stop)
        decoded = self.master.layout.code_dtype if self.master.dense else torch.float32
        if not self.scale and decoded == self.dtype:
            return self.master.rows(start, stop, self.scratch, "value")
        return self._some_rows(start, stop)

    def _run(self, noise: Elementwise, start: int, stop: int) -> Tensor:
        """Return rows of plain numbers, to which noise is added by element: most of what products
        read, by the fewest calls."""
        master = self.master
        columns = master.layout.columns
        source_RD = master.codes
        if stop - start < master.layout.rows:
            source_RD = source_RD[start:stop]
        out_RD = self.scratch.take("range", stop - start, columns, like=source_RD, dtype=self.dtype)
        first = start * columns
        return add_run(source_RD, out_RD, noise.key, first, self.scale, noise.kind, self.rounding)

    def lazily(self) -> Weight:
        """Return this weight for products: that of low rank as the master and its factors, without
        noise of the matrix's size."""
        if not self.scale or not isinstance(self.noise, LowRank) or self.direction_ is not None:
            return self
        rows, columns = self.shape
        device = self.master.bytes_P.device
        a_NR, b_DR = self.noise.factors(range(rows), range(columns), device)
        return LowRankSum(
            replace(self, scale=0.0), a_NR.mul_(self.scale).to(self.dtype), b_DR.to(self.dtype)
        )

    def _some_rows(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        def read(tensor: BucketTensor, name: str) -> Tensor:
            return tensor.rows(start, stop, self.scratch, name)

        return self._perturb(read, (stop - start, self.shape[1]), out, first_row=start)

    def columns(self, start: int, stop: int) -> Tensor:
        def read(tensor: BucketTensor, name: str) -> Tensor:
            return tensor.columns(start, stop, self.scratch, name)

        return self._perturb(read, (self.shape[0], stop - start), None, first_column=start)

    def gather(self, index: Tensor) -> Tensor:
        flat_n = index.reshape(-1)
        columns = self.shape[1]
        out = torch.empty(len(flat_n), columns, dtype=self.dtype, device=self.master.bytes_P.device)
        self._perturb(lambda tensor, _: tensor.gather(flat_n), out.shape, out, rows=flat_n)
        return out.view(*index.shape, columns)

    def whole(self) -> Tensor:
        """Return all of it, freshly allocated, in the parameter's own shape: for small parameters
        and odd ones."""
        return self.rows(0, self.master.layout.rows).clone().view(self.master.layout.shape)

    def into(self, out_RD: Tensor) -> Tensor:
        """Return all of it into ``out_RD`` [R, D], a range at a time; returns it."""
        rows, columns = self.shape
        count = max(1, DECODE_BYTES[out_RD.device.type] // max(1, columns * self.dtype.itemsize))
        for start in range(0, rows, count):
            self._some_rows(start, min(start + count, rows), out_RD[start : start + count])
        return out_RD

    def _perturb(
        self,
        read: Callable[[BucketTensor, str], Tensor],
        shape: tuple[int, ...],
        out: Tensor | None,
        *,
        first_row: int = 0,
        first_column: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return a range, perturbed, in ``out`` or in scratch: of the rows and columns that begin
        where is said, or of the rows named. ``read`` answers that range of a tensor in the bucket,
        under a name in scratch."""
        if out is None:
            out = self.scratch.take("range", *shape, like=self.master.bytes_P, dtype=self.dtype)
        noise = self.noise
        scale = self.scale
        by_element = noise if self.direction_ is None and isinstance(noise, Elementwise) else None
        if (
            scale
            and by_element
            and not self.rounding
            and codecs.has_kernel(self.master.layout, self.master.bytes_P)
        ):
            return codecs.decode_on_device(
                self.master.bytes_P,
                self.master.layout,
                out,
                rows=rows,
                first_row=first_row,
                first_column=first_column,
                key=by_element.key,
                scale=scale,
                kind=by_element.kind,
                origin=self.master.origin,
            )
        source = read(self.master, "value")
        start = first_row * self.shape[1] + first_column
        pitch = self.shape[1]
        place_of: Where = {"pitch": pitch, "rows": rows}
        if not scale:
            return self._rounded(source, out, start, **place_of)
        if by_element:
            drawn_by = by_element.key, start, scale, by_element.kind
            return perturbed(source, out, *drawn_by, rounding=self.rounding, **place_of)

        def take(name: str) -> Tensor:
            return self.scratch.take(name, *source.shape, like=source, dtype=torch.float32)

        z = noise.fill_(take("z"), start, **place_of)
        if self.direction_ is not None:
            self.direction_(
                z, {state: read(tensor, state) for state, tensor in self.states.items()}, take
            )
        return self._rounded(z.mul_(scale).add_(source), out, start, **place_of)

    def _rounded(self, source: Tensor, out: Tensor, start: int, **where: Unpack[Where]) -> Tensor:
        if self.rounding is None or out.dtype == torch.float32 or source.dtype == out.dtype:
            return out.copy_(source)
        return stochastic_round(source, out, self.rounding, start, **where)


def with_scales(
    master: BucketTensor, noise: Noise, scale: float, scratch: ScratchArena
) -> BucketTensor:
    """Return a copy of a matrix in codes, its scales under a perturbation."""
    copied = replace(master, bytes_P=master.bytes_P.clone())
    scales = copied.scales.tensor
    PerturbedWeight(master.scales, noise, scale, scales.dtype, scratch).into(scales)
    return copied


def perturbed_at_once(
    masters: Sequence[BucketTensor],
    noises: Sequence[Elementwise],
    outs: Sequence[Tensor],
    scale: float,
) -> None:
    """Write plain numbers and ``scale`` times their noise into ``outs``, each tensor whole and in
    its own shape, in one call of a kernel: the vectors of a block."""
    words: list[int] = []
    for noise in noises:
        words += noise.key.signed
    tensors = [master.tensor for master in masters]
    starts = [master.origin for master in masters]
    scales = [scale] * len(outs)
    torch.ops.blockwalk.advance_(tensors, outs, starts, words, scales, 0, 0, False, noises[0].kind)
