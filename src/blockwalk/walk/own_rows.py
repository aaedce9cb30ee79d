"""Rows that each rank brings itself (``local_batch=True``): ranks agree on them by a few numbers,
before any of them walks."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from blockwalk.data.batch import (
    Batch,
    copies_of,
    lengthened,
    loss_tokens,
    micro_batches,
    note_on_copies,
    require_ids,
    share,
)
from blockwalk.data.packing import pack_batch, packed_tokens
from blockwalk.plan.plan import Plan
from blockwalk.plan.words import counted
from blockwalk.ranks.agreement import gather_json
from blockwalk.ranks.ranks import OWN_ROWS, Ranks
from blockwalk.walk.batch_parts import BatchParts, parts_of


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Facts of one rank's rows, as they go over the ranks: numbers that a float64 holds."""

    usable: float = 0.0
    """1 where this rank can walk its rows, 0 where it refuses them."""
    rows: float = 0.0
    length: float = 0.0
    """Tokens of a row, padding included."""
    counted: float = 0.0
    """Labels that count."""
    tensors: float = 0.0
    """A digest of the tensors' names and kinds of numbers."""
    packed: float = 0.0
    """Tokens of the fullest micro-batch without its padding; 0 where rows are not packed."""


def require_own_rows(plan: Plan, words: Any) -> None:
    """Raise ValueError where ranks cannot walk rows of their own."""
    if words is not None or (plan.mesh.world > 1 and not plan.home.gathered):
        raise ValueError(
            f"local_batch=True with method {plan.method!r}: its {plan.mesh.world} ranks share the"
            " forwards of one batch, and may walk any row of it; give every rank the same whole"
            " batch with local_batch=False"
        )
    if plan.mesh.pipeline > 1:
        raise ValueError(
            f"local_batch=True with mesh.pipeline: {plan.mesh.pipeline}, whose stages walk over the"
            " same rows; give every rank the same whole batch with local_batch=False"
        )
    if plan.mesh.context > 1:
        raise ValueError(
            f"local_batch=True with mesh.context: {plan.mesh.context}, whose ranks hold parts of"
            " the same rows; give every rank the same whole batch with local_batch=False"
        )


def cut_own_rows(
    batch: Batch, plan: Plan, ranks: Ranks, *, count: int, step: int, packs: bool, vocab_size: int
) -> BatchParts:
    """Return this rank's rows cut into ``count`` micro-batches, when all ranks have agreed on them;
    they call this together. Rows are padded to the longest of any rank.

    Args:
        batch: the rows of this rank alone, as :meth:`Walker.step` takes them.
        plan: its mesh.
        ranks: those that each bring rows.
        step: the number of the step, for messages.
        packs: True where short sequences are laid side by side, for a model that keeps them apart.
        vocab_size: rows of the model's embeddings.

    Raises:
        ValueError: on every rank: one cannot walk its rows, or ranks bring unequal tensors or
            numbers of rows.
    """
    error = ""
    facts = OwnRows()
    try:
        (own,) = micro_batches(batch, 1)
        require_ids(own["input_ids"], vocab_size)
        facts = _facts_of(own, count, packs=packs)
    except ValueError as raised:
        error = str(raised)
    ranks.batch_digest = OWN_ROWS
    everyone = [OwnRows(*values) for values in ranks.begin(step, astuple(facts))]
    _require_alike(step, everyone, error, batch)
    longest = max(int(rank.length) for rank in everyone)
    packed = [int(rank.packed) for rank in everyone]
    own = lengthened(own, longest)
    if all(packed):
        own = pack_batch(own, count, tokens=max(packed))
    rows = -(-int(facts.rows) // count)
    world = len(everyone)
    note = note_on_copies(int(facts.rows) * world, count * world)
    if note and ranks.rank == 0:
        warnings.warn(note, stacklevel=2)
    return parts_of(
        share(own, count, 1, 0),
        plan,
        rows,
        tokens=sum(int(rank.counted) for rank in everyone),
        copies=copies_of(int(facts.rows), count) * world,
    )


def _facts_of(batch: Batch, count: int, *, packs: bool) -> OwnRows:
    rows, length = batch["input_ids"].shape
    digest = hashlib.blake2b(repr(_tensors(batch)).encode(), digest_size=6).digest()
    return OwnRows(
        usable=1.0,
        rows=float(rows),
        length=float(length),
        counted=float(loss_tokens(batch)),
        tensors=float(int.from_bytes(digest, "little")),
        packed=float(packed_tokens(batch, count)) if packs else 0.0,
    )


def _tensors(batch: Any) -> list[str]:
    """Return names and kinds of numbers of a batch's tensors, sorted."""
    if not isinstance(batch, Mapping):
        return []
    kinds = {name: str(getattr(value, "dtype", type(value))) for name, value in batch.items()}
    return sorted(f"{name} ({kind.removeprefix('torch.')})" for name, kind in kinds.items())


def _require_alike(step: int, everyone: list[OwnRows], error: str, batch: Batch) -> None:
    """Raise ValueError, on every rank, where a rank refuses its rows or has others than rank 0."""
    if not all(rank.usable for rank in everyone):
        errors = [error] if len(everyone) == 1 else gather_json(error)
        number = next(number for number, text in enumerate(errors) if text)
        raise ValueError(f"step {step}, local_batch: rank {number}: {errors[number]}")
    first = everyone[0]
    for number, rank in enumerate(everyone):
        if rank.tensors != first.tensors:
            tensors = gather_json(_tensors(batch))
            raise ValueError(
                f"step {step}, local_batch: the batch of rank 0 has {', '.join(tensors[0])}, that"
                f" of rank {number} {', '.join(tensors[number])}; every rank brings the same"
                " tensors"
            )
        if rank.rows != first.rows:
            raise ValueError(
                f"step {step}, local_batch: rank 0 brings {counted(int(first.rows), 'sequence')},"
                f" rank {number} {counted(int(rank.rows), 'sequence')}; every rank brings as many:"
                " batch_size ÷ mesh.world, filled up with rows whose labels are all -100"
            )
