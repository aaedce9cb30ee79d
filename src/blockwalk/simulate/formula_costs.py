"""The operations of a block while it computes, by formula: the counterpart of those that :mod:`blockwalk.walk.unit_costs`
counts.

Products are exact. Element-wise passes are counted in elements a token, operation by operation of transformers' own modules;
backward, autograd makes :data:`BACKWARD` of the forward's. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockwalk.plan.choices import Estimator
from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec
from blockwalk.plan.placement import DTYPE_BYTES, Tier
from blockwalk.plan.plan import Plan
from blockwalk.plan.sizes import DECODE_BYTES, UPDATE_ELEMENTS
from blockwalk.program.costs import THIN, Costs, Sizes, UnitCost, Work, elementwise, sizes
from blockwalk.program.loss_costs import loss_memory, loss_work, own_loss_work
from blockwalk.program.program import Shape
from blockwalk.program.residency import computes_in, epilogue_reads
from blockwalk.simulate.formula_model import Dimensions, _Dtype, _linears, dimensions, model_spec

# ---------------------------------------------------------------------------------------------------------------------
# Costs
# ---------------------------------------------------------------------------------------------------------------------


def costs(
    config: Mapping[str, Any], plan: Plan, shape: Shape, *, lora_rank: int | None = None, device: str = "cpu"
) -> Costs:
    """The cost of each kind of unit at the shape of one micro-batch, without padding."""
    d, model = dimensions(config), model_spec(config, lora_rank=lora_rank)
    dtype = computes_in(plan, d.dtype)
    size, backprop = DTYPE_BYTES[dtype], plan.estimator is Estimator.BACKPROP
    hidden_bytes = shape.tokens * d.hidden * size
    positions = 0 if d.plain_mlp else 2 * shape.sequence * d.head_size * size
    if d.eager:  # masks of the two kinds of layer, added to scores
        positions += 2 * shape.batch * shape.sequence**2 * size
    prologue = UnitCost(
        forward_transient=hidden_bytes * (3 if d.plain_mlp else 1) + positions,
        backward_transient=model.prologue.numel(trainable=True) * size if backprop else 0,
        saved=hidden_bytes + positions + shape.batch * shape.sequence * 8,
        forward=elementwise(sizes([(2 * hidden_bytes, 1), (2 * positions, 2)]), size),
        backward=elementwise(sizes([(3 * model.prologue.numel(trainable=True) * size * backprop, 1)]), size),
    )
    units = (("prologue", prologue), ("epilogue", _epilogue(d, model, plan, shape, size, device)))
    fused = plan.frozen.tier is not Tier.DEVICE and plan.frozen.codec.encoded
    block = _block_cost(d, model.blocks[0], shape, size, lora_rank=lora_rank, backprop=backprop, fused=fused)
    return Costs((*units, ("block", block)), _scratch(d, model, plan, shape, dtype, device))


def _block_cost(
    d: Dimensions, unit: UnitSpec, shape: Shape, size: int, *, lora_rank: int | None, backprop: bool, fused: bool
) -> UnitCost:
    """``fused``: adapters are added in place to the products of decoded weights."""
    tokens, wide = shape.tokens, max(size, 4)
    full, width = lora_rank is None, d.feed_forward * max(d.chosen, 1)
    linear = 2 * tokens * sum(rows * columns for _, (rows, columns) in _linears(d))
    if d.experts:
        linear += 2 * tokens * (3 * width * d.hidden + d.experts * d.hidden)
    attention = 4 * shape.batch * d.heads * shape.sequence**2 * d.head_size
    rank = lora_rank or 0
    adapters = 2 * tokens * rank * sum(rows + columns for _, (rows, columns) in _linears(d))
    forward_flops = linear + attention + adapters
    backward_flops = (2 if full else 1) * linear + (2 * attention if d.eager else 5 * attention // 2) + 2 * adapters
    if fused and d.norms == 2 and not d.experts:  # its recomputation leaves the last product out: no gradient reads it
        backward_flops -= 2 * tokens * d.hidden * (width + rank)
    in_mlp = 2 * width + d.hidden if d.plain_mlp else 3 * width + 2 * d.hidden
    if d.experts:
        in_mlp = 4 * width + (2 + d.chosen) * d.hidden
    scores = shape.batch * d.heads * shape.sequence**2 * size if d.eager else 0
    narrow = size < 4  # scores pass through float32
    in_attention = 2 * d.hidden + 3 * d.queries if d.eager else 2 * d.queries + 2 * d.keys + 3 * d.hidden
    forward = max(tokens * size * in_mlp, tokens * size * in_attention + scores * (5 if narrow else 2))
    shapes = [each for _, each in _linears(d)]
    works = block_work(d, shapes, shape, size, rank=rank, full=full, fused=fused)
    if not backprop:
        return UnitCost(forward, 0, 0, forward_flops, 0, works[0])
    master_copies = 0 if full else unit.numel(trainable=True) * (size if size < 4 else 0)
    gradients = unit.numel(trainable=True) * size
    if d.plain_mlp:  # inputs of the linears, norms and products
        kept = 4 * d.hidden + 4 * d.queries + width
    else:
        kept = 4 * width + _norm_elements(d, wide // size, full) + 2 * d.queries + 2 * d.keys + d.hidden
    saved = tokens * size * kept
    saved += tokens * rank * size * len(_linears(d)) + master_copies
    if d.eager:
        saved += 2 * tokens * size * (d.queries - d.keys) + scores * (4 if narrow else 2)
    else:
        saved += 4 * shape.batch * d.heads * shape.sequence
    down = d.hidden * width * size if full else 0
    at_start = saved + tokens * size * (2 * width + d.hidden) + down
    at_end = gradients + master_copies + tokens * (7 * d.hidden * size + (7 * d.hidden * wide if size < 4 else 0)) // 2
    at_scores = 7 * tokens * d.hidden * size + scores * (7 if narrow else 4)
    return UnitCost(forward, max(at_start, at_end, at_scores), saved, forward_flops, backward_flops, *works)


def _norm_elements(d: Dimensions, wide: int, full: bool) -> int:
    """Elements per token that a block's RMS norms keep: their float32 input (where it is not the hidden state itself), the
    normed value where the norm's weight is trained, and the two outputs that linears read. ``wide``: float32 elements are
    so many of the compute dtype's."""
    gemma = d.family.startswith("gemma")
    normed = (wide if gemma else 1) * full
    elements = (d.norms * (wide + normed) + 2 - (wide == 1)) * d.hidden
    if d.family in ("qwen3", "gemma3_text", "qwen3_moe"):
        elements += (d.queries + d.keys) * (wide + normed)
    return elements


