"""Oracle: closed forms of spans and shares; the codecs' own decoders, on weights that are drawn in
place; the kernel, of the files that a drawn model leaves; and a step of each kind on the simulated
device."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk import Walker, method
from blockwalk.numerics.codecs import codecs
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.placement import Codec
from tests.support.messages import refused
from tests.support.simulated_device import Simulated

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_kernels_that_run_at_once_are_busy_once_and_copies_are_none_of_them() -> None:
    from benchmarks.gpu_minutes import Span, occupied

    spans = [
        Span("gemm", 0, 1000),
        Span("norm", 500, 1500),  # half beside the product
        Span("inside", 600, 700),
        Span("Memcpy HtoD (Pinned -> Device)", 0, 4000),
        Span("Memset (Device)", 0, 9000),
        Span("late", 3000, 3500),
    ]
    figures = {"busy_ms": 2.0, "starts": 4, "copies": 1, "copies_ms": 4.0}
    assert occupied(spans) == figures
    assert occupied(reversed(spans)) == figures


@pytest.mark.parametrize("seconds", [0.0, 60.0, 610.0, 720.0])
def test_parts_share_the_seconds_and_end_with_them(seconds: float) -> None:
    from benchmarks.gpu_minutes import PARTS, shares

    ends = shares(seconds)
    assert list(ends) == list(PARTS)
    assert list(ends.values())[-1] == seconds
    widths = [b - a for a, b in zip([0.0, *ends.values()], ends.values(), strict=False)]
    for width, (_, share) in list(zip(widths, PARTS.values(), strict=True))[:-1]:
        assert width == pytest.approx(share * min(1, seconds / sum(s for _, s in PARTS.values())))


def test_no_row_is_begun_after_the_end_and_each_is_named(tmp_path: Path) -> None:
    from benchmarks import gpu

    bench = gpu.Bench(Namespace(tiny=False, device="cpu"), tmp_path / "part.rows.json")
    begun = []
    bench.ends = time.perf_counter() + 1000
    bench.row("in time", lambda row: begun.append("in time"), needs=10)
    bench.row("too long", lambda row: begun.append("too long"), needs=2000)
    bench.ends = time.perf_counter() - 1
    bench.row("over", lambda row: begun.append("over"))
    assert begun == ["in time"]
    assert bench.late == ["too long", "over"]
    assert list(json.loads((tmp_path / "part.rows.json").read_text())) == ["in time"]


@pytest.mark.parametrize("codec", ["raw", "int4a", "nf4", "int8", "fp8", "int4"])
def test_drawn_weights_are_as_wide_as_trained_ones(codec: str) -> None:
    """Of N(0, 0.02²), in every row; no row is what its neighbour is."""
    from benchmarks.drawn_models import ROWS, draw

    layout = Layout((3 * ROWS + 5, 96), Codec(codec), "bfloat16")
    bytes_P = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
    draw("w", layout, bytes_P)
    if layout.codec.encoded:
        out = torch.empty(layout.shape)
        weights = codecs.decode_rows(bytes_P, layout, 0, layout.rows, out)
    else:
        weights = bytes_P.view(torch.bfloat16).view(layout.shape).float()
    assert float(weights.std()) == pytest.approx(0.02, rel=0.1)
    assert float(weights.std(dim=1).min()) > 0.01
    assert not torch.equal(weights[0], weights[1])


CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("Qwen2-tiny", "int4a", "mebp", {"frozen": "device × int4a"}),
    ("Qwen2-tiny", "int4a", "mebp", {"frozen": "host × int4a", "activation": "host"}),
    ("OPT-tiny", "raw", "zo2", {"frozen": "host", "trainable": "host"}),
]


@pytest.mark.parametrize(("name", "codec", "row", "settings"), CASES)
def test_a_drawn_model_is_walked_and_leaves_no_file(
    sim: Simulated, tmp_path: Path, name: str, codec: str, row: str, settings: dict[str, str]
) -> None:
    import tempfile

    from benchmarks.common import random_batch
    from benchmarks.drawn_models import drawn

    tempfile.tempdir = str(tmp_path)
    device = "sim:0"
    with drawn(name, Codec(codec), device=device) as model:
        assert [path.name for path in Path(model).iterdir()] == ["config.json"]
        lora = LoraSettings(rank=2) if row == "mebp" else None
        walker = Walker(model, method(row, **settings), lora=lora, device=device)
    with walker:
        losses = [
            walker.step(random_batch(walker.spec.vocab_size, 1, 16, seed=n)).loss for n in (0, 1)
        ]
        # of random logits, a token takes about the logarithm of the vocabulary
        assert max(losses) < 1.2 * torch.tensor(float(walker.spec.vocab_size)).log().item()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == 0


def test_a_plan_with_weights_on_the_disk_is_refused(sim: Simulated) -> None:
    from benchmarks.drawn_models import drawn

    plan = method("mebp", frozen="disk × int4a")
    device = "sim:0"
    with drawn("Qwen2-tiny", Codec.INT4A, device=device) as model, refused(ValueError, "disk"):
        Walker(model, plan, lora=LoraSettings(rank=2), device=device)


def test_part_steps_measures_a_row_on_the_device(
    sim: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row, its forecast and its line of the table; of a device that no profiler knows no busy
    time."""
    from benchmarks import gpu, gpu_minutes, zo_runs

    kept = {name: gpu_minutes.STEPS[name] for name in (zo_runs.MEZO, "int4a, device")}
    monkeypatch.setattr(gpu_minutes, "STEPS", kept)
    bench = gpu.Bench(Namespace(tiny=True, device="sim:0"), tmp_path / "steps.rows.json")
    gpu_minutes.steps(bench)
    assert bench.failed == {}
    assert bench.rows.keys() == {
        "mezo, 1",
        "mezo, 4",
        "int4a, device, 1",
        "int4a, device, 4",
    }
    for row in bench.rows.values():
        assert row["foreseen_MB"] > 0
        assert row["peak_MB"] > 0
        assert row["open_s"] > 0
    table = "\n".join(gpu_minutes.summary({"steps": {"figures": bench.rows, "late": ["zo2, 1"]}}))
    assert all(f"steps: {name}" in table for name in bench.rows)
    assert "zo2, 1" in table
    memory = [b for b in gpu_minutes.forecasts(bench.rows) if "memory" in b.name]
    assert len(memory) == len(bench.rows)
