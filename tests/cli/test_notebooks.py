"""Oracle: the notebooks' own cells, run in order as they stand, in the folder that they ask for;
PEFT's file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    shutil.copytree(ROOT / "examples", "examples")
    cells = json.loads((folder / "examples" / name).read_text(encoding="utf-8"))["cells"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code"), (
        "saved without outputs"
    )
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name}:{cell['id']}", "exec"), names)
    return names


def test_a_fine_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("fine_tune.ipynb", tmp_path, monkeypatch)
    assert len(names["losses"]) == 30
    assert sum(names["losses"][-5:]) < sum(names["losses"][:5])
    assert (tmp_path / "runs/notebook/adapter/adapter_model.safetensors").is_file()


def test_a_loop_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("own_loop.ipynb", tmp_path, monkeypatch)
    assert names["after"] < names["before"]
    assert (tmp_path / "own-loop-adapter/adapter_model.safetensors").is_file()
