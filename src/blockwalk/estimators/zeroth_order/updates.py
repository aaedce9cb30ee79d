"""Zeroth-order updates: one entry of the ledger applied to one parameter, the same function wherever and whenever it runs.

The rule is a value, an :class:`~blockwalk.checkpoints.ledger.Entry` holds every scalar that it reads, and the noise is
generated again; so an update can wait, be applied to any slice, or be replayed from a file. Everything is float32, each
product and sum rounded by itself, d = Σ cᵢ·zᵢ with cᵢ = gᵢ/q:

    sgd        θ ← θ·(1 − η·λ), then θ ← θ + (−η·cᵢ)·zᵢ for each query in turn
    sign, momentum, adamw      as :mod:`blockwalk.numerics.updates` has them, with the gradient d
    hizoo      H ← (1 − α)·H + Σ (α·hᵢ/q)·zᵢ²·H first, and zᵢ/√H with the new H in place of zᵢ

λ is the weight decay, which spares parameters whose name contains "bias", "layer_norm" or "layernorm". A parameter in 16
or 8 bits is decoded, updated and encoded again, scales anew, entry by entry: as if every step had stored it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from blockwalk.checkpoints.ledger import Entry
from blockwalk.numerics.noise.key import NoiseKey, NoiseKind
from blockwalk.numerics.noise.noise import add_scaled_, fill_
from blockwalk.numerics.scratch import LossScratch
from blockwalk.numerics.updates import Rule, make_rule
from blockwalk.plan.choices import OptimizerSettings
from blockwalk.plan.plan import Plan
from blockwalk.plan.sizes import UPDATE_ELEMENTS

if TYPE_CHECKING:
    from blockwalk.engine.cells import Cell
    from blockwalk.numerics.codecs.layout import Layout


UNDECAYED = ("bias", "layer_norm", "layernorm")
HESSIAN = "hessian"


@dataclass(frozen=True, slots=True)
class ZerothOrderRule:
    """What turns an entry into an update: all that a replay must know beside the entries."""

    kind: str
    """spsa, fzoo or hizoo."""
    noise: str
    optimizer: str
    betas: tuple[float, float]
    eps: float
    momentum: float
    weight_decay: float
    hessian_alpha: float
    rounding: str

    @classmethod
    def of(cls, plan: Plan) -> ZerothOrderRule:
        options = plan.optimizer
        return cls(
            kind=plan.zo.kind,
            noise=plan.zo.noise,
            optimizer=options.name,
            betas=options.betas,
            eps=options.eps,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            hessian_alpha=plan.zo.hessian_alpha,
            rounding=plan.update.rounding,
        )

    @property
    def states(self) -> tuple[str, ...]:
        """Tensors kept beside each parameter, of its shape: HiZOO's diagonal, the optimizer's moments."""
        return (*((HESSIAN,) if self.kind == "hizoo" else ()), *make_rule(self._options).states)

    @property
    def kind_of_noise(self) -> NoiseKind:
        assert self.noise in ("gaussian", "rademacher"), f"{self.noise} noise is not counter-based"
        return "gaussian" if self.noise == "gaussian" else "rademacher"

    @property
    def _options(self) -> OptimizerSettings:
        return OptimizerSettings(
            name=self.optimizer,
            betas=self.betas,
            eps=self.eps,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

    def decays(self, name: str) -> bool:
        """Whether weight decay reaches a parameter."""
        return not any(part in name for part in UNDECAYED)

    def updater(self, name: str) -> Rule:
        """The rule of :mod:`blockwalk.numerics.updates` for one parameter."""
        return make_rule(replace(self._options, weight_decay=self.weight_decay * self.decays(name)))


def apply_entries_(
    rule: ZerothOrderRule,
    entries: Sequence[Entry],
    name: str,
    cells: Mapping[str, Cell],
    scratch: LossScratch,
) -> None:
    """Bring one parameter, ``cells[""]``, and the states beside it up to date, in place, entry by entry in order."""
    cell = cells[""]
    if not entries or not cell.layout.rows * cell.layout.columns:
        return
    piece = max(1, UPDATE_ELEMENTS[cell.bytes_P.device.type] // cell.layout.columns)
    for first in range(0, cell.layout.rows, piece):
        last = min(first + piece, cell.layout.rows)
        for entry in entries:  # what the codec rounded is read again: the next entry sees what a tier would have kept
            x_RD = cell.load(first, last, scratch, "value")
            states = {state: cells[state].load(first, last, scratch, state) for state in rule.states}
            _advance_(rule, entry, name, cell.origin + first * cell.layout.columns, x_RD, states, scratch)
            for state, tensor in {"": x_RD, **states}.items():
                cells[state].save(first, tensor, _rounding(rule, entry, name, state))


def reserve(rule: ZerothOrderRule, state: str, layout: Layout, scratch: LossScratch, device: torch.device) -> None:
    """Make the buffers in which :func:`apply_entries_` will work on a parameter (or on a state beside it), so that no step
    after the first makes one."""
    like = torch.empty(0, device=device)
    elements = min(layout.rows * layout.columns, max(UPDATE_ELEMENTS[device.type], layout.columns))
    in_place = not layout.groups and layout.code_dtype == torch.float32
    names = [] if in_place else [state or "value"]
    if not state and rule.kind == "hizoo":
        names += ["z", "grown", "root"]
    if not state and rule.optimizer != "sgd":
        names.append("direction")
    for name in names:
        scratch.take(name, elements, like=like, dtype=torch.float32)


def _rounding(rule: ZerothOrderRule, entry: Entry, name: str, state: str) -> NoiseKey | None:
    """The key of the rounding draws of one tensor at one step; None rounds to nearest."""
    if rule.rounding != "stochastic":
        return None
    return NoiseKey(entry.seed, entry.step, 0, f"{name}\0{state}" if state else name, "rounding")


def _advance_(
    rule: ZerothOrderRule,
    entry: Entry,
    name: str,
    start: int,
    x_RD: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    scratch: LossScratch,
) -> None:
    """One entry on one slice: ``x_RD`` and ``states`` are float32, ``start`` is the slice's first element."""
    kind, rate = rule.kind_of_noise, entry.learning_rate
    keys = [NoiseKey(entry.seed, entry.step, query, name) for query in range(len(entry.projected_grads))]

    def take(what: str) -> torch.Tensor:
        return scratch.take(what, *x_RD.shape, like=x_RD, dtype=torch.float32)

    if rule.kind == "hizoo":
        _grow_(states[HESSIAN], entry, keys, start, rule, take("z"), take("grown"))

    def add_direction(target_RD: torch.Tensor, factor: float) -> None:
        """``target_RD`` += factor·cᵢ·zᵢ (or zᵢ/√H) for each query in turn."""
        for key, coefficient in zip(keys, entry.coefficients, strict=True):
            if rule.kind != "hizoo":
                add_scaled_(target_RD, key, start, factor * coefficient, kind)
                continue
            z_RD = fill_(take("z"), key, start, kind)
            z_RD.div_(torch.sqrt(states[HESSIAN], out=take("root")))
            target_RD.add_(z_RD.mul_(factor * coefficient))

    if rule.optimizer != "sgd":
        d_RD = take("direction").zero_()
        add_direction(d_RD, 1.0)
        moments = {state: tensor for state, tensor in states.items() if state != HESSIAN}
        rule.updater(name).apply_(x_RD, d_RD, moments, step=entry.step, lr=rate)
        return
    if rule.weight_decay and rule.decays(name):
        x_RD.mul_(1.0 - rate * rule.weight_decay)
    add_direction(x_RD, -rate)


