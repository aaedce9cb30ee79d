"""The settings of a plan by group, each a frozen value with its defaults: ``optimizer.*``, ``update.*``, ``zo.*``, ``cache.*``,
``mesh.*``, ``lora.*`` and ``prefix.*``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from blockwalk.plan.placement import Codec

OF_PEFT = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules"}
"""PEFT's names of the fields of :class:`LoraSettings`."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Low-rank adapters (``lora.*``); see PEFT's ``LoraConfig``."""

    rank: int = 8
    """Columns of A and rows of B of each adapter; its size is in proportion."""
    alpha: float = 16
    """An adapter's answer is multiplied by alpha / rank."""
    dropout: float = 0.0
    """The share of an adapter's inputs that training leaves out, drawn anew for each step; none under zeroth order."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the modules that get an adapter, or a pattern; all-linear: every linear layer that text passes but the
    head, experts and routers; [] for none: ``lora.options.modules_to_save`` alone are trained, such as the head."""
    from_: str = ""
    """The folder of a trained adapter, or of its run, that training goes on from; its rank, alpha, dropout, modules and options
    are those of the run."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of PEFT's ``LoraConfig``, under its own names: ``{use_rslora: true}``."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank is {self.rank}; it must be at least 1 (lora: false trains everything)")
        for theirs, ours in OF_PEFT.items():
            if theirs in self.options:
                raise ValueError(f"lora.options.{theirs} is PEFT's name of lora.{ours}; set that")
        if not self.target_modules and not self.options.get("modules_to_save"):
            raise ValueError("lora.target_modules is empty; name some, or set lora.options.modules_to_save")

    def __str__(self) -> str:
        modules = ", ".join(self.options.get("modules_to_save") or ())
        return f"LoRA adapters of rank {self.rank}" if self.target_modules else f"the modules {modules}"


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    """Keys and values that every layer reads before those of the text (``prefix.*``); see PEFT's ``PrefixTuningConfig``."""

    num_virtual_tokens: int = 0
    """The tokens of the prefix (5 in MeZO); 0: there is none."""
    init_weights: str = "tokens"
    """The values that a prefix begins with: tokens (the keys and values of tokens that are drawn at random from the
    vocabulary, as in MeZO), random (normal ones, PEFT's own), or zero."""

    def __post_init__(self) -> None:
        if self.init_weights not in ("tokens", "random", "zero"):
            raise ValueError(f"prefix.init_weights is {self.init_weights!r}; it must be tokens, random or zero")

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self.num_virtual_tokens > 0

    def __str__(self) -> str:
        return f"a prefix of {self.num_virtual_tokens} tokens"


Adapters = LoraSettings | PrefixSettings
"""Adapters of either kind, which are trained in place of the model's own parameters."""


class Estimator(StrEnum):
    """The estimator: how a step turns losses into a direction."""

    BACKPROP = "backprop"
    ZEROTH_ORDER = "zeroth-order"


