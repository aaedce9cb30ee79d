"""Zeroth-order updates: one entry of the ledger applied to one parameter, the same function
wherever and whenever it runs.

The rule is a value, a :class:`~blockwalk.checkpoints.ledger.LedgerEntry` holds every scalar that
it reads, and the noise is generated again; so an update can wait, be applied to any slice, or be
replayed from a file. Everything is float32, each product and sum rounded by itself, d = Σ cᵢ·zᵢ
with cᵢ = gᵢ/q:

    sgd        θ ← θ·(1 − η·λ), then θ ← θ + (−η·cᵢ)·zᵢ for each query in turn
    sign, momentum, adamw      as :mod:`blockwalk.numerics.updates` has them, with the gradient d

A kind with states brings them up to date first, and turns zᵢ into a direction of its own (its file
beside this one). λ is the weight decay, which spares parameters whose name contains "bias",
"layer_norm" or "layernorm". A parameter in 16 or 8 bits is decoded, updated and encoded again,
scales anew, entry by entry: as if every step had stored it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockwalk.checkpoints.ledger import LedgerEntry
from blockwalk.cutting.anatomy import canonical_name
from blockwalk.estimators.zeroth_order.draws import Draws, Elementwise, LowRank, add_low_rank_
from blockwalk.estimators.zeroth_order.kind import Kind, kind_of
from blockwalk.numerics import advance
from blockwalk.numerics.device import is_cpu
from blockwalk.numerics.noise import cpu
from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.numerics.noise.noise import perturbed
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.numerics.updates import Rule
from blockwalk.plan.choices import OptimizerSettings, ZerothOrderSettings
from blockwalk.plan.model_spec import ModelSpec, ParamSpec
from blockwalk.plan.noise_kinds import NOISES, NoiseFacts
from blockwalk.plan.placement import Codec
from blockwalk.plan.plan import Plan
from blockwalk.plan.sizes import UPDATE_ELEMENTS
from blockwalk.plan.update_rules import RULES, RuleFacts
from blockwalk.plan.zeroth_order_kinds import KINDS, states_beside

if TYPE_CHECKING:
    from blockwalk.cutting.cut_model import CutModel
    from blockwalk.engine.bucket_tensors import BucketTensor
    from blockwalk.numerics.codecs.layout import Layout


UNDECAYED = ("bias", "layer_norm", "layernorm")


@dataclass(frozen=True)
class ZerothOrderRule:
    """The rule that turns an entry into an update: all that a replay must know beside the
    entries."""

    zo: ZerothOrderSettings
    optimizer: OptimizerSettings
    rounding: str
    noise: NoiseFacts
    """The row of the noise."""
    facts: RuleFacts
    """The row of the update rule."""
    draws: Draws = field(compare=False)

    @classmethod
    def of(cls, plan: Plan, parameters: Mapping[str, ParamSpec]) -> ZerothOrderRule:
        """Return the rule of a plan, for these trainables."""
        draws = Draws(plan.zo, parameters, plan.update.flush_every)
        rounding = plan.update.rounding
        return cls(plan.zo, plan.optimizer, rounding, plan.noise, plan.update_rule, draws)

    @cached_property
    def kind(self) -> Kind:
        """The kind of the run."""
        return kind_of(self.zo.kind)

    @property
    def trains_scales(self) -> bool:
        """True where the scales of codes are trained, and not the codes."""
        return self.zo.target == "scales"

    @property
    def states(self) -> dict[str, tuple[Codec, float]]:
        """Tensors kept beside each parameter, of its shape: codec and first value."""
        return states_beside(self.zo, self.optimizer)

    def decays(self, name: str) -> bool:
        """Return whether weight decay reaches a parameter."""
        return not any(part in name for part in UNDECAYED)

    def updater(self, name: str) -> Rule:
        """Return the rule of :mod:`blockwalk.numerics.updates` for one parameter."""
        return Rule(
            replace(self.optimizer, weight_decay=self.optimizer.weight_decay * self.decays(name))
        )


def trained_in_order(cut: CutModel, spec: ModelSpec) -> dict[str, ParamSpec]:
    """Return the trainables of a model by canonical name, in the order of the deduplicated
    ``named_parameters()``: that of torch's draws. Those that are none of its modules', as prefixes,
    come last."""
    trained = {p.name: p for p in spec.params(trainable=True)}
    named = [canonical_name(name, cut.adapters) for name, _ in cut.model.named_parameters()]
    return {name: trained[name] for name in (*(n for n in named if n in trained), *trained)}


def apply_entries_(
    rule: ZerothOrderRule,
    entries: Sequence[LedgerEntry],
    name: str,
    tensors: Mapping[str, BucketTensor],
    scratch: ScratchArena,
) -> None:
    """Bring one parameter, ``tensors[""]``, and the states beside it up to date, in place, entry by
    entry in order."""
    if rule.trains_scales:
        tensors = {} if tensors[""].dense else {"": tensors[""].scales}
    master = tensors.get("")
    if master is None or not entries or not master.layout.rows * master.layout.columns:
        return
    piece = max(1, UPDATE_ELEMENTS[master.bytes_P.device.type] // master.layout.columns)
    for start in range(0, master.layout.rows, piece):
        stop = min(start + piece, master.layout.rows)
        # what the codec rounded is read again: the next entry sees what a tier would have kept
        for entry in entries:
            x_RD = master.load(start, stop, scratch, "value")
            states = {s: tensors[s].load(start, stop, scratch, s) for s in rule.states}
            _advance_(
                rule,
                entry,
                name,
                master.origin + start * master.layout.columns,
                x_RD,
                states,
                scratch,
            )
            for state, tensor in {"": x_RD, **states}.items():
                tensors[state].save(start, tensor, _rounding(rule, entry, name, state))


def apply_all_(
    rule: ZerothOrderRule,
    entries: Sequence[LedgerEntry],
    params: Iterable[tuple[str, Mapping[str, BucketTensor]]],
    scratch: ScratchArena,
) -> None:
    """Bring the parameters of a unit, or ranges of them, up to date: all plain numbers in one call,
    and on an accelerator each matrix of eight-bit codes in one, where the update is a sum of the
    queries' noise."""
    params = list(params)
    if not params or not entries:
        return
    device = params[0][1][""].bytes_P.device
    if not fuses(rule, device):
        for name, tensors in params:
            apply_entries_(rule, entries, name, tensors, scratch)
        return
    shared = (
        len(entries),
        len(entries[0].projected_grads),
        rule.rounding == "stochastic",
        rule.noise.element,
    )
    scales_of = [[-e.learning_rate * c for c in e.coefficients] for e in entries]
    masters = []
    starts = []
    words = []
    factors = []
    for name, tensors in params:
        master = tensors[""]
        if not master.bytes_P.numel():
            continue
        if not master.dense and is_cpu(device):
            apply_entries_(rule, entries, name, tensors, scratch)
            continue
        own_words: list[int] = []
        own_factors: list[float] = []
        for entry, scales_Q in zip(entries, scales_of, strict=True):
            own_words += _words(rule, entry, name)
            own_factors.append(_decay(rule, entry, name))
            own_factors += scales_Q
        if not master.dense:
            scales = master.layout.scales(master.bytes_P)
            torch.ops.blockwalk.advance_rows_(
                scales,
                master.codes,
                master.layout.codec,
                master.origin,
                own_words,
                own_factors,
                *shared,
            )
            continue
        masters.append(master.codes)
        starts.append(master.origin)
        words += own_words
        factors += own_factors
    if masters:
        torch.ops.blockwalk.advance_(masters, [], starts, words, factors, *shared)


