"""The memory and the work of a chunked loss, in closed form."""

from __future__ import annotations

from dataclasses import dataclass

from blockwalk.plan.sizes import LIFT, LOSS_BUDGET, chunk_sizes, multiplied_rows, widened_bytes
from blockwalk.program.costs import Work, sizes


@dataclass(frozen=True, slots=True)
class LossMemory:
    """Bytes that one chunked cross-entropy takes beside its input: n tokens and v vocabulary rows a
    chunk."""

    buffers: int
    """A chunk's hidden states and logits: all that a loss without gradient keeps."""
    copies: int
    """Float32 copies while the logits are multiplied."""
    gradient_buffers: int
    """Sums, products and label rows of the gradient, or copies in their place, while it is made."""
    gradient: int
    """dL/d(hidden)."""
    head_rows: int
    """One chunk of the head, where it is decoded."""


@dataclass(frozen=True, slots=True)
class ChunkedLoss:
    """One call of :func:`blockwalk.numerics.loss.chunked_cross_entropy`."""

    tokens: int
    hidden_size: int
    vocab_size: int
    itemsize: int
    soft_cap: bool
    device: str
    trains_head: bool = False
    widened: bool = False
    """True where products are made of float32 copies."""

    @property
    def chunks(self) -> tuple[int, int]:
        """n and v."""
        budget = LOSS_BUDGET[self.device]
        sides = (self.tokens, self.hidden_size, self.vocab_size)
        return chunk_sizes(*sides, self.itemsize, soft_cap=self.soft_cap, budget=budget)

    @property
    def rows(self) -> int:
        """The rows that all chunks of tokens are multiplied as."""
        n, _ = self.chunks
        whole, rest = (
            multiplied_rows(rows, self.itemsize, self.device) for rows in (n, self.tokens % n)
        )
        return self.tokens // n * whole + rest

    @property
    def memory(self) -> LossMemory:
        """Bytes that it allocates."""
        n, v = self.chunks
        size = self.itemsize
        width = self.hidden_size
        wide = max(size, 4)
        narrow = size if size < wide else 0
        rows = max(n, v if self.trains_head else 0)
        at_once = LIFT[self.device]
        product = rows * width * narrow
        lift = min(at_once, rows * width) * wide if narrow else 0
        labels = (
            0 if self.trains_head else min(n, max(1, at_once // width)) * width * (wide + narrow)
        )
        copies, added, of_head = (
            widened_bytes(*sides) if self.widened else 0
            for sides in ((n, width, v), (n, v, width), (v, n, width))
        )
        # buffers stay once they are taken: those of the first chunk are there when the next one is
        # multiplied
        before = product + lift if (n, v) != (self.tokens, self.vocab_size) else 0
        taken = [before + copies, max(before, n * width * narrow) + added, product + lift + labels]
        if self.trains_head:
            taken.append(max(before, product) + of_head)
        return LossMemory(
            buffers=n * v * (wide + narrow + (wide if self.soft_cap else 0)) + n * width * size,
            copies=copies,
            gradient_buffers=n * width * wide + max(taken),
            gradient=self.tokens * width * size,
            head_rows=v * width * size,
        )

    def work(self, *, gradient: bool) -> Work:
        """Return its operations, gradients included where they are asked for: one pass over the
        vocabulary, two where the head is trained."""
        n, v = self.chunks
        size = self.itemsize
        wide = max(self.itemsize, 4)
        width = self.hidden_size
        chunks = -(-self.tokens // n) * -(-self.vocab_size // v)
        logits = n * v * wide
        narrow = n * v * (wide + size) * (size < wide)
        below = [(2 * logits, 3)]  # minus the maximum, at least _NEGLIGIBLE, exp
        capped = [(2 * logits, 4), (3 * logits, 1)] if self.soft_cap else []
        passes = [(narrow, 1), (logits, 2), *below, *capped]
        products = 1

        def added(rows: int) -> list[tuple[int, int]]:
            """Adding a product [rows, D] up in float32, where it is made in 16 bits."""
            return (
                [(rows * width * (size + wide), 1), (3 * rows * width * wide, 1)] if narrow else []
            )

        if gradient and not self.trains_head:
            products += 1
            passes += [(narrow, 1), *added(n), (2 * n * width * wide, 1)]
        elif gradient:
            products += 3
            passes += [(narrow, 2), *below, (2 * logits, 1), *capped, *added(n), *added(v)]
        once = [(self.tokens * width * wide, 4)] if gradient else []
        return Work(
            ((2 * multiplied_rows(n, self.itemsize, self.device) * v * width, products * chunks),),
            starts=8 * chunks,
            float32_passes=sizes(once),
            in_place=sizes((each, count * chunks) for each, count in passes),
        )


def own_loss_work(
    tokens: int, hidden_size: int, vocab_size: int, size: int, *, trains_head: bool
) -> tuple[Work, Work]:
    """Return the operations of a model's own loss, on whole logits: forward, and backward."""
    wide = max(size, 4)
    count = tokens * vocab_size
    product = 2 * count * hidden_size
    lifted = (count * (size + wide) * (size < wide), 1)
    forward = Work(((product, 1),), float32_passes=sizes([lifted, (2 * count * wide, 2)]))
    moved = [lifted, (3 * count * wide, 1), (2 * count * wide, 1)]
    return forward, Work(((product, 1 + trains_head),), float32_passes=sizes(moved))
