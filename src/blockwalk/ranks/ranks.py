"""This process among the ranks of a run: its number, what it exchanges with the others, and what
all of them hold alike.

Ranks are numbered node by node. They share a run as the mesh says: neighbours may hold one copy of
streamed units together, and every rank is given the same global batch, of which it takes its part.
Scalars go from every rank to every rank (:mod:`blockwalk.ranks.scalars`); slices are gathered
inside a node."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from blockwalk.plan.choices import MeshSettings
from blockwalk.plan.mesh import Coordinates, coordinates_of, make_axes, slice_of
from blockwalk.plan.plan import Plan
from blockwalk.program.program import Lane
from blockwalk.ranks.agreement import first_json, gather_json
from blockwalk.ranks.groups import Groups, make_groups, started
from blockwalk.ranks.scalars import Scalars, make_scalars

REFUSED = -1.0
"""The digest in place of a batch's that its rank cannot use."""


@runtime_checkable
class NamedRows(Protocol):
    """A batch of rows that are known by their numbers, of which nothing else need be read."""

    def digest(self) -> bytes:
        """Return a digest of the numbers."""


@dataclass(slots=True)
class Ranks:
    """This rank among the others; also where there are none."""

    mesh: MeshSettings
    rank: int = 0
    slices: int = 1
    """Ranks that hold one copy of the streamed buckets."""
    _groups: Groups | None = None
    _scalars: Scalars | None = None
    own_stop_signal: Callable[[], int] = lambda: 0
    """The number of the signal that asks this rank to stop, or 0; it goes with the numbers of a
    step."""
    stop_signal_of_any_rank: int = 0
    """The highest such number that any rank has sent."""
    batch_digest: float = 0.0
    """A digest of the batch that this rank was given and of what it does with it, see
    :meth:`read`."""
    batch_facts: dict[str, str] = field(default_factory=dict)
    """Facts of its batch that all ranks must have alike, for a message."""
    batch_error: str = ""
    """The reason why this rank cannot use its batch; empty where it can."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.mesh.world

    def coordinates(self, rank: int) -> Coordinates:
        """Return a rank's places on the axes of the mesh."""
        return coordinates_of(self.mesh, rank)

    # ---- slices ----------------------------------------------------------------------------------

    @property
    def place(self) -> int:
        """The number of this rank among the ranks that hold one copy."""
        return self.place_of(self.rank, self.slices)

    def place_of(self, rank: int, ranks: int) -> int:
        """Return the number of a rank's slice among those of so many ranks."""
        return slice_of(make_axes(self.mesh), rank, ranks, ranks)[0]

    def gather_(self, bucket_P: Tensor, ranks: int) -> None:
        """Complete a bucket (uint8 [P]) in place from this rank's slice in it over so many ranks,
        which call this together."""
        if self._groups is not None and ranks > 1:
            self._groups.gather_(bucket_P, self._groups.between(1, ranks), Lane.INTRA, direct=True)

    # ---- one batch -------------------------------------------------------------------------------

    def read(
        self, batch: Mapping[str, Tensor] | None, facts: Mapping[str, str], error: str
    ) -> None:
        """Take note of the batch of the step or evaluation to come. It is compared before any of it
        is used (:meth:`begin`), or with a step's losses.

        Args:
            batch: the global batch; None where this rank brings rows of its own.
            facts: what all ranks must have alike, by name.
            error: the reason why this rank cannot use its batch; empty where it can.
        """
        self.batch_error = error
        self.batch_digest = REFUSED if error else 0.0
        if self.world > 1 and not error:
            content = 0.0 if batch is None else digest_of(batch)
            text = json.dumps([dict(facts), content], sort_keys=True)
            self.batch_digest = _number(hashlib.blake2b(text.encode(), digest_size=6))
            self.batch_facts = dict(facts)

    def begin(self, step: int, numbers: Sequence[float]) -> list[list[float]]:
        """Compare the batch that was read, and hear of a signal; all ranks together. Return, by
        rank, the numbers that each has sent, all as many.

        Args:
            step: of which number, for a message.
            numbers: of this rank's rows.

        Raises:
            ValueError: on every rank: one has an error, or they were given different batches.
        """
        own = [self.batch_digest, float(self.own_stop_signal()), *numbers]
        everyone = self.exchange(own)
        self.stop_signal_of_any_rank = max(int(signal) for _, signal, *_ in everyone)
        self.require_one_batch(step, [digest for digest, *_ in everyone])
        return [numbers_of_rank for _, _, *numbers_of_rank in everyone]

    def refused_inside(self) -> bool:
        """Return whether a rank of this node cannot use its batch, where they gather slices from
        each other, which call this together; elsewhere whether this rank cannot."""
        refused = self.batch_digest == REFUSED
        if self.slices == 1 or self._scalars is None:
            return refused
        return bool(self._scalars.of_node(torch.tensor([float(refused)])).any())

    def require_one_batch(self, step: int, digests: Sequence[float]) -> None:
        """Raise ValueError where a rank refuses a step's batch, or ranks, by number, have different
        digests of it; they call this together."""
        if REFUSED in digests:
            errors = [self.batch_error] if self.world == 1 else gather_json(self.batch_error)
            number = next(number for number, error in enumerate(errors) if error)
            place = f"step {step}: rank {number}: " if self.world > 1 else ""
            raise ValueError(f"{place}{errors[number]}")
        differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if not differing:
            return
        facts = gather_json(self.batch_facts)
        unequal, advice = _unlike(facts[0], facts[differing[0]], differing[0])
        figures = f" ({'; '.join(unequal)})" if unequal else ""
        raise ValueError(
            f"step {step}: rank {', '.join(map(str, differing))} was given other data than rank 0"
            f"{figures}; {advice}"
        )

    # ---- scalars ---------------------------------------------------------------------------------

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """Return everybody's values, float64, by rank; all send as many."""
        rows: list[list[float]] = self.gather(torch.tensor(values, dtype=torch.float64)).tolist()
        return rows

    def compare_copies(
        self, step: int, sums: Sequence[tuple[str, int, int]], resumed_from: str
    ) -> None:
        """Compare what several ranks hold copies of; all ranks call this together.

        Args:
            sums: of each kind of state its name, the ranks that hold one copy together, and a
                checksum of this rank's slice.
            resumed_from: the record that a run goes on from, for the message.

        Raises:
            RuntimeError: on every rank: two copies differ; the message names the step, the state
                and the ranks.
        """
        if self.world == 1 or not sums:
            return
        sums_WN = self.gather(torch.tensor([total for _, _, total in sums], dtype=torch.int64))
        places = {
            ranks: [self.place_of(rank, ranks) for rank in range(self.world)]
            for _, ranks, _ in sums
        }
        stage = self.mesh.stage_ranks
        for (name, ranks, _), sums_W in zip(sums, sums_WN.T.tolist(), strict=True):
            for number, place in product(range(self.mesh.pipeline), range(ranks)):
                copies = {
                    rank: total
                    for rank, total in enumerate(sums_W)
                    if places[ranks][rank] == place and rank // stage == number
                }
                usual, _ = Counter(copies.values()).most_common(1)[0]
                if different := [str(rank) for rank, total in copies.items() if total != usual]:
                    raise RuntimeError(
                        f"step {step}: the weights of {name} on rank {', '.join(different)}"
                        " differ from those on the other ranks. The run ends; start it again to"
                        f" resume from {resumed_from}"
                    )

    def gather(self, own_N: Tensor) -> Tensor:
        """Return every rank's numbers, [W, N], from this rank's [N]."""
        return own_N[None] if self._scalars is None else self._scalars.gather(own_N)

    def close(self) -> None:
        """Destroy the process groups; every rank calls this together."""
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        if self._scalars is not None:
            self._scalars.close()
            self._scalars = None


