"""Oracle: the simulated driver's own counts. After its first step a run takes no memory anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blockwalk.numerics import device
from blockwalk.numerics.device import Staging, sent
from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.simulated_device import Simulated
from tests.support.simulated_runs import CASES

STEADY = (
    "mezo",
    "zo2",
    "zo2 fp8",
    "zo2 disk",
    "plain",
    "mebp",
    "mebp int4 from the host",
    "plain, masters on the host",
)


@pytest.mark.parametrize("name", STEADY)
def test_no_pinned_memory_appears_after_the_first_step(
    name: str, tmp_path: Path, sim: Simulated
) -> None:
    """Steps 2 to 6, of the same shape and other data. Of ``mezo``, which has one lane, the device's
    allocator takes no segment either: with several it depends on threads which blocks are free."""
    row, settings, lora = CASES[name]
    model = tiny_model("llama" if lora else "opt", dropout=0.0, num_hidden_layers=4)
    model.save_pretrained(tmp_path / "model")
    plan = method(row, **settings)
    with Walker(tmp_path / "model", plan, lora=lora, workdir=tmp_path, device="sim:0") as walker:
        walker.step(random_batch(seed=0))
        taken = []
        for step in range(2, 7):
            sim.start_counting()
            walker.step(random_batch(seed=step))
            counts = sim.counts()
            taken.append((counts.pinned, counts.segments if name == "mezo" else 0))
    assert taken == [(0, 0)] * 5


def test_what_is_sent_arrives_whatever_the_order(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the tensors themselves. The memory is many times smaller than what goes through it,
    and one tensor is larger than it is at first."""
    monkeypatch.setattr(device, "STAGING_BYTES", 1 << 12)
    monkeypatch.setattr(device, "_STAGINGS", device._Stagings())
    there = torch.device("sim", 0)
    sizes = [1, 100, 7, 300, 0, 20_000, *[64] * 200]
    tensors = [torch.arange(size) + 1000 * number for number, size in enumerate(sizes)]
    for seed in range(12):
        sim.order(seed)
        sim.start_counting()
        arrived = [sent(tensor, there) for tensor in tensors]
        assert sim.counts().pinned <= 3, "made once, and grown twice"
        for tensor, copy in zip(tensors, arrived, strict=True):
            assert torch.equal(copy.cpu(), tensor)


def test_a_half_is_written_again_after_its_copies(sim: Simulated) -> None:
    """Oracle: the device that runs nothing before somebody waits for it: without the wait, the
    second tensor would be in the first one's copy."""
    sim.order(0)
    staging = Staging(torch.device("sim", 0))
    elements = device.STAGING_BYTES // 16  # half of it is one tensor
    copies = [staging.sent(torch.full((elements,), float(n))) for n in range(9)]
    assert [float(copy.cpu().unique()) for copy in copies] == [float(n) for n in range(9)]
