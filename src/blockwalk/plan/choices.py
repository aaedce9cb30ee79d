"""The settings of a plan by group, each a frozen value with its defaults: ``optimizer.*``,
``update.*``, ``zo.*``, ``cache.*``, ``context.*``, ``mesh.*``, ``lora.*`` and ``prefix.*``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from blockwalk.plan.placement import Codec

AUTO = -1
"""The value of ``resident`` that leaves it to the compiler."""

OF_PEFT = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "target_modules",
}
"""PEFT's names of the fields of :class:`LoraSettings`."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Low-rank adapters (``lora.*``); see PEFT's ``LoraConfig``."""

    rank: int = 8
    """The rank of each adapter: columns of A and rows of B. Its size is in proportion."""
    alpha: float = 16
    """An adapter's answer is multiplied by alpha / rank."""
    dropout: float = 0.0
    """The share of an adapter's inputs that a training step leaves out; none under zeroth order."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the modules that get an adapter, or a pattern. all-linear: every linear layer that
    text passes but the head, experts and routers. []: none, so that
    ``lora.options.modules_to_save`` alone are trained."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of PEFT's ``LoraConfig``, under its own names: ``{use_rslora: true}``."""
    from_: str = ""
    """The folder of a trained adapter, or of its run, that training goes on from. Its rank, alpha,
    dropout, modules and options are taken too."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(
                f"lora.rank is {self.rank}; it must be at least 1 (lora: false trains everything)"
            )
        name = self.target_modules
        # as a pattern it would be that of a whole name
        if isinstance(name, str) and re.fullmatch(r"\w+", name):
            object.__setattr__(self, "target_modules", (name,))
        for name_in_peft, setting in OF_PEFT.items():
            if name_in_peft in self.options:
                raise ValueError(
                    f"lora.options.{name_in_peft} is PEFT's name of lora.{setting}; set that"
                )
        if not self.target_modules and not self.options.get("modules_to_save"):
            raise ValueError(
                "lora.target_modules is empty; name some, or set lora.options.modules_to_save"
            )

    def __str__(self) -> str:
        modules = ", ".join(self.options.get("modules_to_save") or ())
        return (
            f"LoRA adapters of rank {self.rank}"
            if self.target_modules
            else f"the modules {modules}"
        )


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    """Keys and values that every layer reads before those of the text (``prefix.*``); see PEFT's
    ``PrefixTuningConfig``."""

    num_virtual_tokens: int = 0
    """The tokens of the prefix (5 in MeZO); 0: there is none."""
    init_weights: str = "tokens"
    """The first values of a prefix. tokens: keys and values of tokens drawn from the vocabulary, as
    in MeZO. random: normal ones, as in PEFT. zero: zeros."""

    def __post_init__(self) -> None:
        if self.init_weights not in ("tokens", "random", "zero"):
            raise ValueError(
                f"prefix.init_weights is {self.init_weights!r}; it must be tokens, random or zero"
            )

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self.num_virtual_tokens > 0

    def __str__(self) -> str:
        return f"a prefix of {self.num_virtual_tokens} tokens"


Adapters = LoraSettings | PrefixSettings
"""Adapters of either kind, which are trained in place of the model's own parameters."""


class Timing(StrEnum):
    """The time at which an update is applied: inside the backward walk, after it, or at the next
    step's fetch."""

    BLOCK = "block"
    STEP = "step"
    DEFERRED = "deferred"


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The update rule and its schedule (``optimizer.*``)."""

    name: str = "adamw"
    """The update rule: {choices}."""
    learning_rate: float = 1e-4
    """The highest learning rate of the schedule. Zeroth order needs far smaller ones: 1e-7 to 1e-6
    for billions of parameters."""
    lora_b_ratio: float = 1.0
    """The learning rate of adapters' B over that of the rest. LoRA+ takes about 16 (Hayou et al.
    2024)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """adamw: the decay of the mean of the gradient, and of its square."""
    eps: float = 1e-8
    """adamw: the number that is added to the root of the mean square."""
    momentum: float = 0.9
    """momentum: the share of the last step's direction that is kept."""
    weight_decay: float = 0.0
    """The weight decay. adamw: the share of a parameter, times the learning rate, that an update
    takes off. Other rules add this share to the gradient."""
    decay: str = "matrices"
    """First order: the parameters that ``weight_decay`` reaches. matrices: all but norms and
    biases, as in transformers' Trainer. all: every one. Zeroth order spares the original's names:
    those with bias, layer_norm or layernorm in them."""
    schedule: str = "constant"
    """The way of the learning rate after ``warmup_steps``, by transformers' names: {choices}."""
    warmup_steps: int | float = 0
    """Steps over which the learning rate climbs from 0 to its highest; below 1, a share of
    ``total_steps``."""
    total_steps: int = 0
    """Steps that the schedule spans; 0: those of the run."""
    min_ratio: float = 0.0
    """The learning rate at the schedule's end, as a share of the highest."""
    cycles: int = 1
    """cosine_with_restarts: the times that the rate falls from its highest."""
    power: float = 1.0
    """polynomial: the power of the share of steps that are left."""
    cooldown_steps: int | float = 0.1
    """warmup_stable_decay: the last steps, in which the rate falls along half a cosine; below 1, a
    share of ``total_steps``."""
    max_grad_norm: float = 0.0
    """The global norm that gradients are clipped to; 0: no clipping. Zeroth order clips each
    projected gradient by its size."""


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """The time of updates and their rounding (``update.*``)."""

    timing: Timing = Timing.STEP
    """The time of a block's update. block: at its turn of the backward walk. step: at the step's
    end. deferred: at its next fetch (zeroth order)."""
    flush_every: int = 1
    """Deferred updates: the steps between writes of a block. In between, updates wait and are
    applied at each fetch."""
    rounding: str = "stochastic"
    """The rounding of a 16- or 8-bit master after an update: stochastic (counter-based,
    reproducible) or nearest."""

    @property
    def at_turn(self) -> bool:
        """True where a block is updated at its turn of the backward walk."""
        return self.timing is Timing.BLOCK

    @property
    def deferred(self) -> bool:
        """True where an update waits for the block's next fetch."""
        return self.timing is Timing.DEFERRED


