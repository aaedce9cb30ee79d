"""Bytes that a run writes to its disk over all its steps, beside what an SSD is usually rated for.

The figures are upper bounds: the kernel drops pages of deleted files unwritten, and merges what is
written twice in half a minute. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from blockwalk.models.model_source import model_source
from blockwalk.plan.run_config import RunConfig
from blockwalk.program.program import human_bytes
from blockwalk.report.forecast import Forecast

RATING = 600e12
"""Bytes that a consumer SSD of 1 TB is usually rated to have written in its life (TBW); drives of
QLC cells have a third."""


def step_bytes(run: RunConfig, forecast: Forecast) -> int:
    """Return the most bytes that one optimizer step writes to the disk: trained parameters and
    optimizer states that lie there, what an update at the block's turn keeps to go back to, float32
    masters of slices, and activation checkpoints."""
    plan = forecast.plan
    rows = {row.kind: row for row in forecast.rows()}
    trained = rows["trainable"]
    states = rows["optimizer"]
    activations = rows.get("activation")
    total = sum(
        row.nbytes
        for row in (trained, states, activations)
        if row is not None and row.placement.on_disk
    )
    if plan.zeroth_order:
        return total
    if plan.sharded and plan.optimizer_state.on_disk:
        total += 4 * forecast.model.numel(trainable=True)
    if plan.update.at_turn and forecast.device == "cpu":
        total += trained.nbytes + states.nbytes
    return total


def checkpoint_bytes(run: RunConfig, forecast: Forecast) -> int:
    """Return the bytes of one saved checkpoint; of weights that zeroth order streams from disk none
    are copied."""
    rows = {row.kind: row for row in forecast.rows()}
    if run.plan.zeroth_order and rows["trainable"].placement.on_disk:
        return 0
    return rows["trainable"].nbytes + rows["optimizer"].nbytes


def written_bytes(run: RunConfig, forecast: Forecast, steps: int) -> int:
    """Return the most bytes that a run of ``steps`` optimizer steps writes to the disk: its pack of
    the frozen weights, its steps, its checkpoints, and what it saves at the end."""
    rows = {row.kind: row for row in forecast.rows()}
    packs = run.plan.frozen.codec.encoded and not model_source(run.model).packed
    once = rows["frozen"].nbytes if packs else 0
    if run.plan.zeroth_order and rows["trainable"].placement.on_disk:
        once += rows["trainable"].nbytes + rows["optimizer"].nbytes
    saves = -(-steps // run.save_every) if run.save_every else 1
    final = (
        rows["trainable"].nbytes
        if run.adapters is not None
        else sum(unit.nbytes() for unit in forecast.model.units)
    )
    return (
        once + steps * step_bytes(run, forecast) + saves * checkpoint_bytes(run, forecast) + final
    )


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
            f"disk    {human_bytes(written)} written in {steps} steps at most: {percent} of"
            f" {human_bytes(RATING)}, the usual rating (TBW) of a 1 TB SSD"
        )
    elif nbytes := step_bytes(run, forecast):
        yield (
            f"disk    {human_bytes(nbytes)} written a step at most: {RATING / nbytes:,.0f} steps"
            f" write {human_bytes(RATING)}, the usual rating (TBW) of a 1 TB SSD"
        )
