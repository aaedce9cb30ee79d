"""A data set as the settings describe it: sources read, encoded each in its own format, mixed,
packed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from blockwalk.data.batching import epoch_order
from blockwalk.data.dataset import Answers, Choices, Encoded
from blockwalk.data.encode import encode, encode_answers, encode_choices
from blockwalk.data.formats import ANSWERS_ALONE, Format, judged_format, name_of
from blockwalk.data.packing import pack
from blockwalk.data.records import Record, Template
from blockwalk.data.rendered import Tokenizer
from blockwalk.data.sources import files_of, read_records
from blockwalk.data.tasks import TASKS, Task, demonstrations, part_of
from blockwalk.data.token_files import Kept, kept, key_of
from blockwalk.plan.data_source import joined, listed
from blockwalk.plan.objectives import ObjectiveFacts
from blockwalk.plan.parsing import did_you_mean
from blockwalk.plan.run_config import DataSettings
from blockwalk.plan.table import LOOSE
from blockwalk.plan.words import counted

_DRAWN_AT_ONCE = 1000
"""Sources that are drawn together; another number would draw others."""


def training_set(
    settings: DataSettings,
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    every_word: bool = False,
    objective: ObjectiveFacts = ANSWERS_ALONE,
) -> Encoded | Choices:
    """Return ``data.train`` as tokens: sources joined, or mixed by ``data.weights`` with draws from
    ``seed``, and packed where the settings say so. ``every_word`` asks for each record with every
    candidate. ``objective`` is the row that learns them.

    Raises:
        ValueError: a record lacks what its format needs (file, record and field are named), or
            settings make no sense together.
    """
    asks = asks_of(settings)
    if every_word and (asks is None or settings.packing):
        raise ValueError(
            "zo.objective ranks label words: set data.template and data.label_words, or data.task,"
            " and data.packing: false"
        )
    kind = _require_judged(settings, objective)
    key = "" if every_word else key_of("train", settings, tokenizer, seed, kind=kind)
    ranked = asks if every_word else None
    result = kept(key, lambda: Kept(_trained(settings, tokenizer, seed, ranked, objective)))
    if kind == Format.UNPAIRED:
        _require_both_labels(settings, result.rows, objective)
    return result.rows  # type: ignore[no-any-return]


def _require_judged(settings: DataSettings, objective: ObjectiveFacts) -> str:
    """Return the judged format that an objective learns; empty where it reads answers alone.

    Raises:
        ValueError: settings ask for what such records have not.
    """
    kind = judged_format(objective) or ""
    if kind and settings.packing:
        raise ValueError(
            f"data.packing lays several records in a row, and objective: {name_of(objective)} needs"
            " each answer in a row of its own: set data.packing: false"
        )
    if kind and (settings.task or settings.template):
        name = "data.task" if settings.task else "data.template"
        raise ValueError(
            f"{name} asks for one of a few answers, and objective: {name_of(objective)} learns"
            f" records of the format {kind}: leave one of them out"
        )
    return kind


def _require_both_labels(settings: DataSettings, rows: Encoded, objective: ObjectiveFacts) -> None:
    """Raise ValueError where all answers of ``data.train`` have one label."""
    desirable = rows.numbers["desirable"]
    name = name_of(objective)
    if desirable.min() == desirable.max():
        label = "true" if desirable[0] else "false"
        raise ValueError(
            f"{joined(settings.train)}: every label of {counted(rows.examples, 'record')} is"
            f" {label} (data.train), and objective: {name} needs answers of both kinds: add some"
            f" that are {'not ' * (label == 'true')}wanted, or set objective: sft, which learns all"
        )


def _trained(
    settings: DataSettings,
    tokenizer: Tokenizer,
    seed: int,
    ranked: Template | Task | None,
    objective: ObjectiveFacts,
) -> Encoded | Choices:
    """Return ``data.train`` as tokens; with every candidate of ``ranked``."""
    parts: list[Any] = []
    held_out = eval_numbers(settings, seed)
    numbers = itertools.count()
    for source, source_settings, source_records in _sources(settings, "train"):
        named = f"{source} (data.train)"
        trained = (
            (record for record in source_records if next(numbers) not in held_out)
            if held_out
            else source_records
        )
        if ranked is not None:
            length = settings.max_length
            parts.append(
                encode_choices(trained, tokenizer, ranked, max_length=length, source=named)
            )
        else:
            source_bytes = sum(file.stat().st_size for file in files_of(source))
            parts.append(
                _learnt(source_settings, trained, tokenizer, named, objective, source_bytes)
            )
    dataset = _joined(parts)
    if settings.shares:
        counts = [part.examples if isinstance(part, Encoded) else len(part) for part in parts]
        dataset = dataset.select(mixture(counts, settings.shares, seed))
    return _packed(settings, dataset)  # type: ignore[no-any-return]


def eval_numbers(settings: DataSettings, seed: int) -> frozenset[int]:
    """Return the numbers of the records of ``data.train`` that ``data.eval_share`` holds out, over
    all sources: drawn by ``seed``.

    Raises:
        ValueError: the share leaves no record to train on.
    """
    if not settings.eval_share:
        return frozenset()
    count = sum(1 for _, _, records in _sources(settings, "train") for _ in records)
    share_count = max(1, round(settings.eval_share * count))
    if share_count >= count:
        raise ValueError(
            f"data.eval_share is {settings.eval_share}: {share_count} of {count} records are held"
            " out, and none is left to train on"
        )
    return frozenset(random.Random(seed).sample(range(count), share_count))


def held_out_set(
    settings: DataSettings,
    tokenizer: Tokenizer,
    limit: int,
    seed: int = 0,
    objective: ObjectiveFacts = ANSWERS_ALONE,
) -> tuple[Encoded | Choices | Answers, int]:
    """Return the held-out records as tokens, with every candidate where these are ranked, and the
    number of all: ``limit`` of them (0: all) are taken, drawn at random, the same in every run.
    ``seed`` draws those of ``data.eval_share``; ``objective`` is the row that reads them."""
    kind = _require_judged(settings, objective)
    key = key_of("eval", settings, tokenizer, seed, limit, kind)
    rows, count = kept(key, lambda: _held_out(settings, tokenizer, limit, seed, objective))
    return rows, count


def _held_out(
    settings: DataSettings, tokenizer: Tokenizer, limit: int, seed: int, objective: ObjectiveFacts
) -> Kept:
    """Return the held-out records as tokens, with the number of all."""
    asks = asks_of(settings)
    share = sorted(eval_numbers(settings, seed))
    part = "train" if share else settings.task_part if settings.task else "test"
    named = f"data.eval_share of {joined(settings.train)}"
    if not share:
        named = f"{joined(settings.eval)} (data.eval)"
    count = len(share) or sum(1 for _, _, records in _sources(settings, part) for _ in records)
    if not count:
        raise ValueError(
            f"{joined(settings.eval)}: the data set is empty: no record was found (data.eval)"
        )
    numbers: Sequence[int] = share or range(count)
    if 0 < limit < count:
        # every n-th would miss what alternates
        numbers = [numbers[place] for place in random.Random(0).sample(range(count), limit)]
    drawn = numbers if isinstance(numbers, range) else frozenset(numbers)
    order = itertools.count()
    streams = (
        (source, (record for record in records if next(order) in drawn))
        for _, source, records in _sources(settings, part)
    )
    if asks is None or settings.format not in ("", Format.CLASSIFICATION):
        parts = [
            _learnt(source, itertools.chain([record], records), tokenizer, named, objective)
            for source, records in streams
            if (record := next(records, None)) is not None
        ]
        return Kept(_packed(settings, _joined(parts)), count)
    records = [record for _, stream in streams for record in stream]
    encoder: Any = encode_answers if asks.question(records[0]).answers else encode_choices
    shots = _shots(settings, asks)
    rows = encoder(records, tokenizer, asks, max_length=settings.max_length, shots=shots)
    return Kept(rows, count)


def _shots(settings: DataSettings, asks: Template | Task) -> str:
    """Return the demonstrations of ``data.shots``, taken from what a run may know."""
    if not settings.shots:
        return ""
    records = itertools.chain.from_iterable(part for _, _, part in _sources(settings, "known"))
    examples = itertools.islice(records, settings.shots)
    return demonstrations([asks.question(record) for record in examples])


def sample(source: str, tokenizer: Tokenizer, count: int, max_length: int) -> list[torch.Tensor]:
    """Return token ids, int64 [S] each, of up to ``count`` records of a source, drawn at random,
    the same each time."""
    rows = training_set(DataSettings(train=source, max_length=max_length), tokenizer)
    assert isinstance(rows, Encoded)
    drawn = epoch_order(len(rows), 0, 0)[:count].tolist()
    return [torch.from_numpy(rows[row][0].astype("int64")) for row in drawn]


def asks_of(settings: DataSettings) -> Template | Task | None:
    """Return the template or the task that makes a question of each record, if the settings name
    one."""
    if settings.task and settings.task not in TASKS:
        hint = did_you_mean(settings.task, list(TASKS), LOOSE)
        raise ValueError(f"data.task is {settings.task!r}{hint}; known: {', '.join(TASKS)}")
    if settings.task:
        return TASKS[settings.task]
    return (
        Template(settings.template, settings.label_words, settings.label_field)
        if settings.template
        else None
    )


def mixture(lengths: Sequence[int], weights: Sequence[float], seed: int) -> Iterator[int]:
    """Yield an order of the examples of several sources, numbered end to end: each is drawn from a
    source by its weight, until every source has been seen whole; one that runs out before begins
    again. The order is that of ``datasets.interleave_datasets``."""
    shares = np.asarray(weights) / sum(weights)
    generator = np.random.default_rng(seed)
    begins = [0, *itertools.accumulate(lengths)]
    draws = [0] * len(lengths)
    waiting = set(range(len(lengths)))
    while True:
        for source in generator.choice(len(lengths), size=_DRAWN_AT_ONCE, p=shares).tolist():
            yield begins[source] + draws[source] % lengths[source]
            draws[source] += 1
            if draws[source] == lengths[source]:
                waiting.discard(source)
            if not waiting:
                return


def _sources(
    settings: DataSettings, part: str
) -> Iterator[tuple[str, DataSettings, Iterable[Record]]]:
    """Yield each source, the settings that it is read with, and its records of a part: train, test,
    or dev and known (what demonstrations are taken of) out of ``data.train``. A task draws them,
    from its data set on the hub unless a source is given."""
    task = TASKS.get(settings.task)
    sources, split = (
        (settings.eval, settings.eval_split)
        if part == "test"
        else (settings.train, settings.train_split)
    )
    subset = settings.subset
    if task is not None and not sources:
        sources = task.hub
        subset = subset or task.subset
        if part == "test" and split == DataSettings().eval_split:
            split = task.held_out
    for source in listed(sources):
        source_settings = replace(settings, **{"subset": subset, **source.changes()})
        records = read_records(
            source.path,
            split=source.split or split,
            subset=source_settings.subset or None,
            columns=source_settings.columns,
        )
        if part != "test":
            records = itertools.islice(records, settings.max_samples or None)
        drawn = task is not None or part == "known"
        yield (
            source.path,
            source_settings,
            part_of(list(records), settings, part, source.path) if drawn else records,
        )


def _learnt(
    settings: DataSettings,
    records: Iterable[Record],
    tokenizer: Tokenizer,
    source: str,
    objective: ObjectiveFacts,
    source_bytes: int = 0,
) -> Encoded:
    asks = asks_of(settings)
    if asks is not None and settings.format in ("", Format.CLASSIFICATION):
        return encode_choices(
            records, tokenizer, asks, max_length=settings.max_length, source=source
        ).answered()
    # a packed record goes on in another row
    length = None if settings.packing else settings.max_length
    kind = settings.format or None
    return encode(
        records,
        tokenizer,
        max_length=length,
        format=kind,
        source=source,
        source_bytes=source_bytes,
        prompts=settings.prompt,
        objective=objective,
    )


def _joined(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else type(parts[0]).concatenated(parts)


def _packed(settings: DataSettings, rows: Any) -> Any:
    return (
        pack(rows, settings.max_length) if settings.packing and isinstance(rows, Encoded) else rows
    )
