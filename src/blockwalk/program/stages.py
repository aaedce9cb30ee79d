"""Stages of a pipeline: the units of a model that a stage holds, and the order of its walks over
them.

The blocks are cut into p · v chunks of neighbours, p stages with v chunks each: chunk c of stage s
is number c · p + s of the model. A step is a list of visits. A visit is a walk over one chunk,
forwards or backwards, for one group of micro-batches. With one chunk a stage the order is 1F1B
(Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021), with several the
interleaved one (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", 2021, section 2.2). Where every chunk takes as long and transfers cost nothing,
a share (p − 1) / (v · A + p − 1) of a step of A micro-batches is idle.

A model that one process walks is one stage with one chunk: forwards, then backwards, of each group.

A stage is the same model whose other units hold nothing: units keep their numbers, and those of
other stages have no parameters here. So whatever runs over the units of a model runs over what a
stage holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter

from blockwalk.plan.mesh import PIPELINE, Coordinates
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.plan import Plan
from blockwalk.plan.words import counted
from blockwalk.plan.work import NOTHING, Work
from blockwalk.program.costs import Costs
from blockwalk.program.state_sizes import epilogue_reads


@dataclass(frozen=True, slots=True)
class Visit:
    """A walk over one chunk of a stage, for one group of micro-batches."""

    backwards: bool
    chunk: int
    """The number of the chunk in its stage."""
    group: int
    """The number of the group of micro-batches."""

    def __str__(self) -> str:
        return f"{'B' if self.backwards else 'F'}{self.chunk}.{self.group}"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline, as a program sees it."""

    number: int
    count: int
    """The stages of the pipeline: 1 where each rank walks the whole model."""
    chunks: tuple[range, ...]
    """The units of each chunk, in the order of the model: 0 is the prologue."""
    lowest: int
    """The first unit of the whole model with something to train; the epilogue where none has."""
    shares_ends: bool = False
    """True where both end stages hold the prologue, whose weight the head is."""

    def __str__(self) -> str:
        return f", stage {self.number + 1} of {self.count}" if self.count > 1 else ""

    def words(self, blocks: int) -> str:
        """Return what the stage walks over, in words: ``prologue, blocks 0 to 5``."""
        parts = []
        for chunk in self.chunks:
            own = [unit - 1 for unit in chunk if 0 < unit <= blocks]
            parts += ["prologue"] * (0 in chunk)
            parts.append(f"blocks {own[0]} to {own[-1]}" if len(own) > 1 else f"block {own[0]}")
            parts += ["epilogue"] * (blocks + 1 in chunk)
        return ", ".join(parts)

    @property
    def is_first(self) -> bool:
        """True where the stage runs the prologue."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """True where the stage runs the epilogue."""
        return self.number == self.count - 1

    @property
    def first_block(self) -> int:
        """The first unit that the stage walks over, but for the prologue."""
        return max(self.chunks[0][0], 1)

    @property
    def units(self) -> frozenset[int]:
        """The units that the stage walks over."""
        return frozenset[int]().union(*self.chunks)

    def chunk_of(self, unit: int) -> range:
        """Return the units of the chunk that a unit is in."""
        return next(chunk for chunk in self.chunks if unit in chunk)

    def visits(self, groups: int) -> list[Visit]:
        """Return the visits of a step of so many groups of micro-batches, in order."""
        return visits(self.number, self.count, len(self.chunks), groups)

    def alive(self, groups: int) -> int:
        """Return the most groups that wait for a backward of one chunk at any time: each keeps its
        inputs there."""
        waiting: dict[int, int] = {}
        most = 1
        for visit in self.visits(groups):
            waiting[visit.chunk] = waiting.get(visit.chunk, 0) + (-1 if visit.backwards else 1)
            most = max(most, waiting[visit.chunk])
        return most


def visits(stage: int, stages: int, chunks: int, groups: int) -> list[Visit]:
    """Return the visits of one stage: forwards alone until the first backward can begin, then one
    forward and one backward in turn, then backwards alone.

    With several chunks the groups go in rounds, every chunk of a stage taking those of a round
    before the next round begins. Where they do not divide, as an evaluation's may not, the last
    round is shorter.
    """
    total = groups * chunks
    of_round = groups
    ahead = stages - 1 - stage
    if chunks > 1:
        rounds = max(1, groups // stages)
        of_round = stages if groups % rounds else groups // rounds
        ahead = (chunks - 1) * of_round + 2 * ahead
    ahead = min(ahead, total)
    starts = range(0, groups, of_round)
    turns = [range(start, min(start + of_round, groups)) for start in starts]
    upwards = range(chunks)
    forwards = [Visit(False, c, group) for turn in turns for c in upwards for group in turn]
    backwards = [
        Visit(True, c, group) for turn in turns for c in reversed(upwards) for group in turn
    ]
    order = forwards[:ahead]
    for place in range(total):
        order += forwards[place + ahead : place + ahead + 1]
        order.append(backwards[place])
    return order


def idle(plan: Plan) -> float:
    """Return the share of a step that stages wait, where all visits take as long and transfers
    cost nothing."""
    ahead = plan.mesh.pipeline - 1
    return ahead / (plan.pipeline.chunks * len(plan.walks) + ahead)


Price = Callable[[Work], float]
"""A function of work: the seconds that it takes, or another measure of it."""


def chunk_sizes(
    plan: Plan, model: ModelSpec, costs: Costs = Costs(), price: Price = attrgetter("flops")
) -> tuple[int, ...]:
    """Return the blocks of every chunk, in the order of the model: ``pipeline.blocks``, or those
    that leave the slowest chunk the least to compute (:func:`loads`).

    Raises:
        ValueError: the model has fewer blocks than chunks, or ``pipeline.blocks`` are others than
            the model's.
    """
    blocks = len(model.blocks)
    count = plan.mesh.pipeline * plan.pipeline.chunks
    if blocks < count:
        raise ValueError(
            f"mesh.pipeline is {plan.mesh.pipeline}, with pipeline.chunks: {plan.pipeline.chunks},"
            f" and {model.name} has {counted(blocks, 'block')}: each of the {count} chunks needs"
            " one at least; lower one of them"
        )
    if plan.pipeline.blocks:
        total = sum(plan.pipeline.blocks)
        if total != blocks:
            raise ValueError(
                f"pipeline.blocks are {list(plan.pipeline.blocks)}, {total} in all, and"
                f" {model.name} has {counted(blocks, 'block')}; make them add up, or leave them out"
            )
        return plan.pipeline.blocks
    first, *of_blocks, last = loads(plan, model, costs, price)
    return evenest(of_blocks, count, first, last)


def loads(plan: Plan, model: ModelSpec, costs: Costs, price: Price) -> list[float]:
    """Return what each unit computes for a micro-batch, forwards and backwards: the price of the
    work of its kind.

    Where no costs are known, a block computes in proportion to its parameters, the epilogue to
    those of its head; the prologue looks rows up.
    """
    if not costs.units:
        return [0, *(block.numel() for block in model.blocks), epilogue_reads(model).numel()]
    blocks = {block.kind for block in model.blocks}

    def load(kind: str) -> float:
        cost = costs.of(kind)
        again = cost.again if kind in blocks and plan.recompute != "none" else NOTHING
        return price(cost.forward + cost.backward + again)

    prices = {kind: load(kind) for kind in {unit.kind for unit in model.units}}
    return [prices[unit.kind] for unit in model.units]


def cut(plan: Plan, model: ModelSpec, costs: Costs, price: Price) -> Plan:
    """Return the plan with the blocks of its chunks, where they are left to what units compute.

    Raises:
        ValueError: as :func:`chunk_sizes`.
    """
    if plan.mesh.pipeline == 1 or plan.pipeline.blocks:
        return plan
    blocks = chunk_sizes(plan, model, costs, price)
    return replace(plan, pipeline=replace(plan.pipeline, blocks=blocks))


def evenest(
    costs: Sequence[float], count: int, first: float = 0, last: float = 0
) -> tuple[int, ...]:
    """Return the sizes of ``count`` runs of neighbours whose costliest costs least, the first and
    the last run costing so much more. Of equal cuts the one that gives the later runs no more than
    they need.

    >>> evenest([1, 1, 1, 1, 1, 1], 2, last=2)
    (4, 2)
    """
    places = len(costs)
    before = [0, *(sum(costs[: k + 1]) for k in range(places))]
    worst = {0: 0.0}
    cuts: list[dict[int, int]] = []
    for run in range(count):
        extra = first * (run == 0) + last * (run == count - 1)
        longer: dict[int, float] = {}
        cut: dict[int, int] = {}
        for stop in range(run + 1, places - (count - 1 - run) + 1):
            bounds = {
                start: max(worst[start], before[stop] - before[start] + extra)
                for start in range(run, stop)
                if start in worst
            }
            least = min(bounds.values())
            cut[stop] = max(start for start, bound in bounds.items() if bound == least)
            longer[stop] = least
        worst = longer
        cuts.append(cut)
    sizes = []
    stop = places
    for cut in reversed(cuts):
        sizes.append(stop - cut[stop])
        stop = cut[stop]
    return tuple(reversed(sizes))


def stage_at(plan: Plan, model: ModelSpec, coordinates: Coordinates = ()) -> Stage:
    """Return the stage at a place of the mesh.

    Args:
        model: the whole model.

    Raises:
        ValueError: the model cannot be cut as the plan says.
    """
    stages = plan.mesh.pipeline
    last = len(model.blocks) + 1
    lowest = next((u for u, unit in enumerate(model.units) if unit.numel(trainable=True)), last)
    if stages == 1:
        return Stage(0, 1, (range(last + 1),), lowest)
    number = dict(coordinates).get(PIPELINE, 0)
    starts = [1]
    for size in chunk_sizes(plan, model):
        starts.append(starts[-1] + size)
    starts[0] = 0
    starts[-1] = last + 1
    runs = [range(*pair) for pair in pairwise(starts)]
    return Stage(number, stages, tuple(runs[number::stages]), lowest, bool(model.tied))


def held_by(stage: Stage) -> frozenset[int]:
    """Return the units that a stage holds: those that it walks over, and with a tied head the
    prologue, on the last stage too."""
    return stage.units | ({0} if stage.is_last and stage.shares_ends else set())


def chunk_slots(plan: Plan, model: ModelSpec, blocks_at_once: int) -> int:
    """Return the slots of a stage's blocks: those on their way and in use, and where a chunk's
    gathered parameters stay for the next micro-batch as many more as its blocks.

    Args:
        model: the model as the stage holds it. Its chunks are the runs of blocks with parameters.
    """
    if not keeps_chunks(plan):
        return blocks_at_once
    held = sum(bool(block.params) for block in model.blocks)
    return max(min(_longest_chunk(model) + blocks_at_once, held), blocks_at_once)


def _longest_chunk(model: ModelSpec) -> int:
    """Return the blocks of the largest chunk of a model as a stage holds it."""
    runs = groupby(bool(block.params) for block in model.blocks)
    return max(len(list(run)) for has_parameters, run in runs if has_parameters)


def chunk_sums(plan: Plan, model: ModelSpec, blocks_at_once: int) -> int:
    """Return the buffers for the gradients of a stage's blocks: those of the blocks that are
    differentiated and reduced at once, and where sums are shared as many as a chunk has.

    Args:
        model: the model as the stage holds it.
    """
    if not shares_sums(plan):
        return blocks_at_once
    return max(_longest_chunk(model), blocks_at_once)


def shares_sums(plan: Plan) -> bool:
    """Return whether neighbouring backwards of a chunk share their reductions: where ranks sum
    gradients after each of them."""
    return plan.mesh.pipeline > 1 and plan.pipeline.shared_sums and plan.gradient_ranks > 1


def unsummed(order: Sequence[Visit]) -> Iterator[Visit]:
    """Yield the backwards of a step after which a chunk's gradients stay, for the next backward
    adds to them. So those of one chunk stay at a time."""
    for visit, following in pairwise(visit for visit in order if visit.backwards):
        if visit.chunk == following.chunk:
            yield visit


def keeps_chunks(plan: Plan) -> bool:
    """Return whether a chunk's parameters stay in their slots from visit to visit: where ranks
    gather them."""
    return plan.mesh.pipeline > 1 and plan.pipeline.reuse and plan.parameter_ranks > 1


def stays(order: Sequence[Visit], units: Sequence[Collection[int]], place: int, unit: int) -> bool:
    """Return whether a unit stays in its slot after its turn in a visit: the next visit needs it,
    or the forward after the backward that follows. So one chunk stays at a time.

    Args:
        order: the visits of a step.
        units: those that each visit walks over.
        place: the number of the visit.
    """
    if any(unit in coming for coming in units[place + 1 : place + 2]):
        return True
    later = zip(order[place + 2 : place + 3], units[place + 2 : place + 3], strict=True)
    forwards = not order[place].backwards
    return any(forwards and not visit.backwards and unit in coming for visit, coming in later)


def part_of(stage: Stage, model: ModelSpec) -> ModelSpec:
    """Return the model as a stage holds it: units of other stages have no parameters."""
    if stage.count == 1:
        return model
    held = held_by(stage)
    units = (
        unit if number in held else replace(unit, params=())
        for number, unit in enumerate(model.units)
    )
    return replace(model.with_units(units), tied=model.tied if stage.is_last else ())
