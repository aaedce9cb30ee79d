"""Oracle: closed forms. Orders against the definition of a permutation, masks and cuts against rows
written by hand."""

from __future__ import annotations

import copy
import json
import math
import os
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from blockwalk.checkpoints import run_checkpoint, sweeping
from blockwalk.data import encode as data_encode
from blockwalk.data.batch import Batch, loss_tokens, micro_batches
from blockwalk.data.batching import Batches, by_length, epoch_order
from blockwalk.data.dataset import Encoded
from blockwalk.data.encode import encode, encode_choices
from blockwalk.data.formats import Format, detect_format
from blockwalk.data.label_words import label_word_batch, row_losses
from blockwalk.data.packing import pack_parts
from blockwalk.data.records import Record, Template
from blockwalk.data.row_batch import collate, share, token_counts
from blockwalk.data.sources import read_records
from blockwalk.data.tokenizer import load_tokenizer
from blockwalk.estimators.zeroth_order.objectives import ranked
from blockwalk.train import config
from blockwalk.train.evaluation import HeldOut
from blockwalk.train.prepared_run import read_training_rows
from tests.support import data_files
from tests.support.data_files import jsonl
from tests.support.messages import refused, says

tokenizer = data_files.tokenizer

PAD = 0


END = 2


def rows_of(lengths: list[int]) -> Encoded:
    """Example i holds the token 10 + i, ``lengths[i]`` times, all but the first learnt."""
    return Encoded(
        np.concatenate([np.full(n, 10 + i, dtype=np.int32) for i, n in enumerate(lengths)]),
        np.concatenate([np.arange(n) > 0 for n in lengths]),
        np.cumsum([0, *lengths]),
        PAD,
    )


def learnt(encoded: Encoded, tokenizer: Any, index: int = 0) -> tuple[str, str]:
    """A row as text, and the part of it that is learnt."""
    ids, mask = encoded[index]
    return tokenizer.decode(ids), tokenizer.decode(ids[mask])


def equal(a: Batch, b: Batch) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- order
# --------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 300), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_epoch_order_is_a_permutation_and_a_function_of_seed_and_epoch(
    count: int, seed: int, epoch: int
) -> None:
    order = epoch_order(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert np.array_equal(order, epoch_order(count, seed, epoch))
    if count > 20:  # 20! orders: no chance of an accident
        assert not np.array_equal(order, epoch_order(count, seed + 1, epoch))
        assert not np.array_equal(order, epoch_order(count, seed, epoch + 1))


def test_epoch_order_is_the_same_on_every_machine_and_version() -> None:
    """Golden values: a run begun with another numpy must be resumable."""
    assert epoch_order(10, 0, 0).tolist() == [4, 5, 7, 6, 8, 3, 9, 1, 2, 0]


@given(count=st.integers(1, 40), batch_size=st.integers(1, 50), seed=st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_the_stream_is_the_epochs_end_to_end(count: int, batch_size: int, seed: int) -> None:
    batches = Batches(rows_of([2] * count), batch_size, seed)
    stream = [row for _ in range(4) for row in batches.next_rows()]
    epochs = [
        row
        for epoch in range(math.ceil(4 * batch_size / count))
        for row in epoch_order(count, seed, epoch)
    ]
    assert stream == epochs[: 4 * batch_size]


@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=40),
    size=st.integers(1, 5),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_the_longest_example_and_the_fullest_batch_come_first_and_two_change_places_with_them(
    lengths: list[int], size: int, seed: int, shuffle: bool
) -> None:
    """Oracle: the epochs' own orders, and the rule in lists."""
    batches = Batches(rows_of(lengths), size, seed, shuffle=shuffle)
    count = len(lengths)
    stream = [row for _ in range(2 * count) for row in batches.next_rows()]
    if not shuffle:
        assert stream[: 2 * count] == [*range(count), *range(count)]
        return
    expected = epoch_order(count, seed, 0).tolist()
    place = expected.index(stream[0])
    expected[0], expected[place] = expected[place], expected[0]
    assert lengths[expected[0]] == max(lengths)
    cut = [expected[at : at + size] for at in range(0, count, size)]
    tokens = [sum(lengths[row] for row in rows) for rows in cut if len(rows) == size]
    if len(tokens) > 1:
        fullest = tokens.index(max(tokens[1:]), 1)
        cut[1], cut[fullest] = cut[fullest], cut[1]
    assert stream[:count] == [row for rows in cut for row in rows]
    assert stream[count : 2 * count] == epoch_order(count, seed, 1).tolist()


@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=20),
    batch_size=st.integers(1, 7),
    done=st.integers(0, 9),
    shuffle=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_a_resumed_iterator_gives_the_batches_of_one_never_stopped(
    lengths: list[int], batch_size: int, done: int, shuffle: bool
) -> None:
    whole = Batches(rows_of(lengths), batch_size, 3, shuffle=shuffle)
    for _ in range(done):
        next(whole)
    saved = json.loads(json.dumps(whole.state_dict()))
    resumed = Batches(rows_of(lengths), batch_size, 3, shuffle=shuffle)
    resumed.load_state_dict(saved)
    assert all(equal(next(whole), next(resumed)) for _ in range(5))


