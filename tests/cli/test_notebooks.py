"""Oracle: the notebooks' own cells, run in order as they stand without Jupyter, in the folder that
they ask for; PEFT's file; commands that install, written in the test."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from dev import release

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
        # Jupyter's own lines install what is installed here
        if cell["cell_type"] == "code" and not cell["source"][0].startswith(("%", "!")):
            exec(compile("".join(cell["source"]), f"{name}:{cell['id']}", "exec"), names)
    return names


def test_a_fine_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("fine_tune.ipynb", tmp_path, monkeypatch)
    assert len(names["losses"]) == 30
    assert sum(names["losses"][-5:]) < sum(names["losses"][:5])
    assert (tmp_path / "runs/notebook/adapter/adapter_model.safetensors").is_file()


def test_the_lines_of_a_release_are_those_that_the_variable_says() -> None:
    """Oracle: the commands, written here; and the files as they stand."""
    address = "https://blockwalk.example/docs/"
    for name, written in release.PAGES.items():
        today = (ROOT / name).read_text(encoding="utf-8")
        assert written(today, release.RELEASED) == today, "write it: python -m dev.release"
        assert written(written(today, address), release.RELEASED) == today
    readme, site, notebook = (
        written((ROOT / name).read_text(encoding="utf-8"), address)
        for name, written in release.PAGES.items()
    )
    assert "pip install 'blockwalk[data,gguf]'" in readme
    assert "pipx install 'blockwalk[data,gguf]'" in readme
    assert "git clone" not in readme
    assert yaml.safe_load(site.partition("plugins:")[0])["site_url"] == address
    assert "%pip install blockwalk" in notebook


def test_a_loop_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("own_loop.ipynb", tmp_path, monkeypatch)
    assert names["after"] < names["before"]
    assert (tmp_path / "own-loop-adapter/adapter_model.safetensors").is_file()
