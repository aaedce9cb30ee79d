"""Oracle: ``transformers.Trainer`` with the same arguments, collator and data: its losses, learning
rates, evaluations and checkpoints; and the fields and methods that the installed transformers
has."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import blockwalk
from blockwalk.integrations import BlockwalkTrainer, trainer_table
from tests.models import tiny_model
from tests.support.messages import refused, says, warned

logging.getLogger("transformers").setLevel(logging.ERROR)


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = (5, 9, 12, 7)
    drawn = [
        torch.randint(3, 101, (lengths[n % 4],), generator=generator).tolist() for n in range(count)
    ]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def padded(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(each["input_ids"]) for each in examples)

    def laid(name: str, filling: int) -> torch.Tensor:
        return torch.tensor(
            [[*each[name], *[filling] * (longest - len(each[name]))] for each in examples]
        )

    ids = laid("input_ids", 0)
    labels = laid("labels", -100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


SETTINGS: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "optim": "adamw_torch",
    "save_strategy": "no",
}


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), **{**SETTINGS, **more})


def run(cls: Any, folder: Path, *, collator: Any = padded, plan: Any = None, **more: Any) -> Any:
    data = {"train_dataset": rows(14, 1), "eval_dataset": rows(6, 2), "data_collator": collator}
    given = {} if plan is None else {"plan": plan}
    trainer = cls(tiny_model("llama"), args=arguments(folder, **more), **data, **given)
    trainer.train()
    return trainer


def history(trainer: Any, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


def alike(ours: Any, theirs: Any) -> None:
    for name in ("loss", "learning_rate", "eval_loss", "step"):
        assert history(ours, name) == pytest.approx(history(theirs, name), rel=3e-4, abs=1e-6), name


FOLLOWED: dict[str, dict[str, Any]] = {
    "schedule and optimizer": {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-4},
        "warmup_steps": 1,
        "weight_decay": 1.0,
        "adam_beta1": 0.8,
        "adam_beta2": 0.9,
        "adam_epsilon": 1e-5,
        "max_grad_norm": 0.3,
        "seed": 7,
    },
    "epochs, accumulation and evaluation": {
        "max_steps": -1,
        "num_train_epochs": 1.5,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "eval_strategy": "epoch",
        "eval_on_start": True,
        "data_seed": 3,
        "logging_first_step": True,
    },
    "data": {
        "train_sampling_strategy": "sequential",
        "dataloader_drop_last": True,
        "num_train_epochs": 1,
        "max_steps": -1,
        "remove_unused_columns": False,
        "full_determinism": False,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_delay": 1,
        "prediction_loss_only": True,
    },
}


@pytest.mark.parametrize("more", FOLLOWED.values(), ids=FOLLOWED)
def test_what_is_followed_is_as_in_a_trainer(more: dict[str, Any], tmp_path: Path) -> None:
    alike(
        run(BlockwalkTrainer, tmp_path / "ours", **more), run(Trainer, tmp_path / "theirs", **more)
    )


@pytest.mark.parametrize("parts", [1, 2])
def test_documents_of_a_flattened_row_do_not_see_one_another(parts: int, tmp_path: Path) -> None:
    more = {
        "per_device_train_batch_size": 4 // parts,
        "gradient_accumulation_steps": parts,
        "eval_strategy": "steps",
    }
    more["eval_steps"] = 3
    ours = run(BlockwalkTrainer, tmp_path / "ours", collator=DataCollatorWithFlattening(), **more)
    alike(ours, run(Trainer, tmp_path / "theirs", **more))


NEVER_CALLED = frozenset(
    [
        "compute_loss",
        "compute_loss_context_manager",
        "autocast_smart_context_manager",
        "create_optimizer",
        "create_optimizer_and_scheduler",
        "get_optimizer_cls_and_kwargs",
        "get_decay_parameter_names",
        "get_optimizer_group",
        "get_learning_rates",
        "get_num_trainable_parameters",
        "_get_num_items_in_batch",
        "_prepare_input",
        "_prepare_inputs",
        "_prepare_context_parallel_inputs",
        "get_sp_size",
        "get_cp_size",
        "get_tp_size",
        "_defer_fsdp_gradient_reduction",
        "_sync_replicated_trainable_parameters",
        "_wrap_model",
        "_update_auto_batch_size",
        "_mixed_mesh_grad_norm",
        "_has_mixed_mesh_grads",
        "_clip_grad_norm",
        "_get_grad_norm",
        "_save_scaler",
        "_load_scaler",
        "hyperparameter_search",
        "call_model_init",
        "_hp_search_setup",
        "_report_to_hp_search",
        "_tune_save_checkpoint",
        "_move_model_to_device",
    ]
)
"""Methods that a walk never calls: overriding one would change nothing."""


def test_the_table_has_every_field_and_method() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    table = [trainer_table.FOLLOWED, set(trainer_table.MEANINGLESS), set(trainer_table.REFUSED)]
    assert sum(map(len, table)) == len(set().union(*table)), "no field twice"
    assert fields <= set().union(*table)
    methods = {name for name, value in vars(Trainer).items() if inspect.isfunction(value)}
    assert not trainer_table.METHODS_FOLLOWED & NEVER_CALLED
    assert methods <= trainer_table.METHODS_FOLLOWED | NEVER_CALLED


@pytest.mark.parametrize(
    "more",
    [
        {"label_smoothing_factor": 0.2},
        {"optim_args": "a=1"},
        {"torch_compile": True},
        {"auto_find_batch_size": True},
        {"label_names": ["targets"]},
        {"debug": "underflow_overflow"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_is_refused_is_named_before_the_model_is_opened(
    more: dict[str, Any], tmp_path: Path
) -> None:
    with refused(ValueError, next(iter(more))):
        BlockwalkTrainer("/nowhere", arguments(tmp_path, **more))


def test_a_field_that_the_table_does_not_know_is_refused(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Newer(TrainingArguments):
        twice_as_good: bool = False

    newer = Newer(str(tmp_path), use_cpu=True, report_to=[])
    (note,) = trainer_table.read_arguments(newer)
    says(note, "Newer twice_as_good")
    newer.twice_as_good = True
    with refused(ValueError, "twice_as_good True"):
        BlockwalkTrainer("/nowhere", newer)


def test_what_means_nothing_has_a_note(tmp_path: Path) -> None:
    with warned(UserWarning, "gradient_checkpointing"):
        ours = run(BlockwalkTrainer, tmp_path / "ours", gradient_checkpointing=True)
    alike(ours, run(Trainer, tmp_path / "theirs"))


@pytest.mark.parametrize("name", ["SFTConfig", "DPOConfig"])
def test_a_subclass_whose_defaults_mean_nothing_trains(name: str, tmp_path: Path) -> None:
    """Oracle: the Trainer with the same rate. TRL's classes switch recomputation on by default."""
    trl = pytest.importorskip("trl")
    args = getattr(trl, name)(str(tmp_path / "ours"), use_cpu=True)
    assert args.gradient_checkpointing
    more = {"learning_rate": 1e-3, "bf16": False}
    args = getattr(trl, name)(str(tmp_path / "ours"), **{**SETTINGS, **more})
    data = {"train_dataset": rows(14, 1), "eval_dataset": rows(6, 2), "data_collator": padded}
    with warned(UserWarning, f"{name} fields"):
        ours = BlockwalkTrainer(tiny_model("llama"), args=args, **data)
    ours.train()
    assert args.gradient_checkpointing, "the user's own arguments stay as they are"
    alike(ours, run(Trainer, tmp_path / "theirs", **more))


