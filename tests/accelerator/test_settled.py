"""Oracle: the bytes that a driver says are free, the files of the run, and the losses of the same
run on a CPU."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.cli import main
from blockwalk.plan.settings import override
from blockwalk.program import settling
from blockwalk.report import capacity, machine
from blockwalk.system.process_memory import Limit
from blockwalk.train import config
from tests.conftest import TinyRun
from tests.support.run_folders import losses
from tests.support.simulated_device import Simulated

STREAMED = ["--lora.rank", "4", "--resident", "0", "--recompute", "all"]


def said(arguments: list[str]) -> tuple[int, str]:
    """The exit code of a command, and everything that it says."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = main.main(arguments)
    return code, out.getvalue()


def free(patch: pytest.MonkeyPatch, device: int, host: int = 10**12) -> None:
    """From here on, so many bytes are free on the device and on the host."""
    patch.delenv("BLOCKWALK_DEVICE", raising=False)
    patch.setattr(torch.accelerator, "get_memory_info", lambda _: (device, 2 * device))
    patch.setattr(machine, "free_memory", lambda: host)


def settled(folder: Path) -> dict[str, Any]:
    """The settings that the run's last checkpoint says its machine decided."""
    last = max(folder.glob("checkpoint-*"))
    found: dict[str, Any] = json.loads((last / "state.json").read_text())["data"].get("decided", {})
    return found


def test_a_plan_that_does_not_fit_the_card_is_refused_before_anything_runs(
    sim: Simulated, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is needed, what is there, and another plan; whether or not somebody gave a
    budget."""
    monkeypatch.chdir(tmp_path)
    free(monkeypatch, 900_000)
    arguments = [
        "train",
        *tiny_run.arguments(tmp_path / "run"),
        "--method",
        "plain",
        "--max_steps",
        "1",
    ]
    before = sim.counts().ops
    code, text = said(arguments)
    assert code == main.TOO_LARGE
    assert "on the device, and budget is 810.0 kB, 0.9 of the 900.0 kB that are free there" in text
    assert "the next plan that fits: method: " in text
    code, text = said([*arguments, "--budget", "1GB"])
    assert code == main.TOO_LARGE
    assert "on the device, and 900.0 kB are free there: lower batch_size" in text
    assert sim.counts().ops == before
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    free(monkeypatch, 10**9)
    assert said(arguments)[0] == 0
    assert settled(tmp_path / "run") == {"budget": 9 * 10**8, "resident": 0}


def test_where_the_host_is_short_the_next_plan_is_for_the_host_s_room(
    sim: Simulated, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of one byte: only a plan that keeps nothing on the host is left, however much of the
    device that takes."""
    monkeypatch.chdir(tmp_path)
    free(monkeypatch, 10**9)
    monkeypatch.setattr(capacity, "memory_limits", lambda: [Limit(1, "a limit")])
    named = ["--frozen", "host × int8", "--activation", "host"]
    code, text = said(
        ["train", *tiny_run.arguments(tmp_path / "run"), *STREAMED, *named, "--max_steps", "1"]
    )
    assert code == main.TOO_LARGE
    assert "a limit allows 1 B" in text
    assert "the next plan that fits: method: " in text
    assert "host" not in text.partition("the next plan that fits: ")[2]


def test_a_run_begins_from_the_host_says_so_and_keeps_it(
    sim: Simulated, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed, on a machine with less room, as it was, with the settings of its first part; a new
    run begins from the disk."""
    monkeypatch.chdir(tmp_path)
    free(monkeypatch, 10**9)
    arguments = ["train", *tiny_run.arguments(tmp_path / "run"), *STREAMED]
    code, text = said([*arguments, "--max_steps", "2", "--verbose"])
    assert code == 0
    assert "frozen and activation begin from the host: " in text
    assert "budget: 900.0 MB on the device, 0.9 of the 1.0 GB that are free there" in text
    choices = {
        "frozen.tier": "host",
        "activation.tier": "host",
        "trainable.tier": "device",
        "optimizer_state.tier": "device",
        "budget": 9 * 10**8,
    }
    assert settled(tmp_path / "run") == choices
    kept = config.load(tmp_path / "run" / "config.yaml").plan
    assert override(kept, choices) == kept
    free(monkeypatch, 5 * 10**8, host=1)
    code, text = said([*arguments, "--max_steps", "4", "--resume_from_checkpoint", "latest"])
    assert code == 0
    assert "changed since the checkpoint: max_steps" in text
    assert "frozen" not in "".join(line for line in text.splitlines() if "changed since" in line)
    assert settled(tmp_path / "run") == choices
    assert (
        said(["train", *tiny_run.arguments(tmp_path / "new"), *STREAMED, "--max_steps", "4"])[0]
        == 0
    )
    assert settled(tmp_path / "new") == {
        "frozen.tier": "disk",
        "activation.tier": "disk",
        "trainable.tier": "device",
        "optimizer_state.tier": "device",
        "budget": 45 * 10**7,
    }
    named = [
        *tiny_run.arguments(tmp_path / "cpu"),
        *STREAMED,
        "--max_steps",
        "4",
        "--device",
        "cpu",
    ]
    assert said(["train", *named])[0] == 0
    assert settled(tmp_path / "cpu") == {}
    assert losses(tmp_path / "run") == losses(tmp_path / "new") == losses(tmp_path / "cpu")


def test_a_run_whose_adapters_were_on_the_host_goes_on_with_them_on_the_device(
    sim: Simulated, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of a version that had masters and moments beside the card, whatever the room."""
    monkeypatch.chdir(tmp_path)
    free(monkeypatch, 10**9)
    arguments = ["train", *tiny_run.arguments(tmp_path / "run"), *STREAMED, "--max_steps"]
    with monkeypatch.context() as patch:
        patch.setattr(settling, "free_states", lambda *_: ())
        assert said([*arguments, "2"])[0] == 0
    states = {"trainable.tier", "optimizer_state.tier"}
    assert not states & settled(tmp_path / "run").keys()
    assert said([*arguments, "4", "--resume_from_checkpoint", "latest"])[0] == 0
    chosen = settled(tmp_path / "run")
    assert {chosen[name] for name in states} == {"device"}
    whole = tiny_run.arguments(tmp_path / "cpu")
    assert said(["train", *whole, *STREAMED, "--max_steps", "4", "--device", "cpu"])[0] == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "cpu")


def test_a_card_without_bfloat16_is_told_of(
    sim: Simulated, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch answers of a T4: the note names the setting that takes it away."""
    monkeypatch.chdir(tmp_path)
    free(monkeypatch, 10**9)
    card = machine.Card("Tesla T4", 16 * 10**9, 10**9, bfloat16=False)
    monkeypatch.setattr(machine, "card", lambda device: card)
    arguments = ["train", *tiny_run.arguments(tmp_path / "run"), "--dry-run", "--compute_dtype"]
    assert "Tesla T4 has no bfloat16 arithmetic" in said([*arguments, "bfloat16"])[1]
    assert "set compute_dtype: float32" in said([*arguments, "bfloat16"])[1]
    code, text = said([*arguments, "float32"])
    assert code == 0
    assert "bfloat16 arithmetic" not in text
