"""Ranks that train one model by exchanging scalars: who runs which forwards of a zeroth-order step
on which part of the batch, and what they say.

Neighbours share the forwards of a step (``mesh.perturb``); groups of them cut the global batch
(``mesh.data``). A step is one exchange: each rank's losses, their token counts, a digest of the
last entry and whether a signal asks the run to stop. The shared seed and the ledger are rank 0's.
:class:`MeshSharing` shares a step as the mesh says, the same in every step."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from blockwalk.plan.mesh import Piece, forwards_at, micro_batches_at
from blockwalk.plan.sharings import SHARINGS
from blockwalk.plan.table import resolved
from blockwalk.ranks.ranks import Ranks


class WalkAgain(Exception):
    """The signal that losses of a step are missing: the walker walks once more, for the pieces that
    are then its own."""


class Lent(Exception):
    """The signal that a rank which joined a run has answered: its walk ends there, and the step
    comes with the ledger."""


class ForwardSharing(Protocol):
    """The sharing of a zeroth-order step's forwards."""

    durable: bool
    """True where a rank's weights outlive its process: the ledger is then compared before they
    change."""

    def read(self, batch: Mapping[str, Tensor]) -> None:
        """Take note of the global batch of the step to come."""

    def share(self, step: int, passes: int, cuts: int) -> tuple[Piece, ...]:
        """Return the pieces of a step, cut in so many, that this process walks for, where that is
        told anew in each step; none: those of its place on the mesh."""

    def first_seed(self, seed: int) -> int:
        """Return rank 0's seed."""

    def losses(
        self, step: int, own: Sequence[float], counted: Sequence[int], passes: int, rows: int
    ) -> list[list[float]]:
        """Return losses of every forward on every part of the global batch.

        Args:
            step: its number.
            own: this rank's numbers, float64, by forward, part and row, in that order.
            counted: the tokens that count of each part of the global batch, as this rank read it.
            passes: forwards of the step over all ranks.
            rows: numbers that a forward answers on one part.

        Returns:
            For each forward its numbers in the order of the global batch; the same bits on every
            rank.

        Raises:
            WalkAgain: some did not come.
            ValueError: the ranks read different data.
            RuntimeError: their steps before differ.
        """

    def refuse(self, step: int, error: str, passes: int, cuts: int) -> None:
        """Refuse a step's batch on every rank, in place of the losses of this one.

        Raises:
            ValueError: always; on every rank the same.
        """

    def confirm(self, step: int, entry: object, *, wait: bool) -> None:
        """Compare a step's entry with rank 0's, now where ``wait`` says so.

        Raises:
            RuntimeError: it is another one.
        """


class ChangingRanks(ForwardSharing, Protocol):
    """A sharing among ranks that join and leave a run: its host, or a rank that joined it."""

    number: int
    """This process; the host is 0."""
    position: Sequence[int]
    """The place in the data of the batch to come: epoch, and examples of it given out."""
    say: Callable[[str], object]
    """Told of ranks that come and go."""

    def open(self, header: Mapping[str, Any], entries: Sequence[Any]) -> None:
        """Let ranks join a run that stands after these entries."""

    def announce(self, **values: Any) -> None:
        """Begin a turn; one with ``ended`` is the last."""

    def header(self) -> dict[str, Any]:
        """Return the facts that :meth:`open` was given, once it was."""

    def next_turn(self) -> dict[str, Any]:
        """Return the newest turn, once there is one that this rank does not know."""

    def entries(self, done: int) -> list[dict[str, Any]]:
        """Return the ledger's lines from the step after ``done`` to the one before the turn's."""

    def ask(self) -> None:
        """Ask to take part from the next turn on."""

    def compare(self, step: int, sums: Mapping[str, int]) -> None:
        """Tell the checksums of the host's weights after a step, or compare this rank's with them.

        Raises:
            RuntimeError: they differ.
        """


def changing_ranks(address: str, timeout: float, *, joins: bool) -> ChangingRanks:
    """Return the host of an elastic run at an address, or a rank that joins it.

    Raises:
        ValueError: no package brings ranks that come and go.
        LostRank: the address is taken; or nobody answers there within ``timeout`` seconds.
    """
    if "elastic" not in SHARINGS:
        raise ValueError(
            f"elastic is {address!r}, and no installed package brings ranks that come and go: leave"
            " it out, or install blockwalk again (pip install)"
        )
    make = resolved(SHARINGS["elastic"].make)
    ranks: ChangingRanks = make(address, timeout, joins=joins)
    return ranks


