"""Weights that are used without ever being whole: ranges of encoded or dense bytes, decoded or
converted into scratch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from blockwalk.numerics.codecs.codecs import (
    NativeSource,
    decode_rows,
    decode_whole,
    gather_rows,
    has_kernel,
    native_source,
)
from blockwalk.numerics.codecs.layout import Bytes, Layout, dtype_of
from blockwalk.numerics.scratch import shared_arena
from blockwalk.plan.sizes import EXPERTS_BYTES


class Weight(Protocol):
    """One 2-D parameter that is materialised a range at a time, in ``dtype``: the weight provider
    of the design.

    The tensors that :meth:`rows` and :meth:`columns` return are scratch: they hold until the next
    call."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows ``start:stop``, shape [stop − start, D]."""
        ...

    def columns(self, start: int, stop: int) -> Tensor:
        """Return columns ``start:stop``, shape [N, stop − start]."""
        ...

    def gather(self, index: Tensor) -> Tensor:
        """Return the rows named by ``index`` (any shape, int64): shape [*index.shape, D], freshly
        allocated."""
        ...


Value = Tensor | Weight
"""A parameter as it is read: whole, or a range at a time."""


class Experts(Protocol):
    """A layer's experts in one parameter [E, N, D], each a :class:`Weight` of its own."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def expert(self, index: int) -> Weight:
        """Return the matrix [N, D] of one of them."""
        ...

    def whole(self) -> Tensor | None:
        """Decode all of them, [E, N, D], into scratch, where a device does so in one launch and
        they are no more than it should hold; None elsewhere."""
        ...

    def ends(self, offs_E: Tensor, rows: int) -> list[int]:
        """Return the row after each expert's last, of ``rows`` rows that are sorted by expert."""
        ...

    def read_into(self, out: Tensor) -> None: ...


