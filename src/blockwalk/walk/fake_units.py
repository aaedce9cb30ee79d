"""One block of each kind while it computes, on tensors without data: transient bytes and FLOPs.

A model's own code runs on fake tensors (shapes and strides alone) under a mode that sees every
operation: it adds up the storages that are alive and the FLOPs of PyTorch's own formulas. Memory
that kernels allocate inside themselves is not seen. :class:`Traits` is all of a plan that the
figures depend on.

The loss is a formula, its row's (:mod:`blockwalk.plan.losses`). B batch, S sequence, D hidden, V
vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from blockwalk.cutting.batch_facts import BatchFacts, note
from blockwalk.cutting.calls import BlockCall, Handed, Prologue, rebuild
from blockwalk.cutting.cut_model import CutModel
from blockwalk.numerics import lazy_linear, row_tiles
from blockwalk.numerics.codecs.layout import dtype_of
from blockwalk.numerics.codecs.weights import Value
from blockwalk.numerics.rule_mask import RuleMask
from blockwalk.numerics.sequence_part import PartMask, SequencePart
from blockwalk.plan import sizes as chunks
from blockwalk.plan.losses import LossCall, LossCost, LossFacts, weighed
from blockwalk.plan.model_spec import ParamSpec, UnitSpec
from blockwalk.plan.noise_kinds import NOISES, NoiseFacts
from blockwalk.plan.placement import Codec
from blockwalk.plan.row_order import RowOrder
from blockwalk.plan.sizes import LIBRARY_WORKSPACE, UPDATE_ELEMENTS, decoded_bytes
from blockwalk.plan.work import NOTHING, Work
from blockwalk.program.costs import Costs, GraphCost, UnitCost
from blockwalk.program.program import Shape
from blockwalk.program.state_sizes import epilogue_reads
from blockwalk.ranks.exchange import CountedExchange
from blockwalk.walk.meter import Meter


@dataclass(frozen=True)
class _FakeWeight:
    """A weight that is materialised a range at a time, into scratch that is counted apart."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    out: Tensor
    """One element, on the device: every range is an expansion of it."""

    def rows(self, start: int, stop: int) -> Tensor:
        return self.out.expand(stop - start, self.shape[-1])

    def columns(self, start: int, stop: int) -> Tensor:
        return self.out.expand(self.shape[-2], stop - start)

    def gather(self, index: Tensor) -> Tensor:
        return torch.empty(*index.shape, self.shape[-1], dtype=self.dtype, device=self.out.device)

    def expert(self, index: int) -> _FakeWeight:
        return replace(self, shape=self.shape[1:])

    def whole(self) -> None:
        """Experts are measured one by one: all together are counted apart as well."""
        return

    def ends(self, offs_E: Tensor, rows: int) -> list[int]:
        """Return ends as they are where every expert has as many rows."""
        return [rows * (expert + 1) // self.shape[0] for expert in range(self.shape[0])]


@dataclass(frozen=True)
class Traits:
    """All of a plan that the figures depend on; those that an estimator never asks for are at their
    defaults."""

    backprop: bool
    dtype: str
    """The compute dtype's name."""
    loss_name: str
    loss: LossFacts
    """The loss's row."""
    frozen: Codec
    stays: bool
    """Whether frozen weights lie on the device, in a dtype."""
    trainable: Codec
    noise: str = "gaussian"
    shaped: bool = False
    """Whether its kind keeps states, which shape the direction."""
    linear: bool = True
    """Whether the update rule is."""
    copied: bool = False
    """Whether blocks are perturbed whole."""
    scales: bool = False
    """Whether the scales of codes are perturbed, beside a copy of the codes."""
    tiling: chunks.Tiling | None = None
    """Tiles by which long sequences are computed; None: they are computed whole."""
    context: int = 1
    """The parts that sequences are in; shapes are of one."""
    way: str = "auto"
    """The way in which they attend to one another."""
    weighed: bool = False
    """Whether an objective of log-probabilities weighs the tokens' losses."""

    @property
    def noise_facts(self) -> NoiseFacts:
        """The noise's row."""
        return NOISES[self.noise]


@dataclass(frozen=True)
class _Bench:
    """A cut model without weights, and what the plan says about its parameters."""

    cut: CutModel
    traits: Traits
    shape: Shape
    device: torch.device
    mode: FakeTensorMode
    """The mode of every tensor that has no data."""
    exchange: CountedExchange
    """The exchange of the parts of its sequences."""
    uncounted: dict[str, str] = field(default_factory=dict)
    """Operations whose FLOPs no meter could count, with the reason."""

    @property
    def backprop(self) -> bool:
        return self.traits.backprop

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.traits.dtype)

    def lazily(self, p: ParamSpec) -> bool:
        """Whether a parameter is decoded, converted or perturbed a range at a time, instead of
        standing there whole."""
        if not p.quantizable or (
            len(p.shape) == 3 and (p.trainable or not self.traits.frozen.encoded)
        ):
            return False
        if p.trainable:
            dense = not self.traits.trainable.encoded
            in_place = self.traits.noise_facts.in_place and dense
            return not (self.backprop or (in_place and self.master_dtype(p) == self.dtype))
        if self.traits.frozen.encoded:
            return True
        stored = self.traits.frozen.dtype_of(p.dtype)
        return not self.traits.stays and dtype_of(stored) != self.compute_dtype_of(p)

    def compute_dtype_of(self, p: ParamSpec) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32) if p.exact else self.dtype

    def master_dtype(self, p: ParamSpec) -> torch.dtype:
        return dtype_of(self.traits.trainable.dtype_of(p.dtype))

    def frozen_values(self, unit: UnitSpec) -> dict[str, Value]:
        """Return fake values that stand in the places of a unit's parameters for the whole of its
        turn, by name."""
        values: dict[str, Value] = {}
        for p in unit.params:
            if self.lazily(p):
                one = torch.empty((1, 1), dtype=self.compute_dtype_of(p), device=self.device)
                values[p.name] = _FakeWeight(p.shape, one.dtype, one)
            elif not p.trainable or not self.backprop:
                dtype = (
                    self.compute_dtype_of(p)
                    if dtype_of(p.dtype).is_floating_point
                    else dtype_of(p.dtype)
                )
                values[p.name] = torch.empty(p.shape, dtype=dtype, device=self.device)
        return values

    @property
    def loss(self) -> LossFacts:
        """The row of the loss that this model has."""
        return self.traits.loss.for_head(custom=self.cut.head.custom)

    def loss_call(self, device: str) -> LossCall:
        """Return the loss's call for a batch, with a head that is not trained and has no
        adapter."""
        spec = self.cut.spec()
        return LossCall(
            self.shape.batch,
            self.shape.sequence,
            spec.hidden_size,
            spec.vocab_size,
            self.dtype.itemsize,
            device,
            soft_cap=self.cut.head.soft_cap is not None,
        )

    def copies(self, unit: UnitSpec) -> int:
        """Return bytes of a unit's trainables in the compute dtype, where autograd needs them in it
        and masters are not."""
        copied = [
            p for p in unit.part(True) if self.backprop and self.master_dtype(p) != self.dtype
        ]
        return sum(p.numel for p in copied) * self.dtype.itemsize

    def masters(self, unit: UnitSpec) -> dict[str, Tensor]:
        if not self.backprop:
            return {}
        device = self.device
        return {
            p.name: torch.empty(p.shape, dtype=self.master_dtype(p), device=device)
            for p in unit.part(True)
        }

    def live(self, index: int, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Bind trainables as :meth:`blockwalk.engine.engine.Engine.bind` does."""
        dtypes = {p.name: self.compute_dtype_of(p) for p in self.cut.spec().params()}
        values = {name: master.detach().to(dtypes[name]) for name, master in masters.items()}
        return self.cut.bind(index, values)


def stand_ins(device: str) -> tuple[str, ...]:
    """Return the devices whose tensors without data may stand for those of ``device``, the best
    first.

    Where torch sees no GPU, whatever its build, blocks are run as on a CPU: attention saves its
    inputs there as well. So they are where torch lacks something for the GPU's."""
    return (device, "cpu") if device != "cpu" and torch.cuda.is_available() else ("cpu",)


def measure(
    cut: CutModel, traits: Traits, shape: Shape, device: str, padded: bool, stand_in: str
) -> Costs:
    """Return the costs of a model's units, on tensors without data of the device ``stand_in``."""
    cut.model.train(traits.backprop)
    cut.tiling = traits.tiling
    bench = _Bench(
        cut,
        traits,
        shape,
        torch.device("cpu"),
        FakeTensorMode(allow_non_fake_inputs=True),
        CountedExchange(_Unsent(traits.context)),
    )
    prologue, cost = _prologue(bench, device, padded)
    costs = {"prologue": cost, "epilogue": _epilogue_by_tiles(bench, prologue, device)}
    measured_on = torch.device(stand_in)
    handed = Handed()
    for index, unit in enumerate(cut.spec().blocks, 1):
        if unit.kind not in costs or cut.anatomy.hands_on:
            measured = _block(replace(bench, device=measured_on), index, unit, prologue, handed)
            costs.setdefault(unit.kind, measured)
    nbytes = sum(leaf.nbytes for entry in handed.entries for leaf in entry.leaves)
    gradients = nbytes if traits.backprop else 0
    prologue_cost = costs["prologue"]
    costs["prologue"] = replace(prologue_cost, saved=prologue_cost.saved + nbytes + gradients)
    return Costs(
        tuple(costs.items()),
        _scratch(bench, device),
        uncounted=tuple(bench.uncounted.items()),
    )


def _prologue(bench: _Bench, device: str, padded: bool) -> tuple[Prologue, UnitCost]:
    """Run the prologue on fake parameters and real ids: masks depend on data."""
    unit = bench.cut.spec().prologue
    cut = bench.cut
    shape = bench.shape
    with bench.mode:
        cut.bind(
            0, {p.name: torch.empty(p.shape, dtype=bench.compute_dtype_of(p)) for p in unit.params}
        )
    ids_BS = torch.zeros(shape.batch, shape.sequence, dtype=torch.int64)
    mask_BS = torch.ones_like(ids_BS)
    if padded:
        mask_BS[0, -1] = 0
    batch: dict[str, Any] = {"input_ids": ids_BS, "attention_mask": mask_BS}
    if bench.traits.context > 1:
        batch = _first_part(ids_BS, bench)
    else:  # as a walker does
        note(ids_BS, BatchFacts.of(batch, hides_unseen=bench.loss.by_chunks))
    with (
        torch.set_grad_enabled(bench.backprop and bool(unit.numel(trainable=True))),
        Meter(uncounted=bench.uncounted) as meter,
    ):
        prologue = cut.prologue(batch)
    cut.unbind(0)
    trained = unit.numel(trainable=True) if bench.backprop else 0
    copies = bench.copies(unit)
    return prologue, UnitCost(
        forward_transient=meter.peak - meter.live,
        backward_transient=trained * bench.dtype.itemsize + copies,
        saved=meter.live + copies,
        forward_flops=meter.work.flops,
        backward_flops=0,
        forward=meter.work,
        backward=Work(touched=3 * trained * bench.dtype.itemsize),
    )


@dataclass(frozen=True)
class _Unsent:
    """Collectives of shapes alone (:class:`blockwalk.ranks.exchange.Collectives`)."""

    count: int

    def gather(self, part_P: Tensor) -> Tensor:
        return part_P.expand(self.count, -1).clone()

    def swap(self, pieces_cP: Tensor) -> Tensor:
        return pieces_cP.clone()


def _first_part(ids_Bs: Tensor, bench: _Bench) -> dict[str, Any]:
    """Return the first part of a batch's rows, which are folded: it holds their ends, whose tiles
    have the most keys. The work of all parts is equal."""
    order = RowOrder(bench.traits.context, ids_Bs.shape[1], folded=True)
    part = SequencePart(0, order, bench.traits.way, bench.exchange)
    return {"input_ids": ids_Bs, "part": part}


def _block(
    bench: _Bench, index: int, unit: UnitSpec, prologue: Prologue, handed: Handed
) -> UnitCost:
    """Return one block, on fake tensors: without graph, and with it where the estimator
    differentiates. ``handed`` holds what blocks before it handed on, and takes what it hands on
    itself."""
    cut = bench.cut
    shape = bench.shape
    with bench.mode:
        call = replace(_fake_call(prologue.calls[index - 1], bench.device), handed=handed)
        sides = (shape.batch, shape.sequence, cut.spec().hidden_size)
        hidden_BSD = torch.empty(sides, dtype=bench.dtype, device=bench.device)
        with torch.set_grad_enabled(bench.backprop):
            values = bench.frozen_values(unit)
            cut.bind(index, values)
        masters = bench.masters(unit)
        before = bench.exchange.sent_bytes
        with Meter(uncounted=bench.uncounted) as forward, torch.no_grad():
            leaves = bench.live(index, masters)
            out_BSD = cut.forward(call, hidden_BSD)
        cut.unbind(index, list(masters))
        del leaves, out_BSD
        forward_sent = bench.exchange.sent_bytes - before
        if not bench.backprop:
            cut.unbind(index)
            return UnitCost(
                forward.peak,
                forward_flops=forward.work.flops,
                forward=forward.work,
                forward_sent=forward_sent,
            )
        layer = cut.layer_name(index)
        weights = (values.get(f"{layer}.{path}.weight") for path in cut.anatomy.unread)
        unread = [w for w in weights if isinstance(w, _FakeWeight)]
        before = bench.exchange.sent_bytes
        made_again = _differentiated(bench, call, hidden_BSD, masters, unread)
        sent = bench.exchange.sent_bytes - before
        kept = made_again
        if cut.tile(shape.sequence, call.module):
            kept = _differentiated(bench, call, hidden_BSD, masters)
        cut.unbind(index)
        return UnitCost(
            forward_transient=forward.peak,
            backward_transient=made_again.peak,
            saved=made_again.saved,
            forward_flops=forward.work.flops,
            backward_flops=kept.backward.flops,
            forward=forward.work,
            backward=kept.backward,
            forward_sent=forward_sent,
            backward_sent=sent - forward_sent,
            again=made_again.work - kept.backward,
            kept=None if kept is made_again else GraphCost(kept.saved, kept.peak - kept.saved),
        )


@dataclass(frozen=True, slots=True)
class _Differentiated:
    """A block that is run with its graph and differentiated: bytes and operations."""

    saved: int
    """Bytes that the graph holds."""
    peak: int
    forward: Work
    work: Work

    @property
    def backward(self) -> Work:
        return self.work - self.forward


def _differentiated(
    bench: _Bench,
    call: BlockCall,
    hidden_BSD: Tensor,
    masters: Mapping[str, Tensor],
    unread: Sequence[_FakeWeight] | None = None,
) -> _Differentiated:
    """Run a block on fake tensors as one that keeps its graph, or as one that is made again, whose
    products with some weights are ``unread``. What a kept graph saves stays until the end, for it
    may lie in file maps."""
    grad_BSD = torch.empty_like(hidden_BSD)
    stays: list[Tensor] = []

    def stay(tensor: Tensor) -> Tensor:
        stays.append(tensor.detach())  # an operation that saved its own answer would hold itself
        return stays[-1]

    with Meter(uncounted=bench.uncounted) as meter:
        leaves = bench.live(call.unit, masters)
        input_BSD = hidden_BSD.detach().requires_grad_()
        saving = (
            saved_tensors_hooks(stay, lambda tensor: tensor) if unread is None else nullcontext()
        )
        with lazy_linear.unread(unread or []), saving:
            result = bench.cut.run(call, input_BSD, reads_answer=unread is None, uses_up=True)
        saved = meter.live
        forward = meter.work
        inputs = [input_BSD, *leaves.values(), *call.leaves]
        seeds = [grad_BSD, *map(torch.empty_like, result.handed)]
        torch.autograd.grad(result.outputs, inputs, seeds, allow_unused=True)
    bench.cut.unbind(call.unit, list(masters))
    return _Differentiated(saved, meter.peak, forward, meter.work)


def _fake_call(call: BlockCall, device: torch.device) -> BlockCall:
    """Return the call with fake arguments, on the device at hand."""
    leaves: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if isinstance(tensor, PartMask | RuleMask):
            return tensor
        if id(tensor) not in leaves:
            leaf = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
            leaves[id(tensor)] = leaf.requires_grad_(tensor.requires_grad)
        return leaves[id(tensor)]

    arguments = rebuild(call.arguments, fake, "an argument")
    return replace(call, arguments=arguments, differentiable=tuple(map(fake, call.differentiable)))


def _epilogue_by_tiles(bench: _Bench, prologue: Prologue, device: str) -> UnitCost:
    """Return the cost of the epilogue: where it is computed by tiles, a tile's, as often as there
    are, beside the gradient of the whole hidden state."""
    shape = bench.shape
    size = bench.cut.tile(shape.sequence) if bench.loss.by_chunks and bench.backprop else 0
    if not size:
        return _epilogue(bench, prologue, device)
    tile = replace(bench, shape=replace(shape, sequence=size))
    cost = _epilogue(tile, prologue, device, slice(0, size))
    count = -(-shape.sequence // size)
    hidden_bytes = shape.tokens * bench.cut.spec().hidden_size * bench.dtype.itemsize
    return replace(
        cost,
        backward_transient=cost.backward_transient + hidden_bytes,
        forward_flops=cost.forward_flops * count,
        backward_flops=cost.backward_flops * count,
        forward=cost.forward * count,
        backward=cost.backward * count,
    )


def _epilogue(
    bench: _Bench, prologue: Prologue, device: str, tile: slice | None = None
) -> UnitCost:
    """Return the final norm, on fake tensors; the head and the loss by the formula of its row."""
    cut = bench.cut
    spec = cut.spec()
    reads = epilogue_reads(spec)
    head = cut.head
    by_name = {p.name: p for p in reads.params}
    names = (head.weight, head.bias, *(head.lora or ())[1:2])
    trains_head = bench.backprop and any(
        by_name[name].trainable for name in names if name in by_name
    )
    lora_rank = by_name[head.lora[0]].shape[0] if head.lora else 0
    call = replace(
        bench.loss_call(device),
        hidden_size=spec.hidden_size + lora_rank,
        trains_head=trains_head,
        widened=row_tiles.widened(torch.empty(0, dtype=bench.dtype)),
        untiled=not row_tiles.keeps_shapes(torch.empty(0, dtype=bench.dtype)),
    )
    cost = bench.loss.cost(call)
    if bench.traits.weighed:
        cost = weighed(cost, call, reads_twice=trains_head or tile is not None)
    norm = _final_norm(bench, prologue, tile) if bench.loss.by_chunks else _Norm()
    copies = bench.copies(reads)
    forward_flops = cost.forward.flops
    if not bench.backprop:
        # buffers are kept from op to op: scratch
        return UnitCost(
            forward_transient=max(norm.input_bytes + cost.copies, norm.peak),
            forward_flops=forward_flops,
            forward=norm.work + cost.forward,
        )
    forward = norm.input_bytes + cost.buffers + (cost.head_rows if head.lora else 0)
    at_loss = forward + cost.gradient_buffers + cost.gradient
    at_end = norm.input_bytes + cost.gradient + norm.hidden_bytes
    return UnitCost(
        forward_transient=max(forward + cost.copies, norm.peak - norm.hidden_bytes),
        backward_transient=max(at_loss, at_end, norm.peak) + copies,
        forward_flops=forward_flops,
        backward_flops=cost.with_gradient.flops - forward_flops,
        forward=norm.work + cost.with_gradient,
    )


@dataclass(frozen=True, slots=True)
class _Norm:
    """The last norm, before a loss by chunks: bytes and operations."""

    input_bytes: int = 0
    """Bytes of the loss's input, and of its copy without each row's last position."""
    peak: int = 0
    hidden_bytes: int = 0
    """Bytes of the hidden state, as which its gradient is handed on."""
    work: Work = NOTHING


def _final_norm(bench: _Bench, prologue: Prologue, tile: slice | None) -> _Norm:
    """Run the final norm on fake tensors."""
    cut = bench.cut
    shape = bench.shape
    spec = cut.spec()
    unit = cut.epilogue_index
    with bench.mode:
        cut.bind(
            unit,
            {
                p.name: torch.empty(p.shape, dtype=bench.compute_dtype_of(p))
                for p in spec.epilogue.params
            },
        )
        hidden_BSD = torch.empty(shape.batch, shape.sequence, spec.hidden_size, dtype=bench.dtype)
    hidden_BSD.requires_grad_(bench.backprop)
    length = shape.sequence if tile is None else prologue.hidden_BSD.shape[1]
    batch = {"input_ids": torch.zeros(shape.batch, length, dtype=torch.int64)}
    with (
        torch.set_grad_enabled(bench.backprop),
        Meter(uncounted=bench.uncounted) as meter,
    ):
        normed_BSD = cut.head_input(prologue, hidden_BSD, batch, tile=tile)
        kept = meter.live
        if bench.backprop:
            seed_BSD = torch.zeros_like(normed_BSD)
            torch.autograd.grad(normed_BSD, [hidden_BSD], seed_BSD)
    cut.unbind(unit)
    row_bytes = spec.hidden_size * bench.dtype.itemsize
    shifted = shape.batch * (shape.sequence - 1) * row_bytes if shape.batch > 1 else 0
    return _Norm(kept + shifted, meter.peak, shape.tokens * row_bytes, meter.work)


def _scratch(bench: _Bench, device: str) -> int:
    """Return bytes of the buffers that are kept from op to op: what weights are decoded or
    perturbed into, the largest range of any, under zeroth order the loss's and the update's, else a
    library's own."""
    spec = bench.cut.spec()
    size = bench.dtype.itemsize
    traits = bench.traits
    loss = bench.loss.cost(bench.loss_call(device))
    ranges = [_range_bytes(bench, u, p, loss, device) for u in spec.units for p in u.params]
    largest = max(ranges, default=0)
    noise = traits.noise_facts
    # z in float32, before it is added; a direction is made of it
    drawn = traits.shaped or not (noise.elementwise or noise.in_place)
    if traits.shaped or (drawn and not noise.beside):
        largest += 2 * largest * 4 // size
    if bench.backprop:
        return largest + 2 * LIBRARY_WORKSPACE.get(device, 0)  # autograd's thread multiplies too
    if traits.copied:  # a block's trainables whole, under a perturbation
        largest += max(unit.numel(trainable=True) * size for unit in spec.blocks)
    if traits.scales:
        largest += max(unit.nbytes(traits.trainable, trainable=True) for unit in spec.units)
    if noise.draws_whole:
        largest += max((p.nbytes for p in spec.params(trainable=True)), default=0)
    return (
        largest + 4 * UPDATE_ELEMENTS[device] * _update_pieces(bench, drawn, device) + loss.buffers
    )


def _range_bytes(bench: _Bench, unit: UnitSpec, p: ParamSpec, loss: LossCost, device: str) -> int:
    """Return bytes of the largest range of a parameter that is decoded or perturbed at a time."""
    if not bench.lazily(p):
        return 0
    if p.name == bench.cut.head.weight and loss.head_rows:
        return loss.head_rows
    if unit.kind == "prologue":
        return 0
    return decoded_bytes(p.numel, bench.dtype.itemsize, device, experts=len(p.shape) == 3)


def _update_pieces(bench: _Bench, drawn: bool, device: str) -> int:
    """Return the float32 buffers of a piece that an update works in; on an accelerator one launch
    needs none."""
    linear = bench.traits.linear
    if device != "cpu" and linear and not drawn:
        return 0
    trained = bench.cut.spec().params(trainable=True)
    encoded = any(bench.master_dtype(p) != torch.float32 for p in trained)
    return encoded + (not linear or drawn) * 2
