"""Oracle: lists written by hand. Judged records as texts and numbers, their refusals, and data sets
of pairs counted, drawn, cut and shared out in whole pairs, against the same in plain lists."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockwalk.data import dataset as data_sets
from blockwalk.data import token_files
from blockwalk.data.batch import columns, filled, lengthened, loss_tokens, micro_batches, row_order
from blockwalk.data.batching import Batches, by_length, epoch_order
from blockwalk.data.corpus import held_out_set, training_set
from blockwalk.data.dataset import Encoded
from blockwalk.data.encode import encode, first_example
from blockwalk.data.encode_report import EncodeReport
from blockwalk.data.formats import Format, format_of, judged_format
from blockwalk.data.packing import pack_parts
from blockwalk.data.records import Record
from blockwalk.data.row_batch import RowBatch, share
from blockwalk.plan.objectives import OBJECTIVES, ObjectiveFacts
from blockwalk.plan.run_config import DataSettings, RunConfig
from blockwalk.train import config
from blockwalk.train.evaluation import HeldOut
from tests.support import chat_tokenizers, data_files
from tests.support.data_files import jsonl
from tests.support.messages import refused, says

tokenizer = data_files.tokenizer

USER = {"role": "user", "content": "q"}
YES = {"role": "assistant", "content": "yes"}
NO = {"role": "assistant", "content": "no"}
PAIR: dict[str, Any] = {"prompt": "q ", "chosen": "yes", "rejected": "no"}


@pytest.fixture(scope="module")
def chat() -> Any:
    return chat_tokenizers.tokenizer(chat_tokenizers.PLAIN)


def texts(fields: dict[str, Any], tokenizer: Any, objective: str = "dpo") -> list[str]:
    """The rows of one record as text, with a bar where the answer begins."""
    rows = encode(
        [Record(fields, "r 1")], tokenizer, max_length=None, objective=OBJECTIVES[objective]
    )
    pieces = []
    for ids, learnt in (rows[row] for row in range(len(rows))):
        begin = int(learnt.argmax())
        assert learnt[begin:].all()
        pieces.append(f"{tokenizer.decode(ids[:begin])}|{tokenizer.decode(ids[begin:])}")
    return pieces


def pairs_of(lengths: Sequence[tuple[int, int]]) -> Encoded:
    """Rows 2i and 2i + 1 hold the tokens 10 + 2i and 11 + 2i, all but the first learnt."""
    flat = list(itertools.chain.from_iterable(lengths))
    ids = [np.full(n, 10 + i, dtype=np.int32) for i, n in enumerate(flat)]
    return Encoded(
        np.concatenate(ids),
        np.concatenate([np.arange(n) > 0 for n in flat]),
        np.cumsum([0, *flat]),
        0,
        group=2,
        numbers={"n": np.arange(len(flat)) / 2},
        token_numbers={"t": np.concatenate(ids) * 0.5},
    )


# --- records
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"prompt": "q", "chosen": [YES], "rejected": [NO]},
        {"prompt": "q", "chosen": [USER, YES], "rejected": [USER, NO]},
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        {"messages": [USER], "chosen": YES, "rejected": NO},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "yes"},
            "rejected": {"from": "gpt", "value": "no"},
        },
        {"instruction": "q", "input": "", "chosen": "yes", "rejected": "no"},
        {"question": "q", "chosen": "yes", "rejected": "no"},
    ],
)
def test_pairs_of_every_shape_are_the_same_rows(fields: dict[str, Any], chat: Any) -> None:
    begin = "<|user|>q</s><|assistant|>"
    assert texts(fields, chat) == [f"{begin}|yes</s>", f"{begin}|no</s>"]


def test_a_system_text_an_input_and_a_history_stand_before_both_answers(chat: Any) -> None:
    fields = {"instruction": "q", "input": "i", "system": "s", "history": [["a", "b"]]}
    begin = "<|system|>s</s><|user|>a</s><|assistant|>b</s><|user|>q\ni</s><|assistant|>"
    pair = {**fields, "chosen": "yes", "rejected": "no"}
    assert texts(pair, chat) == [f"{begin}|yes</s>", f"{begin}|no</s>"]


def test_texts_are_written_without_the_template(tokenizer: Any, chat: Any) -> None:
    assert texts(PAIR, tokenizer) == ["<s>q |yes</s>", "<s>q |no</s>"]
    assert texts({"chosen": "q yes", "rejected": "q no"}, tokenizer) == [
        "<s>q| yes</s>",
        "<s>q| no</s>",
    ]
    assert texts({"system": "s", **PAIR}, tokenizer) == ["<s>s\nq |yes</s>", "<s>s\nq |no</s>"]
    alpaca = {"instruction": "q", "chosen": "yes", "rejected": "no"}
    assert texts(alpaca, tokenizer) == ["<s>q\n|yes</s>", "<s>q\n|no</s>"]
    prompted = encode(
        [Record(alpaca, "r 1")],
        chat,
        max_length=None,
        objective=OBJECTIVES["dpo"],
        prompts=["#{instruction}:"],
    )
    assert chat.decode(prompted[0][0]) == "#q:yes</s>"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "q", "completion": [YES], "label": True},
        {"messages": [USER, YES], "label": True},
        {"conversations": [USER, YES], "kto_tag": "true"},
        {"instruction": "q", "input": "", "output": "yes", "kto_tag": 1},
        {"query": "q", "response": "yes", "label": True},
    ],
)
def test_labelled_answers_of_every_shape_are_the_same_row(
    fields: dict[str, Any], chat: Any
) -> None:
    assert texts(fields, chat, "kto") == ["<|user|>q</s><|assistant|>|yes</s>"]
    rows = encode([Record(fields, "r")], chat, max_length=None, objective=OBJECTIVES["kto"])
    assert (rows.group, rows.numbers["desirable"].tolist()) == (1, [1.0])


def test_scored_answers_bring_numbers_of_rows_and_of_tokens(tokenizer: Any) -> None:
    """A byte is a token; the answer's last one is the end of text."""
    line = {"prompt": "q", "completion": "ab", "advantage": -0.5, "group": 3}
    records = [
        Record({**line, "old_log_probabilities": [-1, -2.5, -3]}, "r 1"),
        Record({**line, "advantage": 2, "old_log_probabilities": [-4, -5, -6]}, "r 2"),
    ]
    rows = encode(records, tokenizer, max_length=4, objective=OBJECTIVES["policy_gradient"])
    assert {name: array.tolist() for name, array in rows.numbers.items()} == {
        "advantages": [-0.5, 2.0],
        "group": [3.0, 3.0],
    }
    # cut to <s> q a b
    assert rows.token_numbers["old_log_probabilities"].tolist() == [0, 0, -1, -2.5, 0, 0, -4, -5]
    batch = RowBatch(rows, [1, 0], 8)
    assert batch["objective.advantages"].tolist() == [2.0, -0.5]
    assert batch["objective.old_log_probabilities"].tolist() == [
        [0, 0, -4, -5, 0, 0, 0, 0],
        [0, 0, -1, -2.5, 0, 0, 0, 0],
    ]
    learnt = batch["labels"] != -100
    assert torch.equal(batch["objective.old_log_probabilities"] != 0, learnt)


