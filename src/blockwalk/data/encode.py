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
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread
from typing import Any, NamedTuple

import numpy as np

from blockwalk.data.column import require_room
from blockwalk.data.dataset import Answers, Choices, Encoded, Ids, Mask, RowWriter
from blockwalk.data.encode_report import EncodeReport, Origin, digest_of
from blockwalk.data.formats import ANSWERS_ALONE, JUDGED, Format, format_of
from blockwalk.data.judged import Judged, judged
from blockwalk.data.judged_rows import EncodedRow, judged_examples
from blockwalk.data.records import Record, Template, half_character
from blockwalk.data.render import render
from blockwalk.data.rendered import Rendered, Tokenizer, render_pair
from blockwalk.data.tasks import Task
from blockwalk.data.tokens_around import TokensAround, tokens_around
from blockwalk.models.stops import end_note, texts_of_stops
from blockwalk.plan.objectives import ObjectiveFacts
from blockwalk.plan.words import counted
from blockwalk.system.terminal import say

QUIET = 10.0
"""Seconds between lines on standard error while records are encoded."""
CHUNK = 256
CHUNK_CHARACTERS = 1 << 19
"""The most texts that are tokenised in one call, and the most characters in them: what a call gives
takes memory."""


def encode(
    records: Iterable[Record],
    tokenizer: Tokenizer,
    *,
    max_length: int | None,
    format: Format | str | None = None,
    source: str = "",
    source_bytes: int = 0,
    prompts: Sequence[str] = (),
    objective: ObjectiveFacts = ANSWERS_ALONE,
) -> Encoded:
    """Encode records of one format but classification (``None``: that of the first record) for
    training by an objective.

    ``max_length`` is in tokens; None cuts nothing. ``source`` names the records in an error, and
    ``source_bytes`` are those of their files, by which a full disk is foreseen. ``prompts`` are
    those of ``data.prompt``, see :func:`blockwalk.data.render.render`. Raises ``ValueError``,
    naming file, line and field, where a record lacks what its format needs, where nothing is left
    to learn from, and where the disk has no room for the tokens; what was cut or dropped is counted
    in ``Encoded.report``.
    """
    records = iter(records)
    sample = next(records, None)
    if sample is None:
        raise ValueError(_empty(source))
    kind = format_of(sample, format, objective)
    group = JUDGED[kind].group if kind in JUDGED else 1
    records = itertools.chain([sample], records)
    if kind is Format.CLASSIFICATION:
        raise ValueError("format 'classification' needs a template with label words")
    report = EncodeReport(max_length=max_length)
    digest = hashlib.blake2b(digest_size=8)
    stops = texts_of_stops(tokenizer)
    columns = _Columns()
    has_template = bool(getattr(tokenizer, "chat_template", None)) and not prompts

    read_bytes = 0

    def read() -> Iterator[Record]:
        nonlocal read_bytes
        for record in records:
            content = json.dumps(record.fields, default=str).encode()
            digest.update(content)
            read_bytes += len(content) + 1  # a line
            yield columns.watched(record)

    def rendered() -> Iterator[Rendered]:
        for record in read():
            text = render(record, kind, tokenizer, stops, prompts)
            report.without_template += has_template and kind is Format.COMPLETION and text.end
            yield text

    examples: Iterable[list[EncodedRow]]
    if kind in JUDGED:
        texts = (judged(record, kind, tokenizer, stops, prompts) for record in read())
        examples = _judged_examples(texts, tokenizer, report)
    else:
        examples = ([EncodedRow(*row)] for row in _tokenize(rendered(), tokenizer, report))
    writer = RowWriter()
    tell = _teller(source, source_bytes)
    for rows in examples:
        tell(read_bytes, writer.tokens)
        if not _has_answers(rows):
            report.dropped += 1
            continue
        in_memory = not writer.spilled
        for row in rows:
            writer.add(
                row.token_ids, row.in_loss, numbers=row.numbers, token_numbers=row.token_numbers
            )
        if in_memory and writer.spilled:
            # what is read ahead of the tokenizer is little of what has been read by now
            total_bytes = writer.nbytes * source_bytes // read_bytes
            require_room(source, total_bytes - writer.nbytes)
    if not writer:
        raise ValueError(_without_rows(report, source))
    report.unread = columns.unread
    stop_tokens, report.end_note = end_note(report.turn_ends, tokenizer)
    report.stops = tuple(stop_tokens)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    report.origin = Origin(
        records=digest.hexdigest(),
        template=digest_of(template.encode()),
        tokenizer=digest_of(tokenizer.backend_tokenizer.to_str().encode()),
        dated="strftime_now" in template,
    )
    return writer.finish(_pad_id(tokenizer), report, group)


