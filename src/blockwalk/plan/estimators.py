"""The table of estimators, and of the homes of what they train.

An estimator turns a step's losses into a direction. Its row says which walks a step has, where its
trainables live, and what ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from blockwalk.plan.choices import AUTO, Timing
from blockwalk.plan.mesh import group_sizes
from blockwalk.plan.refusal import Refusals, must_be, nothing
from blockwalk.plan.table import Reference, RowName, Table
from blockwalk.plan.words import counted
from blockwalk.plan.zeroth_order_kinds import KINDS


@dataclass(frozen=True, slots=True)
class HomeFacts:
    """One home of trainables, as planning knows it: what becomes of them between their turns."""

    make: Reference
    """A function of (model, memories, ranks, run) that returns the homes of a model's state,
    see :mod:`blockwalk.engine.homes`."""
    kinds_apart: bool = False
    """True where masters, gradients and the update rule's states each lie on a tier of their own,
    whole, and an update brings them together."""
    gathered: bool = False
    """True where each rank keeps a slice of every unit, parameters are gathered before each use,
    and gradients are summed over the ranks."""
    rewritten: bool = False
    """True where trainables are changed in the slot that they are fetched to, and written back:
    they are never used in place through a file map, and may be kept in codes."""
    states_inside: bool = False
    """True where what the update rule keeps travels with the parameters, in one bucket of bytes."""
    slice_ranks: Callable[[Any, str], int] = lambda plan, kind: 1
    """Ranks of a machine that hold one copy of the streamed units' ``frozen`` or ``trainable`` part
    together, each a slice: a function of the plan and the part."""
    settles: tuple[str, ...] = ()
    """The kinds of state whose tier the machine may decide, where nobody named it."""
    spreads: tuple[str, ...] = ()
    """The kinds of state that ranks may hold in slices."""
    withholds_gradients: str = ""
    """The reason why no owner of a parameter gets its whole gradient; empty: one does."""
    outlives: Callable[[Any], bool] = lambda plan: False
    """Whether weights that a plan trains outlive the process where they are changed: they are their
    own checkpoint."""
    more_room: Callable[[Any, int, str], str] = lambda plan, slots, size: (
        "or move state to another tier (frozen: disk × int4a)"
    )
    """Words for what else makes room on the device: a function of the plan, its slots and the size
    of the largest."""
    link: str | None = None
    """The name of the link between host memory and what is fetched and stored; empty where that is
    host memory itself, None where it is the link of its tier."""
    refuses: Refusals = nothing


def _against_masters(plan: Any) -> Iterator[str]:
    no_gather = "one process gathers no parameters that it could keep"
    yield from must_be(plan, "cache.tier", "none", no_gather)
    if plan.mesh.pipeline > 1:
        yield (
            f"mesh.pipeline is {plan.mesh.pipeline}, and its masters, with their checkpoints, are"
            " one process's: stages take rows that spread them. method: hzp with frozen: device ×"
            " int4a × node keeps a stage's frozen weights in 4 bits"
        )
    if plan.mesh.world > 1:
        yield (
            f"it trains on one rank, and there are {plan.mesh.world}; use fcdp or hzp (or zero3,"
            " zeropp, mics), or start one"
        )


def _against_gathered(plan: Any) -> Iterator[str]:
    """Yield what speaks against parameters that are gathered from ranks before each use."""
    sizes = group_sizes(plan.mesh)
    for inner, outer in pairwise(plan.sharded_kinds):
        fewer, more = (sizes[getattr(plan, kind).group] for kind in (inner, outer))
        if fewer > more or (inner == "frozen" and fewer < more):
            rule = "over as many as" if inner == "frozen" else "over no more than"
            yield (
                f"{inner} is {getattr(plan, inner)}, {counted(fewer, 'rank')}, and {outer} is"
                f" {getattr(plan, outer)}, {more}: {inner} is spread {rule} {outer}; change one of"
                " them"
            )
    uncompiled = "blocks whose parameters are gathered from other ranks run uncompiled"
    yield from must_be(plan, "compile", False, uncompiled)
    if plan.caches_nothing and not plan.on_one_node:
        nowhere = (
            f"trainable is {plan.trainable} and optimizer_state {plan.optimizer_state}: no slice"
            " lies between the two that could be kept. Spread trainable and frozen over fewer"
            " ranks (method fcdp: a node)"
        )
        yield from must_be(plan, "cache.tier", "none", nowhere)
    on_host = "cache.tier: host (method fcdp) is what keeps its slices on the host"
    yield from must_be(plan, "trainable.tier", "device", on_host)
    if plan.gradient.tier.facts.mapped:
        yield from must_be(plan, "gradient.tier", "host", "slices of gradients wait in memory")
    one_slice = "ranks update slices of a block, in which A and B are one"
    yield from must_be(plan, "optimizer.lora_b_ratio", 1, one_slice)
    kept = "blocks that ranks hold together are kept by cache.tier and cache.threshold"
    yield from must_be(plan, "resident", AUTO, kept)
    if not plan.frozen.tier.facts.resident:
        yield (
            f"frozen is {plan.frozen}: where parameters are spread over ranks cache.tier: host"
            " (method fcdp) keeps their slices in host memory; set frozen: device ×"
            f" {plan.frozen.codec} × {plan.frozen.group}"
        )


def _more_room_in_slots(plan: Any, slots: int, size: str) -> str:
    return (
        f"lower prefetch ({slots} slots of up to {size}: a block is gathered whole, attention and"
        " feed-forward together), or set optimizer_state: host × fp32 × world or frozen: device ×"
        f" int4a × {plan.frozen.group}"
    )


def _against_buckets(plan: Any) -> Iterator[str]:
    """Yield what speaks against slices of the units that a machine's ranks hold together."""
    node = plan.mesh.ranks_per_node
    for kind, ranks in (("frozen", plan.frozen_ranks), ("trainable", plan.parameter_ranks)):
        if node % ranks:
            yield (
                f"{kind} is {getattr(plan, kind)}, {counted(ranks, 'rank')}, and slices are"
                f" gathered inside a node, whose ranks (mesh.ranks_per_node={node}) these do not"
                " divide; name a smaller group"
            )
    codec = plan.frozen.codec
    group = plan.frozen.group
    if group_sizes(plan.mesh)[group] > 1 and not plan.sliceable("frozen"):
        yield (
            f"frozen is {plan.frozen}, and slices are of blocks that are fetched; set frozen:"
            f" host × {codec} × {group}, or device × {codec} × nobody"
        )
    if plan.parameter_ranks > 1 and not plan.sliceable("trainable"):
        kinds = " or ".join(name for name, facts in KINDS.items() if not facts.states)
        trainable = plan.trainable
        yield (
            f"trainable is {trainable}, {plan.parameter_ranks} ranks: slices are of blocks that"
            " are fetched, with their updates. Use trainable: host or disk, update.timing:"
            " deferred, and a zo.kind whose forwards read no state beside the weights:"
            f" {kinds}; or set trainable: {trainable.tier} × {trainable.codec} × nobody"
        )


