"""Oracle: the names of a batch's tensors that a walk follows, written down here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import blockwalk
from tests.models import tiny_model
from tests.support.messages import refused

FOLLOWED = ("input_ids", "attention_mask", "position_ids", "labels")
OUTSIDE = ("shift_labels", "loss_mask", "loss_weights", "token_type_ids", "an_invented_name")


def batch(*more: str) -> dict[str, torch.Tensor]:
    ids = torch.arange(3, 15).view(2, 6)
    tensors = {name: torch.ones_like(ids) for name in more}
    return {"input_ids": ids, "labels": ids.clone(), **tensors}


@pytest.fixture(scope="module", params=["plain", "zo2"])
def walker(request: pytest.FixtureRequest) -> Any:
    with blockwalk.Walker(
        tiny_model("llama"), blockwalk.method(request.param), device="cpu"
    ) as walker:
        yield walker


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "step": lambda walker, columns: walker.step(columns),
    "evaluate": lambda walker, columns: walker.evaluate(columns),
    "label_losses": lambda walker, columns: walker.label_losses(columns),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_name_outside_the_list_is_refused(call: Callable[[Any, Any], Any], walker: Any) -> None:
    steps = walker.steps_done
    for name in OUTSIDE:
        with refused(ValueError, f"{name} {' '.join(FOLLOWED)}"):
            call(walker, batch(name))
    assert walker.steps_done == steps
    call(walker, batch("attention_mask"))


def test_weights_of_another_shape_are_refused_by_name(walker: Any) -> None:
    with refused(ValueError, "sample_weights"):
        walker.step({**batch(), "sample_weights": torch.ones(2)})


def test_gradients_refuse_them_too() -> None:
    plan = blockwalk.method("plain")
    with (
        blockwalk.Walker(tiny_model("llama"), plan, device="cpu") as walker,
        refused(ValueError, "loss_mask"),
    ):
        walker.gradients(batch("loss_mask"))


def test_an_objective_reads_further_columns() -> None:
    """The weights are 1 for one token and 0 elsewhere: the loss is that token's."""

    def weighted(logits_BSV: torch.Tensor, columns: Any) -> torch.Tensor:
        losses_BS = torch.nn.functional.cross_entropy(
            logits_BSV[:, :-1].transpose(1, 2), columns["labels"][:, 1:], reduction="none"
        )
        return (losses_BS * columns["loss_weights"][:, 1:]).sum()

    columns = batch()
    weights = torch.zeros(2, 6)
    weights[1, 3] = 1.0
    model = tiny_model("llama")
    with torch.no_grad():
        logits_V = model(input_ids=columns["input_ids"]).logits[1, 2]
    expected = -logits_V.log_softmax(0)[columns["labels"][1, 3]]
    with blockwalk.Walker(
        model, blockwalk.method("plain"), device="cpu", objective=weighted
    ) as walker:
        step = walker.step({**columns, "loss_weights": weights})
    assert step.loss == pytest.approx(float(expected), rel=1e-5)
