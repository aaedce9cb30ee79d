"""Oracle: the generator. The shipped data files against those made anew from their seeds, and the
promises made of them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from blockwalk.data.encode import encode, encode_choices
from blockwalk.data.records import Template
from blockwalk.data.sources import read_records
from blockwalk.data.tokenizer import load_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
DATA = EXAMPLES / "data"
TEMPLATE = Template("{text} It was {label}.", ("terrible", "great"))


def load(name: str) -> Any:
    """A script of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build() -> Any:
    load("tiny_language")
    return load("build_tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(EXAMPLES / "tiny-llama")


def rows(name: str) -> list[dict[str, Any]]:
    return [record.fields for record in read_records(DATA / f"{name}.jsonl")]


def test_data_files_come_out_again_from_their_seeds(build: Any, tmp_path: Path) -> None:
    build.write_data(tmp_path)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(path.name for path in DATA.iterdir())
    for name in made:
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes(), name


def test_tokenizer_comes_out_again_from_its_seed(build: Any) -> None:
    made = json.loads(build.build_tokenizer(build.tokenizer_documents()).backend_tokenizer.to_str())
    shipped = json.loads((EXAMPLES / "tiny-llama" / "tokenizer.json").read_text())
    assert made["model"]["vocab"] == shipped["model"]["vocab"]
    assert made["model"]["merges"] == shipped["model"]["merges"]


def test_held_out_records_are_not_in_the_training_files(build: Any) -> None:
    visits = [{row["text"] for row in rows(f"sentiment_{part}")} for part in ("train", "heldout")]
    assert not visits[0] & visits[1]
    assert [len(each) for each in visits] == [1000, 400]
    cards = [
        {row["messages"][1]["content"] for row in rows(f"cards_{part}")}
        for part in ("train", "heldout")
    ]
    assert not cards[0] & cards[1]
    assert len(cards[0] | cards[1]) == len(sys.modules["tiny_language"].CREATURES)


def test_the_two_classes_are_balanced() -> None:
    for part in ("train", "heldout"):
        labels = [row["label"] for row in rows(f"sentiment_{part}")]
        assert sum(labels) * 2 == len(labels)


def test_label_words_are_single_tokens_and_nothing_is_cut(tokenizer: Any) -> None:
    choices = encode_choices(
        read_records(DATA / "sentiment_heldout.jsonl"), tokenizer, TEMPLATE, max_length=64
    )
    assert choices.rows.report.warnings() == []
    assert choices.rows.in_loss.sum() == 2 * len(choices)
    words = {
        tokenizer.decode(ids[mask])
        for ids, mask in (choices.rows[i] for i in range(len(choices.rows)))
    }
    assert words == {" terrible", " great"}


def test_cards_are_what_the_chat_template_marks(tokenizer: Any) -> None:
    """transformers' own assistant mask, from the marks in the shipped template."""
    encoded = encode(read_records(DATA / "cards_train.jsonl"), tokenizer, max_length=64)
    for index, row in enumerate(rows("cards_train")):
        theirs = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        assert encoded[index][0].tolist() == theirs["input_ids"]
        assert encoded[index][1].astype(int).tolist() == theirs["assistant_masks"]


def test_what_is_shipped_is_small() -> None:
    sizes = {
        folder: sum(path.stat().st_size for path in (EXAMPLES / folder).rglob("*"))
        for folder in ("data", "tiny-llama")
    }
    assert sizes["data"] < 2e6
    assert sizes["tiny-llama"] < 6e6
