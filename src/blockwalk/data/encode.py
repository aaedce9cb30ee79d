"""Tokens and loss masks: a record becomes a row of token ids and, for each, whether it is learnt.

A record is first rendered to one text with the character spans that are learnt
(:mod:`blockwalk.data.render`); the text is then tokenised once, as a whole, and a token is learnt
if it touches such a span. So the tokens are those that the model meets at inference, and no format
has tokenising rules of its own. The first token of a row is never learnt: nothing precedes it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import operator
import os
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from blockwalk.data.formats import Format, Record, Template, detect_format, half_character
from blockwalk.data.given_template import set_template
from blockwalk.data.render import Rendered, render, render_pair
from blockwalk.data.render import Tokenizer as Tokenizer
from blockwalk.data.tasks import Task
from blockwalk.models.folder import require_config
from blockwalk.models.saved_template import saved_with
from blockwalk.models.stops import end_note, texts_of_stops
from blockwalk.plan.run_config import DataSettings
from blockwalk.plan.words import counted, is_or_are
from blockwalk.system.atomic_files import PARTIAL
from blockwalk.system.file_maps import map_file
from blockwalk.system.lfs import refuse_pointers
from blockwalk.system.paths import StrPath

Ids = npt.NDArray[np.int32]
"""Token ids, or positions of tokens."""
Mask = npt.NDArray[np.bool_]
"""Whether each token is learnt."""
Integers = npt.NDArray[np.int64]
"""Counts, offsets and numbers of rows."""

os.environ.setdefault(
    "TOKENIZERS_PARALLELISM", "false"
)  # each of its threads would keep some 7 MB for the whole run

CHUNK = 256
CHUNK_CHARACTERS = 1 << 19
"""The most texts that are tokenised in one call, and the most characters in them: what a call gives
takes memory."""


TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "tokenizer.model", "vocab.json")
"""The files that a tokenizer's vocabulary may lie in."""


def tokenizer_of(
    model: str | Path, settings: DataSettings, adapter: StrPath | None = None
) -> Tokenizer:
    """Return the tokenizer of a model as a run uses it: with the chat template that was saved with
    the adapter, else the one that the settings name, and with the settings' arguments.

    Raises:
        ValueError: there is no tokenizer, or no such template.
    """
    tokenizer = load_tokenizer(model)
    saved = saved_with(adapter)
    set_template(
        tokenizer, "" if saved else settings.chat_template, settings.chat_template_arguments
    )
    if saved:
        tokenizer.chat_template = saved
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer saved in a model's folder.

    Raises:
        ValueError: there is none, or none that transformers reads.
    """
    from transformers import AutoTokenizer

    folder = require_config(path)
    try:
        return AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, fix_mistral_regex=True
        )
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # tokenizers raises no class of its own, and a file that is cut may lack any key
        refuse_pointers(folder)
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{path}: the tokenizer needs code of its own (auto_map in tokenizer_config.json),"
                " which is never run here: save it as a tokenizer.json"
            ) from None
        readable_files = (
            "read are tokenizer.json and what else transformers saves of one, and a GGUF file's own"
        )
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        cause = kind + " ".join(str(error).split())
        files = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
        source = f" from {' or '.join(files)}, which may be cut off" if files else ""
        raise ValueError(
            f"{path}: no tokenizer could be loaded{source} ({readable_files}): {cause}"
        ) from error


def tokenizer_files(tokenizer: Tokenizer) -> dict[Path, np.ndarray]:
    """Return the bytes of the files that a tokenizer is saved in, by their paths below its
    folder."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = (path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder): np.fromfile(path, np.uint8) for path in files}


