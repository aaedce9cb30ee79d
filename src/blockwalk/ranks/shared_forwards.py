"""Ranks that train one model by exchanging scalars: who runs which forwards on which part of the
batch, and what they say.

Ranks are numbered node by node. Neighbours share the forwards of a step (``mesh.perturb``); groups
of them cut the global batch (``mesh.data``); and, whatever they compute, the ranks of the group of
``trainable`` hold one copy of the streamed blocks. A step is one exchange of scalars
(:mod:`blockwalk.ranks.scalars`): each rank's losses, their token counts, a digest of the last entry
and whether a signal asks the run to stop. The shared seed and the ledger are rank 0's. Slices are
gathered inside a node."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockwalk.plan.choices import MeshSettings
from blockwalk.plan.mesh import (
    Coordinates,
    Piece,
    coordinates_of,
    forwards_at,
    make_axes,
    micro_batches_at,
    slice_of,
)
from blockwalk.plan.plan import Plan
from blockwalk.program.program import Lane
from blockwalk.ranks.agreement import first_json
from blockwalk.ranks.groups import Groups, make_groups, started
from blockwalk.ranks.scalars import Scalars, make_scalars


@dataclass(slots=True)
class SharedForwards:
    """This rank among the others of a zeroth-order run; also where there are none."""

    mesh: MeshSettings
    rank: int = 0
    slices: int = 1
    """Ranks that hold one copy of the streamed buckets."""
    _groups: Groups | None = None
    _scalars: Scalars | None = None
    durable: bool = False
    """True where a rank's weights outlive its process: the ledger is then compared before they
    change."""
    own_stop_signal: Callable[[], int] = lambda: 0
    """The number of the signal that asks this rank to stop, or 0; it goes with this rank's
    losses."""
    stop_signal_of_any_rank: int = 0
    """The highest such number that any rank sent with the last losses."""
    _last_entry_digest: float = 0.0
    """A digest of the last entry of the ledger, which goes with the next losses."""
    _read: float = 0.0
    """A digest of the global batch that this rank was given."""

    @property
    def world(self) -> int:
        return self.mesh.world

    # ---- who does what ---------------------------------------------------------------------------

    def coordinates(self, rank: int) -> Coordinates:
        """Return a rank's places on the axes of the mesh."""
        return coordinates_of(self.mesh, rank)

    def forwards_of(self, rank: int, passes: int) -> range:
        """Return the forward passes of a step that a rank runs."""
        return forwards_at(self.mesh, dict(self.coordinates(rank)), passes)

    def micro_batches_of(self, rank: int, cuts: int) -> range:
        """Return the parts of the global batch that a rank takes, where it was cut into
        ``cuts``."""
        return micro_batches_at(self.mesh, dict(self.coordinates(rank)), cuts)

    def share(self, _step: int, _passes: int, _cuts: int) -> tuple[Piece, ...]:
        """Return the pieces of a step that this process walks for, where they are told anew in
        each; none: those of its place."""
        return ()

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

    def read(self, batch: Mapping[str, Tensor]) -> None:
        """Take note of the global batch of the step or evaluation to come: a zeroth-order step
        compares it with its losses."""
        if self.world > 1:
            self._read = digest_of(batch)

    def begin(self, step: int) -> None:
        """First order, and every evaluation: compare the batch that was read before any of it is
        used, and hear of a signal; all ranks together.

        Raises:
            ValueError: on every rank: they were given different batches.
        """
        everyone = self.exchange([self._read, float(self.own_stop_signal())])
        self.stop_signal_of_any_rank = max(int(told) for _, told in everyone)
        self._require_one_batch(step, [read for read, _ in everyone])

    def _require_one_batch(self, step: int, read: Sequence[float]) -> None:
        if others := [str(rank) for rank, each in enumerate(read) if each != read[0]]:
            raise ValueError(
                f"step {step}: rank {', '.join(others)} was given other data than rank 0; give"
                " every rank the same whole batch:"
                " each takes its own share of it"
            )

    # ---- scalars ---------------------------------------------------------------------------------

    def losses(
        self, step: int, own: Sequence[float], counted: Sequence[int], passes: int, rows: int
    ) -> list[list[float]]:
        """Return losses of every forward on every part of the global batch, the same bits on every
        rank.

        Args:
            own: this rank's numbers, float64, by forward, part and row, in that order.
            counted: the tokens that count of each part of the global batch, as this rank read it.
            passes: forwards of the step over all ranks.
            rows: numbers that a forward answers on one part.

        Returns:
            For each forward its numbers in the order of the global batch.

        Raises:
            ValueError: the ranks read different data.
            RuntimeError: their steps before differ.
        """
        cuts = len(counted)
        most = -(-passes // self.mesh.perturb) * len(self.micro_batches_of(0, cuts)) * rows
        ours = [counted[cut] for cut in self.micro_batches_of(self.rank, cuts)]
        facts = (self._read, self._last_entry_digest, float(self.own_stop_signal()))
        sent = [*own, *[0.0] * (most - len(own)), *map(float, ours), *facts]
        table = [[math.nan] * (cuts * rows) for _ in range(passes)]
        everyone = self.exchange(sent)
        self.stop_signal_of_any_rank = max(int(values.pop()) for values in everyone)
        told = [values.pop() for values in everyone]
        self._require_one_batch(step, [values.pop() for values in everyone])
        for rank, values in enumerate(everyone):
            at = iter(values)
            for p in self.forwards_of(rank, passes):
                for cut in self.micro_batches_of(rank, cuts):
                    for row in range(rows):
                        table[p][cut * rows + row] = next(at)
            theirs = [counted[cut] for cut in self.micro_batches_of(rank, cuts)]
            if told[rank] != self._last_entry_digest:
                raise RuntimeError(
                    f"step {step}: rank {rank} and rank {self.rank} have different ledgers: the"
                    " step before differs"
                )
            wrong = (
                f"step {step}: rank {rank} counts {values[most:]} tokens of one batch, not {theirs}"
            )
            assert values[most:] == theirs, wrong
        return table

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """Everybody's values, float64, by rank; all send as many."""
        rows: list[list[float]] = self._all(torch.tensor(values, dtype=torch.float64)).tolist()
        return rows

    def first_seed(self, seed: int) -> int:
        """Rank 0's seed."""
        return int(self._all(torch.tensor([seed], dtype=torch.int64))[0, 0])

    def confirm(self, step: int, entry: object, *, wait: bool) -> None:
        """Compare a step's entry with rank 0's: with the next losses, or now, when rank 0 has
        written it: before weights that outlive this process can be ahead of the ledger.

        Raises:
            RuntimeError: it is another one.
        """
        if self.world == 1:
            return
        digest = hashlib.blake2b(repr(entry).encode(), digest_size=6).digest()
        ours = int.from_bytes(digest, "little")
        self._last_entry_digest = float(ours)  # 48 bits: exact
        if wait and self.first_seed(ours) != ours:
            raise RuntimeError(
                f"step {step}: rank {self.rank} has another ledger entry than rank 0: {entry}"
            )

    def compare(self, step: int, whole: Mapping[str, int], slices: Mapping[str, int]) -> None:
        """Compare the ranks' weights by checksums: those that every rank holds, and its slices of
        those that it shares.

        Raises:
            RuntimeError: on every rank: two copies differ; the message names the step, the block
                and the rank.
        """
        sums = [(name, 1, its) for name, its in whole.items()]
        sums += [(name, self.slices, its) for name, its in slices.items()]
        self.compare_copies(step, sums, "its ledger")

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
        sums_WN = self._all(torch.tensor([its for _, _, its in sums], dtype=torch.int64))
        places = {
            ranks: [self.place_of(rank, ranks) for rank in range(self.world)]
            for _, ranks, _ in sums
        }
        for (name, ranks, _), sums_W in zip(sums, sums_WN.T.tolist(), strict=True):
            for place in range(ranks):
                held = {
                    rank: its for rank, its in enumerate(sums_W) if places[ranks][rank] == place
                }
                usual, _ = Counter(held.values()).most_common(1)[0]
                if different := [str(rank) for rank, value in held.items() if value != usual]:
                    raise RuntimeError(
                        f"step {step}: the weights of {name} on rank {', '.join(different)}"
                        " differ from those on the other"
                        f" ranks. The run ends; start it again to resume from {resumed_from}"
                    )

    def _all(self, own_N: Tensor) -> Tensor:
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


def digest_of(batch: Mapping[str, Tensor]) -> float:
    """Return a digest of a batch: 48 bits, which a float64 holds."""
    digest = hashlib.blake2b(digest_size=6)
    for name, tensor in sorted(batch.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return float(int.from_bytes(digest.digest(), "little"))


def first(ask: Callable[[], Any]) -> Any:
    """Rank 0's answer, on every rank: a value that JSON carries, as small as a ledger.

    Raises:
        ValueError: on every rank, as rank 0 raised it.
    """
    if not dist.is_initialized():
        return ask()
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = ask()
        except (ValueError, OSError) as error:
            told[1] = str(error)
    answer, wrong = first_json(told)
    if wrong is not None:
        raise ValueError(wrong)
    return answer


def make_ranks(plan: Plan, device: torch.device) -> SharedForwards:
    """Return the ranks of a plan; every rank calls this together.

    Raises:
        ValueError: other ranks were started than the plan has.
    """
    mesh = plan.mesh
    if started(mesh) == 1:
        return SharedForwards(mesh)
    if plan.sharded:  # its slices have groups of their own
        return SharedForwards(mesh, dist.get_rank(), _scalars=make_scalars(mesh, dist.get_rank()))
    groups = make_groups(mesh, device)
    return SharedForwards(
        mesh, groups.rank, plan.parameter_ranks, groups, make_scalars(mesh, groups.rank)
    )