def _has_answers(rows: Sequence[EncodedRow]) -> bool:
    """Return whether an example has something to learn in every row."""
    return all(row.in_loss.any() for row in rows)


def _without_rows(report: EncodeReport, source: str) -> str:
    """Return the refusal of records of which nothing is learnt."""
    why = "; ".join(replace(report, dropped=0).warnings())
    place = source and f"{source}: "
    return (
        f"{place}none of {counted(report.records, 'record')} has a token to"
        f" learn{why and ': '}{why}"
    )


def _teller(source: str, source_bytes: int) -> Callable[[int, int], None]:
    """Return a function of the bytes that were read and the tokens so far, which prints a line on
    standard error every :data:`QUIET` seconds: with 0 bytes in all it has no end to tell."""
    began = said = time.perf_counter()

    def tell(read_bytes: int, tokens: int) -> None:
        nonlocal said
        now = time.perf_counter()
        if now - said < QUIET:
            return
        said = now
        line = f"encoding {source or 'records'}: {counted(tokens, 'token')}"
        if source_bytes:
            share = min(1.0, read_bytes / source_bytes)
            remaining = (now - began) / share * (1 - share)
            line += f", {share:.0%} of the text, {remaining:,.0f} s left"
        say(line, file=sys.stderr)

    return tell


def _empty(source: str) -> str:
    return f"{source and source + ': '}the data set is empty: no record was found"


