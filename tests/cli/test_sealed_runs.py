"""Oracle: the run that was never disturbed. What it reads beside its own folder, the cache and its
model, is what it began with, or it says so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import blockwalk
from blockwalk.cutting import verify
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.engine import pack_cache
from blockwalk.engine.pack_cache import packed
from blockwalk.plan.methods import method
from blockwalk.system import cache
from blockwalk.tiers.model_folder.safetensors import read_header
from tests.conftest import TinyRun
from tests.support.callback_settings import settings
from tests.support.messages import refused


def losses(tiny_run: TinyRun, out: Path, model: Path, disturb: Callable[[], None]) -> list[float]:
    """The losses of four steps, after the first of which ``disturb`` is called."""
    lines = []

    def note(event: blockwalk.Event) -> None:
        if event.name == "step":
            lines.append(event.values["loss"])
            if event.step == 1:
                disturb()

    more = {"model": str(model), "max_steps": 4, "save_every": 3, "frozen": "disk × raw"}
    blockwalk.train(settings(tiny_run, out, **more), callbacks=[note])
    return lines


@pytest.fixture(scope="module")
def whole(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run that nobody disturbs."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return losses(tiny_run, out, tiny_run.model, lambda: None)


@pytest.fixture
def model(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """A copy of the model."""
    return Path(shutil.copytree(tiny_run.model, tmp_path / "model"))


def test_a_model_that_is_written_to_ends_the_run(
    tiny_run: TinyRun, model: Path, tmp_path: Path
) -> None:
    """Oracle: the file's bytes. No checkpoint is of two models, and no adapter."""
    file = model / "model.safetensors"
    before = file.stat()

    def write() -> None:
        header = read_header(file)
        with file.open("r+b") as opened:
            opened.seek(next(iter(header.values())).offset)
            opened.write(b"\1" * 64)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    with refused(ValueError, f"{file} two"):
        losses(tiny_run, tmp_path / "out", model, write)
    assert not (tmp_path / "out" / "adapter").exists()
    assert not [*(tmp_path / "out").glob("checkpoint-*")]


def test_a_model_that_is_replaced_stays_the_one_that_was_opened(
    tiny_run: TinyRun, model: Path, tmp_path: Path, whole: list[float]
) -> None:
    """Oracle: the losses of the undisturbed run: another file takes the name, or only times
    change."""
    file = model / "model.safetensors"

    def rename() -> None:
        other = file.with_name("other")
        other.write_bytes(file.read_bytes()[:-64] + b"\1" * 64)
        other.replace(file)

    def touch() -> None:
        os.utime(model / "config.json")

    assert losses(tiny_run, tmp_path / "a", model, rename) == whole
    assert losses(tiny_run, tmp_path / "b", tiny_run.model, lambda: os.utime(file)) == whole
    assert losses(tiny_run, tmp_path / "c", tiny_run.model, touch) == whole


def test_a_pack_of_two_models_is_not_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the folder of packs, once the model was written to while it was packed."""
    write_store = pack_cache.write_store

    def written_meanwhile(*arguments: object, **options: object) -> None:
        write_store(*arguments, **options)  # type: ignore[arg-type]
        with (model / "model.safetensors").open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"\1" * 8)

    monkeypatch.setattr(pack_cache, "write_store", written_meanwhile)
    (tmp_path / "packs").mkdir()
    with refused(ValueError, f"{model}/model.safetensors two"):
        packed(model, method("mebp").frozen.codec, build_skeleton(model), tmp_path / "packs")
    assert not [*tmp_path.glob("packs/*")]


def test_a_resume_is_walked_as_the_run_was(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the anatomy when the run began. One with a seal of its own and another scale is
    named."""
    known = verify.certified_anatomy(build_skeleton(tiny_run.model))
    monkeypatch.setattr(verify, "study", lambda cls, config: known)
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verify, "_verdicts", {})
    out = tmp_path / "out"
    first = settings(tiny_run, out, max_steps=1, save_every=1)
    blockwalk.train(first)
    (file,) = (tmp_path / "cache").glob("anatomy-*.json")
    anatomy = cache.read_sealed(file.stem, dict)
    assert anatomy is not None
    cache.write_sealed(file.stem, {**anatomy, "scale": 3.0})
    again = settings(tiny_run, out, max_steps=2, resume_from_checkpoint="latest")
    monkeypatch.setattr(verify, "_verdicts", {})
    with refused(ValueError, f"{file}"):
        blockwalk.train(again)
    cache.write_sealed(file.stem, anatomy)
    monkeypatch.setattr(verify, "_verdicts", {})
    assert blockwalk.train(again).steps == 2