def _grow_(
    hessian_RD: torch.Tensor,
    entry: Entry,
    keys: Sequence[NoiseKey],
    start: int,
    rule: ZerothOrderRule,
    z_RD: torch.Tensor,
    grown_RD: torch.Tensor,
) -> None:
    """H ← (1 − α)·H + Σ (α·hᵢ/q)·zᵢ²·H."""
    grown_RD.zero_()
    for key, curvature in zip(keys, entry.curvatures, strict=True):
        fill_(z_RD, key, start, rule.kind_of_noise)
        z_RD.mul_(z_RD).mul_(hessian_RD).mul_(rule.hessian_alpha * curvature / len(keys))
        grown_RD.add_(z_RD)
    hessian_RD.mul_(1.0 - rule.hessian_alpha).add_(grown_RD)


def settings_of(rule: ZerothOrderRule) -> dict[str, Any]:
    """The rule for a ledger's header: without what its kind and optimizer do not read."""
    unread = set()
    if rule.optimizer != "adamw":
        unread |= {"betas", "eps"}
    if rule.optimizer != "momentum":
        unread.add("momentum")
    if rule.kind != "hizoo":
        unread.add("hessian_alpha")
    names = [name for name in rule.__slots__ if name not in unread]
    return {name: getattr(rule, name) for name in names}


def rule_of(settings: Mapping[str, Any]) -> ZerothOrderRule:
    """The rule that a ledger's header names."""
    unread = {"betas": (0.0, 0.0), "eps": 0.0, "momentum": 0.0, "hessian_alpha": 0.0}
    return ZerothOrderRule(**{**unread, **settings, "betas": tuple(settings.get("betas", (0.0, 0.0)))})
