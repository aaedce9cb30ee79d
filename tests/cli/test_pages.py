"""Oracle: README.md and the pages of docs/. Every command line runs as it stands, page by page, in
one folder with the files that the page shows and a small model in the place of large ones, or says
what it needs; the schema of Kubernetes' objects; the command line's own help for each command that
a page names."""

from __future__ import annotations

import collections
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from blockwalk.cli import main
from blockwalk.doctor import machine
from blockwalk.simulate import hardware
from tests.support.pages import (
    HUB_NAMES,
    PAGES,
    REASONS,
    ROOT,
    blocks,
    commands,
    modules,
    shown,
    yaml_files,
)
from tests.support.row_modules import new_process

BEFORE = {
    "how-to/run-it.md": ["train examples/quickstart.yaml", "train run.yaml"],
    "how-to/what-you-own.md": ["gguf Qwen/Qwen2.5-3B model.gguf --dtype q8_0"],
    "methods/mezo.md": ["train examples/mezo.yaml"],
}
"""Runs of another page that a page goes on from."""

ALWAYS = {
    "README.md",
    "how-to/commands.md",
    "how-to/long-sequences.md",
    "how-to/run-it.md",
    "how-to/what-you-own.md",
    "how-to/add-a-method.md",
}
"""Pages that `make test` runs, in about 120 s of one core; `make docs-run` runs them all."""

RUN = """model: Qwen/Qwen2.5-3B
method: mebp
data: {train: train.jsonl, eval: heldout.jsonl}
lora: {rank: 8}
batch_size: 4
epochs: 1
output_dir: runs/first
"""
"""run.yaml of pages that name one without showing it."""

CHANGES = {"methods/distzo2.md": {"method: mebp": "method: distzo2", "lora: {rank: 8}\n": ""}}
"""What such a run.yaml has in place of these lines, by page."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: the examples with fewer steps, 16 records, run.yaml, and what ``doctor``
    finds on a laptop."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(
        machine, "measure", lambda *_, **__: machine.Findings(hardware.load("laptop"), ())
    )
    shutil.copytree(ROOT / "examples", "examples")
    for path in Path("examples/data").iterdir():
        records = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text(
            "".join(records[: {"sentiment_train.jsonl": 160}.get(path.name, 16)]), encoding="utf-8"
        )
    for path in Path("examples").glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        shorter = re.sub(
            r"^(max_steps|eval_every|save_every): \d+", r"\1: 4", text, flags=re.MULTILINE
        )
        path.write_text(
            re.sub(r"^epochs: \d+", "epochs: 1", shorter, flags=re.MULTILINE), encoding="utf-8"
        )
    shutil.copy("examples/data/cards_train.jsonl", "train.jsonl")
    shutil.copy("examples/data/cards_heldout.jsonl", "heldout.jsonl")
    shutil.copy("examples/tiny-llama/config.json", "config.json")
    Path("run.yaml").write_text(RUN, encoding="utf-8")
    Path("turns.json").write_text('[{"role": "user", "content": "Hello"}]', encoding="utf-8")
    return tmp_path


def call(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command line, and look for what it promises to write."""
    if words[0] == "python":
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return
    words, redirected = (words[: words.index(">")], words[-1]) if ">" in words else (words, None)
    try:
        code = main.main(words[1:])
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    assert code == 0, f"{' '.join(words)}\n{captured.out}{captured.err}"
    if redirected:
        Path(redirected).write_text(captured.out, encoding="utf-8")
    outputs = [word for word in words[2:] if not word.startswith("-")]
    if words[1] in ("merge", "replay"):
        assert any(list(Path(output).glob("*.safetensors")) for output in outputs[1:]), words
    elif words[1] == "train" and not {"--dry-run", "--nnodes", "--join"} & {*words}:
        text = "".join(
            Path(word).read_text(encoding="utf-8") for word in outputs if word.endswith(".yaml")
        )
        named = re.findall(r"--output_dir (\S+)", " ".join(words)) or re.findall(
            r"^output_dir: (\S+)", text, re.MULTILINE
        )
        folder = Path(named[0])
        assert list(folder.glob("*/*model.safetensors")), words


