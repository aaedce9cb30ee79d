"""Oracle: the text of a layout, written out by hand, and greedy answers to it; commands pasted from
errors."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import blockwalk
from blockwalk.cli import main
from blockwalk.data.prompt_layout import example, filled
from blockwalk.plan.data_source import Source
from blockwalk.plan.run_config import DataSettings
from tests.conftest import TinyRun


def trained(tiny_run: TinyRun, folder: Path, **data: Any) -> Any:
    records = folder / "pairs.jsonl"
    records.write_text(
        (json.dumps({"instruction": "hi", "input": "you", "output": "ho"}) + "\n") * 8
    )
    named = {
        "model": str(tiny_run.model),
        "data": {"train": str(records), **data},
        "output_dir": str(folder / "run"),
    }
    return blockwalk.train(
        {**named, "batch_size": 4, "max_steps": 1, "method": "plain", "lora": {"rank": 2}}
    )


def test_a_prompt_is_put_into_the_layout_that_was_learnt(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = trained(
        tiny_run, tmp_path, prompt=["Q: {instruction} with {input}\nA: ", "Q: {instruction}\nA: "]
    )
    run = str(tmp_path / "run")
    assert shlex.split(outcome.next_command) == ["blockwalk", "generate", run, "--prompt", "Hello"]
    capsys.readouterr()
    ask = ["generate", run, "--max_new_tokens", "6", "--prompt"]
    assert main.main([*ask, "hi"]) == 0
    short = capsys.readouterr()
    assert repr("Q: hi\nA: ") in short.err
    assert main.main([*ask, "Q: hi\nA: "]) == 0
    long = capsys.readouterr()
    assert long.out == short.out
    assert "layout" not in long.err
    plain = ["generate", "--model", str(tiny_run.model), "--adapter", run, "--method", "plain"]
    assert main.main([*plain, "--max_new_tokens", "6", "--prompt", "Q: hi\nA: "]) == 0
    assert capsys.readouterr().out == short.out
    assert main.main([*ask, "hi", "--chat", "--data.chat_template", "chatml"]) == 0
    assert "learns no conversation" in capsys.readouterr().err
    assert main.main([*ask, "hi", "--data.prompt", "Q: {instruction} with {input}"]) == 0
    assert "write the prompt in that layout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ({"prompt": "{q}\nA:"}, "why?", "why?\nA:"),
        ({"prompt": "{q}\nA:"}, "why?\nA:", "why?\nA:"),
        ({"prompt": "{q} or {q}?"}, "x", "x or x?"),
        ({"prompt": "{{{q}}}"}, "x", "{x}"),
        ({"prompt": "{q} and {r}"}, "x", None),
        ({"prompt": ["{q}", "Q {q}"]}, "x", None),
        ({"train": (Source("a", prompt=("A {q}",)), "b")}, "x", "A x"),
    ],
)
def test_one_column_is_filled(settings: dict[str, Any], text: str, expected: str | None) -> None:
    assert filled(DataSettings(**settings), text) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "Hello"),
        ({"prompt": "{q}\nA:"}, "Hello"),
        ({"prompt": "{q} and {r}:"}, "Hello and Hello:"),
        ({"prompt": "{q}\n{r}:"}, None),
        ({"template": "{text} It was {label}.", "label_words": ("good", "bad")}, "Hello It was"),
        ({"template": "{text}\n{label}", "label_words": ("good", "bad")}, None),
        ({"task": "sst2"}, None),
    ],
)
def test_what_is_tried_fits_what_was_learnt(settings: dict[str, Any], expected: str | None) -> None:
    assert example(DataSettings(**settings), "Hello") == expected


def test_a_run_in_place_of_a_model_is_told_how_to_merge(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the command in the error, pasted, which writes the model."""
    trained(tiny_run, tmp_path, prompt="Q: {instruction}\nA: ")
    run = str(tmp_path / "run")
    out = str(tmp_path / "merged")
    capsys.readouterr()
    for given in (
        ["merge", str(tiny_run.model), run],
        ["merge", run],
        ["gguf", run, out],
    ):
        assert main.main(given) == 2
        error = capsys.readouterr().err
        found = re.search(r"blockwalk (merge .*?)(;|$)", error.strip())
        assert found, error
        command = shlex.split(found[1])
        assert command[:3] == ["merge", str(tiny_run.model), run]
    assert main.main(["merge", str(tiny_run.model), run, out]) == 0
    short = str(tmp_path / "short")
    assert main.main(["merge", run, short]) == 0
    files = ("model.safetensors", "config.json")
    assert all(Path(out, name).read_bytes() == Path(short, name).read_bytes() for name in files)
    capsys.readouterr()
    assert main.main(["merge", out, "elsewhere"]) == 2
    assert "blockwalk merge MODEL RUN OUT" in capsys.readouterr().err
