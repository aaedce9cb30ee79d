"""The compiler from a plan to a program: the one place where the order of a step is decided.

A step is a list of *turns*: the prologue, the blocks forwards, the epilogue, and for
backpropagation the blocks backwards. The estimator's row names them
(:mod:`~blockwalk.program.turns`). Each turn names a unit and the work done with it. Everything else
(arrivals ahead of their turn, slots, evictions, write-backs) is one walk for every plan
(:mod:`~blockwalk.program.lower`), in which a part arrives as the plan's placements say
(:mod:`~blockwalk.program.arrive`). :func:`compile` is pure: ranks that give the same arguments have
the same program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

from blockwalk.plan.mesh import PIPELINE, Coordinates, Piece, work_axes
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.adaptive_cache import adapts, kept_slices
from blockwalk.program.arrive import Residency, Ways
from blockwalk.program.costs import Costs, Pending
from blockwalk.program.invariants import check, over_budget
from blockwalk.program.lower import Builder
from blockwalk.program.placements import Placements
from blockwalk.program.program import Op, Pool, Program, Shape, StepKind
from blockwalk.program.resident_bytes import copied_bytes, resident_bytes, writes_behind
from blockwalk.program.stages import Stage, part_of, stage_at
from blockwalk.program.turns import Step, emit


@lru_cache(maxsize=64)
def compile(
    plan: Plan,
    model: ModelSpec,
    step_kind: StepKind,
    shape: Shape,
    *,
    costs: Costs = Costs(),
    pending: Pending = Pending(),
    batches: int = 1,
    device: str = "cpu",
    page_cache: int = 0,
    coordinates: Coordinates = (),
    pieces: tuple[Piece, ...] = (),
) -> Program:
    """Return the program of one kind of step.

    Args:
        plan: the placements and settings.
        model: the units, in execution order: of all stages.
        step_kind: train, gradients (no update), evaluate (no gradient) or flush (apply what is
            pending).
        shape: the shape bucket of one micro-batch.
        costs: transients and FLOPs of each kind of unit at this shape; without them those figures
            are zero.
        pending: deferred updates that this step finds.
        batches: micro-batches of an evaluation, all of them computed at each unit's turn.
        device: ``cpu`` or ``cuda``. On a CPU, files are mapped instead of copied.
        page_cache: bytes that ``recompute: auto`` may keep in file maps instead of recomputing them
            (``activation: disk``).
        coordinates: the rank's places on the axes of the mesh
            (:func:`blockwalk.plan.mesh.coordinates_of`). Those at the first place of ``perturb``
            run the most forwards; a place of ``pipeline`` is a stage; over the axes of state every
            rank's program is the same.
        pieces: the parts of a zeroth-order step that are computed, where ranks come and go; those
            of the place unless given.

    Raises:
        AssertionError: a rule of :mod:`blockwalk.program.invariants` does not hold.
        ValueError: the frozen codec is not chosen yet, or the model cannot be cut into the plan's
            stages.
    """
    if plan.frozen.codec.facts.chosen_later:
        raise ValueError(
            f"frozen is {plan.frozen}, and a program is of a codec that is known: name one, such"
            f" as {plan.frozen.tier} × int4a"
        )
    stage = stage_at(plan, model, coordinates)
    places = Placements(plan, part_of(stage, model), device)

    def lowered(graphs: int, keeps: frozenset[tuple[int, StateKind]] = frozenset()) -> Program:
        """Return the program in which at most so many of the last blocks keep their graphs."""
        ways = Ways(places.sizes, pending, step_kind is not StepKind.FLUSH, keeps)
        residency = Residency(dirty=pending.dirty)
        b = Builder(places, ways, residency, shape, costs, stage, page_cache, coordinates, pieces)
        emit(b, Step(step_kind, pending, graphs), batches)
        program = check(b.program(step_kind))
        if not step_kind.trains or keeps or not adapts(plan):
            return program
        keeps = kept_slices(plan, places.model, program)
        return lowered(graphs, keeps) if keeps else program

    on_device = places.graph_pool is Pool.DEVICE
    fills_budget = plan.recompute == "auto" and plan.budget is not None and on_device
    if not step_kind.trains or not fills_budget:
        return lowered(len(model.blocks))
    return most_graphs(lowered, len(model.blocks), plan.budget)


def most_graphs(lowered: Callable[[int], Program], blocks: int, budget: int | None) -> Program:
    """Return the program that keeps the most graphs and stays within the budget.

    All of them come first: they need no saved inputs, so they may fit where one less does not.
    Below, the peak grows with their number, by as much for each: so the number is guessed from the
    peaks at both ends of what is still open, and halved where a guess helps little."""
    keeps_all = lowered(blocks)
    if budget is None or not over_budget(keeps_all, budget):
        return keeps_all
    best = lowered(0)
    if over_budget(best, budget):
        return best
    fits = 0
    over = blocks
    of_fits = best.peaks()[Pool.DEVICE]
    of_over = keeps_all.peaks()[Pool.DEVICE]
    guesses = 0
    while over - fits > 1:
        guess = (fits + over) // 2
        if guesses % 3 < 2 and of_over > of_fits:
            guess = fits + (budget - of_fits) * (over - fits) // (of_over - of_fits)
            guess = min(max(guess, fits + 1), over - 1)
        guesses += 1
        program = lowered(guess)
        peak = program.peaks()[Pool.DEVICE]
        if over_budget(program, budget):
            over = guess
            of_over = peak
        else:
            fits = guess
            of_fits = peak
            best = program
    return best


def compile_ranks(plan: Plan, model: ModelSpec, *step: Any, **inputs: Any) -> tuple[Program, ...]:
    """Return the distinct programs of a plan's ranks, that of the first rank first; arguments as
    :func:`compile`.

    Work is shared so evenly that the first and the last place of an axis stand for all, and
    programs of other micro-batches and other forwards are one if nothing else tells them apart.
    Every stage has its own. Over the axes of state every rank's is the same."""
    ends = [
        [
            (axis.name, place)
            for place in range(axis.length)
            if axis.name == PIPELINE or place in (0, axis.length - 1)
        ]
        for axis in work_axes(plan.mesh)
    ]
    programs: dict[tuple[Op, ...], Program] = {}
    for coordinates in product(*ends):
        program = compile(plan, model, *step, coordinates=coordinates, **inputs)
        ops = program.ops
        if plan.mesh.pipeline == 1:
            ops = tuple(replace(op, micro_batch=0, passes=range(len(op.passes))) for op in ops)
        programs.setdefault(ops, program)
    return tuple(programs.values())


def resident(plan: Plan, model: ModelSpec, *, device: str = "cpu") -> Counter[Pool]:
    """Return bytes that each pool of one rank holds between steps: parameters on their tiers and
    optimizer states. Of stages the most of any."""
    most: Counter[Pool] = Counter()
    for _, places in _of_stages(plan, model, device):
        most |= resident_bytes(places)
    return most


def checkpoint_copies(plan: Plan, model: ModelSpec, *, device: str = "cpu") -> tuple[int, ...]:
    """Return bytes that a rank of each stage copies a checkpoint to, to write it behind the
    steps; empty where none does."""
    if not writes_behind(plan):
        return ()
    return tuple(copied_bytes(*of_stage) for of_stage in _of_stages(plan, model, device))


def _of_stages(plan: Plan, model: ModelSpec, device: str) -> Iterator[tuple[Stage, Placements]]:
    """Yield each stage, and the placements of the model as it holds it."""
    for number in range(plan.mesh.pipeline):
        stage = stage_at(plan, model, ((PIPELINE, number),))
        yield stage, Placements(plan, part_of(stage, model), device)