HOMES = Table(
    "home",
    {
        "masters": HomeFacts(
            "blockwalk.engine.homes:masters",
            kinds_apart=True,
            settles=("frozen", "activation", "trainable", "optimizer_state"),
            refuses=_against_masters,
        ),
        "gathered": HomeFacts(
            "blockwalk.engine.homes:gathered",
            gathered=True,
            spreads=("frozen", "trainable", "gradient", "optimizer_state"),
            withholds_gradients="holds them in slices",
            more_room=_more_room_in_slots,
            link="",
            refuses=_against_gathered,
        ),
        "buckets": HomeFacts(
            "blockwalk.engine.homes:buckets",
            rewritten=True,
            states_inside=True,
            slice_ranks=lambda plan, kind: (
                plan.frozen_ranks if kind == "frozen" else plan.parameter_ranks
            ),
            spreads=("frozen", "trainable"),
            withholds_gradients="has no gradients",
            outlives=lambda plan: plan.trainable.tier.facts.durable,
            refuses=_against_buckets,
        ),
    },
)
"""Homes of trainables by name."""


@dataclass(frozen=True, slots=True)
class EstimatorFacts:
    """One estimator, as planning knows it."""

    turns: Reference
    """The turns of a step, unit by unit: a function of (builder, step) that emits its ops, see
    :mod:`blockwalk.program.turns`."""
    make: Reference
    """A function of (engine, home, ranks, sharing, objective) that returns what computes them, see
    :mod:`blockwalk.estimators.protocol`."""
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
    refuses: Refusals = nothing
    help: str = ""


