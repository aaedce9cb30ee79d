"""The ledger of a zeroth-order run: one line a step, from which its weights can be rebuilt bit for
bit.

    ledger.jsonl
        {"format": "blockwalk-ledger", "version": 2, "run": ..., "base": ..., "rule": {...}, ...,
         "digest": ...}                       the header, one line
        {"step": 1, "seed": 0, "learning_rate": 1e-06, "epsilon": 0.001, "projected_grads": [...],
         ..., "digest": ...}                  a step, one line
        ...

A line is on the disk before its step counts. A process killed in the middle of a line leaves a torn
one, which is cut off when the ledger is opened again: at most the step in flight is lost. Numbers
are written so that reading them gives the same float64. A step's digest is of the digest before it
and of its line: a line that was changed, removed or moved breaks the chain there, and a checkpoint
that knows the digest of its step (:class:`LedgerPosition`) knows every step up to it. The header
has a digest of its own, so that runs with the same steps have the same lines.

:func:`write_exported` makes a file to hand on of it: the same lines, compressed (gzip), without the
losses, which no update reads; its header tells their number, so that it is whole or refused."""

from __future__ import annotations

import gzip
import json
import operator
import os
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blockwalk.plan.words import counted
from blockwalk.system import atomic_files
from blockwalk.system.atomic_files import Damaged
from blockwalk.system.links import open_own
from blockwalk.system.paths import StrPath

FORMAT = "blockwalk-ledger"
VERSION = 2
NAME = "ledger.jsonl"
MODULES = "modules"
"""The name of a header's list of modules that brought rows, each with its digest."""
NOT_COMPARED = ("run", MODULES)
"""Names of a header's facts that a run may go on without: its own name, and the source of modules,
on which the settings that are compared at resume have a line."""
UNREAD = ("losses",)
"""Names of an entry's fields that no update reads."""

_GZIP = b"\x1f\x8b"
_DENSEST = 256
"""Times that an exported ledger may grow when it is unpacked: digests, a twentieth of it, do not
compress; a bomb grows by a thousand."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One step: every scalar that its update reads."""

    step: int
    """The step's number, from 1."""
    seed: int
    learning_rate: float
    epsilon: float
    losses: tuple[float, ...]
    """Losses in the order of the forwards; the first is the step's reported loss."""
    projected_grads: tuple[float, ...]
    """gᵢ, one for each query; the update's direction is their mean-weighted noise (1/q)·Σ gᵢ·zᵢ."""
    curvatures: tuple[float, ...] = ()
    """hizoo: |l₊ + l₋ − 2l₀| / 2ε² of each query."""

    @property
    def loss(self) -> float:
        """The step's reported loss: its first forward's."""
        return self.losses[0]

    @property
    def projected_grad(self) -> float:
        """The projected gradient g: the mean of the queries' gᵢ."""
        return statistics.fmean(self.projected_grads)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Factors gᵢ/q of the queries' noise in the update's direction."""
        return tuple(g / len(self.projected_grads) for g in self.projected_grads)


@dataclass(frozen=True, slots=True)
class LedgerPosition:
    """A place in a ledger: steps, and the digest of the last one's line (none: "")."""

    steps: int
    digest: str


