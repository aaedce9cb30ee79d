"""Oracle: transformers' own forward with the mask, and autograd, on a CPU; and the simulated
device's count of waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from blockwalk.cutting.batch_facts import BatchFacts
from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.simulated_device import Simulated


class Masks(TorchFunctionMode):
    """Whether attention got a mask, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.had: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.had.append((kwargs or {}).get("attn_mask") is not None)
        return func(*args, **(kwargs or {}))


def padded(*, left: bool = False, learnt: bool = False) -> dict[str, torch.Tensor]:
    """Rows of 12, 9 and 5 tokens and one of 11; those of padding are not learnt, or the first of
    them predicts the next one."""
    batch = random_batch()
    for row, length in enumerate((12, 9, 5, 11)):
        hidden = slice(0, 12 - length) if left else slice(length, 12)
        batch["attention_mask"][row, hidden] = 0
        batch["labels"][row, hidden] = -100
    if learnt:
        batch["labels"][2, 6] = 7
    return batch


def packed() -> dict[str, torch.Tensor]:
    batch = random_batch()
    del batch["attention_mask"]
    batch["position_ids"] = torch.tensor([*range(5), *range(7)]).repeat(4, 1)
    batch["labels"][:, 5] = -100
    return batch


def unmasked() -> dict[str, torch.Tensor]:
    return {name: each for name, each in random_batch().items() if name != "attention_mask"}


BATCHES = {
    "padded on the right": (padded(), False),
    "padded on the right and learnt there": (padded(learnt=True), True),
    "padded on the left": (padded(left=True), True),
    "packed": (packed(), True),
    "unmasked": (unmasked(), False),
}
"""Batches, and whether attention needs a mask for them."""


WINDOWED = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "use_sliding_window": True,
            "sliding_window": 4, "max_window_layers": 1}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "opt", "qwen2"])
def test_right_padding_takes_no_mask_and_changes_no_gradient(
    kind: str, sim: Simulated, tmp_path: Path
) -> None:
    """In qwen2 one of two layers has a window of 4 tokens, for which there is a mask in any case.
    OPT has no packed rows of its own to compare with."""
    model = tiny_model(kind, **WINDOWED if kind == "qwen2" else {"dropout": 0.0})
    model.save_pretrained(tmp_path / "model")
    model.train()
    plan = method("plain", recompute="all")
    with Walker(tmp_path / "model", plan, workdir=tmp_path, device="sim:1") as walker:
        for name, (batch, needs_mask) in BATCHES.items():
            if (kind, name) == ("opt", "packed"):
                continue
            model.zero_grad()
            expected = model(**batch, use_cache=False).loss
            expected.backward()
            gradients = walker.gradients(batch)
            for key, parameter in model.named_parameters():
                if key in gradients and parameter.grad is not None:
                    there = gradients[key].cpu()
                    torch.testing.assert_close(there, parameter.grad, rtol=1e-4, atol=1e-6)
            sim.start_counting()
            with Masks() as masks:
                loss = walker.evaluate(batch).loss
            assert sim.counts().here <= 2, (name, sim.counts())
            assert loss == pytest.approx(float(expected), rel=1e-5), name
            assert len(masks.had) == model.config.num_hidden_layers
            assert any(masks.had) is (needs_mask or kind == "qwen2"), name
            assert all(masks.had) is needs_mask, name


def test_an_objective_may_read_logits_of_the_padding(sim: Simulated) -> None:
    """Its model gets the mask."""

    def mean_of_all(logits_BSV: torch.Tensor, batch: Any) -> torch.Tensor:
        return logits_BSV.square().mean()

    losses = []
    for device in ("cpu", "sim:1"):
        model = tiny_model("llama")
        with Walker(model, method("mezo"), device=device, objective=mean_of_all) as walker:
            losses.append(walker.step(padded()).loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_facts_rest_on_tensors_of_the_processor() -> None:
    batch = padded()
    assert BatchFacts.of(batch) == BatchFacts(
        hides_nothing=False, hides_unseen=True, documents=False
    )
    assert BatchFacts.of(packed()) == BatchFacts(
        hides_nothing=True, hides_unseen=False, documents=True
    )
    assert BatchFacts.of({**batch, "labels": batch["labels"].to("meta")}) is None
