"""Oracle: transformers itself. Over ranks, too, a model has the persistent buffers of its folder,
and so has what is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from blockwalk import Walker, method
from tests.models import random_batch
from tests.support.buffered_models import make, own_loss
from tests.support.processes import run_ranks


def _walk(rank: int, name: str, folder: Path) -> tuple[float, float]:
    plan = method(name, mesh={"world": 2, "ranks_per_node": 2})
    with Walker(folder / "model", plan, workdir=folder / name, device="cpu") as walker:
        before = walker.evaluate(random_batch(seed=1)).loss
        walker.step(random_batch())
        after = walker.evaluate(random_batch(seed=1)).loss
        walker.save_pretrained(folder / f"saved-{name}")
    return before, after


@pytest.mark.parametrize("name", ["fcdp", "distzo2"])
def test_buffers_over_ranks(name: str, tmp_path: Path) -> None:
    """The first loss is the folder's, the last one that of the saved folder, buffers bit for
    bit."""
    buffers = make("gemma4_text", tmp_path / "model")
    for before, after in run_ranks(2, _walk, name, tmp_path):
        assert before == pytest.approx(own_loss(tmp_path / "model"), rel=1e-5)
        assert after == pytest.approx(own_loss(tmp_path / f"saved-{name}"), rel=1e-5)
    saved = load_file(tmp_path / f"saved-{name}" / "model.safetensors")
    assert all(torch.equal(saved[n], buffer) for n, buffer in buffers.items())
