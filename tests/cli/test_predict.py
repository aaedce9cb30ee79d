"""Oracle: transformers and PEFT: log-probabilities of each label word behind the prompt, by the
whole model in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockwalk.cli import main
from tests.conftest import TinyRun
from tests.support.messages import says

WORDS = ("good", "bad")


@pytest.fixture(scope="module")
def trained(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps with label words."""
    folder = tmp_path_factory.mktemp("words") / "run"
    flags = ["--method", "plain", "--lora.rank", "2", "--max_steps", "4"]
    rate = ["--optimizer.learning_rate", "0.01"]
    assert main.main(["train", *tiny_run.arguments(folder), *flags, *rate]) == 0
    return folder


def answers(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """The lines that the command prints."""
    capsys.readouterr()
    assert main.main(["predict", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def expected(tiny_run: TinyRun, run: Path, text: str, *, mean: bool) -> list[float]:
    """The shares of the two words, of all logits at once."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    base = AutoModelForCausalLM.from_pretrained(tiny_run.model)
    model = PeftModel.from_pretrained(base, str(run / "adapter")).eval()
    scores = []
    for word in WORDS:
        prompt = tokenizer(f"{text} It was").input_ids
        answer = tokenizer(f" {word}").input_ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
        logs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        values = logs[torch.arange(len(answer)), torch.tensor(answer)]
        scores.append(float(values.mean() if mean else values.sum()))
    return torch.tensor(scores).softmax(0).tolist()


def test_the_probabilities_are_those_of_the_whole_model(
    tiny_run: TinyRun, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["fresh.", "rude.", "warm and dirty."]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    lines = answers(capsys, str(trained), str(file))
    assert [line["record"] for line in lines] == [{"text": text} for text in texts]
    for text, line in zip(texts, lines, strict=True):
        shares = expected(tiny_run, trained, text, mean=True)
        assert list(line["probabilities"].values()) == pytest.approx(shares, abs=1e-4)
        assert line["label"] == WORDS[shares.index(max(shares))]
        assert line["probability"] == max(line["probabilities"].values())
    (line,) = answers(capsys, str(trained), "--text", texts[2], "--data.label_scores", "sum")
    shares = expected(tiny_run, trained, texts[2], mean=False)
    assert list(line["probabilities"].values()) == pytest.approx(shares, abs=1e-4)


def test_a_label_in_the_file_plays_no_part(
    tiny_run: TinyRun, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the same text without its label, and the accuracy that eval prints."""
    lines = answers(capsys, str(trained), str(tiny_run.eval))
    records = [json.loads(line) for line in tiny_run.eval.read_text().splitlines()]
    right = sum(
        line["label"] == record["label"] for line, record in zip(lines, records, strict=True)
    )
    bare = tmp_path / "bare.jsonl"
    bare.write_text("".join(json.dumps({"text": record["text"]}) + "\n" for record in records))
    labels = [line["label"] for line in answers(capsys, str(trained), str(bare))]
    assert labels == [line["label"] for line in lines]
    assert main.main(["eval", str(trained), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(right / len(records))


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ([], "--text"),
        (["--text", "a", "FILE"], "--text"),
        (["--text", "a", "--data.template", "{text} {more} {label}"], "text more --text"),
        (["FILE", "--data.template", "{title} {label}"], "title FILE"),
        (["FILE", "--data.shots", "2"], "data.shots 2"),
        (["FILE", "--data.template", "", "--data.label_words", ""], "data.template"),
    ],
)
def test_what_cannot_be_ranked_is_refused(
    words: list[str],
    facts: str,
    trained: Path,
    tiny_run: TinyRun,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [str(tiny_run.eval) if word == "FILE" else word for word in words]
    assert main.main(["predict", str(trained), *arguments]) == 2
    says(capsys.readouterr().err, facts.replace("FILE", str(tiny_run.eval)))
