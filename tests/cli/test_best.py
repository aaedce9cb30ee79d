"""Oracle: a fold over the lines of ``evaluations.jsonl``, and the folders that are there; two ranks
beside one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import blockwalk
from blockwalk.cli import main
from blockwalk.train.best import Best
from tests.conftest import TinyRun
from tests.support.callback_settings import settings
from tests.support.messages import refused, says

CLASSES = {"template": "{text} It was {label}.", "label_words": ["good", "bad"]}


def figures(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def checkpoints(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in out.glob("checkpoint-*"))


def diverging(tiny_run: TinyRun, out: Path, **more: Any) -> dict[str, Any]:
    """A run whose rate is so high that its held-out loss rises again."""
    optimizer = {"learning_rate": 0.05}
    return settings(
        tiny_run, out, optimizer=optimizer, eval_every=1, save_every=3, keep_checkpoints=1, **more
    )


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
    printed = "\n".join(outcome.lines())
    assert f"checkpoint-{best:06d} (step {best}, loss {found[best]:.4f})" in printed
    assert "before the first step" not in printed, "it learnt before it diverged"


def test_a_best_that_is_not_the_last_is_what_is_tried_and_noted(
    tiny_run: TinyRun, kept: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the log of evaluations; eval of what ``try it`` names gives the best figure again."""
    out = tmp_path / "run"
    given = diverging(tiny_run, out, max_steps=7, keep_best="loss", lora={"rank": 2})
    outcome = blockwalk.train({**given, "optimizer": {"learning_rate": 10.0}})
    losses = figures(out)
    best = min((step for step in losses if step), key=lambda step: losses[step])
    assert best < 7
    assert outcome.next_command.startswith(
        f"blockwalk generate {out} --adapter {out / f'checkpoint-{best:06d}'} "
    )
    capsys.readouterr()
    assert (
        main.main(["eval", str(out), "--json", "--adapter", str(out / f"checkpoint-{best:06d}")])
        == 0
    )
    printed = capsys.readouterr()
    assert json.loads(printed.out)["loss"] == pytest.approx(losses[best], rel=1e-5)
    assert "--adapter" not in printed.err
    commands = (["eval", str(out)], ["generate", str(out), "--prompt", "a", "--max_new_tokens",
                                     "1"],
                ["merge", str(tiny_run.model), str(out), str(tmp_path / "merged")])  # fmt: skip
    for command in commands:
        assert main.main(command) == 0
        assert capsys.readouterr().err.count(f"--adapter {out / f'checkpoint-{best:06d}'}") == 1
    whole = kept[0]
    assert "--adapter" not in kept[1].next_command, "a checkpoint of all parameters is no adapter"
    assert main.main(["eval", str(whole)]) == 0
    assert "step 7" in capsys.readouterr().err


def test_what_was_better_before_the_first_step_is_said() -> None:
    best = Best("loss", 4, 2.0)
    assert "0.5000" in best.beside({"step": 0, "loss": 0.5}, 4)
    assert best.beside({"step": 0, "loss": 2.5}, 4) == ""
    assert "step 7" in best.beside(None, 7)
    assert "75.0%" in Best("accuracy", 4, 0.5).beside({"step": 0, "loss": 9.0, "accuracy": 0.75}, 4)


def test_a_run_ends_after_evaluations_without_a_better_one(
    tiny_run: TinyRun, kept: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the same run without an end, whose figures say where it would have ended."""
    losses = figures(kept[0])
    best = 1
    without = 0
    expected = 7
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
    capsys.readouterr()
    again = blockwalk.train({**given, "resume_from_checkpoint": "latest"})
    assert again.steps == expected, "a run that ended so has ended"
    assert "early_stopping above 2" in capsys.readouterr().out
    more = blockwalk.train({**given, "resume_from_checkpoint": "latest", "early_stopping": 7})
    assert more.steps == 7


def test_a_resumed_run_knows_its_best(
    tiny_run: TinyRun, kept: tuple[Path, Any], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    first = diverging(tiny_run, out, max_steps=3, keep_best="loss")
    blockwalk.train(first)
    last = blockwalk.train({**first, "max_steps": 7, "resume_from_checkpoint": "latest"})
    assert figures(out) == figures(kept[0])
    assert checkpoints(out) == checkpoints(kept[0])
    assert last.best.replace(str(out), "") == kept[1].best.replace(str(kept[0]), "")


def test_accuracy_is_more_and_loss_is_less() -> None:
    lines = [{"step": step, "loss": loss, "accuracy": right} for step, loss, right in
             [(0, 0.1, 1.0), (2, 3.0, 0.5), (4, 2.0, 0.5), (6, 2.5, 0.75),
              (8, 2.0, 0.7)]]  # fmt: skip
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
        given = [
            "--optimizer.learning_rate",
            "0.05",
            "--eval_every",
            "1",
            "--max_steps",
            "8",
            "--early_stopping",
            "1",
        ]
        return main.main(
            ["train", *flags, *given, "--keep_best", "accuracy", "--keep_checkpoints", "1", *more]
        )

    assert run(tmp_path / "one", "--method", "plain", "--lora.rank", "8") == 0
    assert (
        run(tmp_path / "two", "--method", "zero3", "--nproc-per-node", "2", "--lora.rank", "8") == 0
    )
    assert max(figures(tmp_path / "two")) == max(figures(tmp_path / "one")) < 8
    assert checkpoints(tmp_path / "two") == checkpoints(tmp_path / "one")


def test_a_file_whose_run_is_not_there_reads_untrained_weights_aloud(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the folders. Who trained into another folder than the file's would take the base
    model's answers for those of what was trained."""
    file = tmp_path / "run.yaml"
    there = tmp_path / "there"
    file.write_text(f"model: {tiny_run.model}\noutput_dir: {there}\n")
    asked = ["generate", str(file), "--prompt", "a", "--max_new_tokens", "1"]
    silent = ["generate", "--model", str(tiny_run.model), *asked[2:]]
    for command, notes in ((asked, 1), ([*asked, "--adapter", "none"], 0), (silent, 0)):
        assert main.main(command) == 0
        said = capsys.readouterr().err
        assert said.count("untrained weights") == notes, said
        assert said.count(str(there)) == notes


def test_a_checkpoint_that_was_not_kept_is_named_with_those_that_were(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the folders that a run has left."""
    out = tmp_path / "run"
    kept = {"save_every": 1, "keep_checkpoints": 2}
    blockwalk.train(settings(tiny_run, out, max_steps=4, lora={"rank": 2}, **kept))
    names = [f"checkpoint-{step:06d}" for step in checkpoints(out)]
    assert len(names) == 2
    capsys.readouterr()
    asked = ["generate", str(out), "--prompt", "a", "--adapter"]
    assert main.main([*asked, str(out / "checkpoint-000001")]) == 2
    says(capsys.readouterr().err, str(out / "checkpoint-000001"), *names, "keep_checkpoints")
    assert main.main([*asked, str(tmp_path / "nowhere")]) == 2
    says(capsys.readouterr().err, str(tmp_path / "nowhere"))
