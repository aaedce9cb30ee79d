"""Sizes of the chunks that weights, logits and updates are worked on in.

They are read by the estimators and by those who foresee what they will need; nothing here imports
torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


class ByDevice(dict[str, int]):
    """A size on a ``cpu``, and on every accelerator, of whatever name, that of ``cuda``."""

    def __missing__(self, device: str) -> int:
        return self["cuda"]


LIBRARY_WORKSPACE = {"cuda": 32 << 20}
"""Bytes that torch sets aside, among its tensors, for a library's products, once for each thread
that multiplies: those of a card of compute capability 9, a fourth of them on older ones. Other
devices have none. Five peaks of LoRA on an H200 were foreseen too low by whole numbers of these,
within 3 MB (dev/LOG.md); those of zeroth order by 12 MB, so that none is counted there."""

LOSS_BUDGET = ByDevice(cpu=16 << 20, cuda=256 << 20)
"""Bytes of scratch that the loss's chunk sizes aim at, one chunk of the head included."""

LOGITS_BUDGET = ByDevice(cpu=64 << 20, cuda=1 << 30)
"""Bytes of the logits of one chunk of tokens, where a loss needs those of the whole vocabulary."""

LIFT = ByDevice(cpu=1 << 18, cuda=1 << 24)
"""Elements of the float32 scratch through which 16-bit products are added up: 1 MiB, which stays in
a processor's cache; 64 MiB on an accelerator, where each part costs two launches."""


SEQUENCE_TILE = ByDevice(cpu=1024, cuda=8192)
"""Positions of a tile of a long sequence: enough that decoding a weight for each tile costs little
beside its products."""
LONG_ROW = 2048
"""The most tokens of a row that may have a mask of S × S, and whose documents are attended to
together: above, padding that only hides itself is cut off, and documents go one by one."""
LEAST_TILE = 64
"""The fewest positions that a tile may have."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles that long sequences are computed in."""

    size: int
    """Positions of a tile."""
    threshold: int
    """The most positions of a sequence that is computed whole."""


def spans(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Return the consecutive ranges (first, end) of at most ``size`` that ``start:stop`` is cut
    into."""
    return ((begin, min(begin + size, stop)) for begin in range(start, stop, size))


DECODE_BYTES = ByDevice(cpu=9 << 19, cuda=256 << 20)
"""Bytes of decoded weight at a time. Measured on a CPU with 1–8 MB: under 2 MB the products lose to
their own start, over 4 MB nothing is won; 4.5 cut Qwen2.5-0.5B's widest matrices into two chunks of
one shape."""

EXPERTS_BYTES = 1 << 30
"""Bytes of a layer's decoded experts up to which an accelerator decodes them all in one launch: 0.8
GB of Qwen3-30B-A3B's. Larger ones are decoded one by one, those that rows are routed to."""

UPDATE_ELEMENTS = ByDevice(cpu=1 << 19, cuda=1 << 22)
"""Elements of a zeroth-order update at a time: few enough to stay in cache on a processor, enough
to pay for the launches on an accelerator."""


TOGETHER = 512
"""Tokens up to which forwards of a zeroth-order step go through a block as one batch. More gain
nothing: products of so many rows take most of their time to multiply, and little to read the
matrix."""

THIN_TOGETHER = 32
"""Columns of the thin factors of all those forwards, up to which they may be: few beside a matrix's
own."""

ROW_TILE = 64
"""Rows of the smallest tile that a 16-bit product on a processor is made in
(:mod:`blockwalk.numerics.row_tiles`)."""
UNTILED_ROWS = 8
"""Up to so many rows a product is made as it is: there are few such shapes, and generation has one
row."""


def chunk_sizes(
    tokens: int,
    hidden_size: int,
    vocab_size: int,
    itemsize: int,
    *,
    soft_cap: bool,
    budget: int = LOSS_BUDGET["cpu"],
) -> tuple[int, int]:
    """Return tokens and vocabulary rows of one chunk for about ``budget`` bytes of scratch: a third
    for a chunk of the head, a third for its logits, a third for the sums [n, D], in a dtype of
    ``itemsize`` bytes.

    The vocabulary chunk rests on the head alone, so that a token's loss is the same whatever it is
    batched with. In 16 bits there is room for whole tiles of :data:`ROW_TILE` tokens, in which
    products are made."""
    third = budget // 3
    size = itemsize
    in_tiles = size == 2
    float_size = max(size, 4)
    copy_size = size if in_tiles else 0
    step = ROW_TILE if in_tiles else 1
    fewest = ROW_TILE if in_tiles else 32
    vocab_rows = min(
        third // (hidden_size * size), third // (fewest * (2 * float_size + copy_size))
    )
    vocab_chunk = min(vocab_size, max(256, vocab_rows // 256 * 256))
    logit = float_size * (2 if soft_cap else 1) + copy_size
    tokens_that_fit = min(
        third // (vocab_chunk * logit), third // (hidden_size * (float_size + 2 * size))
    )
    token_chunk = max(fewest, tokens_that_fit // step * step)
    parts = -(-tokens // token_chunk)
    return -(-tokens // parts), vocab_chunk


def multiplied_rows(rows: int, itemsize: int, device: str) -> int:
    """Return the number of rows that a product of ``rows`` rows is made with, those included that
    fill up its last tile."""
    tiled = device == "cpu" and itemsize == 2 and rows > UNTILED_ROWS
    return -(-rows // ROW_TILE) * ROW_TILE if tiled else rows


WIDENED_ROWS = 512
"""Rows of a product at a time, where a processor makes products of 16 bits of float32 copies."""


def widened_columns(inner: int) -> int:
    """Return the columns that are copied at a time of a matrix with ``inner`` rows: those of
    :data:`DECODE_BYTES` in 16 bits."""
    return max(1, DECODE_BYTES["cpu"] // (2 * inner))


def widened_bytes(rows: int, inner: int, columns: int) -> int:
    """Return bytes of the float32 copies that a product [rows, inner]·[inner, columns] is made of
    at a time, its result with them."""
    rows = min(rows, WIDENED_ROWS)
    columns = min(columns, widened_columns(inner))
    return 4 * (inner * columns + rows * (inner + columns))


def decoded_bytes(numel: int, itemsize: int, device: str, *, experts: bool) -> int:
    """Return the bytes of the largest part of a weight that is decoded at a time. ``experts``: it
    is all of a layer's."""
    nbytes = numel * itemsize
    at_once = experts and device != "cpu" and nbytes <= EXPERTS_BYTES
    return nbytes if at_once else min(nbytes, DECODE_BYTES[device])


ALIGN = 64
"""Bytes that every tensor of a unit's state, and every rank's slice of it, begins at a multiple of:
a line of a processor's cache."""


def side_by_side(sizes: Iterable[int], align: int = ALIGN) -> tuple[list[int], int]:
    """Return places of parts of so many elements or bytes one after the other, each at a multiple
    of ``align``, and the end."""
    starts = []
    end = 0
    for size in sizes:
        starts.append(end)
        end += -(-size // align) * align
    return starts, end


def steps_of_epochs(examples: int, batch_size: int, epochs: float) -> int:
    """Count the batches until every example has come ``epochs`` times. A batch that an epoch cannot
    fill goes on with the next epoch's examples, so that only the last batch holds more than was
    asked for."""
    drawn = math.ceil(round(epochs * examples, 6))  # 0.1 × 30 is 3, not 4
    return max(-(-drawn // batch_size), 1) if examples else 0
