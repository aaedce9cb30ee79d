"""Oracle: two forwards of the whole model, whose weights are moved by hand along a closed form. The
noise is registered from here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from blockwalk import method
from blockwalk.cli.settings_help import described
from blockwalk.convert.replay import replay
from blockwalk.plan.noise_kinds import NOISES, NoiseFacts
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.rows import registered
from tests.support.zeroth_order_runs import trained

RATE = 1e-2
EPSILON = 1e-2


def alternating(places: Tensor) -> Tensor:
    """Return z of elements at these places of their parameter: 1, −1, 1, −1 …"""
    return 1.0 - 2.0 * (places % 2).float()


@dataclass(frozen=True)
class Alternating:
    """Noise of one parameter, which depends on an element's place alone."""

    def fill_(
        self, out: Tensor, start: int = 0, pitch: int | None = None, rows: Tensor | None = None
    ) -> Tensor:
        if pitch is None:
            return out.copy_(alternating(start + torch.arange(out.numel())).view_as(out))
        numbers = torch.arange(len(out)) if rows is None else rows
        places = start + numbers[:, None] * pitch + torch.arange(out.shape[1])
        return out.copy_(alternating(places))


@pytest.fixture(autouse=True)
def noise() -> Iterator[None]:
    row = NoiseFacts(elementwise=False, implementation=lambda draws, place: Alternating())
    with registered(NOISES, "alternating", row):
        yield


def moved(model: nn.Module, by: float) -> nn.Module:
    for parameter in model.parameters():
        places = torch.arange(parameter.numel()).view(parameter.shape)
        parameter.data.add_(alternating(places), alpha=by)
    return model


@pytest.mark.parametrize("name", ["mezo", "zo2"])
@torch.no_grad()
def test_a_noise_from_outside_is_trained_along(name: str, tmp_path: Path) -> None:
    """Resident, and streamed with its update at the next fetch; and rebuilt from the ledger."""
    base = tmp_path / "base"
    control: Any = tiny_model("opt").eval()
    control.save_pretrained(base)
    optimizer = {"learning_rate": RATE}
    plan = method(name, optimizer=optimizer, zo={"noise": "alternating", "epsilon": EPSILON})
    ledger = tmp_path / "ledger.jsonl"
    with Walker(base, plan, workdir=tmp_path, device="cpu", ledger=ledger) as walker:
        for step in range(3):
            batch = random_batch(seed=step)
            above, below = (
                float(moved(copy.deepcopy(control), by)(**batch).loss) for by in (EPSILON, -EPSILON)
            )
            slope = (above - below) / (2 * EPSILON)
            assert walker.step(batch).projected_grad == pytest.approx(slope, rel=1e-3)
            moved(control, -RATE * slope)
        weights = trained(walker)
    for key, parameter in control.named_parameters():
        torch.testing.assert_close(weights[key], parameter, rtol=1e-4, atol=1e-5)
    replay(base, ledger, tmp_path / "out")
    replayed = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(replayed[key], weights[key]) for key in replayed)


def test_help_knows_it() -> None:
    assert described("zo.noise")[0].endswith("|alternating")