def _trains_head(d: Dimensions, model: ModelSpec, plan: Plan) -> bool:
    return plan.estimator is Estimator.BACKPROP and any(
        p.trainable and p.shape == (d.vocab, d.hidden) for p in epilogue_reads(model).params
    )


def _epilogue(d: Dimensions, model: ModelSpec, plan: Plan, shape: Shape, size: int, device: str) -> UnitCost:
    tokens, trains = shape.batch * (shape.sequence - 1), _trains_head(d, model, plan)
    taken = loss_memory(tokens, d.hidden, d.vocab, _Dtype(size), soft_cap=d.soft_cap, device=device, trains_head=trains)
    hidden_bytes, wide = shape.tokens * d.hidden * size, max(size, 4)
    shifted = taken.gradient if shape.batch > 1 else 0
    product = 2 * tokens * d.hidden * d.vocab
    if (
        plan.loss != "chunked"
    ):  # as blockwalk.walk.unit_costs: logits, their float32 copy, log-probabilities, and their gradients
        logits, backprop = shape.tokens * d.vocab, plan.estimator is Estimator.BACKPROP
        again = (2 if trains else 1) * product if backprop else 0
        works = own_loss_work(shape.tokens, d.hidden, d.vocab, _Dtype(size), trains_head=trains)
        held = logits * (2 * size + 3 * wide) if backprop else 0
        return UnitCost(logits * (size + 2 * wide), held, 0, product, again, works[0], works[1] if backprop else Work())
    work = loss_work(
        tokens,
        d.hidden,
        d.vocab,
        _Dtype(size),
        soft_cap=d.soft_cap,
        device=device,
        gradient=plan.estimator is Estimator.BACKPROP,
        trains_head=trains,
    )
    if plan.estimator is not Estimator.BACKPROP:
        in_norm = 5 if size < 4 and not d.plain_mlp else 3
        masks = 2 * shape.batch * shape.sequence**2 * size if d.eager else 0  # the pass up to the head makes them again
        return UnitCost(max(hidden_bytes + shifted, in_norm * hidden_bytes + masks), 0, 0, product, 0, work)
    full = model.epilogue.params[0].trainable
    kept = 0 if size == 4 else wide // size
    norm = hidden_bytes * (1 if d.plain_mlp else 1 + kept + full * (kept or 1 if d.family.startswith("gemma") else 1))
    forward = norm + shifted + taken.buffers
    at_loss = forward + taken.gradient_buffers + taken.gradient
    return UnitCost(forward, at_loss, 0, product, (3 if trains else 1) * product, work)


