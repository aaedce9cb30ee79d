"""Oracle: autograd. Leaving out a product that no gradient reads changes no gradient, not by a
bit."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.cutting.verify import certified_anatomy
from blockwalk.numerics import lazy_linear
from blockwalk.numerics import lazy_linear as lazy
from blockwalk.numerics.codecs.weights import DenseWeight, Weight
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model

UNREAD = {"llama": ("mlp.down_proj",), "opt": ("fc2",), "gpt2": ("mlp.c_proj",), "gemma2": ()}
"""By hand, from the models' code: gemma2 takes the norm of what its last layer answers."""


@pytest.mark.parametrize("kind", UNREAD)
def test_what_is_only_added_to_the_residual_stream_is_unread(kind: str) -> None:
    """Oracle: the table above."""
    assert certified_anatomy(tiny_model(kind)).unread == UNREAD[kind]


@pytest.mark.parametrize("kind", UNREAD)
def test_gradients_are_the_same_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same walk with every product computed; and a count of the products."""
    model = tiny_model(kind)
    batch = random_batch()
    product = lazy_linear._product
    computed = 0

    def counted(a: torch.Tensor, weight: Weight, *rest: Any, **settings: Any) -> torch.Tensor:
        nonlocal computed
        computed += 1
        return product(a, weight, *rest, **settings)

    monkeypatch.setattr(lazy, "_product", counted)
    found: dict[bool, dict[str, torch.Tensor]] = {}
    counts: dict[bool, int] = {}
    for leaves_out in (True, False):
        settings = {"lora": LoraSettings(rank=4), "workdir": tmp_path / str(leaves_out)}
        with Walker(
            copy.deepcopy(model), method("mebp", recompute="all"), device="cpu", **settings
        ) as walker:
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


def test_a_thread_leaves_out_its_own_products_alone() -> None:
    """Oracle: torch's product. Two walkers in two threads recompute at the same time, and end in
    the other order."""
    weight = DenseWeight(torch.ones(64, 64))
    x = torch.ones(1, 64)
    entered = threading.Event()
    over = threading.Event()
    inside: list[torch.Tensor] = []

    def other() -> None:
        with lazy_linear.unread([weight]):
            entered.set()
            over.wait(30)
            inside.append(lazy_linear.lazy_linear(x, weight))

    thread = threading.Thread(target=other)
    with lazy_linear.unread([DenseWeight(torch.ones(64, 64))]):
        thread.start()
        assert entered.wait(30)
        during = lazy_linear.lazy_linear(x, weight)
    over.set()
    thread.join()
    assert torch.equal(during, torch.full((1, 64), 64.0))
    assert torch.equal(inside[0], torch.zeros(1, 64))
    assert torch.equal(lazy_linear.lazy_linear(x, weight), torch.full((1, 64), 64.0))