def test_a_default_of_a_subclass_that_the_walk_does_not_follow_is_refused(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Smoothed(TrainingArguments):
        label_smoothing_factor: float = 0.1

    with refused(ValueError, "label_smoothing_factor 0.1"):
        BlockwalkTrainer("/nowhere", Smoothed(str(tmp_path), use_cpu=True, report_to=[]))


def test_no_library_speaks_of_what_no_walk_uses(tmp_path: Path) -> None:
    """Oracle: the warnings of torch's loader with the Trainer's defaults, and the level of a log
    that bitsandbytes writes to at its import; in a process that has imported nothing else."""
    script = (
        "import logging, blockwalk.integrations as _; "
        "print(logging.getLogger('bitsandbytes.backends.cpu.ops').level)"
    )
    printed = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert int(printed.stdout) == logging.ERROR
    more = {"max_steps": 1, "use_cpu": torch.accelerator.is_available()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(BlockwalkTrainer, tmp_path, **more)
    assert not [str(line.message) for line in caught if "pin_memory" in str(line.message)]


def test_an_overridden_loss_is_refused() -> None:
    class Own(BlockwalkTrainer):
        def compute_loss(self, *args: Any, **more: Any) -> Any:
            return 0

    with refused(ValueError, "Own compute_loss"):
        Own("/nowhere")


@pytest.mark.parametrize("name", ["optimizer_cls_and_kwargs", "compute_loss_func", "model_init"])
def test_what_needs_the_model_is_refused(name: str, tmp_path: Path) -> None:
    with refused(ValueError, name):
        BlockwalkTrainer("/nowhere", arguments(tmp_path), **{name: (torch.optim.SGD, {})})


def test_an_unknown_column_is_refused(tmp_path: Path) -> None:
    def collator(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {**padded(examples), "token_type_ids": torch.zeros(len(examples), 12)}

    with refused(ValueError, "token_type_ids BlockwalkTrainer"):
        run(BlockwalkTrainer, tmp_path, collator=collator)


def test_best_weights_without_the_rest_and_a_second_run_in_the_folder(tmp_path: Path) -> None:
    """A rate so high that the loss rises: the best weights are the first ones."""
    more = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "learning_rate": 0.5,
    }
    best = {"load_best_model_at_end": True, "save_only_model": True}
    for _ in range(2):
        ours = run(BlockwalkTrainer, tmp_path, **more, **best)
        assert ours.evaluate()["eval_loss"] == pytest.approx(
            min(history(ours, "eval_loss")), rel=1e-6
        )


def test_the_default_of_clipping_does_not_refuse_a_plan(tmp_path: Path) -> None:
    plan = blockwalk.method("plain", update={"timing": "block"})
    with warned(UserWarning, "clipped"):
        ours = run(BlockwalkTrainer, tmp_path / "ours", plan=plan)
    alike(ours, run(Trainer, tmp_path / "theirs", max_grad_norm=0.0))
    with refused(ValueError, "max_grad_norm"):
        BlockwalkTrainer("/nowhere", arguments(tmp_path, max_grad_norm=0.7), plan=plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        BlockwalkTrainer(tiny_model("llama"), arguments(tmp_path, max_grad_norm=0.0), plan=plan)
