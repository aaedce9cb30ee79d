"""Oracle: the planner's own reader of a card's figures, on what the part ``facts`` of ``gpu.sh``
measures of the simulated device."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from blockwalk.system import card
from tests.support.simulated_device import Simulated

ROOT = Path(__file__).parents[2]


def test_every_fact_is_measured_and_reaches_the_planner(
    sim: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures stand in the file after the first row already: a part that is killed loses none
    of them."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import gpu, gpu_facts

    kept = []
    write = gpu.write

    def noted(path: Path, value: object) -> None:
        write(path, value)
        if path == bench.facts_path:
            kept.append(card.read(path))

    monkeypatch.setattr(gpu, "write", noted)
    bench = gpu.Bench(
        Namespace(tiny=True, device="sim:1"),
        tmp_path / "facts.rows.json",
        tmp_path / "gpu-facts-sim.json",
    )
    gpu_facts.facts(bench)
    assert bench.failed == {}
    assert len(kept) == len(bench.rows)
    assert (kept[0].name, kept[0].copy_up, kept[1].copy_up > 0) == ("sim", 0.0, True)
    facts = card.read(bench.facts_path)
    assert facts == kept[-1]
    assert (
        min(facts.copy_up, facts.copy_down, facts.copy_both, facts.launch_us, facts.operator_us) > 0
    )
    assert (
        min(facts.noise_per_s, facts.norm_bytes_per_s, facts.loss_s, *facts.decode_rate.values())
        > 0
    )
    assert facts.host_start_us + facts.host_turn_us > 0
    assert facts.fused_crossing_rows.keys() == {"int4a", "nf4"}