def fuses(rule: ZerothOrderRule, device: torch.device) -> bool:
    """Return whether a call serves many parameters, where nothing but the noise goes into an
    update: on an accelerator, and on a processor with a kernel, for steps of one query."""
    kind = rule.kind
    plain = rule.facts.linear and kind.direction_ is None and kind.advance_ is None
    if not plain or rule.trains_scales or not rule.noise.elementwise:
        return False
    return not is_cpu(device) or (cpu.has_runs() and advance.in_one_pass(rule.zo.queries))


def _words(rule: ZerothOrderRule, entry: LedgerEntry, name: str) -> list[int]:
    """Return the keys of an entry that an operator takes for one parameter, as signed words: the
    rounding's, then the queries'."""
    rounding = _rounding(rule, entry, name, "")
    words = [0, 0] if rounding is None else [*rounding.signed]
    for query in range(len(entry.projected_grads)):
        noise = rule.draws(entry.seed, entry.step, query, name)
        assert isinstance(noise, Elementwise)
        words += noise.key.signed
    return words


def _decay(rule: ZerothOrderRule, entry: LedgerEntry, name: str) -> float:
    """Return the factor that an entry's weight decay multiplies one parameter by."""
    weight_decay = rule.optimizer.weight_decay
    return 1.0 - entry.learning_rate * weight_decay if weight_decay and rule.decays(name) else 1.0


def reserve(
    rule: ZerothOrderRule, state: str, layout: Layout, scratch: ScratchArena, device: torch.device
) -> None:
    """Make the buffers in which :func:`apply_entries_` will work on a parameter (or on a state
    beside it), so that no step after the first makes one."""
    like = torch.empty(0, device=device)
    elements = min(layout.rows * layout.columns, max(UPDATE_ELEMENTS[device.type], layout.columns))
    in_place = not layout.groups and layout.code_dtype == torch.float32
    names = [] if in_place else [state or "value"]
    if not state:
        names += rule.kind.buffers or ("z",) * (not rule.noise.elementwise)
    if not state and not rule.facts.linear:
        names.append("direction")
    for name in names:
        scratch.take(name, elements, like=like, dtype=torch.float32)


