"""Oracle: the same steps on a CPU: losses, weights and optimizer states bit for bit, in any order
that a device may take."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blockwalk.convert.replay import export, replay
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.tiers.block_store.store import BlockStore
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support import quantised_files
from tests.support.simulated_device import Simulated

ORDERS = range(int(os.environ.get("BLOCKWALK_ORDERS", "4")))
"""``make sim`` takes 50."""
LORA = LoraSettings(rank=2, alpha=4)
ON_HOST = {"trainable": "host × fp32", "optimizer_state": "host × fp32", "recompute": "all"}
AT_TURN = {"update.timing": "block", "prefetch": 1}

CASES: dict[str, tuple[str, dict[str, Any], LoraSettings | None]] = {
    "plain": ("plain", {}, None),
    "plain, everything recomputed": (
        "plain",
        {"recompute": "all", "optimizer.max_grad_norm": 1.0},
        None,
    ),
    "plain, activations on the host": ("plain", {"recompute": "all", "activation": "host"}, LORA),
    "mebp": ("mebp", {"frozen": "disk × raw"}, LORA),
    "mebp int4 from the host": ("mebp", {"frozen": "host × int8", "activation": "host"}, LORA),
    "plain, masters on the host": ("plain", {**ON_HOST, "optimizer.max_grad_norm": 1.0}, None),
    "plain, masters on the host, at the block's turn": ("plain", {**ON_HOST, **AT_TURN}, None),
    "plain, bf16 masters on the host": (
        "plain",
        {**ON_HOST, **AT_TURN, "trainable": "host × bf16"},
        None,
    ),
    "plain, two micro-batches, masters on the host": (
        "plain",
        {**ON_HOST, **AT_TURN, "accumulation_order": "block", "gradient_accumulation_steps": 2},
        None,
    ),
    "plain, states on the host": (
        "plain",
        {"optimizer_state": "host × fp32", "recompute": "all"},
        None,
    ),
    "plain, graphs kept, masters on the host": (
        "plain",
        {**ON_HOST, **AT_TURN, "recompute": "none"},
        None,
    ),
    "plain, everything on the host": (
        "plain",
        {**ON_HOST, "frozen": "host × raw", "activation": "host"},
        LORA,
    ),
    "mebp, all parameters": ("mebp", {"frozen": "disk × raw"}, None),
    "plain, states on disk": (
        "plain",
        {"optimizer_state": "disk × fp32", "recompute": "all"},
        None,
    ),
    "mezo": ("mezo", {}, None),
    "mezo, bf16 and momentum": (
        "mezo",
        {"trainable": "device × bf16", "optimizer.name": "momentum"},
        None,
    ),
    "zo2": ("zo2", {}, None),
    "zo2 fp8": ("zo2", {"trainable": "host × fp8", "gradient_accumulation_steps": 2}, None),
    "zo2 disk": ("zo2", {"trainable": "disk", "frozen": "disk", "update.flush_every": 2}, None),
    "zo2, two blocks stay": ("zo2", {"trainable": "host × bf16", "resident": 2}, None),
    "mebp, two blocks stay": (
        "mebp",
        {"frozen": "host × int8", "activation": "host", "resident": 2},
        LORA,
    ),
    "zero3": ("zero3", {}, None),
    "fcdp": ("fcdp", {"gradient_accumulation_steps": 2}, None),
    "hzp, states on the host": ("hzp", {"optimizer_state": "host × fp32"}, None),
}


UPDATED_ON_THE_HOST = {"hzp, states on the host": 6}
"""Rows whose optimizer runs on the processor: each unit's update waits for its gradient."""


Outcome = tuple[list[float], float, dict[str, torch.Tensor]]


def same(found: Outcome, expected: Outcome) -> bool:
    """Whether two runs have the same bits."""
    return (
        found[:2] == expected[:2]
        and found[2].keys() == expected[2].keys()
        and all(torch.equal(found[2][key], expected[2][key]) for key in expected[2])
    )


def run(
    name: str,
    folder: Path,
    device: str,
    orders: Iterable[int] = ORDERS,
    sim: Simulated | None = None,
) -> Outcome:
    """Losses of steps, each in another order of the device's; of an evaluation; and the state
    afterwards. In a step after the first the thread that issues it waits for the device twice at
    most."""
    row, settings, lora = CASES[name]
    model = tiny_model("llama" if lora else "opt", dropout=0.0, num_hidden_layers=4)
    model.save_pretrained(folder / "model")
    losses: list[float] = []
    with Walker(
        folder / "model", method(row, **settings), lora=lora, workdir=folder, device=device
    ) as walker:
        for step, seed in enumerate(orders):
            if sim is not None:
                sim.order(seed)
                sim.start_counting()
            losses.append(walker.step(random_batch(seed=step)).loss)
            if sim is not None and step:
                waits = sim.counts()
                assert waits.here <= 2 + UPDATED_ON_THE_HOST.get(name, 0), waits
        evaluated = walker.evaluate(random_batch(seed=9)).loss
        if "disk" in str(settings.get("trainable")):
            walker.flush()
            store = BlockStore(next(folder.glob("weights-*")))
            state: dict[str, Any] = store.weights(store.names())
        else:
            state = walker.state_dict()
        return (
            losses,
            evaluated,
            {n: t.cpu().clone() for n, t in state.items() if isinstance(t, torch.Tensor)},
        )


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