@dataclass(slots=True)
class MeshSharing:
    """Forwards shared by the places of ranks on the mesh
    (a :class:`ForwardSharing`)."""

    ranks: Ranks
    durable: bool = False
    _last_entry_digest: float = 0.0
    """A digest of the last entry of the ledger, which goes with the next losses."""

    def forwards_of(self, rank: int, passes: int) -> range:
        """Return the forward passes of a step that a rank runs."""
        return forwards_at(self.ranks.mesh, dict(self.ranks.coordinates(rank)), passes)

    def micro_batches_of(self, rank: int, cuts: int) -> range:
        """Return the parts of the global batch that a rank takes, where it was cut into
        ``cuts``."""
        return micro_batches_at(self.ranks.mesh, dict(self.ranks.coordinates(rank)), cuts)

    def read(self, batch: Mapping[str, Tensor]) -> None:
        """Do nothing: the ranks have read it."""

    def share(self, _step: int, _passes: int, _cuts: int) -> tuple[Piece, ...]:
        """Return none: a rank walks for the pieces of its place."""
        return ()

    def first_seed(self, seed: int) -> int:
        return int(self.ranks.gather(torch.tensor([seed], dtype=torch.int64))[0, 0])

    def losses(
        self, step: int, own: Sequence[float], counted: Sequence[int], passes: int, rows: int
    ) -> list[list[float]]:
        ranks = self.ranks
        cuts = len(counted)
        longest = self._numbers(passes, cuts) * rows
        counts = [counted[cut] for cut in self.micro_batches_of(ranks.rank, cuts)]
        padding = [0.0] * (longest - len(own))
        everyone, entry_digests = self._exchange(step, [*own, *padding, *map(float, counts)])
        table = [[math.nan] * (cuts * rows) for _ in range(passes)]
        for rank, values in enumerate(everyone):
            if entry_digests[rank] != self._last_entry_digest:
                raise RuntimeError(
                    f"step {step}: rank {rank} and rank {ranks.rank} have different ledgers: the"
                    " step before differs"
                )
            forwards = self.forwards_of(rank, passes)
            parts = self.micro_batches_of(rank, cuts)
            numbers = iter(values)
            for p, cut, row in itertools.product(forwards, parts, range(rows)):
                table[p][cut * rows + row] = next(numbers)
            expected = [counted[cut] for cut in parts]
            assert values[longest:] == expected, (
                f"step {step}: rank {rank} counts {values[longest:]} tokens of one batch, not"
                f" {expected}"
            )
        return table

    def refuse(self, step: int, error: str, passes: int, cuts: int) -> None:
        """Send the refusal where the losses would be."""
        counts = len(self.micro_batches_of(self.ranks.rank, cuts))
        self._exchange(step, [0.0] * (self._numbers(passes, cuts) + counts))

    def _numbers(self, passes: int, cuts: int) -> int:
        """Return the forwards of parts that a rank runs at most."""
        return -(-passes // self.ranks.mesh.perturb) * len(self.micro_batches_of(0, cuts))

    def _exchange(
        self, step: int, numbers: Sequence[float]
    ) -> tuple[list[list[float]], list[float]]:
        """Return everybody's numbers and digests of the last entry, by rank, when all have been
        given the same batch."""
        ranks = self.ranks
        facts = (ranks.batch_digest, self._last_entry_digest, float(ranks.own_stop_signal()))
        everyone = ranks.exchange([*numbers, *facts])
        ranks.stop_signal_of_any_rank = max(int(values.pop()) for values in everyone)
        entry_digests = [values.pop() for values in everyone]
        ranks.require_one_batch(step, [values.pop() for values in everyone])
        return everyone, entry_digests

    def confirm(self, step: int, entry: object, *, wait: bool) -> None:
        """Compare a step's entry with rank 0's: with the next losses, or now, when rank 0 has
        written it: before weights that outlive this process can be ahead of the ledger."""
        if self.ranks.world == 1:
            return
        digest = hashlib.blake2b(repr(entry).encode(), digest_size=6).digest()
        number = int.from_bytes(digest, "little")
        self._last_entry_digest = float(number)  # 48 bits: exact
        if wait and self.first_seed(number) != number:
            raise RuntimeError(
                f"step {step}: rank {self.ranks.rank} has another ledger entry than rank 0: {entry}"
            )
