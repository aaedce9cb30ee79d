"""Oracle: ``transformers.Trainer`` with the same callback on the same model in memory: its losses;
and the attributes that the installed torch and transformers have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from blockwalk.integrations import BlockwalkTrainer, trainer_callbacks
from tests.models import tiny_model
from tests.support.messages import refused

logging.getLogger("transformers").setLevel(logging.ERROR)


def rows(count: int) -> list[dict[str, list[int]]]:
    drawn = torch.randint(3, 101, (count, 12), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": ids, "attention_mask": [1] * 12, "labels": ids} for ids in drawn]


def trainer(cls: Any, folder: Path, callback: TrainerCallback | None, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "optim": "adamw_torch",
        "save_strategy": "no",
    }
    return cls(
        tiny_model("llama"),
        args=TrainingArguments(str(folder), **{**settings, **more}),
        train_dataset=rows(16),
        data_collator=default_data_collator,
        callbacks=None if callback is None else [callback],
    )


def losses(cls: Any, folder: Path, callback: TrainerCallback | None) -> list[float]:
    run = trainer(cls, folder, callback)
    run.train()
    return [line["loss"] for line in run.state.log_history if "loss" in line]


def at(event: str, act: Callable[..., Any]) -> TrainerCallback:
    """Return a callback that acts at one event: on its groups, where ``act`` takes one thing."""

    class Acts(TrainerCallback):
        pass

    def called(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        act(args=args, state=state, **more)

    setattr(Acts, event, called)
    return Acts()


def sets(name: str, value: Any, *numbers: int) -> Callable[..., None]:
    """Return an act that gives a field of some parameter groups a value."""

    def act(optimizer: Any, **_: Any) -> None:
        for number in numbers:
            optimizer.param_groups[number][name] = value

    return act


FOLLOWED = {
    "a rate": sets("lr", 1e-4, 0, 1),
    "a rate of the parameters that decay": sets("lr", 1e-4, 0),
    "decay of all": sets("weight_decay", 5.0, 0, 1),
    "decay of the parameters that decay": sets("weight_decay", 5.0, 0),
    "betas": sets("betas", (0.5, 0.6), 0, 1),
    "eps": sets("eps", 1e-2, 0, 1),
}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(BlockwalkTrainer, tmp_path_factory.mktemp("untouched"), None)


@pytest.mark.parametrize("act", FOLLOWED.values(), ids=FOLLOWED)
def test_numbers_that_callbacks_change_are_followed(
    act: Callable[..., Any], untouched: list[float], tmp_path: Path
) -> None:
    event = "on_step_begin"
    ours = losses(BlockwalkTrainer, tmp_path / "ours", at(event, act))
    theirs = losses(Trainer, tmp_path / "theirs", at(event, act))
    assert ours == pytest.approx(theirs, abs=5e-6)
    assert max(abs(a - b) for a, b in zip(ours, untouched, strict=True)) > 1e-4


def test_a_resumed_run_goes_on_with_what_callbacks_set(tmp_path: Path) -> None:
    """Oracle: a run that was not interrupted. The callback acts before the checkpoint alone; and
    with a checkpoint as versions with one parameter group wrote it."""

    def decays(optimizer: Any, state: Any, **_: Any) -> None:
        if state.global_step == 0:
            optimizer.param_groups[0]["weight_decay"] = 5.0

    more = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}
    whole = trainer(BlockwalkTrainer, tmp_path / "whole", at("on_step_begin", decays), **more)
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    half = trainer(BlockwalkTrainer, tmp_path / "half", None, **more)
    half.train(resume_from_checkpoint=str(checkpoint))
    assert half.state.log_history[:4] == whole.state.log_history[:4]

    plain = trainer(BlockwalkTrainer, tmp_path / "plain", None, **more)
    plain.train()
    checkpoint = tmp_path / "plain" / "checkpoint-2"
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    rate = optimizer["param_groups"][0]["lr"]
    older = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=rate).state_dict()
    torch.save(older, checkpoint / "optimizer.pt")
    schedule = torch.load(checkpoint / "scheduler.pt", weights_only=True)
    for name in ("base_lrs", "_last_lr", "lr_lambdas"):
        schedule[name] = schedule[name][:1]
    torch.save(schedule, checkpoint / "scheduler.pt")
    again = trainer(BlockwalkTrainer, tmp_path / "again", None, **more)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.state.log_history[:4] == plain.state.log_history[:4]


def freezes(model: Any, **_: Any) -> None:
    for _, parameter in model.named_parameters():
        parameter.requires_grad_(False)


def halves_gradients(optimizer: Any, **_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(0.5)


def adds_a_group(optimizer: Any, **_: Any) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


def lowers_clipping(args: Any, **_: Any) -> None:
    args.max_grad_norm = 0.1


REFUSED: dict[str, tuple[str, Callable[..., Any], str]] = {
    "parameters": ("on_step_begin", freezes, "on_step_begin model.named_parameters"),
    "gradients": ("on_pre_optimizer_step", halves_gradients, "on_pre_optimizer_step params"),
    "a group": ("on_train_begin", adds_a_group, "optimizer.add_param_group"),
    "states": ("on_step_end", lambda optimizer, **_: optimizer.state.clear(), "optimizer.state"),
    "another field": ("on_step_begin", sets("amsgrad", True, 0), "amsgrad True lr weight_decay"),
    "late": ("on_pre_optimizer_step", sets("lr", 1.0, 0, 1), "lr 1.0 on_step_begin"),
    "clipping": ("on_step_end", lowers_clipping, "max_grad_norm 0.1"),
    "generation": ("on_step_end", lambda model, **_: model.generate(), "model.generate"),
    "a call": ("on_step_end", lambda model, **_: model(), "model trainer.walker"),
    "an attribute": (
        "on_step_end",
        lambda model, **_: setattr(model, "config", None),
        "model.config",
    ),
}


@pytest.mark.parametrize(("event", "act", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_walk_cannot_follow_names_the_callback(
    event: str, act: Callable[..., Any], words: str, tmp_path: Path
) -> None:
    run = trainer(BlockwalkTrainer, tmp_path, at(event, act), max_steps=1)
    with refused(ValueError, f"Acts.{event} {words}"):
        run.train()


def test_what_reaches_around_the_views_is_refused(tmp_path: Path) -> None:
    """A callback that has the trainer itself."""
    run = trainer(BlockwalkTrainer, tmp_path, None, max_steps=1)

    def freezes_the_handle(**_: Any) -> None:
        next(iter(run.model.parameters())).requires_grad_(False)

    run.add_callback(at("on_step_end", freezes_the_handle))
    with refused(ValueError, "Acts.on_step_end group 0"):
        run.train()


def test_the_end_of_micro_batches_never_comes(tmp_path: Path) -> None:
    callback = at("on_substep_end", lambda **_: None)
    with refused(ValueError, "on_substep_end gradient_accumulation_steps 2"):
        trainer(BlockwalkTrainer, tmp_path, callback, gradient_accumulation_steps=2)


def test_a_name_outside_the_lists_is_refused(tmp_path: Path) -> None:
    """Every public attribute of the model and of torch's optimizer is in a list, or refused."""
    run = trainer(BlockwalkTrainer, tmp_path, None)
    run.create_optimizer()
    model = trainer_callbacks.ModelView(run, "Acts")
    optimizer = trainer_callbacks.OptimizerView(run, "Acts")
    read = {"param_groups", "num_parameters"}
    lists = (
        (model, run.walker.engine.module, trainer_callbacks.MODEL_NAMES),
        (optimizer, run.optimizer, trainer_callbacks.OPTIMIZER_NAMES),
    )
    for view, thing, names in lists:
        public = {name for name in dir(thing) if not name.startswith("_")} - read
        outside = {name for name in public if name not in names}
        assert len(outside) > 10
        for name in outside:
            with refused(ValueError, f"Acts {name}"):
                getattr(view, name)
        for name in names & public:
            getattr(view, name)
    assert not hasattr(model, "no_model_has_this")
    assert model.num_parameters() == sum(p.numel() for p in tiny_model("llama").parameters())
