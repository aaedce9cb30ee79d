"""Data sets as tokens, in flat arrays: examples, examples with candidates, and examples whose
answers are generated."""

from __future__ import annotations

import functools
import hashlib
import operator
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blockwalk.data.encode_report import EncodeReport
from blockwalk.system.atomic_files import PARTIAL
from blockwalk.system.file_maps import map_file

Ids = npt.NDArray[np.int32]
"""Token ids, or positions of tokens."""
Mask = npt.NDArray[np.bool_]
"""Whether each token is learnt."""


Integers = npt.NDArray[np.int64]
"""Counts, offsets and numbers of rows."""


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

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> tuple[Ids, Mask]:
        """Return ids and mask of one example, as views."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return self.token_ids[row], self.in_loss[row]

    def learnt(self) -> Integers:
        """Return tokens of each example that are learnt, [n]."""
        return np.add.reduceat(self.in_loss, self.starts[:-1], dtype=np.int64)

    @functools.cached_property
    def lengths(self) -> Integers:
        """Tokens of each example, [n]."""
        return np.diff(self.starts)

    @functools.cached_property
    def predicted(self) -> Integers:
        """Tokens of each example that a loss is a mean over, [n]: those learnt but for its first,
        which nothing predicts."""
        return self.learnt() - self.in_loss[self.starts[:-1]]

    def select(self, rows: Iterable[int]) -> Encoded:
        """Return the examples named, in that order."""
        return self.cut([[(int(self.starts[row]), int(self.starts[row + 1]))] for row in rows])

    def cut(self, rows: Sequence[Sequence[tuple[int, int]]], *, borders: bool = False) -> Encoded:
        """Return rows of spans of tokens, (begin, end) each, of unpacked data; with ``borders``
        every span is a document, at positions from 0, and its first token is not learnt."""
        assert self.positions is None
        spans = [slice(*span) for row in rows for span in row]
        token_ids = np.concatenate([self.token_ids[span] for span in spans])
        in_loss = np.concatenate([self.in_loss[span] for span in spans])
        starts = np.cumsum(
            [0, *(sum(end - begin for begin, end in row) for row in rows)], dtype=np.int64
        )
        if not borders:
            return Encoded(token_ids, in_loss, starts, self.pad_id, self.report)
        positions = np.concatenate(
            [np.arange(span.stop - span.start, dtype=np.int32) for span in spans]
        )
        return Encoded(
            token_ids, in_loss & (positions > 0), starts, self.pad_id, self.report, positions
        )

    def mapped(self, folder: Path) -> Encoded:
        """Return a copy whose arrays lie in maps of nameless files in ``folder``: pages that the
        kernel may drop."""
        names = (
            "token_ids",
            "in_loss",
            "starts",
            *(() if self.positions is None else ("positions",)),
        )
        moved: dict[str, Any] = {name: mapped(getattr(self, name), folder) for name in names}
        return replace(self, **moved)

    @staticmethod
    def concatenated(parts: Sequence[Encoded]) -> Encoded:
        """Return the examples of several data sets that are not packed, one after the other."""
        sizes = np.concatenate([np.diff(part.starts) for part in parts])
        return Encoded(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.in_loss for part in parts]),
            np.cumsum([0, *sizes], dtype=np.int64),
            parts[0].pad_id,
            functools.reduce(operator.add, [part.report for part in parts]),
        )

    def fingerprint(self) -> str:
        """Return a digest of the contents, by which a resumed run knows its data again."""
        digest = hashlib.blake2b(digest_size=8)
        borders = () if self.positions is None else (self.positions,)
        for array in (self.token_ids, self.in_loss, self.starts, *borders):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


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
