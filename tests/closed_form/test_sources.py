"""Oracle: the records of each file, written by hand in the shapes that people have; LLaMA-Factory's
demos, where they are."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import sqlite3
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from blockwalk.data import sources
from blockwalk.data.corpus import held_out_set, mixture, training_set
from blockwalk.data.dataset import Choices, Encoded
from blockwalk.data.encode import encode, first_example
from blockwalk.data.formats import Format, detect_format
from blockwalk.data.packing import pack
from blockwalk.data.records import Record
from blockwalk.data.sources import read_records
from blockwalk.data.turns import turns_of
from blockwalk.plan.objectives import OBJECTIVES
from blockwalk.plan.run_config import DataSettings, RunConfig
from blockwalk.train import config
from blockwalk.train.progress import Progress
from tests.support import data_files
from tests.support.chat_data import TEMPLATE, said
from tests.support.data_files import jsonl
from tests.support.messages import refused, says

tokenizer = data_files.tokenizer

REAL = Path(
    os.environ.get("BLOCKWALK_REAL", Path(__file__).resolve().parents[3] / "shared" / "real")
)


DEMO = REAL / "llamafactory-demo"


def turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture
def chat(tokenizer: Any) -> Any:
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


# --- files
# --------------------------------------------------------------------------------------------------


def test_an_array_and_lines_hold_the_same_records(tmp_path: Path) -> None:
    rows = [{"text": "a\nb", "n": 1}, {"text": "c"}]
    (tmp_path / "array.json").write_text("\ufeff \n" + json.dumps(rows, indent=2))
    jsonl(tmp_path / "lines.json", *rows)
    for name, place in (("array.json", "record 2"), ("lines.json", "line 2")):
        found = list(read_records(tmp_path / name))
        assert [record.fields for record in found] == rows
        assert found[1].place.endswith(place)


def test_csv_has_commas_quotes_and_line_breaks(tmp_path: Path) -> None:
    """Against the standard library's writer."""
    rows = [{"prompt": 'a, "b"\nc', "completion": "d"}, {"prompt": "é", "completion": ""}]
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        text = io.StringIO()
        writer = csv.DictWriter(text, ["prompt", "completion"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
        (tmp_path / f"d{suffix}").write_text(
            "\ufeff" + text.getvalue(), encoding="utf-8", newline=""
        )
        assert [record.fields for record in read_records(tmp_path / f"d{suffix}")] == rows
    (tmp_path / "long.csv").write_text("text\n" + "x" * 200_000)
    assert len(next(read_records(tmp_path / "long.csv")).text("text")) == 200_000


def test_a_text_file_is_one_record(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("first\n\nsecond")
    assert [record.fields for record in read_records(tmp_path / "d.txt")] == [
        {"text": "first\n\nsecond"}
    ]


@pytest.mark.parametrize(
    ("names", "both"),
    [
        (("gsm8k_train.jsonl", "gsm8k_test.jsonl"), True),
        (("data.json", "Validation-00000-of-00001.json"), True),
        (("part-1.jsonl", "part-2.jsonl", "contest.jsonl"), False),
        (("test-1.jsonl", "test-2.jsonl"), False),
    ],
)
def test_a_folder_of_a_data_sets_splits_is_not_one_source(
    names: tuple[str, ...], both: bool, tmp_path: Path
) -> None:
    """Oracle: the names that data sets give their splits; who names a folder of both would train on
    the records that are held out."""
    for name in names:
        jsonl(tmp_path / name, {"text": name})
    if both:
        with refused(ValueError, " ".join(names)):
            list(read_records(tmp_path))
    else:
        assert len(list(read_records(tmp_path))) == len(names)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a.jsonl", "more/b.jsonl"), "more/ sources"),
        (("a.jsonl", "more/deep/b.csv"), "more/ sources"),
        (("a.jsonl", "more/b.arrow"), "more/"),
        (("more/b.jsonl",), "more/"),
        (("a.jsonl", "b.jsonl.xz"), "b.jsonl.xz unpack"),
        (("a.jsonl", "b.txt.gz"), "b.txt.gz unpack"),
        (("a.jsonl", "b.arrow", "c/d.json"), "b.arrow c/ unpack sources"),
        (("a.jsonl", "b.xlsx"), "b.xlsx"),
    ],
)
def test_data_of_a_folder_that_are_not_read_are_refused(
    names: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """Oracle: the list of what lies there. Without the refusal they would be left out."""
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        jsonl(tmp_path / name, {"text": name})
    with refused(ValueError, tmp_path, message):
        list(read_records(tmp_path))


def test_a_folder_reads_capitals_and_names_what_is_no_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.jsonl", "b.JSONL", "README.md", "notes.txt", ".gitattributes", ".git/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        jsonl(tmp_path / name, {"text": name})
    (tmp_path / "pictures").mkdir()
    texts = [record.text("text") for record in read_records(tmp_path)]
    assert texts == ["a.jsonl", "b.JSONL"]
    says(caplog.text, "README.md notes.txt")
    assert "gitattributes" not in caplog.text
    assert [record.text("text") for record in read_records(tmp_path / "b.JSONL")] == ["b.JSONL"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("d.csv", 'prompt,completion\nq,a\nq,"a\nq,a\nq,a\n', "d.csv 3 quote"),
        ("d.csv", 'prompt,completion\n"q\n2",a\nq,"a\nq,a\nq,"a"\n', "d.csv 4 quote"),
        ("d.tsv", 'prompt\tcompletion\nq\t"Yes" he said\n', "d.tsv 2 quote"),
        ("d.csv", "prompt,completion,completion\na,b,c\n", "d.csv header completion 2"),
        ("d.jsonl", '{"text": "a"}\n{"text": "b", "text": "c"}\n', "d.jsonl 2 text"),
        ("d.json", '[{"messages": [{"role": "user", "role": "b"}]}]', "d.json role 2"),
    ],
)
def test_a_file_that_would_lose_a_part_of_itself_is_refused(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    """Against pandas, which refuses a quote without end, and RFC 8259: names are unique."""
    (tmp_path / name).write_text(text)
    with refused(ValueError, message):
        list(read_records(tmp_path / name))


@pytest.mark.parametrize("name", ["d.jsonl", "d.csv", "d.parquet", "d.txt"])
@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zip"])
def test_a_packed_file_says_so_whatever_it_is_called(name: str, kind: str, tmp_path: Path) -> None:
    """Against the standard library's packers."""
    file = tmp_path / name
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("d.jsonl", '{"text": "a"}\n')
    else:
        packer: Any = {"gzip": gzip, "bzip2": bz2, "xz": lzma}[kind]
        file.write_bytes(packer.compress(b'{"text": "a"}\n'))
    with refused(ValueError, name, kind, "unpack"):
        list(read_records(file))


def _parquet(file: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["a"]}), file)


