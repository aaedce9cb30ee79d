"""Oracle: transformers: its own greedy generation, its loading of a folder's templates, and its
split of Mistral's texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from blockwalk.cli import main
from tests.conftest import TinyRun
from tests.support.messages import says

TURN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<s>{% endfor %}"
TEMPLATE = TURN + "{% if add_generation_prompt %}assistant: {% endif %}"
"""A template that ends turns with a token at which the tiny model's generation does not stop."""
TURNS = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


@pytest.fixture
def model(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """A copy of the tiny model that has the template."""
    folder = tmp_path / "m"
    shutil.copytree(tiny_run.model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _changed_tokenizer(folder: Path, **changes: Any) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _stops(folder: Path) -> Any:
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


def test_the_learnt_end_of_a_turn_stops_generation_and_is_merged(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"messages": TURNS}) + "\n")
    run = ["--model", str(model), "--method", "plain", "--output_dir", str(tmp_path / "run")]
    settings = [
        "--data.train",
        str(data),
        "--batch_size",
        "1",
        "--max_steps",
        "1",
        "--lora.rank",
        "2",
    ]
    assert main.main(["train", *run, *settings]) == 0
    said = capsys.readouterr()
    says(said.out + said.err, "<s> </s>")
    adapter = tmp_path / "run" / "adapter"
    merged = tmp_path / "merged"
    assert _stops(adapter) == [1, 0]
    assert main.main(["merge", str(model), str(adapter), str(merged)]) == 0
    assert _stops(merged) == [1, 0]

    ids = AutoTokenizer.from_pretrained(model)("fresh", return_tensors="pt")
    loaded = AutoModelForCausalLM.from_pretrained(merged)
    whole = loaded.generate(**ids, max_new_tokens=9, do_sample=False)[0]
    (adapter / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, whole[-4].item()]})
    )
    until = loaded.generate(
        **ids, max_new_tokens=9, do_sample=False, eos_token_id=[1, whole[-4].item()]
    )[0]
    assert len(until) < len(whole)
    capsys.readouterr()
    asked = [
        "--model",
        str(model),
        "--method",
        "plain",
        "--adapter",
        str(adapter),
        "--raw",
        "--prompt",
        "fresh",
    ]
    assert main.main(["generate", *asked, "--max_new_tokens", "9"]) == 0
    text = AutoTokenizer.from_pretrained(model).decode(
        until[ids["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert capsys.readouterr().out == text + "\n"


def _trained(model: Path, folder: Path, record: dict[str, Any], *settings: str) -> Path:
    folder.mkdir()
    data = folder / "data.jsonl"
    data.write_text((json.dumps(record) + "\n") * 2)
    run = folder / "run"
    named = ["--model", str(model), "--method", "plain", "--output_dir", str(run)]
    steps = ["--data.train", str(data), "--batch_size", "1", "--max_steps", "1"]
    assert main.main(["train", *named, *steps, "--lora.rank", "2", *settings]) == 0
    return run


def test_a_prompt_is_asked_as_the_run_has_learnt(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the same command with --chat, and with --raw; by the mark of the weights, and without
    it by the data."""

    def asked(*arguments: str) -> tuple[str, str]:
        capsys.readouterr()
        ask = ["generate", *arguments, "--prompt", "fresh. It was", "--max_new_tokens", "9"]
        assert main.main(ask) == 0
        said = capsys.readouterr()
        return said.out, said.err

    chats = str(_trained(model, tmp_path / "chats", {"messages": TURNS}))
    out, error = asked(chats)
    says(error, "conversations --raw")
    assert out == asked(chats, "--chat")[0]
    raw, error = asked(chats, "--raw")
    assert raw != out
    assert "conversations" not in error
    (tmp_path / "chats" / "run" / "adapter" / ".blockwalk").unlink()
    assert asked(chats)[0] == out

    texts = str(_trained(model, tmp_path / "texts", {"text": "one two"}))
    out, error = asked(texts)
    assert out == asked(texts, "--raw")[0]
    assert "conversations" not in error
    (tmp_path / "texts" / "run" / "adapter" / ".blockwalk").unlink()
    assert asked(texts)[0] == out

    template = ("--data.template", "{text} It was {label}.", "--data.label_words", "[bad, good]")
    words = _trained(model, tmp_path / "words", {"text": "a", "label": 1}, *template)
    says(asked(str(words))[1], "data.template layout")

    out, error = asked("--model", str(model), "--method", "plain")
    says(error, "--chat template")
    for other in ("--chat", "--system=s", "--messages=x.json"):
        assert main.main(["generate", chats, "--raw", "--prompt", "a", other]) == 2
        says(capsys.readouterr().err, "--raw --chat --messages")


def test_a_prompt_that_begins_with_the_begin_token_gets_no_second(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import processors
    from transformers import AutoModelForCausalLM, AutoTokenizer

    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    _changed_tokenizer(model, post_processor=json.loads(begin.__getstate__()))
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("fresh", return_tensors="pt")
    assert ids["input_ids"][0, 0] == 0
    whole = AutoModelForCausalLM.from_pretrained(model).generate(
        **ids, max_new_tokens=9, do_sample=False
    )[0]
    text = tokenizer.decode(whole[ids["input_ids"].shape[1] :], skip_special_tokens=True)
    for prompt in ("fresh", "<s>fresh"):
        asked = [
            "--model",
            str(model),
            "--method",
            "plain",
            "--prompt",
            prompt,
            "--max_new_tokens",
            "9",
        ]
        assert main.main(["generate", *asked]) == 0
        assert capsys.readouterr().out == text + "\n"


def test_a_token_without_a_row_is_refused_by_every_command(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = len(tokenizer)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(model)
    data = tmp_path / "x.jsonl"
    data.write_text('{"text": "a"}\n{"text": "a<new>"}\n')
    run = ["--model", str(model), "--method", "plain"]
    for command, where in (
        (
            [
                "train",
                *run,
                "--data.train",
                str(data),
                "--output_dir",
                str(tmp_path / "r"),
                "--dry-run",
            ],
            f"{data} line 2",
        ),
        (["eval", *run, "--data.eval", str(data)], f"{data} line 2"),
        (["generate", *run, "--prompt", "a<new>"], "prompt"),
    ):
        assert main.main(command) == 2
        said = capsys.readouterr()
        says(said.out + said.err, f"{where} <new> {rows}")


def test_further_templates_come_with_a_merged_model(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from blockwalk.tiers.block_store.writer import copy_model_files

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "{{ messages[0].content }}"}
    tokenizer.save_pretrained(model)
    (tmp_path / "out").mkdir()
    copy_model_files(model, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template


def test_the_pattern_of_mistral_is_mended(tmp_path: Path) -> None:
    """transformers mends a vocabulary above 100,000 tokens whose configuration is of a version up
    to 4.57."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer

    from blockwalk.data.tokenizer import load_tokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<unk>", "<s>", "</s>", *letters, *(f"filler{number}" for number in range(100_100))]
    backend = Tokenizer(
        models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>")
    )
    split = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "isolated"), level]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    model = {"model_type": "mistral", "transformers_version": "4.50.0", "vocab_size": len(names)}
    (tmp_path / "config.json").write_text(json.dumps(model))
    text = "GreenApples 12345"

    def pieces(tokenizer: Any) -> list[str]:
        return [
            piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        ]

    mended = pieces(AutoTokenizer.from_pretrained(tmp_path, fix_mistral_regex=True))
    assert mended != pieces(AutoTokenizer.from_pretrained(tmp_path))
    assert pieces(load_tokenizer(tmp_path)) == mended
