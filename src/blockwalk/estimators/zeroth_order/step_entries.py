"""The entries of a run's steps: what updates that wait are read from, and what a ledger keeps."""

from __future__ import annotations

from collections.abc import Callable

from blockwalk.checkpoints.ledger import Ledger, LedgerEntry
from blockwalk.engine.buckets import Buckets
from blockwalk.plan.words import counted


class StepEntries:
    """The steps of a run that count, and how far each unit's weights have followed them.

    Args:
        buckets: the home of the weights; each unit knows the step that it is up to date with.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.entries: list[LedgerEntry] = []
        """Steps done, oldest first."""
        self.entries_after = 0
        """The step that the first of them follows."""
        self.record: Callable[[LedgerEntry], None] = self.entries.append
        """Called with each step's entry before any weight changes; the step counts when it
        returns."""

    @property
    def steps(self) -> int:
        """Steps that count as done."""
        return self.entries_after + len(self.entries)

    def since(self, step: int) -> list[LedgerEntry]:
        """Return the entries of the steps after this one."""
        return self.entries[step - self.entries_after :]

    def waiting(self) -> int:
        """Return the most entries that any unit has not seen where it stays between its turns."""
        buckets = self.buckets
        stored = (buckets.stored_step(unit) for unit in set(buckets.home.values()))
        return max((self.steps - step for step in stored), default=0)

    def resume(self, steps: int) -> None:
        """Go on after so many steps, whose updates the weights have, without a ledger."""
        self.entries.clear()
        self.record = self.entries.append
        self.entries_after = steps

    def take_up(self, ledger: Ledger) -> int:
        """Go on where a ledger stands, and write every step to it before the step counts; return
        the steps done.

        Raises:
            ValueError: the weights on the disk have more steps than the ledger.
        """
        buckets = self.buckets
        ahead = max(buckets.stored_step(unit) for unit in range(len(buckets.units)))
        if ahead > ledger.steps:
            raise ValueError(
                f"{ledger.path} has {counted(ledger.steps, 'step')}, and the weights of this run"
                f" in the working folder have {ahead}: the ledger was cut. Remove the working"
                " folder to rebuild the weights from the ledger"
            )
        self.entries[:] = ledger.entries
        self.entries_after = 0

        def record(entry: LedgerEntry) -> None:
            ledger.append(entry)
            self.entries.append(entry)

        self.record = record
        return ledger.steps