def _against_context(plan: Any) -> Iterator[str]:
    """Yield what speaks against sequences in parts over ranks."""
    mesh = plan.mesh
    if mesh.context == 1:
        return
    if mesh.stage_ranks % mesh.context:
        stage = f" ÷ mesh.pipeline: {mesh.pipeline}" if mesh.pipeline > 1 else ""
        yield (
            f"mesh.context is {mesh.context}, and so many ranks hold the parts of each sequence:"
            f" they do not divide mesh.world, {counted(mesh.world, 'rank')}{stage}; start a"
            " multiple of them, or set mesh.context: 1"
        )
    elif max(mesh.context, mesh.ranks_per_node) % min(mesh.context, mesh.ranks_per_node):
        yield (
            f"mesh.context is {mesh.context}, and mesh.ranks_per_node {mesh.ranks_per_node}: the"
            " parts of a sequence would lie on some nodes in part; set mesh.context to a divisor"
            f" of {mesh.ranks_per_node}"
        )
    elif mesh.data not in (1, mesh.stage_ranks // mesh.context):
        yield (
            f"mesh.data × mesh.context = {mesh.data}×{mesh.context} ="
            f" {mesh.data * mesh.context}, but there are {mesh.stage_ranks} ranks; set mesh.data:"
            f" {mesh.stage_ranks // mesh.context}, or leave it out"
        )
    unlike = "noise on embeddings would be drawn otherwise for parts of a sequence (mesh.context)"
    yield from must_be(plan, "neftune_noise_alpha", 0, unlike)


def _against_pipeline(plan: Any) -> Iterator[str]:
    """Yield what speaks against blocks over stages."""
    mesh = plan.mesh
    stages = mesh.pipeline
    chunks = plan.pipeline.chunks
    steps = plan.gradient_accumulation_steps
    if stages == 1:
        one = "there is one stage (mesh.pipeline: 1), whose ranks all walk over every block"
        yield from must_be(plan, "pipeline.chunks", 1, one)
        yield from must_be(plan, "pipeline.blocks", (), one)
        yield from must_be(plan, "pipeline.reuse", True, one)
        yield from must_be(plan, "pipeline.shared_sums", False, one)
        return
    node = mesh.ranks_per_node
    if max(mesh.stage_ranks, node) % min(mesh.stage_ranks, node):
        yield (
            f"mesh.pipeline is {stages}, {counted(mesh.stage_ranks, 'rank')} a stage, and"
            f" mesh.ranks_per_node {node}: a stage would lie on some nodes in part; let one of"
            " them divide the other"
        )
    sizes = plan.pipeline.blocks
    if sizes and (len(sizes) != stages * chunks or min(sizes) < 1):
        yield (
            f"pipeline.blocks is {list(sizes)}, and mesh.pipeline × pipeline.chunks ="
            f" {stages}×{chunks} = {stages * chunks} chunks have one block at least each; give so"
            " many numbers from 1 on, or leave it out"
        )
    visits = len(plan.walks)
    if chunks > 1 and visits % max(1, visits // stages):
        below = (visits - visits % stages) * plan.visit
        above = below + stages * plan.visit
        yield (
            f"gradient_accumulation_steps is {steps}, and with pipeline.chunks: {chunks}"
            f" micro-batches go in rounds of mesh.pipeline: {stages} or more, all of one size; set"
            f" gradient_accumulation_steps: {below} or {above}, or pipeline.chunks: 1"
        )
    if isinstance(plan.together, str):
        yield (
            f"together is {plan.together}, and stages wait longer, the more micro-batches visit a"
            " block together (mesh.pipeline); set together to a number"
        )
    at_end = "a stage updates its blocks when all micro-batches have passed (mesh.pipeline)"
    yield from must_be(plan, "update.timing", Timing.STEP, at_end)


def _against_backprop(plan: Any) -> Iterator[str]:
    yield from _against_context(plan)
    yield from _against_pipeline(plan)
    if plan.compute_dtype == "float16":
        yield (
            "compute_dtype is float16, and backpropagation does not scale its losses: most"
            " gradients lie below float16's smallest number; set compute_dtype: bfloat16 (as many"
            " bytes) or float32"
        )
    if plan.trainable.codec.encoded:
        yield (
            f"backpropagation keeps trainables in 16 or 32 bits, not {plan.trainable.codec}; use"
            " fp32 or bf16"
        )


def _against_zeroth_order(plan: Any) -> Iterator[str]:
    noiseless = "a step's losses must differ by its perturbation alone"
    for setting, value, because in (
        ("cache.tier", "none", "zeroth order has no backward walk to keep parameters for"),
        ("optimizer.lora_b_ratio", 1, "a ledger has one learning rate a step"),
        ("optimizer.decay", "matrices", "zeroth order spares the names that the original spares"),
        ("neftune_noise_alpha", 0, noiseless),
        ("mesh.context", 1, "zeroth order shares forwards and rows, and walks whole sequences"),
        ("mesh.pipeline", 1, "a rank of zeroth order walks every block: losses are all it sends"),
    ):
        yield from must_be(plan, setting, value, because)
    if plan.zo.epsilon <= 0:
        yield (
            f"zo.epsilon is {plan.zo.epsilon}; the two losses must differ: set it above 0 (1e-3"
            " for full fine-tuning)"
        )
    if not 0 <= plan.zo.hessian_alpha < 1:
        yield (
            f"zo.hessian_alpha is {plan.zo.hessian_alpha}; it is the share that a step renews,"
            " from 0 to 1"
        )
    mesh = plan.mesh
    places = mesh.data * mesh.perturb
    if places != mesh.world:
        yield (
            f"mesh.data × mesh.perturb = {mesh.data}×{mesh.perturb} = {places}, but there are"
            f" {mesh.world} ranks"
        )
    if mesh.perturb > max(plan.forward_passes, 1):
        yield (
            f"mesh.perturb is {mesh.perturb}, and a step has {plan.forward_passes} forwards;"
            " lower it, or raise zo.queries"
        )


ESTIMATORS = Table(
    "estimator",
    {
        "backprop": EstimatorFacts(
            turns="blockwalk.program.turns:backprop_turns",
            make="blockwalk.estimators.backprop:make",
            home="masters",
            home_over_ranks="gathered",
            spreads=("frozen", "trainable", "gradient", "optimizer_state"),
            timings=(Timing.BLOCK, Timing.STEP),
            walks_back=True,
            refuses=_against_backprop,
            help="exact gradients",
        ),
        "zeroth-order": EstimatorFacts(
            turns="blockwalk.program.turns:zeroth_order_turns",
            make="blockwalk.estimators.zeroth_order.estimator:make",
            home="buckets",
            home_over_ranks="buckets",
            spreads=("frozen", "trainable"),
            timings=(Timing.DEFERRED, Timing.STEP),
            shares_forwards=True,
            ledger=True,
            refuses=_against_zeroth_order,
            help="losses alone",
        ),
    },
)
"""Estimators by name."""


class Estimator(RowName):
    """The estimator: how a step turns losses into a direction."""

    table = ESTIMATORS
    facts: EstimatorFacts


BACKPROP = Estimator("backprop")
"""The estimator of a plan that names none."""
