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
