"""The form of a zeroth-order kind's own file: what its losses are turned into, and along what its
queries go.

A file ``<kind>.py`` beside this one exports ``KIND``, a :class:`Kind`; :func:`kind_of` finds it by
the kind's name. Which forwards a step has, and what lies beside the weights, is the kind's row in
:mod:`blockwalk.plan.zeroth_order_kinds`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from blockwalk.checkpoints.ledger import LedgerEntry
from blockwalk.plan.choices import ZerothOrderSettings
from blockwalk.plan.zeroth_order_kinds import KINDS

Numbers = tuple[float, ...]

Scalars = Callable[[ZerothOrderSettings, Sequence[float]], tuple[Numbers, Numbers]]
"""(settings, losses of a step's forwards in their order): projected gradients and curvatures, one
of each for a query."""

Take = Callable[[str], Tensor]
"""A named float32 buffer of the shape of the range that is worked on."""

Direction = Callable[[Tensor, Mapping[str, Tensor], Take], object]
"""(noise float32, states of the same range, buffers): turns a query's noise into its direction, in
place."""

Advance = Callable[
    [ZerothOrderSettings, LedgerEntry, Iterable[Tensor], Mapping[str, Tensor], Take], object
]
"""(settings, entry, noise of each query in one buffer, states of the same range, buffers): brings
the states up to date."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One zeroth-order kind."""

    scalars: Scalars
    direction_: Direction | None = None
    """None: the noise is the direction."""
    advance_: Advance | None = None
    """Runs before an entry's update; None: a kind without states."""
    buffers: tuple[str, ...] = ()
    """The names under which the two work."""


def kind_of(name: str) -> Kind:
    """Return the kind that a row brings, or that of the file of its name.

    Raises:
        ValueError: there is no such kind.
    """
    kind = KINDS[name].implementation or _of_file(name)
    assert isinstance(kind, Kind)
    return kind


@functools.cache
def _of_file(name: str) -> Kind:
    """Return the kind that the file of this name exports."""
    kind: Kind = importlib.import_module(f"{__package__}.{name}").KIND
    return kind


def slopes(zo: ZerothOrderSettings, losses: Sequence[float]) -> Numbers:
    """(L(θ + ε·zᵢ) − L(θ − ε·zᵢ)) / 2ε of each query, from the losses of its two sides, one after
    the other."""
    return tuple((losses[2 * i] - losses[2 * i + 1]) / (2 * zo.epsilon) for i in range(zo.queries))
