"""Oracle: ``transformers.Trainer`` itself on the same model in memory: losses, learning rates,
evaluations and weights; its own callbacks and TRL's; a run that was not interrupted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, default_data_collator

import blockwalk
from blockwalk.integrations import BlockwalkTrainer
from tests.models import tiny_model
from tests.support.messages import refused

logging.getLogger("transformers").setLevel(logging.ERROR)


def rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    drawn = torch.randint(
        3, 101, (count, 12), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return [
        {"input_ids": ids, "attention_mask": [1] * 12, "labels": [-100, -100, *ids[2:]]}
        for ids in drawn
    ]


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "optim": "adamw_torch",
    }
    return TrainingArguments(str(folder), **{**settings, **more})


def trainer(cls: Any, folder: Path, *, train: int = 20, callbacks: Any = None, **more: Any) -> Any:
    data = {
        "train_dataset": rows(train, 1),
        "eval_dataset": rows(8, 2),
        "data_collator": default_data_collator,
    }
    return cls(tiny_model("llama"), args=arguments(folder, **more), callbacks=callbacks, **data)


def history(done: Any, name: str) -> list[float]:
    return [line[name] for line in done.state.log_history if name in line]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    ours = trainer(BlockwalkTrainer, tmp_path_factory.mktemp("ours"))
    theirs = trainer(Trainer, tmp_path_factory.mktemp("theirs"))
    for each in (ours, theirs):
        each.train()
    return ours, theirs


def test_a_run_is_that_of_the_trainer(both: tuple[Any, Any]) -> None:
    """Two accumulated batches a step, a warm-up, a cosine, clipping: the same figures to
    rounding."""
    ours, theirs = both
    for name in ("loss", "learning_rate", "eval_loss", "grad_norm"):
        assert history(ours, name) == pytest.approx(history(theirs, name), rel=2e-4), name
    assert len(history(ours, "loss")) == 6
    assert len(history(ours, "eval_loss")) == 2
    found = ours.walker.state_dict()
    matched = 0
    for name, tensor in theirs.model.state_dict().items():
        for key in (
            key
            for key in found
            if key.endswith(name) and "exp_avg" not in key and found[key].shape == tensor.shape
        ):
            torch.testing.assert_close(found[key].float(), tensor, atol=2e-5, rtol=1e-3, msg=name)
            matched += 1
    assert matched >= 20


def test_what_was_trained_loads_in_transformers(both: tuple[Any, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours, _ = both
    ours.save_model(str(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        batch = default_data_collator(rows(8, 2))
        assert float(model(**batch).loss) == pytest.approx(history(ours, "eval_loss")[-1], rel=1e-5)


def test_a_resumed_run_ends_alike(both: tuple[Any, Any], tmp_path: Path) -> None:
    ours, _ = both
    half = trainer(BlockwalkTrainer, tmp_path)
    checkpoint = Path(ours.args.output_dir) / "checkpoint-3"
    half.train(resume_from_checkpoint=str(checkpoint))
    assert history(half, "loss") == history(ours, "loss"), (
        "the first three from the trainer's own state"
    )
    again = half.walker.state_dict()
    whole = ours.walker.state_dict()
    assert all(
        torch.equal(again[key], whole[key]) for key in whole if isinstance(whole[key], torch.Tensor)
    )


def test_callbacks_of_transformers_and_trl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate so high that the loss rises: early stopping ends the run and goes back to the best
    weights. An adapter is trained, in batches of which the last is cut."""
    from trl import RichProgressCallback

    calm = {
        "learning_rate": 1.0,
        "max_steps": 12,
        "eval_steps": 1,
        "save_steps": 1,
        "warmup_steps": 0,
        "max_grad_norm": 0.0,
    }
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "gradient_accumulation_steps": 2,
    }
    callbacks = [EarlyStoppingCallback(early_stopping_patience=2), RichProgressCallback()]
    data = {
        "train_dataset": rows(7, 1),
        "eval_dataset": rows(8, 2),
        "data_collator": default_data_collator,
    }
    args = arguments(tmp_path, **calm, **best)
    done = BlockwalkTrainer(
        tiny_model("llama"), args, lora={"rank": 2}, callbacks=callbacks, **data
    )
    done.train()
    losses = history(done, "eval_loss")
    assert done.state.global_step == len(losses) < 12
    done.remove_callback(RichProgressCallback)  # its bars end with the training
    assert done.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)
    done.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("plan", "settings", "words"),
    [
        ("mezo", {"max_grad_norm": 0.5}, "max_grad_norm 0.5"),
        ("plain", {"optim": "adafactor"}, "optim adafactor"),
        ("plain", {"torch_compile": True}, "torch_compile True"),
    ],
)
def test_arguments_that_the_walk_does_not_follow(
    plan: str, settings: Any, words: str, tmp_path: Path
) -> None:
    with refused(ValueError, words):
        BlockwalkTrainer(
            tiny_model("llama"), arguments(tmp_path, **settings), plan=blockwalk.method(plan)
        )


def test_adapters_are_trained_beside_the_models_own_weights(tmp_path: Path) -> None:
    """Oracle: the Trainer's evaluation of the model. Nothing is rounded that memory can hold."""
    data: dict[str, Any] = {"eval_dataset": rows(8, 2), "data_collator": default_data_collator}
    ours = BlockwalkTrainer(tiny_model("llama"), arguments(tmp_path), lora={"rank": 2}, **data)
    theirs = Trainer(tiny_model("llama"), arguments(tmp_path), **data)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)


def test_records_without_tokens_are_refused_by_their_columns(tmp_path: Path) -> None:
    """Oracle: the column's name; the message names what reads such records."""
    from datasets import Dataset

    chats = Dataset.from_list([{"messages": [{"role": "user", "content": "a"}]}] * 8)
    data: dict[str, Any] = {"train_dataset": chats, "data_collator": default_data_collator}
    done = BlockwalkTrainer(tiny_model("llama"), arguments(tmp_path, eval_strategy="no"), **data)
    with refused(ValueError, "training messages input_ids blockwalk.train"):
        done.train()


def test_forty_steps_are_those_of_the_trainer(tmp_path: Path) -> None:
    """Several epochs, accumulation, decay and clipping: the losses do not drift apart."""
    more = {"max_steps": 40, "weight_decay": 0.1, "eval_strategy": "no", "save_strategy": "no"}
    runs = [trainer(cls, tmp_path, **more) for cls in (BlockwalkTrainer, Trainer)]
    for run in runs:
        run.train()
    ours, theirs = (history(run, "loss") for run in runs)
    assert len(ours) == 40
    assert ours == pytest.approx(theirs, rel=2e-4)
    assert ours[-1] < ours[0] - 0.1, "forty steps learn something"
