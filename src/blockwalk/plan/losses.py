"""The table of losses: a loss is a row here, with all that planning knows of it, and the functions
that compute it, which its row names.

Bytes and operations are closed forms of one call. They follow :mod:`blockwalk.numerics.losses`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from blockwalk.plan.refusal import Refusals, nothing
from blockwalk.plan.sizes import (
    LIFT,
    LOGITS_BUDGET,
    LOSS_BUDGET,
    ROW_TILE,
    chunk_sizes,
    multiplied_rows,
    widened_bytes,
)
from blockwalk.plan.table import Table
from blockwalk.plan.work import Work

IGNORE = -100
"""The label of a token that has none, as in torch's own loss."""


@dataclass(frozen=True, slots=True)
class LossCall:
    """One call of a loss on a micro-batch: its sides, and where it is computed."""

    batch: int
    sequence: int
    hidden_size: int
    """Columns of the head's input, those of a LoRA on the head included."""
    vocab_size: int
    itemsize: int
    """Bytes of an element in the compute dtype."""
    device: str
    soft_cap: bool = False
    """True where the logits have one."""
    trains_head: bool = False
    """True where the head, or B of its LoRA, has a gradient."""
    widened: bool = False
    """True where products are made of float32 copies."""
    untiled: bool = False
    """True where a 16-bit product on a processor is made of its rows alone, in no tiles."""

    @property
    def tokens(self) -> int:
        """Tokens that predict another one."""
        return self.batch * (self.sequence - 1)

    @property
    def float_size(self) -> int:
        """Bytes of an element that sums are taken in: float32 at least."""
        return max(self.itemsize, 4)

    def product_rows(self, chunk: int) -> int:
        """Return the rows that products of all tokens are made with, so many tokens at a time."""
        full, remainder = map(self.multiplied, (chunk, self.tokens % chunk))
        return self.tokens // chunk * full + remainder

    def multiplied(self, rows: int) -> int:
        """Return the rows that one product of ``rows`` rows is made with."""
        return rows if self.untiled else multiplied_rows(rows, self.itemsize, self.device)


@dataclass(frozen=True, slots=True)
class LossCost:
    """The cost of one call of a loss: bytes beside its input, and operations."""

    copies: int
    """Bytes of a loss without gradient, beside its buffers."""
    gradient_buffers: int
    """Bytes beside the buffers while the gradient is made."""
    forward: Work
    """The operations of a loss without gradient."""
    with_gradient: Work
    """The operations of a loss with its gradients, the forward included."""
    buffers: int = 0
    """Bytes that are kept from call to call."""
    gradient: int = 0
    """Bytes of dL/d(hidden)."""
    head_rows: int = 0
    """Bytes of the part of the head that is decoded at a time."""
    head_reads: int = 1
    """Times that a loss with gradient goes through the head."""


@dataclass(frozen=True, slots=True)
class LossFacts:
    """One loss, as planning knows it."""

    implementation: Any = field(repr=False)
    """The object that computes it, or its place as ``module:name``. Of a loss by chunks it is a
    :class:`~blockwalk.numerics.losses.head.TokenLoss`; else a function of an
    :class:`~blockwalk.estimators.head.Ending` that answers a mean over the tokens that count."""
    cost: Callable[[LossCall], LossCost] = field(repr=False)
    """Bytes and operations of one call."""
    by_chunks: bool = False
    """True for a sum over tokens that reads hidden states and the head, a part at a time, and never
    holds all logits: padding is cut, several forwards may read the head once, and a sequence may
    hold several documents. It needs logits of the known form."""
    log_probabilities: bool = False
    """True where a token's loss is minus the log-probability of its label, so that objectives may
    be functions of it (:mod:`blockwalk.plan.objectives`)."""
    takes_objective: bool = False
    """True where it is a function that the user hands over: ``implementation`` takes it too."""
    refuses: Refusals = field(default=nothing, repr=False)
    help: str = ""

    def for_head(self, *, custom: bool) -> LossFacts:
        """Return the loss of a model, with a ``custom`` head one whose logits are not of the known
        form: its own loss takes the place of one by chunks."""
        return LOSSES["model"] if custom and self.by_chunks else self


