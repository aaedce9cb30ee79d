"""Oracle: autograd over the model in memory, on the batch as it came, with its padding. What one
row of its documents gives is that within rounding."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockwalk import method
from blockwalk.data.batch import Batch, loss_tokens, micro_batches
from blockwalk.data.packing import pack_parts
from blockwalk.numerics import documents, row_tiles
from blockwalk.numerics.documents import ByDocument, by_document
from blockwalk.numerics.rule_mask import RuleMask
from blockwalk.plan.choices import LoraSettings, PrefixSettings
from blockwalk.program.program import Shape
from blockwalk.walk import batch_parts, own_rows
from blockwalk.walk.unit_costs import UnitCosts
from blockwalk.walk.walker import Walker
from tests.models import tiny_model
from tests.support.messages import refused

CHANGES: dict[str, dict[str, Any]] = {
    "opt": {"dropout": 0.0},
    "mistral": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 20,
    },
    "gpt2": {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "summary_first_dropout": 0.0,
    },
}
"""Settings that leave nothing out at random; sizes."""
LENGTHS = [70, 9, 41, 66]


def padded(lengths: list[int] = LENGTHS, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 101, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    labels = ids.masked_fill((mask == 0) | (torch.rand(ids.shape, generator=generator) < 0.3), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the micro-batches that are walked."""
    shapes: list[tuple[int, ...]] = []

    def noted(batch: Mapping[str, Tensor], count: int, **options: Any) -> list[Batch]:
        found = pack_parts(batch, count, **options)
        shapes.extend(tuple(part["input_ids"].shape) for part in found)
        return found

    for room in (batch_parts, own_rows):
        monkeypatch.setattr(room, "pack_parts", noted)
    return shapes


def test_examples_lie_side_by_side() -> None:
    """By hand: each part in as many tiles of 64 as it fills."""
    batch = padded([3, 40, 30, 83])
    parts = pack_parts(batch, 2)
    assert {tuple(part) for part in parts} == {("input_ids", "position_ids", "labels")}
    assert [part["position_ids"].tolist() for part in parts] == [
        [[*range(3), *range(40), *[0] * 21]],
        [[*range(30), *range(83), *[0] * 15]],
    ]
    assert parts[0]["input_ids"][0].tolist() == [
        *batch["input_ids"][0, :3],
        *batch["input_ids"][1, :40],
        *[0] * 21,
    ]
    learnt = [-100, *batch["labels"][2, 1:30], -100, *batch["labels"][3, 1:83], *[-100] * 15]
    assert parts[1]["labels"][0].tolist() == learnt
    assert sum(map(loss_tokens, parts)) == loss_tokens(batch)


@pytest.mark.parametrize(
    "batch",
    [
        padded([66, 63]),  # a row of 129 tokens is filled up to 192, more than the 132
        padded([64, 64]),
        {**padded(), "token_type_ids": torch.zeros(4, 70, dtype=torch.int64)},
        {name: each.flip(1) for name, each in padded().items()},
        {**padded(), "attention_mask": padded()["attention_mask"].roll(1, 1)},
        {**padded(), "labels": padded()["input_ids"]},
    ],
    ids=["little", "none", "another key", "on the left", "holes", "learns padding"],
)
def test_other_batches_stay_as_they_are(batch: dict[str, Tensor]) -> None:
    for groups in (1, 2):
        for part, expected in zip(
            pack_parts(batch, groups), micro_batches(batch, groups), strict=True
        ):
            assert part.keys() == expected.keys()
            assert all(torch.equal(part[name], expected[name]) for name in part)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "mixtral", "opt"])
@pytest.mark.parametrize("parts", [1, 2])
def test_gradients_are_those_of_the_padded_batch(
    kind: str, parts: int, seen: list[tuple[int, ...]]
) -> None:
    """Sliding windows lie inside a document; OPT has its mask from its positions; micro-batches are
    rows of their own."""
    model = tiny_model(kind, **CHANGES.get(kind, {}), max_position_embeddings=128)
    control = copy.deepcopy(model)
    batch = padded()
    plan = method("plain", compute_dtype="float32", gradient_accumulation_steps=parts)
    with Walker(model, plan, device="cpu") as walker:
        walker.timeline = []
        found = walker.gradients(batch)
    assert seen == ([(1, 192)] if parts == 1 else [(1, 128), (1, 128)])
    assert walker.timeline[0][0].shape == (
        Shape(4, 48) if parts == 1 else Shape(2, 64)
    )  # so many tokens
    control(**batch, use_cache=False).loss.backward()
    for name, parameter in control.named_parameters():
        if parameter.grad is not None and name in found:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=2e-6)
    assert len(found) > 10


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_long_row_of_examples_has_the_padded_batchs_gradients(
    kind: str, seen: list[tuple[int, ...]]
) -> None:
    """Documents of 2,048 tokens and more in all go one by one, under a window by tiles; the loss of
    an evaluation is the same too."""
    changes = {**CHANGES.get(kind, {}), "max_position_embeddings": 1024, "num_hidden_layers": 1}
    model = tiny_model(kind, **changes)
    control = copy.deepcopy(model)
    batch = padded([900, 1, 700, 500, 1])
    plan = method("plain", compute_dtype="float32", recompute="all")
    with Walker(model, plan, device="cpu") as walker:
        found = walker.gradients(batch)
        loss = walker.evaluate(batch).loss
        assert walker.engine.cut.tile(2112)
    assert seen == [(1, 2112)] * 2
    expected = control(**batch, use_cache=False).loss
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in control.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=2e-6)


