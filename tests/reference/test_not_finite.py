"""Oracle: the tensors before a step whose loss or gradients are not finite, bit for bit, and a run
that never met that step."""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.checkpoints import run_checkpoint
from blockwalk.cli import main
from blockwalk.data.tokenizer import load_tokenizer
from blockwalk.engine.master_updates import MasterUpdates
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.train import loop
from blockwalk.train.metrics_log import MetricsLog
from blockwalk.walk import walker as training_walker
from blockwalk.walk.walker import Walker
from tests.conftest import TinyRun
from tests.models import random_batch, tiny_model
from tests.support.kills import before, child, kill
from tests.support.messages import refused, says
from tests.support.processes import run_ranks

PLANS: dict[str, dict[str, Any]] = {
    "plain": {"name": "plain"},
    "clipped": {"name": "plain", "optimizer.max_grad_norm": 0.5},
    "accumulated": {"name": "plain", "gradient_accumulation_steps": 2},
    "at the block's turn, on disk": {"name": "mebp", "frozen": "disk × raw"},
    "at the block's turn, on the device": {"name": "plain", "update.timing": "block"},
}


def poison(walker: Walker, layer: int | None) -> Callable[[], None]:
    """Make the final norm's output NaN, or (with a finite loss) the gradient that leaves a layer;
    the answer ends it."""

    def loss(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan

    def gradient(_: Any, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: grad * torch.inf)

    module = walker.engine.module
    model: Any = module.get_submodule(
        "base_model.model.model" if hasattr(module, "peft_config") else "model"
    )
    place, hook = (model.norm, loss) if layer is None else (model.layers[layer].mlp, gradient)
    removed: Callable[[], None] = place.register_forward_hook(hook).remove
    return removed


def nothing_changes(walker: Walker, layer: int | None) -> None:
    """A poisoned step changes nothing and is named."""
    before = walker.state_dict()
    step = walker.steps_done + 1
    end = poison(walker, layer)
    what = "loss" if layer is None else "gradient"
    with refused(FloatingPointError, f"{what} finite {step}"):
        walker.step(random_batch(seed=99))
    end()
    after = walker.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before if k != "steps_done")
    assert after["steps_done"] == step - 1


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_step_that_is_not_finite_changes_nothing(
    plan: dict[str, Any], lora: LoraSettings | None, tmp_path: Path
) -> None:
    model = tiny_model("llama", tied=True)
    ends = []
    for bad in (False, True):
        with Walker(
            copy.deepcopy(model),
            method(**plan),
            lora=lora,
            workdir=tmp_path / str(bad),
            device="cpu",
        ) as walker:
            walker.step(random_batch(seed=0))
            for layer in (None, 0, 1) if bad else ():
                nothing_changes(walker, layer)
            walker.step(random_batch(seed=1))
            ends.append(walker.state_dict())
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0] if k != "steps_done")


def _on_rank(rank: int, settings: dict[str, Any], bad: bool) -> tuple[dict[str, Any], list[float]]:
    """State and losses of a run that one poisoned rank of two makes all refuse a step of."""
    torch.set_num_threads(1)
    plan = method("fcdp", mesh={"world": 2, "ranks_per_node": 1}, **settings)
    losses = []
    with Walker(tiny_model("llama", tied=True), plan, device="cpu") as walker:
        losses.append(walker.step(random_batch(seed=0)).loss)
        for layer in (None, 1) if bad else ():
            before = walker.state_dict()
            end = poison(walker, layer) if rank == 1 else lambda: None
            with refused(FloatingPointError, "finite 2"):
                walker.step(random_batch(seed=99))
            end()
            after = walker.state_dict()
            assert all(torch.equal(before[k], after[k]) for k in before if k != "steps_done")
        losses += [
            walker.step(random_batch(seed=1)).loss,
            walker.evaluate(random_batch(seed=2)).loss,
        ]
        return walker.state_dict(), losses


@pytest.mark.parametrize(
    "settings",
    [{}, {"optimizer.max_grad_norm": 0.5}, {"update.timing": "block"}],
    ids=["", "clipped", "block"],
)
def test_ranks_refuse_a_step_together(settings: dict[str, Any]) -> None:
    clean, met = (run_ranks(2, _on_rank, settings, bad) for bad in (False, True))
    for (state, losses), (other, other_losses) in zip(clean, met, strict=True):
        assert losses == other_losses
        assert all(torch.equal(state[k], other[k]) for k in state if k != "steps_done")


