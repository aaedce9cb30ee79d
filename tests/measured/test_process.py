"""Oracle: the kernel's figures of a whole process, against what doctor's walks of another model say
that it will hold."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blockwalk.doctor import walks as probe_walk
from blockwalk.simulate import hardware

ROOT = Path(__file__).parents[2]
WORST = 0.10
"""Of a process's peak: the bound of ``benchmarks/foresight.py``."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A description with what doctor's walks found here, made by the first of pytest's workers that
    wants it."""
    mine = tmp_path_factory.getbasetemp()
    folder = mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine
    path = folder / "here.yaml"
    with (folder / "here.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with (
                pytest.MonkeyPatch.context() as patch
            ):  # threads as the cases have them, and no more than are free
                patch.setattr(probe_walk, "_LAUNCHED", ())
                walks = probe_walk.measure()
            assert walks.keys() == probe_walk.WALKS.keys()
            found = probe_walk.beside_tensors(walks)
            hardware.save(dataclasses.replace(hardware.load("laptop"), device="cpu", **found), path)
    return path


@pytest.mark.parametrize(
    "method", ["plain", "plain, recompute", "plain, LoRA", "mebp", "mezo", "zo2, disk"]
)
def test_a_process_peaks_where_it_was_foreseen(method: str, machine: Path) -> None:
    """A case of the benchmark, at 2.9 million parameters, in a process of its own from its first
    import on."""
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("the peak of a process is read from /proc")
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "foresight.py")]
    done = subprocess.run(
        [*command, "--case", "tiny", method, "--hardware", str(machine), "--steps", "3"],
        env={**os.environ, "BLOCKWALK_BENCH_CACHE": str(machine.parent)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert row["predicted_bytes"] == pytest.approx(row["measured_bytes"], rel=WORST)
    assert row["measured_bytes"] > row["tensors"] + 150e6, (
        "the interpreter and its libraries are in it"
    )
