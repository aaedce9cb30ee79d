"""Oracle: llama.cpp (from the package xllamacpp), which must split texts of a written file into the
tokenizer's tokens. Where nothing is written, the exit code, the setting's name, and the folder, in
which nothing is left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from blockwalk.cli import main
from blockwalk.models import gguf_splits
from blockwalk.models.model_source import model_source
from tests.support import llama_cpp
from tests.support.messages import refused, says
from tests.support.versions import needs_gguf

needs_gguf()

TINY = Path(__file__).parents[2] / "examples" / "tiny-llama"
TEXTS = (
    "the th",
    " the  th\n\nIt's 12345 GreenApples!?\r\n x",
    "don't, DON'T",
    "naïve  é\t\tb",
    "100 200\n\n\n3",
)
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    + BLANKS
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+", 1).replace(
    r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split(pattern: str, **changes: Any) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
        **changes,
    }


def steps(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def after(*parts: dict[str, Any]) -> dict[str, Any]:
    return steps(*parts, {**BYTES, "use_regex": False})


def folder_with(path: Path, **changes: Any) -> Path:
    """The example's model with other parts of its tokenizer.json."""
    shutil.copytree(TINY, path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(tokenizer | changes))
    return path


def refusal(folder: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The words with which the command refuses a model, having written nothing."""
    assert main.main(["gguf", str(folder), str(out)]) == 2
    assert not list(out.parent.glob("*.gguf*"))
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "splitting",
    [
        BYTES,
        steps({"type": "Digits", "individual_digits": True}, BYTES),
        after(split(LLAMA3)),
        after(split(QWEN2)),
        after(split(QWEN35)),
    ],
    ids=["gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35"],
)
def test_texts_are_split_as_the_tokenizer_splits_them(
    splitting: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the file is read again."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))

    pytest.importorskip("xllamacpp")
    folder = folder_with(tmp_path / "model", pre_tokenizer=splitting)
    assert main.main(["gguf", str(folder), str(tmp_path / "model.gguf"), "--dtype", "f32"]) == 0
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    again = AutoTokenizer.from_pretrained(model_source(tmp_path / "model.gguf").weights_folder)
    ask = llama_cpp.serve(tmp_path / "model.gguf")
    for text in TEXTS:
        assert (
            llama_cpp.tokens(ask, text) == tokenizer(text)["input_ids"] == again(text)["input_ids"]
        ), text


@pytest.mark.parametrize(
    "splitting",
    [
        after(split(r"\p{L}+|\p{N}{1,3}|[^\s\p{L}\p{N}]+|\s+")),
        after(split(LLAMA3 + "|x")),
        after(split(LLAMA3, behavior="Removed")),
        after(split(LLAMA3, invert=True)),
        after(split(LLAMA3), split(r"\p{N}")),
        steps(split(LLAMA3), BYTES),
        steps({"type": "Digits", "individual_digits": False}, BYTES),
        {**BYTES, "add_prefix_space": True},
        {**BYTES, "use_regex": False},
        {"type": "Whitespace"},
        None,
    ],
)
def test_a_way_to_split_without_a_name_is_refused(
    splitting: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path / "model", pre_tokenizer=splitting)
    says(refusal(folder, tmp_path / "m.gguf", capsys), "llama.cpp text")


def test_a_normalizer_that_gguf_cannot_say_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path / "model", normalizer={"type": "Lowercase"})
    assert "Lowercase" in refusal(folder, tmp_path / "m.gguf", capsys)


def pieces(path: Path, **changes: Any) -> Path:
    """The example's model with a tokenizer of pieces, as Llama 2 has one."""
    shutil.copytree(TINY, path)
    special = ["<unk>", "<s>", "</s>"]
    letters = ["▁", *"abcdehlot", "th", "▁th", "the", "▁the"]
    vocabulary = [*special, *(f"<0x{number:02X}>" for number in range(256)), *letters]
    merges = [["t", "h"], ["▁", "th"], ["th", "e"], ["▁th", "e"]]
    model = {
        "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
        "merges": merges,
        "vocab": {token: number for number, token in enumerate(vocabulary)},
    }  # fmt: skip
    added = [{"id": n, "content": text, "special": True, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False} for n, text in enumerate(special)]  # fmt: skip
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": blank, "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": model, **changes,
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False})
    )
    return path


