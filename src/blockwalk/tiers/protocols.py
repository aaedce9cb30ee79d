"""Tiers: the memories that state lives in. This file is what they have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.weights import Value
from blockwalk.plan.model_spec import ParamSpec
from blockwalk.plan.placement import Codec


class TensorSource(Protocol):
    """Parameters by canonical name: all that a store, or a bucket, is written from. Unknown names
    raise KeyError."""

    def names(self) -> Sequence[str]:
        """Return every parameter and persistent buffer, by canonical name; a tied weight once."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the parameter that :meth:`weights` gives, decoded."""

    def weights(self, names: Iterable[str]) -> dict[str, Value]:
        """Return the named parameters where they lie: zero-copy, read-only views of the map where
        the stored bytes are the tensor's own (writing to one kills the process), a Weight where a
        matrix is encoded, and a fresh tensor where a parameter is made of several. Plain tensors
        are in the dtype that is stored."""

    def release(self, names: Iterable[str]) -> None:
        """Give the pages of ``names`` back to the kernel. Views stay valid: reading one again
        fetches it again."""


class WeightSource(TensorSource, Protocol):
    """A tier that a model's stored parameters and persistent buffers are read from. Every method
    may be called from any lane."""

    def stored_as(self, name: str) -> Layout:
        """Return the layout of a parameter's bytes as they are stored; of one that is made of
        several, that of the first."""
        ...

    def in_place(self, name: str) -> bool:
        """Return whether :meth:`weights` gives ``name`` without making it: false where tensors are
        fused into it. Fetch such a one at its turn, and let go of it after."""

    def read_into(self, name: str, out: Tensor) -> None:
        """Decode, fuse or copy ``name`` into ``out``: a CPU tensor of the parameter's shape and any
        floating dtype."""

    def read_range_into(self, name: str, start: int, out_P: Tensor) -> None:
        """Copy consecutive elements of ``name``, flat, from ``start`` on, into ``out_P``: a flat
        CPU tensor of any floating dtype. Of a parameter that is stacked from several tensors, no
        other is read than those that the range meets."""

    def prefetch(self, names: Iterable[str]) -> int:
        """Bring the bytes of ``names`` into memory, blocking (call it from the disk lane); returns
        their number."""

    def close(self) -> None:
        """Let go of the files. Views that are still alive stay valid."""


def as_stored(param: ParamSpec, source: WeightSource) -> ParamSpec:
    """Return a parameter with the facts that its source knows."""
    layout = source.stored_as(param.name)
    in_place = source.in_place(param.name)
    codec = layout.codec if in_place else Codec.RAW
    parted = layout.nbytes if codec.facts.parted else 0
    return replace(
        param,
        assembled=not in_place,
        codec=codec,
        group_size=layout.group_size,
        parted_nbytes=parted,
    )


class UnitTier(Protocol):
    """A tier that buckets are read from and written to, one unit at a time, from any lane.

    On a GPU, work is issued on the current stream; a method may return before it is done.
    """

    def step(self, unit: int) -> int:
        """Return the step after which the unit was last written; 0 as it came."""

    def read_unit(self, unit: int, out_P: Tensor) -> int:
        """Read a unit's bytes into ``out_P`` (uint8 [nbytes], device); returns the step after which
        they were written."""

    def write_unit(self, unit: int, data_P: Tensor, step: int) -> None:
        """Take over a unit's bytes from ``data_P`` (uint8 [nbytes], device), as they are after
        ``step``."""

    def bucket(self, unit: int) -> Tensor | None:
        """Return the unit's bytes (CPU uint8 [nbytes]) where the tier holds them in memory as they
        are, to be read when nothing is in flight; None where reading makes a copy."""

    def close(self) -> None: ...
