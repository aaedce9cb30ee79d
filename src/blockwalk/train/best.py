"""The best evaluation of a run, whose checkpoint is kept, and the evaluations without improvement that end it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockwalk.checkpoints.run_checkpoint import path_of
from blockwalk.data.encode import Choices
from blockwalk.plan.run_config import RunConfig
from blockwalk.train.evaluation import HeldOut


@dataclass(frozen=True, slots=True)
class Best:
    """The evaluations after step 0 up to now, as far as they decide."""

    score: str = "loss"
    """loss, of which less is better, or accuracy, of which more is."""
    step: int = -1
    """The step of the best evaluation, the first of equal ones; −1: there was none yet."""
    value: float = 0.0
    """Its loss, or its accuracy from 0 to 1."""
    without: int = 0
    """Evaluations since then, none of which was better."""

    @staticmethod
    def of(lines: Iterable[Mapping[str, Any]], score: str, records: str) -> Best:
        """Return the best of the lines of ``evaluations.jsonl``. Evaluations of other records than these, by their digest, do
        not count: their figures are not compared."""
        best = Best(score)
        for line in lines:
            if line.get("records", records) == records:
                best = best.after(line)
        return best

    def after(self, line: Mapping[str, Any]) -> Best:
        """Return the best once another evaluation is known, by its line."""
        value = line[self.score]
        if line["step"] <= 0 or line["step"] == self.step:
            return self
        if self.step < 0 or (value < self.value if self.score == "loss" else value > self.value):
            return Best(self.score, line["step"], value)
        return Best(self.score, self.step, self.value, self.without + 1)

    @property
    def name(self) -> str:
        """The name of its checkpoint's folder; empty where there was no evaluation."""
        return "" if self.step < 0 else path_of(Path(), self.step).name

    def __str__(self) -> str:
        figure = f"loss {self.value:.4f}" if self.score == "loss" else f"accuracy {100 * self.value:.1f}%"
        return f"step {self.step}, {figure}"


def require_evaluations(run: RunConfig, held_out: HeldOut | None) -> None:
    """Check that a run which keeps its best, or stops early, has evaluations to go by.

    Raises:
        ValueError: it has none; the setting that is missing is named.
    """
    asks = "keep_best" if run.keep_best else "early_stopping" if run.early_stopping else ""
    if not asks:
        return
    if held_out is None:
        raise ValueError(f"{asks} needs held-out records: set data.eval, or data.eval_share: 0.05")
    if not run.eval_every:
        raise ValueError(f"{asks} needs evaluations during the run: set eval_every to the steps between them")
    if run.keep_best == "accuracy" and not isinstance(held_out.rows, Choices):
        raise ValueError(
            "keep_best: accuracy needs held-out records with candidates (data.template with data.label_words, or a data.task"
            " that has them); keep_best: loss needs none"
        )
