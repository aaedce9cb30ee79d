"""Oracle: the texts that records become, written out by hand; numbers of records, counted; and
docs/data.md's examples."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from blockwalk.cli import main
from blockwalk.data.corpus import eval_numbers, held_out_set, training_set
from blockwalk.data.dataset import Encoded
from blockwalk.plan.data_source import Source
from blockwalk.plan.run_config import DataSettings
from blockwalk.train import config
from tests.conftest import TinyRun
from tests.support import data_files
from tests.support.chat_data import TEMPLATE, said
from tests.support.data_files import jsonl
from tests.support.messages import refused

tokenizer = data_files.tokenizer
DOCS = Path(__file__).parents[2] / "docs" / "data.md"
BOTH = "I {instruction} {{x}}\nIn {input}\nR "
ALONE = "I {instruction}\nR "


def texts(settings: DataSettings, tokenizer: Any, *, seed: int = 0) -> list[tuple[str, str]]:
    """Every training record as text, and the part of it that is learnt."""
    rows = training_set(settings, tokenizer, seed=seed)
    assert isinstance(rows, Encoded)
    pairs = [rows[i] for i in range(len(rows))]
    return [
        (tokenizer.decode(ids).removeprefix("<s>"), tokenizer.decode(ids[in_loss]))
        for ids, in_loss in pairs
    ]


@pytest.mark.parametrize("names", [("question", "answer"), ("query", "response")])
def test_a_question_and_its_answer_are_a_conversation(
    tokenizer: Any, names: tuple[str, str]
) -> None:
    question, answer = names
    fields = {question: "two and two?", answer: "four", "system": "count"}
    assert said(fields, tokenizer) == ("<s>count\ntwo and two?\nfour</s>", "four</s>")
    tokenizer.chat_template = TEMPLATE
    try:
        assert said(fields, tokenizer)[0] == "<system>count<user>two and two?<assistant>four</s>"
    finally:
        tokenizer.chat_template = None


def test_a_prompt_holds_columns_and_the_answer_alone_is_learnt(
    tokenizer: Any, tmp_path: Path
) -> None:
    path = jsonl(
        tmp_path / "a.jsonl",
        {"instruction": "add", "input": "1 {2}", "output": "3"},
        {"instruction": "greet", "input": "", "output": "hi"},
    )
    two = DataSettings(train=str(path), prompt=(BOTH, ALONE))
    assert texts(two, tokenizer) == [
        ("I add {x}\nIn 1 {2}\nR 3</s>", "3</s>"),
        ("I greet\nR hi</s>", "hi</s>"),
    ]
    one = DataSettings(train=str(path), prompt=(BOTH,))
    assert texts(one, tokenizer)[1][0] == "I greet {x}\nIn \nR hi</s>"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("I {task}\n", ["'task'", "'instruction'", "line 1"]),
        ("{instruction}{output}", ["{output}", "line 1"]),
        ("no column", ["data.prompt"]),
        ("{instruction", ["data.prompt"]),
        ("{instruction!r}", ["data.prompt"]),
    ],
)
def test_a_prompt_that_cannot_be_filled_is_refused_before_any_work(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    prompt: str,
    words: list[str],
) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"instruction": "add", "output": "3"})
    out = tmp_path / "run"
    where = ["--model", str(tiny_run.model), "--output_dir", str(out), "--method", "plain"]
    assert main.main(["train", *where, "--data.train", str(path), "--data.prompt", prompt]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ["data.prompt", *words])
    assert not out.exists()


def test_each_source_has_settings_of_its_own(tokenizer: Any, tmp_path: Path) -> None:
    first = jsonl(tmp_path / "a.jsonl", {"text": "plain"})
    second = jsonl(tmp_path / "b.jsonl", {"q": "two?", "a": "2"}, {"q": "one?", "a": "1"})
    third = jsonl(tmp_path / "c.jsonl", {"instruction": "go", "output": "gone"})
    raw = {
        "data": {
            "train": [
                str(first),
                {"path": str(second), "columns": {"prompt": "q", "completion": "a"}},
                {"path": str(third), "prompt": "> {instruction} "},
            ]
        }
    }
    run = config.from_mapping(raw)
    learnt = [
        ("plain</s>", "plain</s>"),
        ("two?2</s>", "2</s>"),
        ("one?1</s>", "1</s>"),
        ("> go gone</s>", "gone</s>"),
    ]
    assert texts(run.data, tokenizer) == learnt
    assert config.from_mapping(yaml.safe_load(config.dump(run))) == run


def test_weights_beside_sources_are_those_of_one_list(tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    paths = [
        str(jsonl(tmp_path / f"{n}.jsonl", *({"text": f"{n}{i}"} for i in range(9)))) for n in "ab"
    ]
    apart = DataSettings(train=(paths[0], Source(paths[1], weight=3)))
    listed = DataSettings(train=tuple(paths), weights=(1, 3))
    assert texts(apart, tokenizer, seed=5) == texts(listed, tokenizer, seed=5)
    with refused(ValueError, "data.weights"):
        DataSettings(train=(Source(paths[0], weight=3),), weights=(1.0,))


@pytest.mark.parametrize(
    "source", [{"weight": 2}, {"path": "a.jsonl", "colums": {}}, {"path": "a.jsonl", "weight": "x"}]
)
def test_a_source_that_makes_no_sense_is_refused(source: dict[str, Any]) -> None:
    with refused(ValueError, "data.train"):
        config.from_mapping({"data": {"train": [source]}})


def test_a_share_is_held_out_and_never_trained_on(tokenizer: Any, tmp_path: Path) -> None:
    paths = [
        str(jsonl(tmp_path / f"{n}.jsonl", *({"text": f"{n}{i}"} for i in range(20)))) for n in "ab"
    ]
    settings = DataSettings(train=tuple(paths), eval_share=0.1)
    everything = {f"{n}{i}</s>" for n in "ab" for i in range(20)}
    shares = []
    for seed in (0, 1):
        held_out, count = held_out_set(settings, tokenizer, 0, seed)
        assert isinstance(held_out, Encoded)
        out = {tokenizer.decode(held_out[i][0]).removeprefix("<s>") for i in range(len(held_out))}
        trained = [text for text, _ in texts(settings, tokenizer, seed=seed)]
        assert count == len(out) == 4
        assert len(trained) == 36
        assert out | set(trained) == everything
        assert eval_numbers(settings, seed) == eval_numbers(settings, seed)
        shares.append(out)
    assert shares[0] != shares[1]
    alone = jsonl(tmp_path / "one.jsonl", {"text": "x"})
    with refused(ValueError, "data.eval_share 1"):
        training_set(DataSettings(train=str(alone), eval_share=0.5), tokenizer)


@pytest.mark.parametrize(
    "settings",
    [
        {"eval": "x"},
        {"task": "sst2"},
        {"eval_share": 1.0},
        {"shots": 2, "template": "{text} {label}", "label_words": ["bad", "good"]},
    ],
)
def test_two_ways_to_hold_out_are_refused(settings: dict[str, Any]) -> None:
    with refused(ValueError, "data.eval_share"):
        config.from_mapping({"data": {"train": "a.jsonl", "eval_share": 0.5, **settings}})


def test_the_examples_of_the_docs_run(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A folder stands in the place of the hub's data set, whose columns are question and answer."""
    pytest.importorskip("datasets")
    examples = [
        block
        for block in re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.S)
        if "train:" in block
    ]
    assert len(examples) == 2
    monkeypatch.chdir(tmp_path)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    Path("chats.json").write_text(json.dumps([{"messages": turns}] * 12))
    jsonl(tmp_path / "chats.jsonl", *([{"messages": turns}] * 12))
    Path("openai/gsm8k").mkdir(parents=True)
    jsonl(
        tmp_path / "openai/gsm8k/main.jsonl",
        *({"question": f"{i}?", "answer": "2"} for i in range(12)),
    )
    for number, example in enumerate(examples):
        Path("run.yaml").write_text(example)
        flags = [
            "--model",
            str(tiny_run.model),
            "--method",
            "plain",
            "--output_dir",
            f"run{number}",
            "--max_steps",
            "1",
        ]
        template = [] if "chat_template" in example else ["--data.chat_template", "chatml"]
        assert main.main(["train", "run.yaml", *flags, *template]) == 0
    assert "held-out loss" in capsys.readouterr().out
