"""Oracle: the lengths of the records, which a tokenizer of bytes counts as characters and an
end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blockwalk.cli import main
from tests.conftest import TinyRun


@pytest.mark.parametrize(("long", "cut"), [(2, False), (3, True), (4, True)])
def test_a_run_of_which_most_records_are_cut_is_refused(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], long: int, cut: bool
) -> None:
    data = tmp_path / "d.jsonl"
    texts = ["x" * (29 if number < long else 9) for number in range(4)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / "run"
    given = [
        "--model",
        str(tiny_run.model),
        "--method",
        "plain",
        "--data.train",
        str(data),
        "--output_dir",
        str(out),
    ]
    run = ["train", *given, "--batch_size", "2", "--max_steps", "1", "--data.max_length", "16"]
    for dry in (["--dry-run"], []):
        assert main.main([*run, *dry]) == (2 if cut else 0)
        said = capsys.readouterr().err
        if cut:
            assert all(
                words in said
                for words in (
                    f"{long} of 4",
                    "16",
                    "data.max_length to 30",
                    "data.allow_truncation",
                )
            )
            assert not out.exists()
    if cut:
        for way in (
            ["--data.max_length", "30"],
            ["--data.packing", "true"],
            ["--data.allow_truncation", "true"],
        ):
            assert main.main([*run, *way, "--dry-run"]) == 0


@pytest.mark.parametrize(("batch_size", "noted"), [(4, False), (8, True)])
def test_a_batch_of_more_than_all_records_is_noted(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    batch_size: int,
    noted: bool,
) -> None:
    """Oracle: four records; a batch of eight has each of them twice."""
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(4)))
    given = ["--model", str(tiny_run.model), "--method", "plain", "--data.train", str(data)]
    assert main.main(["train", *given, "--batch_size", str(batch_size), "--dry-run"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "batch_size" in line]
    assert len(notes) == noted
    assert all("8" in line and "4 sequences" in line for line in notes)


@pytest.mark.parametrize("same", [False, True])
def test_records_that_are_learnt_and_held_out_are_noted(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], same: bool
) -> None:
    """Oracle: the file system, which knows a file by two of its names."""
    other = tmp_path / "other.jsonl"
    if same:
        other.symlink_to(tiny_run.train)
    else:
        other.write_bytes(tiny_run.train.read_bytes())
    files = ["--data.train", str(tiny_run.train), "--data.eval", str(other)]
    given = ["--model", str(tiny_run.model), "--data.format", "text", "--data.packing", "--dry-run"]
    assert main.main(["train", *given, *files]) == 0
    said = capsys.readouterr().out
    assert ("data.eval_share" in said) == same
    assert (str(tiny_run.train.resolve()) in said) == same