class Timing(StrEnum):
    """The time at which an update is applied: inside the backward walk, after it, or at the next step's fetch."""

    BLOCK = "block"
    STEP = "step"
    DEFERRED = "deferred"


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The update rule and its schedule (``optimizer.*``)."""

    name: str = "adamw"
    """The update rule; sign with zeroth order alone."""
    learning_rate: float = 1e-4
    """The highest that the schedule comes to; zeroth order needs far smaller ones, 1e-7 to 1e-6 for billions of parameters."""
    lora_b_ratio: float = 1.0
    """The learning rate of adapters' B, in learning rates of the rest: LoRA+ takes 16 or so (Hayou et al. 2024)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """adamw: the decay of the mean of the gradient, and of its square."""
    eps: float = 1e-8
    """adamw: the number that is added to the root of the mean square."""
    momentum: float = 0.9
    """momentum: the share of the last step's direction that is kept."""
    weight_decay: float = 0.0
    """The share of a parameter, times the learning rate, that an update takes off (adamw), or that is added to the gradient."""
    decay: str = "matrices"
    """First order: the parameters that ``weight_decay`` reaches: matrices (all but norms and biases, as in transformers'
    Trainer) or all. Zeroth order spares the original's names: those with bias, layer_norm or layernorm in them."""
    schedule: str = "constant"
    """The learning rate's way after ``warmup_steps``, by transformers' names: it stays (constant), or falls."""
    warmup_steps: int | float = 0
    """Steps over which the learning rate climbs from 0 to its highest; below 1, a share of ``total_steps``."""
    total_steps: int = 0
    """Steps that the schedule spans; 0: those of the run."""
    min_ratio: float = 0.0
    """The learning rate at the schedule's end, as a share of the highest."""
    cycles: int = 1
    """cosine_with_restarts: the times that the rate falls from its highest."""
    power: float = 1.0
    """polynomial: the power of the share of steps that are left."""
    cooldown_steps: int | float = 0.1
    """warmup_stable_decay: the last steps, in which the rate falls along half a cosine; below 1, a share of ``total_steps``."""
    max_grad_norm: float = 0.0
    """The global norm that the gradient is clipped to, with zeroth order the magnitude of each projected gradient; 0 switches
    clipping off."""


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """The time of updates and their rounding (``update.*``)."""

    timing: Timing = Timing.STEP
    """The time of a block's update: its turn of the backward walk, the step's end, or (zeroth order) deferred to its next
    fetch."""
    flush_every: int = 1
    """Deferred updates: a block is written back every this many steps; in between, entries wait and are applied at fetch."""
    rounding: str = "stochastic"
    """The rounding of a 16- or 8-bit master after an update: stochastic (counter-based, reproducible) or nearest."""

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
    """The forwards of a step, and what is made of their losses: two-point estimates are spsa (MeZO)."""
    target: str = "weights"
    """weights, or scales: those of matrices that ``trainable`` keeps in 4- or 8-bit codes, which stay as they are, as does
    everything else."""
    epsilon: float = 1e-3
    """The size of the perturbation: losses are taken at the parameters plus and minus epsilon times the noise."""
    queries: int = 1
    """Independent directions a step: q pairs for spsa, N one-sided losses for fzoo."""
    noise: str = "gaussian"
    """gaussian, rademacher, lowrank (a matrix's noise is a product of thin factors), torch (the original's draws), or mezo (the
    original's draws and its in-place arithmetic)."""
    noise_rank: int = 1
    """lowrank: the columns of the factors."""
    noise_interval: int = 1
    """lowrank: steps for which the factor of a matrix's inputs stays (50 to 100 in LOZO)."""
    seed_pool: int = 0
    """Directions that a run draws its queries from, so that K numbers say what it learnt; 0: every query has its own."""
    hessian_alpha: float = 1e-8
    """HiZOO's smoothing of the diagonal curvature; 0 would leave it inert."""
    hessian_codec: Codec = Codec.FP32
    """The codec that HiZOO's curvature is kept in: fp32, bf16 or fp16."""
    rounding: str = "nearest"
    """The rounding of perturbed weights to a forward's 16 bits: nearest, or stochastic, by the same draws in all forwards of a
    step: an epsilon far below a weight's last place then moves it in expectation."""
    objective: str = "loss"
    """loss, label_words, accuracy or f1; a Python function may be given to the walker instead."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The cache that keeps forward-gathered parameters for the backward walk (``cache.*``)."""

    tier: str = "none"
    """The tier on which slices of parameters over the group of ``trainable`` stay from one use to the next, where optimizer
    states are spread over more ranks: host (fcdp) or device (zeropp; hzp, whose none is the device as well). none: every use
    gathers them from all ranks (zero3, mics)."""
    threshold: float = 0.0
    """Adaptive cache, ``tier: host``: a rank's slice of a gathered block stays on the device instead of going to the host where
    the device's use, all that time and with every op's transients, stays within this share of the budget (0 to 1)."""


@dataclass(frozen=True, slots=True)
class MeshSettings:
    """The ranks (``mesh.*``): sizes of named axes. Over ``node``, ``world`` and ``groups`` state is spread, as its placement
    says; over ``data`` and ``perturb`` a zeroth-order step's work is shared."""

    data: int = 1
    """Parts that the global batch is cut into, the outer axis."""
    perturb: int = 1
    """Ranks that share the forwards of a step, the inner axis: neighbours."""
    check_every: int = 100
    """Steps between comparisons of the weights, and of the optimizer's states, that ranks hold copies of: the run ends where
    two differ. Backpropagation compares them before every checkpoint as well."""
    groups: tuple[str, ...] = ()
    """Further groups of neighbours that placements may name, beside node and world, as name=ranks: [half=4, island=16]. Each
    size divides the next larger one."""
    ranks_per_node: int = 1
    """Ranks that share a machine; the launcher says how many."""
    world: int = 1
    """All ranks; the launcher says how many."""
