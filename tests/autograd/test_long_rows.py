"""Oracle: autograd over the model in memory, on the batch as it came, under its mask. Rows beyond
2,048 tokens are walked without their padding, and without a mask of S × S: the numbers are those
within rounding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from blockwalk import method
from blockwalk.data.batch import loss_tokens
from blockwalk.data.packing import cut_padding
from blockwalk.numerics.rule_mask import RuleMask
from blockwalk.plan.choices import LoraSettings
from blockwalk.program.program import Shape
from blockwalk.walk.unit_costs import UnitCosts
from blockwalk.walk.walker import Walker
from tests.models import tiny_model

TOKENS = 2050
LENGTH = 2056


def row(rows: int = 1, tokens: int = TOKENS) -> dict[str, Tensor]:
    ids = torch.randint(3, 101, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(LENGTH) < tokens).long().repeat(rows, 1)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def one_document(rows: int = 1) -> dict[str, Tensor]:
    """As :func:`blockwalk.data.batching.collate` fills a packed row."""
    batch = row(rows)
    mask = batch.pop("attention_mask")
    return {**batch, "position_ids": (torch.arange(LENGTH) * mask)}


def masks_of(walker: Walker) -> list[Any]:
    """The masks that the first block is called with from now on."""
    masks: list[Any] = []
    (block,) = walker.engine.cut.modules(1)
    block.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    return masks


def unequal() -> dict[str, Tensor]:
    """Two rows, of which one is shorter, and both end before the batch does."""
    return {name: torch.cat([row()[name], row(tokens=1700)[name]]) for name in row()}


@pytest.mark.parametrize(
    "batch",
    [row(), row(2), one_document(), unequal()],
    ids=["one row", "two alike", "a packed document", "two of unequal length"],
)
def test_a_long_row_has_no_mask_and_the_same_gradients(batch: dict[str, Tensor]) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    control = copy.deepcopy(model)
    with Walker(model, method("plain", compute_dtype="float32"), device="cpu") as walker:
        masks = masks_of(walker)
        found = walker.gradients(batch)
        loss = walker.evaluate(batch).loss
    assert masks
    assert all(mask is None or isinstance(mask, RuleMask) for mask in masks)
    whole = {"attention_mask": row(len(batch["input_ids"]))["attention_mask"], **batch}
    theirs = control(**whole, use_cache=False).loss
    theirs.backward()
    assert abs(loss - float(theirs)) < 1e-5
    for name, parameter in control.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["plain", "mebp"])
def test_micro_batches_of_long_rows_end_where_each_ends(name: str) -> None:
    """Rows of unequal length, one to a micro-batch: the step's loss is that of the batch as it
    came."""
    batch = {key: torch.cat([row()[key], row(tokens=2033)[key]]) for key in row()}
    model = tiny_model("llama", num_hidden_layers=2)
    with torch.no_grad():
        expected = float(copy.deepcopy(model)(**batch, use_cache=False).loss)
    lora = LoraSettings(rank=2) if name == "mebp" else None
    raw = {"frozen": "disk"} if name == "mebp" else {}
    plan = method(name, compute_dtype="float32", gradient_accumulation_steps=2, **raw)
    with Walker(model, plan, lora=lora, device="cpu") as walker:
        masks = masks_of(walker)
        assert abs(walker.step(batch).loss - expected) < 1e-5
    assert masks
    assert all(mask is None for mask in masks)


def test_zeroth_order_has_no_mask_either() -> None:
    with Walker(tiny_model("llama", num_hidden_layers=1), method("mezo"), device="cpu") as walker:
        masks = masks_of(walker)
        walker.step(row())
    assert masks
    assert all(mask is None for mask in masks)


@pytest.mark.parametrize(
    "batch",
    [
        {name: each[:, :2048] for name, each in row(tokens=2041).items()},
        row(tokens=LENGTH),
        {name: each.flip(1) for name, each in row().items()},
        {**row(), "attention_mask": row()["attention_mask"].roll(3, 1)},
        {**row(), "labels": row()["input_ids"]},
        {name: torch.cat([row()[name], row(tokens=2040)[name]]) for name in row()},
        {**one_document(), "position_ids": torch.arange(LENGTH)[None] % 1028},
        {name: each for name, each in row().items() if name != "attention_mask"},
    ],
    ids=[
        "short",
        "no padding",
        "on the left",
        "holes",
        "learns padding",
        "unequal",
        "two documents",
        "no mask",
    ],
)
def test_other_batches_stay_as_they_are(batch: dict[str, Tensor]) -> None:
    assert cut_padding(batch) is batch


def test_rows_of_unequal_length_keep_their_mask_under_a_models_own_loss() -> None:
    """The masks that the first block is called with: such a loss may read what is hidden."""
    with Walker(
        tiny_model("llama", num_hidden_layers=1), method("plain", loss="model"), device="cpu"
    ) as walker:
        masks = masks_of(walker)
        walker.evaluate(unequal())
    assert masks
    assert all(mask is not None for mask in masks)


def test_what_is_cut_off_is_padding_alone() -> None:
    """By hand."""
    for batch in (row(), one_document()):
        cut = cut_padding(batch)
        assert {tuple(each.shape) for each in cut.values()} == {(1, TOKENS)}
        assert loss_tokens(cut) == loss_tokens(batch) == TOKENS - 1
        assert torch.equal(cut["input_ids"], batch["input_ids"][:, :TOKENS])


def test_the_forecast_of_a_long_row_has_no_mask() -> None:
    """Closed form: a mask of S × S would be kept at a byte a pair, the row's own mask takes one a
    token."""
    config = tiny_model("llama", num_hidden_layers=1).config
    plan = method("plain")
    kept = [
        UnitCosts(config, padded=True, cut=cut)(plan, Shape(1, LENGTH)).of("prologue").saved
        for cut in (False, True)
    ]
    assert 0 <= kept[0] - kept[1] <= 8 * LENGTH
    short = [
        UnitCosts(config, padded=True, cut=cut)(plan, Shape(1, 64)).of("prologue").saved
        for cut in (False, True)
    ]
    assert short[0] == short[1]
