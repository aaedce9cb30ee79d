"""Oracle: transformers itself. A zeroth-order run's saved model loads there and has the walker's
loss, experts included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from blockwalk import Walker, method
from tests.models import random_batch


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("codec", ["bf16", "fp8"])
def test_fused_experts_keep_their_three_dimensions(tier: str, codec: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=101, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2, bos_token_id=1, eos_token_id=2,
        max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float()
    plan = method("mezo" if tier == "device" else "zo2", trainable=f"{tier} × {codec}")
    with Walker(model, plan, workdir=tmp_path / "work", device="cpu") as walker:
        walker.step(random_batch())
        expected = walker.evaluate(random_batch(seed=1)).loss
        walker.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    with torch.no_grad():
        assert float(saved(**random_batch(seed=1)).loss) == pytest.approx(expected, rel=1e-6)
