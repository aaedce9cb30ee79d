"""The rows of a batch that this rank walks: its share of one that every rank is given, or rows that
it brings itself (``local_batch=True``). Ranks agree on them by a few numbers, before any of them
walks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from blockwalk.data.batch import (
    Batch,
    LearntCounts,
    learnt_counts,
    lengthened,
    micro_batches,
    require_entries,
    require_ids,
    require_mask,
    require_tokens,
)
from blockwalk.data.packing import pack_parts, packed_tokens, row_length
from blockwalk.data.row_batch import RowBatch, batch_shape, share
from blockwalk.plan.copied_rows import copies_of, note_on_copies
from blockwalk.plan.plan import Plan
from blockwalk.program.program import Shape
from blockwalk.ranks.ranks import Ranks
from blockwalk.walk.batch_parts import BatchParts, parts_of


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Facts of one rank's rows, as they go over the ranks: numbers that a float64 holds."""

    length: float = 0.0
    """Tokens of a row, padding included."""
    tokens: float = 0.0
    """Labels that count."""
    sequences: float = 0.0
    """Sequences with such a label."""
    chosen_tokens: float = 0.0
    """Labels that count of the first sequence of each example."""
    packed: float = 0.0
    """Tokens of the fullest micro-batch without its padding; 0 where rows are not packed."""


def require_own_rows(plan: Plan, words: Any) -> None:
    """Raise ValueError where ranks cannot walk rows of their own."""
    if words is not None or (plan.mesh.world > 1 and plan.estimator.facts.shares_forwards):
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


@dataclass(frozen=True, slots=True)
class Cut:
    """The way in which a batch is walked, on every rank alike."""

    call: str
    """The method that was called, for messages."""
    count: int
    """Micro-batches of each rank's rows."""
    packs: bool
    """True where short sequences are laid side by side, for a model that keeps them apart."""
    vocab_size: int
    """Rows of the model's embeddings."""
    local: bool = False
    """True where each rank brings rows of its own."""
    further_columns: bool = False
    """True where an objective may read further columns of the batch."""
    entries: tuple[str, ...] = ()
    """Entries that a step's batch must have for its objective."""


def cut_rows(
    batch: Batch,
    plan: Plan,
    ranks: Ranks,
    cut: Cut,
    step: int,
    targets: Mapping[str, str] | None = None,
) -> BatchParts:
    """Return this rank's rows cut into micro-batches, when all ranks have agreed on them; they call
    this together. Rows of ranks that bring their own are padded to the longest of any.

    Args:
        batch: the rows of all ranks, or of this one alone, as :meth:`Walker.step` takes them.
        plan: its mesh.
        ranks: those that each walk rows.
        cut: the way in which it is walked.
        step: the number of the step, for messages.
        targets: further facts that ranks must have alike, by name.

    Raises:
        ValueError: on every rank: one cannot walk its rows, or ranks bring different batches.
    """
    context = plan.mesh.context
    stage_ranks = plan.mesh.stage_ranks  # every stage walks the same rows
    shares = 1 if cut.local else stage_ranks // context
    place = 0 if cut.local else ranks.rank % stage_ranks // context
    group = plan.objective_facts.group
    error = ""
    rows = 0
    examples = 0
    own: Batch = {}
    facts = RowFacts()
    try:
        checked = batch
        if not isinstance(batch, RowBatch):
            (checked,) = micro_batches(batch, 1, further_columns=cut.further_columns)
        rows, _ = batch_shape(checked)
        examples = rows // group
        own = share(checked, cut.count, shares, place, group=group)
        require_entries(own, cut.entries)
        require_ids(own["input_ids"], cut.vocab_size)
        require_mask(own, context)
        packs = cut.packs and examples % (cut.count * shares) == 0
        facts = _facts_of(own, cut, group, packs=packs)
    except ValueError as raised:
        error = f"local_batch: {raised}" if cut.local and ranks.world > 1 else str(raised)
    facts_alike = {**_facts_alike(batch, cut), **(targets or {})}
    ranks.read(None if cut.local else batch, facts_alike, error)
    everyone = [RowFacts(*numbers) for numbers in ranks.begin(step, astuple(facts))]
    length = max(int(rank.length) for rank in everyone)
    require_tokens(length, context)
    packed = [int(rank.packed) for rank in everyone]
    tokens = max(packed) if all(packed) else 0  # side by side, where all ranks can walk theirs so
    share_rows = -(-examples // (cut.count * shares)) * group
    padded = share_rows * length
    largest = int(row_length(tokens, padded)) if tokens else padded
    brought = ranks.world if cut.local else 1
    if cut.local and ranks.rank == 0:
        _say_copies(examples * brought, cut.count * brought)
    holders = 1 if cut.local else ranks.world // shares  # ranks that have the same rows
    return parts_of(
        pack_parts(lengthened(own, length), cut.count, tokens=tokens, group=group),
        plan,
        Shape(share_rows, -(-largest // share_rows)),
        _counts_of(everyone, holders),
        copies=copies_of(examples, cut.count * shares) * group * brought,
        part=ranks.rank % context,
    )


def _facts_of(own: Batch, cut: Cut, group: int, *, packs: bool) -> RowFacts:
    packed = packed_tokens(own, cut.count) if packs else 0
    counts = learnt_counts(own, group)
    numbers = (counts.tokens, counts.sequences, counts.chosen_tokens, packed)
    return RowFacts(float(own["input_ids"].shape[1]), *map(float, numbers))


def _counts_of(everyone: Sequence[RowFacts], holders: int) -> LearntCounts:
    """Return the counts of all ranks, of which so many have the same rows."""
    names = [field.name for field in fields(LearntCounts)]
    sums = {name: sum(int(getattr(rank, name)) for rank in everyone) for name in names}
    return LearntCounts(**{name: total // holders for name, total in sums.items()})


def _say_copies(rows: int, cuts: int) -> None:
    """Warn where rows are copies."""
    if note := note_on_copies(rows, cuts):
        warnings.warn(note, stacklevel=4)


def shapes_of(batch: Any) -> dict[str, str]:
    """Return shape and kind of numbers of a batch's tensors, by name, whatever it is."""
    if isinstance(batch, RowBatch):
        return {"rows × tokens": " × ".join(map(str, batch.shape))}
    if not isinstance(batch, Mapping):
        return {}
    return {
        name: f"{' × '.join(map(str, getattr(value, 'shape', ())))} {_kind(value)}".strip()
        for name, value in batch.items()
    }


def _kind(value: Any) -> str:
    return str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")


def _facts_alike(batch: Any, cut: Cut) -> dict[str, str]:
    """Return what ranks must have alike, by name: the call, and of the batch its tensors' shapes
    and kinds; where each rank brings rows of its own, their number in place of the shapes."""
    facts = {"call": cut.call, "micro-batches": str(cut.count), "local_batch": str(cut.local)}
    if not cut.local or not isinstance(batch, Mapping):
        return {**facts, **shapes_of(batch)}
    rows = {str(len(value)) for value in batch.values() if getattr(value, "shape", ())}
    kinds = {name: _kind(value) for name, value in batch.items()}
    return {**facts, **kinds, "rows": ", ".join(sorted(rows))}
