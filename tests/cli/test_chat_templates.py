"""Oracle: transformers, which loads a folder's tokenizer with its template and writes
conversations; and gguf's own reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from blockwalk.cli import main
from tests.conftest import TinyRun

TURNS = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}{{ mark }} {{ m.content }}{{ eos_token }}{% endfor %}"
)
ASKING = TEMPLATE + "{% if add_generation_prompt %}assistant{{ mark }} {% endif %}"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text((json.dumps({"messages": TURNS}) + "\n") * 4)
    return path


def blockwalk(*words: object) -> int:
    """The exit code of a command."""
    return main.main([str(word) for word in words])


def train(tiny_run: TinyRun, data: Path, out: Path, *more: object) -> int:
    settings = ["--batch_size=2", "--max_steps=2", "--save_every=1", *more]
    places = ["--model", tiny_run.model, "--data.train", data, "--output_dir", out]
    return blockwalk("train", *places, *settings)


def test_a_base_model_learns_chats_and_its_template_goes_along(
    tiny_run: TinyRun, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert train(tiny_run, data, out) == 2
    said = capsys.readouterr().err
    assert "data.chat_template" in said
    assert not out.exists()

    template = tmp_path / "mine.jinja"
    template.write_text(ASKING)
    chat = ["--data.chat_template", template, "--data.chat_template_arguments.mark", "is"]
    assert train(tiny_run, data, out, *chat, "--lora.rank=2") == 0
    said = capsys.readouterr().out
    assert "useris one</s>assistantis ⟦two</s>⟧" in said
    adapter = out / "adapter"
    assert (adapter / "chat_template.jinja").read_text() == ASKING
    assert AutoTokenizer.from_pretrained(adapter).chat_template == ASKING

    generate = ["generate", "--model", tiny_run.model, "--adapter", adapter, "--method=plain"]
    generate += ["--max_new_tokens=3", "--prompt"]
    mark = ["--data.chat_template_arguments", "{mark: is}"]
    capsys.readouterr()
    assert blockwalk(*generate, "one", "--chat", *mark) == 0
    with_template = capsys.readouterr().out
    assert blockwalk(*generate, "useris one</s>assistantis ") == 0
    assert with_template == capsys.readouterr().out

    merged = tmp_path / "merged"
    assert blockwalk("merge", tiny_run.model, adapter, merged) == 0
    assert AutoTokenizer.from_pretrained(merged).chat_template == ASKING

    gguf = pytest.importorskip("gguf")
    assert blockwalk("gguf", merged, tmp_path / "m.gguf") == 0
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == ASKING


@pytest.mark.parametrize("lora", ["2", ""])
def test_what_was_trained_needs_the_file_of_its_template_no_more(
    tiny_run: TinyRun, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lora: str
) -> None:
    out = tmp_path / "run"
    template = tmp_path / "mine.jinja"
    template.write_text(ASKING)
    adapters = ["--lora.rank", lora] if lora else ["--lora", "false"]
    settings = ["--method=plain", "--data.chat_template", template, *adapters]
    assert train(tiny_run, data, out, *settings) == 0
    generate = ["generate", out, "--chat", "--prompt=one", "--max_new_tokens=3"]
    capsys.readouterr()
    assert blockwalk(*generate) == 0
    answer = capsys.readouterr().out
    template.unlink()
    assert blockwalk(*generate) == 0
    assert capsys.readouterr().out == answer


@pytest.mark.parametrize("change", ["file", "name"])
def test_a_run_does_not_go_on_with_another_template(
    tiny_run: TinyRun, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    out = tmp_path / "run"
    template = tmp_path / "mine.jinja"
    template.write_text(ASKING)
    plain = ["--method=plain", "--data.chat_template"]
    assert train(tiny_run, data, out, *plain, template) == 0
    template.write_text(ASKING.replace("eos_token", "'!'"))
    name = template if change == "file" else "chatml"
    capsys.readouterr()
    more = ["--resume_from_checkpoint=latest", "--max_steps=3"]
    assert train(tiny_run, data, out, *plain, name, *more) == 2
    assert "the chat template" in capsys.readouterr().err


def test_a_turn_ends_where_generation_stops(
    tiny_run: TinyRun, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer of bytes has no ``<|im_end|>``: its end of text is learnt in that place, and a
    note says so."""
    settings = ["--data.chat_template=chatml", "--method=plain", "--dry-run"]
    assert train(tiny_run, data, tmp_path / "run", *settings) == 0
    said = capsys.readouterr().out
    assert "⟦two</s>⟧" in said
    assert "data.chat_template: chatml" in said
    assert "without an end" not in said
