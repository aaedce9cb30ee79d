"""The table of estimators, and of the homes of what they train.

An estimator turns a step's losses into a direction. Its row says which walks a step has, where its
trainables live, and what ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from blockwalk.plan.table import RowName, Table


class Timing(StrEnum):
    """The time at which an update is applied: inside the backward walk, after it, or at the next
    step's fetch."""

    BLOCK = "block"
    STEP = "step"
    DEFERRED = "deferred"


@dataclass(frozen=True, slots=True)
class HomeFacts:
    """One home of trainables, as planning knows it: what becomes of them between their turns."""

    gathered: bool = False
    """True where each rank keeps a slice of every unit, parameters are gathered before each use,
    and gradients are summed over the ranks."""
    rewritten: bool = False
    """True where trainables are changed in the slot that they are fetched to, and written back:
    they are never used in place through a file map, and may be kept in codes."""
    states_inside: bool = False
    """True where what the update rule keeps travels with the parameters, in one bucket of bytes."""
    slices_streams: bool = False
    """True where ranks of a machine may hold one copy of the streamed units together, each a
    slice."""


HOMES = Table(
    "home",
    {
        "masters": HomeFacts(),
        "gathered": HomeFacts(gathered=True),
        "buckets": HomeFacts(rewritten=True, states_inside=True, slices_streams=True),
    },
)
"""Homes of trainables by name."""


@dataclass(frozen=True, slots=True)
class EstimatorFacts:
    """One estimator, as planning knows it."""

    turns: str
    """The name of its turns in :mod:`blockwalk.program`: what a step does, unit by unit."""
    home: str
    """The home of its trainables, on one rank."""
    home_over_ranks: str
    """Their home where :attr:`spreads` names kinds of state that are spread over ranks."""
    spreads: tuple[str, ...]
    """The kinds of state that may be spread over ranks."""
    timings: tuple[Timing, ...]
    """The times at which it may apply updates."""
    walks_back: bool = False
    """True where a step walks back: it has gradients, activation checkpoints and graphs, and its
    forwards are in training mode, with dropout."""
    shares_forwards: bool = False
    """True where ranks share a step's forwards (``mesh.perturb``) and cut its batch
    (``mesh.data``), and exchange losses; else all of them cut the batch."""
    ledger: bool = False
    """True where a step is a few scalars: a ledger of them is its checkpoint, and is replayed."""
    help: str = ""


ESTIMATORS = Table(
    "estimator",
    {
        "backprop": EstimatorFacts(
            turns="backprop",
            home="masters",
            home_over_ranks="gathered",
            spreads=("frozen", "trainable", "gradient", "optimizer_state"),
            timings=(Timing.BLOCK, Timing.STEP),
            walks_back=True,
            help="exact gradients",
        ),
        "zeroth-order": EstimatorFacts(
            turns="zeroth_order",
            home="buckets",
            home_over_ranks="buckets",
            spreads=("frozen", "trainable"),
            timings=(Timing.DEFERRED, Timing.STEP),
            shares_forwards=True,
            ledger=True,
            help="losses alone",
        ),
    },
)
"""Estimators by name."""


class Estimator(RowName):
    """The estimator: how a step turns losses into a direction."""

    table = ESTIMATORS

    @property
    def facts(self) -> EstimatorFacts:
        """The row."""
        return ESTIMATORS[self]
