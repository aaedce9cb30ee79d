"""Oracle: README.md. Its Python runs as it stands and writes what it promises, with a small model
in the place of the large one; what it names is there. Its commands are run by ``test_pages.py``."""

import re
import shutil
from pathlib import Path

import pytest

from blockwalk.simulate import hardware
from tests.support.pages import HUB_NAMES, ROOT, blocks

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a small model in the place of every one that README names."""
    monkeypatch.chdir(tmp_path)
    for name in HUB_NAMES.findall(README):
        shutil.copytree(ROOT / "examples/tiny-llama", name, dirs_exist_ok=True)
    shutil.copytree(ROOT / "examples", "examples")
    for name in ("train.jsonl", "heldout.jsonl"):
        records = (
            (ROOT / "examples/data/cards_train.jsonl")
            .read_text(encoding="utf-8")
            .splitlines(keepends=True)
        )
        Path(name).write_text("".join(records[:16]), encoding="utf-8")
    return tmp_path


def test_python_runs_as_it_stands(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    ids = torch.arange(24).view(2, 12)
    names = {"batch": {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}}
    for block in blocks(README, "python"):
        exec(compile(block, "README.md", "exec"), names)
    assert not re.search(r"\bnan\b", capsys.readouterr().out)
    assert list(place.rglob("adapter_model.safetensors")), "an adapter is saved"


def test_what_else_is_named_is_there() -> None:
    """Oracle: the repository, and the machines that ship."""
    for path in [
        *re.findall(r"\]\(([^)]+)\)", README),
        *re.findall(r"(benchmarks/\w+\.py)", README),
    ]:
        assert "://" in path or (ROOT / path.partition("#")[0]).exists(), path
    for name in hardware.names():
        assert name not in README or hardware.load(name).device_bytes
