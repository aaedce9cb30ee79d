"""Oracle: the ranking itself, and the parameter counts on the cards of published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.plan.run_config import DataSettings
from blockwalk.plan.settings import override
from blockwalk.program.program import Shape
from blockwalk.report import advice
from blockwalk.simulate import hardware
from blockwalk.simulate.planner import programs_of, rank
from blockwalk.train import config
from tests.models import tiny_model
from tests.support.messages import refused


def test_auto_is_the_first_of_the_ranking_with_the_settings_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    settings = {
        "model": str(tmp_path),
        "method": "auto",
        "lora.rank": 8,
        "batch_size": 1,
        "optimizer.learning_rate": 3e-4,
    }
    with refused(ValueError, "blockwalk doctor"):
        config.from_mapping(settings)
    hardware.save(hardware.load("rtx-4090"), tmp_path / "hardware.yaml")
    shape = Shape(1, DataSettings().max_length)
    best = rank(
        advice.task(
            str(tmp_path), LoraSettings(rank=8), hardware.load("rtx-4090"), shape, budget=None
        )
    ).best
    assert best is not None
    chosen = config.from_mapping(settings)
    assert chosen.plan == override(best.plan, {"optimizer.learning_rate": 3e-4})
    assert chosen.lora is not None
    assert chosen.lora.rank == 8
    assert config.from_mapping(chosen.to_mapping()) == chosen
    with refused(ValueError, "method"):
        config.from_mapping({**settings, "budget": "10kB"})


MIXTRAL_8X7B = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_local_experts": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "num_experts_per_tok": 2, "dtype": "bfloat16",
}  # fmt: skip
OPT_125M = {
    "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "vocab_size": 50272, "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768, "dtype": "float16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config_", "parameters"), [(MIXTRAL_8X7B, 46_702_792_704), (OPT_125M, 125_239_296)]
)
def test_other_families_have_their_published_parameters_and_are_walked(
    config_: dict[str, Any], parameters: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_))
    machine = hardware.load("h200")
    shape = Shape(1, 128)
    for path in (tmp_path, tmp_path / "config.json"):
        task = advice.task(str(path), None, machine, shape, budget=None)
        assert task.model.numel() == parameters
    (program, *_), _ = programs_of(task, method("mezo"))
    assert sum(op.flops for op in program.ops) > 0


def test_what_is_no_configuration_of_a_model_is_refused(tmp_path: Path) -> None:
    """Broken JSON, JSON that names no model, and a family that transformers does not have."""
    file = tmp_path / "config.json"
    for text, message in (
        ("{", "config.json JSON"),
        ("{}", "`model_type`"),
        ('{"model_type": "no_such"}', "no_such"),
    ):
        file.write_text(text)
        for path in (tmp_path, file):
            with refused((ValueError, OSError), message):
                advice.task(str(path), None, hardware.load("laptop"), Shape(1, 128), budget=None)