class EncodedWeight:
    """A :class:`~blockwalk.numerics.codecs.weights.Weight` over an encoded parameter's bytes, [R,
    D] in the layout's terms; one of three dimensions is :class:`Experts`.

    ``buffer`` (uint8, 1-D, of the encoded size, or the tensors of a parted codec; views of file
    maps will do) stays where it is. :meth:`rows` and :meth:`columns` decode into scratch and
    allocate nothing; ``dtype`` is that of what they return."""

    def __init__(
        self,
        buffer: Bytes,
        layout: Layout,
        dtype: torch.dtype = torch.bfloat16,
        span: tuple[int, int] | None = None,
    ) -> None:
        if isinstance(buffer, Tensor):
            facts = (buffer.dtype, buffer.shape, layout)
            assert (buffer.dtype, buffer.shape) == (torch.uint8, (layout.nbytes,)), facts
        self.buffer = buffer
        self.layout = layout
        self.dtype = dtype
        self._span = span or (0, layout.rows)
        self.shape = layout.shape if span is None else (span[1] - span[0], layout.columns)

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def _like(self) -> Tensor:
        return self.buffer if isinstance(self.buffer, Tensor) else self.buffer[0]

    def expert(self, index: int) -> EncodedWeight:
        if self.layout.parts is not None:
            parts = tuple(part[index] for part in self.layout.split(self.buffer))
            matrix = replace(self.layout, shape=self.layout.shape[1:])
            return EncodedWeight(parts, matrix, self.dtype)
        rows = self.layout.shape[-2]
        span = (index * rows, (index + 1) * rows)
        return EncodedWeight(self.buffer, self.layout, self.dtype, span)

    def whole(self) -> Tensor | None:
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        if not has_kernel(self.layout, self.buffer) or nbytes > EXPERTS_BYTES:
            return None
        out = self._take(self.layout.rows, self.layout.columns)
        return decode_rows(self.buffer, self.layout, 0, self.layout.rows, out).view(self.shape)

    def ends(self, offs_E: Tensor, rows: int) -> list[int]:
        ends: list[int] = offs_E.tolist()
        return ends

    def to(self, dtype: torch.dtype) -> EncodedWeight:
        """Return a weight over all of these bytes that decodes to another dtype."""
        return EncodedWeight(self.buffer, self.layout, dtype)

    def together(self, out_P: Tensor) -> Tensor:
        """Copy its bytes to ``out_P`` (uint8 [nbytes], any device), and answer that."""
        if isinstance(self.buffer, Tensor):
            return out_P.copy_(self.buffer)
        for part, place in zip(self.buffer, self.layout.split(out_P), strict=True):
            place.copy_(part)
        return out_P

    def rows(self, start: int, stop: int) -> Tensor:
        if len(self.shape) == 3:  # an expert, flat, is a row
            out = self._take(stop - start, math.prod(self.shape[1:]))
            for index in range(start, stop):
                self.expert(index).read_into(out[index - start].view(self.shape[1:]))
            return out
        out = self._take(stop - start, self.layout.columns)
        origin = self._span[0]
        return decode_rows(self.buffer, self.layout, origin + start, origin + stop, out)

    def columns(self, start: int, stop: int) -> Tensor:
        top, bottom = self._span
        out = self._take(bottom - top, stop - start)
        return decode_rows(self.buffer, self.layout, top, bottom, out, columns=(start, stop))

    def gather(self, index: Tensor) -> Tensor:
        out = torch.empty(index.numel(), self.layout.columns, dtype=self.dtype, device=self.device)
        rows = index.reshape(-1).to(torch.int64) + self._span[0]
        gather_rows(self.buffer, self.layout, rows, out)
        return out.view(*index.shape, self.layout.columns)

    def read_into(self, out: Tensor) -> None:
        """Decode the whole of it into ``out``, of its shape and any floating dtype."""
        if self.shape == self.layout.shape:
            decode_whole(self.buffer, self.layout, out)
        else:
            decode_rows(self.buffer, self.layout, *self._span, out)

    def source(self) -> tuple[NativeSource, int] | None:
        """Return what the C kernel decodes its rows from, in their order, and the first one's
        number; None where torch must, or where they stand in another order."""
        if len(self.shape) != 2 or self.layout.order is not None:
            return None
        source = native_source(self.buffer, self.layout)
        return None if source is None else (source, self._span[0])

    def read_range_into(self, start: int, out_P: Tensor) -> None:
        """Decode consecutive elements, flat, from ``start`` on into ``out_P`` (any floating dtype):
        the rows that they lie in, of experts too, and no others."""
        *_, height, width = self.shape
        stop = start + len(out_P)
        for index in range(start // (height * width), -(-stop // (height * width))):
            matrix = self.expert(index) if len(self.shape) == 3 else self
            begin = index * height * width
            first = max(start - begin, 0)
            last = min(stop - begin, height * width)
            rows_RD = matrix.rows(first // width, -(-last // width))
            skipped = first % width
            part_P = rows_RD.reshape(-1)[skipped : skipped + last - first]
            out_P[begin + first - start : begin + last - start].copy_(part_P)

    def _take(self, rows: int, columns: int) -> Tensor:
        return shared_arena(self.device).take(
            "weight", rows, columns, like=self._like, dtype=self.dtype
        )


class JoinedWeight:
    """Two weights of N rows side by side, [N, D + R], in the first one's dtype. Ranges are freshly
    allocated: both weights may be made in the same scratch."""

    def __init__(self, left: Weight, right: Weight) -> None:
        self.left = left
        self.right = right
        self.dtype = left.dtype
        self.shape = (left.shape[0], left.shape[1] + right.shape[1])

    def rows(self, start: int, stop: int) -> Tensor:
        left_nD = self.left.rows(start, stop)
        out = left_nD.new_empty(stop - start, self.shape[1])
        out[:, : left_nD.shape[1]] = left_nD
        out[:, left_nD.shape[1] :] = self.right.rows(start, stop)
        return out

    def columns(self, start: int, stop: int) -> Tensor:
        return self.rows(0, self.shape[0])[:, start:stop]

    def gather(self, index: Tensor) -> Tensor:
        return torch.cat([self.left.gather(index), self.right.gather(index)], -1)


class LowRankSum:
    """A weight plus a product of thin factors, W + A·Bᵀ, in W's dtype: products with it are made of
    those with W, with B and with A, and what lies in W is neither changed nor copied. ``a_NR`` and
    ``b_DR`` are of that dtype."""

    def __init__(self, base: Weight, a_NR: Tensor, b_DR: Tensor) -> None:
        self.base = base
        self.a_NR = a_NR
        self.b_DR = b_DR
        self.shape = base.shape
        self.dtype = base.dtype

    def rows(self, start: int, stop: int) -> Tensor:
        return self._sum(self.base.rows(start, stop), self.a_NR[start:stop], self.b_DR)

    def columns(self, start: int, stop: int) -> Tensor:
        return self._sum(self.base.columns(start, stop), self.a_NR, self.b_DR[start:stop])

    def gather(self, index: Tensor) -> Tensor:
        return self.base.gather(index).add_(self.a_NR[index] @ self.b_DR.t())

    def _sum(self, part: Tensor, a: Tensor, b: Tensor) -> Tensor:
        out = shared_arena(part.device).take("sum", *part.shape, like=part, dtype=part.dtype)
        return torch.addmm(part, a, b.t(), out=out)


class DenseWeight:
    """A :class:`~blockwalk.numerics.codecs.weights.Weight` over a dense tensor [N, D].

    Where ``dtype`` is the tensor's own, ranges are views of the tensor itself, not to be written;
    otherwise they are converted into scratch."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
        assert tensor.dim() == 2, tensor.shape
        self.tensor = tensor
        self.dtype = dtype or tensor.dtype

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.tensor.shape
        return rows, columns

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def rows(self, start: int, stop: int) -> Tensor:
        return self._as_used(self.tensor[start:stop])

    def columns(self, start: int, stop: int) -> Tensor:
        return self._as_used(self.tensor[:, start:stop])

    def gather(self, index: Tensor) -> Tensor:
        return self.tensor[index].to(self.dtype)

    def _as_used(self, part: Tensor) -> Tensor:
        if part.dtype == self.dtype:
            return part
        scratch = shared_arena(part.device).take("weight", *part.shape, like=part, dtype=self.dtype)
        return scratch.copy_(part)


def opened(
    layout: Layout, bytes_P: Bytes, dtype: torch.dtype | None = None
) -> Tensor | EncodedWeight:
    """Return a parameter over its bytes (uint8 [nbytes]), wherever they are.

    Plain numbers are themselves; an encoded matrix, or a layer's encoded experts, are a Weight; an
    encoded vector is decoded afresh. ``dtype`` is that of decoded numbers, the layout's unless
    given."""
    if isinstance(bytes_P, Tensor) and not layout.codec.encoded:
        return layout.codes(bytes_P).view(layout.shape)
    weight = EncodedWeight(bytes_P, layout, dtype or dtype_of(layout.dtype))
    if len(layout.shape) > 1:
        return weight
    out = torch.empty(layout.shape, dtype=weight.dtype, device=weight.device)
    weight.read_into(out)
    return out