PREPEND = {"type": "Prepend", "prepend": "▁"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalizer": {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}},
        {"normalizer": None, "pre_tokenizer": METASPACE | {"prepend_scheme": "always"}},
        {"normalizer": None, "pre_tokenizer": METASPACE | {"prepend_scheme": "first"}},
        {"normalizer": None, "pre_tokenizer": METASPACE | {"prepend_scheme": "never"}},
    ],
    ids=["none", "prepend", "always", "first", "never"],
)  # fmt: skip
def test_the_blank_before_a_text_is_the_tokenizers(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the file is read again, llama.cpp's tokens are those of every text."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))

    pytest.importorskip("xllamacpp")
    folder = pieces(tmp_path / "model", **changes)
    assert main.main(["gguf", str(folder), str(tmp_path / "model.gguf"), "--dtype", "f32"]) == 0
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ask = llama_cpp.serve(tmp_path / "model.gguf")
    twice = "pre_tokenizer" not in changes or changes["pre_tokenizer"]["prepend_scheme"] == "never"
    for text in (
        "the",
        "the  the",
        "hello",
        *([" the"] if twice else []),
    ):  # a Metaspace adds no blank to a blank
        assert llama_cpp.tokens(ask, text) == tokenizer(text)["input_ids"], text
    again = AutoTokenizer.from_pretrained(model_source(tmp_path / "model.gguf").weights_folder)
    for text in (*TEXTS, " the", "<s>the</s> the"):
        assert again(text)["input_ids"] == llama_cpp.tokens(ask, text), text
    assert again.decode(again(" the")["input_ids"]) == " the"


@pytest.mark.parametrize(
    ("name", "whole"), [("llama-bpe", True), ("tekken", True), ("dbrx", False), ("gpt-4o", False)]
)
def test_a_word_that_no_merges_make_is_a_token_where_it_is_one_in_llama_cpp(
    name: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf
    from transformers import AutoTokenizer

    pytest.importorskip("xllamacpp")
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    add = gguf.GGUFWriter.add_tokenizer_pre
    written = "llama-bpe" if name == "dbrx" else name
    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_pre", lambda writer, _: add(writer, name))
    folder = folder_with(tmp_path / "model", pre_tokenizer=gguf_splits.pre_tokenizer(name))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    last = max(model["vocab"], key=model["vocab"].get)
    number = model["vocab"].pop(last)
    model["vocab"]["Ġzqx"] = number
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    model["merges"] = [merge for merge in merges if "".join(merge) != last]
    model["ignore_merges"] = written in gguf_splits.WHOLE_WORDS
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main.main(["gguf", str(folder), str(tmp_path / "model.gguf"), "--dtype", "f32"]) == 0
    theirs = llama_cpp.tokens(llama_cpp.serve(tmp_path / "model.gguf"), "a zqx")
    assert (number in theirs) is whole
    assert (
        AutoTokenizer.from_pretrained(model_source(tmp_path / "model.gguf").weights_folder)(
            "a zqx"
        )["input_ids"]
        == theirs
    )
    model["ignore_merges"] = not model["ignore_merges"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main.main(["gguf", str(folder), str(tmp_path / "other.gguf")]) == 2


def test_a_split_of_unknown_name_is_refused_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    add = gguf.GGUFWriter.add_tokenizer_pre
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_tokenizer_pre", lambda writer, _: add(writer, "of-tomorrow")
    )
    folder = folder_with(tmp_path / "model")
    assert main.main(["gguf", str(folder), str(tmp_path / "model.gguf"), "--dtype", "f32"]) == 0
    with refused(ValueError, "model.gguf of-tomorrow tokenizer.ggml.pre"):
        _ = model_source(tmp_path / "model.gguf").weights_folder


def test_pieces_of_changed_text_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pieces(
        tmp_path / "model",
        normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}, REPLACE]},
    )
    says(refusal(folder, tmp_path / "m.gguf", capsys), "NFKC")


def test_more_tokens_than_rows_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    shutil.copytree(TINY, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    tokenizer.save_pretrained(tmp_path / "model")
    error = refusal(tmp_path / "model", tmp_path / "m.gguf", capsys)
    says(error, "1 extra 1024 rows")
    assert "resize_token_embeddings" in error


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("qwen2", {"hidden_act": "relu"}, "hidden_act relu"),
        ("qwen3", {"head_dim": 32, "attention_bias": True}, "attention_bias True"),
        ("mistral", {"sliding_window": 8}, "sliding_window 8 llama.cpp"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
         "sliding_window 8"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
         "linear"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
         "dynamic"),
    ],
)  # fmt: skip
def test_a_setting_that_the_file_cannot_say_is_refused(
    kind: str,
    settings: dict[str, Any],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(TINY, tmp_path / "model")
    sizes = {
        "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **sizes, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    says(refusal(tmp_path / "model", tmp_path / "m.gguf", capsys), words)


@pytest.mark.parametrize("stops", [[2], [2, 5], [2, 5, 7], [5]], ids=str)
def test_every_end_of_generation_is_in_the_file(
    stops: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the folder's generation_config.json, gguf's reader, and the folder that is made of
    the file when it is opened again."""
    import gguf

    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    folder = pieces(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    assert main.main(["gguf", str(folder), str(tmp_path / "m.gguf"), "--dtype", "f32"]) == 0
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    named = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    expected = sorted({2, *stops})  # 2 is the tokenizer's end
    assert sorted(fields[key].contents() for key in named if key in fields) == expected
    again = model_source(str(tmp_path / "m.gguf")).folder / "generation_config.json"
    assert json.loads(again.read_text())["eos_token_id"] == expected


def test_more_ends_than_a_file_can_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pieces(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5, 7, 9]}')
    says(refusal(folder, tmp_path / "m.gguf", capsys), "generation_config.json 3 4 9")


@pytest.mark.parametrize(
    ("single", "ids", "kind"),
    [
        ("<s> <unk> $A", {"<s>": 1, "<unk>": 0}, "bos"),
        ("$A <unk> </s>", {"<unk>": 0, "</s>": 2}, "eos"),
    ],
)
def test_tokens_around_a_text_that_a_file_cannot_name_are_refused(
    single: str, ids: dict[str, int], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, processors

    folder = pieces(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=list(ids.items())
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    says(refusal(folder, tmp_path / "m.gguf", capsys), "tokenizer.json <unk>", kind)