def _arrow(file: Path) -> None:
    table = pyarrow.table({"text": ["a"]})
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)


def _stream(file: Path) -> None:
    table = pyarrow.table({"text": ["a"]})
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)


def _array(file: Path) -> None:
    with file.open("wb") as out:
        np.save(out, np.zeros(3))


def _data_base(file: Path) -> None:
    with sqlite3.connect(file) as data_base:
        data_base.execute("create table t (text)")


def _tar(file: Path) -> None:
    with tarfile.open(file, "w") as archive:
        archive.addfile(tarfile.TarInfo("d.jsonl"))


def _page(file: Path) -> None:
    file.write_text("\n<!DOCTYPE html>\n<html>404</html>")


OTHERS = {
    "Parquet": _parquet,
    "Arrow": _arrow,
    "Arrow stream": _stream,
    "NumPy": _array,
    "data base": _data_base,
    "tar unpack": _tar,
    "web page": _page,
}


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv"])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_file_of_another_kind_says_what_it_is(name: str, kind: str, tmp_path: Path) -> None:
    """Against the libraries that write such files."""
    file = tmp_path / name
    OTHERS[kind](file)
    with refused(ValueError, f"{file} {kind}"):
        list(read_records(file))


def test_texts_that_begin_like_other_files_are_texts(tmp_path: Path) -> None:
    for name in ("PAR1 is a word", "<html> is a mark", "ORC\nelf", "%PDF", "ARROW1"):
        (tmp_path / "d.txt").write_text(name)
        texts = [record.fields["text"] for record in read_records(tmp_path / "d.txt")]
        assert "\n".join(texts) == name


