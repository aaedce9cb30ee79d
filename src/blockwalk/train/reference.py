"""The reference of an objective: the log-probability of every sequence by this run's model before
its first step, or by another model of the same tokenizer.

It is one evaluation by forward walks, kept beside the run and in no memory while training.

    output_dir/reference.jsonl
        {"data.train": {"rows": n, "digest": ...}, "weights": ..., "adapter": ..., ...}
        {"set": "data.train", "rows": [4, 5, ...], "sums": [-41.2, ...]}     one line a visit

Each line is sealed with the one before it. A run that was killed goes on behind the last whole
line; the digest of the last one is part of every checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blockwalk.checkpoints.run_checkpoint import REFERENCES, SCRATCH
from blockwalk.data.batching import by_length
from blockwalk.data.dataset import Encoded, mapped
from blockwalk.data.mismatched import answers_to_others
from blockwalk.data.row_batch import RowBatch
from blockwalk.data.tokenizer import tokenizer_of
from blockwalk.plan.objectives import REFERENCE, SFT
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.words import counted
from blockwalk.ranks.ranks import Ranks, first
from blockwalk.system import atomic_files, links
from blockwalk.tiers.model_folder.identity import weights_digest
from blockwalk.train.baseline import OF_OTHERS
from blockwalk.train.beginning import Beginning
from blockwalk.train.evaluation import HeldOut, eval_batch_size
from blockwalk.train.progress import Progress
from blockwalk.walk.walker import Walker

Values = npt.NDArray[np.float64]
MISMATCHED = " answers to other prompts"
"""The end of the name of the set of a data set's prompts with other answers."""
AT_ONCE = 1 << 16
"""Values that ranks send each other together."""


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows that the reference answers."""

    rows: Encoded
    take: Callable[[Encoded, Sequence[int]], Encoded] | None = None
    """The rows that are walked in place of some of these; None: these themselves."""

    @property
    def facts(self) -> dict[str, Any]:
        """The number of rows, and their digest."""
        return {"rows": len(self.rows), "digest": self.rows.fingerprint()}

    def batch(self, rows: Sequence[int], multiple: int) -> RowBatch:
        """Return the batch that is walked for some rows."""
        if self.take is None:
            return RowBatch(self.rows, rows, multiple)
        return RowBatch(self.take(self.rows, rows), range(len(rows)), multiple)


@dataclass(slots=True)
class References:
    """The log-probabilities of the reference, as far as they are known."""

    values: dict[str, Values]
    """Those of each row by the name of its set, NaN where they are not known yet."""
    digest: str = ""
    """The digest of the file's last line, which is that of all; empty where some are missing."""
    size: int = 0
    """Bytes of the file's lines that are whole."""
    chain: str = ""
    """The digest of the last of these lines."""

    @property
    def missing(self) -> int:
        """The number of rows that are not known."""
        return sum(int(np.isnan(values).sum()) for values in self.values.values())


def sets_of(beginning: Beginning) -> dict[str, RowSet]:
    """Return the rows that a run's reference answers, by name."""
    prepared = beginning.prepared
    data_sets = {"data.train": prepared.rows}
    if prepared.held_out is not None:
        data_sets["data.eval"] = prepared.held_out.encoded
    sets = {name: RowSet(rows) for name, rows in data_sets.items()}
    if prepared.plan.objective_facts.baseline:
        sets |= {
            f"{name}{MISMATCHED}": RowSet(rows, answers_to_others)
            for name, rows in data_sets.items()
        }
    return sets


def header_of(beginning: Beginning, sets: Mapping[str, RowSet]) -> dict[str, Any]:
    """Return what a reference's numbers rest on: data, weights, adapter, their codec and dtype, and
    the objective."""
    run = beginning.config
    adapter = "" if run.lora is None or run.reference else run.lora.from_
    return {
        "format": 1,
        "objective": run.plan.objective.partition("(")[0],
        "weights": weights_digest(run.reference) if run.reference else beginning.weights,
        "adapter": _digest_of_files(Path(adapter)) if adapter else "",
        "codec": str(run.plan.frozen.codec),
        "compute_dtype": run.plan.compute_dtype,
        "sets": {name: rows.facts for name, rows in sets.items()},
    }


def _digest_of_files(folder: Path) -> str:
    """Return a digest of the files in a folder: 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _whole_lines(path: Path) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yield the lines of a file up to the first that is not as it was written, each with its digest
    and its bytes; none where the file is not there."""
    if not path.exists():
        return
    digest = ""
    with path.open("rb") as file, atomic_files.reading(path):
        for text in file:
            try:
                line, digest = atomic_files.unseal(text.decode(), digest)
            except (ValueError, UnicodeError):
                return
            yield line, digest, len(text)


def read(path: Path, header: Mapping[str, Any], sets: Mapping[str, RowSet]) -> References:
    """Return what a file has of a reference with this header: nothing where it is another's, or is
    not there; else all up to the first line that is not as it was written."""
    references = References({name: np.full(len(rows.rows), np.nan) for name, rows in sets.items()})
    for line, digest, size in _whole_lines(path):
        if references.size:
            references.values[line["set"]][line["rows"]] = line["sums"]
        elif line != header:
            break
        references.chain = digest
        references.size += size
    if not references.missing:
        references.digest = references.chain
    return references