def by_chunks(call: LossCall) -> LossCost:
    """Return the cost of a cross-entropy over chunks of tokens and of the vocabulary."""
    size = call.itemsize
    float_size = call.float_size
    product_size = size if size < float_size else 0
    width = call.hidden_size
    n, v = chunk_sizes(
        call.tokens,
        width,
        call.vocab_size,
        size,
        soft_cap=call.soft_cap,
        budget=LOSS_BUDGET[call.device],
    )
    rows = max(n, v if call.trains_head else 0)
    at_once = LIFT[call.device]
    product = rows * width * product_size
    lift = min(at_once, rows * width) * float_size if product_size else 0
    labels = 0
    if not call.trains_head:
        labels = min(n, max(1, at_once // width)) * width * (float_size + product_size)
    copies, added, of_head = (
        widened_bytes(*sides) if call.widened else 0
        for sides in ((n, width, v), (n, v, width), (v, n, width))
    )
    # buffers stay once they are taken: those of the first chunk are there when the next one is
    # multiplied
    several = (n, v) != (call.tokens, call.vocab_size)
    kept = product + lift if several else 0
    peaks = [kept + copies, max(kept, n * width * product_size) + added, product + lift + labels]
    if call.trains_head:
        peaks.append(max(kept, product) + of_head)
    slope = float_size if call.soft_cap else 0
    return LossCost(
        buffers=n * v * (float_size + product_size + slope) + n * width * size,
        copies=copies,
        gradient_buffers=n * width * float_size + max(peaks),
        gradient=call.tokens * width * size,
        head_rows=v * width * size,
        head_reads=-(-call.tokens // n),
        forward=_chunks_work(call, n, v, gradient=False),
        with_gradient=_chunks_work(call, n, v, gradient=True),
    )


def _chunks_work(call: LossCall, n: int, v: int, *, gradient: bool) -> Work:
    """Return the operations of :func:`by_chunks`, n tokens and v rows of the vocabulary a chunk:
    one pass over the vocabulary, two where a head is trained."""
    size = call.itemsize
    float_size = call.float_size
    width = call.hidden_size
    chunks = -(-call.tokens // n) * -(-call.vocab_size // v)
    logits = n * v * float_size
    lift = n * v * (float_size + size) * (size < float_size)
    below = 3 * 2 * logits  # minus the maximum, at least _NEGLIGIBLE, exp
    capped = (4 * 2 + 3) * logits if call.soft_cap else 0
    touched = lift + 2 * logits + below + capped
    product = 2 * call.product_rows(n) * call.vocab_size * width
    products = product

    def added(rows: int) -> int:
        """Bytes of adding a product [rows, D] up in float32, where it is made in 16 bits."""
        return rows * width * (size + 4 * float_size) if lift else 0

    if gradient and not call.trains_head:
        products += product
        touched += lift + added(n) + 2 * n * width * float_size
    elif gradient:
        products += 2 * product + 2 * call.tokens * call.vocab_size * width
        touched += 2 * lift + below + 2 * logits + capped + added(n) + added(v)
    once = 4 * call.tokens * width * float_size if gradient else 0
    return Work(products, touched=once + touched * chunks)


def token_chunk(vocab_size: int, itemsize: int, device: str) -> int:
    """Return the most tokens whose logits, of so many bytes an element, are held at once."""
    return max(ROW_TILE, LOGITS_BUDGET[device] // (vocab_size * itemsize))


OF_A_FUNCTION = 3
"""Tensors of the logits' size that a function of them is taken to make, and its gradient again."""


def by_tokens(call: LossCall) -> LossCost:
    """Return the cost of a function of the logits, over chunks of tokens."""
    size = call.itemsize
    float_size = call.float_size
    product_size = size if size < float_size else 0
    width = call.hidden_size
    n = min(call.tokens, token_chunk(call.vocab_size, float_size, call.device))
    part = chunk_sizes(1, width, call.vocab_size, size, soft_cap=False)[1]
    chunks = -(-call.tokens // n)
    rows = call.product_rows(n)
    logits = n * call.vocab_size * float_size
    kept = logits * (2 if call.soft_cap else 1)
    product = 2 * rows * call.vocab_size * width
    lifted = n * call.vocab_size * (size + float_size) * (product_size > 0)
    forward = chunks * (lifted + 2 * logits * (1 + OF_A_FUNCTION))
    backward = chunks * (lifted + 2 * logits * (2 + OF_A_FUNCTION))
    return LossCost(
        buffers=n * part * (float_size + product_size) + n * width * size,
        copies=kept + OF_A_FUNCTION * logits,
        gradient_buffers=kept
        + (2 * OF_A_FUNCTION + 2) * logits
        + (n + (part if call.trains_head else 0)) * width * (float_size + product_size),
        gradient=call.tokens * width * size,
        head_rows=part * width * size,
        head_reads=2 * chunks,
        forward=Work(product, touched=forward),
        with_gradient=Work(product * (2 + call.trains_head), touched=forward + backward),
    )


def whole_logits(call: LossCall) -> LossCost:
    """Return the cost of a loss that the model's own code computes: logits, their float32 copy,
    log-probabilities, and in backward the gradients of these."""
    size = call.itemsize
    float_size = call.float_size
    count = call.batch * call.sequence * call.vocab_size
    product = 2 * count * call.hidden_size
    lifted = count * (size + float_size) * (size < float_size)
    forward = Work(product, touched=lifted + 4 * count * float_size)
    backward = Work(product * (1 + call.trains_head), touched=lifted + 5 * count * float_size)
    return LossCost(
        copies=count * (size + 2 * float_size),
        gradient_buffers=count * (2 * size + 3 * float_size),
        forward=forward,
        with_gradient=forward + backward,
    )


def _against_parts(plan: Any) -> Iterator[str]:
    """Yield what speaks against a loss of whole sequences where ranks hold parts of them."""
    if plan.mesh.context > 1:
        yield (
            f"loss is {plan.loss}, which reads the logits of whole sequences, and mesh.context is"
            f" {plan.mesh.context}: each rank has a part of them; set mesh.context: 1, or loss:"
            " chunked"
        )


OF_A_TOKEN = 80
"""Bytes of each token's numbers under an objective: loss, log-probability, weight, sequence, and
what their derivative takes."""


def weighed(cost: LossCost, call: LossCall, *, reads_twice: bool) -> LossCost:
    """Return the cost of a loss whose tokens an objective weighs: with numbers of each token; the
    rows of the gradient are multiplied, or the losses computed before (``reads_twice``)."""
    numbers = OF_A_TOKEN * call.tokens
    rows = Work(touched=2 * call.tokens * call.hidden_size * call.itemsize)
    return replace(
        cost,
        copies=cost.copies + numbers,
        gradient_buffers=cost.gradient_buffers + numbers,
        head_reads=cost.head_reads + reads_twice,
        with_gradient=cost.with_gradient + (cost.forward if reads_twice else rows),
    )


OBJECTIVE = LossFacts(
    "blockwalk.estimators.losses:objective_of",
    whole_logits,
    takes_objective=True,
    refuses=_against_parts,
    help="the function that Walker(objective=...) is given",
)
"""The loss of a training step that has an objective."""

LOSSES = Table(
    "loss",
    {
        "chunked": LossFacts(
            "blockwalk.numerics.losses.cross_entropy:LOSS",
            by_chunks,
            by_chunks=True,
            log_probabilities=True,
            help="cross-entropy over parts of the vocabulary, which never holds all logits",
        ),
        "model": LossFacts(
            "blockwalk.estimators.losses:own_loss",
            whole_logits,
            refuses=_against_parts,
            help="the model's own loss",
        ),
        "objective": OBJECTIVE,
    },
)
"""Losses by name."""