UNPACKED_TEXTS = {
    "d.jsonl": '{"text": "é"}\n\n{"text": "b"}\n',
    "d.json": '[{"text": "é"}, {"text": "b"}]',
    "d.csv": 'text,n\né,1\n"b\n""c""",2\n',
    "d.TSV": "\ufefftext\tn\r\né\t1\r\n",
}


@pytest.mark.parametrize("name", UNPACKED_TEXTS)
def test_a_gzip_file_has_the_records_of_what_it_holds(name: str, tmp_path: Path) -> None:
    """Oracle: the same file, unpacked."""
    content = UNPACKED_TEXTS[name].encode()
    (tmp_path / name).write_bytes(content)
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(content[:9]) + gzip.compress(content[9:]))
    expected = [record.fields for record in read_records(tmp_path / name)]
    assert [record.fields for record in read_records(packed)] == expected
    places = [record.place for record in read_records(packed)]
    assert places[0].startswith(str(packed))
    (tmp_path / name).unlink()
    assert [record.fields for record in read_records(tmp_path)] == expected, "of a folder"


def test_gzip_files_that_cannot_be_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut, damaged, no gzip file, and one that would take all memory."""
    lines = "".join(json.dumps({"text": f"{n * 7919:x}" * 9}) + "\n" for n in range(3000))
    content = gzip.compress(lines.encode())
    packed = tmp_path / "d.jsonl.gz"
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 4
    for wrong in (content[: len(content) // 2], bytes(damaged), lines.encode()):
        packed.write_bytes(wrong)
        with refused(ValueError, str(packed)):
            list(read_records(packed))
    monkeypatch.setattr(sources, "LONGEST_UNPACKED", 1000)
    for text in ('{"text": "' + "a" * 2000 + '"}', "[" + " " * 2000 + "]"):
        packed.write_bytes(gzip.compress(text.encode()))
        with refused(ValueError, f"{packed} 1,000 unpack"):
            list(read_records(packed))


def test_a_parquet_file_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    with refused(ValueError, "d.parquet text 2"):
        list(read_records(tmp_path / "d.parquet"))


def test_columns_are_named_anew(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "d.jsonl", {"question": "1+1", "answer": "2"})
    (record,) = read_records(file, columns=["prompt = question", "completion=answer"])
    assert (record.text("prompt"), record.text("completion")) == ("1+1", "2")
    for columns, message in (
        (["prompt"], "data.columns prompt field=column"),
        (["prompt=asked"], "d.jsonl 1 asked data.columns question answer"),
    ):
        with refused(ValueError, message):
            next(read_records(file, columns=columns))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("d.json", '{\n "a": 1\n}', "d.json 1 JSON"),
        ("d.json", '[{"a": 1},', "d.json 1 11"),
        ("d.json", "[1]", "d.json 1 JSON"),
        ("d.csv", "text,label\na,b,c\n", "d.csv 1 header"),
        ("d.csv", "text\n\xff\n", "d.csv UTF-8 0xff 5"),
        ("d.txt", "\xff", "d.txt UTF-8 0xff 0"),
        ("d.parquet", "PAR1abc", "d.parquet 7"),
    ],
)
def test_a_broken_file_is_named_with_what_is_expected(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(text, encoding="latin-1")
    with refused(ValueError, message):
        list(read_records(tmp_path / name))


def test_a_hub_name_is_read_by_datasets_and_its_records_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: what a stand-in for the hub was asked, and the rows that it gave."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name: str, subset: str | None, *, split: str) -> Any:
        asked.append((name, subset, split))
        if name == "nobody/nothing":
            raise ConnectionError("the hub\nis not there")
        return datasets.Dataset.from_dict({"text": ["a", "b"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    first, second = read_records(
        "owner/cards", split="test", subset="easy", columns=["prompt=text"]
    )
    assert asked == [("owner/cards", "easy", "test")]
    assert (first.text("prompt"), second.place) == ("a", "owner/cards[test] row 2")
    with refused(ValueError, "nobody/nothing hub train", "the hub is not there"):
        next(read_records("nobody/nothing"))


# --- formats
# --------------------------------------------------------------------------------------------------


def test_alpaca_is_a_conversation_or_a_completion(chat: Any) -> None:
    fields = {"instruction": "Add", "input": "1 and 2", "output": "3"}
    assert said(fields, chat) == ("<user>Add\n1 and 2<assistant>3</s>", "3</s>")
    more = {**fields, "input": "", "system": "Be brief", "history": [["Hi", "Hello"]]}
    whole = "<system>Be brief<user>Hi<assistant>Hello</s><user>Add<assistant>3</s>"
    assert said(more, chat) == (whole, "Hello</s>3</s>")
    chat.chat_template = None
    assert said(fields, chat) == ("<s>Add\n1 and 2\n3</s>", "3</s>")


def test_sharegpt_is_a_conversation(chat: Any) -> None:
    turns = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {}}'},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "Rain."},
    ]
    record = {"system": "S", "tools": "[]", "conversations": turns}
    whole = "<system>S<user>Weather?<assistant>weather</s><tool>rain<assistant>Rain.</s>"
    assert said(record, chat) == (whole, "weather</s>Rain.</s>")
    spoken = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert turns_of(Record({"conversations": spoken}, "x"), Format.SHAREGPT) == spoken
    assert turns_of(Record({"messages": spoken}, "x"), Format.MESSAGES) == spoken


@pytest.mark.parametrize(
    ("fields", "unread"),
    [
        ({"text": "add it", "intent": "AddToPlaylist"}, ["intent"]),
        ({"text": "add it", "category": 3, "note": "", "more": None}, ["category"]),
        ({"prompt": "a", "completion": "b", "id": 0, "system": "s"}, ["id"]),
        (
            {"instruction": "a", "output": "b", "system_prompt": "s", "input": "", "url": "x"},
            ["url"],
        ),
        ({"question": "a", "answer": "b", "history": [["c", "d"]], "source": "x"}, ["source"]),
        ({"messages": turns("a", "b"), "tools": [], "system": "s", "rejected": "x"}, ["rejected"]),
        ({"messages": turns("a", "b"), "weight": 1, "chat_template_kwargs": {}}, []),
    ],
)
def test_columns_that_nobody_reads_are_named(
    fields: dict[str, Any], unread: list[str], chat: Any
) -> None:
    """Oracle: the columns of each format, by the page on data."""
    report = encode([Record(fields, "d.jsonl line 1")], chat, max_length=400).report
    assert list(report.unread) == unread
    notes = [line for line in report.warnings() if "not read" in line]
    assert len(notes) == bool(unread)
    for note in notes:
        says(note, *map(repr, unread))


def test_a_column_that_settings_name_is_read(tmp_path: Path, tokenizer: Any) -> None:
    file = jsonl(tmp_path / "d.jsonl", {"q": "1+1", "a": "2", "kind": "x"})
    columns = ["prompt=q", "completion=a"]
    for prompt, unread in (([], ("kind",)), (["{q} {kind}"], ())):
        records = read_records(file, columns=columns)
        encoded = encode(records, tokenizer, max_length=99, prompts=prompt)
        assert encoded.report.unread == unread
    settings = DataSettings(
        train=str(jsonl(tmp_path / "c.jsonl", {"text": "t", "intent": 0, "kind": "x"})),
        template="{text} is {label}",
        label_words=("a", "b"),
        label_field="intent",
    )
    assert training_set(settings, tokenizer).report.unread == ("kind",)


@pytest.mark.parametrize("name", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "say", "completion": "hi"},
        {"instruction": "say", "output": "hi"},
        {"messages": turns("say", "hi")},
    ],
    ids=["completion", "alpaca", "messages"],
)
def test_what_stands_before_a_conversation_is_followed(
    name: str, fields: dict[str, Any], chat: Any
) -> None:
    """Oracle: the record's own text; of it nothing is learnt."""
    encoded = encode([Record({name: "Be kind.", **fields}, "d.jsonl 1")], chat, max_length=400)
    runs = first_example(encoded, chat)
    shown = "".join(text for text, _ in runs)
    assert shown.index("Be kind.") < shown.index("say") < shown.index("hi")
    assert "Be kind." not in "".join(text for text, learnt in runs if learnt)
    assert encoded.report.unread == ()
    twice = {"system": "Be kind.", "system_prompt": "Be brief.", **fields}
    with refused(ValueError, "d.jsonl 1 system system_prompt"):
        encode([Record(twice, "d.jsonl 1")], chat, max_length=400)


