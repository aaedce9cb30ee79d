"""Oracle: the same data set held in memory, bit for bit; and the kernel, which says where bytes
lie."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockwalk.data import dataset
from blockwalk.data.corpus import training_set
from blockwalk.data.dataset import Encoded
from blockwalk.plan.run_config import DataSettings
from tests.support import data_files
from tests.support.data_files import jsonl

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
