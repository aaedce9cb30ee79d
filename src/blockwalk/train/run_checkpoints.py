"""The checkpoints of a run in progress: which are due, and what they hold beside weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockwalk.checkpoints import run_checkpoint
from blockwalk.checkpoints.run_checkpoint import Checkpoint
from blockwalk.program.resident_bytes import writes_behind
from blockwalk.ranks.ranks import first
from blockwalk.train.beginning import Beginning
from blockwalk.train.logs import Logs
from blockwalk.train.run_evaluations import RunEvaluations
from blockwalk.walk.walker import Walker


@dataclass(slots=True)
class RunCheckpoints:
    """The checkpoints of a run in progress."""

    beginning: Beginning
    walker: Walker
    logs: Logs
    evaluations: RunEvaluations
    step: int
    """The step of the last one; −1: there is none."""

    def due(self) -> bool:
        """Return whether the step just done is saved: every ``save_every``, and at the best
        evaluation."""
        step = self.walker.steps_done
        every = self.beginning.config.save_every
        return self.evaluations.is_best(step) or (every > 0 and step % every == 0)

    def save(self, *, wait: bool) -> Path:
        """Write a checkpoint, with every line about the steps before it on the disk, and return its
        folder.

        Weights on a durable tier are not written again: with the ledger they are saved in every
        step.

        Args:
            wait: whether nothing is left to be done meanwhile; else it is written behind the next
                steps, where the plan does so.
        """
        self.require_same_model()
        self.logs.metrics.sync()
        walker = self.walker
        config = self.beginning.config
        step = walker.steps_done
        self.step = step
        path = run_checkpoint.path_of(self.beginning.output_dir, step)
        settings = config.to_mapping()
        if walker.ledger is None:
            checkpoint = Checkpoint(step, {"steps_done": step}, self._data(), settings)
            scalars = {run_checkpoint.SCALARS: run_checkpoint.scalars_text(checkpoint)}
            wait = wait or not writes_behind(walker.plan)
            walker.save_state(path, wait=wait, beside=scalars)
            self.prune()
            return path
        has_weights = step > 0 and not walker.plan.home.outlives(walker.plan)
        state = walker.live_state() if has_weights else {}
        if walker.ranks.rank == 0:
            position = walker.ledger.position
            checkpoint = Checkpoint(step, state, self._data(), settings, ledger=position)
            run_checkpoint.save(
                self.beginning.output_dir,
                checkpoint,
                keep=config.keep_checkpoints,
                best=self.evaluations.kept,
            )
        elif has_weights:
            walker.join_gathers()
        return path

    def require_same_model(self) -> None:
        """Check that the model is still the one that the run began with, as rank 0 reads it.

        Raises:
            ValueError: as
                :meth:`blockwalk.tiers.model_folder.identity.WeightsInUse.require_unchanged`.
        """
        first(self.beginning.files.require_unchanged)

    def _data(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside weights and settings, as JSON values."""
        beginning = self.beginning
        data = {
            "batches": beginning.prepared.batches.state_dict(),
            "weights": beginning.weights,
            "anatomy": dict(beginning.prepared.anatomy),
            "identity": beginning.identity,
            "run": beginning.start.run,
            "held_out": beginning.records,
            "stops": list(beginning.prepared.rows.report.stops),
            "evaluated": self.evaluations.step,
        }
        if beginning.config.plan.objective_facts.reference:
            data["reference"] = beginning.reference
        if beginning.decided:
            data["decided"] = dict(beginning.decided)
        return data

    def prune(self) -> None:
        """Remove old checkpoints; the one that is being written counts once it is whole."""
        if self.walker.ranks.rank == 0:
            keep = self.beginning.config.keep_checkpoints
            run_checkpoint.prune(self.beginning.output_dir, keep, self.evaluations.kept)
