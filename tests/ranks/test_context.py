"""Oracle: torch's autograd over every document by itself, in one process: no padding, no
neighbours in its row, no parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockwalk.data.batch import columns
from blockwalk.plan.methods import method
from blockwalk.walk.context_check import require_parts
from blockwalk.walk.walker import Walker
from tests.models import tiny_model
from tests.support.messages import refused
from tests.support.processes import run_ranks
from tests.support.sharded_runs import canonical, close

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 5,
    },
    "gemma3_text": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"tied": True, "dropout": 0.0},
}
LENGTHS = [[13, 9], [4, 12]]
"""Tokens of the documents of each batch; every row of either batch has 13 or 16 tokens."""


def make(kind: str, lora: bool) -> nn.Module:
    model = tiny_model(kind, **KINDS[kind])
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        targets = ["q_proj", "v_proj"]
        config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        model = get_peft_model(model, config)
    return model


def documents(seed: int, lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 101, (length,), generator=generator) for length in lengths]


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """One document a row, padded on the right."""
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed(rows: list[Tensor]) -> dict[str, Tensor]:
    """All documents in one row; nothing predicts a first token."""
    ids = torch.cat(rows)[None]
    places = torch.cat([torch.arange(len(row)) for row in rows])[None]
    labels = ids.masked_fill(places == 0, -100)
    return {"input_ids": ids, "position_ids": places, "labels": labels}


BATCHES = {
    "padded": (padded, documents(1, LENGTHS[0])),
    "packed": (packed, documents(2, LENGTHS[1])),
}


def alone(model: nn.Module, rows: list[Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """Loss, its gradients, and the loss summed over each document."""
    model = copy.deepcopy(model).to(dtype).train()
    losses = [
        nn.functional.cross_entropy(
            model(row[None], use_cache=False).logits[0, :-1], row[1:], reduction="sum"
        )
        for row in rows
    ]
    loss = torch.stack(losses).sum() / sum(len(row) - 1 for row in rows)
    loss.backward()  # type: ignore[no-untyped-call]
    return {
        "loss": loss.item(),
        "rows": [each.item() for each in losses],
        "gradients": {
            canonical(name): p.grad for name, p in model.named_parameters() if p.grad is not None
        },
    }


def _walked(rank: int, cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    import torch.distributed as dist

    answers = []
    for kind, lora, name, way, context in cases:
        world = dist.get_world_size()
        mesh = {"world": world, "ranks_per_node": world, "context": context}
        plan = method(name, mesh=mesh, context={"way": way})
        with Walker(make(kind, lora), plan, device="cpu") as walker:
            answer: dict[str, Any] = {}
            for shape, (lay, rows) in BATCHES.items():
                batch = lay(rows)
                answer[shape] = {
                    "gradients": walker.gradients(batch),
                    "evaluated": walker.evaluate(batch).loss,
                    "rows": walker.label_losses(batch, batches=1).tolist(),
                }
            answer["step"] = walker.step(batch).loss
            answers.append(answer)
    return answers


def check(world: int, cases: list[tuple[Any, ...]]) -> None:
    for kind, lora, _, way, _ in cases:  # once, before the ranks are forked
        mesh = {"world": 2, "ranks_per_node": 2, "context": 2}
        require_parts(make(kind, lora), method("hzp", mesh=mesh, context={"way": way}))
    answers = run_ranks(world, _walked, cases, timeout=300)
    _, last_rows = BATCHES["packed"]
    for k, case in enumerate(cases):
        model = make(case[0], case[1])
        step = alone(model, last_rows, torch.float64)["loss"]
        assert [answer[k]["step"] for answer in answers] == pytest.approx([step] * world, rel=1e-6)
        for shape, (_, rows) in BATCHES.items():
            single = alone(model, rows, torch.float32)
            exact = alone(model, rows, torch.float64)
            sums = single["rows"] if shape == "padded" else [sum(single["rows"])]
            for answer in answers:
                walked = answer[k][shape]
                assert walked["evaluated"] == pytest.approx(exact["loss"], rel=1e-6), (case, shape)
                assert walked["rows"] == pytest.approx(sums, rel=1e-6), (case, shape)
                assert walked["gradients"].keys() == single["gradients"].keys(), case
                for name, gradient in walked["gradients"].items():
                    reference = single["gradients"][name]
                    within = close(gradient, reference, 1e-6) or close(
                        gradient.double(), exact["gradients"][name], 1e-6
                    )
                    vanishes = float(reference.norm()) < 1e-7
                    assert within or vanishes, (case, shape, name)


def test_two_ranks_with_parts_of_sequences_are_one_process() -> None:
    """Causal, sliding and mixed attention; learnt positions; tied heads; full and LoRA; both
    ways."""
    check(
        2,
        [
            ("llama", True, "fcdp", "heads", 2),
            ("mistral", False, "hzp", "keys", 2),
            ("gemma3_text", False, "zero3", "auto", 2),
            ("gpt2", False, "mics", "heads", 2),
            ("opt", False, "hzp", "keys", 2),
        ],
    )


def test_four_ranks_share_rows_and_parts() -> None:
    """Two rows over two pairs of ranks, and parts of one row over four."""
    check(4, [("llama", False, "hzp", "keys", 2), ("mistral", False, "hzp", "heads", 4)])


def test_parts_are_the_row() -> None:
    """Closed form: each token of a row is in one part, with the label of the token after it."""
    rows = documents(3, [11, 11])
    batch = packed(rows) | {"attention_mask": torch.ones(1, 22, dtype=torch.int64)}
    parts = [columns(batch, 4, number) for number in range(4)]
    ids = torch.cat([part["input_ids"] for part in parts], 1)
    after = torch.cat([part["labels"][:, 1:] for part in parts], 1)
    assert torch.equal(ids[:, :22], batch["input_ids"])
    assert torch.equal(after[:, :21], batch["labels"][:, 1:])
    assert after[:, 21:].eq(-100).all()
    for part in parts:
        assert part["attention_mask"].shape == (1, 24)
        assert part["attention_mask"].sum() == 22


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