def mapped(array: np.ndarray, folder: Path) -> np.ndarray:
    """Return an array in the map of a nameless file in ``folder``: pages that the kernel may drop.
    It may not be written to."""
    if not array.nbytes:
        return array
    with tempfile.TemporaryFile(
        prefix=".scratch-", suffix=PARTIAL, dir=folder
    ) as file:  # named where a disk must
        file.write(np.ascontiguousarray(array).data)
        file.flush()
        return (
            map_file(file.fileno(), array.nbytes, str(folder))
            .view(array.dtype)
            .reshape(array.shape)
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """Digests of what a data set's tokens are made of, by which a resumed run says what changed."""

    records: str = ""
    template: str = ""
    tokenizer: str = ""
    dated: bool = False
    """Whether the chat template writes the day on which it is asked."""

    def __add__(self, other: Origin) -> Origin:
        """Return the origin of two sources together."""
        return replace(self, records=_digest(f"{self.records} {other.records}".encode()))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


@dataclass(slots=True)
class EncodeReport:
    """Counts of the records, turns and tokens that were kept, cut or dropped when a data set became
    tokens."""

    records: int = 0
    truncated: int = 0
    answers_cut: int = 0
    """Records whose last learnt token was cut away."""
    dropped: int = 0
    turns_left_out: int = 0
    longest: int = 0
    turns_marked: int = 0
    turns_of_others: int = 0
    turns_unwritten: int = 0
    unwritten: str = ""
    """Place and role of the first turn whose content the chat template dropped."""
    largest: tuple[int, str] = (-1, "")
    """The largest token id, and the place of a record that holds it."""
    turn_ends: Counter[int] = field(default_factory=Counter)
    """The last learnt token of each turn that a chat template wrote, and how often it is that."""
    stops: tuple[int, ...] = ()
    """Tokens that turns are learnt to end with, at which the model's generation does not stop of
    itself."""
    end_note: str = ""
    """A sentence where turns are learnt to end with no token that generation stops at."""
    origin: Origin = field(default_factory=Origin)
    max_length: int | None = None
    """Tokens that a row may have; None: as many as its record has."""

    def __add__(self, other: EncodeReport) -> EncodeReport:
        """The counts of two sources together."""
        counts = ("records", "truncated", "answers_cut", "dropped")
        turns = ("turns_left_out", "turns_marked", "turns_of_others", "turns_unwritten")
        names = (*counts, *turns, "turn_ends", "origin")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return EncodeReport(
            **sums,
            longest=max(self.longest, other.longest),
            unwritten=self.unwritten or other.unwritten,
            stops=tuple(dict.fromkeys((*self.stops, *other.stops))),
            end_note=self.end_note or other.end_note,
            largest=max(self.largest, other.largest),
            max_length=self.max_length,
        )

    def warnings(self) -> list[str]:
        """Return one sentence for each thing that a user should know of."""
        lines = []
        if self.truncated:
            lines.append(
                f"{self.truncated} of {self.records} records were longer than max_length ="
                f" {self.max_length} tokens (the longest: {self.longest}) and were cut; raise"
                " data.max_length to keep them whole"
            )
        if 2 * self.answers_cut > self.records:
            lines.append(
                f"{self.answers_cut} of {self.records} records, more than half, lose the end of"
                " what is learnt: the model does not learn to stop there. Set data.max_length to"
                f" {self.longest}, or leave long records out"
            )
        if self.dropped:
            lines.append(
                f"{self.dropped} of {self.records} records had no token to learn, after cutting,"
                " and were dropped"
            )
        if self.turns_left_out:
            lines.append(
                f"{counted(self.turns_left_out, 'assistant turn')} {is_or_are(self.turns_left_out)}"
                " not learnt: they open the conversation, or the chat template writes them"
                " differently once it goes on"
            )
        if self.end_note:
            lines.append(self.end_note)
        if self.turns_marked:
            turns = f"{counted(self.turns_marked, 'assistant turn')} {is_or_are(self.turns_marked)}"
            lines.append(f"{turns} not learnt: their records mark them so")
        if self.turns_of_others:
            lines.append(
                f"{counted(self.turns_of_others, 'turn')} of other roles than the assistant's"
                f" {is_or_are(self.turns_of_others)} marked as to be learnt, and not learnt: the"
                " assistant's alone are"
            )
        if self.turns_unwritten:
            lines.append(
                "the chat template drops content, reasoning or a call of"
                f" {counted(self.turns_unwritten, 'turn')}, the first in {self.unwritten}"
            )
        return lines


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
        each = self.rows.select(
            c for row in chosen for c in range(self.firsts[row], self.firsts[row + 1])
        )
        sizes = np.diff(self.firsts)[chosen]
        return Choices(
            each, np.append(0, np.cumsum(sizes)), tuple(self.right[row] for row in chosen)
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


def encode(
    records: Iterable[Record],
    tokenizer: Tokenizer,
    *,
    max_length: int | None,
    format: Format | str | None = None,
    source: str = "",
    prompts: Sequence[str] = (),
) -> Encoded:
    """Encode records of one format but classification (``None``: that of the first record) for
    training.

    ``max_length`` is in tokens; None cuts nothing. ``source`` names the records in an error.
    ``prompts`` are those of ``data.prompt``, see :func:`blockwalk.data.render.render`. Raises
    ``ValueError``, naming file, line and field, where a record lacks what its format needs, and
    where nothing is left to learn from; what was cut or dropped is counted in ``Encoded.report``.
    """
    records = iter(records)
    first = next(records, None)
    if first is None:
        raise ValueError(_empty(source))
    kind = Format(format) if format is not None else detect_format(first)
    records = itertools.chain([first], records)
    if kind is Format.CLASSIFICATION:
        raise ValueError("format 'classification' needs a template with label words")
    report = EncodeReport(max_length=max_length)
    digest = hashlib.blake2b(digest_size=8)
    stops = texts_of_stops(tokenizer)

    def rendered() -> Iterator[Rendered]:
        for record in records:
            digest.update(json.dumps(record.fields, default=str).encode())
            yield render(record, kind, tokenizer, stops, prompts)

    ids = []
    masks = []
    for row, mask in _tokenize(rendered(), tokenizer, report):
        if mask.any():
            ids.append(row)
            masks.append(mask)
        else:
            report.dropped += 1
    if not ids:
        why = "; ".join(replace(report, dropped=0).warnings())
        where = source and f"{source}: "
        raise ValueError(
            f"{where}none of {counted(report.records, 'record')} has a token to"
            f" learn{why and ': '}{why}"
        )
    marks, report.end_note = end_note(report.turn_ends, tokenizer)
    report.stops = tuple(marks)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    report.origin = Origin(
        records=digest.hexdigest(),
        template=_digest(template.encode()),
        tokenizer=_digest(tokenizer.backend_tokenizer.to_str().encode()),
        dated="strftime_now" in template,
    )
    return _flatten(ids, masks, _pad_id(tokenizer), report)


def _empty(source: str) -> str:
    return f"{source and source + ': '}the data set is empty: no record was found"


def encode_choices(
    records: Iterable[Record],
    tokenizer: Tokenizer,
    template: Template | Task,
    *,
    max_length: int | None,
    before: str = "",
    source: str = "",
) -> Choices:
    """Encode records with every candidate, for :func:`blockwalk.data.batching.label_word_batch`;
    ``before`` are demonstrations, which stand in every prompt.

    Raises ``ValueError`` where a prompt leaves no room for the candidate.
    """
    report = EncodeReport(max_length=max_length)
    right: list[tuple[int, ...]] = []
    firsts = [0]

    def rendered() -> Iterator[Rendered]:
        for record in records:
            question = template.question(record)
            right.append(question.right)
            firsts.append(firsts[-1] + len(question.candidates))
            for candidate in question.candidates:
                yield render_pair(before + question.prompt, candidate, record.where, end=False)

    rows = list(_tokenize(rendered(), tokenizer, report))
    if not rows:
        raise ValueError(_empty(source))
    if not all(mask.any() for _, mask in rows):
        raise ValueError(
            f"max_length = {max_length} tokens leaves no room for the label word; raise"
            " data.max_length"
        )
    report.truncated = -(-report.truncated * len(right) // report.records)
    report.answers_cut = report.answers_cut * len(right) // report.records
    report.records = len(right)
    encoded = _flatten(
        [row for row, _ in rows], [mask for _, mask in rows], _pad_id(tokenizer), report
    )
    return Choices(encoded, np.asarray(firsts, dtype=np.int64), tuple(right))


def encode_answers(
    records: Iterable[Record],
    tokenizer: Tokenizer,
    task: Template | Task,
    *,
    max_length: int | None,
    before: str = "",
) -> Answers:
    """Encode records whose answers are generated."""
    records = list(records)
    rows = encode_choices(records, tokenizer, task, max_length=max_length, before=before).rows
    prompts = [rows[i][0][: int(rows[i][1].argmax())] for i in range(len(rows))]
    return Answers(rows, tuple(prompts), tuple(task.question(record).answers for record in records))


def _chunks(rendered: Iterable[Rendered]) -> Iterator[list[Rendered]]:
    """Yield texts by :data:`CHUNK`, and fewer where they are long."""
    chunk: list[Rendered] = []
    for text in rendered:
        chunk.append(text)
        if len(chunk) == CHUNK or sum(len(entry.text) for entry in chunk) > CHUNK_CHARACTERS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _beside(call: Callable[[], Any]) -> Any:
    """Return the answer of a call that is made in a thread of its own: a record of many megabytes
    holds the tokenizer for minutes, and this thread answers signals meanwhile."""
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=work, name="blockwalk tokenizer", daemon=True).start()
    return answer.result()


def _tokenize(
    rendered: Iterable[Rendered], tokenizer: Tokenizer, report: EncodeReport
) -> Iterator[tuple[Ids, Mask]]:
    """Yield ids and mask of each text, within ``report.max_length`` tokens."""
    limit = report.max_length
    if limit is not None and limit < 2:
        raise ValueError(f"data.max_length must be at least 2 tokens, not {limit}")
    if not tokenizer.is_fast:
        raise ValueError(
            "the loss mask needs a fast tokenizer (tokenizer.json), which knows each token's"
            " characters"
        )
    added = tokenizer("")["input_ids"]
    begin = added[:1] if added and added[0] == tokenizer.bos_token_id else []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for texts in _chunks(rendered):
        for item in texts:  # of JSON text within a record, or of a template
            if half := half_character(item.text):
                raise ValueError(
                    f"{item.where}: its text holds half a character, \\u{ord(half):04x} (a lone"
                    " surrogate): write the character whole, or U+FFFD"
                )
        only = [item.text for item in texts]
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        tokens = _beside(functools.partial(tokenizer, only, **options))
        for item, ids, offsets in zip(
            texts, tokens["input_ids"], tokens["offset_mapping"], strict=True
        ):
            mask = [any(a < stop and b > start for start, stop in item.spans) for a, b in offsets]
            prompt = sum(b <= item.prompt_end for _, b in offsets) if item.prompt_end else 0
            if item.begin and ids[:1] != begin:
                ids = begin + ids
                mask = [False] * len(begin) + mask
                prompt = prompt + len(begin)
            if item.end and ids[-1:] != end:
                ids = ids + end
                mask = mask + [bool(item.spans)] * len(end)
            if not item.end:
                report.turn_ends.update(_turn_ends(item, ids, offsets))
            report.records += 1
            report.turns_left_out += item.turns_left_out
            report.turns_marked += item.turns_marked
            report.turns_of_others += item.turns_of_others
            report.turns_unwritten += len(item.unwritten)
            if item.unwritten and not report.unwritten:
                report.unwritten = f"{item.where} (role {item.unwritten[0]!r})"
            report.longest = max(report.longest, len(ids))
            if limit is not None and len(ids) > limit:
                report.truncated += 1
                keep = len(begin) if item.begin and ids[:1] == begin else 0
                spare = (
                    max(0, min(len(ids) - limit, prompt - max(keep, 1))) if item.prompt_end else 0
                )
                ids, mask = (row[:keep] + row[keep + spare :] for row in (ids, mask))
                report.answers_cut += any(mask[limit:])
                ids = ids[:limit]
                mask = mask[:limit]
            mask[:1] = [False] * len(mask[:1])
            if ids and max(ids) > report.largest[0]:
                report.largest = (max(ids), item.where)
            yield np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.bool_)


def _turn_ends(
    item: Rendered, ids: Sequence[int], offsets: Sequence[tuple[int, int]]
) -> Iterator[int]:
    """Yield the last learnt token of each turn of a text that a chat template wrote."""
    if item.begin:  # label words have no turns
        return
    starts = [begin for begin, _ in offsets]
    for _, stop in item.spans:
        yield ids[bisect_left(starts, stop) - 1]


def require_rows(largest: tuple[int, str], tokenizer: Tokenizer, rows: int, setting: str) -> None:
    """Check that a model has a row for the largest token of a data set, which comes with the place
    of its record.

    Raises:
        ValueError: it has not; the token, the record and the number of rows are named.
    """
    token, where = largest
    if token >= rows:
        raise ValueError(
            f"{where}: the token {tokenizer.convert_ids_to_tokens(token)!r} has the id {token}, and"
            f" the model has {rows} rows of embeddings ({setting}): save the model with"
            f" resize_token_embeddings({len(tokenizer)}), or take the token out of the tokenizer or"
            " the data"
        )


def first_example(dataset: Encoded, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return the first example (of a packed row, its first document) as runs of text, each with
    whether it is learnt."""
    ids, in_loss = dataset[0]
    if dataset.positions is not None:
        end = int(np.flatnonzero(np.append(dataset.positions[1 : len(ids)], 0) == 0)[0]) + 1
        ids = ids[:end]
        in_loss = in_loss[:end]
    runs = itertools.groupby(
        zip(ids.tolist(), in_loss.tolist(), strict=True), key=lambda pair: bool(pair[1])
    )
    return [(tokenizer.decode([token for token, _ in run]), learnt) for learnt, run in runs]


def _pad_id(tokenizer: Tokenizer) -> int:
    """Return the token id that fills rows up; it is masked, so any id will do where a tokenizer
    names none."""
    return next(
        (
            int(token)
            for token in (tokenizer.pad_token_id, tokenizer.eos_token_id)
            if token is not None
        ),
        0,
    )


def _flatten(ids: list[Ids], masks: list[Mask], pad_id: int, report: EncodeReport) -> Encoded:
    starts = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in ids], out=starts[1:])
    return Encoded(np.concatenate(ids), np.concatenate(masks), starts, pad_id, report)
