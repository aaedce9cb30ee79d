"""Oracle: the same data set held in memory, bit for bit; and the definition of a permutation."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blockwalk.data import batching, column, dataset, encode, packing
from blockwalk.data.batching import Batches
from blockwalk.data.corpus import held_out_set, training_set
from blockwalk.data.dataset import Encoded
from blockwalk.data.permutation import permuted
from blockwalk.data.sources import read_records
from blockwalk.plan.run_config import DataSettings, RunConfig
from blockwalk.train.preflight import steps_of
from tests.support import data_files
from tests.support.data_files import jsonl
from tests.support.messages import refused, says

tokenizer = data_files.tokenizer


def written(path: Path, count: int, *, seed: int = 0) -> Path:
    """A file of short texts, of 5 to 40 letters."""
    draw = random.Random(seed)
    texts = ("".join(draw.choices("abcdefgh ", k=draw.randint(5, 40))) for _ in range(count))
    return jsonl(path, *({"text": text} for text in texts))


def arrays(rows: Encoded) -> list[np.ndarray]:
    """The arrays of a data set."""
    borders = [] if rows.positions is None else [rows.positions]
    return [rows.token_ids, rows.in_loss, rows.starts, *borders]


@pytest.mark.parametrize(
    "settings",
    [{}, {"packing": True}, {"weights": (1.0, 2.0)}, {"weights": (3.0, 1.0), "packing": True}],
    ids=json.dumps,
)
def test_rows_in_files_are_those_in_memory(
    settings: dict[str, Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    sources = tuple(str(written(tmp_path / f"{seed}.jsonl", 60, seed=seed)) for seed in (1, 2))
    data = DataSettings(train=sources, max_length=48, **settings)
    whole = training_set(data, tokenizer)
    monkeypatch.setattr(dataset, "IN_MEMORY", 500)
    monkeypatch.setattr(dataset, "_AT_ONCE", 7)
    rows = training_set(data, tokenizer)
    assert isinstance(whole, Encoded)
    assert isinstance(rows, Encoded)
    assert rows.in_maps
    assert not whole.in_maps
    for array, expected in zip(arrays(rows), arrays(whole), strict=True):
        assert np.array_equal(array, expected)
        assert array.dtype == expected.dtype
    assert rows.report == whole.report
    assert rows.fingerprint() == whole.fingerprint()
    lengths = np.diff(whole.starts)
    documents = lengths if whole.positions is None else whole.positions + 1
    assert rows.summary.longest == lengths.max()
    assert rows.summary.furthest == documents.max()
    assert rows.summary.learnt == whole.in_loss.sum()
    assert not list((tmp_path / "cache" / "tokens").iterdir()), "the files have no names"


# --- order
# --------------------------------------------------------------------------------------------------


def rows_of(count: int) -> Encoded:
    """Examples of 2 to 9 tokens."""
    lengths = [2 + 7 * number % 8 for number in range(count)]
    starts = np.cumsum([0, *lengths])
    return Encoded(np.zeros(starts[-1], np.int32), np.ones(starts[-1], bool), starts, 0)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 1000, 4097])
def test_a_computed_order_is_a_permutation(count: int) -> None:
    """Oracle: the numbers themselves, sorted."""
    numbers = np.arange(count)
    orders = [permuted(numbers, count, str(key)) for key in range(20)]
    assert all(sorted(order.tolist()) == numbers.tolist() for order in orders)
    places = np.asarray([count - 1, 0])
    assert permuted(places, count, "0").tolist() == orders[0][places].tolist(), "a function"


def test_a_computed_order_looks_drawn() -> None:
    """Oracle: chi-squared of places against images, of differences of neighbours, and of all orders
    of four; each within five standard deviations of its mean."""
    count = 100_003
    images = permuted(np.arange(count), count, "key")

    def deviations(counts: np.ndarray) -> float:
        expected = counts.sum() / counts.size
        chi_squared = float(((counts - expected) ** 2 / expected).sum())
        return abs(chi_squared - counts.size) / (2 * counts.size) ** 0.5

    assert deviations(np.histogram2d(np.arange(count), images, bins=32)[0]) < 5
    assert deviations(np.histogram(np.diff(images) % count, bins=256)[0]) < 5
    orders = Counter(tuple(permuted(np.arange(4), 4, str(key)).tolist()) for key in range(2400))
    assert len(orders) == 24
    assert deviations(np.asarray(list(orders.values()))) < 5


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count", [1, 7, 50])
def test_batches_without_a_list_of_their_order(
    count: int, *, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: every example once an epoch, the longest first; and a run that was not interrupted,
    at seven places and in batches of other sizes."""
    monkeypatch.setattr(batching, "SHUFFLED_IN_MEMORY", 0)
    monkeypatch.setattr(batching, "_LOOKED_AT", 3)
    rows = rows_of(count)
    uninterrupted = Batches(rows, 1, 5, shuffle=shuffle)
    drawn = [uninterrupted.next_rows()[0] for _ in range(4 * count)]
    epochs = [drawn[begin : begin + count] for begin in range(0, len(drawn), count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    if shuffle:
        assert rows.lengths_of(epochs[0])[0] == np.diff(rows.starts).max()
        assert len({tuple(epoch) for epoch in epochs}) == (4 if count > 6 else 1)
    else:
        assert epochs[0] == list(range(count))
    for number in range(7):
        place = number * 3 * count // 7
        before = Batches(rows, 1, 5, shuffle=shuffle)
        for _ in range(place):
            before.next_rows()
        resumed = Batches(rows, 3, 5, shuffle=shuffle)
        resumed.load_state_dict(before.state_dict())
        continued = [row for _ in range(count // 4) for row in resumed.next_rows()]
        assert continued == drawn[place : place + len(continued)]


@pytest.mark.parametrize("in_memory", [0, 1 << 20])
def test_appended_examples_come_last_in_their_epoch(
    in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: runs on the data before they grew, and after; each example once an epoch."""
    monkeypatch.setattr(batching, "SHUFFLED_IN_MEMORY", in_memory)
    sizes = (20, 27, 30)
    before, more, most = (Batches(rows_of(size), 1, 5) for size in sizes)
    expected = Batches(rows_of(20), 1, 5)
    epoch = [expected.next_rows()[0] for _ in range(20)]
    drawn = [before.next_rows()[0] for _ in range(6)]
    with refused(ValueError, "training data"):
        more.load_state_dict(before.state_dict())
    more.load_state_dict(before.state_dict(), follow=True)
    drawn += [more.next_rows()[0] for _ in range(16)]
    assert drawn[:20] == epoch
    most.load_state_dict(json.loads(json.dumps(more.state_dict())), follow=True)
    resumed = Batches(rows_of(30), 2, 5)
    resumed.load_state_dict(json.loads(json.dumps(most.state_dict())))
    drawn += [most.next_rows()[0] for _ in range(8)]
    assert sorted(drawn[20:27]) == list(range(20, 27))
    assert sorted(drawn[27:]) == [27, 28, 29]
    assert drawn[20:] != sorted(drawn[20:]), "in an order of their own"
    continued = [row for _ in range(4) for row in resumed.next_rows()]
    assert continued == drawn[22:], "a second resumption"
    whole = Batches(rows_of(30), 1, 5)
    next_epoch = [whole.next_rows()[0] for _ in range(60)][30:]
    assert [most.next_rows()[0] for _ in range(30)] == next_epoch, "all are one from there on"
    other = Batches(rows_of(27).select([1, 0, *range(2, 27)]), 1, 5)
    with refused(ValueError, "tokens"):
        other.load_state_dict(before.state_dict(), follow=True)


def test_documents_are_packed_within_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: each window packed by itself."""
    rows = rows_of(40)
    monkeypatch.setattr(packing, "WINDOW", 16)
    packed = packing.pack(rows, 12)
    windows = [rows.select(range(begin, min(begin + 16, 40))) for begin in (0, 16, 32)]
    parts = [packing.pack(window, 12) for window in windows]
    lengths = np.concatenate([np.diff(part.starts) for part in parts])
    assert np.array_equal(np.diff(packed.starts), lengths)
    for name in ("token_ids", "in_loss", "positions"):
        expected = np.concatenate([getattr(part, name) for part in parts])
        assert np.array_equal(getattr(packed, name), expected)


# --- files that change
# --------------------------------------------------------------------------------------------------


def grow(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"text": "more"}\n')


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def replace(path: Path) -> None:
    """Put a file of the same bytes in its place."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


@pytest.mark.parametrize("change", [grow, shrink, replace, Path.unlink])
@pytest.mark.parametrize("count", [3, 2000])
def test_a_file_that_changes_while_it_is_read(
    count: int, change: Callable[[Path], None], tmp_path: Path
) -> None:
    """Oracle: the bytes that the file had."""
    path = written(tmp_path / "train.jsonl", count)
    records = read_records(path)
    next(records)
    with refused(ValueError, f"{path} {path.stat().st_size:,}"):
        change(path)
        list(records)


def test_a_disk_too_full_for_the_tokens_is_named_before_it_is_full(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the tokens of the whole file, of which a half had been encoded."""
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    data = DataSettings(train=str(written(tmp_path / "train.jsonl", 3000)))
    whole = training_set(data, tokenizer)
    assert isinstance(whole, Encoded)
    monkeypatch.setattr(dataset, "IN_MEMORY", whole.nbytes // 2)
    asked: list[int] = []
    monkeypatch.setattr(encode, "require_room", lambda what, nbytes: asked.append(nbytes))
    training_set(data, tokenizer)
    assert asked == [pytest.approx(0.5 * whole.nbytes, rel=0.1)]
    monkeypatch.undo()
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dataset, "IN_MEMORY", 500)
    free = 1000
    monkeypatch.setattr(column.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with refused(ValueError, f"train.jsonl {free / 1e9:.3g} {tmp_path / 'cache'} BLOCKWALK_CACHE"):
        training_set(data, tokenizer)


# --- settings
# --------------------------------------------------------------------------------------------------


def test_the_first_records_of_each_source_are_taken(tokenizer: Any, tmp_path: Path) -> None:
    """Oracle: files that have no more records than these; and the lines of their shares."""
    sources = [written(tmp_path / f"{seed}.jsonl", 30, seed=seed) for seed in (1, 2)]
    shorter = [
        jsonl(tmp_path / f"first-{path.name}", *path.read_text().splitlines()[:10])
        for path in sources
    ]
    data = DataSettings(train=tuple(map(str, sources)), max_samples=10, eval_share=0.1)
    expected = DataSettings(train=tuple(map(str, shorter)), eval_share=0.1)
    rows = training_set(data, tokenizer)
    assert isinstance(rows, Encoded)
    assert len(rows) == 18
    assert rows.fingerprint() == training_set(expected, tokenizer).fingerprint()  # type: ignore[union-attr]
    held_out, records = held_out_set(data, tokenizer, 0)
    assert records == 2
    assert held_out.fingerprint() == held_out_set(expected, tokenizer, 0)[0].fingerprint()  # type: ignore[union-attr]
    run = RunConfig(data=data, batch_size=3)
    assert steps_of(run) == 6
    with refused(ValueError, "data.max_samples -1"):
        RunConfig(data=DataSettings(max_samples=-1))


def test_encoding_says_how_far_it_is(
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the bytes of the file and the tokens of its rows."""
    monkeypatch.setattr(encode, "QUIET", 0.0)
    rows = training_set(DataSettings(train=str(written(tmp_path / "a.jsonl", 600))), tokenizer)
    assert isinstance(rows, Encoded)
    lines = capsys.readouterr().err.splitlines()
    says(lines[-1], f"a.jsonl {int(rows.starts[-2]):,} 100% 0")
    shares = [int(line.partition("%")[0].rpartition(" ")[2]) for line in lines]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(100 * 256 / 600, abs=3), "a chunk was read"
    assert len(lines) == 600
