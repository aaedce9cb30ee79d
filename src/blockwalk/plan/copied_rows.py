"""The rows that a batch is filled up with, where its own do not divide into equal parts."""

from __future__ import annotations

from blockwalk.plan.words import counted


def copies_of(rows: int, cuts: int) -> int:
    """Return the copies that a batch of so many rows is filled up with, where it is cut into so
    many equal parts."""
    return -rows % cuts


def note_on_copies(rows: int, cuts: int) -> str:
    """Return a sentence on the share of copies among the rows that a step walks; empty where there
    are none."""
    copies = copies_of(rows, cuts)
    if not copies:
        return ""
    walked = rows + copies
    return (
        f"a step has {counted(rows, 'sequence')}, which gradient_accumulation_steps × mesh.world ="
        f" {cuts} does not divide: {copies} of the {walked} rows that ranks walk"
        f" ({100 * copies / walked:.0f}%) are copies, of which nothing is learnt and which tokens a"
        f" second leave out; batch_size: {walked} has no copies"
    )
