"""Oracle: the rows that a killed run left: the run that follows has each of them to the bit, and those that it lacked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
ROWS = {f"{row}, {batch}" for row in ("PEFT", "mebp raw", "mebp int4") for batch in (1, 4)}


def started(cache: Path, results: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--tiny", "--part", "lora-1.5B"]
    environment = {**os.environ, "BLOCKWALK_BENCH_CACHE": str(cache)}
    return subprocess.Popen([*command, "--results", str(results)], env=environment, start_new_session=True)


def test_a_part_that_is_killed_goes_on_from_its_rows(tmp_path: Path) -> None:
    """Nothing is there before it: no model, no tokenizer."""
    rows, part = (tmp_path / "results" / "cpu-tiny" / f"lora-1.5B{end}" for end in (".rows.json", ".json"))
    process = started(tmp_path / "cache", tmp_path / "results")
    while not rows.exists() and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = json.loads(rows.read_text())
    assert 0 < len(before) < len(ROWS)
    assert not part.exists()
    assert started(tmp_path / "cache", tmp_path / "results").wait() == 0
    figures = json.loads(part.read_text())["figures"]
    assert figures.keys() == ROWS
    assert {name: figures[name] for name in before} == before


def test_a_row_without_memory_or_with_an_error_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's own error of a card that is full."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import gpu

    settings = gpu.argparse.Namespace(tiny=True, device="cpu")

    def full() -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def wrong() -> object:
        raise OSError("no such file")

    def opened() -> object:
        return (lambda: 0.5), (lambda: None)

    bench = gpu.Bench(settings, tmp_path / "part.rows.json")
    for name, open_ in {"PEFT, 4": full, "mebp int4, 4": wrong, "mebp raw, 4": opened}.items():
        bench.run(name, open_, 4)
    assert bench.failed.keys() == {"mebp int4, 4"}
    assert json.loads((tmp_path / "part.rows.json").read_text()) == {
        "PEFT, 4": {"out_of_memory": True},
        "mebp raw, 4": {"tokens_per_s": 4 * 32 / 0.5, "seconds": [0.5, 0.5]},
    }
    assert bench.compared("speed", "tokens_per_s", "mebp raw, 4", "PEFT, 4", 0.9, rests="") == []
    again = gpu.Bench(settings, tmp_path / "part.rows.json")
    again.run("mebp int4, 4", opened, 4)
    assert len(again.rows) == 3
