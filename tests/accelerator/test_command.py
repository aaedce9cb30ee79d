"""Oracle: the same command on a CPU, whose losses a run on the device has bit for bit; and the
plans that other devices get."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from blockwalk.cli import main
from blockwalk.plan.methods import method
from blockwalk.simulate import hardware
from blockwalk.walk.walker import Walker
from tests.conftest import TinyRun
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.run_folders import losses
from tests.support.simulated_device import Simulated

ROWS = {
    "mebp": ["--lora.rank", "4"],
    "mebp from the host": [
        "--lora.rank",
        "4",
        "--method",
        "mebp",
        "--frozen",
        "host × int8",
        "--activation",
        "host",
    ],
    "mebp from the disk": [
        "--lora.rank",
        "4",
        "--frozen",
        "disk × int4a",
        "--activation",
        "disk",
        "--resident",
        "0",
    ],
    "plain": ["--method", "plain"],
    "zo2": ["--method", "zo2", "--optimizer.name", "sgd"],
}


@pytest.mark.parametrize("row", ROWS)
def test_the_command_trains_as_on_a_cpu(
    row: str, sim: Simulated, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BLOCKWALK_DEVICE", raising=False)
    settings = [*ROWS[row], "--max_steps", "2"]
    assert main.main(["train", *tiny_run.arguments(tmp_path / "run"), *settings]) == 0
    assert (
        main.main(["train", *tiny_run.arguments(tmp_path / "cpu"), *settings, "--device", "cpu"])
        == 0
    )
    assert losses(tmp_path / "run") == losses(tmp_path / "cpu")
    assert len(losses(tmp_path / "run")) == 2


def test_a_first_plan_a_forecast_and_advice_are_had_on_any_accelerator(
    sim: Simulated, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a user of a new device asks for in the first minute."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BLOCKWALK_DEVICE", raising=False)
    model = str(tiny_run.model)
    train = str(tiny_run.train)
    assert main.main(["init", model, "--train", train, "--out", "run.yaml"]) == 0
    arguments = tiny_run.arguments(tmp_path / "run")
    assert main.main(["train", *arguments, "--dry-run"]) == 0
    assert main.main(["train", *arguments, "--budget", "50kB"]) == main.TOO_LARGE
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    sim_, xpu, cuda = (
        replace(hardware.of_this_machine(name), disk_bytes=0) for name in ("sim", "xpu", "cuda")
    )
    assert sim_ == xpu == cuda


def test_a_token_without_a_row_never_reaches_the_device(sim: Simulated, tmp_path: Path) -> None:
    """Oracle: the number of rows that the model was made with, and the steps of a walker that saw
    no such token."""
    tiny_model("opt", dropout=0.0).save_pretrained(tmp_path / "model")
    after = []
    for wrong in (None, 0, 1):
        with Walker(tmp_path / "model", method("mezo"), workdir=tmp_path, device="sim") as walker:
            rows = walker.spec.vocab_size
            walker.step(random_batch(seed=1))
            batch = random_batch(seed=2)
            ids_BS = batch["input_ids"].clone()
            if wrong is not None:
                ids_BS[1, 3] = (rows, -1)[wrong]
                queued = sim.counts().ops
                for work in (walker.step, walker.evaluate, walker.next_logits):
                    with refused(ValueError, f"token {int(ids_BS[1, 3])} {rows} rows"):
                        work({**batch, "input_ids": ids_BS})
                assert sim.counts().ops == queued
            after.append(walker.step(batch).loss)
    assert after[0] == after[1] == after[2]
