"""Data sets as tokens, in flat arrays: examples, examples with candidates, and examples whose
answers are generated."""

from __future__ import annotations

import functools
import hashlib
import operator
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from blockwalk.data.column import Column
from blockwalk.data.encode_report import EncodeReport
from blockwalk.plan.words import counted
from blockwalk.system.atomic_files import PARTIAL
from blockwalk.system.file_maps import map_file

Ids = npt.NDArray[np.int32]
"""Token ids, or positions of tokens."""
Mask = npt.NDArray[np.bool_]
"""Whether each token is learnt."""


Integers = npt.NDArray[np.int64]
"""Counts, offsets and numbers of rows."""


Numbers = Mapping[str, npt.NDArray[np.float64]]
"""Numbers of rows, or of tokens, by name."""

NO_NUMBERS: Numbers = MappingProxyType({})


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


_DTYPES = {"token_ids": np.int32, "in_loss": np.bool_, "starts": np.int64, "positions": np.int32}
_OF_ROWS = "numbers."
_OF_TOKENS = "token_numbers."


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the type of the values of one of :meth:`Encoded.arrays`."""
    return np.dtype(_DTYPES.get(name, np.float64))


def is_by_token(name: str) -> bool:
    """Return whether one of :meth:`Encoded.arrays` has a value for each token, [T]."""
    return name != "starts" and not name.startswith(_OF_ROWS)


@dataclass(frozen=True)
class Encoded:
    """Examples as tokens, end to end in flat arrays (T tokens in all, n rows).

    An example is :attr:`group` neighbouring rows: one, or a pair of answers to a prompt, the chosen
    one first. Whatever counts, draws or shares out examples parts none."""

    token_ids: Ids
    """Token ids [T]."""
    in_loss: Mask
    """Booleans [T]: whether the token is learnt."""
    starts: Integers
    """Offsets [n + 1] in tokens: row i is the slice ``starts[i]:starts[i + 1]``."""
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
    group: int = 1
    """Neighbouring rows that are one example."""
    numbers: Numbers = field(default_factory=dict)
    """Numbers that records bring, float64 [n] each, by name."""
    token_numbers: Numbers = field(default_factory=dict)
    """Numbers of learnt tokens, float64 [T] each, by name; 0 for the others."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def examples(self) -> int:
        """The number of examples."""
        return len(self) // self.group

    @property
    def counted_examples(self) -> str:
        """The number of examples with their noun, for a message."""
        return counted(self.examples, self.noun)

    @property
    def noun(self) -> str:
        """The noun of an example, for a message."""
        return "pair" if self.group == 2 else "sequence"

    def rows_of(self, examples: Sequence[int] | Integers) -> Integers:
        """Return the numbers of the rows of some examples, [examples × group]."""
        numbers = np.asarray(examples, dtype=np.int64)
        if self.group == 1:
            return numbers
        return (numbers[:, None] * self.group + np.arange(self.group)).ravel()

    def lengths(self, begin: int = 0, end: int | None = None) -> Integers:
        """Return tokens of each row of the examples from one to another, [examples, group]."""
        stop = self.examples if end is None else end
        starts = self.starts[begin * self.group : stop * self.group + 1]
        return np.diff(starts).reshape(-1, self.group)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays by name, of which those of :attr:`numbers` have dots."""
        borders = {} if self.positions is None else {"positions": self.positions}
        return {
            "token_ids": self.token_ids,
            "in_loss": self.in_loss,
            "starts": self.starts,
            **borders,
            **{f"{_OF_ROWS}{name}": array for name, array in self.numbers.items()},
            **{f"{_OF_TOKENS}{name}": array for name, array in self.token_numbers.items()},
        }

    @staticmethod
    def of_arrays(arrays: Mapping[str, np.ndarray], **facts: Any) -> Encoded:
        """Return the data set that :meth:`arrays` gave the arrays of, with its other fields."""
        values: dict[str, Any] = {name: arrays[name] for name in _DTYPES if name in arrays}
        for field_name in ("numbers", "token_numbers"):
            begin = f"{field_name}."
            values[field_name] = {
                name.removeprefix(begin): array
                for name, array in arrays.items()
                if name.startswith(begin)
            }
        return Encoded(**values, **facts)

    def __getitem__(self, index: int) -> tuple[Ids, Mask]:
        """Return ids and mask of one row, as views."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = int(self.starts[index])
        end = int(self.starts[index + 1])
        self.require(begin, end)
        return self.token_ids[begin:end], self.in_loss[begin:end]

    def learnt(self) -> Integers:
        """Return tokens of each row that are learnt, [n]."""
        return np.add.reduceat(self.in_loss, self.starts[:-1], dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays().values())

    def lengths_of(self, rows: Sequence[int] | Integers) -> Integers:
        """Return tokens of the rows named, [n]."""
        numbers = np.asarray(rows, dtype=np.int64)
        return self.starts[numbers + 1] - self.starts[numbers]

    def predicted_of(self, row: int) -> int:
        """Return tokens of a row that a loss is a mean over: those learnt but for its first,
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
        """Return the first rows, as views."""
        end = int(self.starts[count])
        self.require(0, end)
        return replace(
            self,
            token_ids=self.token_ids[:end],
            in_loss=self.in_loss[:end],
            starts=self.starts[: count + 1],
            positions=None if self.positions is None else self.positions[:end],
            summary_at_start=None,
            numbers={name: array[:count] for name, array in self.numbers.items()},
            token_numbers={name: array[:end] for name, array in self.token_numbers.items()},
        )

    def select(self, examples: Iterable[int]) -> Encoded:
        """Return the examples named, in that order."""
        assert self.positions is None
        writer = RowWriter()
        for example in examples:
            for row in range(example * self.group, (example + 1) * self.group):
                self.copy_row(row, writer)
        return writer.finish(self.pad_id, self.report, self.group)

    def copy_row(self, row: int, writer: RowWriter) -> None:
        """Add a row, with its numbers, to another data set."""
        begin = int(self.starts[row])
        end = int(self.starts[row + 1])
        writer.add(
            *self[row],
            numbers={name: float(array[row]) for name, array in self.numbers.items()},
            token_numbers={name: array[begin:end] for name, array in self.token_numbers.items()},
        )

    def cut(self, rows: Iterable[Sequence[tuple[int, int]]], *, borders: bool = False) -> Encoded:
        """Return rows of spans of tokens, (begin, end) each, of unpacked data; with ``borders``
        every span is a document, at positions from 0, and its first token is not learnt."""
        assert self.positions is None
        assert self.group == 1
        assert not self.numbers
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
        return Encoded.of_arrays(
            {name: mapped(array, folder) for name, array in self.arrays().items()},
            pad_id=self.pad_id,
            report=self.report,
            in_maps=True,
            summary_at_start=self.summary,
            require=self.require,
            group=self.group,
        )

    @staticmethod
    def concatenated(parts: Sequence[Encoded]) -> Encoded:
        """Return the examples of several data sets that are not packed, one after the other.

        Raises:
            ValueError: some have numbers that others lack.
        """
        names: list[set[str]] = [{*part.numbers, *part.token_numbers} for part in parts]
        if lacking := set[str]().union(*names) - names[0].intersection(*names):
            raise ValueError(
                f"some sources of data.train have {', '.join(sorted(lacking))} and others have not:"
                " give it in all of them, or in none"
            )
        writer = RowWriter()
        for part in parts:
            for row in range(len(part)):
                part.copy_row(row, writer)
        report = functools.reduce(operator.add, [part.report for part in parts])
        return writer.finish(parts[0].pad_id, report, parts[0].group)

    def fingerprint(self) -> str:
        """Return a digest of the contents, by which a resumed run knows its data again."""
        return self.summary.digest

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        if self.group > 1:
            digest.update(f"group {self.group}".encode())
        for name, array in self.arrays().items():
            if name not in _DTYPES:
                digest.update(name.encode())
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
        self._columns = {
            "token_ids": self._token_ids,
            "in_loss": self._in_loss,
            "starts": self._starts,
            "positions": self._positions,
        }
        self.tokens = 0
        """Tokens so far."""

    def __bool__(self) -> bool:
        """Whether there is a row."""
        return self._starts.nbytes > self._starts.itemsize

    @property
    def spilled(self) -> bool:
        """Whether some rows lie in files."""
        return any(column.spilled for column in self._columns.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the rows so far."""
        return sum(column.nbytes for column in self._columns.values())

    def add(
        self,
        token_ids: Ids,
        in_loss: Mask,
        positions: Ids | None = None,
        *,
        numbers: Mapping[str, float] = MappingProxyType({}),
        token_numbers: Numbers = NO_NUMBERS,
    ) -> None:
        """Add a row: arrays [S] of ids, of whether each token is learnt, and, where it is several
        documents, of positions in these.

        Args:
            numbers: the row's numbers; every row has the same ones.
            token_numbers: float64 [S] each, likewise.
        """
        self._token_ids.extend(token_ids)
        self._in_loss.extend(in_loss)
        if positions is not None:
            self._positions.extend(positions)
        for name, number in numbers.items():
            self._number_column(_OF_ROWS + name).extend(np.asarray([number], dtype=np.float64))
        for name, values in token_numbers.items():
            self._number_column(_OF_TOKENS + name).extend(values)
        self.tokens += len(token_ids)
        self._starts.extend(np.asarray([self.tokens], dtype=np.int64))
        if sum(column.waiting for column in self._columns.values()) > IN_MEMORY:
            for column in self._columns.values():
                column.spill()

    def _number_column(self, name: str) -> Column:
        if name not in self._columns:
            self._columns[name] = Column(np.float64)
        return self._columns[name]

    def finish(self, pad_id: int, report: EncodeReport, group: int = 1) -> Encoded:
        """Return the rows as a data set whose examples are so many rows; none may be added
        afterwards."""
        arrays = {
            name: column.array()
            for name, column in self._columns.items()
            if column.nbytes or name != "positions"
        }
        return Encoded.of_arrays(
            arrays, pad_id=pad_id, report=report, in_maps=self.spilled, group=group
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
