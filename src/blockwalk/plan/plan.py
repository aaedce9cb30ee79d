"""A plan: where each kind of state lives, and when it is used. A frozen value, refused at once if
it makes no sense.

A plan holds no tensors and imports no torch. :mod:`blockwalk.plan.methods` names the published
ones; :mod:`blockwalk.program.compile` turns a plan, a model and a shape into a
:class:`~blockwalk.program.program.Program`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from blockwalk.plan import ranges
from blockwalk.plan.choices import (
    AUTO,
    CacheSettings,
    ContextSettings,
    LoraSettings,
    MeshSettings,
    OptimizerSettings,
    PipelineSettings,
    UpdateSettings,
    ZerothOrderSettings,
)
from blockwalk.plan.estimators import (
    BACKPROP,
    ESTIMATORS,
    HOMES,
    Estimator,
    EstimatorFacts,
    HomeFacts,
)
from blockwalk.plan.losses import LOSSES, LossFacts
from blockwalk.plan.mesh import group_sizes, make_axes
from blockwalk.plan.noise_kinds import NOISES, NoiseFacts
from blockwalk.plan.objectives import OBJECTIVES, SFT, ObjectiveFacts
from blockwalk.plan.placement import NOBODY, Codec, Placement
from blockwalk.plan.refusal import must_be
from blockwalk.plan.sizes import LEAST_TILE, SEQUENCE_TILE, THIN_TOGETHER, TOGETHER, Tiling
from blockwalk.plan.table import spoken
from blockwalk.plan.update_rules import RULES, RuleFacts
from blockwalk.plan.words import counted
from blockwalk.plan.zeroth_order_kinds import KINDS, TARGETS, KindFacts, TargetFacts

AUTO_TILE = "auto"
"""The value of ``sequence_tile`` that leaves it to the length of the sequence."""
AUTO_TOGETHER = "auto"
"""The value of ``together`` that leaves it to the memory there is."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One row of the design's table with every choice made.

    Raises:
        ValueError: the combination makes no sense; the message says why and which setting to
            change.
    """

    method: str = "plain"
    """The method that every other setting begins from; auto: the planner's best for this
    machine."""
    estimator: Estimator = BACKPROP
    """The source of a step's direction: {choices}. The method decides it."""
    frozen: Placement = Placement()
    """The place and form of weights that are not trained: tier × codec × group. Tiers are {tiers}.
    Codecs are {codecs}. auto is the first of {automatic} that takes at most half of this machine's
    memory. The group of ranks is nobody, node, world or one of ``mesh.groups``."""
    trainable: Placement = Placement()
    """The place and form of weights that are trained. On a GPU an update needs them and
    ``optimizer_state`` in one place. That is the device, or both lie off it, and the processor
    updates them."""
    gradient: Placement = Placement(codec=Codec.FP32)
    """The place of gradients that wait for their update. Over ranks it is the device or the host.
    One process keeps them on the device. Where a CPU computes and the step's end updates, they lie
    on disk."""
    optimizer_state: Placement = Placement(codec=Codec.FP32)
    """The place of the optimizer's moments."""
    activation: Placement = Placement()
    """The place of activation checkpoints: each block's input, which the backward walk needs
    again."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    update: UpdateSettings = field(default_factory=UpdateSettings)
    zo: ZerothOrderSettings = field(default_factory=ZerothOrderSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    context: ContextSettings = field(default_factory=ContextSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    gradient_accumulation_steps: int = 1
    """Micro-batches that a step's batch is cut into."""
    together: int | str = 1
    """Micro-batches that visit a block together, in backpropagation. 1: a walk for each. As many as
    ``gradient_accumulation_steps``: each block is fetched once a step in each direction, for all of
    them. auto: as many as the memory that is known to a run holds (``budget``), else 1."""
    recompute: str = "all"
    """Activations that the backward walk computes again. all: those of every block. none: they are
    kept, where ``activation`` says. auto: the last blocks' are kept, as many as there is room
    for."""
    sequence_tile: int | str = "auto"
    """Positions of the tiles that backpropagation computes long sequences in, attention left whole.
    auto: 1,024 on a CPU, 8,192 on a GPU, for sequences of more than two tiles. Parts of
    sequences need more than one (``mesh.context``). A number: for all that are longer. off:
    none."""
    prefetch: int = 1
    """The number of blocks that are fetched ahead of the one that computes."""
    resident: int = AUTO
    """The number of blocks that stay on the device for good, evenly spaced. The others come from
    where ``frozen`` (zeroth order: ``trainable``) places them. -1: as many as ``budget`` holds at a
    run's longest sequences; none without a budget."""
    compute_dtype: str = "auto"
    """The precision that blocks compute in: float32, bfloat16 or float16 (fp32, bf16, fp16 for
    short). auto takes the checkpoint's own. Backpropagation takes bfloat16 in place of float16."""
    loss: str = "chunked"
    """The loss: {choices}."""
    objective: str = SFT
    """The measure that training improves: {choices}."""
    neftune_noise_alpha: float = 0.0
    """NEFTune: the strength of uniform noise that training adds to embeddings; 0: none. It goes up
    to alpha / √(S·D) for S tokens of width D (Jain et al. 2023)."""
    budget: int | None = None
    """Device memory that the step may use, in bytes. Without one a run on an accelerator has 0.9 of
    what is free there."""
    compile: bool = False
    """Whether each kind of block is compiled once with torch.compile. A block's weights are then
    whole while it computes."""
    compare: str = "auto"
    """Whether a model in memory is compared with its walk at the start. auto: its loss and
    gradients on two rows of eight tokens, and a difference is refused by the module's name.
    never: it is not."""
    seed: int = 0
    """The seed of the data's order, the adapters' first values, dropout, noise, rounding, and of
    the draws of generate."""

    def __post_init__(self) -> None:
        short = {str(codec): codec.facts.dtype for codec in Codec if codec.facts.dtype}
        object.__setattr__(self, "compute_dtype", short.get(self.compute_dtype, self.compute_dtype))
        for setting, row in ranges.completed(self):
            field, _, part = setting.partition(".")
            value = dataclasses.replace(getattr(self, field), **{part: row}) if part else row
            object.__setattr__(self, field, value)
        for message in self._refusals():
            raise ValueError(f"plan {self.method!r}: {message}")

    def _refusals(self) -> Iterator[str]:
        """Yield the reasons against the plan: ranges, groups, then those of the rows that it names.
        Each may look up what those before it checked."""
        yield from ranges.refusals(self)
        yield from _visits(self)
        yield from _groups(self)
        for kind in PLACED:
            placement: Placement = getattr(self, kind)
            yield from placement.tier.facts.refuses(self, kind)
            yield from placement.codec.facts.refuses(self, kind)
        yield from self.home.refuses(self)
        yield from self.estimator.facts.refuses(self)
        yield from self.noise.refuses(self)
        yield from self.kind.refuses(self)
        yield from self.target.refuses(self)
        yield from self.update_rule.refuses(self)
        yield from self.loss_facts.refuses(self)
        yield from self.objective_facts.refuses(self)
        yield from _tiles(self)
        yield from _together(self)

    @property
    def sharded_kinds(self) -> tuple[str, ...]:
        """The kinds of state that may be spread over ranks; gathered in backpropagation, over no
        fewer than those before them."""
        return self.home.spreads

    @property
    def parameter_ranks(self) -> int:
        """Ranks that a unit's parameters are spread over: each keeps its slice of them."""
        return group_sizes(self.mesh)[self.trainable.group]

    @property
    def frozen_ranks(self) -> int:
        """Zeroth order: ranks that each hold a slice of the streamed frozen blocks; a file is one
        copy for all who map it."""
        tier = self.frozen.tier.facts
        return 1 if tier.resident or tier.mapped else group_sizes(self.mesh)[self.frozen.group]

    @property
    def visit(self) -> int:
        """Micro-batches of one visit of a block; 1 where ``together`` is not settled yet."""
        return self.together if isinstance(self.together, int) else 1

    @property
    def walks(self) -> tuple[range, ...]:
        """The micro-batches of each walk of a first-order step; the last walk may have fewer."""
        count = self.gradient_accumulation_steps
        return tuple(
            range(first, min(first + self.visit, count)) for first in range(0, count, self.visit)
        )

    @property
    def cuts(self) -> int:
        """Parts that a step's batch is cut into, each a micro-batch of one rank or of ranks that
        share it."""
        return self.gradient_accumulation_steps * self.row_shares

    @property
    def row_shares(self) -> int:
        """Shares of a batch's rows: ranks that each take one, or groups of ranks that hold parts of
        the same rows."""
        mesh = self.mesh
        shares_forwards = self.estimator.facts.shares_forwards
        return mesh.data if shares_forwards else mesh.stage_ranks // mesh.context

    @property
    def sums_apart(self) -> bool:
        """Whether reductions between nodes have a lane beside that of gathers: where every use of
        parameters gathers between nodes and then inside them, a gather would wait on the first of
        these links for sums that still wait on the second."""
        return 1 < self.mesh.ranks_per_node < self.parameter_ranks

    @property
    def gradient_ranks(self) -> int:
        """Ranks that gradients are spread over while they accumulate."""
        return group_sizes(self.mesh)[self.gradient.group]

    @property
    def optimizer_ranks(self) -> int:
        """Ranks that masters and optimizer states are spread over; the others hold replicas."""
        return group_sizes(self.mesh)[self.optimizer_state.group]

    @property
    def ranks_words(self) -> bool:
        """True where a training step ranks every label word of its sequences."""
        return self.zo.ranks_words and not self.estimator.facts.walks_back

    @property
    def caches_nothing(self) -> bool:
        """True where parameters are spread as widely as optimizer states: no slices over fewer
        ranks stay between uses, on whatever ``cache.tier``."""
        return self.parameter_ranks == self.optimizer_ranks

    @property
    def slice_group(self) -> str:
        """The group that parameters are spread over, where masters have another one: ranks may keep
        slices over it between uses. Empty where both have the same."""
        group = self.trainable.group
        return "" if group == self.optimizer_state.group else group

    @property
    def on_one_node(self) -> bool:
        """True where groups of other names are one here because all ranks are on one node: the same
        plan caches on two."""
        return self.mesh.stage_ranks <= self.mesh.ranks_per_node and bool(self.slice_group)

    @property
    def home(self) -> HomeFacts:
        """The row of the home that trainables have between their turns."""
        facts = self.estimator.facts
        spread = any(getattr(self, kind).group != NOBODY for kind in facts.spreads[1:])
        return HOMES[facts.home_over_ranks if spread else facts.home]

    @property
    def step_estimator(self) -> EstimatorFacts:
        """The row of what computes a step: the method's estimator, or that of a noise with one of
        its own."""
        return ESTIMATORS[self.noise.estimator or self.estimator]

    @property
    def loss_facts(self) -> LossFacts:
        """The row of ``loss``."""
        return LOSSES[self.loss]

    @property
    def objective_facts(self) -> ObjectiveFacts:
        """The row of ``objective``."""
        return OBJECTIVES[self.objective]

    def tiling(self, device: str) -> Tiling | None:
        """Return how long sequences are computed by tiles on a device; None where they are not."""
        if self.compile or not self.estimator.facts.walks_back:
            return None
        if isinstance(self.sequence_tile, int):
            return Tiling(self.sequence_tile, self.sequence_tile)
        if self.sequence_tile != AUTO_TILE:
            return None
        size = SEQUENCE_TILE[device]
        return Tiling(size, size if self.mesh.context > 1 else 2 * size)

    def is_long(self, sequence: int, device: str) -> bool:
        """Return whether sequences of so many tokens are computed by tiles on a device, where a
        model's cut allows it."""
        tiling = self.tiling(device)
        return tiling is not None and sequence > tiling.threshold

    def returns_memory(self, sequence: int, device: str) -> bool:
        """Return whether steps of so many tokens a sequence give large temporaries back to the
        system as soon as they are freed, and keep little free heap: of long ones, in one
        process."""
        return self.mesh.world == 1 and self.is_long(sequence, device)

    @property
    def noise(self) -> NoiseFacts:
        """The row of ``zo.noise``."""
        return NOISES[self.zo.noise]

    @property
    def update_rule(self) -> RuleFacts:
        """The row of ``optimizer.name``."""
        return RULES[self.optimizer.name]

    @property
    def kind(self) -> KindFacts:
        """The row of ``zo.kind``."""
        return KINDS[self.zo.kind]

    @property
    def target(self) -> TargetFacts:
        """The row of ``zo.target``."""
        return TARGETS[self.zo.target]

    @property
    def forward_passes(self) -> int:
        """Forwards of one zeroth-order step."""
        return len(self.kind.passes(self.zo.queries))

    @property
    def copies_blocks(self) -> bool:
        """True where a zeroth-order step perturbs a block once for all micro-batches of a pass:
        whole, where the noise is made in its size."""
        drawn = not self.estimator.facts.walks_back and self.noise.drawn_in_forwards
        return drawn and self.gradient_accumulation_steps > 1

    def passes_together(self, tokens: int) -> int:
        """Return forwards of a zeroth-order step, of so many tokens each, that a block computes as
        one batch: its weights are read, and decoded, once for them."""
        in_common = not self.estimator.facts.walks_back and self.noise.beside
        if not in_common or self.target.scales or self.compile:
            return 1
        return max(1, min(TOGETHER // tokens, THIN_TOGETHER // self.zo.noise_rank))

    def sliceable(self, kind: str) -> bool:
        """Whether ranks can hold one copy of the streamed units' ``frozen`` or ``trainable`` part
        together (zeroth order). A slice of the latter is brought up to date by itself: its updates
        wait for the next fetch, and nothing that a forward reads lies beside the parameters."""
        if kind == "frozen":
            return not self.frozen.tier.facts.resident
        streamed = not self.trainable.tier.facts.resident
        return streamed and self.update.deferred and not self.kind.states

    def shared(self) -> dict[str, Any]:
        """Return the choices that must be equal on all ranks, nested. A zeroth-order rank that
        holds its weights whole may have tiers, ``prefetch``, ``budget`` and ``resident`` of its
        own: they change no bit."""
        choices = dataclasses.asdict(self)
        shares = self.estimator.facts.shares_forwards
        if shares and self.parameter_ranks == self.frozen_ranks == 1:
            for name in ("prefetch", "budget", "resident"):
                del choices[name]
            del choices["frozen"]["tier"]
            del choices["trainable"]["tier"]
        return choices


PLACED = ("frozen", "trainable", "gradient", "optimizer_state", "activation")
"""The settings that are placements, one for each kind of state."""


def _groups(plan: Plan) -> Iterator[str]:
    """Yield the placements whose group is none of the mesh, or that no group shares."""
    mesh = plan.mesh
    if mesh.world % mesh.pipeline:
        yield (
            f"mesh.pipeline is {mesh.pipeline}, and so many stages have as many ranks each: they do"
            f" not divide mesh.world, {counted(mesh.world, 'rank')}; start a multiple of them"
            " (--nproc-per-node), or set mesh.pipeline: 1"
        )
        return
    sizes = group_sizes(mesh)
    make_axes(mesh)  # refuses groups that do not nest
    groups = ", ".join(f"{name} ({ranks})" for name, ranks in sizes.items())
    for kind in PLACED:
        placement: Placement = getattr(plan, kind)
        if placement.group not in sizes:
            yield (
                f"{kind} is {placement}, and the groups of this mesh are {groups}; name one of"
                f" them, or set mesh.groups: {placement.group}=RANKS"
            )
        if kind not in plan.sharded_kinds and placement.group != NOBODY:
            yield (
                f"{kind} is {placement}, and no group shares it here; set {kind}:"
                f" {placement.tier} × {placement.codec}"
            )


def _tiles(plan: Plan) -> Iterator[str]:
    """Yield what speaks against ``sequence_tile``."""
    size = plan.sequence_tile
    if isinstance(size, str):
        if size not in (AUTO_TILE, "off"):
            yield f"sequence_tile is {size!r}; it must be auto, off or a number of positions"
        return
    if size < LEAST_TILE:
        yield f"sequence_tile is {size}; it must be at least {LEAST_TILE}, or off"
    if not plan.estimator.facts.walks_back:
        drawn = "zeroth order would draw a perturbation again for every tile"
        yield from must_be(plan, "sequence_tile", AUTO_TILE, drawn)
    if plan.compile:
        yield f"sequence_tile is {size}, and compiled blocks are whole; set sequence_tile: auto"


def _visits(plan: Plan) -> Iterator[str]:
    """Yield what speaks against ``together``."""
    together = plan.together
    count = plan.gradient_accumulation_steps
    if not plan.estimator.facts.walks_back:
        at_once = "all micro-batches of a zeroth-order step visit a block together"
        yield from must_be(plan, "together", 1, at_once)
    elif isinstance(together, str):
        if together != AUTO_TOGETHER:
            yield f"together is {together!r}; it must be auto or a number of micro-batches"
    elif not 1 <= together <= count:
        yield (
            f"together is {together}, and a step has gradient_accumulation_steps: {count}"
            f" micro-batches; set together to a number from 1 to {count}, or to auto"
        )


def _together(plan: Plan) -> Iterator[str]:
    """Yield what settings that name no row ask of each other: the time of updates, and the
    cache."""
    timing = plan.update.timing
    timings = plan.estimator.facts.timings
    if timing not in timings:
        yield (
            f"update.timing: {timing} is no time at which {plan.estimator} has an update ready;"
            f" use {spoken(timings)}"
        )
    if plan.update.at_turn:
        norm = "the global norm is known only after the backward walk, not at update.timing: block"
        yield from must_be(plan, "optimizer.max_grad_norm", 0, norm)
        steps = plan.gradient_accumulation_steps
        if len(plan.walks) > 1:
            yield (
                f"gradient_accumulation_steps is {steps} and together {plan.together}, with updates"
                " at the block's turn: let all micro-batches visit a block together (together:"
                f" {steps}) or update at the step's end (update.timing: step)"
            )
    if not plan.update.deferred:
        yield from must_be(
            plan, "update.flush_every", 1, f"update.timing is {timing}, not deferred"
        )
    if not plan.cache.off_device:
        elsewhere = (
            "it is of slices that would go to host memory, and cache.tier is"
            f" {plan.cache.tier!r}; set cache.tier: host"
        )
        yield from must_be(plan, "cache.threshold", 0, elsewhere)
    if plan.budget is None:
        share = "it is a share of the budget, which is not set"
        yield from must_be(plan, "cache.threshold", 0, share)


def refuse_dropout(plan: Plan, adapters: Any) -> None:
    """Raise ValueError for a dropout of adapters under zeroth order, which walks in evaluation
    mode."""
    if (
        not plan.estimator.facts.walks_back
        and isinstance(adapters, LoraSettings)
        and adapters.dropout
    ):
        raise ValueError(
            f"lora.dropout is {adapters.dropout}, and method {plan.method!r} drops nothing: a"
            " step's losses must differ by its"
            " perturbation alone; set lora.dropout: 0"
        )
