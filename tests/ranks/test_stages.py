"""Oracle: the same walk by one process; for what is spread over the ranks of a stage the same walk
by as many ranks without stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from blockwalk.cutting.verify import certified
from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.held import masters
from tests.support.messages import refused
from tests.support.processes import run_ranks

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_hidden_layers": 8},
    "mistral": {**SMALL, "sliding_window": 5},
    "gemma3_text": {
        **SMALL,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v3": {
        **SMALL,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "mixtral": {"num_hidden_layers": 4},
    "gpt2": {"n_layer": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0},
    "bloom": {
        "hidden_size": 32,
        "n_head": 4,
        "n_layer": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "qwen3_next": {
        **SMALL,
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "opt": {"tied": True, "dropout": 0.0, "num_hidden_layers": 4},
}
CLIPPED: dict[str, Any] = {"optimizer": {"learning_rate": 1e-2, "max_grad_norm": 0.5}}
KEPT: dict[str, Any] = {"recompute": "none", "prefetch": 0}
SUMMED: dict[str, Any] = {"pipeline.shared_sums": True}
AWAY: dict[str, Any] = {"activation": "host", "optimizer_state": "host × fp32", "prefetch": 2}

Case = tuple[str, int, int, dict[str, Any]]
"""A kind of model, chunks of a stage, micro-batches, and further settings."""


def make(kind: str) -> nn.Module:
    return tiny_model(kind, **KINDS[kind])


def made(kind: str, stages: int, chunks: int, count: int, settings: dict[str, Any]) -> Walker:
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = {"world": world, "ranks_per_node": world, "pipeline": stages}
    row = settings.get("row", "zero3")
    given = {name: value for name, value in settings.items() if name not in ("row", "context")}
    if stages == 1:
        given.pop("pipeline.shared_sums", None)
    mesh["context"] = settings.get("context", 1)
    given = {"pipeline.chunks": chunks, "gradient_accumulation_steps": count, **given}
    plan = method(row, mesh=mesh, **given)
    return Walker(make(kind), plan, device="cpu")


def walked(rank: int, stages: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Gradients, three steps, and losses of evaluations."""
    answers = []
    for kind, chunks, count, settings in cases:
        with made(kind, stages, chunks if stages > 1 else 1, count, settings) as walker:
            rows = 4 * count
            steps = [walker.step(random_batch(rows, 10, seed=seed)) for seed in range(3)]
            answers.append(
                {
                    "gradients": walker.gradients(random_batch(rows, 10)),
                    "steps": [(step.loss, step.grad_norm) for step in steps],
                    "masters": masters(walker),
                    "evaluated": walker.evaluate(random_batch(4, 10, seed=9), batches=2).loss,
                    "rows": walker.label_losses(random_batch(3, 10, seed=8)).tolist(),
                }
            )
    return answers


def compare(cases: list[Case], answers: list[list[dict[str, Any]]], single: list[Any]) -> None:
    for k, (kind, _, _, settings) in enumerate(cases):
        reference = single[k]
        reordered = {"context", "pipeline.shared_sums"} & settings.keys()
        exact = not KINDS[kind].get("tied") and not reordered
        for answer in (of_rank[k] for of_rank in answers):
            for part in ("gradients", "masters"):
                assert answer[part].keys() == reference[part].keys(), (kind, part)
            if exact:
                for part in ("gradients", "masters"):
                    for name, value in reference[part].items():
                        assert torch.equal(answer[part][name], value), (kind, part, name)
                for figure in ("steps", "evaluated", "rows"):
                    assert answer[figure] == reference[figure], (kind, figure)
                continue
            assert answer["evaluated"] == pytest.approx(reference["evaluated"], rel=1e-6)
            assert answer["rows"] == pytest.approx(reference["rows"], rel=1e-6)
            first = pytest.approx(reference["steps"][0], rel=1e-6)
            assert answer["steps"][0] == first, kind
            largest = max(float(value.norm()) for value in reference["gradients"].values())
            for name, value in reference["gradients"].items():
                change = float((answer["gradients"][name] - value).norm())
                assert change <= 1e-5 * max(float(value.norm()), 1e-3 * largest), (kind, name)


