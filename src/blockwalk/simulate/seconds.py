"""Seconds of one op of a program on a machine. See ``docs/cost-model.md``.

An op's seconds are a sum of non-negative terms that each fall with one rate of the hardware, so a
faster part can never make a step slower. Nothing here imports torch."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from blockwalk.plan.losses import LossCall
from blockwalk.plan.mesh import make_axes, named, ranks_over, reach
from blockwalk.plan.model_spec import ModelSpec, UnitSpec
from blockwalk.plan.placement import DTYPE_BYTES, StateKind, Tier
from blockwalk.plan.plan import Plan
from blockwalk.plan.work import NOTHING, Work
from blockwalk.program.costs import Costs, TimedOp
from blockwalk.program.flat_layout import hosts_node_slice
from blockwalk.program.handover import RECEIVES, SENDS
from blockwalk.program.program import COMPUTES, Bytes, Lane, Op, OpKind, Pool, Program
from blockwalk.program.residence import Residence, landed, link_of_tier, resolve, tier_of
from blockwalk.program.state_sizes import compute_dtype, epilogue_reads
from blockwalk.program.unit_sizes import UnitSizes
from blockwalk.simulate.hardware import BLOCK_OPS, Hardware, Link

NO_COSTS = Costs()

STAGES = (*SENDS.values(), *RECEIVES.values())
"""The lanes between neighbouring stages of a pipeline."""

TRAFFIC = 4
"""Bytes that a block's element-wise work reads and writes, as a multiple of the most that it holds
at once: where only that is known."""

HOST_MEMORY = 2e10
"""Bytes/s of a processor's memory behind an accelerator, where it updates what lies there. A guess:
no hardware file has it."""

LAZY_STARTS = 9
"""Operations that the host could start while it decodes or perturbs a matrix that is read: one that
it does start, and Python (an H200's host, commit 12f79d11)."""

UPDATE_STARTS = 6
"""Operations that the update of one parameter by its gradient starts (the same)."""


def is_started(op: Op) -> bool:
    """Return whether the host starts an op on an accelerator, an operation at a time."""
    return op.kind in COMPUTES or op.kind is OpKind.UPDATE or op.kind.facts.draws


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of an op on a machine.

    A compute op takes the seconds that its like took on this machine, where ``costs`` has them.
    Else they are a roofline's: its FLOPs, its bytes and its start, each at one rate of the machine,
    and the decoding and perturbing of the weights that it reads."""

    plan: Plan
    model: ModelSpec
    hardware: Hardware
    costs: Costs = NO_COSTS
    program: Program | None = None
    _timed: Mapping[TimedOp, float] = field(init=False, repr=False, default_factory=dict)
    _lost: Mapping[int, float] = field(init=False, repr=False, default_factory=dict)
    """Seconds that each op of a unit loses, on a processor, to the copies of its lanes, which take
    a core."""
    _accumulated: Mapping[int, float] = field(init=False, repr=False, default_factory=dict)
    """Seconds in which a reduction, by its number, brings what host memory behind an accelerator
    has of its sum, and takes it there again."""

    _resolved: dict[tuple[int, StateKind], Residence] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """The residences, once one was asked for."""
    _in_files: list[int] = field(init=False, repr=False, compare=False, default_factory=list)
    """The bytes that files hold, once they were asked for."""
    _landed: frozenset[int] = field(init=False, repr=False)
    """Units whose masters the processor behind an accelerator updates."""

    def __post_init__(self) -> None:
        units = landed(self.plan, self.model, self.hardware.device)
        object.__setattr__(self, "_landed", frozenset(units))
        if self.program is not None and self.hardware.device == "cpu":
            object.__setattr__(self, "_lost", self._losses(self.program))
        trained = (u for u, unit in enumerate(self.model.units) if unit.numel(trainable=True))
        if self.program is not None and any(
            self._crosses(unit, StateKind.GRADIENT) for unit in trained
        ):
            object.__setattr__(self, "_accumulated", self._sums_on_host(self.program))
        object.__setattr__(self, "_timed", dict(self.costs.timed))

    def _losses(self, program: Program) -> dict[int, float]:
        copied: Counter[int] = Counter()
        for op in program.ops:
            in_host_memory = self.link_of(op) == ""
            if op.kind in (OpKind.FETCH, OpKind.STORE) and (self._is_bucket(op) or in_host_memory):
                copied[op.unit] += op.nbytes
        turns = Counter(op.unit for op in program.ops if op.kind in COMPUTES)
        rate = self.hardware.host_to_device.bandwidth
        return {unit: nbytes / rate / turns[unit] for unit, nbytes in copied.items() if turns[unit]}

    def _residence(self, unit: int, kind: StateKind) -> Residence:
        """Return the residence of a kind of state of a unit."""
        if not self._resolved:
            sizes = UnitSizes(self.plan, self.model, self.hardware.device)
            self._resolved.update(resolve(sizes))
        return self._resolved[unit, kind]

    def _crosses(self, unit: int, kind: StateKind) -> bool:
        """Return whether an update's gradients or states cross the link of the host."""
        residence = self._residence(unit, kind)
        return residence.facts.crosses(residence.tier, self.hardware.device)

    def _sums_on_host(self, program: Program) -> dict[int, float]:
        """Return the seconds of :attr:`_accumulated`: the first sum of a unit goes there, the last
        one comes to be completed, and those between do both."""
        ranks = self.plan.gradient_ranks
        axes = make_axes(self.plan.mesh)
        sums = defaultdict[int, list[Op]](list)
        for op in program.ops:
            if op.kind is OpKind.REDUCE and op.buffer >= 0:
                _, outer = reach(named(axes, op.axes))
                if outer == ranks:
                    sums[op.unit].append(op)
        down = self.hardware.device_to_host
        up = self.hardware.host_to_device
        seconds: dict[int, float] = {}
        for unit, ops in sums.items():
            nbytes = 4 * self.model.units[unit].numel(trainable=True) // ranks
            for place, op in enumerate(ops):
                goes = down.seconds(nbytes) if place < len(ops) - 1 else 0.0
                comes = up.seconds(nbytes) if place else 0.0
                seconds[op.index] = goes + comes
        return seconds

    def seconds(self, op: Op) -> float:
        """Return seconds of one op on its lane."""
        hw = self.hardware
        if op.lane is Lane.COMPUTE or op.kind is OpKind.UPDATE:
            return self._compute(op)
        match op.lane:
            case Lane.FETCH | Lane.UPDATE:
                return self._moves(op, hw.host_to_device, hw.reads)
            case Lane.STORE:
                return self._moves(op, hw.device_to_host, hw.writes)
        link = hw.intra if self._inside_node(op.lane) else hw.inter
        seconds = self._between_ranks(op.lane, op.nbytes) + self._rounds(op) * link.latency
        if op.refreshes and hosts_node_slice(self.plan):  # made on the device
            seconds += hw.device_to_host.seconds(op.transient)
        return seconds + self._accumulated.get(op.index, 0.0)

    # ---- the host's lane -------------------------------------------------------------------------

    def host_seconds(self, op: Op) -> float:
        """Return seconds in which the host starts an op's operations on an accelerator: those of a
        turn, and of each operation."""
        hw = self.hardware
        if not is_started(op) or not hw.host_start_seconds + hw.host_turn_seconds:
            return 0.0
        return hw.host_turn_seconds + self.starts(op) * hw.host_start_seconds

    def starts(self, op: Op) -> int:
        """Return the number of operations that the host starts for an op."""
        if op.kind in COMPUTES:
            work = self.work(op)
            known = BLOCK_OPS if work == NOTHING else work.starts
            return known + self._starts_of_weights(op)
        whole = op.kind is not OpKind.UPDATE
        params = self.model.params() if whole else self.model.units[op.unit].params
        trained = sum(param.trainable for param in params)
        if self.plan.estimator.facts.ledger:
            return trained * max(op.entries, 1) * self.plan.zo.queries
        return UPDATE_STARTS * trained

    def _starts_of_weights(self, op: Op) -> int:
        """Return the operations that the host could start while an op's weights are decoded, or
        perturbed, as they are read."""
        codec = self.plan.frozen.codec
        params = self.reads(op.unit).params
        frozen = [param for param in params if not param.trainable]
        encoded = sum(param.stored_in(codec).encoded for param in frozen)
        starts = LAZY_STARTS * self._readings(op) * encoded
        if self._draws(op):
            trained = [param for param in params if param.trainable]
            matrices = sum(param.quantizable for param in trained)
            starts += len(op.passes) * (LAZY_STARTS * matrices + len(trained) - matrices)
        return starts

    def _between_ranks(self, lane: Lane, nbytes: int) -> float:
        """Return seconds of bytes that a rank sends to others."""
        hw = self.hardware
        if self._inside_node(lane):
            return hw.intra.seconds(nbytes)
        # A node's ranks share its link to the others.
        sharing = min(self.plan.mesh.ranks_per_node, hw.devices_per_node)
        return hw.inter.seconds(nbytes * sharing)

    def _inside_node(self, lane: Lane) -> bool:
        """Return whether a lane's link is a node's own: the next stage may be on another node."""
        mesh = self.plan.mesh
        return lane is Lane.INTRA or (lane in STAGES and mesh.stage_ranks < mesh.ranks_per_node)

    @property
    def dtype(self) -> str:
        """The dtype that blocks compute in."""
        return compute_dtype(self.plan, self.model)

    def work_seconds(self, work: Work) -> float:
        """Return seconds of operations in the compute dtype, one after the other."""
        hw = self.hardware
        flops = hw.flops_of(self.dtype)
        attention = work.attention / hw.attention.get(self.dtype, flops)
        return work.products / flops + attention + work.touched / hw.memory_bandwidth

    # ---- the compute lane ------------------------------------------------------------------------

    def _compute(self, op: Op) -> float:
        hw = self.hardware
        seconds = self._seconds_of_like(op)
        if seconds is not None:
            return seconds + self._sent(op)
        if op.kind in COMPUTES:
            return self._walks(op) + self._sent(op)
        if op.kind is OpKind.UPDATE and self.plan.estimator.facts.ledger:
            return self._ledger_update(op)
        if op.kind is OpKind.UPDATE:
            return self._gradient_update(op)
        if op.kind.facts.draws:
            return self.model.numel(trainable=True) / hw.noise_rate
        if op.kind is OpKind.NORM:
            return 4 * self.model.numel(trainable=True) / hw.memory_bandwidth
        return 0.0

    def _seconds_of_like(self, op: Op) -> float | None:
        """Return seconds that an op of the kind took on this machine with a unit of the kind. Where
        a block was timed with a kept graph alone, or without one alone, its backward has a forward
        more or less."""
        if not self._timed:
            return None
        kind = self.model.units[op.unit].kind
        seconds = self._timed.get((op.kind, kind, op.keep_graph))
        if seconds is not None:
            return seconds
        seconds = self._timed.get((op.kind, kind, not op.keep_graph))
        if seconds is None or op.kind is not OpKind.BACKWARD:
            return seconds
        forward = self._timed.get((OpKind.FORWARD, kind, not op.keep_graph), 0.0)
        return max(seconds - forward, 0.0) if op.keep_graph else seconds + forward

    def _sent(self, op: Op) -> float:
        """Return seconds of what an op sends to other ranks while it computes."""
        return sum(self._between_ranks(sent.lane, sent.nbytes) for sent in op.sent)

    def _ledger_update(self, op: Op) -> float:
        """Return seconds of applying entries of a ledger to a unit, or to a rank's slice of it:
        their noise is drawn again."""
        hw = self.hardware
        elements = float(self.model.units[op.unit].numel(trainable=True))
        if op.lane is Lane.INTRA:  # each rank its slice, before the gather
            elements /= self.plan.parameter_ranks
        seconds = elements / hw.noise_rate * self.plan.zo.queries
        seconds += self._narrowed(elements)
        if not self.plan.update_rule.linear:
            seconds += self._updated(elements)
        return hw.idle_seconds + max(op.entries, 1) * seconds

    def _gradient_update(self, op: Op) -> float:
        """Return seconds of updating a unit, or a rank's slice of it, with its gradients."""
        hw = self.hardware
        unit = self.model.units[op.unit]
        elements = unit.numel(trainable=True) / self.plan.optimizer_ranks
        copied = 0.0
        if self.plan.update.at_turn:  # the old values are copied first
            copied = 8 * (1 + len(self.plan.update_rule.states)) * elements
        tier = self.plan.optimizer_state.tier.facts
        if op.lane is Lane.UPDATE:
            return hw.idle_seconds + (copied + self._touched(elements)) / HOST_MEMORY
        if self._crosses(op.unit, StateKind.OPTIMIZER):
            seconds = hw.idle_seconds + (copied + self._touched(elements)) / HOST_MEMORY
            seconds += hw.device_to_host.seconds(4 * elements)  # gradients
            seconds += hw.host_to_device.seconds(DTYPE_BYTES[self.dtype] * elements)
            if tier.link:
                states = 4 * (1 + len(self.plan.update_rule.states)) * elements
                seconds += hw.reads(tier.link).seconds(states)
                seconds += hw.writes(tier.link).seconds(states)
            return seconds
        seconds = hw.idle_seconds + self._updated(elements) + self._narrowed(elements)
        return seconds + copied / hw.memory_bandwidth

    def work(self, op: Op) -> Work:
        """Return the operations of an op on the compute lane, as far as its unit's costs are
        known."""
        cost = self.costs.of(self.model.units[op.unit].kind)
        match op.kind:
            case OpKind.PROLOGUE | OpKind.FORWARD:
                return cost.forward * len(op.passes)
            case OpKind.BACKWARD if op.keep_graph:
                return cost.backward
            case OpKind.BACKWARD:
                return cost.backward + cost.again
            case OpKind.LOSS:
                return cost.forward + cost.backward
            case OpKind.PROLOGUE_BACKWARD:
                return cost.backward
        return NOTHING

    def _walks(self, op: Op) -> float:
        """Return seconds of an op that computes with a unit's parameters."""
        work = self.work(op)
        prologue = op.kind in (OpKind.PROLOGUE, OpKind.PROLOGUE_BACKWARD)
        if work == NOTHING and not prologue:
            work = Work(op.flops, touched=TRAFFIC * op.transient)
        seconds = self.hardware.idle_seconds + self.work_seconds(work)
        seconds += self._lost.get(op.unit, 0.0)
        if op.kind is OpKind.FORWARD:  # a graph in file maps is copied there
            seconds += 2 * _of_pool(op.takes, Pool.MAPPED) / self.hardware.memory_bandwidth
        return seconds if prologue else seconds + self._weights(op)

    def _weights(self, op: Op) -> float:
        """Return seconds of reading a unit's weights: decoded as often as they are read, and
        perturbed."""
        hw = self.hardware
        unit = self.reads(op.unit)
        seconds = unit.numel() * DTYPE_BYTES[self.dtype] / hw.memory_bandwidth
        if codes := unit.decoded(self.plan.frozen.codec):
            seconds += self._readings(op) * codes / hw.decodes(self.plan.frozen.codec)
        if self._draws(op):
            seconds += unit.numel(trainable=True) / hw.noise_rate
        return seconds

    def _draws(self, op: Op) -> bool:
        """Return whether an op perturbs the trainable weights that it reads."""
        walks_back = self.plan.estimator.facts.walks_back
        drawn = self.plan.noise.drawn_in_forwards and not walks_back
        return drawn and not self._finds_copy(op)

    def _readings(self, op: Op) -> int:
        """Return the number of times that an op goes through its unit's weights."""
        if op.kind is OpKind.LOSS and self.plan.estimator.facts.walks_back:
            return self.head_reads()
        return 2 if op.kind is OpKind.BACKWARD and not op.keep_graph else 1

    def _finds_copy(self, op: Op) -> bool:
        """Return whether a zeroth-order forward finds its block, or a loss its head, perturbed
        already, for an earlier micro-batch of its pass."""
        copied = {
            OpKind.LOSS: self.plan.loss_facts.by_chunks,
            OpKind.FORWARD: self.plan.copies_blocks,
        }
        return op.micro_batch >= self.plan.mesh.data and copied.get(op.kind, False)

    def reads(self, index: int) -> UnitSpec:
        """Return a unit with the tied head that its turn reads."""
        is_epilogue = index > len(self.model.blocks)
        return epilogue_reads(self.model) if is_epilogue else self.model.units[index]

    def head_reads(self) -> int:
        """Return the number of times that a loss with gradient goes through the head."""
        if self.program is None:
            return 1
        shape = self.program.shape
        call = LossCall(
            shape.batch,
            shape.sequence,
            self.model.hidden_size,
            self.model.vocab_size,
            DTYPE_BYTES[self.dtype],
            self.hardware.device,
        )
        return self.plan.loss_facts.cost(call).head_reads

    def _updated(self, elements: float) -> float:
        """Return seconds of the update rule on so many elements."""
        return self._touched(elements) / self.hardware.memory_bandwidth

    def _touched(self, elements: float) -> float:
        """Count the bytes that the update rule reads and writes for so many elements."""
        return 4 * (3 + 2 * len(self.plan.update_rule.states)) * elements

    def _narrowed(self, elements: float) -> float:
        """Return seconds to lift a 16-bit master's elements to float32 a chunk at a time, and to
        write them back."""
        codec = self.plan.trainable.codec
        size = 1 if codec.encoded else DTYPE_BYTES[codec.dtype_of(self.dtype)]
        return 2 * (size + 4) * elements / self.hardware.memory_bandwidth if size < 4 else 0.0

    # ---- the links -------------------------------------------------------------------------------

    def link_of(self, op: Op) -> str | None:
        """Return the name of the link between host memory and the bytes of a FETCH or STORE, as a
        hardware file has it. It is empty where they lie in host memory, as masters do that the
        processor behind an accelerator updates, and slices of a plan that gathers; None where they
        are on the device."""
        if op.unit in self._landed and op.part in (StateKind.TRAINABLE, StateKind.GRADIENT):
            return ""
        if op.of_graph or op.part is StateKind.ACTIVATION:
            return link_of_tier(self.plan.activation.tier)
        if self.plan.home.link is not None:
            return self.plan.home.link
        kind = "optimizer_state" if op.part is StateKind.OPTIMIZER else op.part or "trainable"
        tier: Tier = getattr(self.plan, kind).tier
        return link_of_tier(tier_of(tier, op.unit, len(self.model.units)))

    def _moves(self, op: Op, link: Link, slow: Callable[[str], Link]) -> float:
        """Return seconds of a copy between the device and its tier. To a processor the page cache
        is there; what it cannot hold is read or written."""
        name = self.link_of(op)
        if not op.nbytes or name is None:
            return 0.0
        if self.hardware.device != "cpu":
            return link.seconds(op.nbytes) + (slow(name).seconds(op.nbytes) if name else 0.0)
        if name and not self._cached(op):
            return slow(name).seconds(op.nbytes)
        # A graph was written by the compute lane, which reads it where it lies.
        return 0.0 if op.of_graph else link.seconds(op.nbytes)

    def _cached(self, op: Op) -> bool:
        """Return whether the page cache serves an op: where it holds all that is stored, but for
        buckets of parameters, which go past it."""
        return not self._is_bucket(op) and self._stored() <= self.hardware.host_bytes // 2

    def _is_bucket(self, op: Op) -> bool:
        part = self._residence(op.unit, StateKind.OPTIMIZER).facts.within
        return part is not None and part is op.part

    def _stored(self) -> int:
        """Return bytes that a processor's page cache would have to hold; counted once."""
        if not self._in_files:
            self._in_files.append(self._count_in_files())
        return self._in_files[0]

    def _count_in_files(self) -> int:
        sizes = UnitSizes(self.plan, self.model, self.hardware.device)
        nbytes = 0
        for number, unit in enumerate(self.model.units):
            nbytes += unit.nbytes(self.plan.frozen.codec, trainable=False)
            nbytes += unit.nbytes(trainable=True)
            states = self._residence(number, StateKind.OPTIMIZER)
            held = states.facts.held(sizes, number, StateKind.OPTIMIZER, states.tier)
            nbytes += _of_pool(held, Pool.MAPPED)
            gradients = self._residence(number, StateKind.GRADIENT).facts
            nbytes += gradients.brought(4 * unit.numel(trainable=True))
        return nbytes

    def _rounds(self, op: Op) -> int:
        """Return rounds of a collective after the first: as many as a tree over its ranks has."""
        if not op.axes or not op.nbytes:
            return 0
        return max(math.ceil(math.log2(ranks_over(self.plan.mesh, op.axes))) - 1, 0)


def _of_pool(nbytes: Bytes, pool: Pool) -> int:
    """Return the bytes of one pool."""
    return sum(count for of_pool, count in nbytes if of_pool is pool)
