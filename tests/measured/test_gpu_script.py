"""Oracle: the rows that a killed run left: the run that follows has each of them to the bit, and
those that it lacked; and the planner's own reader of a card's figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from blockwalk.plan.placement import Codec
from blockwalk.system import card

ROOT = Path(__file__).parents[2]
WALKS = ("mebp raw, host", "mebp int4a, device", "mebp int4a, host", "mebp int4a, disk")
PEERS = ("PEFT", "PEFT + bitsandbytes") if find_spec("bitsandbytes") else ("PEFT",)
CODECS = ("int4a", "nf4")
MEASURES = {
    "environment",
    "copies",
    "launches",
    "host",
    "limits",
    "noise",
    "norm",
    "loss",
    "shared memory",
}
MEASURES |= {f"decode {codec}" for codec in (*CODECS, "int8", "fp8")}
MEASURES |= {f"product of {rows} rows, {codec}" for rows in (16, 32) for codec in CODECS}
ROWS = {
    "lora-1.5B": {f"{row}, {batch}" for row in (*PEERS, *WALKS) for batch in (1, 4)},
    "facts": MEASURES,
}


def started(part: str, cache: Path, results: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--device",
        "cpu",
        "--tiny",
        "--part",
        part,
    ]
    environment = {**os.environ, "BLOCKWALK_BENCH_CACHE": str(cache)}
    return subprocess.Popen(
        [*command, "--results", str(results)], env=environment, start_new_session=True
    )


@pytest.mark.parametrize("part", ROWS)
def test_a_part_that_is_killed_goes_on_from_its_rows(part: str, tmp_path: Path) -> None:
    """Nothing is there before it: no model, no tokenizer."""
    rows, whole = (
        tmp_path / "results" / "cpu-tiny" / f"{part}{end}" for end in (".rows.json", ".json")
    )
    process = started(part, tmp_path / "cache", tmp_path / "results")
    while not rows.exists() and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = json.loads(rows.read_text())
    assert 0 < len(before) < len(ROWS[part])
    assert not whole.exists()
    assert started(part, tmp_path / "cache", tmp_path / "results").wait() == 0
    figures = json.loads(whole.read_text())["figures"]
    assert figures.keys() == ROWS[part]
    assert {name: figures[name] for name in before} == before
    if part == "facts":
        facts = card.read(tmp_path / "results" / "gpu-facts-cpu-tiny.json")
        assert facts.name == "cpu"
        assert facts.copy_up == figures["copies"]["copy_up"] > 0
        assert facts.decode_rate.keys() == {*CODECS, "int8", "fp8"}
        assert facts.fused_crossing_rows.keys() == set(CODECS)
        assert (
            min(
                facts.copy_down,
                facts.copy_both,
                facts.launch_us,
                facts.operator_us,
                facts.noise_per_s,
            )
            > 0
        )
        assert min(facts.norm_bytes_per_s, facts.loss_s) > 0
        assert facts.host_start_us + facts.host_turn_us > 0
        shares = {name: figures[name] for name in ("noise", "norm", "decode nf4")}
        copied = figures["limits"]["copy_on_device"]
        for name, row in shares.items():
            assert row["share_of_copy"] == row["bytes_per_s"] / copied > 0, name
        assert figures["loss"]["share_of_product"] > 0


def test_products_cross_where_decoding_inside_is_first_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.gpu_facts import crossing

    def rows(inside: dict[int, float]) -> dict[str, dict[str, float]]:
        return {
            f"product of {n} rows, nf4": {"inside_s": s, "before_s": 1.0} for n, s in inside.items()
        }

    assert crossing(rows({16: 0.2, 32: 0.5, 64: 1.1, 128: 0.9}), Codec.NF4) == 32
    assert crossing(rows({16: 1.2, 32: 0.5}), Codec.NF4) == 0
    assert crossing(rows({16: 0.2, 32: 0.5}), Codec.NF4) == 32
    assert crossing(rows({16: 0.2}), Codec.INT4A) is None


def test_a_row_without_memory_or_with_an_error_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    for name, open_ in {"PEFT, 4": full, "mebp int4a, 4": wrong, "mebp raw, 4": opened}.items():
        bench.run(name, open_, 4)
    assert bench.failed.keys() == {"mebp int4a, 4"}
    assert json.loads((tmp_path / "part.rows.json").read_text()) == {
        "PEFT, 4": {"out_of_memory": True},
        "mebp raw, 4": {"tokens_per_s": 4 * 32 / 0.5, "seconds": [0.5, 0.5]},
    }
    assert bench.compared("speed", "tokens_per_s", "mebp raw, 4", "PEFT, 4", 0.9, rests="") == []
    again = gpu.Bench(settings, tmp_path / "part.rows.json")
    again.run("mebp int4a, 4", opened, 4)
    assert len(again.rows) == 3
