"""The homes of a model's state, made once when a run begins: the row of the plan's home names one
of the functions here (:mod:`blockwalk.plan.estimators`)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from blockwalk.engine.buckets import Buckets
from blockwalk.engine.frozen import Frozen
from blockwalk.engine.home import Gradients, Home, Trained
from blockwalk.engine.masters import Masters
from blockwalk.engine.model_handle import ModelHandle
from blockwalk.engine.sharded_masters import ShardedMasters
from blockwalk.engine.sharded_part import ShardedPart, sharded_frozen
from blockwalk.numerics.codecs.weights import Value
from blockwalk.ranks.groups import Groups, make_groups
from blockwalk.ranks.ranks import Ranks
from blockwalk.tiers.memories import Memories


@dataclass(frozen=True, slots=True)
class Homes:
    """The home of each part of a model's state."""

    frozen: Home
    trainable: Home
    """The trainables, as far as their parameters come and go."""
    trained: Trained
    """The trainables, as far as they outlive a step: the home that an estimator is given."""
    gradients: Gradients | None = None
    """Those of a step; None where no step has any."""
    bound: Mapping[str, Value] = field(default_factory=dict)
    """Frozen parameters that stay bound from turn to turn, or are bound when they are fetched."""
    groups: Groups | None = None
    """The process groups of state that ranks gather before each use."""
    shared: tuple[ShardedPart, ...] = ()
    """Homes of frozen state that ranks hold in slices."""


def masters(model: ModelHandle, memories: Memories, ranks: Ranks, _run: str) -> Homes:
    """Return masters and optimizer states, whole on this process."""
    frozen = Frozen(model, ranks, memories)
    home = Masters(model, memories)
    return Homes(frozen, home, home, home.gradients, frozen.bound)


def gathered(model: ModelHandle, memories: Memories, _ranks: Ranks, _run: str) -> Homes:
    """Return slices of all state, of which parameters are gathered before each use."""
    plan = model.plan
    groups = make_groups(plan.mesh, model.device, sums_apart=plan.sums_apart)
    frozen = sharded_frozen(model, groups, memories)
    home = ShardedMasters(model, groups, memories)
    return Homes(frozen, home.part, home, home.gradients, groups=groups, shared=(frozen,))


def buckets(model: ModelHandle, memories: Memories, ranks: Ranks, run: str) -> Homes:
    """Return trainables in any codec, a bucket of bytes a unit, with the states beside them.

    On a durable tier they lie in a store of the working folder that ``run`` names, and one that is
    there is taken up. Without a name it goes when the run ends."""
    frozen = Frozen(model, ranks, memories)
    path = model.workdir / f"weights-{run or uuid.uuid4().hex[:12]}"
    home = Buckets(model, path, ranks, memories, keep=bool(run))
    return Homes(frozen, home, home, bound=frozen.bound)
