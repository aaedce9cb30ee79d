"""Oracle: the pages of docs/. Every indented command of blockwalk runs as it stands, page by page, in one folder with the
files that the page shows; the schema of Kubernetes' objects; the command line's own help for each command that a page names."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
import yaml

from blockwalk.cli import main
from blockwalk.plan import methods
from blockwalk.plan.placement import Codec, Placement, Tier

ROOT = Path(__file__).parents[2]
LARGE = "Qwen/Qwen2.5-3B"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs/how-to").glob("*.md")])
ELSEWHERE = {
    "README.md": "tests/cli/test_readme.py",
    "python -m blockwalk.integrations.harness": "tests/peer/test_harness.py",
}
"""Pages and commands that another test runs."""
PROGRAM = re.compile(
    r"^ {4,}((?:blockwalk|python|pytest|make|pip|ollama|llama-\w+|docker|srun|torchrun) .+?)(?:  +#.*)?$", re.MULTILINE
)
RUN = {"run-it.md", "what-you-own.md", "add-a-method.md"}
"""Pages whose commands a test here runs."""


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
    commands = [line for line in PROGRAM.findall(text) if line.startswith("blockwalk ")]
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


def test_the_page_on_methods(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own row, put into the table; its plan is that of the program that `plan` prints."""
    text = (ROOT / "docs/how-to/add-a-method.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^ *```python\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    names = {"Plan": methods.Plan, "Placement": Placement, "Tier": Tier, "Codec": Codec}
    exec(compile(textwrap.dedent(block), "add-a-method.md", "exec"), names)
    monkeypatch.setitem(methods.METHODS, "offload", names["offload"])
    run("how-to/add-a-method.md", capsys)
    assert "FETCH" in capsys.readouterr().out


def test_no_command_of_a_page_is_missed() -> None:
    """Oracle: the pages. A command stands on a page that is run, or is named with the test that runs it; a YAML file has a
    name, by which the page's commands call it."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for command in PROGRAM.findall(text):
            run_here = page.name in RUN and command.startswith("blockwalk ")
            named = [test for begin, test in ELSEWHERE.items() if page.name == begin or command.startswith(begin)]
            assert run_here or (named and (ROOT / named[0]).is_file()), f"{page.name}: {command}"
        for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if page.name != "README.md":
                assert f" {block.splitlines()[0].removeprefix('# ')}" in text, page.name


def test_every_command_that_is_named_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the help of the command: each word after `blockwalk` is a command, each flag one that it lists."""
    helps: dict[str, str] = {}
    for page in [*PAGES, *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/methods").glob("*.md")]:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        found = re.findall(r"`blockwalk ([a-z]+)\b([^`]*)`", text) + re.findall(
            r"^ {4,}blockwalk ([a-z]+)\b(.*)$", text, re.MULTILINE
        )
        for command, rest in found:
            if command not in helps:
                with pytest.raises(SystemExit) as end:
                    main.main([command, "--help"])
                assert end.value.code == 0, f"{page.name}: blockwalk {command}"
                helps[command] = capsys.readouterr().out
            for flag in re.findall(r"(?<=\s)(--[a-z][\w.-]*)", rest.partition("#")[0]):
                assert re.search(rf"{re.escape(flag)}\b", helps[command]), f"{page.name}: blockwalk {command} {flag}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples/cluster").iterdir()), ids=lambda path: path.name)
def test_files_for_clusters_can_be_read(path: Path) -> None:
    """Oracle: bash, Python's compiler, the YAML parser. What was tried with real launchers stands on the page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
    elif path.suffix == ".py":
        compile(text, path.name, "exec")
    else:
        assert yaml.safe_load(text)


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
