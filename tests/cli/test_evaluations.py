"""Oracle: the records of the held-out file, counted by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from blockwalk.cli import main
from blockwalk.data.dataset import Choices
from blockwalk.data.tokenizer import load_tokenizer
from blockwalk.plan.run_config import DataSettings
from blockwalk.train import progress
from blockwalk.train.evaluation import HeldOut
from tests.conftest import TinyRun
from tests.support.messages import says


def test_a_limit_takes_records_from_all_over_the_file(tiny_run: TinyRun) -> None:
    settings = DataSettings(
        eval=str(tiny_run.eval), template="{text} It was {label}.", label_words=("good", "bad")
    )
    tokenizer = load_tokenizer(tiny_run.model)

    def rows(limit: int) -> list[list[int]]:
        found = HeldOut.read(settings, tokenizer, batch_size=4, limit=limit)
        assert found.records == 10
        assert isinstance(found.rows, Choices)
        return [found.rows.rows[2 * row][0].tolist() for row in range(len(found.rows))]

    everything = rows(0)
    assert len(everything) == 10
    assert rows(10) == rows(200) == everything
    few = rows(4)
    assert few == rows(4)
    assert len(few) == 4
    left = iter(everything)
    assert all(row in left for row in few), "they stand in the file's order"


def test_a_limit_meets_every_label_of_a_file_in_which_they_alternate(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Oracle: the labels of the file, half of them each; every second record has only one of
    them."""
    path = tmp_path / "alternating.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"visit {n}", "label": n % 2}) + "\n" for n in range(200))
    )
    settings = DataSettings(
        eval=str(path), template="{text} It was {label}.", label_words=("good", "bad")
    )
    found = HeldOut.read(settings, load_tokenizer(tiny_run.model), batch_size=4, limit=100)
    assert isinstance(found.rows, Choices)
    assert 30 < int(found.rows.targets.sum()) < 70


def test_what_is_evaluated_and_when_is_said(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "QUIET", 0.0)
    run = [
        "train",
        *tiny_run.arguments(tmp_path),
        "--method",
        "plain",
        "--eval_every",
        "1",
        "--max_steps",
        "2",
    ]
    assert (
        main.main([*run, "--data.eval_limit", "6", "--eval_first", "false", "--eval_batches", "1"])
        == 0
    )
    said = capsys.readouterr().out
    says(said, "6 10 data.eval_limit")
    assert "evaluation 2/6  " in said
    assert "(6 examples, " in said
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["step"], line["examples"]) for line in lines] == [(1, 6), (2, 6)]
    again = [
        *run,
        "--resume_from_checkpoint",
        "latest",
        "--max_steps",
        "3",
        "--data.eval_limit",
        "0",
    ]
    assert main.main(again) == 0, "what is evaluated may change"
    assert "evaluates" not in capsys.readouterr().out
    assert (
        json.loads((tmp_path / "evaluations.jsonl").read_text().splitlines()[-1])["examples"] == 10
    )
    assert main.main([*run, "--data.eval_limit", "-1"]) == 2


def test_a_terminal_shows_a_bar_that_goes_with_the_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with progress.Progress(5, done=0, log_every=1) as bar, bar.evaluating(10) as show:
        show(4)
        steps, evaluation = bar._bar.tasks
        assert (evaluation.fields["what"], evaluation.completed, evaluation.total) == (
            "evaluation",
            4,
            10,
        )
    assert bar._bar.tasks == [steps]