def test_weights_that_an_update_made_infinite_are_not_saved(tmp_path: Path) -> None:
    """Oracle: the folder of saved weights, which must not be there."""
    plan = method("plain", optimizer={"name": "sgd", "learning_rate": 1e18})
    with Walker(tiny_model("llama"), plan, device="cpu") as walker:
        updates = walker.estimator.checkpointed
        assert isinstance(updates, MasterUpdates)
        while all(tensor.isfinite().all() for tensor in walker.engine.trained.masters.values()):
            walker.engine.gradients.sums.update(
                {name: torch.ones_like(t) for name, t in walker.engine.trained.masters.items()}
            )
            for unit in range(len(walker.spec.units)):
                updates.apply(unit, step=1, learning_rate=3e38)
        for save in (walker.save_pretrained, walker.save_state):
            with refused(FloatingPointError, "saved"):
                save(tmp_path / "saved")
        with refused(FloatingPointError, "saved"):
            walker.state_dict()
    assert not (tmp_path / "saved").exists()


def test_the_state_is_a_copy() -> None:
    """Oracle: the run that the state was taken from, which took the step that the state is loaded
    for again."""
    with Walker(
        tiny_model("llama"), method("plain", optimizer={"learning_rate": 1e-2}), device="cpu"
    ) as walker:
        walker.step(random_batch(seed=0))
        state = walker.state_dict()
        walker.step(random_batch(seed=1))
        expected = {name: tensor.clone() for name, tensor in walker.engine.state_dict().items()}
        walker.load_state_dict(state)
        walker.step(random_batch(seed=1))
        assert all(torch.equal(expected[k], v) for k, v in walker.engine.state_dict().items())


@pytest.fixture
def careless(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """Records of which two batches in a row make the embedding NaN, and those records without
    these."""
    make = training_walker.Walker
    token = load_tokenizer(tiny_run.model)("Z")["input_ids"][-1]

    def made(*arguments: Any, **options: Any) -> Walker:
        walker = make(*arguments, **options)

        def forward(_: Any, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            return output * torch.nan if bool((given[0] == token).any()) else output

        (embedding,) = [
            m for m in walker.engine.module.modules() if isinstance(m, torch.nn.Embedding)
        ]
        embedding.register_forward_hook(forward)
        return walker

    monkeypatch.setattr(loop, "Walker", made)
    lines = tiny_run.train.read_text().splitlines(keepends=True)
    bad = tmp_path / "bad.jsonl"
    good = tmp_path / "good.jsonl"
    good.write_text("".join(lines))
    bad.write_text(
        "".join(
            [
                *lines[:8],
                *(json.dumps({"text": "ZZZ.", "label": "bad"}) + "\n" for _ in range(8)),
                *lines[8:],
            ]
        )
    )
    return bad, good


@pytest.mark.parametrize("name", ["plain", "mezo"])
def test_batches_that_are_not_finite_are_left_out(
    name: str,
    careless: tuple[Path, Path],
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the run on records that lack those two batches; also where the run is killed after
    the step that follows."""
    rate = "1e-3" if name == "plain" else "1e-5"

    def train(folder: str, data: Path, allowed: int) -> int:
        flags = (
            f"--method {name} --optimizer.learning_rate {rate} --optimizer.schedule constant"
            " --data.shuffle false"
        )
        flags += (
            f" --max_steps 5 --save_every 2 --skip_nonfinite {allowed} --resume_from_checkpoint"
            " latest"
        )
        settings = [
            *tiny_run.arguments(tmp_path / folder),
            *flags.split(),
            "--data.train",
            str(data),
        ]
        return main.main(["train", *settings])

    def weights(folder: str) -> bytes:
        return (tmp_path / folder / "model" / "model.safetensors").read_bytes()

    bad, good = careless
    assert train("clean", good, 0) == 0
    assert train("skipped", bad, 2) == 0
    says(capsys.readouterr().out, "2 skip_nonfinite")
    assert weights("skipped") == weights("clean")
    assert train("refused", bad, 1) == 1
    (*_, newest) = run_checkpoint.whole(tmp_path / "refused")
    assert run_checkpoint.step_of(newest) == 2

    def work() -> int:
        before(MetricsLog, "write", kill, lambda _, line: line["step"] == 3 and "loss" in line)
        return train("killed", bad, 2)

    assert child(work) == -signal.SIGKILL
    assert train("killed", bad, 2) == 0
    assert weights("killed") == weights("clean")
    lines = [
        json.loads(line)
        for line in (tmp_path / "killed" / "skipped.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [3, 3]


def test_a_run_that_diverges_ends_with_its_checkpoints(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: a JSON reader that knows no NaN, and the values of the checkpoint that is left."""
    rate = ["--optimizer.learning_rate", "1e12", "--max_steps", "9", "--save_every", "1"]
    code = main.main(["train", *tiny_run.arguments(tmp_path / "out"), "--method", "plain", *rate])
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert code == 1
    assert "is not finite at step" in line
    assert "optimizer.learning_rate" in line
    (*_, last) = run_checkpoint.whole(tmp_path / "out")
    assert all(
        value.isfinite().all()
        for value in run_checkpoint.load(last).walker.values()
        if isinstance(value, torch.Tensor)
    )

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    for name in ("metrics.jsonl", "evaluations.jsonl"):
        for text in (tmp_path / "out" / name).read_text().splitlines():
            json.loads(text, parse_constant=refuse)
