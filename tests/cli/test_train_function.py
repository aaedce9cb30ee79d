"""Oracle: the same settings in a mapping, which give the same run; the signature of the function
that does the work."""

from __future__ import annotations

import inspect
import json
import pydoc
from pathlib import Path
from typing import Any

import pytest

import blockwalk
from blockwalk.cli import main
from blockwalk.cutting.adapters import as_adapters
from blockwalk.plan.choices import LoraSettings
from blockwalk.train import config
from blockwalk.train.foreign_settings import Note
from tests.conftest import TinyRun
from tests.support.messages import refused


def test_keywords_win_over_the_file(tiny_run: TinyRun, tmp_path: Path) -> None:
    """The same run, once by a file and keywords, once by one mapping: the same losses, each in its
    folder."""
    settings: dict[str, Any] = {
        "model": str(tiny_run.model),
        "data": {"train": str(tiny_run.train), "format": "text"},
        "method": "plain",
        "batch_size": 4,
    }
    more = {"optimizer": {"learning_rate": 3e-3, "schedule": "cosine"}, "max_steps": 2}
    (tmp_path / "run.yaml").write_text(
        config.as_yaml({**settings, "output_dir": "nowhere", "max_steps": 9})
    )
    blockwalk.train(tmp_path / "run.yaml", output_dir=tmp_path / "a", **more)
    blockwalk.train({**settings, **more, "output_dir": str(tmp_path / "b")})
    losses = [
        [
            json.loads(line)["loss"]
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in "ab"
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    assert not Path("nowhere").exists()


def test_keywords_win_over_a_value_and_stand_alone() -> None:
    run = config.from_mapping(
        {"model": "m", "batch_size": 4, "lora": {"rank": 4}, "output_dir": "x"}
    )
    assert config.of(run, {}) == run
    assert config.of(run, {"batch_size": 2}).batch_size == 2
    assert config.of(run, {"lora": False, "frozen": "disk"}).lora is None
    assert (
        config.of(None, {"model": Path("m"), "data": {"train": Path("a.jsonl")}}).data.train
        == "a.jsonl"
    )
    with pytest.warns(Note):
        assert config.of({"model": "m"}, {"num_train_epochs": 3}).epochs == 3
    with refused(ValueError, "batch_sise batch_size"):
        blockwalk.train({"model": "m"}, batch_sise=3)


def test_the_signature_is_that_of_the_function_that_does_the_work() -> None:
    """Oracle: ``inspect``; ``help`` shows the call and each argument."""
    signature = inspect.signature(blockwalk.train.train)
    assert inspect.signature(blockwalk.train).parameters == signature.parameters
    help_page = pydoc.render_doc(blockwalk.train, renderer=vars(pydoc)["plaintext"])
    for name, parameter in signature.parameters.items():
        stars = "**" if parameter.kind is inspect.Parameter.VAR_KEYWORD else ""
        assert f"{stars}{name}" in help_page
        assert f"{name}: " in help_page
    assert inspect.getdoc(blockwalk.train.train) == blockwalk.train.__doc__


def test_lora_takes_true_and_false_as_in_yaml() -> None:
    """Oracle: the settings of a YAML file with the same word."""
    for word in (True, False):
        assert as_adapters(word) == config.from_mapping({"method": "plain", "lora": word}).lora
    assert as_adapters(None) is None
    assert as_adapters(LoraSettings(4)) == LoraSettings(4)


def test_a_note_is_printed_once_and_a_dry_run_goes_on(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the arguments. One name means the same, another is off, and is left out."""
    arguments = [
        "train",
        *tiny_run.arguments(tmp_path / "out"),
        "--num_train_epochs",
        "2",
        "--fp16",
        "false",
        "--dry-run",
    ]
    assert main.main(arguments) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "note: --num_train_epochs is --epochs here, and is taken as that"
    assert said[1].startswith("note: --fp16 false is left out")
    assert len(said) == 2
