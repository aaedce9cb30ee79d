"""Homes: where the state of a model lives, and how it comes to the device.

Which unit's state lives how, :mod:`blockwalk.program.residence` says; homes do the work of it.
A model's state has two parts, its frozen and its trainable parameters (with what is kept beside
these), and each part one home, which :mod:`blockwalk.engine.homes` makes as the plan's row says:

    frozen     :class:`~blockwalk.engine.frozen.Frozen`
                   mapped, resident, or visiting slots
               :class:`~blockwalk.engine.sharded_part.ShardedPart`
                   a slice on each rank, gathered into slots
    trainable  :class:`~blockwalk.engine.masters.Masters`
                   masters and optimizer states, whole
               :class:`~blockwalk.engine.sharded_masters.ShardedMasters`
                   slices of them
               :class:`~blockwalk.engine.buckets.Buckets`
                   zeroth order: encoded, with the states beside them

Each has three concerns. *Layout*: where a tensor lies in its unit's bucket, and how that is cut
into slices (:mod:`~blockwalk.engine.bucket_tensors`, :mod:`~blockwalk.engine.slices`,
:mod:`blockwalk.program.flat_layout`). *Residency*: where the bucket is, and what is bound for a
unit's turn: the protocol below. *Gradients*: buffers, accumulators and reductions, for those that
have any (:mod:`~blockwalk.engine.gradients`). Update rules stay outside: they are applied to what a
home hands out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from blockwalk.checkpoints.pieces import Pieces
from blockwalk.engine.slots import Slots
from blockwalk.numerics.codecs.weights import Value
from blockwalk.program.program import Op
from blockwalk.ranks.groups import Completion

Job = Callable[[], Completion | None]
"""The work of an op, which may answer with a completion, see :mod:`blockwalk.walk.lanes`."""

BRIEF_BYTES = 1 << 16
"""Bytes up to which a copy in memory, or advice on pages, is :class:`Brief`."""


@dataclass(frozen=True, slots=True)
class Brief:
    """Work that takes less time than a thread takes to wake up for it, 50 µs of a processor: where
    nothing is before it, it is done at once."""

    work: Callable[[], None]

    def __call__(self) -> None:
        self.work()


NO_JOB = Brief(lambda: None)
"""The work of an op that is a mark alone."""


def on_bytes(nbytes: int, work: Callable[..., None], *arguments: Any) -> Job:
    """Return the work of a copy in memory, or of advice on pages, of so many bytes."""
    job = partial(work, *arguments)
    return Brief(job) if nbytes <= BRIEF_BYTES else job


class Home(Protocol):
    """The residency of one part of a model's state. What moves it, movers ask of it
    (:mod:`blockwalk.engine.movers`)."""

    @property
    def slots(self) -> Slots | None:
        """The device buffers that its units visit; None where nothing visits."""

    def values(self, unit: int) -> Mapping[str, Value]:
        """Return the parameters that a turn of a unit binds afresh, by name."""

    def value(self, name: str) -> Value:
        """Return a parameter on the device, where its unit is there."""

    def weights(self) -> Mapping[str, Any]:
        """Return every parameter between two programs, by name, to be written a few rows at a time.
        Where ranks hold them together all of them read these, in one order."""


class Trained(Protocol):
    """The trainables, and what is kept beside them, as far as they outlive a step."""

    def weights(self) -> Mapping[str, Any]:
        """Return every trainable, as :meth:`Home.weights`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run, as far as this rank holds it: the tensors themselves, not
        copies."""

    def join_gathers(self) -> None:
        """Join the gathers of the rank that saves, on the others that hold pieces of what it
        writes."""

    def settle(self) -> None:
        """Write what is on the device to a tier that outlives the process, where that is theirs."""

    def sums(self) -> list[tuple[str, int, int]]:
        """Return a checksum of each piece of state that several ranks may hold copies of: its name,
        the ranks that hold one copy together, and the sum. Nothing may be in flight."""

    def close(self) -> None: ...


class Gradients(Protocol):
    """The gradients of one step."""

    def begin(self) -> None:
        """Begin a step: nothing is accumulated."""

    def expect(self, op: Op) -> None:
        """Settle where the gradients of a compute op that is about to run go."""

    def accumulator(self, name: str | None) -> Tensor | None:
        """Return the float32 buffer that a trainable's gradient is added to; None for what is not
        trained."""

    def add(self, names: Iterable[str], gradients: Iterable[Tensor | None]) -> None:
        """Add to the accumulators; None is a parameter that the loss does not depend on."""

    def reduce(self, op: Op) -> Job:
        """REDUCE: sum a unit's gradients over a group of ranks."""

    def gather(self, op: Op) -> Job:
        """GATHER: complete a unit's sum from slices of it that ranks of a node hold."""

    def norm(self) -> float:
        """Return the norm of all gradients, over all ranks."""

    def squares(self) -> list[tuple[Sequence[str], Tensor]]:
        """Return the sums of squares of the gradients that this rank has had in this step, 1-D
        float32, with a name for each."""

    def take(self) -> dict[str, Tensor]:
        """Hand over the whole gradients by parameter, on every rank."""


@dataclass(frozen=True, slots=True)
class Change:
    """One application of an update rule: what it reads and writes."""

    name: str
    master: Tensor
    gradient: Tensor
    """The gradient on the device, float32, of the master's shape; the update uses it up."""
    moments: Mapping[str, Tensor]
    places: Sequence[tuple[int, str]]
    """The parameters that the master holds, or holds a slice of, in their order: the first element
    and the name of each."""


class Differentiated(Trained, Protocol):
    """The masters and optimizer states of a first-order run."""

    @property
    def gradients(self) -> Gradients: ...

    def changes(self, unit: int) -> Iterator[Change]:
        """Return the changes that a unit's gradients ask for; they are used up."""

    def changed(self, unit: int) -> None:
        """Make what is derived from a unit's masters anew."""

    def masters_changed(self) -> frozenset[int]:
        """Make what is derived from all masters anew; the answer is the units whose node slices are
        out of date."""

    def pieces(self, *, to_write: bool = False) -> dict[str, Pieces]:
        """Return every master and optimizer state, ``name/kind``, as far as this rank holds it;
        views, not copies. Where ranks hold the same slice, each writes (``to_write``) another range
        of it."""
