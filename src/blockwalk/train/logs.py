"""The logs that a run keeps beside its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockwalk.checkpoints.ledger import LedgerEntry
from blockwalk.checkpoints.run_checkpoint import CHANGED
from blockwalk.data.batch import Batch
from blockwalk.data.row_batch import token_counts
from blockwalk.ranks.ranks import first
from blockwalk.system import atomic_files
from blockwalk.system.atomic_files import whole_lines
from blockwalk.train.beginning import Beginning
from blockwalk.train.metrics_log import MetricsLog
from blockwalk.walk.walker import StepResult, Walker


@dataclass(slots=True)
class SkippedBatches:
    """The batches that a run has left out, and may leave out."""

    limit: int
    """``skip_nonfinite``: the most batches that are left out."""
    steps: list[int]
    """The steps before which a batch was left out, as often as one was; on every rank as in rank
    0's log."""
    log: MetricsLog | None

    def add(self, step: int, error: FloatingPointError) -> str:
        """Note that the batch of a step is left out, where a resumed run finds it: before a ledger
        can have the step. Return a sentence for the user."""
        assert self.log is not None
        self.steps.append(step)
        self.log.write({"step": step, "reason": str(error)})
        self.log.sync()
        count = f"{len(self.steps)} of skip_nonfinite: {self.limit}"
        return f"note: a batch is left out ({count}): {error}"


@dataclass(frozen=True, slots=True)
class Logs:
    """The logs of a run in progress on one rank."""

    metrics: MetricsLog
    evaluations: MetricsLog
    skipped: SkippedBatches


def open_logs(beginning: Beginning, walker: Walker) -> Logs:
    """Open the logs of this rank, with the lines of an earlier part of the run."""
    rank = walker.ranks.rank
    folder = Path() if rank == 0 else Path("logs") / f"rank-{rank:04d}"
    checkpoint = beginning.start.checkpoint
    source = Path(checkpoint).parent / folder if checkpoint else None
    atomic_files.make_folder(beginning.output_dir / folder)

    def log(name: str) -> MetricsLog:
        return MetricsLog(
            beginning.output_dir / folder / name,
            source=source and source / name,
            keep_until=walker.steps_done,
        )

    metrics = log("metrics.jsonl")
    evaluations = log("evaluations.jsonl")
    if rank == 0:
        _keep_changes(beginning, log(CHANGED), walker.steps_done)
    name = "skipped.jsonl"
    steps: list[int] = []
    if source is not None:
        earlier = source / name
        steps = first(lambda: [line["step"] for line in whole_lines(earlier)])
    limit = beginning.config.skip_nonfinite
    skipped = SkippedBatches(
        limit,
        [step for step in steps if step <= walker.steps_done],
        log(name) if limit or steps else None,
    )
    return Logs(metrics, evaluations, skipped)


def _keep_changes(beginning: Beginning, log: MetricsLog, step: int) -> None:
    """Keep what resumed runs changed, by step, where the model card finds it."""
    if beginning.resumed is not None and beginning.resumed.changes:
        log.write({"step": step, "changes": beginning.resumed.changes})
    log.close()
    if log.last_line is None:
        log.path.unlink()


def catch_up(beginning: Beginning, walker: Walker, logs: Logs) -> None:
    """Go on in the data behind the steps that the ledger has and the checkpoint not yet, and write
    their lines, which a kill may have come before."""
    if beginning.resumed is None or walker.ledger is None:
        return
    prepared = beginning.prepared
    label_scores = beginning.config.data.label_scores
    for entry in walker.ledger.entries[beginning.resumed.checkpoint.step :]:
        for _ in range(logs.skipped.steps.count(entry.step)):
            prepared.next_batch(label_scores)
        _, batch = prepared.next_batch(label_scores)
        if entry.step > logs.metrics.last_step:
            logs.metrics.write(metrics_line(entry, batch))


def notes_on_lost_lines(beginning: Beginning, walker: Walker, logs: Logs) -> Sequence[str]:
    """Return a sentence for each log that lacks lines from before the checkpoint."""
    if beginning.resumed is None or walker.ranks.rank:  # rank 0 alone logs evaluations
        return []
    checkpoint = beginning.resumed.checkpoint
    notes = []
    for log, step in (
        (logs.metrics, checkpoint.step),
        (logs.evaluations, checkpoint.data.get("evaluated", -1)),
    ):
        if log.last_step < step:
            notes.append(
                f"{log.path.name} lacks lines up to step {step}, which the checkpoint was saved"
                " after: they were lost"
            )
    line = logs.metrics.first_line
    has_the_last = logs.metrics.last_step >= checkpoint.step > 0
    if has_the_last and line is not None and line["step"] > 1:
        notes.append(
            f"{logs.metrics.path.name} begins with step {line['step']}: the lines before were lost"
        )
    return notes


def metrics_line(result: StepResult | LedgerEntry, batch: Batch) -> dict[str, Any]:
    """Return the line of ``metrics.jsonl`` about a step, whoever took it: one just done, or one
    that a ledger has.

    ``tokens`` are those read, padding left out; ``loss_tokens`` those that the loss is a mean over;
    values that an estimator does not have are left out."""
    read, counted = token_counts(batch)
    line = {
        "step": result.step,
        "loss": result.loss,
        "learning_rate": result.learning_rate,
        "tokens": read,
        "loss_tokens": counted,
        "grad_norm": None if isinstance(result, LedgerEntry) else result.grad_norm,
        "projected_grad": result.projected_grad,
        **({} if isinstance(result, LedgerEntry) else result.metrics),
    }
    return {name: value for name, value in line.items() if value is not None}
