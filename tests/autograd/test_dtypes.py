"""Oracle: autograd in float32, for compute dtypes; the closed form of stochastic rounding, for
masters in 16 bits."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.numerics.row_tiles import NarrowProducts
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused, says


def lora_gradients(model: Any, **settings: Any) -> dict[str, torch.Tensor]:
    """Of 2,048 tokens, with the same adapters every time."""
    with Walker(
        model, method("plain", **settings), lora=LoraSettings(rank=4), device="cpu"
    ) as walker:
        generator = torch.Generator().manual_seed(7)
        for name, master in walker.engine.trained.masters.items():
            if "lora_B" in name:
                master.copy_(0.02 * torch.randn(master.shape, generator=generator))
        return walker.gradients(random_batch(8, 256))


def test_a_float16_checkpoint_has_gradients_as_near_as_those_of_bfloat16(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: autograd in float32, on the same stored numbers. In float16 the worst tensor is off
    by 40 %."""
    model = tiny_model(
        "llama",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        max_position_embeddings=256,
    )
    model.half().save_pretrained(tmp_path)
    exact = lora_gradients(tmp_path, compute_dtype="float32")
    assert "float16" not in caplog.text
    with caplog.at_level(logging.WARNING):
        found = lora_gradients(tmp_path)
    says(caplog.text, "float16")
    narrow = lora_gradients(tmp_path, compute_dtype="bfloat16")
    for name, gradient in exact.items():
        assert (found[name] - gradient).norm() <= max(
            (narrow[name] - gradient).norm(), 0.05 * gradient.norm()
        ), name


def test_float16_backpropagation_is_refused_and_zeroth_order_is_not() -> None:
    """Oracle: the rule of the plan."""
    with refused(ValueError, "compute_dtype float16 bfloat16"):
        method("mebp", compute_dtype="float16")
    assert method("mezo", compute_dtype="float16").compute_dtype == "float16"


@pytest.mark.parametrize(("rounding", "share"), [("stochastic", 1 / 16), ("nearest", 0.0)])
def test_updates_below_half_a_unit_move_a_16_bit_master_in_expectation(
    rounding: str, share: float
) -> None:
    """Oracle: the closed form. A sixteenth of the spacing above 1 moves a sixteenth of all ones,
    each by the spacing."""
    model = tiny_model("llama", hidden_size=64).bfloat16()
    spacing = 2.0**-7
    settings = {
        "optimizer": {"name": "sgd", "learning_rate": spacing / 16},
        "update.rounding": rounding,
    }
    with Walker(model, method("plain", **settings), device="cpu") as walker:
        masters = walker.engine.trained.masters
        elements = sum(t.fill_(1.0).numel() for t in masters.values())
        walker.engine.gradients.sums.update(
            {name: torch.full(t.shape, -1.0) for name, t in masters.items()}
        )
        for unit in range(len(walker.spec.units)):
            walker.estimator.checkpointed.apply(unit, step=1, learning_rate=spacing / 16)
        values = torch.cat([t.double().flatten() for t in masters.values()])
    assert set(values.tolist()) <= {1.0, 1.0 + spacing}
    deviation = (share * (1 - share) / elements) ** 0.5
    assert abs(float((values > 1).double().mean()) - share) <= 4 * deviation


def test_16_bit_masters_round_to_the_same_bits_on_every_tier(tmp_path: Path) -> None:
    """Oracle: the masters on the device."""
    model = tiny_model("llama", tied=True).bfloat16()
    ends = []
    for tier in ("device", "disk"):
        plan = method("plain", trainable=f"{tier} × raw", optimizer={"learning_rate": 1e-4})
        with Walker(copy.deepcopy(model), plan, workdir=tmp_path / tier, device="cpu") as walker:
            for step in range(3):
                walker.step(random_batch(seed=step))
            ends.append(walker.state_dict())
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0] if k != "steps_done")


@pytest.mark.parametrize(
    "plan",
    [
        {"name": "plain"},
        {"name": "plain", "in_memory": True},
        {"name": "mebp", "frozen": "disk × raw"},
        {"name": "mebp", "frozen": "host × raw", "lora": True},
        {"name": "mebp", "frozen": "disk × raw", "lora": True},
        {"name": "mezo"},
        {"name": "zo2"},
        {"name": "fcdp", "lora": True},
        {"name": "fcdp", "lora": True, "frozen": "device × int8 × node"},
    ],
    ids=lambda plan: " ".join(map(str, plan.values())),
)
def test_what_transformers_keeps_in_float32_is_computed_in_float32(
    plan: dict[str, Any], tmp_path: Path
) -> None:
    """Oracle: the loss and the parameters' dtypes of ``from_pretrained(dtype=torch.bfloat16)``, in
    the walk's shapes."""
    from transformers import AutoModelForCausalLM

    sizes = {
        "num_key_value_heads": 2,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_layer_start_index": 1,
    }
    model = tiny_model(
        "ernie4_5_moe",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        **sizes,
    )
    for module in model.modules():
        if hasattr(module, "moe_statics"):
            module.weight.data.normal_(std=0.1)  # the constructor leaves zeros
    model.save_pretrained(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    kept = {name for name, p in theirs.named_parameters() if p.dtype == torch.float32}
    assert any(name.endswith("gate.weight") for name in kept)
    batch = random_batch()
    with torch.no_grad(), NarrowProducts():
        expected = float(theirs(**batch, use_cache=False).loss)
    settings = dict(plan)
    lora = LoraSettings(rank=2, target_modules=("q_proj",)) if settings.pop("lora", False) else None
    given = theirs if settings.pop("in_memory", False) else tmp_path / "model"
    settings |= {"loss": "model", "compute_dtype": "bfloat16"}
    with Walker(
        given, method(**settings), lora=lora, workdir=tmp_path / "work", device="cpu"
    ) as walker:
        error = 0.02 if "int8" in str(plan) else 1e-7
        assert walker.evaluate(batch).loss == pytest.approx(expected, rel=error)
        assert {p.name for p in walker.spec.params() if p.exact} == kept
        walker.step(batch)


@pytest.mark.parametrize(
    ("short", "name"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")]
)
def test_short_names_of_dtypes_are_those_of_codecs(short: str, name: str) -> None:
    """Oracle: the plan under the long name."""
    assert method("mezo", compute_dtype=short) == method("mezo", compute_dtype=name)
