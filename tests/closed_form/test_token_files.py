"""Oracle: the data set encoded anew, with nothing kept, bit for bit; and a count of the texts that
are tokenised."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockwalk.data import encode, token_files
from blockwalk.data.corpus import held_out_set, training_set
from blockwalk.data.dataset import Encoded
from blockwalk.plan.run_config import DataSettings
from blockwalk.system.atomic_files import Damaged
from tests.closed_form.test_large_data import arrays, written
from tests.support import data_files
from tests.support.chat_data import TEMPLATE
from tests.support.messages import refused

tokenizer = data_files.tokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of tokens, for data of any size."""
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(token_files, "KEPT_FROM", 0)
    return tmp_path / "cache" / "tokens"


@contextmanager
def counted() -> Iterator[list[int]]:
    """The numbers of texts that are tokenised meanwhile, a call each."""
    calls: list[int] = []
    chunks = encode._chunks

    def noting(rendered: Any) -> Any:
        for chunk in chunks(rendered):
            calls.append(len(chunk))
            yield chunk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_chunks", noting)
        yield calls


def anew(data: DataSettings, tokenizer: Any, seed: int = 0) -> Encoded:
    """The data set with nothing kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "KEPT_FROM", 1 << 60)
        rows = training_set(data, tokenizer, seed=seed)
    assert isinstance(rows, Encoded)
    return rows


def require_equal(rows: Any, expected: Encoded) -> None:
    """Every array, value by value, and what is told of them."""
    for array, array_expected in zip(arrays(rows), arrays(expected), strict=True):
        assert array.dtype == array_expected.dtype
        assert np.array_equal(array, array_expected)
    assert rows.report == expected.report
    assert rows.pad_id == expected.pad_id
    assert rows.summary == replace(expected, summary_at_start=None).summary


@pytest.mark.parametrize("packing", [False, True])
def test_a_second_start_reads_what_the_first_one_encoded(
    packing: bool, tokenizer: Any, folder: Path, tmp_path: Path
) -> None:
    source = str(written(tmp_path / "train.jsonl", 80))
    data = DataSettings(train=source, eval_share=0.1, max_length=24, packing=packing)
    expected = anew(data, tokenizer)
    for texts in (72, 0, 0):
        with counted() as calls:
            rows = training_set(data, tokenizer)
        assert sum(calls) == texts
        require_equal(rows, expected)
    for texts in (8, 0):
        with counted() as calls:
            held_out, records = held_out_set(data, tokenizer, 0)
        assert sum(calls) == texts
        assert records == 8
        assert isinstance(held_out, Encoded)
    assert len(list(folder.glob("*.tokens"))) == 2


def test_whatever_makes_other_tokens_has_another_key(
    tokenizer: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path / "train.jsonl", 30)
    data = DataSettings(train=str(source), max_length=24, weights=(1.0,))
    training_set(data, tokenizer)

    def encodes(data: DataSettings = data, seed: int = 0) -> bool:
        with counted() as calls:
            rows = training_set(data, tokenizer, seed=seed)
        require_equal(rows, anew(data, tokenizer, seed))
        return bool(calls)

    assert not encodes()
    assert not encodes(replace(data, shuffle=False, eval=str(source)))
    assert encodes(replace(data, max_length=23))
    assert encodes(seed=1), "it draws the mixture"
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    assert encodes()
    monkeypatch.undo()
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(token_files, "KEPT_FROM", 0)
    before = source.stat()
    content = source.read_bytes()
    source.write_bytes(content.replace(b"a", b"h", 1))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert encodes(), "the same size and time, and another letter"
    source.write_bytes(content)
    assert not encodes()


def test_forty_damages_are_noticed(tokenizer: Any, folder: Path, tmp_path: Path) -> None:
    """Of the tokens, of their digests and of the header: bits, bytes cut off, and files that are
    gone."""
    data = DataSettings(train=str(written(tmp_path / "train.jsonl", 60)), max_length=24)
    expected = anew(data, tokenizer)
    training_set(data, tokenizer)
    (tokens,) = folder.glob("*.tokens")
    whole = {path: path.read_bytes() for path in (tokens, tokens.with_suffix(".json"))}
    ends = np.cumsum([0, *(-(-array.nbytes // token_files.CHUNK) for array in arrays(expected))])
    begins = [int(end) * token_files.CHUNK for end in ends[:-1]]
    draw = random.Random(0)
    damages: list[tuple[Path, int, bool]] = []
    for begin, array in zip(begins, arrays(expected), strict=True):
        damages += [(tokens, begin + draw.randrange(array.nbytes), False) for _ in range(7)]
    tail = len(whole[tokens]) - int(ends[-1]) * token_files.CHUNK
    damages += [(tokens, -draw.randint(1, tail), False) for _ in range(4)]
    header = tokens.with_suffix(".json")
    damages += [(header, draw.randrange(len(whole[header])), False) for _ in range(9)]
    damages += [(path, draw.randrange(len(whole[path])), True) for path in whole for _ in range(2)]
    damages += [(path, 0, True) for path in whole]
    assert len(damages) == 40
    for path, place, cut in damages:
        damaged = bytearray(whole[path])
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged[:place] if cut else damaged)
        with counted() as calls:
            require_equal(training_set(data, tokenizer), expected)
        assert sum(calls) == 60, (path, place)
        assert tokens.read_bytes() == whole[tokens], "mended"


def test_damage_of_a_large_file_is_noticed_where_it_is_read(
    tokenizer: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "CHECKED_AT_ONCE", 0)
    monkeypatch.setattr(token_files, "CHUNK", 256)
    data = DataSettings(train=str(written(tmp_path / "train.jsonl", 60)), max_length=24)
    expected = anew(data, tokenizer)
    training_set(data, tokenizer)
    (tokens,) = folder.glob("*.tokens")
    damaged = bytearray(tokens.read_bytes())
    damaged[4 * int(expected.starts[40])] ^= 1  # the first token of an example
    tokens.write_bytes(damaged)
    with counted() as calls:
        rows = training_set(data, tokenizer)
    assert not calls
    assert isinstance(rows, Encoded)
    assert np.array_equal(rows[0][0], expected[0][0])
    with refused(Damaged, str(tokens), "resume_from_checkpoint"):
        rows[40]
    with counted() as calls:
        require_equal(training_set(data, tokenizer), expected)
    assert sum(calls) == 60, "it was removed"


def child(work: Callable[[], object]) -> int:
    """A process of its own, which leaves by its work's end; its id."""
    if pid := os.fork():
        return pid
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def test_processes_share_one_encoding(tokenizer: Any, folder: Path, tmp_path: Path) -> None:
    data = DataSettings(train=str(written(tmp_path / "train.jsonl", 300)), max_length=24)
    expected = anew(data, tokenizer)
    log = tmp_path / "calls"

    def work() -> None:
        with counted() as calls:
            require_equal(training_set(data, tokenizer), expected)
        with log.open("a") as file:
            file.write(f"{sum(calls)}\n")

    children = [child(work) for _ in range(3)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    assert sorted(map(int, log.read_text().split())) == [0, 0, 300]


def kill_at(name: str, number: int) -> None:
    """Have this process killed at a call of a function of ``os``."""
    call = getattr(os, name)
    calls: list[Any] = []

    def killing(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        if len(calls) > number:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)

    setattr(os, name, killing)


@pytest.mark.parametrize("name", ["fsync", "replace", "unlink"])
def test_kills_leave_nothing_wrong(name: str, tokenizer: Any, folder: Path, tmp_path: Path) -> None:
    """At the calls that write, sync, rename and remove."""
    data = DataSettings(train=str(written(tmp_path / "train.jsonl", 30)), max_length=24)
    expected = anew(data, tokenizer)

    def work(number: int) -> None:
        kill_at(name, number)
        training_set(data, tokenizer)

    for number in range(4):
        os.waitpid(child(partial(work, number)), 0)
        require_equal(training_set(data, tokenizer), expected)
        assert not list(folder.glob(".*"))
        for path in folder.glob("*.json"):
            path.unlink()