def _rounding(rule: ZerothOrderRule, entry: LedgerEntry, name: str, state: str) -> NoiseKey | None:
    """Return the key of the rounding draws of one tensor at one step; None rounds to nearest."""
    if rule.rounding != "stochastic":
        return None
    return NoiseKey(entry.seed, entry.step, 0, f"{name}\0{state}" if state else name, "rounding")


def _advance_(
    rule: ZerothOrderRule,
    entry: LedgerEntry,
    name: str,
    start: int,
    x_RD: Tensor,
    states: Mapping[str, Tensor],
    scratch: ScratchArena,
) -> None:
    """One entry on one slice: ``x_RD`` and ``states`` are float32, ``start`` is the slice's first
    element."""
    kind = rule.kind
    rate = entry.learning_rate
    noises = [
        rule.draws(entry.seed, entry.step, query, name)
        for query in range(len(entry.projected_grads))
    ]

    def take(what: str) -> Tensor:
        return scratch.take(what, *x_RD.shape, like=x_RD, dtype=torch.float32)

    if kind.advance_ is not None:
        kind.advance_(
            rule.zo, entry, (noise.fill_(take("z"), start) for noise in noises), states, take
        )

    def add_direction(target_RD: Tensor, factor: float) -> None:
        """``target_RD`` += factor·cᵢ·zᵢ for each query in turn, with the kind's direction in place
        of zᵢ."""
        low_rank = [noise for noise in noises if isinstance(noise, LowRank)]
        if kind.direction_ is None and low_rank:
            scales = [factor * coefficient for coefficient in entry.coefficients]
            add_low_rank_(target_RD, low_rank, scales, start)
            return
        for noise, coefficient in zip(noises, entry.coefficients, strict=True):
            if kind.direction_ is None and isinstance(noise, Elementwise):
                perturbed(target_RD, target_RD, noise.key, start, factor * coefficient, noise.kind)
                continue
            z_RD = noise.fill_(take("z"), start)
            if kind.direction_ is not None:
                kind.direction_(z_RD, states, take)
            target_RD.add_(z_RD.mul_(factor * coefficient))

    if not rule.facts.linear:
        d_RD = take("direction").zero_()
        add_direction(d_RD, 1.0)
        moments = {state: states[state] for state in rule.facts.states}
        rule.updater(name).apply_(x_RD, d_RD, moments, step=entry.step, lr=rate)
        return
    if rule.optimizer.weight_decay and rule.decays(name):
        x_RD.mul_(1.0 - rate * rule.optimizer.weight_decay)
    add_direction(x_RD, -rate)


def settings_of(plan: Plan) -> dict[str, Any]:
    """Return the rule for a ledger's header: without what its kind and optimizer do not read."""
    zo = plan.zo
    default = ZerothOrderSettings()
    changed = {
        name: getattr(zo, name)
        for name in (*plan.noise.settings, "target")
        if getattr(zo, name) != getattr(default, name)
    }
    return {
        "kind": zo.kind,
        "noise": zo.noise,
        "optimizer": plan.optimizer.name,
        **{name: getattr(plan.optimizer, name) for name in plan.update_rule.settings},
        **{name: getattr(zo, name) for name in plan.kind.settings},
        **changed,
        "rounding": plan.update.rounding,
    }


def codecs_of(plan: Plan) -> dict[str, str | None]:
    """Return the codecs of the states of every kind for a ledger's header; None for those that this
    kind does not keep."""
    kept = [codec for codec, _ in plan.kind.states.values()]
    codecs = [codec for kind in KINDS.values() for codec, _ in kind.states.values()]
    return {codec: str(getattr(plan.zo, codec)) if codec in kept else None for codec in codecs}


def rule_of(
    header: Mapping[str, Any], parameters: Mapping[str, ParamSpec], steps: int
) -> ZerothOrderRule:
    """Return the rule that a ledger's header names, for these trainables and so many entries.

    Raises:
        ValueError: its kind or its optimizer is unknown here.
    """
    written = header["rule"]
    kind_of(written["kind"])
    Rule(OptimizerSettings(name=written["optimizer"]))
    kind = KINDS[written["kind"]]
    noise = NOISES[written["noise"]]
    facts = RULES[written["optimizer"]]
    required = ("kind", "noise", *kind.settings)
    optional = ("target", *noise.settings)
    settings: dict[str, Any] = {name: written[name] for name in required}
    settings |= {name: written[name] for name in optional if name in written}
    settings |= {name: Codec(header[name]) for name, _ in kind.states.values()}
    options: dict[str, Any] = {n: written[n] for n in facts.settings}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    zo = ZerothOrderSettings(**settings)
    optimizer = OptimizerSettings(written["optimizer"], **options)
    draws = Draws(zo, parameters, steps)
    return ZerothOrderRule(zo, optimizer, written["rounding"], noise, facts, draws)
