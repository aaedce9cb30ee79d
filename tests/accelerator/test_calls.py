"""Oracle: Python's own profiling events, which count the calls that a step makes; a card waits for
each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import OPTConfig, OPTForCausalLM, Qwen2Config, Qwen2ForCausalLM

from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import random_batch
from tests.support.python_calls import PythonCalls
from tests.support.simulated_device import Simulated

LAYERS = 28
# Adapters of rank 2, fewer than a block's parameters. At commit 12f79d11 a step made 131,329 calls
# with raw weights, and 174,231 with int4a; now 42,724 and 73,227.
MOST = {"raw": 43_200, "int4a": 74_000}
# Of zeroth order, 24 layers, as OPT-1.3B has: 176,326 and 183,299 then; now 61,253, and 67,441 to
# 71,124 as lanes wait.
MOST_OF_FORWARDS = {"mezo": 62_500, "zo2": 74_600}


def qwen2(folder: Path) -> Path:
    """A model of narrow layers, as many as a model of 1.5B has."""
    config = Qwen2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=128,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("codec", MOST)
def test_a_step_of_adapters_makes_few_calls_of_python(
    codec: str, sim: Simulated, tmp_path: Path
) -> None:
    calls = PythonCalls()
    plan = method("mebp", frozen=f"device × {codec}", activation="host", compute_dtype="bfloat16")
    batch = random_batch(1, 8)
    del batch["attention_mask"]
    with Walker(
        qwen2(tmp_path / "model"),
        plan,
        lora=LoraSettings(rank=2),
        workdir=tmp_path,
        device="sim:0",
    ) as walker:
        walker.step(batch)
        walker.step(batch)
        count = calls.of(lambda: walker.step(batch))
    most = MOST[codec]
    assert 10 * LAYERS < count <= most, (count, calls.by_caller.most_common(20))


@pytest.mark.parametrize("row", MOST_OF_FORWARDS)
def test_a_step_of_zeroth_order_makes_few_calls_of_python(
    row: str, sim: Simulated, tmp_path: Path
) -> None:
    calls = PythonCalls()
    config = OPTConfig(
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=24,
        num_attention_heads=2,
        vocab_size=128,
        word_embed_proj_dim=16,
        max_position_embeddings=64,
    )
    OPTForCausalLM(config).half().save_pretrained(tmp_path / "model")
    with Walker(tmp_path / "model", method(row), workdir=tmp_path, device="sim:0") as walker:
        for step in range(3):
            walker.step(random_batch(seed=step))
        count = calls.of(lambda: walker.step(random_batch(seed=3)))
    most = MOST_OF_FORWARDS[row]
    assert 1000 < count <= most, (count, calls.by_caller.most_common(20))
