"""Oracle: torch's own mean of the function over each micro-batch, weighed by the labels that count;
and autograd's gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import tiny_model


def by_sequence(logits_BSV: torch.Tensor, batch: Any) -> torch.Tensor:
    """A mean over sequences of each one's mean loss; it must not be called where nothing counts."""
    labels_BS = batch["labels"][:, 1:]
    counted_B = (labels_BS != -100).sum(1)
    assert int(counted_B.sum()), "called where nothing counts"
    losses_BS = F.cross_entropy(
        logits_BSV[:, :-1].float().transpose(1, 2), labels_BS, reduction="none"
    )
    return (losses_BS.sum(1) / counted_B.clamp(min=1)).mean()


def batch_of(learnt: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A batch whose rows have so many labels that count."""
    ids = torch.randint(3, 101, (len(learnt), 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for row, count in enumerate(learnt):
        labels[row, : 12 - count] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    "learnt", [(2, 3, 11, 11), (4, 5, 0, 0)], ids=["short and long", "nothing to learn"]
)
@pytest.mark.parametrize("name", ["plain", "mezo"])
def test_micro_batches_are_weighed_by_their_tokens(name: str, learnt: tuple[int, ...]) -> None:
    model = tiny_model("llama")
    batch = batch_of(learnt)
    control = copy.deepcopy(model)
    total = sum(learnt)
    loss = torch.zeros(())
    for part in range(2):
        half = {key: value[2 * part : 2 * part + 2] for key, value in batch.items()}
        if count := sum(learnt[2 * part : 2 * part + 2]):
            given = {key: value for key, value in half.items() if key != "labels"}
            loss = loss + count / total * by_sequence(
                control(**given, use_cache=False).logits, half
            )
    loss.backward()
    more: dict[str, Any] = {"zo": {"epsilon": 1e-4}} if name == "mezo" else {}
    plan = method(name, gradient_accumulation_steps=2, **more)
    with Walker(copy.deepcopy(model), plan, device="cpu", objective=by_sequence) as walker:
        if name == "plain":
            gradients = walker.gradients(batch)
            for key, parameter in control.named_parameters():
                assert parameter.grad is not None
                torch.testing.assert_close(
                    gradients[key], parameter.grad, rtol=1e-4, atol=1e-6, msg=key
                )
        assert walker.step(batch).loss == pytest.approx(
            float(loss.detach()), rel=1e-5 if name == "plain" else 1e-4
        )
