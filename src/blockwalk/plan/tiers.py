"""The table of tiers, fastest first: a tier is a row, and a maker of its memory in
:mod:`blockwalk.tiers.memories` or one that the row brings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blockwalk.plan.refusal import Refusals, nothing
from blockwalk.plan.table import Table


@dataclass(frozen=True, slots=True)
class TierFacts:
    """One tier, as planning knows it."""

    pool: str
    """The memory that its bytes are counted in (:class:`blockwalk.program.program.Pool`)."""
    link: str = ""
    """The link that its bytes cross to host memory, before that to the device: ``disk``
    stands for ``disk_read`` and ``disk_write`` of a hardware file, another name for two of its
    ``links``; empty: nothing."""
    resident: bool = False
    """True where state stays for good where it is computed with: nothing comes and goes."""
    host: bool = False
    """True where it is a processor's own memory: on a CPU, the device's."""
    mapped: bool = False
    """True where its bytes are files. A processor reads frozen parts in place through a file map;
    what is updated there lies in file maps, and every write wears the disk."""
    pinned: bool = False
    """True where an accelerator copies from its buffers directly."""
    durable: bool = False
    """True where weights that are trained there outlive the process: the tier is the checkpoint."""
    begins_from: str = ""
    """The faster tier that a run on an accelerator begins from, where there is room and nobody
    named a tier; empty: it stays."""
    adapters_on: str = ""
    """The tier that a run on an accelerator keeps masters and optimizer states of adapters on,
    where there is room and nobody named a tier; empty: they stay."""
    residence: str = "streamed"
    """The way in which its state visits the device, where it does: a row of
    :data:`blockwalk.program.residence.RESIDENCES`."""
    shares: tuple[tuple[str, float], ...] = ()
    """Tiers that optimizer states lie on in its place, each with its share of the units, which are
    evenly spread; the last takes what is left. They are those beside masters of one process."""
    implementation: Any = None
    """The maker of the memory (a :data:`~blockwalk.tiers.memories.Maker`) of a tier registered from
    elsewhere; None: that of its name in :mod:`blockwalk.tiers.memories`."""
    refuses: Refusals = nothing
    """Refusals of plans with a kind of state on it: a function of both."""
    help: str = ""

    def maps(self, device: str) -> bool:
        """Return whether state on this tier is used through file maps by a device."""
        return self.mapped and device == "cpu"

    def is_device(self, device: str) -> bool:
        """Return whether state on this tier lies in a device's own memory."""
        return self.resident or (self.host and device == "cpu")


TIERS = Table(
    "tier",
    {
        "device": TierFacts(pool="device", resident=True),
        "host": TierFacts(pool="host", host=True, pinned=True, help="RAM"),
        "disk": TierFacts(
            pool="disk",
            link="disk",
            mapped=True,
            durable=True,
            begins_from="host",
            adapters_on="device",
        ),
    },
)
"""Tiers by name."""
