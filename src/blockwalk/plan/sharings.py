"""The table of ways in which ranks that come and go share a zeroth-order step's forwards
(``elastic``). None is the house's own: an installed package brings it."""

from __future__ import annotations

from dataclasses import dataclass

from blockwalk.plan.table import Reference, Table


@dataclass(frozen=True, slots=True)
class SharingFacts:
    """One way, as a run asks for it."""

    make: Reference
    """A function of (address, timeout in seconds, joins=), which returns the
    :class:`~blockwalk.ranks.forward_sharing.ChangingRanks`."""
    help: str = ""


SHARINGS: Table[SharingFacts] = Table("elastic")
"""The ways by the name of the setting that gives the run's address."""