@given(
    lengths=st.lists(st.integers(2, 300), min_size=1, max_size=20),
    groups=st.integers(1, 3),
    rows=st.integers(1, 4),
    multiple=st.sampled_from([1, 8]),
    apart=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_row_lengths_are_those_of_the_batches_to_come(
    lengths: list[int], groups: int, rows: int, multiple: int, apart: bool
) -> None:
    """Oracle: the batches, as they come and laid side by side. Asking moves nothing."""
    batches = Batches(rows_of(lengths), groups * rows, 3, padding_multiple=multiple)
    next(batches)
    said = batches.row_lengths(5, groups, apart=apart)
    cut = pack_parts if apart else micro_batches
    assert said.tolist() == [
        [math.ceil(part["input_ids"].numel() / rows) for part in cut(batch, groups)]
        for batch in islice(batches, 5)
    ]


def lies_in_a_file(array: np.ndarray) -> bool:
    """Whether the kernel says that a file lies at an array's address."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= address < stop:
            return " /" in line
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_examples_in_maps_are_those_in_memory(tmp_path: Path) -> None:
    """Oracle: the arrays themselves, bit for bit; and where their bytes lie."""
    given = rows_of([5, 9, 3])
    for whole in (given, given.cut([[(0, 5), (5, 9)], [(9, 17)]], borders=True)):
        there = whole.mapped(tmp_path)
        assert there.fingerprint() == whole.fingerprint()
        assert equal(next(Batches(there, 2)), next(Batches(whole, 2)))
        assert all(
            lies_in_a_file(array) for array in (there.token_ids, there.in_loss, there.starts)
        )
        assert not any(
            lies_in_a_file(array) for array in (whole.token_ids, whole.in_loss, whole.starts)
        )
    assert not list(tmp_path.iterdir())


def test_a_map_whose_name_stayed_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the folder before. Power lost before a name was gone, on a disk without nameless
    files (FUSE, NFS)."""
    with monkeypatch.context() as power_lost:
        power_lost.setattr(tempfile, "_O_TMPFILE_WORKS", False)
        power_lost.setattr(os, "unlink", lambda path: None)
        (scratch := tmp_path / run_checkpoint.SCRATCH).mkdir()
        rows_of([5]).mapped(scratch)
    assert list(scratch.iterdir())
    sweeping.sweep(tmp_path)
    assert not list(scratch.iterdir())


def test_resuming_with_another_order_or_other_data_is_refused() -> None:
    saved = Batches(rows_of([2, 3]), 1, seed=1).state_dict()
    for other, name in (
        (Batches(rows_of([2, 3]), 1, seed=2), "seed"),
        (Batches(rows_of([2, 3]), 1, seed=1, shuffle=False), "shuffle"),
        (Batches(rows_of([3, 2]), 1, seed=1), "data"),
    ):
        with refused(ValueError, f"data.{name}|tokens"):
            other.load_state_dict(saved)


# --- cuts
# --------------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(2, 9), min_size=12, max_size=20),
    world=st.integers(1, 5),
    cuts=st.sampled_from([1, 2, 3, 4, 6, 12]),
)
@settings(max_examples=50, deadline=None)
def test_shares_and_micro_batches_are_the_global_batch_cut(
    lengths: list[int], world: int, cuts: int
) -> None:
    batch = next(Batches(rows_of(lengths), 12, 5))
    pieces = micro_batches(batch, cuts)
    assert len({len(piece["input_ids"]) for piece in pieces}) == 1
    assert equal({name: torch.cat([piece[name] for piece in pieces]) for name in batch}, batch)
    assert token_counts(batch) == token_counts(dict(batch))
    for rank in range(world):
        assert equal(share(batch, cuts, world, rank), share(dict(batch), cuts, world, rank))
    shares = [micro_batches(share(batch, cuts, world, rank), cuts) for rank in range(world)]
    shared = [shares[rank][m] for m in range(cuts) for rank in range(world)]
    assert equal({name: torch.cat([part[name] for part in shared])[:12] for name in batch}, batch)
    assert sum(loss_tokens(part) for part in shared) == loss_tokens(batch)


