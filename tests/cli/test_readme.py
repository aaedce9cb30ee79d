"""Oracle: README.md. Its Python runs as it stands and writes what it promises, with a small model
in the place of the large one; what it names is there. Its commands are run by ``test_pages.py``,
and the first five here under a terminal."""

import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest
from dev import terminal

from blockwalk.cli import main
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


@pytest.mark.skip(reason="a fork of a process with threads may hang: it needs one of its own")
def test_the_five_commands_at_a_terminal(place: Path) -> None:
    """Oracle: a terminal of 100 columns, and the files that README promises. A run's losses stay on
    the screen, below the six lines that it opens with."""
    block = README.partition("## Five commands\n\n```bash\n")[2].partition("```")[0]
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [words[1] for words in commands] == ["init", "plan", "train", "generate", "merge"]
    import peft
    import transformers

    assert peft.LoraConfig, transformers.Trainer  # forked processes need not import them again
    shown = {}
    for program, *words in commands:
        assert program == "blockwalk"
        code, output = terminal.under(partial(main.main, words), seconds=120)
        shown[words[0]] = terminal.screen(output)
        assert code == 0, output
    assert (place / "run.yaml").is_file()
    assert (place / "merged" / "model.safetensors").is_file()
    titles = ["device", "model", "memory", "data", "held out", "saved to"]
    # a plan with a long name, which init chose by what is free here, may take a line more
    opening = [line[:9].rstrip() for line in shown["train"][:8]]
    assert [title for title in opening if title in titles] == titles
    assert any(line.startswith("held out 1 record, ") for line in shown["train"][:7])
    assert any(line.startswith("held-out loss ") for line in shown["train"])
    assert any(re.match(r"step 2/2  loss \d", line) for line in shown["train"]), "it stays"
    assert any(line.startswith("try it ") for line in shown["train"])
    memories = [
        line for name in ("plan", "train") for line in shown[name] if line.startswith("memory ")
    ]
    assert all(" (whole process)" in line for line in memories)
    assert len(memories) == 2
    assert "".join(shown["generate"]).strip()


def test_what_else_is_named_is_there() -> None:
    """Oracle: the repository, and the machines that ship."""
    for path in [
        *re.findall(r"\]\(([^)]+)\)", README),
        *re.findall(r"(benchmarks/\w+\.py)", README),
    ]:
        assert "://" in path or (ROOT / path.partition("#")[0]).exists(), path
    for name in hardware.names():
        assert name not in README or hardware.load(name).device_bytes
