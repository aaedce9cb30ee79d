"""Wear of the disk by a whole run, as a share of what an SSD is usually rated for.

The figures are upper bounds: the kernel drops pages of deleted files unwritten, and merges what is
written twice in half a minute. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from blockwalk.plan.run_config import RunConfig
from blockwalk.program.program import human_bytes
from blockwalk.report.disk_bytes import step_bytes, written_bytes
from blockwalk.report.forecast import Forecast

RATING = 600e12
"""Bytes that a consumer SSD of 1 TB is usually rated to have written in its life (TBW); drives of
QLC cells have a third."""


def wear(run: RunConfig, forecast: Forecast, steps: int) -> Iterator[str]:
    """Yield the line about the disk's life; none where a run of unknown length writes nothing in a
    step.

    Args:
        steps: optimizer steps of the whole run; 0 where they are not known.
    """
    if steps:
        written = written_bytes(run, forecast, steps)
        share = written / RATING
        percent = f"{share:.2%}" if share >= 1e-4 else "less than 0.01%"
        yield (
            f"disk     {human_bytes(written)} written in {steps} steps at most: {percent} of"
            f" {human_bytes(RATING)}, the usual rating (TBW) of a 1 TB SSD"
        )
    elif nbytes := step_bytes(forecast):
        yield (
            f"disk     {human_bytes(nbytes)} written a step at most: {RATING / nbytes:,.0f} steps"
            f" write {human_bytes(RATING)}, the usual rating (TBW) of a 1 TB SSD"
        )
