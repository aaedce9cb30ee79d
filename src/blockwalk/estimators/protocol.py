"""The interface of an estimator: all that the walker asks of one.

An estimator answers the ops of a program that compute (PROLOGUE, FORWARD, LOSS, BACKWARD, EXCHANGE,
UPDATE …); the engine answers those that move state. Which ops a step has, and in which order, is
decided by the turns that the estimator's row names (:mod:`blockwalk.plan.estimators`). Three
estimators are here: :class:`~blockwalk.estimators.forward.Forward` evaluates,
:class:`~blockwalk.estimators.backprop.Backprop` and
:class:`~blockwalk.estimators.zeroth_order.estimator.ZerothOrder` train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from blockwalk.checkpoints.distributed import HasPieces
from blockwalk.checkpoints.ledger import Ledger, LedgerEntry
from blockwalk.data.batch import Batch
from blockwalk.engine.home import Job
from blockwalk.estimators.walk_request import Step
from blockwalk.numerics.codecs.weights import Weight
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.program.program import Op, Shape


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of a step that an estimator has computed."""

    loss: float
    """Mean over the step's counted tokens."""
    tokens: int
    """Tokens with a label that counts."""
    grad_norm: float | None = None
    """The gradient's norm before clipping, over all ranks; None in zeroth order."""
    projected_grad: float | None = None
    """The scalar g of a zeroth-order step."""
    graph_bytes: Mapping[tuple[int, int], int] | None = None
    """Bytes that graphs wrote to file maps, by unit and micro-batch; None: as the program has
    them."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further means over the step, by name."""


class Weights(Protocol):
    """The weights that a forward without a graph reads."""

    @property
    def loss_scratch(self) -> ScratchArena | None:
        """The buffers that losses are computed in, where training has some."""

    def bind(self, unit: int) -> object:
        """Put the trainables that a unit's turn reads in their places in the modules."""

    def weight(self, name: str) -> Weight:
        """Return a matrix of the head, to be read a range at a time."""

    def vector(self, name: str | None) -> Tensor | None:
        """Return a vector of the head, in the compute dtype; None where there is none."""


class Checkpointed(HasPieces, Protocol):
    """State that checkpoints are written from."""

    def notes(self) -> list[str]:
        """Return sentences on what a resumed run does otherwise than its plan says."""


class Estimator(Protocol):
    """An estimator that trains."""

    @property
    def checkpointed(self) -> Checkpointed | None:
        """The state that checkpoints are written from; None: a ledger is the checkpoint."""

    @property
    def at_rest(self) -> Weights:
        """The weights between two steps, for evaluations and generation."""

    def reserve(self, shape: Shape) -> None:
        """Size what a step keeps of its micro-batches by the shape of the largest of the run."""

    def begin(self, batches: Sequence[Batch], labels: Sequence[Tensor], step: Step) -> None:
        """Start a step on its micro-batches, which lie on the device; labels are on the CPU.

        Raises:
            ValueError: the step asks for what this estimator cannot do, or none of its labels
                counts.
        """

    def prepare(self, op: Op) -> Job:
        """Return the work of one op that computes. Reads what may have changed when the work runs
        now: it may run later, on another lane."""

    def figures(self) -> StepFigures:
        """Return the figures of the step that has just been run."""

    def undo(self) -> None:
        """Give weights and states the values back that they had before a step that failed."""

    def waiting(self) -> int:
        """Return how many steps' updates wait for a unit's next turn, at most."""

    def resume(self, steps: int) -> None:
        """Go on after so many steps, whose updates the weights have."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what the home's ``state_dict`` gave. Raises ValueError where it does not
        fit."""


class KeepsLedger(Protocol):
    """An estimator whose row has ``ledger``: a step is a few scalars."""

    @property
    def entries(self) -> list[LedgerEntry]:
        """Entries of the steps done, oldest first."""

    def record(self, entry: LedgerEntry) -> None:
        """Take a step's entry; the step counts when this returns."""

    def header(self, lora: Any, run: str) -> dict[str, Any]:
        """Return the header of the run's ledger: all that a replay needs beside the entries and the
        base."""

    def take_up(self, ledger: Ledger) -> int:
        """Go on where a ledger stands, write each step to it before it counts, and return the steps
        done."""
