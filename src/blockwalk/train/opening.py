"""The lines that a run begins with, and those of a dry run, which does all that a run does before
its model is opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from blockwalk.engine.frozen_codec import refuse_rounded
from blockwalk.numerics.device import chosen, described
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.words import counted
from blockwalk.report.capacity import check_budget, check_memory, close_memory
from blockwalk.report.disk_room import check_disks
from blockwalk.report.step_forecast import StepForecast
from blockwalk.report.summary import COLUMNS, memory_and_time, model_text, titled
from blockwalk.report.zeroth_order_advice import zeroth_order_advice
from blockwalk.train import preflight
from blockwalk.train.beginning import Beginning
from blockwalk.train.callbacks import trackers
from blockwalk.train.frozen_codec import settled
from blockwalk.train.prepared_run import PreparedRun, prepare
from blockwalk.train.progress import learnt_lines, one_line

NOTE = "note: "
"""The beginning of a line that the user of a run should act on."""


def opening_lines(
    beginning: Beginning,
    step_forecast: StepForecast,
    opened_at: int,
    codec_lines: Sequence[str] = (),
    *,
    verbose: bool = False,
) -> Iterator[str]:
    """Yield the lines that a run begins with: six that say what it is, then notes that its user
    should act on.

    Args:
        opened_at: bytes that the process held before the model was opened.
        codec_lines: what was decided on the frozen codec.
        verbose: whether to say what else is known of the plan, its kinds of state before all.
    """
    run = beginning.config
    prepared = beginning.prepared
    forecast = step_forecast.forecast
    yield from _summary(run, prepared, step_forecast.process_bytes)
    advice = zeroth_order_advice(prepared.plan, run.adapters)
    notes = [*prepared.notes, *prepared.rows.report.warnings()]
    if prepared.held_out is not None:
        notes += prepared.held_out.notes()
    if verbose:
        yield from step_forecast.lines()
        yield from forecast.lines()
        yield from (line for line in advice if not line.startswith(NOTE))
        yield from codec_lines
        yield from preflight.usual_elsewhere(run)
    else:
        yield from (note for note in forecast.notes if note.startswith(NOTE))
        if prepared.plan.frozen.codec.encoded or beginning.resumed is not None:
            yield from codec_lines
    yield from (line for line in advice if line.startswith(NOTE))
    yield from close_memory(run, forecast, opened_at, step_forecast.process_bytes)
    yield from (f"{NOTE}{note}" for note in (*notes, *beginning.start.damaged))
    yield from preflight.notes(run, prepared.longest)


def dry_run(run: RunConfig, *, verbose: bool = False) -> Iterator[str]:
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
    check_budget(run, forecast)
    check_memory(run, forecast, prepared.held_bytes)
    check_disks(run, forecast, prepared.total, prepared.map_bytes)
    on_processor = forecast.device == "cpu"
    process = forecast.process_bytes(prepared.held_bytes) if on_processor else 0
    yield from _summary(run, prepared, process)
    yield from codec_lines
    yield from forecast.lines() if verbose else forecast.notes
    notes = (*prepared.notes, *prepared.rows.report.warnings())
    yield from (f"{NOTE}{note}" for note in notes)
    yield from preflight.notes(run, prepared.longest)
    yield from preflight.usual_elsewhere(run)
    yield from learnt_lines("first record", prepared.shown)
    yield "nothing was written; leave --dry-run out to train"


def _summary(run: RunConfig, prepared: PreparedRun, process: int) -> Iterator[str]:
    """Yield what a run is, in six lines.

    Args:
        process: bytes of the whole process that are foreseen; 0 on an accelerator.
    """
    forecast = prepared.foreseen
    yield titled("device", described(chosen()))
    yield titled("model", model_text(run, forecast))
    yield memory_and_time(forecast, process, prepared.total, prepared.usual)
    yield titled("data", _data(run, prepared))
    yield titled("held out", _held_out(run, prepared))
    yield titled("saved to", _saved(run))


def _data(run: RunConfig, prepared: PreparedRun) -> str:
    """Return the size of the training data, and its first record in what the line has room for."""
    rows = prepared.rows
    learnt = 100 * rows.summary.learnt / len(rows.token_ids)
    sizes = f"{rows.counted_examples} ≤ {prepared.longest} tokens, {learnt:.0f}% ⟦learnt⟧"
    text = f"{sizes}; {counted(prepared.total, 'step')}"
    if not run.data.show_first:
        return text
    return f"{text}: {one_line(prepared.shown, COLUMNS - len(titled('', text)) - len(': '))}"


def _held_out(run: RunConfig, prepared: PreparedRun) -> str:
    """Return the records that a run evaluates, and when."""
    held_out = prepared.held_out
    if held_out is None:
        return "none; data.eval_share: 0.05 holds some of the records out"
    limit = run.data.eval_limit
    records = counted(held_out.records, "record")
    if 0 < limit < held_out.records:
        records = f"{limit} of {records} (data.eval_limit)"
    times = ["before the first step"] if run.eval_first else []
    if run.eval_every:
        times.append(f"every {counted(run.eval_every, 'step')}")
    before = f"{', '.join(times)} and " if times else ""
    return f"{records}, {before}at the end"


def _saved(run: RunConfig) -> str:
    """Return the folder of the trained weights, and the steps at which checkpoints are saved."""
    folder = Path(run.output_dir) / ("model" if run.adapters is None else "adapter")
    times = f"every {counted(run.save_every, 'step')}, " if run.save_every else ""
    return f"{folder}; checkpoints {times}at the end and at Ctrl-C"