def _scratch(d: Dimensions, model: ModelSpec, plan: Plan, shape: Shape, dtype: str, device: str) -> int:
    size, backprop = DTYPE_BYTES[dtype], plan.estimator is Estimator.BACKPROP
    tokens = shape.batch * (shape.sequence - 1)
    head = loss_memory(tokens, d.hidden, d.vocab, _Dtype(size), soft_cap=d.soft_cap, device=device, trains_head=False)

    def lazily(p: ParamSpec) -> bool:
        if not p.quantizable or len(p.shape) != 2:
            return False
        if p.trainable:
            return not backprop and (plan.zo.noise != "mezo" or plan.trainable.codec.encoded)
        codec = plan.frozen.codec
        if codec.encoded:
            return True
        return plan.frozen.tier is not Tier.DEVICE and codec.dtype_of(p.dtype) != dtype

    largest = max((min(DECODE_BYTES[device], p.numel * size) for p in model.blocks[0].params if lazily(p)), default=0)
    if plan.loss == "chunked" and any(
        lazily(p) and p.shape == (d.vocab, d.hidden) for p in epilogue_reads(model).params
    ):
        largest = max(largest, head.head_rows)
    if backprop:
        return largest
    if plan.zo.kind == "hizoo":
        largest += 2 * largest * 4 // size
    narrow = any(p.trainable and plan.trainable.codec.dtype_of(p.dtype) != "float32" for p in model.params())
    pieces = narrow + (plan.optimizer.name != "sgd" or plan.zo.kind == "hizoo") * 2
    return largest + 4 * UPDATE_ELEMENTS[device] * pieces + (head.buffers if plan.loss == "chunked" else 0)


BACKWARD = 2.2
"""Bytes that a backward's passes touch, as a multiple of the forward's: 2.1 to 2.6 over the families that have a formula."""

PASS = 3
"""Tensors of the hidden state's size that an average pass reads and writes."""

VIEWS = 150, 350
"""Views and allocations of a block's forward and backward, about."""


def block_work(
    d: Dimensions, linears: Sequence[tuple[int, int]], shape: Shape, size: int, *, rank: int, full: bool, fused: bool
) -> tuple[Work, Work, Work]:
    """A block's forward, its backward (without recomputation, and less by the third), what a recomputation leaves out.

    Args:
        d: the model's dimensions.
        linears: [out, in] of the block's linear layers.
        shape: of one micro-batch.
        size: bytes of an element of the compute dtype.
        rank: of the adapters on every linear; 0 for none.
        full: whether the block's own parameters are trained.
        fused: whether adapters are added in place; PEFT's own forward makes tensors of the output's size for them.
    """
    tokens = shape.tokens
    products = [(2 * tokens * rows * columns, 1) for rows, columns in linears]
    if d.experts:
        each = 2 * tokens * d.chosen * d.feed_forward * d.hidden
        products += [(2 * each, 1), (each, 1), (2 * tokens * d.experts * d.hidden, 1)]
    adapters = [(2 * tokens * rank * side, 1) for pair in linears for side in pair if rank]
    scores, attention = shape.batch * d.heads * shape.sequence**2, 0
    touched, lifted = (each * tokens for each in _elements(d, size))
    if d.eager:
        products.append((2 * shape.sequence**2 * d.head_size, 2 * shape.batch * d.heads))
        touched += scores * (20 if size < 4 else 12)
    else:
        attention = 4 * scores * d.head_size
    adapted = sum(rows for rows, _ in linears) if rank and not fused else 0

    def passes(elements: float, wide: float) -> Work:
        """Passes of an average size."""
        own, float32 = (_of_average_size(size * each, tokens * size * d.hidden) for each in (elements, wide))
        return elementwise(own, size) + Work(wide=float32)

    forward = passes(touched + 5 * adapted * tokens, lifted)
    backward = passes(BACKWARD * touched + 4 * adapted * tokens, BACKWARD * lifted)
    twice = [(flops, count * (2 if full or count > 1 else 1)) for flops, count in products]
    left_out = Work()
    if fused and d.norms == 2 and not d.experts:  # of the recomputation: no gradient reads the block's last product
        last = 2 * tokens * d.hidden
        left_out = Work(((last * d.feed_forward, 1),), thin=((last * rank, 1),) if rank else ())
    thin = rank < THIN
    both = adapters if thin else []
    products += [] if thin else adapters
    twice += [] if thin else [(flops, 2) for flops, _ in adapters]
    return (
        forward + Work(sizes(products), attention=attention, starts=VIEWS[0], thin=sizes(both)),
        backward + Work(sizes(twice), attention=5 * attention // 2, starts=VIEWS[1], thin=sizes(both * 2)) - left_out,
        left_out,
    )


def _elements(d: Dimensions, size: int) -> tuple[int, int]:
    """Elements per token that a block's forward passes read and write, adapters left out, in the compute dtype's size: those of
    passes with a result in that dtype, and in a 16-bit model those with a float32 result."""
    if d.plain_mlp:  # fused layer norms, residual sums, the activation, the queries' scale
        return 10 * d.hidden + 2 * d.feed_forward + 2 * d.queries, 0
    norm, lifted = (7, 0) if size == 4 else (5, 13)  # square, mean, scale, weight; in 16 bits through float32
    normed = d.norms * d.hidden
    if d.family in ("qwen3", "gemma3_text", "qwen3_moe"):
        normed += d.queries + d.keys
    width = d.feed_forward * max(d.chosen, 1)
    routed = 7 * d.chosen * d.hidden
    return norm * normed + 6 * d.hidden + 10 * (d.queries + d.keys) + 5 * width + routed, lifted * normed


def _of_average_size(touched: float, hidden_bytes: int) -> Sizes:
    count = max(round(touched / (PASS * hidden_bytes)), 1)
    return sizes([(int(touched) // count, count)])