def test_plain_answers_of_a_model_with_a_chat_template_are_noted(chat: Any) -> None:
    record = Record({"prompt": "a", "completion": "b"}, "d.jsonl 1")
    notes = encode([record], chat, max_length=99).report.warnings()
    assert any("chat template" in note and "messages" in note for note in notes)
    for prompts, template in ((["{prompt}"], TEMPLATE), ((), None)):
        chat.chat_template = template
        assert encode([record], chat, max_length=99, prompts=prompts).report.warnings() == []


def test_one_object_around_all_records_is_told_apart() -> None:
    with refused(ValueError, "d.json 1 'data' array"):
        detect_format(Record({"data": [{"prompt": "a", "completion": "b"}]}, "d.json 1"))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"conversations": []}, Format.SHAREGPT),
        ({"instruction": "", "output": "", "text": ""}, Format.ALPACA),
        ({"instruction": ""}, Format.ALPACA),
        ({"prompt": "", "completion": "", "chosen": "", "rejected": ""}, Format.COMPLETION),
    ],
)
def test_the_columns_tell_the_format(fields: dict[str, Any], kind: Format) -> None:
    assert detect_format(Record(fields, "x")) is kind


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conversations": [], "chosen": {}, "rejected": {}}, "data.format sharegpt"),
        ({"instruction": "", "chosen": "", "rejected": ""}, "data.columns output=chosen"),
        ({"messages": [], "label": True}, "data.format messages"),
        ({"question": "", "reply": ""}, "question reply data.columns"),
    ],
)
def test_detection_names_the_setting_that_reads_the_file(
    fields: dict[str, Any], message: str
) -> None:
    with refused(ValueError, f"f 1 {message}"):
        detect_format(Record(fields, "f record 1"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conversations": [{"from": "gpt"}]}, "conversations [0] content NoneType"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "[0] function_call JSON"),
        ({"conversations": [{"from": "gpt", "value": ""}], "tools": "x"}, "tools list JSON"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "history instruction output"),
        ({"instruction": "a", "input": 1, "output": "b"}, "input string int"),
        ({"instruction": "a"}, "output instruction data.columns output=COLUMN"),
    ],
)
def test_a_wrong_record_is_named_with_its_field(
    chat: Any, fields: dict[str, Any], message: str
) -> None:
    with refused(ValueError, f"f 8 {message}"):
        encode([Record(fields, "f line 8")], chat, max_length=9)


