"""Oracle: the host tier, bit for bit, for a tier that lives in this file alone; and the contract of
memories.

The tier keeps buckets compressed in memory. A whole tier is what stands between the imports and the
first test."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockwalk import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.plan.placement import StateKind
from blockwalk.plan.tiers import TIERS, TierFacts
from blockwalk.tiers.memory import Memory, Shapes, tensors_in, total_bytes
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.rows import registered
from tests.support.tier_tests import MemoryTests
from tests.support.visits import visited_host


class Compressed:
    """Groups in memory: buckets compressed, and what is worked on in place as it is (a Memory)."""

    def __init__(self) -> None:
        self.buckets: dict[Hashable, bytes] = {}
        self.tensors: dict[Hashable, Tensor] = {}
        self.groups: set[Hashable] = set()
        """Every group that there was."""

    def zeros(self, shapes: Shapes, group: Hashable) -> dict[str, Tensor]:
        self.groups.add(group)
        self.tensors[group] = torch.zeros(total_bytes(shapes), dtype=torch.uint8)
        return tensors_in(self.tensors[group], shapes)

    def write(self, group: Hashable, data_P: Tensor) -> None:
        self.groups.add(group)
        self.buckets[group] = zlib.compress(data_P.cpu().numpy().data, 1)

    def read(self, group: Hashable, out_P: Tensor) -> None:
        if group in self.tensors:
            out_P.copy_(self.tensors[group])
        else:
            unpacked = bytearray(zlib.decompress(self.buckets[group]))
            out_P.copy_(torch.frombuffer(unpacked, dtype=torch.uint8))

    def bytes(self, group: Hashable) -> Tensor | None:
        return self.tensors.get(group)

    def will_need(self, group: Hashable) -> None:
        """Do nothing: tensors are there."""

    def dont_need(self, group: Hashable) -> None:
        """Do nothing: tensors stay."""

    def forget(self, group: Hashable) -> None:
        self.buckets.pop(group, None)
        self.tensors.pop(group, None)

    def close(self) -> None:
        self.buckets.clear()
        self.tensors.clear()


@pytest.fixture
def opened() -> Iterator[list[Compressed]]:
    """The memories that runs make while the tier is registered."""
    memories: list[Compressed] = []

    def make(device: torch.device, scratch: object) -> Memory:
        memories.append(Compressed())
        return memories[-1]

    with registered(TIERS, "compressed", TierFacts(pool="host", implementation=make)):
        yield memories


class TestCompressed(MemoryTests):
    def open(self, folder: Path) -> Memory:
        return Compressed()


RUNS: dict[str, tuple[str, bool, dict[str, Any], set[StateKind]]] = {
    "buckets": (
        "zo2",
        False,
        {"trainable": "{tier}", "optimizer": {"name": "momentum"}},
        {StateKind.TRAINABLE},
    ),
    "masters": (
        "mebp",
        False,
        {"frozen": "disk × raw", "trainable": "{tier}", "optimizer_state": "{tier}"},
        {StateKind.TRAINABLE, StateKind.OPTIMIZER},
    ),
    "frozen": (
        "mebp",
        True,
        {"frozen": "{tier} × raw", "activation": "{tier}"},
        {StateKind.FROZEN, StateKind.ACTIVATION},
    ),
}
"""Method, whether adapters are trained, settings, and the kinds of state that are placed, by
run."""


def run(name: str, tier: str, folder: Path) -> tuple[list[float], float, dict[str, Tensor]]:
    """The losses, an evaluation and the weights of a run with state on a tier."""
    method_name, adapters, settings, _ = RUNS[name]
    placed = {
        key: value.format(tier=tier) if isinstance(value, str) else value
        for key, value in settings.items()
    }
    plan = method(method_name, seed=1, **placed)
    model: Any = copy.deepcopy(tiny_model("llama", tied=True))
    lora = LoraSettings(rank=2, target_modules=("q_proj", "down_proj")) if adapters else None
    with Walker(model, plan, lora=lora, workdir=folder, device="cpu") as walker:
        losses = [walker.step(random_batch(seed=step)).loss for step in range(3)]
        walker.flush()
        weights = {
            name: weight.clone()
            for name, weight in walker.engine.trained.weights().items()
            if isinstance(weight, Tensor)
        }
        return losses, walker.evaluate(random_batch(seed=9)).loss, weights


@pytest.mark.parametrize("name", RUNS)
@visited_host()
def test_a_run_trains_on_a_tier_from_outside(
    name: str, opened: list[Compressed], tmp_path: Path
) -> None:
    losses, evaluated, weights = run(name, "host", tmp_path / "host")
    other_losses, other_evaluated, other_weights = run(name, "compressed", tmp_path / "other")
    assert (other_losses, other_evaluated) == (losses, evaluated)
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weight, other_weights[key]) for key, weight in weights.items())
    (memory,) = opened
    placed = {group[0] for group in memory.groups if isinstance(group, tuple)}
    assert placed >= RUNS[name][3]
