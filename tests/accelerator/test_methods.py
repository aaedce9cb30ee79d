"""Oracle: the same steps on a CPU: losses, weights and optimizer states bit for bit, in any order
that a device may take."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from blockwalk.convert.replay import export, replay
from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support import quantised_files
from tests.support.simulated_device import Simulated
from tests.support.simulated_runs import CASES, LORA, run, same


@pytest.mark.parametrize("name", CASES)
def test_a_method_walks_as_on_a_cpu(name: str, sim: Simulated, tmp_path: Path) -> None:
    assert same(run(name, tmp_path / "sim", "sim:1", sim=sim), run(name, tmp_path / "cpu", "cpu"))


@pytest.mark.parametrize(
    "kind",
    ["fp8", "bitsandbytes nested", "gptq desc_act", "awq", "compressed-tensors int4 actorder"],
)
@pytest.mark.parametrize("frozen", ["disk × raw", "device × raw"])
def test_quantised_weights_visit_and_stay_in_parts(
    kind: str, frozen: str, sim: Simulated, tmp_path: Path
) -> None:
    """Codes, scales and zero points lie side by side in a slot, and are decoded there without a
    wait."""
    folder = tmp_path / "model"
    quantised_files.write(folder, kind)
    losses: dict[str, list[float]] = {}
    for device in ("cpu", "sim:1"):
        with Walker(
            folder, method("mebp", frozen=frozen), lora=LORA, workdir=tmp_path, device=device
        ) as walker:
            losses[device] = [walker.step(random_batch(seed=0)).loss]
            sim.order(1)
            sim.start_counting()
            losses[device].append(walker.step(random_batch(seed=1)).loss)
            waits = sim.counts()
            assert waits.here <= 2, waits
    assert losses["cpu"] == losses["sim:1"]


class Launches(TorchDispatchMode):
    """Counts our operators by name: those of the thread that issues the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "blockwalk":
            self.found[func.name().partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        ("bf16", {"advance_": 3, "noise_": 12}),
        ("fp8", {"advance_": 3, "advance_rows_": 6, "decode_": 12}),
    ],
)
def test_a_block_is_updated_and_its_vectors_perturbed_in_a_launch_each(
    codec: str, expected: dict[str, int], sim: Simulated
) -> None:
    """Two passes over six matrices and ten vectors, after an update; two depths tell what a block
    adds."""

    def launches(layers: int) -> Counter[str]:
        model = tiny_model("opt", dropout=0.0, num_hidden_layers=layers)
        with Walker(model, method("zo2", trainable=f"host × {codec}"), device="sim:1") as walker:
            walker.step(random_batch(seed=0))
            with Launches() as mode:
                walker.step(random_batch(seed=1))
        return mode.found

    found = launches(3)
    found.subtract(launches(2))
    assert {name: count for name, count in found.items() if count} == expected


@pytest.mark.parametrize("codec", ["raw", "bf16", "fp8", "int8"])
@pytest.mark.parametrize("row", ["zo2", "mezo"])
def test_a_model_that_lies_on_the_device_already(
    row: str, codec: str, sim: Simulated, tmp_path: Path
) -> None:
    """Its weights are encoded where they lie, and go to the host as they would from a file."""
    tier = "host" if row == "zo2" else "device"
    losses = {}
    for device in ("cpu", "sim:1"):
        model = tiny_model("opt", dropout=0.0).to(device)
        with Walker(
            model, method(row, trainable=f"{tier} × {codec}"), workdir=tmp_path, device=device
        ) as walker:
            losses[device] = [walker.step(random_batch(seed=step)).loss for step in range(2)]
    assert losses["cpu"] == losses["sim:1"]


@pytest.mark.parametrize(
    "name", ["sgd, raw", "sgd, bf16", "sgd, fp8", "momentum, raw", "sgd, low rank"]
)
def test_a_ledger_is_replayed_on_the_device(name: str, sim: Simulated, tmp_path: Path) -> None:
    """Oracle: the files that a CPU replays it to, byte for byte, whose checksum the exported ledger
    has."""
    rule, _, kept = name.partition(", ")
    noise = {"noise": "lowrank", "noise_rank": 2} if kept == "low rank" else {}
    base = tmp_path / "base"
    ledger = tmp_path / "ledger.jsonl"
    tiny_model("opt", dropout=0.0, num_hidden_layers=2).save_pretrained(base)  # type: ignore[operator]
    placed = f"host × {kept if kept in ('bf16', 'fp8') else 'raw'}"
    plan = method(
        "zo2", trainable=placed, zo=noise, optimizer={"name": rule, "learning_rate": 1e-2}
    )
    with Walker(base, plan, workdir=tmp_path / "work", ledger=ledger, device="cpu") as walker:
        for step in range(5):
            walker.step(random_batch(seed=step))
    export(base, ledger, tmp_path / "tune", device="cpu")
    replay(base, ledger, tmp_path / "cpu", device="cpu")
    for order in range(3):
        sim.order(order)
        sim.start_counting()
        replay(base, tmp_path / "tune", tmp_path / f"sim-{order}", device="sim:1")
        assert sim.counts().ops >= 4, "a launch a unit"
        files = (tmp_path / folder / "model.safetensors" for folder in ("cpu", f"sim-{order}"))
        assert len({file.read_bytes() for file in files}) == 1