def test_a_format_that_needs_a_template_says_so(tokenizer: Any) -> None:
    with refused(ValueError, "x sharegpt template"):
        encode(
            [Record({"conversations": [{"from": "gpt", "value": "a"}]}, "x")],
            tokenizer,
            max_length=9,
        )


# --- several sources
# -------------------------------------------------------------------------------------------------


def test_sources_of_several_formats_are_joined(tmp_path: Path, chat: Any) -> None:
    a = jsonl(tmp_path / "a.jsonl", {"text": "ab"})
    (tmp_path / "b.json").write_text(json.dumps([{"instruction": "c", "output": "d"}]))
    rows = training_set(DataSettings(train=(str(a), str(tmp_path / "b.json"))), chat)
    assert isinstance(rows, Encoded)
    assert chat.decode(rows.token_ids) == "<s>ab</s><user>c<assistant>d</s>"
    assert rows.report.records == 2
    held_out, count = held_out_set(
        DataSettings(eval=(str(a), str(tmp_path / "b.json"))), chat, limit=1
    )
    assert (len(held_out), count) == (1, 2)


def test_a_mixture_draws_by_weight_until_every_source_was_whole() -> None:
    """Closed form: every record comes; of draws by 3 to 1, a share of 3/4 within four standard
    deviations."""
    order, again, other = (list(mixture([300, 100], [3.0, 1.0], seed=seed)) for seed in (7, 7, 8))
    assert set(order) == set(range(400))
    assert order == again != other
    first = sum(row < 300 for row in order) / len(order)
    assert abs(first - 0.75) < 4 * np.sqrt(0.75 * 0.25 / len(order))
    repeats = Counter(row for row in order if row >= 300)
    assert max(repeats.values()) - min(repeats.values()) <= 1, "a source that runs out begins again"


