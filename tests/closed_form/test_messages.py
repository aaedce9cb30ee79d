"""Oracle: the name of the file, the place, the setting and the way out that a message must hold,
written out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockwalk.cutting.saved_adapters import load_adapter
from blockwalk.cutting.skeleton import load_config
from blockwalk.data.corpus import held_out_set, training_set
from blockwalk.data.encode import encode
from blockwalk.data.records import Record
from blockwalk.data.sources import read_records
from blockwalk.data.tokenizer import load_tokenizer
from blockwalk.models import gguf
from blockwalk.models.model_source import model_source
from blockwalk.plan.run_config import DataSettings
from blockwalk.tiers.model_folder import safetensors, torch_file
from tests.support.chat_tokenizers import PLAIN, chat, tokenizer
from tests.support.messages import refused

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
CONFIG = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}


def _adapter(path: Path) -> None:
    config = {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (path.parent / "adapter_config.json").write_text(json.dumps(config))
    load_adapter(None, path.parent)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.safetensors", safetensors.read_header),
        ("pytorch_model.bin", torch_file.read_header),
        ("model.gguf", gguf.read_header),
        ("config.json", lambda path: load_config(path.parent)),
        ("config.json", lambda path: model_source(path.parent).quantisation),
        ("model.safetensors.index.json", lambda path: model_source(path.parent).require_weights()),
        ("tokenizer.json", lambda path: load_tokenizer(path.parent)),
        ("tokenizer_config.json", lambda path: load_tokenizer(path.parent)),
        ("adapter_model.safetensors", _adapter),
        *(
            (f"train{suffix}", lambda path: list(read_records(path)))
            for suffix in (".jsonl", ".csv", ".txt", ".parquet")
        ),
    ],
)
def test_a_pointer_of_git_lfs_is_called_one(
    tmp_path: Path, name: str, read: Callable[[Path], Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_text(POINTER)
    with refused(ValueError, f"{name} git-lfs pull"):
        read(tmp_path / name)


def test_code_of_a_model_is_said_never_to_run(tmp_path: Path) -> None:
    auto_map = {"auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", **auto_map}))
    with refused(ValueError, "code") as refusal:
        load_config(tmp_path)
    assert "trust_remote_code" not in str(refusal.value)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", **auto_map})
    )
    with refused(ValueError, "code tokenizer.json") as refusal:
        load_tokenizer(tmp_path)
    assert "trust_remote_code" not in str(refusal.value)


@pytest.mark.parametrize(("name", "suffix"), [("model", "safetensors"), ("pytorch_model", "bin")])
def test_parts_without_their_index_are_named(tmp_path: Path, name: str, suffix: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for number in (1, 2):
        (tmp_path / f"{name}-0000{number}-of-00002.{suffix}").write_bytes(b"")
    with refused(ValueError, f"{name}-00001-of-00002.{suffix} 1 {name}.{suffix}.index.json"):
        model_source(tmp_path).require_weights()


def test_a_source_without_records_is_named_with_its_setting(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    full = tmp_path / "full.jsonl"
    full.write_text('{"text": "one"}\n')
    none = tmp_path / "none.jsonl"
    none.write_text('{"text": ""}\n')
    tokens = tokenizer(PLAIN)
    with refused(ValueError, "empty.jsonl data.train empty"):
        training_set(DataSettings(train=(str(full), str(empty))), tokens)
    with refused(ValueError, "none.jsonl data.train 1 token"):
        training_set(DataSettings(train=str(none)), tokens)
    with refused(ValueError, "empty.jsonl data.eval"):
        held_out_set(DataSettings(train=str(full), eval=str(empty)), tokens, 0)
    with refused(ValueError, "none.jsonl data.eval 1"):
        held_out_set(DataSettings(train=str(full), eval=str(none)), tokens, 0)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".jsonl", '{"text": "one"}\n{"text": "é"}\n'),
        (".json", '[{"text": "é"}]'),
        (".csv", "text\né\n"),
    ],
)
def test_text_in_another_encoding_names_the_file_and_the_way_out(
    tmp_path: Path, encoding: str, suffix: str, text: str
) -> None:
    file = tmp_path / f"train{suffix}"
    file.write_bytes(text.encode(encoding))
    with refused(ValueError, f"train{suffix} UTF-8"):
        list(read_records(file))
    if (suffix, encoding) == (".jsonl", "latin-1"):
        with refused(ValueError, "train.jsonl 2 UTF-8"):
            list(read_records(file))


@pytest.mark.parametrize("content", ['{"config": {"pattern": "a"}', '{"vocab": []}', "{}"])
def test_a_tokenizer_that_is_cut_off_is_refused_in_a_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "mistral"}))
    (tmp_path / "tekken.json").write_text(content)
    with refused(ValueError, "tokenizer tekken.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with refused(ValueError, "tokenizer tokenizer.json tekken.json"):
        load_tokenizer(tmp_path)


def test_a_note_says_where_most_answers_lose_their_end() -> None:
    records = [Record(chat("long answer"), f"x line {number}") for number in range(3)]
    tokens = tokenizer(PLAIN)
    whole = encode(records, tokens, max_length=None).report.longest
    notes = encode(records, tokens, max_length=whole - 2).report.warnings()
    assert notes[1].startswith("3 of 3 records, more than half, lose the end of what is learnt")
    assert f"Set data.max_length to {whole}" in notes[1]
    records += [Record(chat("a"), f"x line {number}") for number in range(4)]
    assert len(encode(records, tokens, max_length=whole - 2).report.warnings()) == 1


def test_a_missing_chat_template_names_what_does_work() -> None:
    with refused(ValueError, "data.chat_template"):
        encode([Record(chat("two"), "x")], tokenizer(""), max_length=None)
