"""Oracle: the naive zeroth-order loop on the whole model in memory, with batches cut by hand and
rates by the schedule's formula; and a run that was not interrupted."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainingArguments, default_data_collator

import blockwalk
from blockwalk.convert.replay import replay
from blockwalk.integrations import BlockwalkTrainer
from blockwalk.reference.zeroth_order import masters_of, spsa_step
from tests.models import tiny_model
from tests.support.messages import refused, says, warned
from tests.support.zeroth_order_runs import assert_same, trained

logging.getLogger("transformers").setLevel(logging.ERROR)

STEPS = 40
RATE = 1e-3


def rows() -> list[dict[str, list[int]]]:
    drawn = torch.randint(
        3, 101, (4 * STEPS, 10), generator=torch.Generator().manual_seed(1)
    ).tolist()
    return [{"input_ids": ids, "attention_mask": [1] * 10, "labels": ids} for ids in drawn]


def trainer(folder: Path, name: str, model: Any = None, **more: Any) -> BlockwalkTrainer:
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential",
        "learning_rate": RATE,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": STEPS // 2,
    }
    callbacks = more.pop("callbacks", None)
    return BlockwalkTrainer(
        tiny_model("llama") if model is None else model,
        TrainingArguments(str(folder), **{**settings, **more}),
        plan=blockwalk.method(name, loss="model"),
        train_dataset=rows(),
        data_collator=default_data_collator,
        callbacks=callbacks,
    )


@pytest.fixture(scope="module", params=["mezo", "zo2"])
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = trainer(tmp_path_factory.mktemp(request.param), request.param)
    run.train()
    return request.param, run


def test_forty_steps_are_those_of_the_reference(done: Any) -> None:
    _, run = done
    control = tiny_model("llama")
    masters = masters_of(control)
    losses = []
    data = rows()
    for step in range(STEPS):
        batch = default_data_collator(data[4 * step : 4 * step + 4])
        rate = RATE * (STEPS - step) / STEPS
        made = spsa_step(control, masters, batch, step=step + 1, seed=42, learning_rate=rate)
        losses.append(made.losses[0])
    logged = [line["loss"] for line in run.state.log_history if "loss" in line]
    assert logged == pytest.approx(losses, rel=2e-5)
    assert len(logged) == STEPS
    weights = trained(run.walker)
    assert weights.keys() == masters.keys()
    untrained = masters_of(tiny_model("llama"))
    for name, master in masters.items():
        error = float((weights[name] - master).norm())
        assert error < 1e-2 * float((master - untrained[name]).norm()), name


def lines_of(run: BlockwalkTrainer) -> list[str]:
    """The steps of a run's ledger, without the header, which has the run's own name."""
    return (Path(run.args.output_dir) / "ledger.jsonl").read_text().splitlines()[1:]


def test_a_resumed_run_ends_alike_and_so_does_its_ledger(done: Any, tmp_path: Path) -> None:
    name, run = done
    half = trainer(tmp_path, name)
    half.train(resume_from_checkpoint=f"{run.args.output_dir}/checkpoint-{STEPS // 2}")
    assert_same(trained(half.walker), trained(run.walker))
    assert len(lines_of(run)) == STEPS
    assert lines_of(half) == lines_of(run)


def test_the_ledger_is_replayed_to_the_run_s_weights(done: Any, tmp_path: Path) -> None:
    _, run = done
    tiny_model("llama").save_pretrained(tmp_path / "base")
    ledger = Path(run.args.output_dir) / "ledger.jsonl"
    assert replay(tmp_path / "base", ledger, tmp_path / "out", device="cpu") == STEPS
    replayed = load_file(tmp_path / "out" / "model.safetensors")
    weights = trained(run.walker)
    assert weights.keys() == replayed.keys()
    for name, value in replayed.items():
        assert torch.equal(value, weights[name]), name


def test_a_loaded_checkpoint_brings_the_ledger_of_its_steps(done: Any) -> None:
    _, run = done
    run._load_state(Path(run.args.output_dir) / f"checkpoint-{STEPS // 2}")
    assert run.walker.steps_done == STEPS // 2
    assert len(lines_of(run)) == STEPS // 2


def test_a_rate_that_a_callback_sets_is_the_reference_s_and_decay_is_refused(
    tmp_path: Path,
) -> None:
    class Rate(TrainerCallback):
        def on_step_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            optimizer.param_groups[0]["lr"] = 0.25 * RATE

    class Decay(TrainerCallback):
        def on_step_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            optimizer.param_groups[0]["weight_decay"] = 0.5

    model = tiny_model("llama")
    control = copy.deepcopy(model)
    masters = masters_of(control)
    run = trainer(tmp_path / "rate", "mezo", model, callbacks=[Rate()], max_steps=2)
    run.train()
    for step in range(2):
        batch = default_data_collator(rows()[4 * step : 4 * step + 4])
        made = spsa_step(control, masters, batch, step=step + 1, seed=42, learning_rate=0.25 * RATE)
    logged = [line["loss"] for line in run.state.log_history if "loss" in line]
    assert logged[-1] == pytest.approx(made.losses[0], rel=2e-5)
    assert run.last_result.learning_rate == 0.25 * RATE
    with refused(ValueError, "Decay.on_step_begin weight_decay 0.5 lr"):
        trainer(tmp_path / "decay", "mezo", callbacks=[Decay()]).train()


def test_defaults_that_zeroth_order_does_not_have_are_notes(tmp_path: Path) -> None:
    with warned(UserWarning, "max_grad_norm 1.0") as notes:
        run = trainer(tmp_path, "mezo", max_grad_norm=1.0)
    says(" ".join(str(note.message) for note in notes), "optim sgd")
    assert run.walker.plan.optimizer.name == "sgd"
    with refused(ValueError, "max_grad_norm 0.3"):
        trainer(tmp_path, "mezo", max_grad_norm=0.3)


def test_weights_that_a_ledger_saves_are_refused_before_the_model_is_opened(tmp_path: Path) -> None:
    plan = blockwalk.method("zo2", trainable="disk")
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], save_strategy="epoch")
    with refused(ValueError, "trainable disk save_strategy epoch"):
        BlockwalkTrainer("/nowhere", args, plan=plan)
