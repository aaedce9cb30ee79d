"""Oracle: the same Trainer on one process, for losses, evaluations, metrics and weights; on ranks
that torchrun starts, a run that was not interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from blockwalk.integrations import BlockwalkTrainer
from tests.conftest import TinyRun
from tests.models import tiny_model
from tests.support.messages import refused
from tests.support.trainer_on_ranks import padded, rows, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_run: TinyRun) -> Path:
    """The runs of two ranks, one after the other in the same processes."""
    folder = tmp_path_factory.mktemp("ranks")
    runs = [
        f"{folder}/distzo2,distzo2,2",
        f"{folder}/resumed,distzo2,2,{folder}/distzo2/checkpoint-2",
        f"{folder}/zero3,zero3,2",
        f"{folder}/words,distzo2,2,,{tiny_run.model.parent}",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "tests.support.trainer_on_ranks", *runs]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def left(folder: Path) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """What a run left: its figures by name, and its weights."""
    lines: list[dict[str, Any]] = json.loads((folder / "log.json").read_text())
    names = ("loss", "learning_rate", "eval_loss", "eval_accuracy", "eval_norm")
    figures = {name: [line[name] for line in lines if name in line] for name in names}
    return figures, load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize(("name", "on_one"), [("distzo2", "zo2"), ("zero3", "plain")])
def test_two_ranks_are_one_process(name: str, on_one: str, folder: Path, tmp_path: Path) -> None:
    run(tmp_path, on_one, 4)
    expected, weights = left(tmp_path)
    figures, of_ranks = left(folder / name)
    assert all(len(values) in (1, 4) for values in figures.values())
    eval_loss = expected.pop("eval_loss"), figures.pop("eval_loss")
    for figure, values in expected.items():
        assert figures[figure] == pytest.approx(values, rel=2e-5), figure
    # A Trainer averages the means of batches, which are smaller on two ranks.
    assert eval_loss[1] == pytest.approx(eval_loss[0], rel=5e-3)
    for key, value in weights.items():
        torch.testing.assert_close(of_ranks[key], value, atol=1e-5, rtol=1e-4)


def test_the_held_out_loss_is_the_mean_over_the_batches_of_both_ranks(folder: Path) -> None:
    """Oracle: transformers' model, with batches of two rows cut by hand."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "zero3" / "model").eval()
    data = rows(8)
    with torch.no_grad():
        losses = [float(model(**padded(data[n : n + 2])).loss) for n in range(0, 8, 2)]
    (eval_loss,) = left(folder / "zero3")[0]["eval_loss"]
    assert eval_loss == pytest.approx(sum(losses) / 4, rel=1e-5)


def test_a_resumed_run_on_ranks_ends_in_the_same_bits(folder: Path) -> None:
    _, expected = left(folder / "distzo2")
    _, again = left(folder / "resumed")
    assert all(torch.equal(again[key], expected[key]) for key in expected)


def test_label_words_on_ranks_are_those_of_one_process(
    folder: Path, tiny_run: TinyRun, tmp_path: Path
) -> None:
    run(tmp_path, "zo2", 4, tiny=str(tiny_run.model.parent))
    expected, weights = left(tmp_path)
    figures, of_ranks = left(folder / "words")
    assert len(figures["loss"]) == 4
    for figure, values in expected.items():
        assert figures[figure] == pytest.approx(values, rel=1e-6), figure
    assert all(torch.equal(of_ranks[name], value) for name, value in weights.items())


def test_a_plan_of_other_ranks_than_were_started_is_refused(tmp_path: Path) -> None:
    import blockwalk

    plan = blockwalk.method("distzo2", mesh={"world": 2})
    with refused(ValueError, "mesh.world 2 1"):
        BlockwalkTrainer(tiny_model("llama"), plan=plan)
