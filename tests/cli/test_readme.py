"""Oracle: README.md. Its commands, its YAML and its Python run as they stand and write what they promise, with a small model in
the place of the large one, the first records of the examples' data in the place of files, and fewer steps of the examples."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from blockwalk.cli import main
from blockwalk.doctor import machine
from blockwalk.doctor import machine as probe
from blockwalk.simulate import hardware

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LARGE = "Qwen/Qwen2.5-3B"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = dict(FENCE.findall(README))
LINES = [line.partition("#")[0].strip() for line in re.findall(r"^    (.+)$", FENCE.sub("", README), re.MULTILINE)]
"""Every line of an indented block, without its comment."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that README's lines name, and nothing else; the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    shutil.copytree("examples/tiny-llama", LARGE)
    for path in Path("examples/data").iterdir():
        records = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(records[: {"sentiment_train.jsonl": 160}.get(path.name, 16)]), encoding="utf-8")
    for path in Path("examples").glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        shorter = re.sub(r"^(max_steps|eval_every|save_every): \d+", r"\1: 4", text, flags=re.MULTILINE)
        path.write_text(re.sub(r"^epochs: \d+", "epochs: 1", shorter, flags=re.MULTILINE), encoding="utf-8")
    shutil.copy("examples/data/cards_train.jsonl", "train.jsonl")
    shutil.copy("examples/data/cards_heldout.jsonl", "heldout.jsonl")
    Path("run.yaml").write_text(FENCED["yaml"], encoding="utf-8")
    return tmp_path


def call(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    program, *arguments = shlex.split(line)
    assert program == "blockwalk"
    code = main.main(arguments)
    captured = capsys.readouterr()
    assert code == 0, f"{line}\n{captured.out}{captured.err}"
    return captured.out


def test_every_command_runs_as_it_stands(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``doctor`` measures takes minutes and has a test of its own; here it finds a laptop."""
    monkeypatch.setattr(probe, "measure", lambda *_, **__: machine.Findings(hardware.load("laptop"), ()))
    others = [line for line in LINES if not line.startswith("blockwalk ")]
    assert others == ["pip install .", "make quickstart", "ollama create first -f Modelfile && ollama run first"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (quickstart,) = re.findall(r"^quickstart: .*\n\t\$\(VENV\)/bin/(.*)$", makefile, re.MULTILINE)
    said = {line: call(line, capsys) for line in [quickstart, *(line for line in LINES if line not in others)]}
    assert "held-out accuracy" in said[quickstart]
    for path in ("first/adapter", "ranks/adapter", "mezo/model", "zo2/model", "distzo2/model", "fcdp/model"):
        assert list((place / "runs" / path).glob("*model.safetensors")), path
    assert all(
        (place / name).exists()
        for name in ("merged", "first.gguf", "Modelfile", "mezo.ledger", "rebuilt", "hardware.yaml")
    )
    assert (place / "runs/first/report.html").is_file()
    rebuilt, trained = ((place / path / "model.safetensors").read_bytes() for path in ("rebuilt", "runs/mezo/model"))
    assert rebuilt == trained, "bit for bit"
    last = (place / "runs/first/evaluations.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    found = call("blockwalk eval runs/first/config.yaml --adapter runs/first/adapter --json", capsys)
    losses = [json.loads(text)["loss"] for text in (found, last)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6), "a run's own configuration is one, whatever its schedule"


def test_python_runs_as_it_stands(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    ids = torch.arange(24).view(2, 12)
    names = {"batch": {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}}
    exec(compile(FENCED["python"], "README.md", "exec"), names)
    assert re.match(r"\d+\.\d+ \{", capsys.readouterr().out)
    assert (place / "adapter/adapter_model.safetensors").is_file()


def test_what_else_is_named_is_there() -> None:
    """Oracle: the repository, and the machines that ship."""
    for path in [*re.findall(r"\]\(([^)]+)\)", README), *re.findall(r"(benchmarks/\w+\.py)", README)]:
        assert (ROOT / path.partition("#")[0]).exists(), path
    for name in ("h200", "rtx-4090", "laptop"):
        assert name in README
        assert hardware.load(name).device_bytes