def test_two_stages_are_one_process() -> None:
    """Every family, chunks and micro-batches in turn; tied ends, dropout, kept graphs, state off
    the device."""
    cases: list[Case] = [
        ("llama", 2, 4, CLIPPED),
        ("mistral", 1, 3, CLIPPED | AWAY),
        ("gemma3_text", 2, 1, CLIPPED),
        ("deepseek_v3", 1, 3, CLIPPED | KEPT),
        ("mixtral", 2, 3, CLIPPED),
        ("gpt2", 1, 3, CLIPPED),
        ("bloom", 2, 1, CLIPPED | KEPT),
        ("qwen3_next", 1, 1, CLIPPED),
        ("opt", 1, 3, CLIPPED),
    ]
    for kind in KINDS:
        certified(make(kind))
    single = walked(0, 1, cases)
    compare(cases, run_ranks(2, walked, 2, cases, timeout=300), single)


def test_stages_of_ranks_that_share_state_and_rows() -> None:
    """Four stages of one rank; two stages whose two ranks share state, or parts of sequences; tied
    ends over both."""
    certified(make("llama"))
    certified(make("opt"))
    four: list[Case] = [("llama", 2, 8, CLIPPED), ("opt", 1, 3, CLIPPED)]
    single = walked(0, 1, four)
    compare(four, run_ranks(4, walked, 4, four, timeout=300), single)
    shared: list[Case] = [
        ("llama", 2, 4, CLIPPED | {"row": "hzp"}),
        ("llama", 1, 1, CLIPPED | {"row": "fcdp", "frozen": "device × int4a × node"}),
        ("opt", 1, 2, CLIPPED | {"row": "mics"}),
        ("llama", 1, 5, CLIPPED | {"row": "zeropp", "together": 2}),
        ("llama", 2, 4, CLIPPED | SUMMED | {"row": "hzp"}),
        ("opt", 1, 3, CLIPPED | SUMMED),
    ]
    compare(
        shared, run_ranks(4, walked, 2, shared, timeout=300), run_ranks(2, walked, 1, shared)[0]
    )
    parts: list[Case] = [("llama", 1, 2, CLIPPED | {"row": "hzp", "context": 2})]
    compare(parts, run_ranks(4, walked, 2, parts, timeout=300), run_ranks(2, walked, 1, parts)[0])


def _begun(rank: int, folder: Path) -> dict[str, Any]:
    """Two steps over stages, a checkpoint, a third step, and the saved model."""
    with made("opt", 2, 2, 2, CLIPPED) as walker:
        for seed in range(2):
            walker.step(random_batch(8, 10, seed=seed))
        walker.save_state(folder / "stages")
        before = masters(walker)
        loss = walker.step(random_batch(8, 10, seed=2)).loss
        walker.save_pretrained(folder / "model")
        after = masters(walker)
    with made("opt", 2, 1, 2, CLIPPED) as walker:  # cut otherwise
        walker.load_state(folder / "stages")
        assert walker.steps_done == 2
        again = walker.step(random_batch(8, 10, seed=2)).loss
        resumed = masters(walker)
    return {"before": before, "loss": loss, "after": after, "again": again, "resumed": resumed}


def weights(walker: Walker) -> dict[str, torch.Tensor]:
    engine: Any = walker.engine
    if walker.plan.home.gathered:
        return masters(walker)
    return {name: master.clone() for name, master in engine.trained.masters.items()}


def _gone_on(rank: int, row: str, stages: int, source: Path, target: Path | None) -> Any:
    settings = CLIPPED | {"row": row}
    with made("opt", stages, 1, 2, settings) as walker:
        walker.load_state(source)
        loaded = weights(walker)
        if target is not None:
            walker.save_state(target)
        loss = walker.step(random_batch(8, 10, seed=2)).loss
        return loaded, loss


