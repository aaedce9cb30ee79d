"""Data sets as tokens, in flat arrays: examples, examples with candidates, and examples whose
answers are generated."""

from __future__ import annotations

import functools
import hashlib
import operator
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blockwalk.data.column import Column
from blockwalk.data.encode_report import EncodeReport
from blockwalk.system.atomic_files import PARTIAL
from blockwalk.system.file_maps import map_file

Ids = npt.NDArray[np.int32]
"""Token ids, or positions of tokens."""
Mask = npt.NDArray[np.bool_]
"""Whether each token is learnt."""


Integers = npt.NDArray[np.int64]
"""Counts, offsets and numbers of rows."""


IN_MEMORY = 16 << 20
"""Bytes of a data set's rows that stay in memory; those of a larger one lie in maps of files."""
_AT_ONCE = 1 << 20
"""Values of a data set's arrays that are looked at together."""


def mapped(array: np.ndarray, folder: Path) -> np.ndarray:
    """Return an array in the map of a nameless file in ``folder``: pages that the kernel may drop.
    It may not be written to."""
    if not array.nbytes:
        return array
    # nameless, but where a disk must have a name
    with tempfile.TemporaryFile(prefix=".scratch-", suffix=PARTIAL, dir=folder) as file:
        file.write(np.ascontiguousarray(array).data)
        file.flush()
        file_bytes = map_file(file.fileno(), array.nbytes, str(folder))
    return file_bytes.view(array.dtype).reshape(array.shape)


def _trusted(begin: int, end: int) -> None:
    """Accept tokens that this process has made."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a whole data set, for which all of it is read."""

    digest: str
    """Digest of the contents: 16 hexadecimal digits."""
    learnt: int
    """Tokens that are learnt."""
    longest: int
    """Tokens of the longest example."""
    furthest: int
    """Tokens of the longest document."""