def encode_choices(
    records: Iterable[Record],
    tokenizer: Tokenizer,
    template: Template | Task,
    *,
    max_length: int | None,
    shots: str = "",
    source: str = "",
) -> Choices:
    """Encode records with every candidate, for :func:`blockwalk.data.label_words.label_word_batch`;
    ``shots`` are demonstrations, which stand in every prompt.

    Raises ``ValueError`` where a prompt leaves no room for the candidate.
    """
    report = EncodeReport(max_length=max_length)
    right: list[tuple[int, ...]] = []
    firsts = [0]
    columns = _Columns()

    def rendered() -> Iterator[Rendered]:
        for record in records:
            # a task's records have fields for other tasks too
            of_user = isinstance(template, Template)
            question = template.question(columns.watched(record) if of_user else record)
            right.append(question.right)
            firsts.append(firsts[-1] + len(question.candidates))
            for candidate in question.candidates:
                yield render_pair(shots + question.prompt, candidate, record.place, end=False)

    writer = RowWriter()
    learnt = True
    for row, mask in _tokenize(rendered(), tokenizer, report):
        learnt = learnt and bool(mask.any())
        writer.add(row, mask)
    if not writer:
        raise ValueError(_empty(source))
    if not learnt:
        raise ValueError(
            f"max_length = {max_length} tokens leaves no room for the label word; raise"
            " data.max_length"
        )
    report.unread = columns.unread
    report.truncated = -(-report.truncated * len(right) // report.records)
    report.answers_cut = report.answers_cut * len(right) // report.records
    report.prompts_lost = report.prompts_lost * len(right) // report.records
    report.records = len(right)
    encoded = writer.finish(_pad_id(tokenizer), report)
    return Choices(encoded, np.asarray(firsts, dtype=np.int64), tuple(right))


def encode_answers(
    records: Iterable[Record],
    tokenizer: Tokenizer,
    task: Template | Task,
    *,
    max_length: int | None,
    shots: str = "",
) -> Answers:
    """Encode records whose answers are generated."""
    records = list(records)
    rows = encode_choices(records, tokenizer, task, max_length=max_length, shots=shots).rows
    prompts = [rows[i][0][: int(rows[i][1].argmax())] for i in range(len(rows))]
    return Answers(rows, tuple(prompts), tuple(task.question(record).answers for record in records))


class _Columns:
    """The columns of some records: those with a value, and those that are read."""

    def __init__(self) -> None:
        self._filled: dict[str, None] = {}
        self._read: set[str] = set()

    def watched(self, record: Record) -> Record:
        """Return a record whose columns count as read when they are."""
        self._filled |= dict.fromkeys(
            name for name, value in record.fields.items() if value not in (None, "", [], {})
        )
        self._read.update(record.renamed)
        return record.watched(self._read)

    @property
    def unread(self) -> tuple[str, ...]:
        """The columns with a value that were not read of any record, as they came."""
        return tuple(name for name in self._filled if name not in self._read)


def _chunks(rendered: Iterable[Rendered]) -> Iterator[list[Rendered]]:
    """Yield texts by :data:`CHUNK`, and fewer where they are long.

    Raises:
        ValueError: a text holds half a character, which no tokenizer reads.
    """
    chunk: list[Rendered] = []
    characters = 0
    for record in rendered:
        _require_characters(record.text, record.place)
        chunk.append(record)
        characters += len(record.text)
        if len(chunk) == CHUNK or characters > CHUNK_CHARACTERS:
            yield chunk
            chunk = []
            characters = 0
    if chunk:
        yield chunk


def _in_thread(call: Callable[[], Any]) -> Any:
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


def _judged_examples(
    records: Iterable[Judged], tokenizer: Tokenizer, report: EncodeReport
) -> Iterator[list[EncodedRow]]:
    """Yield the rows of judged records, those of each together."""
    _require_readable(tokenizer, report.max_length)

    @functools.cache
    def is_blank(token: int) -> bool:
        return not tokenizer.decode([token]).strip()

    def token_ids(texts: list[str]) -> list[list[int]]:
        call = functools.partial(tokenizer, texts, add_special_tokens=False, verbose=False)
        ids: list[list[int]] = _in_thread(call)["input_ids"]
        return ids

    def whole() -> Iterator[Judged]:
        for record in records:
            for text in record.texts:
                _require_characters(text, record.place)
            yield record

    around = tokens_around(tokenizer)
    return judged_examples(whole(), token_ids, is_blank, around, report)


def _require_characters(text: str, place: str) -> None:
    """Raise ValueError where a text holds half a character, which no tokenizer reads."""
    if half := half_character(text):  # of JSON text within a record, or of a template
        raise ValueError(
            f"{place}: its text holds half a character, \\u{ord(half):04x} (a lone"
            " surrogate): write the character whole, or U+FFFD"
        )


def _require_readable(tokenizer: Tokenizer, limit: int | None) -> None:
    """Raise ValueError for a tokenizer, or a number of tokens, that rows cannot be made with."""
    if limit is not None and limit < 2:
        raise ValueError(f"data.max_length must be at least 2 tokens, not {limit}")
    if not tokenizer.is_fast:
        raise ValueError(
            "the loss mask needs a fast tokenizer (tokenizer.json), which knows each token's"
            " characters"
        )


def _tokenize(
    rendered: Iterable[Rendered], tokenizer: Tokenizer, report: EncodeReport
) -> Iterator[tuple[Ids, Mask]]:
    """Yield ids and mask of each text, within ``report.max_length`` tokens."""
    limit = report.max_length
    _require_readable(tokenizer, limit)
    around = tokens_around(tokenizer)
    options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    for chunk in _chunks(rendered):
        texts = [record.text for record in chunk]
        tokens = _in_thread(functools.partial(tokenizer, texts, **options))
        columns = (tokens["input_ids"], tokens["offset_mapping"])
        for record, ids, offsets in zip(chunk, *columns, strict=True):
            row = _row(record, ids, offsets, around)
            if not record.end:
                report.turn_ends.update(_turn_ends(record, row.ids, offsets))
            report.count(record, len(row.ids))
            if limit is not None and len(row.ids) > limit:
                report.truncated += 1
                report.prompts_lost += row.loses_prompt(len(row.ids) - limit)
                row = row.without_prompt(len(row.ids) - limit)
                report.answers_cut += any(row.mask[limit:])
                row = row.until(limit)
            row.mask[:1] = [False] * len(row.mask[:1])
            if row.ids and max(row.ids) > report.largest[0]:
                report.largest = (max(row.ids), record.place)
            yield np.asarray(row.ids, dtype=np.int32), np.asarray(row.mask, dtype=np.bool_)


class _Row(NamedTuple):
    """A text as tokens, before it is cut."""

    ids: list[int]
    mask: list[bool]
    """Whether each token is learnt."""
    kept: int = 0
    """Tokens at its beginning that are never cut."""
    prompt: int = 0
    """Tokens up to the prompt's end, which may be cut behind the first."""

    def without_prompt(self, excess: int) -> _Row:
        """Return the row with up to ``excess`` tokens of its prompt cut away, on the left."""
        cut = max(0, min(excess, self.prompt - max(self.kept, 1)))
        stop = self.kept + cut
        ids = self.ids[: self.kept] + self.ids[stop:]
        return self._replace(ids=ids, mask=self.mask[: self.kept] + self.mask[stop:])

    def loses_prompt(self, excess: int) -> bool:
        """Return whether nothing of the prompt is left without ``excess`` tokens, though it had
        some."""
        cuttable = self.prompt - max(self.kept, 1)
        return 0 < cuttable <= excess

    def until(self, limit: int) -> _Row:
        """Return the first ``limit`` tokens."""
        return self._replace(ids=self.ids[:limit], mask=self.mask[:limit])


def _row(
    record: Rendered,
    ids: list[int],
    offsets: Sequence[tuple[int, int]],
    around: TokensAround,
) -> _Row:
    """Return a record's tokens, with those that the tokenizer puts around a text where it asks for
    them. A token is learnt where its characters, from one of its offsets to the other, touch a span
    that is; of the tokens around a text, those behind it."""
    characters = itertools.chain.from_iterable(offsets)
    offsets_S2 = np.fromiter(characters, dtype=np.int64, count=2 * len(offsets)).reshape(-1, 2)
    begins_S, ends_S = offsets_S2.T
    in_loss_S = np.zeros(len(begins_S), dtype=np.bool_)
    for start, stop in record.spans:
        in_loss_S |= (begins_S < stop) & (ends_S > start)
    mask: list[bool] = in_loss_S.tolist()
    prompt = int(np.count_nonzero(ends_S <= record.prompt_end)) if record.prompt_end else 0
    kept = 0
    end = around.missing_end(ids) if record.end else []
    if record.begin:
        kept = len(around.prefix)
        ids, added = around.prefixed(ids)
        mask = [False] * kept + mask[kept - added :]
        prompt += added
    ids = ids + end
    mask = mask + [bool(record.spans)] * len(end)
    return _Row(ids, mask, kept, prompt)


def _turn_ends(
    record: Rendered, ids: Sequence[int], offsets: Sequence[tuple[int, int]]
) -> Iterator[int]:
    """Yield the last learnt token of each turn of a text that a chat template wrote."""
    if record.begin:  # label words have no turns
        return
    starts = [begin for begin, _ in offsets]
    for _, stop in record.spans:
        yield ids[bisect_left(starts, stop) - 1]


def first_example(dataset: Encoded, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return the first example (of a packed row, its first document; of a pair, both answers below
    one prompt) as runs of text, each with whether it is learnt."""
    return [run for row in range(dataset.group) for run in _runs(dataset, row, tokenizer)]


def _runs(dataset: Encoded, row: int, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return a row as runs of text; of a pair's second one the answer alone."""
    ids, in_loss = dataset[row]
    if row:
        ids = ids[in_loss]
        in_loss = in_loss[in_loss]
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
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in candidates if token is not None), 0)
