"""Oracle: a fold over the lines of ``evaluations.jsonl``, and the folders that are there; two ranks beside one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import blockwalk
from blockwalk.cli import main
from blockwalk.train.best import Best
from tests.cli.test_callbacks import settings
from tests.conftest import TinyRun
from tests.support.messages import refused

CLASSES = {"template": "{text} It was {label}.", "label_words": ["good", "bad"]}


def figures(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def checkpoints(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in out.glob("checkpoint-*"))


def diverging(tiny_run: TinyRun, out: Path, **more: Any) -> dict[str, Any]:
    """A run whose rate is so high that its held-out loss rises again."""
    optimizer = {"learning_rate": 0.05}
    return settings(tiny_run, out, optimizer=optimizer, eval_every=1, save_every=3, keep_checkpoints=1, **more)


@pytest.fixture(scope="module")
def kept(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("best") / "run"
    return out, blockwalk.train(diverging(tiny_run, out, max_steps=7, keep_best="loss"))


def test_the_best_checkpoint_stays_and_is_named(kept: tuple[Path, Any]) -> None:
    out, outcome = kept
    found = figures(out)
    best = min((step for step in found if step), key=lambda step: found[step])
    assert best < 7
    assert checkpoints(out) == [best, 7]
    assert f"checkpoint-{best:06d} (step {best}, loss {found[best]:.4f})" in "\n".join(outcome.lines())


def test_a_run_ends_after_evaluations_without_a_better_one(
    tiny_run: TinyRun, kept: tuple[Path, Any], tmp_path: Path
) -> None:
    """Oracle: the same run without an end, whose figures say where it would have ended."""
    losses = figures(kept[0])
    best, without, expected = 1, 0, 7
    for step in range(2, 8):
        best, without = (step, 0) if losses[step] < losses[best] else (best, without + 1)
        if without == 2:
            expected = step
            break
    assert expected < 7
    given = diverging(tiny_run, tmp_path / "run", max_steps=7, early_stopping=2)
    outcome = blockwalk.train(given)
    assert outcome.steps == expected
    assert outcome.after is not None
    assert (tmp_path / "run" / "adapter").is_dir() or (tmp_path / "run" / "model").is_dir()
    again = blockwalk.train({**given, "resume_from_checkpoint": "latest"})
    assert again.steps == expected, "a run that ended so has ended"


def test_a_resumed_run_knows_its_best(tiny_run: TinyRun, kept: tuple[Path, Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = diverging(tiny_run, out, max_steps=3, keep_best="loss")
    blockwalk.train(first)
    last = blockwalk.train({**first, "max_steps": 7, "resume_from_checkpoint": "latest"})
    assert figures(out) == figures(kept[0])
    assert checkpoints(out) == checkpoints(kept[0])
    assert last.best.replace(str(out), "") == kept[1].best.replace(str(kept[0]), "")


def test_accuracy_is_more_and_loss_is_less() -> None:
    lines = [{"step": step, "loss": loss, "accuracy": right} for step, loss, right in
             [(0, 0.1, 1.0), (2, 3.0, 0.5), (4, 2.0, 0.5), (6, 2.5, 0.75), (8, 2.0, 0.7)]]  # fmt: skip
    by_loss = Best.of(lines, "loss", "")
    by_accuracy = Best.of(lines, "accuracy", "")
    assert (by_loss.step, by_loss.without) == (4, 2)
    assert (by_accuracy.step, by_accuracy.without) == (6, 1)
    others = Best.of([{**line, "records": "other"} for line in lines], "loss", "these")
    assert others == Best("loss")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"keep_best": "loss"}, "eval_every"),
        ({"early_stopping": 2}, "eval_every"),
        ({"keep_best": "accuracy", "eval_every": 1}, "data.template"),
        ({"keep_best": "f1", "eval_every": 1}, "loss accuracy"),
        ({"keep_best": "loss", "eval_every": 1, "data": {"eval": ""}}, "data.eval_share"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_any_work(
    tiny_run: TinyRun, tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    whole = settings(tiny_run, tmp_path / "run", max_steps=2)
    whole |= {**given, "data": {**whole["data"], **given.get("data", {})}}
    with refused(ValueError, words):
        blockwalk.train(whole)
    assert not (tmp_path / "run").exists()


def test_two_ranks_end_at_the_step_of_one(tiny_run: TinyRun, tmp_path: Path) -> None:
    def run(out: Path, *more: str) -> int:
        flags = tiny_run.arguments(out)
        given = ["--optimizer.learning_rate", "0.05", "--eval_every", "1", "--max_steps", "8", "--early_stopping", "1"]
        return main.main(["train", *flags, *given, "--keep_best", "accuracy", "--keep_checkpoints", "1", *more])

    assert run(tmp_path / "one", "--method", "plain", "--lora.rank", "8") == 0
    assert run(tmp_path / "two", "--method", "zero3", "--nproc-per-node", "2", "--lora.rank", "8") == 0
    assert max(figures(tmp_path / "two")) == max(figures(tmp_path / "one")) < 8
    assert checkpoints(tmp_path / "two") == checkpoints(tmp_path / "one")
