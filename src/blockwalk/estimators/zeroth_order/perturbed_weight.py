"""A perturbed weight: θ + s·z a range at a time, generated when it is read. The master is never changed, z never stored.

What it answers is ``cast(float32(master) + float32(s)·z)``, with z/√H in place of z where a curvature H is given; with s =
0, the master alone. The noise of any range is that range of the whole's (:mod:`blockwalk.numerics.noise.noise`), so the
same bits come out in whatever pieces they are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blockwalk.engine.cells import Cell
from blockwalk.numerics.noise.key import NoiseKey, NoiseKind
from blockwalk.numerics.noise.noise import fill_, perturbed
from blockwalk.numerics.scratch import LossScratch
from blockwalk.plan.sizes import UPDATE_ELEMENTS


@dataclass(frozen=True, slots=True)
class Perturbation:
    """What one forward adds to every parameter: scale·z of one query of one step."""

    seed: int
    step: int
    query: int
    scale: float
    """±ε, or 0 for the weights as they are."""
    kind: NoiseKind

    def key(self, name: str) -> NoiseKey:
        return NoiseKey(self.seed, self.step, self.query, name)


@dataclass(frozen=True, slots=True)
class PerturbedWeight:
    """One 2-D parameter under a perturbation, materialised a range at a time in ``dtype`` (a :class:`Weight`).

    ``cell`` holds the master on the device, ``hessian`` H where the estimator keeps one. Ranges are scratch of ``scratch``,
    shared by all weights of a walk: they hold until the next range of any of them.
    """

    name: str
    cell: Cell
    perturbation: Perturbation
    dtype: torch.dtype
    scratch: LossScratch
    hessian: Cell | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.cell.layout.rows, self.cell.layout.columns

    def rows(self, start: int, stop: int) -> torch.Tensor:
        columns = self.cell.layout.columns
        source = self.cell.rows(start, stop, self.scratch, "value")
        if not self.perturbation.scale and source.dtype == self.dtype:
            return source
        hessian = self.hessian.rows(start, stop, self.scratch, "hessian") if self.hessian is not None else None
        out = self.scratch.take("range", stop - start, columns, like=source, dtype=self.dtype)
        return self._perturb(source, out, hessian, start * columns, None, None)

    def columns(self, start: int, stop: int) -> torch.Tensor:
        rows, columns = self.shape
        source = self.cell.columns(start, stop, self.scratch, "value")
        hessian = self.hessian.columns(start, stop, self.scratch, "hessian") if self.hessian is not None else None
        out = self.scratch.take("range", rows, stop - start, like=source, dtype=self.dtype)
        return self._perturb(source, out, hessian, start, columns, None)

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        flat_n = index.reshape(-1)
        source = self.cell.gather(flat_n)
        hessian = self.hessian.gather(flat_n) if self.hessian is not None else None
        out = torch.empty(source.shape, dtype=self.dtype, device=source.device)
        self._perturb(source, out, hessian, 0, self.shape[1], flat_n)
        return out.view(*index.shape, self.shape[1])

    def whole(self) -> torch.Tensor:
        """All of it, freshly allocated, in the parameter's own shape: for small parameters and odd ones."""
        return self.rows(0, self.cell.layout.rows).clone().view(self.cell.layout.shape)

    def into(self, out_RD: torch.Tensor) -> torch.Tensor:
        """All of it into ``out_RD`` [R, D], a range at a time; returns it."""
        rows, columns = self.shape
        piece = max(1, UPDATE_ELEMENTS[out_RD.device.type] // max(1, columns))
        for first in range(0, rows, piece):
            last = min(first + piece, rows)
            source = self.cell.rows(first, last, self.scratch, "value")
            hessian = self.hessian.rows(first, last, self.scratch, "hessian") if self.hessian is not None else None
            self._perturb(source, out_RD[first:last], hessian, first * columns, None, None)
        return out_RD

    def _perturb(
        self,
        source: torch.Tensor,
        out: torch.Tensor,
        hessian: torch.Tensor | None,
        start: int,
        pitch: int | None,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        if not self.perturbation.scale:
            return out.copy_(source)
        key, scale, kind = self.perturbation.key(self.name), self.perturbation.scale, self.perturbation.kind
        if hessian is None:
            return perturbed(source, out, key, start, scale, kind, pitch=pitch, rows=rows)
        z = self.scratch.take("z", *source.shape, like=source, dtype=torch.float32)
        fill_(z, key, start, kind, pitch=pitch, rows=rows)
        root = self.scratch.take("root", *source.shape, like=source, dtype=torch.float32)
        z.div_(root.copy_(hessian).sqrt_()).mul_(scale)
        return out.copy_(z.add_(source))
