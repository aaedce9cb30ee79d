"""Oracle: the most bytes that the simulated device's allocator handed out at once, which counts
tensors and knows no plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import METHODS, method
from blockwalk.program.program import Pool, Shape, StepKind
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.simulated_device import Simulated

LORA = LoraSettings(rank=8)
ON_HOST = {"trainable": "host × fp32", "optimizer_state": "host × fp32", "recompute": "all"}
WHOLE = {"mebp": {"frozen": "disk × raw"}}
"""Settings without which a row trains adapters alone."""

CASES: dict[str, tuple[str, dict[str, Any], LoraSettings | None]] = {
    **{f"{name}, LoRA": (name, {}, LORA) for name in METHODS},
    **{f"{name}, all parameters": (name, WHOLE.get(name, {}), None) for name in METHODS},
    "plain at the block's turn": ("plain", {"recompute": "all", "update.timing": "block"}, None),
    "plain, masters on the host": ("plain", ON_HOST, None),
    "plain, masters on the host, at the block's turn": (
        "plain",
        {**ON_HOST, "update.timing": "block", "prefetch": 1},
        None,
    ),
    "plain, adapters on the host": ("plain", ON_HOST, LORA),
    "plain, states on the host": (
        "plain",
        {"optimizer_state": "host × fp32", "recompute": "all"},
        None,
    ),
    "mebp from the host": ("mebp", {"frozen": "host × int8", "activation": "host"}, LORA),
    "hzp at the block's turn": ("hzp", {"update.timing": "block"}, None),
    "hzp, states on the host": (
        "hzp",
        {"optimizer_state": "host × fp32", "update.timing": "block"},
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_holds_the_device_memory_that_is_foreseen(
    name: str, sim: Simulated, tmp_path: Path
) -> None:
    """Within 5%: small tensors are rounded up to blocks, and a block's temporaries are reckoned by
    those of one kind."""
    row, settings, lora = CASES[name]
    model = tiny_model(
        "llama", dropout=0.0, num_hidden_layers=5, hidden_size=128, intermediate_size=256
    )
    model.save_pretrained(tmp_path / "model")
    batch = random_batch()
    with Walker(
        tmp_path / "model", method(row, **settings), lora=lora, workdir=tmp_path, device="sim:1"
    ) as walker:
        walker.step(batch)  # buffers are made
        torch.accelerator.synchronize("sim:1")
        torch.accelerator.reset_peak_memory_stats("sim:1")
        walker.step(batch)
        held = torch.accelerator.max_memory_allocated("sim:1")
        program = walker.program(StepKind.TRAIN, Shape(*batch["input_ids"].shape), foresee=True)
    foreseen = program.peaks()[Pool.DEVICE]
    assert abs(held - foreseen) <= 0.05 * foreseen, f"{held:,} bytes held, {foreseen:,} foreseen"
