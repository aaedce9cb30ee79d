"""Oracle: torch's autograd over every document by itself, in one process: no padding, no
neighbours in its row, no parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from blockwalk.data.batch import columns, row_order
from blockwalk.plan.methods import method
from blockwalk.plan.row_order import part_tokens
from blockwalk.plan.sizes import Tiling
from blockwalk.walk.walker import Walker
from tests.support.messages import refused
from tests.support.processes import run_ranks
from tests.support.rows_in_parts import (
    LONG_BATCHES,
    TOLERANCE,
    Case,
    documents,
    errors,
    make,
    packed,
    padded,
)


def check(world: int, cases: Sequence[Case], **settings: Any) -> None:
    for case, found in zip(cases, errors(world, cases, **settings), strict=True):
        assert max(found.values()) <= TOLERANCE, (case, found)


def test_two_ranks_with_parts_of_sequences_are_one_process() -> None:
    """Causal, sliding, mixed and chunked attention; latent keys; experts; learnt positions; tied
    heads; full and LoRA; both ways."""
    check(
        2,
        [
            ("llama", True, "fcdp", "heads", 2),
            ("mistral", False, "hzp", "keys", 2),
            ("gemma3_text", False, "zero3", "auto", 2),
            ("llama4_text", False, "zeropp", "heads", 2),
            ("deepseek_v3", True, "mics", "keys", 2),
            ("mixtral", False, "fcdp", "keys", 2),
            ("gpt2", True, "mics", "heads", 2),
            ("opt", False, "hzp", "keys", 2),
        ],
    )


def test_four_ranks_share_rows_and_parts() -> None:
    """Two rows over two pairs of ranks, and parts of one row over four."""
    check(
        4,
        [
            ("llama", False, "hzp", "keys", 2),
            ("mistral", False, "hzp", "heads", 4),
            ("llama4_text", True, "zero3", "keys", 4),
            ("deepseek_v3", False, "fcdp", "heads", 4),
        ],
    )


def test_parts_are_computed_by_tiles() -> None:
    """Parts of 146 tokens, of rows of 290 and 211, by tiles of 64 positions."""
    cases = [("gemma3_text", True, "zero3", "keys", 2), ("llama", False, "hzp", "heads", 2)]
    mesh = {"world": 2, "ranks_per_node": 2, "context": 2}
    assert method("hzp", mesh=mesh, sequence_tile=64).tiling("cpu") == Tiling(64, 64)
    check(2, cases, batches=LONG_BATCHES, sequence_tile=64)


@pytest.mark.parametrize("lay", [padded, packed])
def test_parts_are_the_row(lay: Callable[[list[Tensor]], dict[str, Tensor]]) -> None:
    """Closed form: each token of a row is in one part, beside the label of the token after it; of a
    causal row all parts see as many pairs of tokens, packed documents stay in order."""
    batch = lay(documents(3, [22] if lay is padded else [11, 11]))
    order = row_order(batch, 4, part_tokens(22, 4))
    parts = [columns(batch, order, number) for number in range(4)]
    pieces = [order.pieces(number) for number in range(4)]
    places = torch.cat([torch.arange(24)[piece] for of_part in pieces for piece in of_part])
    ids = torch.cat([part["input_ids"] for part in parts], 1)
    after = torch.cat([part["labels"][:, 1:] for part in parts], 1)
    assert places.sort().values.tolist() == list(range(24))
    assert torch.equal(ids[:, places.argsort()][:, :22], batch["input_ids"])
    assert torch.equal(after[:, places.argsort()][:, :21], batch["labels"][:, 1:])
    assert after[:, places.argsort()][:, 21:].eq(-100).all()
    pairs = (places + 1).view(4, 6).sum(1)
    assert pairs.tolist() == ([75] * 4 if lay is padded else [21, 57, 93, 129])
    for part in parts:
        whole = part["attention_mask"] if lay is padded else part["position_ids"]
        assert whole.shape == (1, 24)


def _unlike(rank: int) -> str:
    mesh = {"world": 2, "ranks_per_node": 2, "context": 1 + rank}
    with pytest.raises(ValueError) as refusal:
        Walker(make("llama", False), method("hzp", mesh=mesh), device="cpu")
    return str(refusal.value)


def _short(rank: int) -> list[str]:
    messages = []
    plan = method("hzp", mesh={"world": 2, "ranks_per_node": 2, "context": 2})
    with Walker(make("llama", False), plan, device="cpu") as walker:
        left = padded(documents(4, [8, 8]))
        left["attention_mask"][0, :3] = 0
        for batch in (padded(documents(4, [3, 2])), left):
            for ask in (walker.gradients, walker.evaluate, walker.step):
                with pytest.raises(ValueError) as refusal:
                    ask(batch)
                messages.append(str(refusal.value))
        with refused(ValueError, "local_batch", "mesh.context: 2"):
            walker.step(padded(documents(4, [8, 8])), local_batch=True)
        assert walker.steps_done == 0
    return messages


def test_ranks_refuse_what_has_no_parts() -> None:
    """Short and left-padded sequences, and ranks with different meshes, on every rank."""
    for messages in run_ranks(2, _short):
        assert all("mesh.context: 2" in m and "3 tokens" in m for m in messages[:3]), messages
        assert all("mesh.context is 2" in m and "right" in m for m in messages[3:]), messages
    for message in run_ranks(2, _unlike):
        assert "mesh.context: rank 0 has '1', rank 1 has '2'" in message


@pytest.mark.parametrize(
    ("name", "settings", "facts"),
    [
        ("hzp", {"mesh": {"world": 4, "context": 3}}, "mesh.context 3 4"),
        ("hzp", {"mesh": {"world": 4, "context": 2, "data": 3}}, "mesh.data 3 2 6 4"),
        ("hzp", {"mesh": {"world": 12, "ranks_per_node": 6, "context": 4}}, "mesh.context 4 6"),
        ("hzp", {"mesh": {"world": 2, "context": 2}, "loss": "model"}, "loss model mesh.context 2"),
        ("hzp", {"mesh": {"world": 2, "context": 2}, "loss": "objective"}, "objective 2"),
        ("plain", {"mesh": {"context": 2}}, "mesh.context 2 1"),
        ("distzo2", {"mesh": {"world": 2, "data": 2, "context": 2}}, "mesh.context 2 1"),
        ("hzp", {"context": {"way": "ring"}}, "context.way ring keys heads"),
    ],
)
def test_plans_refuse_it(name: str, settings: dict[str, Any], facts: str) -> None:
    with refused(ValueError, *facts.split()):
        method(name, **settings)
