"""A plan: where each kind of state lives, and when it is used. A frozen value, refused at once if
it makes no sense.

A plan holds no tensors and imports no torch. :mod:`blockwalk.plan.methods` names the published
ones; :mod:`blockwalk.program.compile` turns a plan, a model and a shape into a
:class:`~blockwalk.program.program.Program`."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from blockwalk.plan.choices import (
    CacheSettings,
    LoraSettings,
    MeshSettings,
    OptimizerSettings,
    UpdateSettings,
    ZerothOrderSettings,
)
from blockwalk.plan.estimators import HOMES, Estimator, HomeFacts, Timing
from blockwalk.plan.losses import LOSSES, LossFacts
from blockwalk.plan.mesh import group_sizes, make_axes
from blockwalk.plan.noise_kinds import NOISES, NoiseFacts
from blockwalk.plan.placement import NOBODY, Codec, Placement, Tier
from blockwalk.plan.schedules import SCHEDULES
from blockwalk.plan.sizes import THIN_TOGETHER, TOGETHER
from blockwalk.plan.update_rules import RULES, RuleFacts
from blockwalk.plan.words import counted
from blockwalk.plan.zeroth_order_kinds import KINDS, KindFacts

AUTO = -1
"""The value of ``resident`` that leaves it to the compiler."""


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
    estimator: Estimator = Estimator.BACKPROP
    """The source of a step's direction: {choices}. The method decides it."""
    frozen: Placement = Placement()
    """The place and form of weights that are not trained: tier × codec × group. Tiers are {tiers}.
    Codecs are {codecs}. auto is the first of raw, int8 and int4a that takes at most half of this machine's
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
    gradient_accumulation_steps: int = 1
    """Micro-batches that a step's batch is cut into."""
    accumulation_order: str = "micro_batch"
    """micro_batch: a walk for each micro-batch. block: each block is fetched once, for all
    micro-batches."""
    recompute: str = "all"
    """Activations that the backward walk computes again. all: those of every block. none: they are
    kept, where ``activation`` says. auto: the last blocks' are kept, as many as there is room
    for."""
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
    neftune_noise_alpha: float = 0.0
    """NEFTune: the strength of uniform noise that training adds to embeddings; 0: none. It goes up
    to alpha / √(S·D) for S tokens of width D (Jain et al. 2023)."""
    budget: int | None = None
    """Device memory that the step may use, in bytes. Without one a run on an accelerator has 0.9 of
    what is free there."""
    compile: bool = False
    """Whether each kind of block is compiled once with torch.compile. A block's weights are then
    whole while it computes."""
    seed: int = 0
    """The seed of the data's order, the adapters' first values, dropout, noise, rounding, and of
    the draws of generate."""

    def __post_init__(self) -> None:
        short = {str(codec): codec.facts.dtype for codec in Codec if codec.facts.dtype}
        object.__setattr__(self, "compute_dtype", short.get(self.compute_dtype, self.compute_dtype))
        for rules in (
            _values,
            _groups,
            _fixed,
            _others,
        ):  # each looks up what those before it checked
            for message in rules(self):
                raise ValueError(f"plan {self.method!r}: {message}")

    @property
    def zeroth_order(self) -> bool:
        """True where steps have forwards alone."""
        return self.estimator is Estimator.ZEROTH_ORDER

    @property
    def sharded(self) -> bool:
        """True where parameters are spread over ranks and gradients are summed over them."""
        return self.home.gathered

    @property
    def spread(self) -> tuple[str, ...]:
        """The kinds of state that may be spread over ranks; gathered in backpropagation, over no
        fewer than those before them."""
        facts = self.estimator.facts
        return facts.spreads if facts.shares_forwards or self.home.gathered else ()

    @property
    def parameter_ranks(self) -> int:
        """Ranks that a unit's parameters are spread over: each keeps its slice of them."""
        return group_sizes(self.mesh)[self.trainable.group]

    @property
    def frozen_ranks(self) -> int:
        """Zeroth order: ranks that each hold a slice of the streamed frozen blocks; a file is one
        copy for all who map it."""
        return group_sizes(self.mesh)[self.frozen.group] if self.frozen.on_host else 1

    @property
    def cuts(self) -> int:
        """Parts that a step's batch is cut into, each a micro-batch of one rank or of ranks that
        share it."""
        return self.gradient_accumulation_steps * (
            self.mesh.data if self.zeroth_order else self.mesh.world
        )

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
    def caches_nothing(self) -> bool:
        """True where parameters are spread as widely as optimizer states: no slices over fewer
        ranks stay between uses, on whatever ``cache.tier``."""
        return self.parameter_ranks == self.optimizer_ranks

    @property
    def on_one_node(self) -> bool:
        """True where groups of other names are one here because all ranks are on one node: the same
        plan caches on two."""
        return (
            self.mesh.world == self.mesh.ranks_per_node
            and self.trainable.group != self.optimizer_state.group
        )

    @property
    def home(self) -> HomeFacts:
        """The row of the home that trainables have between their turns."""
        facts = self.estimator.facts
        spread = any(getattr(self, kind).group != NOBODY for kind in facts.spreads[1:])
        return HOMES[facts.home_over_ranks if spread else facts.home]

    @property
    def loss_facts(self) -> LossFacts:
        """The row of ``loss``."""
        return LOSSES[self.loss]

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
    def forward_passes(self) -> int:
        """Forwards of one zeroth-order step."""
        return len(self.kind.passes(self.zo.queries))

    @property
    def copies_blocks(self) -> bool:
        """True where a zeroth-order step perturbs a block once for all micro-batches of a pass:
        whole, where the noise is made in its size."""
        noise = NOISES[self.zo.noise]
        return (
            self.zeroth_order
            and not (noise.in_place or noise.beside)
            and self.gradient_accumulation_steps > 1
        )

    def passes_together(self, tokens: int) -> int:
        """Return forwards of a zeroth-order step, of so many tokens each, that a block computes as
        one batch: its weights are read, and decoded, once for them."""
        alike = (
            self.zeroth_order
            and NOISES[self.zo.noise].beside
            and self.zo.target == "weights"
            and not self.compile
        )
        return max(1, min(TOGETHER // tokens, THIN_TOGETHER // self.zo.noise_rank)) if alike else 1

    def sliceable(self, kind: str) -> bool:
        """Whether ranks can hold one copy of the streamed units' ``frozen`` or ``trainable`` part
        together (zeroth order). A slice of the latter is brought up to date by itself: its updates
        wait for the next fetch, and nothing that a forward reads lies beside the parameters."""
        if kind == "frozen":
            return not self.frozen.on_device
        away = not self.trainable.on_device and self.update.deferred
        return away and not self.kind.states

    def shared(self) -> dict[str, Any]:
        """Return the choices that must be equal on all ranks, nested. A zeroth-order rank that
        holds its weights whole may have tiers, ``prefetch``, ``budget`` and ``resident`` of its
        own: they change no bit."""
        found = dataclasses.asdict(self)
        if self.zeroth_order and self.parameter_ranks == self.frozen_ranks == 1:
            for name in ("prefetch", "budget", "resident"):
                del found[name]
            del found["frozen"]["tier"], found["trainable"]["tier"]
        return found


CHOICES: dict[str, Collection[str]] = {
    "accumulation_order": ("micro_batch", "block"),
    "recompute": ("auto", "all", "none"),
    "loss": LOSSES,
    "compute_dtype": ("auto", "float32", "bfloat16", "float16"),
    "optimizer.name": RULES,
    "optimizer.decay": ("matrices", "all"),
    "optimizer.schedule": SCHEDULES,
    "update.rounding": ("stochastic", "nearest"),
    "zo.kind": KINDS,
    "zo.target": ("weights", "scales"),
    "zo.noise": NOISES,
    "zo.rounding": ("nearest", "stochastic"),
    "cache.tier": ("none", "device", "host"),
}
"""Settings that take one of a few words, and the words."""


def by_name(*rows: tuple[int, str]) -> dict[str, int]:
    """Return the number of each row by every name of it, which spaces divide."""
    return {name: number for number, names in rows for name in names.split()}


MOST = {int: 2**40, float: 1e18}
"""The most that any number among the settings may be, by its type: far beyond what fits a machine,
and taken by every library."""
SMALLER = by_name(
    (2**62, "seed budget"),
    (2**32 - 1, "data.task_seed"),
    (2**16, "lora.rank"),
    (
        2**20,
        "mesh.world mesh.ranks_per_node mesh.data mesh.perturb gradient_accumulation_steps"
        " prefetch",
    ),
    (2**20, "prefix.num_virtual_tokens zo.queries zo.noise_rank keep_checkpoints eval_batches"),
    (2**31 - 1, "batch_size eval_batch_size data.max_length data.padding_multiple"),
    (10_000_000, "start_timeout"),
)
"""The most that some of them may be, where that is another number than :data:`MOST`."""


def beyond(settings: Any, prefix: str = "") -> Iterator[str]:
    """Yield messages about the numbers among the settings of a frozen value, and of those in it,
    that no run could have: not finite, or above :data:`MOST`. Names begin with ``prefix``."""
    for part in dataclasses.fields(settings):
        name = f"{prefix}{part.name}"
        value = getattr(settings, part.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Placement | Plan):
            yield from beyond(value, f"{name}.")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            most = SMALLER.get(name, MOST[int if isinstance(number, int) else float])
            if not abs(number) <= most:  # NaN is not
                digits = (
                    f"a number of about {int(number.bit_length() * 0.30103) + 1} digits"
                    if isinstance(number, int)
                    else ""
                )
                shown = number if not digits or abs(number) < 10**18 else digits
                yield f"{name} is {shown}; it must be a number up to {most:,}"


LEAST = by_name(
    (
        1,
        "gradient_accumulation_steps update.flush_every zo.queries zo.noise_rank zo.noise_interval",
    ),
    (1, " ".join(f"mesh.{f.name}" for f in dataclasses.fields(MeshSettings) if f.name != "groups")),
    (
        0,
        "prefetch seed optimizer.learning_rate optimizer.lora_b_ratio neftune_noise_alpha"
        " zo.seed_pool",
    ),
    (AUTO, "resident"),
)
"""The least that a setting may be."""


def _values(plan: Plan) -> Iterator[str]:
    """Yield the single settings that are out of range: what is wrong, and which setting to change.
    Other rules answer alike."""
    yield from beyond(plan)
    for key, known in CHOICES.items():
        if (name := operator.attrgetter(key)(plan)) not in known:
            yield f"{key} is {name!r}; it must be one of {', '.join(known)}"
    for key, least in LEAST.items():
        if (value := operator.attrgetter(key)(plan)) < least:
            yield f"{key} is {value}; it must be at least {least}"
    if plan.budget is not None and plan.budget <= 0:
        yield f"budget is {plan.budget} bytes; give a positive size such as 8GB, or leave it out"
    if not 0 <= plan.cache.threshold <= 1:
        yield f"cache.threshold is {plan.cache.threshold}; it is a share of the budget, from 0 to 1"


def _groups(plan: Plan) -> Iterator[str]:
    """Yield a placement names a group of the mesh, which nests with those of the other kinds of
    state."""
    mesh = plan.mesh
    sizes = group_sizes(plan.mesh)
    make_axes(mesh)  # refuses groups that do not nest
    known = ", ".join(f"{name} ({ranks})" for name, ranks in sizes.items())
    for kind in ("frozen", "trainable", "gradient", "optimizer_state", "activation"):
        placement: Placement = getattr(plan, kind)
        if placement.group not in sizes:
            yield (
                f"{kind} is {placement}, and the groups of this mesh are {known}; name one of"
                " them, or set mesh.groups:"
                f" {placement.group}=RANKS"
            )
        if kind not in plan.spread and placement.group != NOBODY:
            yield (
                f"{kind} is {placement}, and no group shares it here; set {kind}:"
                f" {placement.tier} × {placement.codec}"
            )
    for inner, outer in itertools.pairwise(plan.spread if plan.sharded else ()):
        few, many = (sizes[getattr(plan, kind).group] for kind in (inner, outer))
        if few > many or (inner == "frozen" and few < many):
            rule = "over as many as" if inner == "frozen" else "over no more than"
            yield (
                f"{inner} is {getattr(plan, inner)}, {counted(few, 'rank')}, and {outer} is"
                f" {getattr(plan, outer)}, {many}:"
                f" {inner} is spread {rule} {outer}; change one of them"
            )


def refuse_dropout(plan: Plan, adapters: Any) -> None:
    """Raise ValueError for a dropout of adapters under zeroth order, which walks in evaluation
    mode."""
    if plan.zeroth_order and isinstance(adapters, LoraSettings) and adapters.dropout:
        raise ValueError(
            f"lora.dropout is {adapters.dropout}, and method {plan.method!r} drops nothing: a"
            " step's losses must differ by its"
            " perturbation alone; set lora.dropout: 0"
        )


def _fixed(plan: Plan) -> Iterator[str]:
    """Yield the settings that can have one value alone beside what others say."""
    zeroth_order = plan.zeroth_order
    original = plan.zo.noise == "mezo"
    timing = plan.update.timing
    cache = plan.cache
    own = "zo.noise: mezo reproduces the original's"
    for where, key, value, because in (
        (plan.sharded, "compile", False, "blocks whose parameters are gathered from other ranks run uncompiled"),
        (zeroth_order, "cache.tier", "none", "zeroth order has no backward walk to keep parameters for"),
        (not zeroth_order and not plan.sharded, "cache.tier", "none", "one process gathers no parameters that it could keep"),
        (plan.sharded and plan.caches_nothing and not plan.on_one_node, "cache.tier", "none",
         f"trainable is {plan.trainable} and optimizer_state {plan.optimizer_state}: no slice"
         " lies between the two that could"
         " be kept. Spread trainable and frozen over fewer ranks (method fcdp: a node)"),
        (zeroth_order, "optimizer.lora_b_ratio", 1, "a ledger has one learning rate a step"),
        (zeroth_order, "optimizer.decay", "matrices", "zeroth order spares the names that the original spares"),
        (zeroth_order, "neftune_noise_alpha", 0, "a step's losses must differ by its perturbation alone"),
        (plan.sharded, "trainable.tier", Tier.DEVICE, "cache.tier: host (method fcdp) is what keeps its slices on the host"),
        (plan.sharded and plan.gradient.on_disk, "gradient.tier", Tier.HOST, "slices of gradients wait in memory"),
        (plan.sharded, "optimizer.lora_b_ratio", 1, "ranks update slices of a block, in which A and B are one"),
        (timing is Timing.BLOCK, "optimizer.max_grad_norm", 0,
         "the global norm is known only after the backward walk, not at update.timing: block"),
        (timing is not Timing.DEFERRED, "update.flush_every", 1, f"update.timing is {timing}, not deferred"),
        (original, "update.timing", Timing.STEP, f"{own} arithmetic, in place over the whole model"),
        (original, "zo.kind", "spsa", f"{own} two-point estimate"),
        (original, "zo.queries", 1, f"{own} two-point estimate"),
        (original, "trainable", Placement(), "zo.noise: mezo perturbs the weights where they lie"),
        (original, "optimizer.name", "sgd", f"{own} update"),
        (original, "optimizer.max_grad_norm", 0, f"{own} update"),
        (original, "zo.rounding", "nearest", f"{own} arithmetic"),
        (original, "mesh.perturb", 1, "zo.noise: mezo perturbs the weights one forward after the other"),
        *((name not in NOISES[plan.zo.noise].settings, f"zo.{name}", value, f"zo.noise: {plan.zo.noise} has no use for it")
          for name, value in (("seed_pool", 0), ("noise_rank", 1), ("noise_interval", 1))),
        (cache.tier != "host", "cache.threshold", 0,
         f"it is of slices that would go to host memory, and cache.tier is {cache.tier!r}; set cache.tier: host"),
        (plan.budget is None, "cache.threshold", 0, "it is a share of the budget, which is not set"),
        (plan.sharded, "resident", AUTO, "blocks that ranks hold together are kept by cache.tier and cache.threshold"),
    ):  # fmt: skip
        if where and (found := operator.attrgetter(key)(plan)) != value:
            yield (
                f"{key} is {found}, and {because}; set {key}:"
                f" {str(value).lower() if value is False else value}"
            )


def _others(plan: Plan) -> Iterator[str]:
    """Yield the rules that are none of these."""
    zeroth_order = plan.zeroth_order
    mesh = plan.mesh
    update = plan.update
    kind = plan.kind
    rule = plan.update_rule
    trainable = plan.trainable
    if zeroth_order and plan.zo.epsilon <= 0:
        yield (
            f"zo.epsilon is {plan.zo.epsilon}; the two losses must differ: set it above 0 (1e-3"
            " for full fine-tuning)"
        )
    if zeroth_order and update.at_turn:
        yield (
            "update.timing: block needs gradients at the block's turn; zeroth order knows its"
            " scalar only after the walk: use"
            " deferred or step"
        )
    if not zeroth_order and update.deferred:
        yield "update.timing: deferred belongs to zeroth order; use block or step"
    for name in ("frozen", "trainable"):
        if (codec := getattr(plan, name).codec).facts.chosen_later:
            if name != "frozen" or plan.frozen.on_device:
                yield (
                    f"{name} is {getattr(plan, name)}; {codec} is for frozen weights on disk or"
                    " the host: name a codec, such as"
                    " raw"
                )
        elif not codec.written:
            yield (
                f"{name} is {getattr(plan, name)}; {codec} is read from files that have it, and"
                " not written: set raw"
            )
    for name in ("gradient", "optimizer_state", "activation"):
        placement = getattr(plan, name)
        kept = Codec.RAW if name == "activation" else Codec.FP32
        if placement.codec not in (Codec.RAW, kept):
            tier = placement.tier
            because = "as blocks compute it" if kept is Codec.RAW else "in 32 bits"
            yield f"{name} is {placement}, and is kept {because}; set {name}: {tier} × {kept}"
    if plan.compile and plan.frozen.codec.encoded:
        yield (
            "compile is true, and a compiled block needs its weights whole, where frozen:"
            f" {plan.frozen} decodes a range at a"
            " time; set compile: false, or frozen: device"
        )
    if zeroth_order and plan.zo.queries < kind.least_queries:
        yield (
            f"zo.queries is {plan.zo.queries}, and {plan.zo.kind} needs at least"
            f" {kind.least_queries}: it {kind.because}"
        )
    for name, _ in kind.states.values():
        if zeroth_order and (codec := getattr(plan.zo, name)).facts.dtype is None:
            yield (
                f"zo.{name} is {codec}; what forwards read beside the weights is kept in fp32,"
                " bf16 or fp16"
            )
    if zeroth_order and not 0 <= plan.zo.hessian_alpha < 1:
        yield (
            f"zo.hessian_alpha is {plan.zo.hessian_alpha}; it is the share that a step renews,"
            " from 0 to 1"
        )
    if not zeroth_order and rule.zeroth_order_only:
        rules = ", ".join(name for name, facts in RULES.items() if not facts.zeroth_order_only)
        yield f"optimizer.name: {plan.optimizer.name} is a zeroth-order rule; use {rules}"
    if zeroth_order and len(rule.states) > 1 and trainable.on_disk:
        rules = " or ".join(name for name, facts in RULES.items() if not facts.states)
        yield (
            f"{plan.optimizer.name} keeps {' and '.join(rule.states)} beside each trainable: use"
            " it with resident trainables"
            f" (LoRA), or optimizer.name: {rules}"
        )
    steps = plan.gradient_accumulation_steps
    by_turn = plan.accumulation_order == "micro_batch"
    if update.at_turn and steps > 1 and by_turn:
        yield (
            f"gradient_accumulation_steps is {steps} with updates at the block's turn: walk block"
            " by block"
            " (accumulation_order: block) or update at the step's end (update.timing: step)"
        )
    if not zeroth_order and plan.compute_dtype == "float16":
        yield (
            "compute_dtype is float16, and backpropagation does not scale its losses: most"
            " gradients lie below float16's"
            " smallest number; set compute_dtype: bfloat16 (as many bytes) or float32"
        )
    scales = plan.zo.target == "scales"
    facts = trainable.codec.facts
    if scales and (
        len(facts.scales) != 1
        or not NOISES[plan.zo.noise].elementwise
        or kind.states
        or rule.states
    ):
        yield (
            "zo.target: scales is of codes with one scale a row or group, and of noise and rules"
            " without more beside them; it"
            f" has trainable: {trainable}, {plan.zo.noise}, {plan.zo.kind},"
            f" {plan.optimizer.name}; use int8, fp8, int4 or nf4,"
            " gaussian or rademacher, spsa or fzoo, sgd or sign"
        )
    if trainable.codec.encoded and not facts.trainable and not scales:
        codecs = ", ".join(codec for codec in Codec if not codec.encoded or codec.facts.trainable)
        yield (
            f"a trainable parameter cannot be kept in {trainable.codec}, which has no stochastic"
            f" rounding; use {codecs}"
        )
    if not zeroth_order and trainable.codec.encoded:
        yield (
            f"backpropagation keeps trainables in 16 or 32 bits, not {trainable.codec}; use fp32"
            " or bf16"
        )
    if not zeroth_order and not plan.sharded and mesh.world > 1:
        yield (
            f"it trains on one rank, and there are {mesh.world}; use fcdp or hzp (or zero3,"
            " zeropp, mics), or start one"
        )
    if plan.sharded and not plan.frozen.on_device:
        yield (
            f"frozen is {plan.frozen}: where parameters are spread over ranks cache.tier: host"
            " (method fcdp) keeps their"
            f" slices in host memory; set frozen: device × {plan.frozen.codec} ×"
            f" {plan.frozen.group}"
        )
    if zeroth_order and mesh.data * mesh.perturb != mesh.world:
        shares = f"{mesh.data}×{mesh.perturb} = {mesh.data * mesh.perturb}"
        yield f"mesh.data × mesh.perturb = {shares}, but there are {mesh.world} ranks"
    if zeroth_order and mesh.perturb > max(plan.forward_passes, 1):
        yield (
            f"mesh.perturb is {mesh.perturb}, and a step has {plan.forward_passes} forwards;"
            " lower it, or raise zo.queries"
        )
    for name, ranks in (("frozen", plan.frozen_ranks), ("trainable", plan.parameter_ranks)):
        if zeroth_order and mesh.ranks_per_node % ranks != 0:
            yield (
                f"{name} is {getattr(plan, name)}, {counted(ranks, 'rank')}, and slices are"
                " gathered inside a node, whose ranks"
                f" (mesh.ranks_per_node={mesh.ranks_per_node}) these do not divide; name a"
                " smaller group"
            )
    if zeroth_order and group_sizes(mesh)[plan.frozen.group] > 1 and not plan.sliceable("frozen"):
        yield (
            f"frozen is {plan.frozen}, and slices are of blocks that are fetched; set frozen:"
            f" host × {plan.frozen.codec} ×"
            f" {plan.frozen.group}, or device × {plan.frozen.codec} × nobody"
        )
    if zeroth_order and plan.parameter_ranks > 1 and not plan.sliceable("trainable"):
        kinds = " or ".join(name for name, facts in KINDS.items() if not facts.states)
        yield (
            f"trainable is {trainable}, {plan.parameter_ranks} ranks: slices are of blocks that"
            " are fetched, with their"
            " updates. Use trainable: host or disk, update.timing: deferred, and a zo.kind whose"
            " forwards read no state"
            f" beside the weights: {kinds}; or set trainable: {trainable.tier} ×"
            f" {trainable.codec} × nobody"
        )