def run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Write the YAML files and modules of a page, put a small model under every name of the hub,
    and run the page's commands."""
    path = ROOT / page if page == "README.md" else ROOT / "docs" / page
    text = path.read_text(encoding="utf-8")
    for name in {*HUB_NAMES.findall(text), *HUB_NAMES.findall(RUN)}:
        shutil.copytree("examples/tiny-llama", name, dirs_exist_ok=True)
    text_of_run = RUN
    for before, after in CHANGES.get(page, {}).items():
        text_of_run = text_of_run.replace(before, after)
    Path("run.yaml").write_text(text_of_run, encoding="utf-8")
    for name, block in {**yaml_files(path), **modules(path)}.items():
        Path(name).write_text(block, encoding="utf-8")
    if any(command.words[:2] == ["blockwalk", "init"] for command in commands(text)):
        Path("run.yaml").unlink()  # the page writes it
    for line in BEFORE.get(page, []):
        assert main.main(line.split()) == 0, capsys.readouterr().err
    for command in commands(text):
        if command.needs is None:
            with new_process():
                call(command.words, capsys)


def parameters() -> list[object]:
    """Return the pages that show commands; those that only `make docs-run` runs are marked."""
    later = pytest.mark.skipif(
        not os.environ.get("BLOCKWALK_DOCS_RUN"), reason="make docs-run runs this page"
    )
    names = [
        shown(page)
        for page in PAGES
        if any(c.needs is None for c in commands(page.read_text(encoding="utf-8")))
    ]
    return [pytest.param(name, marks=[] if name in ALWAYS else later) for name in names]


@pytest.mark.parametrize("page", parameters())
def test_every_command_of_a_page_runs(
    page: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Modules that the page shows are files, and its commands import them."""
    run(page, capsys)


def test_a_command_that_is_not_run_says_what_it_needs() -> None:
    """Oracle: the list of what may be missing. The count is printed (pytest -s)."""
    counts: collections.Counter[str] = collections.Counter()
    for page in PAGES:
        for command in commands(page.read_text(encoding="utf-8")):
            assert command.needs is None or command.needs in REASONS, (
                f"{shown(page)}: {command.line}: {command.needs}"
            )
            counts[
                command.needs or ("run" if shown(page) in ALWAYS else "run by make docs-run")
            ] += 1
    print(", ".join(f"{reason}: {count}" for reason, count in counts.most_common()))
    assert counts["run"] >= 10
    assert set(BEFORE) | ALWAYS <= {shown(page) for page in PAGES}


def test_targets_of_make_are_there() -> None:
    """Oracle: the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for command in commands(page.read_text(encoding="utf-8")):
            if command.words[0] == "make":
                assert re.search(rf"^{command.words[1]}:", makefile, re.MULTILINE), command.line


def test_yaml_files_of_how_to_pages_have_names() -> None:
    """A file's first line is its name, by which the page's commands call it."""
    for page in (ROOT / "docs/how-to").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for block in blocks(text, "yaml"):
            assert f" {block.splitlines()[0].removeprefix('# ')}" in text, page.name


def test_every_command_that_is_named_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the help of the command: each word after `blockwalk` is a command, each flag one that
    it lists."""
    helps: dict[str, str] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        found = re.findall(r"`blockwalk ([a-z][a-z-]*)([^`]*)`", text) + re.findall(
            r"^ {4,}blockwalk ([a-z][a-z-]*)(.*)$", text, re.MULTILINE
        )
        for command, rest in found:
            if command not in helps:
                with pytest.raises(SystemExit) as end:
                    main.main([command, "--help"])
                assert end.value.code == 0, f"{page.name}: blockwalk {command}"
                helps[command] = capsys.readouterr().out
            for flag in re.findall(r"(?<=\s)(--[a-z][\w.-]*)", rest.partition("#")[0]):
                assert re.search(rf"{re.escape(flag)}\b", helps[command]), (
                    f"{page.name}: blockwalk {command} {flag}"
                )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples/cluster").iterdir()), ids=lambda path: path.name
)
def test_files_for_clusters_can_be_read(path: Path) -> None:
    """Oracle: bash, Python's compiler, the YAML parser. What was tried with real launchers stands
    on the page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
    elif path.suffix == ".py":
        compile(text, path.name, "exec")
    else:
        assert yaml.safe_load(text)


def test_the_job_of_kubernetes_is_one() -> None:
    """Oracle: Kubeflow Trainer's own models of its objects, which leave out what the schema does
    not have."""
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