def test_a_cut_that_does_not_divide_names_the_setting() -> None:
    with refused(ValueError, "2 gradient_accumulation_steps"):
        micro_batches(collate(rows_of([2, 2]), [0, 1]), 3)


def test_a_batch_that_is_none_says_what_is_wanted() -> None:
    """Oracle: the name of the type that was given."""
    for batch, message in (({"input_ids": [[1, 2]]}, "input_ids list"), ([1], "mapping list")):
        with refused(ValueError, message):
            micro_batches(batch, 1)  # type: ignore[arg-type]


def test_collate_pads_on_the_right_to_the_longest() -> None:
    batch = collate(rows_of([2, 3, 5]), [1, 0], padding_multiple=4)
    assert {name: tensor.dtype for name, tensor in batch.items()} == dict.fromkeys(
        batch, torch.int64
    )
    assert batch["input_ids"].tolist() == [[11, 11, 11, PAD], [10, 10, PAD, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 11, 11, -100], [-100, 10, -100, -100]]
    assert loss_tokens(batch) == 3
    assert collate(rows_of([2, 3, 5]), [1, 0])["input_ids"].shape == (2, 3)


def test_evaluation_takes_every_example_once_and_pads_little() -> None:
    found = list(by_length(rows_of([2, 3, 2, 4, 2]), 2))
    assert [rows for rows, _ in found] == [[0, 2], [4, 1], [3]]
    assert [batch["input_ids"][:, 0].tolist() for _, batch in found] == [[10, 12], [14, 11], [13]]
    assert [batch["input_ids"].shape[1] for _, batch in found] == [2, 3, 4]


def test_packing_keeps_every_token_of_long_records(tokenizer: Any, tmp_path: Path) -> None:
    """Closed form: the learnt tokens of all rows are the records, whatever their length; so it is
    for evaluation."""
    texts = ["abcdefghijklmnopqrstuvwxyz" * 3, "short", "0123456789" * 5]
    file = jsonl(tmp_path / "d.jsonl", *({"text": text} for text in texts))
    run = config.from_mapping(
        {"data": {"train": str(file), "eval": str(file), "packing": True, "max_length": 16}}
    )
    rows, _ = read_training_rows(run, tokenizer)
    assert rows.positions is not None
    assert max(np.diff(rows.starts)) <= 16
    learnt = "".join(sorted(tokenizer.decode(rows.token_ids[rows.in_loss]).replace("</s>", "$")))
    assert learnt == "".join(sorted("$".join([*texts, ""])))
    assert rows.report.warnings() == []
    held_out = HeldOut.read(run.data, tokenizer, batch_size=2)
    assert isinstance(held_out.rows, Encoded)
    assert held_out.rows.fingerprint() == rows.fingerprint()
    joined = Encoded(rows.token_ids, rows.in_loss, rows.starts, rows.pad_id)
    assert joined.fingerprint() != rows.fingerprint(), "a run does not resume without its borders"


# --- tokens and masks
# ------------------------------------------------------------------------------------------------


def test_text_is_learnt_whole_with_its_end(tokenizer: Any) -> None:
    encoded = encode([Record({"text": "abc"}, "x")], tokenizer, max_length=9)
    assert learnt(encoded, tokenizer) == ("<s>abc</s>", "abc</s>")