class Ledger:
    """A ledger that steps are appended to: created with its header, or opened where it stands.

    Args:
        path: the file.
        header: what the run is (see
            :func:`blockwalk.estimators.zeroth_order.ledger_header.header`); ``run`` may differ from
            an existing ledger's, which then holds.

        entries: with them it is a copy in memory of the ledger that another rank writes: these are
            its entries' lines so far, and no file is opened.

    Raises:
        ValueError: the file is no ledger, a link, or the ledger of a run that differs; the message
            names what differs.
    """

    def __init__(
        self,
        path: StrPath,
        header: Mapping[str, Any],
        *,
        entries: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.path = Path(path)
        self._fd = -1
        self._is_copy = entries is not None
        if entries is not None:
            self.header = dict(header)
            self.entries = [entry_of(line, n, self.path) for n, line in enumerate(entries, 1)]
            self._digests: list[str] = []
            return
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.write_bytes(
                self.path, _lines([{"format": FORMAT, "version": VERSION, **header}])[0]
            )
        self.header, self.entries, self._digests, nbytes = _read(self.path)
        if "exported" in self.header:
            raise ValueError(
                f"{self.path} is an exported ledger, and no step is added to one: train what it"
                " replays to"
            )
        if different := differences(self.header, header):
            raise ValueError(
                f"{self.path} is another run's ledger: {'; '.join(different)}. Choose another"
                " output_dir"
            )
        self._fd = open_own(self.path, os.O_WRONLY)
        if nbytes < os.fstat(self._fd).st_size:
            with atomic_files.naming(self.path):
                os.ftruncate(self._fd, nbytes)
                os.fsync(self._fd)
        os.lseek(self._fd, 0, os.SEEK_END)

    @property
    def steps(self) -> int:
        """Steps that count as done."""
        return len(self.entries)

    @property
    def position(self) -> LedgerPosition:
        """The place after the ledger's last entry."""
        return LedgerPosition(self.steps, self._digests[-1])

    def rename(self, path: Path) -> None:
        """Give the file another name, atomically, in place of one that is there."""
        if not self._is_copy:
            os.replace(self.path, path)
            atomic_files.fsync(path.parent)
        self.path = path

    def append(self, entry: LedgerEntry) -> None:
        """Write one step's line and wait until it is on the disk."""
        assert entry.step == self.steps + 1, f"step {entry.step} after {self.steps} in {self.path}"
        if self._is_copy:
            self.entries.append(entry)
            return
        line, digest = _lines([asdict(entry)], self._digests[-1])
        start = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            with atomic_files.naming(self.path):
                written = 0
                while written < len(line):
                    written += os.write(self._fd, line[written:])
                getattr(os, "fdatasync", os.fsync)(self._fd)  # macOS has the latter alone
        except OSError:
            # a full disk: the step does not count, and the next one starts a fresh line
            os.ftruncate(self._fd, start)
            os.lseek(self._fd, start, os.SEEK_SET)
            raise
        self.entries.append(entry)
        self._digests.append(digest)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_ledger(path: StrPath) -> tuple[dict[str, Any], list[LedgerEntry]]:
    """Return the header and the whole lines of a ledger, without changing it.

    Raises:
        ValueError: the file is no ledger, or one of another version, or damaged before its last
            line.
    """
    return _read(Path(path))[:2]


def require(path: Path, position: LedgerPosition, checkpoint: Path) -> None:
    """Raise ValueError where the ledger at ``path`` is not the one that ``checkpoint`` was saved
    beside, up to its step."""
    remedy = "put that ledger back, or begin a new run in another output_dir"
    if not path.exists():
        raise ValueError(
            f"{path} is missing, and {checkpoint} was saved at step {position.steps} of it:"
            f" {remedy}"
        )
    _, entries, digests, _ = _read(path)
    if len(entries) < position.steps:
        raise ValueError(
            f"{path} has {counted(len(entries), 'step')}, and {checkpoint} was saved at step"
            f" {position.steps} of its ledger: {remedy}"
        )
    if digests[position.steps] != position.digest:
        raise ValueError(
            f"{path} is another ledger than the one that {checkpoint} was saved beside: {remedy}"
        )


def write_exported(path: StrPath, header: Mapping[str, Any], entries: Sequence[LedgerEntry]) -> int:
    """Write a ledger to hand on, whole or not at all; :func:`read_ledger` reads it. Returns its
    bytes."""
    lines = [{key: value for key, value in asdict(e).items() if key not in UNREAD} for e in entries]
    head = {"format": FORMAT, "version": VERSION, **header, "exported": {"steps": len(lines)}}
    packed = gzip.compress(_lines([head])[0] + _lines(lines)[0], mtime=0)
    atomic_files.write_bytes(path, packed)
    return len(packed)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings in which two headers differ, as ``name: saved, now``, but for those of
    :data:`NOT_COMPARED`."""
    names = [
        name for name in now if name not in NOT_COMPARED and saved.get(name) != _plain(now[name])
    ]
    lines = []
    for name in names:
        old = saved.get(name)
        new = _plain(now[name])
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            lines += [
                f"{name}.{key} is {old.get(key)!r} there and {new.get(key)!r} here" for key in keys
            ]
        elif isinstance(old, list | dict) or isinstance(new, list | dict):
            lines.append(f"{name} differs")
        else:
            lines.append(f"{name} is {old!r} there and {new!r} here")
    return lines


def _read(path: Path) -> tuple[dict[str, Any], list[LedgerEntry], list[str], int]:
    """Return header, entries, their digests after "", and the bytes that they take: what follows is
    a torn line."""
    if not path.is_file():
        raise ValueError(
            f"{path} is not there: a ledger is a file named {NAME} in a zeroth-order run's output"
            " folder"
        )
    data = path.read_bytes()
    if data.startswith(_GZIP):
        data = _unpacked(path, data)
    lines = data.split(b"\n")
    lines.pop()  # what follows the last newline is torn, or nothing
    if not lines:
        raise ValueError(f"{path} is no ledger: it has no whole line")
    _require_version(path, lines[0])
    values = []
    digests = [""]
    for number, line in enumerate(lines, 1):
        try:
            value, digest = atomic_files.unseal(line.decode(), digests[-1])
        except (ValueError, RecursionError) as error:
            raise Damaged(
                f"{path} is damaged: line {number} does not follow from those before it ({error})"
            ) from None
        values.append(value)
        if number > 1:
            digests.append(digest)
    header, *steps = values
    seal = header.get("exported")
    if seal and seal != {"steps": len(steps)}:
        raise Damaged(
            f"{path} is damaged: it has {counted(len(steps), 'step')} of the {seal.get('steps')} it"
            " was written with"
        )
    entries = [entry_of(value, number, path) for number, value in enumerate(steps, 1)]
    return header, entries, digests, sum(len(line) + 1 for line in lines)


def _unpacked(path: Path, data: bytes) -> bytes:
    """Return the lines of an exported ledger, whose one member of gzip ends with the file."""
    unpacking = zlib.decompressobj(wbits=31)
    try:
        lines = unpacking.decompress(data, _DENSEST * len(data))
    except zlib.error as error:
        raise Damaged(f"{path} is damaged: {error}") from None
    if not unpacking.eof or unpacking.unused_data:
        raise Damaged(
            f"{path} is damaged: it is cut off, goes on after its end, or unpacks to {_DENSEST}"
            " times its size"
        )
    return lines


def _require_version(path: Path, line: bytes) -> None:
    """Raise ValueError where a first line is no ledger's, or another version's, whose digests would
    say nothing."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: its first line is not JSON ({error})") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{path} is no ledger: its first line has no format {FORMAT!r}")
    if header.get("version") != VERSION:
        raise ValueError(
            f"{path} has ledger version {header.get('version')}; this version of blockwalk reads"
            f" {VERSION}"
        )


