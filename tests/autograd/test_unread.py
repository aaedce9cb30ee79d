"""Oracle: autograd. Leaving out a product that no gradient reads changes no gradient, not by a bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.config import LoraSettings
from blockwalk.estimators import lazy
from blockwalk.methods import method
from blockwalk.state import Weight
from blockwalk.verification import certified_anatomy
from blockwalk.walker import Walker
from tests.models import random_batch, tiny_model

UNREAD = {"llama": ("mlp.down_proj",), "opt": ("fc2",), "gpt2": ("mlp.c_proj",), "gemma2": ()}
"""By hand, from the models' code: gemma2 takes the norm of what its last layer answers."""


@pytest.mark.parametrize("kind", UNREAD)
def test_what_is_only_added_to_the_residual_stream_is_unread(kind: str) -> None:
    """Oracle: the table above."""
    assert certified_anatomy(tiny_model(kind)).unread == UNREAD[kind]


@pytest.mark.parametrize("kind", UNREAD)
def test_gradients_are_the_same_bits(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the same walk with every product computed; and a count of the products."""
    model, batch = tiny_model(kind), random_batch()
    product, computed = lazy._product, 0

    def counted(a: torch.Tensor, weight: Weight, *rest: Any, **settings: Any) -> torch.Tensor:
        nonlocal computed
        computed += 1
        return product(a, weight, *rest, **settings)

    monkeypatch.setattr(lazy, "_product", counted)
    found: dict[bool, dict[str, torch.Tensor]] = {}
    counts: dict[bool, int] = {}
    for leaves_out in (True, False):
        settings = {"lora": LoraSettings(rank=4), "workdir": tmp_path / str(leaves_out)}
        with Walker(copy.deepcopy(model), method("mebp"), device="cpu", **settings) as walker:
            if not leaves_out:
                monkeypatch.setattr(walker.engine, "unread", lambda unit: [])
            computed = 0
            found[leaves_out] = walker.gradients(batch)
            counts[leaves_out] = computed
            blocks = walker.engine.cut.epilogue_index - 1
    assert counts[False] - counts[True] == blocks * len(UNREAD[kind])
    assert found[True].keys() == found[False].keys()
    for name, gradient in found[True].items():
        assert torch.equal(gradient, found[False][name]), name
