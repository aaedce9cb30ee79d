"""Oracle: folders written here, whole or with one thing wrong; the message names the file and says
what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blockwalk.models.model_source import INDEX, STORE_INDEX, ModelSource, model_source
from tests.support.messages import refused

pytestmark = pytest.mark.fast


def write(folder: Path, *files: str) -> Path:
    """A folder of empty files, with an index of two parts if it has one."""
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    if INDEX in files:
        parts = {"a": "part-2.safetensors", "b": "part-1.safetensors", "c": "part-2.safetensors"}
        (folder / INDEX).write_text(json.dumps({"weight_map": parts}))
    return folder


def test_weights_are_one_file_or_those_of_the_index_or_a_block_store(tmp_path: Path) -> None:
    """Closed form: each part once, by name; one whole file goes before an index."""
    one = write(tmp_path / "one", "config.json", "model.safetensors", INDEX)
    parts = write(
        tmp_path / "parts", "config.json", INDEX, "part-1.safetensors", "part-2.safetensors"
    )
    packed = write(tmp_path / "packed", "config.json", STORE_INDEX)
    assert model_source(one).checkpoint_files() == ["model.safetensors"]
    assert model_source(parts).checkpoint_files() == ["part-1.safetensors", "part-2.safetensors"]
    pickled = write(tmp_path / "pickled", "config.json", "pytorch_model.bin")
    assert model_source(pickled).checkpoint_files() == ["pytorch_model.bin"]
    for folder in (one, parts, packed, pickled):
        model_source(folder).require_weights()
        assert model_source(str(folder)).require_config() == folder


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "config.json model"),
        (("model.gguf",), "model.gguf GGUF"),
        (("config.json",), f"model.safetensors {INDEX} pytorch_model.bin"),
        (("config.json", INDEX, "part-2.safetensors"), "part-1.safetensors"),
    ],
)
def test_a_folder_that_is_no_whole_model(
    tmp_path: Path, files: tuple[str, ...], message: str
) -> None:
    with refused(ValueError, message):
        model_source(write(tmp_path / "model", *files)).require_weights()


def test_what_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the hub where there is no network, a file, and a path where nothing is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("weights.safetensors").touch()
    for name, message in (
        ("no-such/model-0.5B", "no-such/model-0.5B HF_HUB_OFFLINE cache"),
        ("weights.safetensors", "weights.safetensors"),
        ("no/such/folder", "no/such/folder model"),
    ):
        for check in (
            ModelSource.require_config,
            ModelSource.require_weights,
            ModelSource.checkpoint_files,
        ):
            with refused(ValueError, message):
                check(model_source(name))
