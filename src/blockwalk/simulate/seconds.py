"""Seconds of one op of a program on a machine. See ``docs/cost-model.md``.

An op's seconds are a sum of non-negative terms that each fall with one rate of the hardware, so a
faster part can never make a step slower. Nothing here imports torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from blockwalk.plan.losses import LossCall
from blockwalk.plan.mesh import ranks_over
from blockwalk.plan.model_spec import ModelSpec, UnitSpec
from blockwalk.plan.placement import DTYPE_BYTES, StateKind, Tier
from blockwalk.plan.plan import Plan
from blockwalk.plan.work import NOTHING, Work
from blockwalk.program.costs import Costs
from blockwalk.program.program import COMPUTES, Lane, Op, OpKind, Pool, Program
from blockwalk.program.state_sizes import compute_dtype, epilogue_reads, updates_on_host
from blockwalk.simulate.hardware import Hardware, Link
from blockwalk.simulate.process_memory import found_for, walk_kind

NO_COSTS = Costs()

REFAULTED = 0.3
"""The fraction of a streamed block's heap that page-faults again, counted when the heap was trimmed
every third or fourth block (:mod:`blockwalk.system.heap`, ``docs/tricks.md``). Trims are rarer
since, and it was not counted again."""

TRAFFIC = 4
"""Bytes that a block's element-wise work reads and writes, as a multiple of the most that it holds
at once: where only that is known."""

HOST_MEMORY = 2e10
"""Bytes/s of a processor's memory behind an accelerator, where it updates what lies there. A guess:
no hardware file has it."""

UPDATE_STARTS = 12
"""Operations that the update of one parameter starts."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of an op on a machine.

    A compute op takes its products, its element-wise passes and its starts, each at the machine's
    rate for their size, and the decoding and perturbing of the weights that it reads."""

    plan: Plan
    model: ModelSpec
    hardware: Hardware
    costs: Costs = NO_COSTS
    program: Program | None = None
    _start: float = field(init=False, repr=False, default=0.0)
    """Seconds to start one operation."""
    _lost: Mapping[int, float] = field(init=False, repr=False, default_factory=dict)
    """Seconds that each op of a unit loses, on a processor, to the copies of its lanes, which take
    a core."""

    def __post_init__(self) -> None:
        if self.program is not None and self.hardware.device == "cpu":
            object.__setattr__(self, "_lost", self._losses(self.program))
        if self.program is not None and self.hardware.start_seconds:
            kind = walk_kind(self.plan, self.program, self.model)
            object.__setattr__(self, "_start", found_for(kind, self.hardware.start_seconds))

    def _losses(self, program: Program) -> dict[int, float]:
        copied: Counter[int] = Counter()
        for op in program.ops:
            if op.kind in (OpKind.FETCH, OpKind.STORE) and (
                self._is_bucket(op) or self.tier(op) is Tier.HOST
            ):
                copied[op.unit] += op.nbytes
        turns = Counter(op.unit for op in program.ops if op.kind in COMPUTES)
        rate = self.hardware.host_to_device.bandwidth
        return {unit: nbytes / rate / turns[unit] for unit, nbytes in copied.items() if turns[unit]}

    def seconds(self, op: Op) -> float:
        """Return seconds of one op on its lane."""
        hw = self.hardware
        if op.lane is Lane.COMPUTE or op.kind is OpKind.UPDATE:
            return self._compute(op)
        match op.lane:
            case Lane.FETCH | Lane.UPDATE:
                return self._moves(op, hw.host_to_device, hw.disk_read)
            case Lane.STORE:
                return self._moves(op, hw.device_to_host, hw.disk_write)
            case Lane.INTRA:
                return hw.intra.seconds(op.nbytes) + self._rounds(op) * hw.intra.latency
        sharing = min(
            self.plan.mesh.ranks_per_node, hw.devices_per_node
        )  # a node's ranks share its link to the others
        return hw.inter.seconds(op.nbytes * sharing) + self._rounds(op) * hw.inter.latency

    @property
    def dtype(self) -> str:
        return compute_dtype(self.plan, self.model)

    def work_seconds(self, work: Work) -> float:
        """Return seconds of operations in the compute dtype, one after the other."""
        hw = self.hardware
        dtype = self.dtype
        products = hw.products.get(dtype)
        passes = hw.passes.get(dtype)
        if products:
            seconds = products.total(work.products) + hw.thin.get(dtype, products).total(
                work.thin_products
            )
        else:
            seconds = (work.flops - work.attention) / hw.flops_of(dtype)
        if passes:
            float32 = hw.passes.get("float32", passes)
            in_place = hw.passes.get("in place", passes)
            seconds += (
                passes.total(work.passes)
                + float32.total(work.float32_passes)
                + in_place.total(work.in_place)
            )
        else:
            seconds += work.touched / hw.memory_bandwidth
        return (
            seconds
            + work.attention / (hw.attention.get(dtype) or hw.flops_of(dtype))
            + work.all * self._start
        )

    # ---- the compute lane ------------------------------------------------------------------------

    def _compute(self, op: Op) -> float:
        if op.kind in COMPUTES:
            return self._walks(op)
        hw = self.hardware
        trained = float(self.model.units[op.unit].numel(trainable=True))
        zeroth_order = self.plan.zeroth_order
        if op.kind is OpKind.UPDATE and zeroth_order:
            if op.lane is Lane.INTRA:
                trained /= self.plan.parameter_ranks  # each rank its slice, before the gather
            once = trained / hw.noise_rate * self.plan.zo.queries + self._narrowed("round", trained)
            if not self.plan.update_rule.linear:
                once += self._updated(trained)
            return hw.op_seconds + max(op.entries, 1) * once
        if op.kind is OpKind.UPDATE:
            share = self.plan.optimizer_ranks if self.plan.sharded else 1
            starts = UPDATE_STARTS * len(self.model.units[op.unit].part(True)) * self._start
            narrowed = self._narrowed(
                "round" if self.plan.update.rounding == "stochastic" else "lift", trained / share
            )
            seconds = hw.op_seconds + starts + self._updated(trained / share) + narrowed
            moved = 0.0
            if self.plan.update.at_turn:  # the old values are copied first
                moved = 8 * (1 + len(self.plan.update_rule.states)) * trained / share
            if op.lane is Lane.UPDATE:
                return hw.op_seconds + (moved + self._touched(trained)) / HOST_MEMORY
            return seconds + moved / hw.memory_bandwidth
        if op.kind in (OpKind.PERTURB, OpKind.UPDATE_ALL):
            return self.model.numel(trainable=True) / hw.noise_rate
        if op.kind is OpKind.NORM:
            rate = hw.update_rate.get("norm")
            every = self.model.numel(trainable=True)
            return every / rate if rate else 4 * every / hw.memory_bandwidth
        return 0.0

    def work(self, op: Op) -> Work:
        """Return the operations of an op on the compute lane, as far as its unit's costs are
        known."""
        cost = self.costs.of(self.model.units[op.unit].kind)
        match op.kind:
            case OpKind.PROLOGUE | OpKind.FORWARD:
                return cost.forward * op.passes
            case OpKind.BACKWARD if op.keep_graph:
                return cost.backward + cost.unread
            case OpKind.BACKWARD | OpKind.LOSS:
                return cost.forward + cost.backward
            case OpKind.PROLOGUE_BACKWARD:
                return cost.backward
        return NOTHING

    def _walks(self, op: Op) -> float:
        unit = self.reads(op.unit)
        hw = self.hardware
        work = self.work(op)
        prologue = op.kind in (OpKind.PROLOGUE, OpKind.PROLOGUE_BACKWARD)
        if work == NOTHING and not prologue:
            work = Work(((op.flops, 1),), ((TRAFFIC * op.transient, 1),))
        seconds = hw.op_seconds + self.work_seconds(work) + self._lost.get(op.unit, 0.0)
        if op.kind is OpKind.FORWARD:  # what a graph in file maps saves is copied there
            seconds += (
                2
                * sum(nbytes for pool, nbytes in op.takes if pool is Pool.MAPPED)
                / hw.memory_bandwidth
            )
        if (
            hw.fresh_bandwidth and op.kind is not OpKind.FORWARD
        ):  # gradients are made anew, in part where a graph was
            taken, freed = (
                sum(n for pool, n in each if pool is Pool.DEVICE) for each in (op.takes, op.frees)
            )
            seconds += max(taken - freed, 0) / hw.fresh_bandwidth
        if prologue:
            return seconds
        backprop = not self.plan.zeroth_order
        if hw.fresh_bandwidth and backprop and self.program is not None and self.program.streamed:
            seconds += REFAULTED * hw.slack.get("streamed", 0.0) * op.transient / hw.fresh_bandwidth
        if self.dtype not in hw.products:
            seconds += unit.numel() * DTYPE_BYTES[self.dtype] / hw.memory_bandwidth
        times = 2 if op.kind is OpKind.BACKWARD and not op.keep_graph else 1
        if op.kind is OpKind.LOSS and backprop:
            times = self.head_reads()
        if codes := unit.decoded(self.plan.frozen.codec):
            seconds += times * codes / hw.decodes(self.plan.frozen.codec)
        drawn = self.plan.zeroth_order and self.plan.zo.noise not in ("mezo", "lowrank")
        if drawn and not self._finds_copy(op):
            seconds += unit.numel(trainable=True) / hw.noise_rate
        return seconds

    def _finds_copy(self, op: Op) -> bool:
        """Return whether a zeroth-order forward finds its block, or a loss its head, perturbed
        already, for an earlier micro-batch of its pass."""
        copied = {OpKind.LOSS: self.plan.loss == "chunked", OpKind.FORWARD: self.plan.copies_blocks}
        return op.micro_batch >= self.plan.mesh.data and copied.get(op.kind, False)

    def reads(self, index: int) -> UnitSpec:
        """Return a unit with the tied head that its turn reads."""
        return (
            self.model.units[index]
            if index <= len(self.model.blocks)
            else epilogue_reads(self.model)
        )

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
        name = self.plan.optimizer.name
        if rate := self.hardware.update_rate.get(name):
            return elements / rate
        return self._touched(elements) / self.hardware.memory_bandwidth

    def _touched(self, elements: float) -> float:
        """Count the bytes that the update rule reads and writes for so many elements."""
        return 4 * (3 + 2 * len(self.plan.update_rule.states)) * elements

    def _narrowed(self, rate: str, elements: float) -> float:
        """Return seconds to lift a 16-bit master's elements to float32 a chunk at a time, and to
        write them back: as they are (``lift``) or rounded stochastically (``round``)."""
        codec = self.plan.trainable.codec
        size = 1 if codec.encoded else DTYPE_BYTES[codec.dtype_of(self.dtype)]
        bandwidth = self.hardware.memory_bandwidth / (2 * (size + 4))
        return elements / self.hardware.update_rate.get(rate, bandwidth) if size < 4 else 0.0

    # ---- the links -------------------------------------------------------------------------------

    def tier(self, op: Op) -> Tier:
        """Return the tier of the bytes of a FETCH or STORE."""
        if updates_on_host(self.plan, self.hardware.device) and op.part in (
            StateKind.TRAINABLE,
            StateKind.GRADIENT,
        ):
            return Tier.HOST
        if op.part is StateKind.ACTIVATION:
            return self.plan.activation.tier
        if op.part in (StateKind.GRADIENT, StateKind.OPTIMIZER):  # of one process: in file maps
            return Tier.DISK
        if self.plan.sharded:
            return Tier.HOST
        return (self.plan.frozen if op.part is StateKind.FROZEN else self.plan.trainable).tier

    def _moves(self, op: Op, link: Link, disk: Link) -> float:
        """Return seconds of a copy between the device and its tier. To a processor the page cache
        is there; what it cannot hold is read or written."""
        tier = self.tier(op)
        if not op.nbytes or tier is Tier.DEVICE:
            return 0.0
        if self.hardware.device == "cpu":
            cached = self._cached(op)
            if cached and op.of_graph:  # the compute lane wrote it, and reads it, where it lies
                return 0.0
            return (link if cached else disk).seconds(op.nbytes)
        return link.seconds(op.nbytes) + (disk.seconds(op.nbytes) if tier is Tier.DISK else 0.0)

    def _cached(self, op: Op) -> bool:
        """Return whether a processor's own memory serves an op: the host's tier always, the disk's
        where the page cache holds it, but for buckets of parameters, which go past it."""
        if self.tier(op) is Tier.HOST:
            return True
        return not self._is_bucket(op) and self._stored() <= self.hardware.host_bytes // 2

    def _is_bucket(self, op: Op) -> bool:
        return self.plan.zeroth_order and op.part is StateKind.TRAINABLE

    def _stored(self) -> int:
        codec = self.plan.frozen.codec
        parameters = sum(
            u.nbytes(codec, trainable=False) + u.nbytes(trainable=True) for u in self.model.units
        )
        if self.plan.zeroth_order or self.plan.sharded:
            return parameters
        beside = len(self.plan.update_rule.states) * self.plan.optimizer_state.on_disk
        beside += self.plan.gradient.on_disk and not self.plan.update.at_turn
        return parameters + 4 * beside * self.model.numel(trainable=True)

    def _rounds(self, op: Op) -> int:
        """Return rounds of a collective after the first: as many as a tree over its ranks has."""
        if not op.axes or not op.nbytes:
            return 0
        return max(math.ceil(math.log2(ranks_over(self.plan.mesh, op.axes))) - 1, 0)