def test_a_mixture_of_classification_keeps_words_and_labels_together(
    tmp_path: Path, tokenizer: Any
) -> None:
    files = [
        jsonl(tmp_path / f"{c}.jsonl", *({"text": c * (n + 1), "label": n % 2} for n in range(3)))
        for c in ("a", "b")
    ]
    settings = DataSettings(
        train=tuple(map(str, files)),
        weights=(1.0, 2.0),
        template="{text}{label}",
        label_words=("no", "yes"),
    )
    mixed = training_set(settings, tokenizer, every_word=True)
    assert isinstance(mixed, Choices)
    for row, target in enumerate(mixed.targets.tolist()):
        texts = [tokenizer.decode(mixed.rows[2 * row + c][0]) for c in range(2)]
        name = texts[0].removeprefix("<s>").removesuffix("no")
        assert texts == [f"<s>{name}no", f"<s>{name}yes"]
        assert target == (len(name) + 1) % 2


def test_settings_take_sources_and_weights() -> None:
    run = config.from_mapping({"data": {"train": ["a.json", "b.csv"], "weights": "0.7, 0.3"}})
    assert (run.data.train, run.data.weights) == (("a.json", "b.csv"), (0.7, 0.3))
    assert config.load(None, [("data.train", "some/a, b.json")]).data.train == ("some/a", "b.json")
    with refused(ValueError, "data.weights 1.0 data.train 2"):
        RunConfig(data=DataSettings(train=("a", "b"), weights=(1.0,)))


# --- what is shown
# --------------------------------------------------------------------------------------------------


def test_the_first_record_is_shown_with_what_is_learnt(
    tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        Record({"prompt": "1+1=\n", "completion": "2"}, "x"),
        Record({"prompt": "b", "completion": "c"}, "x"),
    ]
    rows = encode(records, tokenizer, max_length=20)
    assert first_example(rows, tokenizer) == [("<s>1+1=\n", False), ("2</s>", True)]
    packed = pack(rows, 20)
    assert len(packed) == 1
    assert first_example(packed, tokenizer) == [("<s>1+1=\n", False), ("2</s>", True)]
    Progress(1, done=0, log_every=1).show_learnt("first record", first_example(rows, tokenizer))
    assert capsys.readouterr().out == "first record (learnt: ⟦ ⟧):\n    <s>1+1=\n    ⟦2</s>⟧\n"
    Progress(1, done=0, log_every=1).show_learnt("t", [("x" * 1000, True)])
    assert len(capsys.readouterr().out) < 450


# --- as downloaded
# --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not DEMO.is_dir(), reason=f"LLaMA-Factory's demo data are not at {DEMO}")
def test_demos_of_llama_factory_are_read_as_they_are(chat: Any) -> None:
    for name, count in (("alpaca_en_demo", 999), ("identity", 91)):
        rows = encode(read_records(DEMO / f"{name}.json"), chat, max_length=None)
        assert (rows.report.records, rows.report.dropped) == (count, 0)
    first = next(iter(json.loads((DEMO / "alpaca_en_demo.json").read_text())))
    text, _ = said(first, chat)
    assert text.startswith(f"<user>{first['instruction']}<assistant>{first['output'][:40]}")
    for name, kind in (("dpo_en_demo", Format.SHAREGPT), ("kto_en_demo", Format.MESSAGES)):
        records = list(read_records(DEMO / f"{name}.json"))
        with refused(ValueError, f"data.format {kind}"):
            encode(records, chat, max_length=64)
        rows = encode(records, chat, max_length=None, format=kind)
        assert rows.report.records == len(records)
        if kind is Format.SHAREGPT:
            answer = records[0].fields["chosen"]["value"]
            assert chat.decode(rows[0][0]).endswith(f"<assistant>{answer}</s>")
        objective = OBJECTIVES["dpo" if kind is Format.SHAREGPT else "kto"]
        judged = encode(records, chat, max_length=None, objective=objective)
        assert (judged.examples, judged.report.dropped) == (len(records), 0)
        if kind is Format.SHAREGPT:
            answers = [records[0].fields[name]["value"] for name in ("chosen", "rejected")]
            rows_of_first = [chat.decode(ids[mask]) for ids, mask in (judged[0], judged[1])]
            assert rows_of_first == [f"{answer}</s>" for answer in answers]
        else:
            labels = [float(record.fields["label"]) for record in records]
            assert judged.numbers["desirable"].tolist() == labels
