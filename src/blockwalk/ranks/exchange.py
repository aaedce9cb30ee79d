"""The exchange among ranks that hold parts of the same rows, while they compute: collectives that
autograd differentiates, in the order of the compute ops.

c ranks, P elements of a rank or of a piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Torch's gather over one tensor, by its name of torch 2.13 or by that before."""


class Collectives(Protocol):
    """Collectives among parts, without a graph."""

    @property
    def count(self) -> int:
        """The parts, c."""
        ...

    def gather(self, part_P: Tensor) -> Tensor:
        """Return every part's elements, [c, P]."""
        ...

    def swap(self, pieces_cP: Tensor) -> Tensor:
        """Return the piece that every part has for this one, [c, P]."""
        ...


@dataclass(slots=True)
class CountedExchange:
    """An exchange that autograd differentiates
    (:class:`blockwalk.numerics.sequence_part.Exchange`), and the bytes that it sends."""

    collectives: Collectives
    sent_bytes: int = 0
    """Bytes sent so far: every collective sends all but one c-th of its answer."""

    def gather(self, part_P: Tensor) -> Tensor:
        """Return every part's elements, [c, P]. The gradient is summed over the parts, in float32,
        in their order."""
        out: Tensor = _Gathered.apply(part_P, self)  # type: ignore[no-untyped-call]
        return out

    def swap(self, pieces_cP: Tensor) -> Tensor:
        """Return the piece that every part has for this one, [c, P]."""
        out: Tensor = _Swapped.apply(pieces_cP, self)  # type: ignore[no-untyped-call]
        return out

    def gathered(self, part_P: Tensor) -> Tensor:
        """Return every part's elements, without a graph."""
        return self._counted(self.collectives.gather(part_P.detach()))

    def swapped(self, pieces_cP: Tensor) -> Tensor:
        """Return the pieces for this part, without a graph."""
        return self._counted(self.collectives.swap(pieces_cP.detach()))

    def _counted(self, answer_cP: Tensor) -> Tensor:
        count = self.collectives.count
        self.sent_bytes += answer_cP.nbytes * (count - 1) // count
        return answer_cP


@dataclass(frozen=True, slots=True)
class RankCollectives:
    """The collectives of the ranks of a process group."""

    group: dist.ProcessGroup
    count: int

    def gather(self, part_P: Tensor) -> Tensor:
        """Return every rank's elements, [c, P]."""
        sent = self._bytes(part_P)
        received = sent.new_empty(self.count * sent.numel())
        if self._over_host:
            self._send_to_each(sent, list(received.chunk(self.count)))
        else:
            all_gather(received, sent, group=self.group)
        return self._as(received, part_P).view(self.count, -1)

    def swap(self, pieces_cP: Tensor) -> Tensor:
        """Return the piece that every rank has for this one, [c, P]."""
        sent = self._bytes(pieces_cP)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return self._as(received, pieces_cP).view(self.count, -1)

    def _send_to_each(self, sent_N: Tensor, parts: list[Tensor]) -> None:
        """Send a part to each rank by itself, and receive theirs into place: as many bytes as
        gloo's gather sends, without a second buffer of them all."""
        ranks = dist.get_process_group_ranks(self.group)
        own = dist.get_rank(self.group)
        parts.pop(own).copy_(sent_N)
        others = [rank for number, rank in enumerate(ranks) if number != own]
        works = [
            dist.irecv(part_N, rank, group=self.group)
            for part_N, rank in zip(parts, others, strict=True)
        ]
        works += [dist.isend(sent_N, rank, group=self.group) for rank in others]
        for work in works:
            assert work is not None
            work.wait()

    @property
    def _over_host(self) -> bool:
        return bool(dist.get_backend(self.group) == "gloo")

    def _bytes(self, tensor: Tensor) -> Tensor:
        """Return a tensor's bytes, where the group speaks from: in host memory under gloo, which
        has no 16 bits everywhere."""
        flat_N = tensor.reshape(-1).view(torch.uint8)
        return flat_N.cpu() if self._over_host else flat_N

    @staticmethod
    def _as(flat_N: Tensor, like: Tensor) -> Tensor:
        return flat_N.to(like.device).view(like.dtype)


class _Gathered(torch.autograd.Function):
    """All parts from every part; backwards a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, part_P: Tensor, exchange: CountedExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.gathered(part_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_cP: Tensor) -> tuple[Tensor | None, ...]:
        received_cP = ctx.exchange.swapped(grad_cP)
        exact = torch.promote_types(grad_cP.dtype, torch.float32)
        return received_cP.sum(0, dtype=exact).to(grad_cP.dtype), None


class _Swapped(torch.autograd.Function):
    """Pieces that change hands; backwards they change back."""

    @staticmethod
    def forward(ctx: Any, pieces_cP: Tensor, exchange: CountedExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.swapped(pieces_cP)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_cP: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.swapped(grad_cP), None