def test_a_scored_chat_ends_with_the_token_that_ends_the_answer() -> None:
    """What another program generated has no line end behind it."""
    lines = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    chat = chat_tokenizers.tokenizer(lines + chat_tokenizers.END)
    fields = {"prompt": [USER], "completion": [YES], "advantage": 1}
    begin = "<|user|>q</s>\n<|assistant|>"
    assert texts(fields, chat, "policy_gradient") == [f"{begin}|yes</s>"]
    assert texts({**fields, "label": True}, chat, "kto") == [f"{begin}|yes</s>\n"]


def test_the_first_pair_is_shown_with_both_answers(tokenizer: Any) -> None:
    rows = encode([Record(PAIR, "r")], tokenizer, max_length=None, objective=OBJECTIVES["dpo"])
    shown = [("<s>q ", False), ("yes</s>", True), ("no</s>", True)]
    assert first_example(rows, tokenizer) == shown


# --- refusals
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        ("dpo", {"rejected": "yes"}, "chosen rejected same"),
        ("dpo", {"rejected": " "}, "rejected empty"),
        ("dpo", {"prompt": None, "chosen": "ab", "rejected": "cd"}, "prompts differ prompt"),
        ("dpo", {"prompt": None, "chosen": [USER, YES], "rejected": [{**USER, "content": "p"}, NO]},
         "prompts differ chosen rejected"),
        ("dpo", {"prompt": "p", "chosen": [USER, YES], "rejected": [USER, NO]}, "prompts differ"),
        ("dpo", {"prompt": None, "chosen": [{"role": "system", "content": "s"}, USER, YES],
                 "rejected": [{"role": "system", "content": "s"}, NO]}, "prompts differ user"),
        ("dpo", {"rejected": None}, "rejected dpo data.columns prompt chosen"),
        ("dpo", {"rejected": [{"role": "assistant", "content": ""}]}, "rejected empty"),
        ("simpo", {"chosen": 3}, "chosen string int"),
        ("kto", {"completion": "a", "label": "maybe"}, "label maybe true false"),
        ("kto", {"completion": "a", "label": 0.5}, "label 0.5"),
        ("kto", {"completion": "a"}, "label kto_tag kto"),
        ("kto", {"completion": "", "label": True}, "completion empty"),
        ("kto", {"label": True}, "completion prompt"),
        ("policy_gradient", {"completion": "a"}, "advantage policy_gradient"),
        ("policy_gradient", {"completion": "a", "advantage": math.nan}, "advantage nan finite"),
        ("policy_gradient", {"completion": "a", "advantage": "x"}, "advantage x finite"),
        ("policy_gradient", {"completion": "a", "advantage": True}, "advantage True"),
        ("policy_gradient", {"completion": "a", "advantage": 1, "group": 1.5}, "group 1.5 whole"),
        ("policy_gradient", {"completion": "a", "advantage": 1, "old_log_probabilities": [-1]},
         "old_log_probabilities 1 2"),
        ("policy_gradient", {"completion": "a", "advantage": 1, "old_log_probabilities": "x"},
         "old_log_probabilities list"),
        ("policy_gradient",
         {"completion": "a", "advantage": 1, "old_log_probabilities": [-1, math.inf]},
         "old_log_probabilities[1] inf finite"),
    ],
)  # fmt: skip
def test_a_record_that_judges_nothing_is_named(
    objective: str, changes: dict[str, Any], message: str, chat: Any
) -> None:
    pair = PAIR if OBJECTIVES[objective].group == 2 else {"prompt": "q"}
    fields = {name: value for name, value in {**pair, **changes}.items() if value is not None}
    with refused(ValueError, f"f 8 {message}"):
        encode([Record(fields, "f line 8")], chat, max_length=99, objective=OBJECTIVES[objective])