def test_texts_are_the_same_in_calls_of_any_size(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call has more characters than the limit and one text more."""
    records = [Record({"text": "ab" * number}, "x") for number in range(1, 9)]
    whole = encode(records, tokenizer, max_length=99)
    calls = []
    monkeypatch.setattr(data_encode, "CHUNK_CHARACTERS", 10)
    chunks = data_encode._chunks
    monkeypatch.setattr(
        data_encode, "_chunks", lambda texts: (calls.append(len(c)) or c for c in chunks(texts))
    )
    assert encode(records, tokenizer, max_length=99).fingerprint() == whole.fingerprint()
    assert calls == [3, 2, 1, 1, 1]


def test_the_first_token_of_a_row_is_not_learnt(tokenizer: Any) -> None:
    """Nothing precedes it, with or without a begin token."""
    without = copy.deepcopy(tokenizer)
    without._tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", special_tokens=[]
    )
    assert learnt(encode([Record({"text": "abc"}, "x")], without, max_length=9), without) == (
        "abc</s>",
        "bc</s>",
    )


def test_completion_is_learnt_with_its_end(tokenizer: Any) -> None:
    encoded = encode([Record({"prompt": "1+1=", "completion": "2"}, "x")], tokenizer, max_length=9)
    assert learnt(encoded, tokenizer) == ("<s>1+1=2</s>", "2</s>")


@pytest.mark.parametrize(
    ("max_length", "row", "in_loss"),
    [
        (9, "<s>abcdXYZ</s>", "XYZ</s>"),
        (7, "<s>cdXYZ</s>", "XYZ</s>"),  # the prompt loses its left
        (5, "<s>XYZ</s>", "XYZ</s>"),  # all of it, but the begin token stays
        (3, "<s>XY", "XY"),  # and only then the completion its right
    ],
)
def test_a_long_prompt_is_cut_on_its_left(
    tokenizer: Any, max_length: int, row: str, in_loss: str
) -> None:
    encoded = encode(
        [Record({"prompt": "abcd", "completion": "XYZ"}, "x")], tokenizer, max_length=max_length
    )
    assert learnt(encoded, tokenizer) == (row, in_loss)
    assert encoded.report.truncated == (max_length < 9)
    assert encoded.report.longest == 9
    lost = [line for line in encoded.report.warnings() if "whole prompt" in line]
    assert len(lost) == (max_length <= 5)
    for line in lost:
        says(line, f"1 max_length {max_length} data.max_length 9")


def test_what_is_cut_or_dropped_is_counted(tokenizer: Any) -> None:
    records = [Record({"text": text}, "x") for text in ("abcdefgh", "abc", "")]
    encoded = encode(records, tokenizer, max_length=6)
    assert [learnt(encoded, tokenizer, i)[0] for i in range(len(encoded))] == [
        "<s>abcde",
        "<s>abc</s>",
    ]
    cut, dropped = encoded.report.warnings()
    assert cut.startswith("1 of 3 records were longer than max_length = 6 tokens (the longest: 10)")
    assert dropped.startswith("1 of 3 records had no token to learn")
    with refused(ValueError, "1 records|record"):
        encode(records[2:], tokenizer, max_length=6)


def test_label_word_alone_is_learnt(tokenizer: Any) -> None:
    template = Template("{title}: {text} It was {label}. Really.", ("bad", "good"))
    record = Record({"title": "A", "text": "b", "label": 1}, "x")
    assert learnt(
        encode_choices([record], tokenizer, template, max_length=40).answered(), tokenizer
    ) == (
        "<s>A: b It was good",
        " good",
    )
    choices = encode_choices([record], tokenizer, template, max_length=40)
    assert [learnt(choices.rows, tokenizer, c)[1] for c in range(2)] == [" bad", " good"]
    assert choices.targets.tolist() == [1]
    short = encode_choices([record], tokenizer, template, max_length=8)
    assert [learnt(short.rows, tokenizer, c) for c in range(2)] == [
        ("<s>was bad", " bad"),
        ("<s>as good", " good"),
    ]


def test_classes_are_numbers_or_words() -> None:
    template = Template("{text} {label}", ("bad", "good"))
    assert [
        template.class_index(Record({"label": label}, "x")) for label in (0, 1, "bad", "good")
    ] == [0, 1, 0, 1]
    for label in (2, -1, True, "fine", None):
        with refused(ValueError, "f.jsonl 3 label"):
            template.class_index(Record({"label": label}, "f.jsonl line 3"))


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("{text} It was", ("a", "b"), "{label} once"),
        ("{label} {text} {label}", ("a", "b"), "{label} once"),
        ("It was {label}", ("a", "b"), "field"),
        ("{text} {label", ("a", "b"), "}"),
        ("{text} {label}", ("a",), "words"),
        ("{text} {label}", ("a", "a"), "words"),
    ],
)
def test_templates_that_make_no_sense_are_refused(
    text: str, words: tuple[str, ...], message: str
) -> None:
    with refused(ValueError, message):
        Template(text, words)


def test_scores_are_log_probabilities_of_label_words(tokenizer: Any) -> None:
    """Against probabilities chosen by hand: a model that says "y" with probability p after
    anything, "n" with q."""
    template = Template("{text}{label}", ("n", "yy"))
    records = [Record({"text": "ab", "label": label}, "x") for label in (0, 1, 1)]
    batch = label_word_batch(
        encode_choices(records, tokenizer, template, max_length=20), [0, 2], scores="sum"
    )
    yes, no = tokenizer.convert_tokens_to_ids(["y", "n"])
    probabilities = torch.full((len(tokenizer),), 0.1 / (len(tokenizer) - 2))
    probabilities[yes], probabilities[no] = 0.7, 0.2
    losses = row_losses(
        probabilities.log().expand(*batch.batch["labels"].shape, -1), batch.batch["labels"]
    )
    n = math.log(0.2)
    yy = 2 * math.log(0.7)
    torch.testing.assert_close(batch.scores(losses), torch.tensor([[n, yy], [n, yy]]))
    assert batch.correct(losses) == 1
    expected = -(n + yy) / 2 + math.log(math.exp(n) + math.exp(yy))
    assert ranked("label_words", batch, losses) == pytest.approx(expected, rel=1e-6)


def test_label_words_are_ranked_by_the_mean_of_their_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Closed form: a word of two tokens of 0.4 each comes before one of 0.2 by the mean (log 0.4 >
    log 0.2) and after it by the sum (log 0.16 < log 0.2); accuracy, F1 and cross-entropy follow."""
    choices = encode_choices(
        [Record({"text": "ab", "label": 1}, "x")],
        tokenizer,
        Template("{text}{label}", ("n", "yy")),
        max_length=20,
    )
    losses = torch.tensor([-math.log(0.2), -2 * math.log(0.4)], dtype=torch.float64)
    mean, added = (label_word_batch(choices, [0], scores=scores) for scores in ("mean", "sum"))
    torch.testing.assert_close(
        mean.scores(losses), torch.tensor([[math.log(0.2), math.log(0.4)]], dtype=torch.float64)
    )
    assert label_word_batch(choices, [0]).ranked_by == "mean"
    assert (mean.correct(losses), added.correct(losses)) == (1, 0)
    assert (ranked("accuracy", mean, losses), ranked("accuracy", added, losses)) == (0.0, 1.0)
    assert (ranked("f1", mean, losses), ranked("f1", added, losses)) == (0.5, 1.0)
    assert ranked("label_words", mean, losses) == pytest.approx(-math.log(0.4 / 0.6))
    assert ranked("label_words", added, losses) == pytest.approx(-math.log(0.16 / 0.36))


# --- files
# --------------------------------------------------------------------------------------------------


def test_jsonl_and_parquet_hold_the_same_records(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    jsonl(tmp_path / "a.jsonl", rows[0], "", rows[1])
    assert [record.fields for record in read_records(tmp_path / "a.jsonl")] == rows
    assert [record.place[-6:] for record in read_records(tmp_path / "a.jsonl")] == [
        "line 1",
        "line 3",
    ]
    assert [record.fields for record in read_records(tmp_path / "b.parquet")] == rows
    assert [
        record.fields for record in read_records(tmp_path)
    ] == rows + rows  # a folder: its files in order


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"messages": []}, Format.MESSAGES),
        ({"prompt": "", "completion": ""}, Format.COMPLETION),
        ({"text": ""}, Format.TEXT),
    ],
)
def test_format_follows_from_the_fields(fields: dict[str, Any], kind: Format) -> None:
    assert detect_format(Record(fields, "x")) is kind


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "2 JSON"),
        ("[1]", "2 object list"),
        ({"completion": "b"}, "2 prompt completion"),
        ({"prompt": 1, "completion": "b"}, "2 prompt string int"),
    ],
)
def test_errors_name_file_line_and_field(
    tokenizer: Any, tmp_path: Path, line: Any, message: str
) -> None:
    file = jsonl(tmp_path / "d.jsonl", {"prompt": "a", "completion": "b"}, line)
    with refused(ValueError, f"d.jsonl {message}"):
        encode(read_records(file), tokenizer, max_length=9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages [0] role content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages [0] content string"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages assistant"),
        (
            {"messages": [{"role": "assistant", "content": "a"}] * 2},
            "template conversation one at a time",
        ),
        ({"question": "a"}, "messages"),
        ({"text": "a", "label": 1}, "label template"),
    ],
)
def test_records_that_make_no_sense_are_refused(
    tokenizer: Any, fields: dict[str, Any], message: str
) -> None:
    tokenizer.chat_template = (
        "{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    )
    with refused(ValueError, f"f 8 {message}"):
        encode([Record(fields, "f line 8")], tokenizer, max_length=9)


def test_sources_that_are_not_there_are_named(tmp_path: Path, tokenizer: Any) -> None:
    for source, message in (
        (tmp_path / "none.jsonl", "file"),
        (tmp_path, ".jsonl"),
        (jsonl(tmp_path / "a.pdf", ""), "file ends"),
    ):
        with refused(ValueError, message):
            next(read_records(source))
    with refused(ValueError, "empty"):
        encode(read_records(jsonl(tmp_path / "e.jsonl")), tokenizer, max_length=9)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with refused(ValueError, f"{tmp_path} tokenizer tokenizer.json GGUF") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
