"""Oracle: torch and transformers themselves. A checkpoint that ``torch.save`` wrote is read where
it lies, bit for bit what ``from_pretrained`` loads; a file that is no such checkpoint gets one
line."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.tiers.model_folder import torch_file
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from tests.models import tiny_model
from tests.support.messages import refused


def saved(folder: Path, parts: int = 1, **options: Any) -> Path:
    """A model as transformers wrote it before safetensors: one file, or several and their index."""
    model = tiny_model("llama", **options)
    model.config.save_pretrained(folder)
    state = list(model.state_dict().items())
    if parts == 1:
        torch.save(dict(state), folder / "pytorch_model.bin")
        return folder
    files = {
        f"pytorch_model-{i + 1:05d}-of-{parts:05d}.bin": dict(state[i::parts]) for i in range(parts)
    }
    for name, part in files.items():
        torch.save(part, folder / name)
    index = {
        "metadata": {},
        "weight_map": {key: name for name, part in files.items() for key in part},
    }
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(("parts", "tied"), [(1, False), (3, False), (1, True)])
def test_every_tensor_is_what_from_pretrained_loads(tmp_path: Path, parts: int, tied: bool) -> None:
    """Oracle: ``from_pretrained(...).state_dict()``."""
    from transformers import AutoModelForCausalLM

    folder = saved(tmp_path / "model", parts, tied=tied)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    source = CheckpointFolder(folder, build_skeleton(folder))
    assert set(source.names()) == theirs.keys() - ({"lm_head.weight"} if tied else set())
    for name in source.names():
        assert torch.equal(source.weights([name])[name], theirs[name]), name


def test_tensors_are_views_of_the_map(tmp_path: Path) -> None:
    """Oracle: the file itself. A change of its bytes shows in a tensor that was handed out
    before."""
    folder = saved(tmp_path / "model")
    name = "model.norm.weight"
    source = CheckpointFolder(folder, build_skeleton(folder))
    view = source.weights([name])[name]
    with open(folder / "pytorch_model.bin", "r+b") as file:
        file.seek(torch_file.read_header(folder / "pytorch_model.bin")[name].offset)
        file.write(torch.full((2,), 3.0).numpy().tobytes())
    assert view[:2].tolist() == [3.0, 3.0]


class Command:
    """An object whose unpickling would run a command."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("made",)


def with_pickle(path: Path, instructions: bytes) -> None:
    """Another pickle in the place of a file's own."""
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, data in parts.items():
            file.writestr(name, instructions if name.endswith("data.pkl") else data)


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (lambda path, state: with_pickle(path, b"\x80\x02K\x01Q."), "torch.save saved_id"),
        (lambda path, state: path.write_bytes(path.read_bytes()[:-300]), "torch.save truncated"),
        (lambda path, state: path.write_bytes(b"\0" * 99), "torch.save"),
        (lambda path, state: path.write_bytes(b"XK"), "torch.save"),
        (lambda path, state: torch.save({**state, "run": Command()}, path), "tensors"),
        (lambda path, state: torch.save([*state.values()], path), "list tensors"),
        (lambda path, state: torch.save({"state": state}, path), "dict tensors"),
        (
            lambda path, state: torch.save(state, path, _use_new_zipfile_serialization=False),
            "1.6 AutoModelForCausalLM",
        ),
        (
            lambda path, state: torch.save({**state, "lm_head.weight": state["lm_head.weight"].t()},
                                           path),
            "lm_head.weight 1 32",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_read_gets_one_line(
    spoilt: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the defect that the test made; nothing in the file is run."""
    folder = saved(tmp_path / "model")
    path = folder / "pytorch_model.bin"
    monkeypatch.chdir(tmp_path)
    spoilt(path, torch.load(path, weights_only=True))
    with refused(ValueError, f"{path} {message}") as error:
        CheckpointFolder(folder, build_skeleton(folder))
    assert "\n" not in str(error.value)
    assert not Path("made").exists()


def test_a_bare_pickle_takes_no_memory(tmp_path: Path) -> None:
    """Oracle: Python's own count of what it allocated, for a text that says that it is a gigabyte
    long."""
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"X" + struct.pack("<I", 1 << 30) + b"short")
    tracemalloc.start()
    try:
        with refused(ValueError, "1.6"):
            torch_file.read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