def test_a_packed_row_is_walked_as_transformers_does() -> None:
    """With a mask of its own a row is one document, whatever its positions; without one each token
    at position 0 begins one."""
    ids = padded([64])["input_ids"]
    positions = torch.tensor([[*range(30), 0, *range(20), 0, 0, *range(11)]])
    ones = torch.ones_like(ids)
    for mask in (None, ones, ones.masked_fill(torch.arange(64) >= 60, 0)):
        second = {} if mask is None else {"attention_mask": mask}
        model = tiny_model("llama")
        batch = {"input_ids": ids, "position_ids": positions, "labels": ids, **second}
        control = copy.deepcopy(model)
        control(**batch, use_cache=False).loss.backward()
        with Walker(model, method("plain", compute_dtype="float32"), device="cpu") as walker:
            found = walker.gradients(batch)
        for name, parameter in control.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        {"input_ids": [1]},
        {**padded(), "labels": torch.zeros(4, 3)},
        {name: each[:0] for name, each in padded().items()},
    ],
)
def test_what_is_no_batch_is_told(batch: Any) -> None:
    with (
        Walker(tiny_model("llama"), method("plain"), device="cpu") as walker,
        refused(ValueError, "batch"),
    ):
        walker.step(batch)


def test_what_draws_or_must_be_exact_is_walked_as_it_came(seen: list[tuple[int, ...]]) -> None:
    """A prefix, whose keys no position begins anew; a dropout of an adapter, noise on embeddings,
    the model's own loss, compiled blocks, zeroth order. What a run is foreseen by says the same, of
    these and of one that is walked by documents."""
    for settings, lora in (
        ({"name": "mebp"}, PrefixSettings(num_virtual_tokens=3)),
        ({"name": "mebp"}, LoraSettings(rank=2, dropout=0.1)),
        ({"name": "plain", "neftune_noise_alpha": 5.0}, None),
        ({"name": "plain", "loss": "model"}, None),
        ({"name": "plain", "compile": True}, None),
        ({"name": "mezo"}, None),
        ({"name": "mebp"}, LoraSettings(rank=2)),
    ):
        assert seen == []
        model = tiny_model("llama", max_position_embeddings=128)
        plan = method(**settings)
        apart = UnitCosts(model.config, lora=lora).walks_documents(plan)
        with Walker(model, plan, lora=lora, device="cpu") as walker:
            walker.step(padded())
        assert apart == bool(seen)
    assert seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1000, 20])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("row", ["short", "long", "widened"])
def test_attention_by_documents_is_that_under_the_mask(
    dtype: torch.dtype, window: int, key_heads: int, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: one call of the same function under the whole mask, in float64. Padding's rows are
    left out. A long row's mask is its rule; numbers are widened where a processor multiplies in
    float32."""
    if row == "widened":
        monkeypatch.setattr(row_tiles, "multiplied_in", lambda dtype: torch.float32)
    positions = torch.cat(
        [torch.arange(n) for n in (130, 7, 41)] + [torch.zeros(14, dtype=torch.int64)]
    )
    document = (positions == 0).cumsum(0)
    apart = torch.arange(192)[:, None] - torch.arange(192)
    mask = ((document[:, None] == document) & (apart >= 0) & (apart < window))[None, None]
    heads = {"query": 4, "key": key_heads, "value": key_heads}
    given = {
        name: torch.randn(1, 192, n, 16, dtype=dtype).transpose(1, 2).requires_grad_()
        for name, n in heads.items()
    }
    exact = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    weight = torch.randn(1, 4, 192, 16).to(dtype) * (torch.arange(192) < 178)[:, None]
    mode = by_document(positions[None], dtype)
    assert isinstance(mode, ByDocument)
    shown = mask
    if row != "short":
        monkeypatch.setattr(documents, "LONG_ROW", 100)
        shown = RuleMask(
            [(lambda _, head, q, k: mask[0, 0][q, k], 1)], [slice(0, 192)], (0, 192), "cpu"
        )
    with mode:
        out = F.scaled_dot_product_attention(
            **given, attn_mask=shown, scale=0.3, enable_gqa=key_heads < 4
        )
    expected = F.scaled_dot_product_attention(
        **exact, attn_mask=mask, scale=0.3, enable_gqa=key_heads < 4
    )
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(out[:, :, :178].double(), expected[:, :, :178], **close)
    out.backward(weight)
    expected.backward(weight.double())
    for name, each in given.items():
        assert each.grad is not None
        assert exact[name].grad is not None
        torch.testing.assert_close(each.grad.double(), exact[name].grad, **close, msg=name)