def test_a_later_record_is_named_as_well(tokenizer: Any) -> None:
    scored = {"prompt": "q", "completion": "a", "advantage": 1}
    more = {**scored, "old_log_probabilities": [-1, -2]}
    for objective, lines, message in (
        ("dpo", [PAIR, {"prompt": "q", "chosen": "yes"}], "f 2 rejected"),
        ("policy_gradient", [scored, more], "f 2 old_log_probabilities 1"),
        ("policy_gradient", [more, scored], "f 2 old_log_probabilities 1"),
    ):
        records = [Record(line, f"f line {n + 1}") for n, line in enumerate(lines)]
        with refused(ValueError, message):
            encode(records, tokenizer, max_length=99, objective=OBJECTIVES[objective])


def test_half_a_character_and_turns_without_a_template_are_refused(tokenizer: Any) -> None:
    with refused(ValueError, "r \\ud800"):
        texts({**PAIR, "chosen": "\ud800"}, tokenizer)
    with refused(ValueError, "r preference data.chat_template"):
        texts({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, tokenizer)
    with refused(ValueError, "r preference data.chat_template"):
        pair = {"chosen": "yes", "rejected": "no"}
        texts({"instruction": "q", "history": [["a", "b"]], **pair}, tokenizer)


@pytest.mark.parametrize(
    ("fields", "objectives"),
    [
        (PAIR, "dpo ipo simpo orpo cpo"),
        ({"prompt": "q", "completion": "a", "label": True}, "kto"),
        ({"instruction": "q", "output": "a", "kto_tag": False}, "kto"),
        ({"prompt": "q", "completion": "a", "advantage": 0.5}, "policy_gradient"),
    ],
)
def test_fine_tuning_does_not_take_judged_records_in_silence(
    fields: dict[str, Any], objectives: str
) -> None:
    with refused(ValueError, f"r 1 objective {objectives}"):
        format_of(Record(fields, "r 1"), None)


def test_a_format_and_an_objective_fit_or_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    with refused(ValueError, "data.format preference objective sft dpo"):
        format_of(Record(PAIR, "r"), "preference")
    with refused(ValueError, "data.format messages objective dpo preference"):
        format_of(Record(PAIR, "r"), "messages", OBJECTIVES["dpo(beta=0.5)"])
    assert format_of(Record(PAIR, "r"), "completion") is Format.COMPLETION
    file = str(jsonl(tmp_path / "p.jsonl", PAIR))
    with refused(ValueError, "data.packing dpo false"):
        training_set(DataSettings(train=file, packing=True), tokenizer, objective=OBJECTIVES["dpo"])
    with refused(ValueError, "data.template dpo preference"):
        asked = DataSettings(train=file, template="{prompt}{label}", label_words=("a", "b"))
        training_set(asked, tokenizer, objective=OBJECTIVES["dpo"])
    with refused(ValueError, "3 answers numbers"):
        judged_format(ObjectiveFacts(group=3))
    for name, facts in OBJECTIVES.items():
        assert (judged_format(facts) is None) == (name == "sft")


def test_labels_of_one_kind_alone_are_refused_over_all_sources(
    tokenizer: Any, tmp_path: Path
) -> None:
    line = {"prompt": "q", "completion": "a"}
    wanted = str(jsonl(tmp_path / "a.jsonl", *[{**line, "label": True}] * 3))
    unwanted = str(jsonl(tmp_path / "b.jsonl", {**line, "label": False}))
    with refused(ValueError, "a.jsonl 3 true data.train sft"):
        training_set(DataSettings(train=wanted), tokenizer, objective=OBJECTIVES["kto"])
    with refused(ValueError, "b.jsonl 1 false data.train"):
        training_set(DataSettings(train=unwanted), tokenizer, objective=OBJECTIVES["kto"])
    both = training_set(
        DataSettings(train=(wanted, unwanted)), tokenizer, objective=OBJECTIVES["kto"]
    )
    assert isinstance(both, Encoded)
    assert both.numbers["desirable"].tolist() == [1, 1, 1, 0]


def test_a_pair_goes_whole_where_cutting_leaves_no_answer(tokenizer: Any) -> None:
    records = [
        Record({"prompt": "p" * count, "chosen": "yes", "rejected": "n" * 9}, f"r {count}")
        for count in (2, 5, 6, 9)
    ]
    rows = encode(records, tokenizer, max_length=7, objective=OBJECTIVES["dpo"])
    kept = [tokenizer.decode(rows[row][0]) for row in range(len(rows))]
    # <s> and 6 letters; of six p's no answer is left
    assert kept == ["<s>ppyes</s>", "<s>ppnnnn", "<s>pppppy", "<s>pppppn"]
    assert (rows.report.records, rows.report.dropped, rows.report.truncated) == (4, 2, 4)
    says(" ".join(rows.report.warnings()), "2 4 dropped")
    with refused(ValueError, "2 records token"):
        encode(records[2:], tokenizer, max_length=7, objective=OBJECTIVES["dpo"])


# --- data sets
# --------------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9)), min_size=1, max_size=20),
    size=st.integers(1, 6),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_batches_are_of_whole_pairs_in_the_order_of_examples(
    lengths: list[tuple[int, int]], size: int, seed: int, shuffle: bool
) -> None:
    """The order of single examples, of which each is two rows: the second epoch's, and the first
    one's as a set with the longest in front."""
    batches = Batches(pairs_of(lengths), size, seed, shuffle=shuffle)
    count = len(lengths)
    stream = [row for _ in range(2 * count) for row in batches.next_rows()]
    assert stream[::2] == [row - 1 for row in stream[1::2]]
    examples = [row // 2 for row in stream[::2]]
    assert len(examples) == 2 * count * size
    first, second = examples[:count], examples[count : 2 * count]
    assert sorted(first) == sorted(second) == list(range(count))
    if shuffle:
        assert max(lengths[first[0]]) == max(map(max, lengths))
        cut = [first[at : at + size] for at in range(size, count // size * size, size)]
        tokens = [sum(sum(lengths[example]) for example in examples) for examples in cut]
        assert not tokens or tokens[0] == max(tokens)
    if size > 1:
        assert second == (epoch_order(count, seed, 1).tolist() if shuffle else list(range(count)))
    assert batches.steps(1.0) == math.ceil(count / size)


def test_a_long_list_of_pairs_is_ordered_without_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    from blockwalk.data import batching

    monkeypatch.setattr(batching, "SHUFFLED_IN_MEMORY", 4)
    lengths = [(3, 2 + n % 5) for n in range(30)]
    batches = Batches(pairs_of(lengths), 5, 1)
    for _ in range(2):
        stream = [row for _ in range(6) for row in batches.next_rows()]
        assert sorted(stream) == list(range(60))
        assert stream[::2] == [row - 1 for row in stream[1::2]]


def test_a_run_of_pairs_goes_on_and_follows_appended_ones() -> None:
    lengths = [(3, 4)] * 12
    before = Batches(pairs_of(lengths[:9]), 2, 5)
    drawn = before.next_rows()
    state = json.loads(json.dumps(before.state_dict()))
    again = Batches(pairs_of(lengths[:9]), 2, 5)
    again.load_state_dict(state)
    assert again.next_rows() == before.next_rows()
    grown = Batches(pairs_of(lengths), 2, 5)
    assert grown.appended(state) == 3
    grown.load_state_dict(state, follow=True)
    drawn += [row for _ in range(5) for row in grown.next_rows()]
    assert sorted(drawn) == list(range(24))
    assert set(drawn[18:]) == set(range(18, 24))


def test_other_numbers_are_other_data() -> None:
    rows = pairs_of([(2, 3)])
    others = [
        Encoded(rows.token_ids, rows.in_loss, rows.starts, 0),
        Encoded(rows.token_ids, rows.in_loss, rows.starts, 0, group=2),
        Encoded(rows.token_ids, rows.in_loss, rows.starts, 0, group=2, numbers={"n": np.ones(2)}),
        Encoded(rows.token_ids, rows.in_loss, rows.starts, 0, group=2, numbers={"m": np.ones(2)}),
        rows,
    ]
    assert len({each.fingerprint() for each in others}) == len(others)


def test_selected_and_joined_pairs_keep_their_numbers() -> None:
    rows = pairs_of([(2, 3), (4, 5), (6, 7)])
    joined = Encoded.concatenated([rows.select([2, 0]), rows.select([1])])
    assert joined.examples == 3
    order = [4, 5, 0, 1, 2, 3]
    for place, row in enumerate(order):
        begin, end = rows.starts[row : row + 2]
        own = slice(*joined.starts[place : place + 2])
        assert joined.token_ids[own].tolist() == rows.token_ids[begin:end].tolist()
        assert joined.token_numbers["t"][own].tolist() == [(10 + row) / 2] * (end - begin)
    assert joined.numbers["n"].tolist() == [row / 2 for row in order]
    plain = Encoded(rows.token_ids, rows.in_loss, rows.starts, 0, EncodeReport(), group=2)
    with refused(ValueError, "data.train n t"):
        Encoded.concatenated([rows, plain])


def test_pairs_are_evaluated_by_the_longer_answer() -> None:
    rows = pairs_of([(2, 9), (4, 4), (3, 2), (8, 3)])
    visits = [numbers for numbers, _ in by_length(rows, 3)]
    assert visits == [[4, 5, 2, 3, 6, 7], [0, 1]]
    held_out = HeldOut(rows, 2, DataSettings(padding_multiple=4), batches=3)
    shape, batches = held_out.visit(2)
    assert (shape.batch, shape.sequence, batches, held_out.examples) == (2, 12, 2, 4)
    assert held_out.shortest == 12
    assert [cuts for _, _, cuts in held_out._visits(lambda _: None)] == [2]


def test_weights_shares_and_samples_are_of_whole_pairs(tmp_path: Path, tokenizer: Any) -> None:
    def written(name: str, count: int) -> str:
        lines = [{"prompt": f"{name}{n} ", "chosen": "yes", "rejected": "no"} for n in range(count)]
        return str(jsonl(tmp_path / f"{name}.jsonl", *lines))

    def pairs(rows: Any) -> list[str]:
        assert (type(rows), rows.group) == (Encoded, 2)
        shown = [tokenizer.decode(rows[row][0]) for row in range(len(rows))]
        for chosen, rejected in zip(shown[::2], shown[1::2], strict=True):
            assert chosen.removesuffix("yes</s>") == rejected.removesuffix("no</s>")
        return [text.removesuffix(" yes</s>").removeprefix("<s>") for text in shown[::2]]

    a, b = written("a", 9), written("b", 3)
    mixed = DataSettings(train=(a, b), weights=(1, 1))
    drawn = pairs(training_set(mixed, tokenizer, objective=OBJECTIVES["dpo"]))
    assert {*drawn} == {*(f"a{n}" for n in range(9)), *(f"b{n}" for n in range(3))}
    two = DataSettings(train=(a, b), max_samples=2)
    assert pairs(training_set(two, tokenizer, objective=OBJECTIVES["dpo"])) == [
        "a0",
        "a1",
        "b0",
        "b1",
    ]
    shared = DataSettings(train=(a, b), eval_share=0.25)
    trained = pairs(training_set(shared, tokenizer, objective=OBJECTIVES["dpo"]))
    held_out, count = held_out_set(shared, tokenizer, 0, objective=OBJECTIVES["dpo"])
    assert (len(trained), count) == (9, 3)
    assert {*trained, *pairs(held_out)} == {*drawn}


# --- files
# --------------------------------------------------------------------------------------------------


def test_large_pairs_lie_in_maps_and_in_a_file_of_tokens(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    lines = [
        {"prompt": "q", "completion": "a" * (n % 7 + 1), "advantage": n, "label": n % 2 == 0,
         "group": n // 2, "old_log_probabilities": [-float(n)] * (n % 7 + 2)}
        for n in range(200)
    ]  # fmt: skip
    file = DataSettings(train=str(jsonl(tmp_path / "s.jsonl", *lines)))
    expected = training_set(file, tokenizer, objective=OBJECTIVES["policy_gradient"])
    assert isinstance(expected, Encoded)
    monkeypatch.setattr(data_sets, "IN_MEMORY", 1000)
    monkeypatch.setattr(token_files, "KEPT_FROM", 100)
    for _ in range(2):
        rows = training_set(file, tokenizer, objective=OBJECTIVES["policy_gradient"])
        assert isinstance(rows, Encoded)
        assert rows.in_maps
        for name, array in expected.arrays().items():
            assert np.array_equal(rows.arrays()[name], array), name
    assert rows.summary == expected.summary
    (header,) = (tmp_path / "cache/tokens").glob("*.json")
    header.with_suffix(".tokens").write_bytes(header.with_suffix(".tokens").read_bytes()[:-1])
    again = training_set(file, tokenizer, objective=OBJECTIVES["policy_gradient"])
    assert again.fingerprint() == expected.fingerprint()  # type: ignore[union-attr]
    other = training_set(file, tokenizer, objective=OBJECTIVES["kto"])
    assert isinstance(other, Encoded)
    assert [*other.numbers] == ["desirable"], "another objective has other tokens"
    mapped = pairs_of([(2, 3), (4, 5)]).mapped(tmp_path)
    assert (mapped.group, mapped.numbers["n"].tolist()) == (2, [0, 0.5, 1, 1.5])


# --- batches
# --------------------------------------------------------------------------------------------------


@given(
    examples=st.integers(1, 7),
    cuts=st.integers(1, 3),
    world=st.integers(1, 3),
    by_rows=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_ranks_and_micro_batches_have_whole_pairs(
    examples: int, cuts: int, world: int, by_rows: bool
) -> None:
    """Rank r's part of micro-batch m holds pairs of the list that the lists' own slices give."""
    rows = pairs_of([(3, 4)] * examples)
    batch: Any = RowBatch(rows, list(range(2 * examples)), numbered=True)
    if not by_rows:
        batch = dict(batch)
    padded = [*range(examples), *[examples - 1] * (-examples % (cuts * world))]
    size = len(padded) // (cuts * world)
    seen: list[int] = []
    for rank in range(world):
        own = share(batch, cuts, world, rank, group=2)
        parts = micro_batches(own, cuts, group=2)
        for m, part in enumerate(parts):
            begin = (m * world + rank) * size
            numbers = padded[begin : begin + size]
            expected = [row for number in numbers for row in (2 * number, 2 * number + 1)]
            assert part["objective.row"].tolist() == expected
            assert part["objective.n"].tolist() == [row / 2 for row in expected]
            assert (part["objective.t"][:, 0] * 2 - 10).tolist() == expected
            copies = [place >= examples for place in range(begin, begin + size) for _ in range(2)]
            assert (part["labels"] == -100).all(1).tolist() == copies
            learnt = (part["labels"] != -100).any(1)
            seen += part["objective.row"][learnt].tolist()
    assert sorted(seen) == list(range(2 * examples))


def test_a_pair_is_not_parted_by_a_wrong_number_of_parts() -> None:
    batch = dict(RowBatch(pairs_of([(3, 4)] * 4), range(8)))
    for cut in (micro_batches, pack_parts):
        with refused(ValueError, "4 examples 2 gradient_accumulation_steps 8"):
            cut(batch, 8, group=2)
    with refused(ValueError, "7 rows 2"):
        share({name: tensor[:7] for name, tensor in batch.items()}, 1, 1, 0, group=2)
    with refused(ValueError, "objective.n"):
        micro_batches({**batch, "objective.n": batch["objective.n"][:3]}, 1)
    with refused(ValueError, "weights objective"):
        micro_batches({**batch, "weights": batch["labels"]}, 1, further_columns=False)
    micro_batches(batch, 1, further_columns=False)


def test_numbers_of_rows_pass_where_tensors_are_padded_or_cut() -> None:
    batch = dict(RowBatch(pairs_of([(3, 4), (5, 2)]), range(4)))
    longer = lengthened(batch, 9)
    assert longer["objective.n"].tolist() == [0, 0.5, 1, 1.5]
    assert longer["objective.t"].shape == longer["labels"].shape == (4, 9)
    more = filled(batch, 3, group=2)
    assert more["objective.n"].tolist() == [0, 0.5, 1, 1.5, 1, 1.5]
    assert loss_tokens(more) == loss_tokens(batch)
    part = columns(batch, row_order(batch, 2, 3), 1)
    assert part["objective.n"].tolist() == [0, 0.5, 1, 1.5]


def test_settings_count_pairs() -> None:
    run = config.from_mapping(
        {"objective": "dpo", "batch_size": 6, "gradient_accumulation_steps": 3}
    )
    assert isinstance(run, RunConfig)
    assert run.micro_batch_rows == 4
