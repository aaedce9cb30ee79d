"""The best evaluation of a run, whose checkpoint is kept, and the evaluations without improvement
that end it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockwalk.checkpoints.run_checkpoint import path_of
from blockwalk.data.dataset import Choices
from blockwalk.models.run_folder import SETTINGS
from blockwalk.plan.parsing import Loader
from blockwalk.plan.run_config import RunConfig
from blockwalk.system.atomic_files import Damaged, read_yaml, reading, whole_lines
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
        """Return the best of the lines of ``evaluations.jsonl``. Evaluations of other records than
        these, by their digest, do not count: their figures are not compared."""
        best = Best(score)
        for line in lines:
            if line.get("records", records) == records:
                best = best.after(line)
        return best

    def after(self, line: Mapping[str, Any]) -> Best:
        """Return the best once another evaluation is known, by its line."""
        if line["step"] <= 0 or line["step"] == self.step:
            return self
        if self.step < 0 or self._is_less_than(line):
            return Best(self.score, line["step"], line[self.score])
        return Best(self.score, self.step, self.value, self.without + 1)

    def _is_less_than(self, line: Mapping[str, Any]) -> bool:
        value: float = line[self.score]
        return value < self.value if self.score == "loss" else value > self.value

    def beside(self, first: Mapping[str, Any] | None, last: int) -> str:
        """Return what a user should know of the best, given the line of the evaluation before the
        first step (None: there was none) and the last step; empty where nothing is."""
        note = ""
        if self.step != last:
            note = f"; the weights at the run's end are those of step {last}"
        if first is not None and first["step"] == 0 and self._is_less_than(first):
            figure = _figure(self.score, first[self.score])
            note += f"; before the first step it was better: {figure}"
        return note

    @property
    def name(self) -> str:
        """The name of its checkpoint's folder; empty where there was no evaluation."""
        return "" if self.step < 0 else path_of(Path(), self.step).name

    def __str__(self) -> str:
        return f"step {self.step}, {_figure(self.score, self.value)}"


def _figure(score: str, value: float) -> str:
    return f"loss {value:.4f}" if score == "loss" else f"accuracy {100 * value:.1f}%"


def note_on_best(folder: Path) -> str:
    """Return a sentence on the checkpoint of the best evaluation of the run in a folder, where it
    is not the last step's; empty where there is no such run or checkpoint, or its files do not
    tell."""
    try:
        score = ""
        if (folder / SETTINGS).is_file():
            score = read_yaml(folder / SETTINGS, Loader).get("keep_best")
        lines = whole_lines(folder / "evaluations.jsonl") if score else []
        with reading(folder / "evaluations.jsonl"):
            best = Best.of(lines, score, lines[-1].get("records", "")) if lines else Best()
    except Damaged:
        return ""
    checkpoint = folder / best.name
    if not best.name or best.step == lines[-1]["step"] or not checkpoint.is_dir():
        return ""
    way = f"--adapter {checkpoint}"
    if (folder / "model").is_dir():
        # Trained whole, it has no adapter: the refusal names a command.
        way += " says how to write them"
    return (
        f"these are the weights of step {lines[-1]['step']}, the last; those of the best"
        f" ({best}): {way}"
    )


def require_evaluations(run: RunConfig, held_out: HeldOut | None) -> None:
    """Check that a run which keeps its best, or stops early, has evaluations to go by.

    Raises:
        ValueError: it has none; the setting that is missing is named.
    """
    if not (run.keep_best or run.early_stopping):
        return
    name = "keep_best" if run.keep_best else "early_stopping"
    if held_out is None:
        raise ValueError(f"{name} needs held-out records: set data.eval, or data.eval_share: 0.05")
    if not run.eval_every:
        raise ValueError(
            f"{name} needs evaluations during the run: set eval_every to the steps between them"
        )
    if run.keep_best == "accuracy" and not isinstance(held_out.rows, Choices):
        raise ValueError(
            "keep_best: accuracy needs held-out records with candidates (data.template with"
            " data.label_words, or a data.task that has them); keep_best: loss needs none"
        )
