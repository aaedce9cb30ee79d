"""Oracle: PEFT, which loads the same adapter with ``is_trainable=True``: the loss and gradients of
its first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from blockwalk.cli import main
from blockwalk.train import config
from blockwalk.walk.walker import Walker
from tests.conftest import TinyRun
from tests.models import random_batch
from tests.support.messages import refused


@pytest.fixture
def adapter(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """A LoRA of rank 3 that PEFT made and saved, none of whose factors is zero."""
    base = AutoModelForCausalLM.from_pretrained(tiny_run.model)
    settings: dict[str, Any] = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "down_proj"],
        "use_rslora": True,
    }
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(1)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = torch.randn_like(param) * 0.1
    model.save_pretrained(tmp_path / "run" / "adapter")
    return tmp_path / "run" / "adapter"


def test_the_first_step_is_that_of_peft(tiny_run: TinyRun, adapter: Path) -> None:
    settings = {
        "model": str(tiny_run.model),
        "method": "plain",
        "lora": {"from": str(adapter.parent)},
    }
    run = config.from_mapping(settings)
    assert run.lora is not None
    assert (run.lora.rank, run.lora.alpha, run.lora.target_modules) == (
        3,
        5,
        ("down_proj", "q_proj"),
    )
    assert run.lora.options == {"use_rslora": True}
    assert config.from_mapping(run.to_mapping()) == run

    batch = random_batch()
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_run.model), str(adapter), is_trainable=True
    ).train()
    loss = theirs(**batch).loss
    loss.backward()
    rate = 1e-3
    plan = config.from_mapping(
        {**settings, "optimizer": {"name": "sgd", "learning_rate": rate}}
    ).plan
    before = {name: p.detach().clone() for name, p in theirs.named_parameters() if p.requires_grad}
    with Walker(run.model, plan, lora=run.adapters_at_start) as walker:
        result = walker.step(batch)
        ours = walker.state_dict()
    assert result.loss == pytest.approx(float(loss), rel=1e-6)
    trained = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    found = {
        name: tensor
        for name, tensor in ours.items()
        if isinstance(tensor, torch.Tensor) and ".lora_" in name
    }
    assert len(trained) == 12
    for name, param in trained.items():
        short = name.removeprefix("base_model.model.").replace(".default", "")
        (mine,) = [tensor for key, tensor in found.items() if key.endswith(short)]
        torch.testing.assert_close(mine, before[name] - rate * param.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("lora.rank", ("8", "3")),
        ("lora.alpha", ("16", "5")),
        ("lora.target_modules", ("all-linear", "[down_proj, q_proj]")),
        ("lora.options.use_rslora", ("False", "True")),
    ],
)
def test_a_setting_that_contradicts_is_refused_with_both_values(
    adapter: Path, setting: str, values: tuple[str, str]
) -> None:
    with refused(ValueError, setting) as refusal:
        config.from_mapping({"lora.from": str(adapter)}, [(setting, values[0].lower())])
    assert all(value in str(refusal.value) for value in values)


def test_a_run_goes_on_from_an_adapter_and_is_resumed(
    tiny_run: TinyRun, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the loss of PEFT's model on the first batch is the run's own evaluation before its
    first step."""
    out = tmp_path / "second"
    given = [
        "train",
        *tiny_run.arguments(out),
        "--method",
        "plain",
        "--lora.from",
        str(adapter),
        "--save_every",
        "1",
    ]
    assert main.main([*given, "--max_steps", "2"]) == 0
    assert (
        main.main(
            [
                "eval",
                *tiny_run.arguments(out),
                "--method",
                "plain",
                "--adapter",
                str(adapter),
                "--json",
            ]
        )
        == 0
    )
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    first = json.loads((out / "evaluations.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    saved = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["use_rslora"]) == (3, 5, True)
    assert main.main([*given, "--max_steps", "3", "--resume_from_checkpoint", "latest"]) == 0
    assert "resumed at step 2" in capsys.readouterr().out


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with refused(ValueError, "lora.from PEFT"):
        config.from_mapping({"lora": {"from": str(tmp_path)}})
