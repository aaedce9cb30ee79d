"""Oracle: transformers and autograd on each document by itself. A packed batch has their losses and
their gradients."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import blockwalk
from blockwalk.cutting import verify
from blockwalk.cutting.cut_model import CutModel
from blockwalk.data.batch import loss_tokens, tokens_read
from blockwalk.data.dataset import Encoded
from blockwalk.data.packing import pack
from blockwalk.data.row_batch import collate
from tests.models import tiny_model
from tests.support.messages import refused

CHANGES: dict[str, dict[str, Any]] = {
    "opt": {"dropout": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_oss": {
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
    },
}
"""Settings that leave nothing out at random; sizes."""
LENGTHS = [7, 3, 5, 9, 4, 2]
"""Tokens of the documents: two rows of 12 hold the first packing, and none is cut."""


def documents(lengths: list[int] = LENGTHS) -> Encoded:
    draw = np.random.default_rng(0)
    total = sum(lengths)
    in_loss = draw.random(total) < 0.7
    in_loss[np.cumsum([0, *lengths[:-1]])] = False
    return Encoded(
        draw.integers(3, 101, total).astype(np.int32), in_loss, np.cumsum([0, *lengths]), 0
    )


def alone(model: Any, dataset: Encoded) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss over all documents' tokens, each document run by itself, and its gradients."""
    model = copy.deepcopy(model)
    total = torch.zeros(())
    count = 0
    for row in range(len(dataset)):
        batch = collate(dataset, [row])
        tokens = loss_tokens(batch)
        if tokens:
            total = total + model(**batch, use_cache=False).loss * tokens
            count += tokens
    (total / count).backward()
    return float(total.detach()) / count, {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2", "gemma2", "mixtral", "gpt_oss"])
def test_packed_rows_are_their_documents(kind: str) -> None:
    """Positions alone keep them apart; OPT and GPT-OSS build masks without them and are given some;
    the windows of Gemma 2 and GPT-OSS lie inside each."""
    model = tiny_model(kind, **CHANGES.get(kind, {}))
    dataset = documents()
    packed = pack(dataset, 12)
    assert len(packed) == 3
    batch = collate(packed, range(len(packed)), padding_multiple=4)
    loss, gradients = alone(model, dataset)
    with blockwalk.Walker(model, blockwalk.method("plain", compute_dtype="float32")) as walker:
        assert walker.engine.cut.anatomy.borders == (
            "mask" if kind in ("opt", "gpt_oss") else "positions"
        )
        assert walker.evaluate(batch).loss == pytest.approx(loss, rel=1e-5)
        found = walker.gradients(batch)
    assert gradients.keys() - {"lm_head.weight"} <= found.keys()
    for name, grad in gradients.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_zeroth_order_sees_documents_apart() -> None:
    """The loss of ``mezo`` and of its label scores, on packed rows of an OPT."""
    model = tiny_model("opt", **CHANGES["opt"])
    dataset = documents()
    loss, _ = alone(model, dataset)
    with blockwalk.Walker(model, blockwalk.method("mezo", compute_dtype="float32")) as walker:
        assert walker.evaluate(collate(pack(dataset, 12), [0, 1, 2])).loss == pytest.approx(
            loss, rel=1e-5
        )


def test_a_long_document_is_learnt_whole() -> None:
    """Closed form: what is learnt of 25 tokens in rows of 8, each part beginning with the last
    token before it, is what is learnt of them in one row, once each; so the counts agree."""
    dataset = documents([25, 3])
    packed = pack(dataset, 8)
    assert max(np.diff(packed.starts)) <= 8
    for index in range(len(packed)):
        assert packed.positions is not None
        assert packed.positions[packed.starts[index]] == 0
    assert int(packed.in_loss.sum()) == int(dataset.in_loss.sum())
    learnt = [packed.token_ids[i - 1 : i + 1].tolist() for i in np.flatnonzero(packed.in_loss)]
    assert sorted(learnt) == sorted(
        dataset.token_ids[i - 1 : i + 1].tolist() for i in np.flatnonzero(dataset.in_loss)
    )


def test_best_fit_leaves_the_least_room() -> None:
    """By hand: rows of 10 for documents of 6, 3, 5, 4, 2 tokens: 6 + 4 and 5 + 3 + 2 fill two rows;
    in their order they would take three."""
    dataset = documents([6, 3, 5, 4, 2])
    dataset.in_loss[:] = True
    dataset.in_loss[dataset.starts[:-1]] = False
    packed = pack(dataset, 10)
    assert np.diff(packed.starts).tolist() == [10, 10]
    assert packed.positions is not None
    assert packed.positions.tolist() == [*range(6), *range(4), *range(3), *range(5), *range(2)]
    batch = collate(packed, [0, 1], padding_multiple=16)
    assert "attention_mask" not in batch
    assert tokens_read(batch) == 20


def test_a_model_that_mixes_documents_is_refused(tmp_path: Any) -> None:
    """BLOOM has no positions to restart: its attention falls off with distance, counted in the
    mask."""
    model = tiny_model("bloom", hidden_size=32, n_layer=2, n_head=4)
    model.config.save_pretrained(tmp_path)
    assert CutModel(model, verify.certified_anatomy(model)).anatomy.borders == ""
    with refused(ValueError, "data.packing: false"):
        verify.require_borders(tmp_path)
