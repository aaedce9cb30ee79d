"""Oracle: TRL's ``DPOTrainer`` on the same model, arguments and data sets: losses and margins of
each step, evaluations and weights."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import blockwalk
from blockwalk.integrations import BlockwalkTrainer
from blockwalk.plan.settings import override
from tests.models import tiny_model
from tests.support import chat_tokenizers
from tests.support.data_files import jsonl
from tests.support.messages import refused

trl = pytest.importorskip("trl")

VOCABULARY = 280


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": "".join(draw.choices("ab cd", k=draw.randint(3, 20)))}

    return [
        {
            "prompt": [turn("user")],
            "chosen": [{"role": "assistant", "content": "yes " + turn("assistant")["content"]}],
            "rejected": [{"role": "assistant", "content": "no " + turn("assistant")["content"]}],
        }
        for _ in range(count)
    ]


def arguments(folder: Path, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "beta": 0.3,
        "max_length": 40,
        "train_sampling_strategy": "sequential",
    }
    return trl.DPOConfig(str(folder), **{**settings, **more})


def trained(cls: Any, folder: Path, *, arguments_changes: Any = None, **more: Any) -> Any:
    from datasets import Dataset

    tokenizer = chat_tokenizers.tokenizer(chat_tokenizers.PLAIN)
    tokenizer.pad_token = "</s>"
    done = cls(
        tiny_model("llama", vocab_size=VOCABULARY),
        args=arguments(folder, **(arguments_changes or {})),
        train_dataset=Dataset.from_list(pairs(20, 1)),
        eval_dataset=Dataset.from_list(pairs(6, 2)),
        processing_class=tokenizer,
        **more,
    )
    done.train()
    return done


def history(done: Any, name: str) -> list[float]:
    return [line[name] for line in done.state.log_history if name in line]


@pytest.mark.parametrize("changes", [{}, {"loss_type": ["ipo"]}])
def test_pairs_train_as_in_trl(changes: dict[str, Any], tmp_path: Path) -> None:
    ours = trained(BlockwalkTrainer, tmp_path / "ours", arguments_changes=changes)
    reference = tiny_model("llama", vocab_size=VOCABULARY)
    folder = tmp_path / "theirs"
    theirs = trained(trl.DPOTrainer, folder, arguments_changes=changes, ref_model=reference)
    for name, name_there in (
        ("loss", "loss"),
        ("margin", "rewards/margins"),
        ("eval_loss", "eval_loss"),
        ("eval_margin", "eval_rewards/margins"),
    ):
        assert history(ours, name) == pytest.approx(history(theirs, name_there), rel=1e-3, abs=1e-5)
        assert history(ours, name), name
    # both margins are 0 before the first update
    accuracies = history(theirs, "rewards/accuracies")[1:]
    assert history(ours, "reward_accuracy")[1:] == pytest.approx(accuracies)
    assert max(map(abs, history(ours, "margin"))) > 0.01
    ours.save_model(str(tmp_path / "saved"))
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, value in theirs.model.state_dict().items():
        if name in saved:
            torch.testing.assert_close(saved[name], value, atol=2e-4, rtol=2e-3)


def test_pairs_of_a_file_train_as_those_of_a_data_set(tmp_path: Path) -> None:
    """Oracle: the same pairs as a data set."""
    expected = trained(BlockwalkTrainer, tmp_path / "set")
    tokenizer = chat_tokenizers.tokenizer(chat_tokenizers.PLAIN)
    settings = vars(arguments(tmp_path))
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    args = TrainingArguments(**{name: settings[name] for name in names if name in settings})
    plan = override(blockwalk.method("plain"), {"objective": "dpo", "objective.beta": 0.3})
    data = {
        "train": str(jsonl(tmp_path / "train.jsonl", *pairs(20, 1))),
        "eval": str(jsonl(tmp_path / "eval.jsonl", *pairs(6, 2))),
        "max_length": 40,
    }
    done = BlockwalkTrainer(
        tiny_model("llama", vocab_size=VOCABULARY),
        args,
        plan=plan,
        data=data,
        processing_class=tokenizer,
    )
    done.train()
    for name in ("loss", "margin", "eval_loss", "eval_reward_accuracy"):
        assert history(done, name) == pytest.approx(history(expected, name), rel=1e-6), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": ["hinge"]}, "loss_type hinge sigmoid dpo objective"),
        ({"loss_type": ["sigmoid", "ipo"]}, "loss_type sigmoid ipo"),
        ({"truncation_mode": "keep_end"}, "truncation_mode keep_end"),
        ({"label_smoothing": 0.2}, "label_smoothing 0.2 DPOConfig"),
        ({"sync_ref_model": True}, "sync_ref_model True DPOConfig"),
    ],
)
def test_what_is_not_followed_of_the_arguments_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with refused(ValueError, message):
        trained(BlockwalkTrainer, tmp_path, arguments_changes=changes)


def test_a_collator_and_an_objective_without_its_baseline_are_refused(tmp_path: Path) -> None:
    with refused(ValueError, "data_collator chosen rejected"):
        trained(BlockwalkTrainer, tmp_path, data_collator=lambda examples: examples)
    with refused(ValueError, "kto baseline blockwalk.train"):
        plan = override(blockwalk.method("plain"), {"objective": "kto"})
        trained(BlockwalkTrainer, tmp_path, plan=plan)
