"""What a block does while it computes, by formula: the counterpart of what :mod:`blockwalk.costs` counts.

Products are exact. Element-wise passes are counted in elements a token, operation by operation of transformers' own modules;
backward, autograd makes :data:`BACKWARD` of the forward's. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from blockwalk.program import Shape
from blockwalk.work import THIN, Sizes, Work, elementwise, sizes

if TYPE_CHECKING:
    from blockwalk.simulate.analytic import Dimensions

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
        """As passes of an average size."""
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
    """Elements a token that a block's forward passes read and write, adapters left out, in the compute dtype's size: those of
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
