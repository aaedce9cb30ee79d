"""The lines that a run begins with, and those of a dry run, which does all that a run does before
its model is opened."""

from __future__ import annotations

from collections.abc import Iterator

from blockwalk.engine.frozen_codec import refuse_rounded
from blockwalk.numerics.device import chosen, described
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.words import counted
from blockwalk.report.capacity import check_budget, check_memory, close_memory
from blockwalk.report.disk_room import check_disks
from blockwalk.report.step_forecast import StepForecast
from blockwalk.report.zeroth_order_advice import zeroth_order_advice
from blockwalk.train import preflight
from blockwalk.train.beginning import Beginning
from blockwalk.train.callbacks import trackers
from blockwalk.train.frozen_codec import settled
from blockwalk.train.prepared_run import prepare
from blockwalk.train.progress import learnt_lines


def opening_lines(
    beginning: Beginning, step_forecast: StepForecast, opened_at: int
) -> Iterator[str]:
    """Yield the lines that a run begins with: what is foreseen of it, and what its user should know
    of.

    Args:
        opened_at: bytes that the process held before the model was opened.
    """
    run = beginning.config
    prepared = beginning.prepared
    held_out = prepared.held_out
    yield f"device: {described(chosen())}"
    yield from step_forecast.lines()
    yield from step_forecast.forecast.lines()
    yield from zeroth_order_advice(prepared.plan, run.adapters)
    yield from close_memory(run, step_forecast.forecast, opened_at, step_forecast.process_bytes)
    warnings = [*prepared.notes, *prepared.rows.report.warnings()]
    if held_out is not None:
        warnings += held_out.notes()
    yield from (f"note: {warning}" for warning in (*warnings, *beginning.start.damaged))
    yield from preflight.notes(run, prepared.longest)
    yield from preflight.usual_elsewhere(run)
    limit = run.data.eval_limit
    if held_out is not None and 0 < limit < held_out.records:
        yield f"evaluates {limit} of {held_out.records} records (data.eval_limit)"


def dry_run(run: RunConfig) -> Iterator[str]:
    """Yield the lines of a dry run: everything that a run does before its model is opened, and what
    it found. Nothing is written.

    Raises:
        ValueError: settings or data that cannot be trained with.
        DoesNotFit: the plan needs more than its budget, or than this machine has.
    """
    run, codec_lines = settled(run)
    refuse_rounded(run.model, run.plan, run.adapters)
    trackers(run.report_to)  # refused here where they are named wrongly, or not installed
    prepared = prepare(run)
    forecast = prepared.foreseen
    rows = prepared.rows
    check_budget(run, forecast)
    check_memory(run, forecast, prepared.held_bytes)
    check_disks(run, forecast, prepared.total, prepared.map_bytes)
    yield f"device  {described(chosen())}"
    yield from forecast.overview(prepared.total, prepared.usual)
    yield from codec_lines
    yield from forecast.lines()
    held_out = ""
    if prepared.held_out is not None:
        held_out = f", {prepared.held_out.records} held-out ones"
    yield (
        f"data    {rows.counted_examples} of up to {prepared.longest} tokens,"
        f" {rows.summary.learnt:,} of {len(rows.token_ids):,} tokens learnt{held_out};"
        f" {counted(prepared.total, 'step')}"
    )
    yield from (f"note: {warning}" for warning in (*prepared.notes, *rows.report.warnings()))
    yield from preflight.notes(run, prepared.longest)
    yield from preflight.usual_elsewhere(run)
    yield from learnt_lines("first record", prepared.shown)
    yield "nothing was written; leave --dry-run out to train"