def of_held_out(held_out: HeldOut, folder: Path) -> HeldOut:
    """Return held-out rows with the numbers that the reference in a run's folder has of them; as
    they are where it has other rows, or the objective compares with none."""
    encoded = held_out.encoded
    if not held_out.objective.reference:
        return held_out
    lines = _whole_lines(folder / REFERENCES)
    header, _, _ = next(lines, ({}, "", 0))
    facts = RowSet(encoded).facts
    names = {"data.eval": REFERENCE, f"data.eval{MISMATCHED}": OF_OTHERS}
    names = {name: number for name, number in names.items() if name in header.get("sets", {})}
    if not names or any(header["sets"][name] != facts for name in names):
        return held_out
    values = {name: np.full(len(encoded), np.nan) for name in names}
    for line, _, _ in lines:
        if line["set"] in values:
            values[line["set"]][line["rows"]] = line["sums"]
    if any(bool(np.isnan(sums).any()) for sums in values.values()):
        return held_out
    numbers = {number: values[name] for name, number in names.items()}
    encoded = dataclasses.replace(
        encoded, numbers={**encoded.numbers, **numbers}, summary_at_start=encoded.summary
    )
    return dataclasses.replace(held_out, rows=encoded)


def require(beginning: Beginning) -> None:
    """Check that the reference of a run that is resumed is there, before anything is done.

    Raises:
        ValueError: it is missing, damaged, or of other data, weights or settings.
    """
    resumed = beginning.resumed
    if resumed is None or not beginning.prepared.plan.objective_facts.reference:
        return
    saved = resumed.checkpoint.data.get("reference", "")
    if resumed.checkpoint.step == 0 and not saved:
        return
    assert beginning.start.checkpoint is not None
    sets = sets_of(beginning)
    path = Path(beginning.start.checkpoint).parent / REFERENCES
    digest = first(lambda: read(path, header_of(beginning, sets), sets).digest)
    if digest != saved:
        raise ValueError(
            f"{path} is not the reference that this run began with (content {saved or 'none'}, now"
            f" {digest or 'none'}): it is missing or damaged, or data, weights or settings of the"
            " reference changed. Put them back, or begin a new run in another output_dir"
        )


def attached(beginning: Beginning, walker: Walker, heard: Callable[[], bool]) -> Beginning:
    """Return a run whose rows have the reference's numbers; what is not known of these is evaluated
    now, before the first step. Without them where a signal is ``heard`` meanwhile.

    Raises:
        ValueError: the reference has another tokenizer.
    """
    if not walker.plan.objective_facts.reference:
        return beginning
    sets = sets_of(beginning)
    header = first(lambda: header_of(beginning, sets))
    path = beginning.output_dir / REFERENCES
    if beginning.start.checkpoint is not None:
        _bring(Path(beginning.start.checkpoint).parent / REFERENCES, path, walker.ranks)
    references = _shared(walker.ranks, lambda: read(path, header, sets), sets)
    if references.missing:
        assert walker.steps_done == 0, "a resumed run's reference is checked before"
        with _Writer.of(path, header, references, walker.ranks.rank) as writer:
            if not _evaluate(beginning, walker, sets, writer, heard):
                return beginning
    references.digest = references.chain
    return _with_numbers(beginning, references)


def _bring(source: Path, path: Path, ranks: Ranks) -> None:
    """Copy the reference of a run that is gone on with in another folder."""
    if ranks.rank == 0 and source.exists() and not (path.exists() and path.samefile(source)):
        atomic_files.write_bytes(path, source.read_bytes())


def _shared(ranks: Ranks, load: Callable[[], References], sets: Mapping[str, RowSet]) -> References:
    """Return what rank 0 has read, on every rank."""
    if ranks.world == 1:
        return load()
    references = References({name: np.full(len(rows.rows), np.nan) for name, rows in sets.items()})
    if ranks.rank == 0:
        references = load()
    for values in references.values.values():
        for begin in range(0, len(values), AT_ONCE):
            part = values[begin : begin + AT_ONCE]
            part[:] = ranks.exchange(part.tolist())[0]
    references.chain = first(lambda: references.chain)
    return references


@dataclass(slots=True)
class _Writer:
    """The file of a reference that is being evaluated; rank 0's."""

    references: References
    file: Any = None

    @classmethod
    def of(
        cls, path: Path, header: Mapping[str, Any], references: References, rank: int
    ) -> _Writer:
        """Return a file behind whose whole lines more is written."""
        if rank:
            return cls(references)
        descriptor = links.open_own(path, os.O_RDWR | os.O_CREAT)
        file = os.fdopen(descriptor, "r+b")
        file.truncate(references.size)
        file.seek(references.size)
        writer = cls(references, file)
        if not references.size:
            writer._write(header)
        return writer

    def add(self, name: str, rows: Sequence[int], sums: Sequence[float]) -> None:
        """Take the numbers of some rows, and write them durably."""
        self.references.values[name][list(rows)] = sums
        self._write({"set": name, "rows": [*rows], "sums": [*sums]})

    def _write(self, line: Mapping[str, Any]) -> None:
        text, self.references.chain = atomic_files.seal(json.dumps(line), self.references.chain)
        if self.file is not None:
            with atomic_files.naming(self.file.name):
                self.file.write(f"{text}\n".encode())
                self.file.flush()
                os.fsync(self.file.fileno())

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()