@dataclass(frozen=True, slots=True)
class ZerothOrderSettings:
    """The zeroth-order estimator (``zo.*``)."""

    kind: str = "spsa"
    """The forwards of a step, and what is made of their losses: {choices}."""
    target: str = "weights"
    """The values that are trained: {choices}."""
    epsilon: float = 1e-3
    """The size of the perturbation: losses are taken at the parameters plus and minus epsilon times
    the noise."""
    queries: int = 1
    """Independent directions a step: q pairs for spsa, N one-sided losses for fzoo."""
    noise: str = "gaussian"
    """The noise of perturbations: {choices}."""
    noise_rank: int = 1
    """lowrank: the columns of the factors."""
    noise_interval: int = 1
    """lowrank: steps for which the factor of a matrix's inputs stays (50 to 100 in LOZO)."""
    seed_pool: int = 0
    """The number of directions that queries are drawn from; 0: every query has its own. K numbers
    then say what a run learnt."""
    hessian_alpha: float = 1e-8
    """HiZOO's smoothing of the diagonal curvature; 0 would leave it inert."""
    hessian_codec: Codec = Codec.FP32
    """The codec that HiZOO's curvature is kept in: fp32, bf16 or fp16."""
    rounding: str = "nearest"
    """The rounding of perturbed weights to a forward's 16 bits: nearest, or stochastic. stochastic
    uses the same draws in all forwards of a step. An epsilon far below a weight's last place then
    moves it in expectation."""
    objective: str = "loss"
    """loss, label_words, accuracy or f1; a Python function may be given to the walker instead."""

    @property
    def ranks_words(self) -> bool:
        """True where the objective ranks label words."""
        return self.objective != "loss"


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The cache that keeps forward-gathered parameters for the backward walk (``cache.*``)."""

    tier: str = "none"
    """The place of gathered parameters from one use to the next. none: every use gathers them from
    all ranks (zero3, mics). host: a rank's slices stay in RAM (fcdp). device: they stay on the
    device (zeropp, hzp)."""
    threshold: float = 0.0
    """Adaptive cache, ``tier: host``: the share of the budget, 0 to 1, within which slices stay on
    the device. Beyond it they go to the host."""

    @property
    def keeps(self) -> bool:
        """True where slices stay somewhere from one use to the next."""
        return self.tier != "none"

    @property
    def off_device(self) -> bool:
        """True where they stay in host memory."""
        return self.tier == "host"


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """Sequences in parts over ranks (``context.*``), where ``mesh.context`` is above 1."""

    way: str = "auto"
    """The way in which the tokens of a part attend to those of all parts. keys: keys and values
    are gathered. heads: each rank gets whole sequences of some heads, which
    ``mesh.context`` divides. auto: the one that sends fewer bytes."""


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """Blocks over stages (``pipeline.*``), where ``mesh.pipeline`` is above 1."""

    chunks: int = 1
    """Runs of neighbouring blocks that each stage has. With v of them stages are idle for a smaller
    part of a step, and send v times the bytes."""
    blocks: tuple[int, ...] = ()
    """The blocks of every chunk, in the order of the model: ``[5, 6, 6, 5]``. []: as many as leave
    the slowest chunk the fewest seconds to compute, as foreseen."""
    reuse: bool = True
    """Whether a chunk's gathered parameters stay on the device for the next micro-batch, forwards
    and backwards. There are fewer gathers, and one chunk's parameters more."""
    shared_sums: bool = False
    """Whether a chunk's gradients stay on the device for the next backward, and ranks sum those of
    neighbours once. There are fewer reductions, and one chunk's float32 gradients more."""


@dataclass(frozen=True, slots=True)
class MeshSettings:
    """The ranks (``mesh.*``): sizes of named axes. Over ``node``, ``world`` and ``groups`` state is
    spread, as its placement says; over ``data`` and ``perturb`` a zeroth-order step's work is
    shared, over ``context`` the tokens of a sequence, over ``pipeline`` the blocks."""

    data: int = 1
    """Parts that the global batch is cut into, the outer axis."""
    perturb: int = 1
    """Ranks that share the forwards of a step, the inner axis: neighbours."""
    context: int = 1
    """Backpropagation over ranks: neighbours that each hold a part of every sequence. Parameters,
    gradients and optimizer states stay spread as without it."""
    pipeline: int = 1
    """Backpropagation over ranks: stages, each of which holds some of the blocks and walks over
    them. They are the outermost axis; state is spread over the ranks of a stage."""
    check_every: int = 100
    """The steps between comparisons of the copies of weights and moments that ranks hold. The run
    ends where two differ. Backpropagation compares them before every checkpoint as well."""
    groups: tuple[str, ...] = ()
    """Further groups of neighbours that placements may name, beside node and world: ``[half=4,
    island=16]``. Each is name=ranks. Each size divides the next larger one."""
    ranks_per_node: int = 1
    """Ranks that share a machine; the launcher says how many."""
    world: int = 1
    """All ranks; the launcher says how many."""

    @property
    def stage_ranks(self) -> int:
        """The ranks of a stage: all, where there is one."""
        return self.world // max(self.pipeline, 1)