def _unlike(
    of_first: Mapping[str, str], of_other: Mapping[str, str], other: int
) -> tuple[list[str], str]:
    """Return which facts of their batches rank 0 and another one have unlike, with both values; and
    what to do."""
    names = sorted(of_first.keys() | of_other.keys())
    advice = "give every rank the same whole batch: each takes its own share of it"
    if of_first.get("local_batch") != of_other.get("local_batch"):
        names = ["local_batch"]
        advice = (
            "give every rank its own rows with local_batch=True, or every rank the same whole batch"
        )
    elif of_first.get("local_batch") == "True":
        advice = (
            "with local_batch=True every rank brings the same tensors and as many rows:"
            " batch_size ÷ mesh.world, filled up with rows whose labels are all -100"
        )
    values = [(name, of_first.get(name, "none"), of_other.get(name, "none")) for name in names]
    unequal = [
        f"{name}: rank 0 has {value}, rank {other} has {of_rank}"
        for name, value, of_rank in values
        if value != of_rank
    ]
    return unequal, advice


def digest_of(batch: Mapping[str, Tensor]) -> float:
    """Return a digest of a batch, or of its rows' numbers where these are known: 48 bits, which a
    float64 holds."""
    digest = hashlib.blake2b(digest_size=6)
    if isinstance(batch, NamedRows):
        digest.update(batch.digest())
        return _number(digest)
    for name, tensor in sorted(batch.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return _number(digest)


def _number(digest: Any) -> float:
    """Return a digest of six bytes as a number."""
    return float(int.from_bytes(digest.digest(), "little"))


def first(ask: Callable[[], Any]) -> Any:
    """Return rank 0's answer, on every rank: a value that JSON carries, as small as a ledger.

    Raises:
        ValueError: on every rank, as rank 0 raised it.
    """
    if not dist.is_initialized():
        return ask()
    answer: Any = None
    error: str | None = None
    if dist.get_rank() == 0:
        try:
            answer = ask()
        except (ValueError, OSError) as raised:
            error = str(raised)
    answer, error = first_json([answer, error])
    if error is not None:
        raise ValueError(error)
    return answer


def make_ranks(plan: Plan, device: torch.device) -> Ranks:
    """Return the ranks of a plan; every rank calls this together.

    Raises:
        ValueError: other ranks were started than the plan has.
    """
    mesh = plan.mesh
    if started(mesh) == 1:
        return Ranks(mesh)
    rank = dist.get_rank()
    if plan.home.gathered:  # its slices have groups of their own
        return Ranks(mesh, rank, _scalars=make_scalars(mesh, rank))
    groups = make_groups(mesh, device)
    return Ranks(mesh, rank, plan.parameter_ranks, groups, make_scalars(mesh, rank))