@dataclass(frozen=True)
class Encoded:
    """Examples as tokens, end to end in flat arrays (T tokens in all, n examples)."""

    token_ids: Ids
    """Token ids [T]."""
    in_loss: Mask
    """Booleans [T]: whether the token is learnt."""
    starts: Integers
    """Offsets [n + 1] in tokens: example i is the slice ``starts[i]:starts[i + 1]``."""
    pad_id: int
    report: EncodeReport = field(default_factory=EncodeReport, compare=False)
    positions: Ids | None = None
    """Positions [T] of each token in its document, where an example is several documents; None: an
    example is one."""
    in_maps: bool = field(default=False, compare=False)
    """Whether the arrays lie in maps of files, whose pages the kernel may drop."""
    summary_at_start: Summary | None = field(default=None, compare=False)
    """The summary, where it was kept with the tokens."""
    require: Callable[[int, int], None] = field(default=_trusted, compare=False)
    """Check of the tokens from one to another, before they are read."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> tuple[Ids, Mask]:
        """Return ids and mask of one example, as views."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = int(self.starts[index])
        end = int(self.starts[index + 1])
        self.require(begin, end)
        return self.token_ids[begin:end], self.in_loss[begin:end]

    def learnt(self) -> Integers:
        """Return tokens of each example that are learnt, [n]."""
        return np.add.reduceat(self.in_loss, self.starts[:-1], dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        borders = 0 if self.positions is None else self.positions.nbytes
        return self.token_ids.nbytes + self.in_loss.nbytes + self.starts.nbytes + borders

    def lengths_of(self, rows: Sequence[int] | Integers) -> Integers:
        """Return tokens of the examples named, [n]."""
        numbers = np.asarray(rows, dtype=np.int64)
        return self.starts[numbers + 1] - self.starts[numbers]

    def predicted_of(self, row: int) -> int:
        """Return tokens of an example that a loss is a mean over: those learnt but for its first,
        which nothing predicts."""
        return int(np.count_nonzero(self[row][1][1:]))

    @functools.cached_property
    def summary(self) -> Summary:
        """Figures of all examples."""
        if self.summary_at_start is not None:
            return self.summary_at_start
        lengths = (
            int(np.diff(self.starts[begin : begin + _AT_ONCE + 1]).max())
            for begin in range(0, len(self), _AT_ONCE)
        )
        longest = max(lengths, default=0)
        furthest = longest
        if self.positions is not None:
            furthest = max((int(part.max()) + 1 for part in _parts(self.positions)), default=0)
        learnt = sum(int(np.count_nonzero(part)) for part in _parts(self.in_loss))
        return Summary(self._digest(), learnt, longest, furthest)

    def first(self, count: int) -> Encoded:
        """Return the first examples, as views."""
        end = int(self.starts[count])
        self.require(0, end)
        return replace(
            self,
            token_ids=self.token_ids[:end],
            in_loss=self.in_loss[:end],
            starts=self.starts[: count + 1],
            positions=None if self.positions is None else self.positions[:end],
            summary_at_start=None,
        )

    def select(self, rows: Iterable[int]) -> Encoded:
        """Return the examples named, in that order."""
        return self.cut([(int(self.starts[row]), int(self.starts[row + 1]))] for row in rows)

    def cut(self, rows: Iterable[Sequence[tuple[int, int]]], *, borders: bool = False) -> Encoded:
        """Return rows of spans of tokens, (begin, end) each, of unpacked data; with ``borders``
        every span is a document, at positions from 0, and its first token is not learnt."""
        assert self.positions is None
        writer = RowWriter()
        for row in rows:
            parts = [self._span(begin, end, borders=borders) for begin, end in row]
            writer.add(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        return writer.finish(self.pad_id, self.report)

    def _span(self, begin: int, end: int, *, borders: bool) -> tuple[np.ndarray, ...]:
        """Return ids and mask of some tokens; with ``borders`` as a document, with its
        positions."""
        self.require(begin, end)
        token_ids = self.token_ids[begin:end]
        in_loss = self.in_loss[begin:end]
        if not borders:
            return token_ids, in_loss
        positions = np.arange(end - begin, dtype=np.int32)
        return token_ids, in_loss & (positions > 0), positions

    def mapped(self, folder: Path) -> Encoded:
        """Return the examples with arrays in maps of files, whose pages the kernel may drop: as
        they are, or a copy in nameless files in ``folder``."""
        if self.in_maps:
            return self
        names = (
            "token_ids",
            "in_loss",
            "starts",
            *(() if self.positions is None else ("positions",)),
        )
        moved: dict[str, Any] = {name: mapped(getattr(self, name), folder) for name in names}
        return replace(self, **moved, in_maps=True, summary_at_start=self.summary)

    @staticmethod
    def concatenated(parts: Sequence[Encoded]) -> Encoded:
        """Return the examples of several data sets that are not packed, one after the other."""
        writer = RowWriter()
        for part in parts:
            for row in range(len(part)):
                writer.add(*part[row])
        report = functools.reduce(operator.add, [part.report for part in parts])
        return writer.finish(parts[0].pad_id, report)

    def fingerprint(self) -> str:
        """Return a digest of the contents, by which a resumed run knows its data again."""
        return self.summary.digest

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        borders = () if self.positions is None else (self.positions,)
        for array in (self.token_ids, self.in_loss, self.starts, *borders):
            for part in _parts(array):
                digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array's values, some at a time."""
    for begin in range(0, len(array), _AT_ONCE):
        yield array[begin : begin + _AT_ONCE]


class RowWriter:
    """The rows of a data set that is being made: in memory up to :data:`IN_MEMORY`, beyond it in
    maps of nameless files."""

    def __init__(self) -> None:
        self._token_ids = Column(np.int32)
        self._in_loss = Column(np.bool_)
        self._positions = Column(np.int32)
        self._starts = Column(np.int64)
        self._starts.extend(np.zeros(1, dtype=np.int64))
        self._columns = (self._token_ids, self._in_loss, self._positions, self._starts)
        self.tokens = 0
        """Tokens so far."""

    def __bool__(self) -> bool:
        """Whether there is a row."""
        return self._starts.nbytes > self._starts.itemsize

    @property
    def spilled(self) -> bool:
        """Whether some rows lie in files."""
        return any(column.spilled for column in self._columns)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows so far."""
        return sum(column.nbytes for column in self._columns)

    def add(self, token_ids: Ids, in_loss: Mask, positions: Ids | None = None) -> None:
        """Add a row: arrays [S] of ids, of whether each token is learnt, and, where it is several
        documents, of positions in these."""
        self._token_ids.extend(token_ids)
        self._in_loss.extend(in_loss)
        if positions is not None:
            self._positions.extend(positions)
        self.tokens += len(token_ids)
        self._starts.extend(np.asarray([self.tokens], dtype=np.int64))
        if sum(column.waiting for column in self._columns) > IN_MEMORY:
            for column in self._columns:
                column.spill()

    def finish(self, pad_id: int, report: EncodeReport) -> Encoded:
        """Return the rows as a data set; none may be added afterwards."""
        return Encoded(
            self._token_ids.array(),
            self._in_loss.array(),
            self._starts.array(),
            pad_id,
            report,
            self._positions.array() if self._positions.nbytes else None,
            in_maps=self.spilled,
        )


@dataclass(frozen=True)
class Choices:
    """Examples, each once with every candidate: rows ``firsts[i]:firsts[i + 1]`` are those of
    example i."""

    rows: Encoded
    firsts: Integers
    """Row numbers [n + 1] of each example's first candidate, and their end."""
    right: tuple[tuple[int, ...], ...]
    """The right candidates of each example; the first is learnt."""

    def __len__(self) -> int:
        return len(self.right)

    @property
    def targets(self) -> Integers:
        """The candidate of each example that is learnt, [n]."""
        return np.asarray([candidates[0] for candidates in self.right], dtype=np.int64)

    @property
    def classes(self) -> int:
        """The number of candidates, where every example has the same.

        Raises:
            ValueError: examples differ in it.
        """
        sizes = np.unique(np.diff(self.firsts))
        if len(sizes) > 1:
            raise ValueError(
                f"records have from {sizes[0]} to {sizes[-1]} candidates, which cannot be ranked in"
                " a training step: set zo.objective: loss"
            )
        return int(sizes[0])

    def select(self, rows: Iterable[int]) -> Choices:
        """Return the examples named, in that order."""
        chosen = list(rows)
        candidates = self.rows.select(
            c for row in chosen for c in range(self.firsts[row], self.firsts[row + 1])
        )
        sizes = np.diff(self.firsts)[chosen]
        return Choices(
            candidates, np.append(0, np.cumsum(sizes)), tuple(self.right[row] for row in chosen)
        )

    @staticmethod
    def concatenated(parts: Sequence[Choices]) -> Choices:
        """Return the examples of several data sets, one after the other."""
        rows = Encoded.concatenated([part.rows for part in parts])
        sizes = np.concatenate([np.diff(part.firsts) for part in parts])
        return Choices(
            rows,
            np.append(0, np.cumsum(sizes)),
            tuple(right for part in parts for right in part.right),
        )

    def answered(self) -> Encoded:
        """Return each example with its right candidate: what training learns."""
        return self.rows.select(self.firsts[:-1] + self.targets)


@dataclass(frozen=True)
class Answers:
    """Examples whose answers are generated."""

    rows: Encoded
    """Each with an answer that is right."""
    prompts: tuple[Ids, ...]
    """Token ids before the answer."""
    answers: tuple[tuple[str, ...], ...]
    """Texts that are right, for each."""

    def __len__(self) -> int:
        return len(self.prompts)
