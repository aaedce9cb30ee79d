"""Oracle: the pages of docs/. Every indented command of blockwalk runs as it stands, page by page, in one folder with the
files that the page shows; the schema of Kubernetes' objects."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from blockwalk.cli import main

ROOT = Path(__file__).parents[2]
LARGE = "Qwen/Qwen2.5-3B"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: the examples, and a small model and a few records in the place of large ones."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    shutil.copytree("examples/tiny-llama", LARGE)
    records = Path("examples/data/cards_train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    Path("train.jsonl").write_text("".join(records[:8]), encoding="utf-8")
    return tmp_path


def run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Write the YAML files of a page under the names in their first lines, and run its commands."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for name, block in re.findall(r"^```yaml\n# (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        Path(name).write_text(block, encoding="utf-8")
    commands = re.findall(r"^    (blockwalk .+?)(?:  +#.*)?$", text, re.MULTILINE)
    assert commands
    for command in commands:
        assert main.main(shlex.split(command)[1:]) == 0, f"{command}\n{capsys.readouterr().err}"


def test_the_page_on_running_what_was_trained(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["train", "examples/quickstart.yaml", "--data.eval", "", "--max_steps", "12"]) == 0
    run("how-to/run-it.md", capsys)


def test_the_page_on_what_you_own(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["gguf", LARGE, "model.gguf", "--dtype", "q8_0"]) == 0
    run("how-to/what-you-own.md", capsys)
    assert all((place / "runs" / name / "adapter").is_dir() for name in ("laptop", "card", "two", "gguf"))
    assert (place / "adapter.gguf").is_file()


def test_the_job_of_kubernetes_is_one() -> None:
    """Oracle: Kubeflow Trainer's own models of its objects, which leave out what the schema does not have."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    found = yaml.safe_load((ROOT / "examples/cluster/kubeflow.yaml").read_text(encoding="utf-8"))
    assert models.TrainerV1alpha1TrainJob.from_dict(found).to_dict() == found
    trainer = found["spec"]["trainer"]
    assert trainer["command"][:4] == ["torchrun", "-m", "blockwalk", "train"]


def test_links_between_pages_hold() -> None:
    """Oracle: the file system."""
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#\s]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page}: {target}"