def test_a_run_goes_on_with_other_stages(tmp_path: Path) -> None:
    """2 stages × 2 chunks → 2 × 1 → plain on 1 process → 4 ranks of 2 stages; the
    saved model is that of transformers."""
    certified(make("opt"))
    first, second = run_ranks(2, _begun, tmp_path, timeout=200)
    assert first["again"] == pytest.approx(first["loss"], rel=1e-7)
    for name, value in first["after"].items():
        assert torch.equal(first["resumed"][name], value), name
        assert torch.equal(second["after"][name], value), name
    one = _gone_on(0, "plain", 1, tmp_path / "stages", tmp_path / "one")
    four = run_ranks(4, _gone_on, "hzp", 2, tmp_path / "one", None, timeout=200)[0]
    for loaded, loss in (one, four):
        assert loss == pytest.approx(first["loss"], rel=1e-6)
        assert loaded.keys() == first["before"].keys()
        for name, value in first["before"].items():
            assert torch.equal(loaded[name], value), name

    from transformers import AutoModelForCausalLM

    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert saved.keys() == first["after"].keys()
    for name, value in first["after"].items():
        assert torch.equal(saved[name], value), name


BAD: list[tuple[dict[str, Any], str]] = [
    ({"mesh.world": 3, "mesh.pipeline": 2}, "do not divide mesh.world, 3 ranks"),
    ({"mesh.world": 1, "mesh.pipeline": 2}, "do not divide mesh.world, 1 rank; --nproc-per-node"),
    ({"mesh.world": 4, "mesh.pipeline": 2, "pipeline.blocks": [1, 2, 3]}, "2×1 = 2 chunks"),
    ({"pipeline.chunks": 2}, "there is one stage"),
    (
        {
            "mesh.world": 2,
            "mesh.pipeline": 2,
            "pipeline.chunks": 2,
            "gradient_accumulation_steps": 5,
        },
        "set gradient_accumulation_steps: 4 or 6",
    ),
]


def _refused(rank: int) -> list[str]:
    messages = []

    def says(*attempt: Any, **settings: Any) -> None:
        with pytest.raises(ValueError) as refusal:
            made(*attempt, settings)
        messages.append(str(refusal.value))

    says("llama", 2, 5, 1)
    says("llama", 2, 1, 1, **{"pipeline.blocks": [5, 5]})
    with made("mixtral", 2, 1, 1, {}) as walker:
        for attempt in (
            lambda: walker.generate(torch.tensor([[3, 4]]), 2),
            lambda: walker.step(random_batch(2, 8), local_batch=True),
        ):
            with pytest.raises(ValueError) as refusal:
                attempt()
            messages.append(str(refusal.value))
    says("mixtral", 1 + rank, 1, 1)
    return messages


def test_bad_stages_are_refused_with_numbers() -> None:
    certified(make("llama"))
    for messages in run_ranks(2, _refused, timeout=100):
        more_chunks, blocks, generation, own_rows, unlike = messages
        assert "8 blocks" in more_chunks
        assert "10 chunks" in more_chunks
        assert "[5, 5], 10 in all" in blocks
        assert "on one process, with mesh.pipeline: 1" in generation
        assert "local_batch=False" in own_rows
        assert "mesh.pipeline" in unlike
    for settings, words in BAD:
        with refused(ValueError, words):
            method("zero3", **settings)
    with refused(ValueError, "mesh.pipeline is 2", "set mesh.pipeline: 1"):
        method("zo2", **{"mesh.world": 2, "mesh.pipeline": 2})
    with refused(ValueError, "mesh.pipeline is 2", "hzp", "frozen: device × int4a × node"):
        method("mebp", **{"mesh.world": 2, "mesh.pipeline": 2})