def _evaluate(
    beginning: Beginning,
    walker: Walker,
    sets: Mapping[str, RowSet],
    writer: _Writer,
    heard: Callable[[], bool],
) -> bool:
    """Evaluate the rows that are not known yet, and return whether all are."""
    run = beginning.config
    total = sum(len(rows.rows) for rows in sets.values())
    with (
        Progress(beginning.prepared.total, done=0, log_every=1) as progress,
        progress.evaluating(total, "reference") as show,
    ):
        progress.say(f"reference: {_named(run)}, once over {counted(total, 'sequence')}")
        with _reference_walker(beginning, walker) as of_reference:
            done = total - writer.references.missing
            for name, rows, batch, cuts in _visits(run, sets, writer.references):
                show(done)
                if heard():
                    return False
                sums = (-of_reference.label_losses(batch, batches=cuts, packs=True)).tolist()
                _require_finite(sums, name, rows)
                writer.add(name, rows, sums)
                done += len(rows)
    return True


def _require_finite(sums: Sequence[float], name: str, rows: Sequence[int]) -> None:
    """Raise FloatingPointError for a log-probability that is not finite."""
    for row, value in zip(rows, sums, strict=True):
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the reference's log-probability of row {row} of {name} is {value}: set"
                " compute_dtype: float32, or look at this record"
            )


def _named(run: RunConfig) -> str:
    """Return words for a run's reference."""
    if run.reference:
        return run.reference
    adapter = run.lora.from_ if run.lora is not None else ""
    return f"this model before its first step{f' with {adapter}' if adapter else ''}"


def _visits(
    run: RunConfig, sets: Mapping[str, RowSet], references: References
) -> Iterator[tuple[str, Sequence[int], RowBatch, int]]:
    """Yield the visits whose rows are not all known: a set's name, its rows, what is walked for
    them, and the number of batches that the visit is cut into."""
    size = eval_batch_size(run)
    multiple = run.data.padding_multiple
    for name, row_set in sets.items():
        for rows, _ in by_length(row_set.rows, size * run.eval_batches, multiple):
            if np.isnan(references.values[name][rows]).any():
                cuts = -(-len(rows) // (size * row_set.rows.group))
                yield name, rows, row_set.batch(rows, multiple), cuts


@contextmanager
def _reference_walker(beginning: Beginning, walker: Walker) -> Iterator[Walker]:
    """Open the walker of the reference: the run's own, or that of another model."""
    run = beginning.config
    if not run.reference:
        yield walker
        return
    first(lambda: _require_same_tokenizer(run))
    scratch = beginning.output_dir / SCRATCH / "reference"
    plan = dataclasses.replace(walker.plan, objective=SFT)
    with Walker(run.reference, plan, workdir=scratch, training=False) as of_reference:
        yield of_reference


def _require_same_tokenizer(run: RunConfig) -> None:
    """Raise ValueError where the reference has another vocabulary than the model."""
    ours, theirs = (tokenizer_of(name, run.data).get_vocab() for name in (run.model, run.reference))
    if differing := [token for token, number in ours.items() if theirs.get(token) != number]:
        raise ValueError(
            f"reference is {run.reference}, whose tokenizer has other numbers for"
            f" {len(differing)} of the {len(ours)} tokens of {run.model}, such as"
            f" {differing[0]!r}: name a model of the same tokenizer, or leave reference out"
        )


def _with_numbers(beginning: Beginning, references: References) -> Beginning:
    """Return a run whose data sets have the reference's numbers, in maps of nameless files."""
    folder = beginning.output_dir / SCRATCH
    prepared = beginning.prepared

    def with_numbers(name: str, rows: Encoded) -> Encoded:
        sums = {REFERENCE: references.values[name]}
        if name + MISMATCHED in references.values:
            sums[OF_OTHERS] = references.values[name + MISMATCHED]
        numbers = {number: mapped(values, folder) for number, values in sums.items()}
        return dataclasses.replace(
            rows, numbers={**rows.numbers, **numbers}, summary_at_start=rows.summary
        )

    rows = prepared.batches.dataset = with_numbers("data.train", prepared.rows)
    held_out = prepared.held_out
    if held_out is not None:
        encoded = with_numbers("data.eval", held_out.encoded)
        held_out = dataclasses.replace(held_out, rows=encoded)
    prepared = dataclasses.replace(prepared, rows=rows, held_out=held_out)
    return dataclasses.replace(beginning, prepared=prepared, reference=references.digest)