def entry_of(value: Any, number: int, path: Path | str = "the store of ranks") -> LedgerEntry:
    """Return the entry of step ``number`` that was read from a ledger's line. Raises ValueError
    where it is none."""
    lists: Sequence[str] = ("losses", "projected_grads", "curvatures")
    try:
        fields: dict[str, Any] = {
            key: tuple(map(float, number_value)) if key in lists else number_value
            for key, number_value in value.items()
        }
        entry = LedgerEntry(**{"losses": (), **fields})
        numbers = (entry.learning_rate, entry.epsilon, entry.projected_grad)
        if not all(isinstance(number_value, int | float) for number_value in numbers):
            raise TypeError("a learning rate or an epsilon is no number")
        operator.index(entry.seed)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: line {number + 1} is no step of a ledger: {error}") from None
    if entry.step != number:
        raise ValueError(
            f"{path}: line {number + 1} is step {entry.step}, and step {number} is due"
        )
    return entry


def _lines(values: Iterable[Mapping[str, Any]], digest: str = "") -> tuple[bytes, str]:
    """Return lines that follow one with ``digest``, and the last one's digest."""
    text = ""
    for value in values:
        line, digest = atomic_files.seal(
            json.dumps(value, ensure_ascii=False, allow_nan=False), digest
        )
        text += line + "\n"
    return text.encode(), digest


def _plain(value: Any) -> Any:
    """Return the value as JSON reads it back."""
    return json.loads(json.dumps(value))
