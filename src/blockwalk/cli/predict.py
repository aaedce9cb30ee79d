"""``blockwalk predict``: the label word of each text, with its probability, as JSON lines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blockwalk.cli.adapters import opened_adapter, trained_by
from blockwalk.cli.reading import packed_model, plan_to_read
from blockwalk.plan.run_config import RunConfig
from blockwalk.system.terminal import say

if TYPE_CHECKING:
    from blockwalk.data.dataset import Choices
    from blockwalk.data.records import Record, Template

TEXT = "--text"
"""The place of a record that the command line has, in an error."""


def predict(run: RunConfig, arguments: argparse.Namespace) -> None:
    """Print a line of JSON for each record: the label word that ranks first, its probability, that
    of every word, and the record's fields. A record needs no label.

    Raises:
        ValueError: the run has no label words, or a record lacks a field of its template.
    """
    from blockwalk.data.tokenizer import tokenizer_of
    from blockwalk.train.evaluation import HeldOut, eval_batch_size
    from blockwalk.walk.walker import Walker

    template = _template(run)
    records = _records(run, arguments, template)
    run, named = trained_by(run, arguments)
    with opened_adapter(named, run.model) as adapter:
        tokenizer = tokenizer_of(run.model, run.data, adapter)
        choices = _encoded(run, records, tokenizer, template)
        held_out = HeldOut(choices, eval_batch_size(run), run.data, len(records), run.eval_batches)
        plan = plan_to_read(run, adapter, arguments)
        with Walker(packed_model(run, plan), plan, lora=adapter, training=False) as walker:
            scores = held_out.scores(walker, choices).reshape(len(records), -1)
    for record, scores_W in zip(records, scores.tolist(), strict=True):
        say(json.dumps(_answer(record, template, scores_W), ensure_ascii=False))


def _template(run: RunConfig) -> Template:
    """Return the template of a run's classification.

    Raises:
        ValueError: the run has none.
    """
    from blockwalk.data.corpus import asks_of
    from blockwalk.data.records import Template

    template = asks_of(run.data)
    if not isinstance(template, Template):
        reason = f"data.task is {run.data.task}" if run.data.task else "data.template is empty"
        raise ValueError(
            f"predict ranks the label words of a run with data.template and data.label_words, and"
            f" {reason}: blockwalk generate continues a text"
        )
    if run.data.shots:
        raise ValueError(
            f"data.shots is {run.data.shots}; predict shows no examples before a text: set"
            " data.shots: 0"
        )
    return template


def _records(run: RunConfig, arguments: argparse.Namespace, template: Template) -> list[Record]:
    """Return the records of the file, or the one text of the command line."""
    from blockwalk.data.records import Record
    from blockwalk.data.sources import read_records

    if (arguments.file is None) == (arguments.text is None):
        raise ValueError("predict takes a file of records, or one text as --text TEXT")
    if arguments.file is not None:
        records = list(read_records(arguments.file, columns=run.data.columns))
        if not records:
            raise ValueError(f"{arguments.file}: no record was found")
        return records
    fields = [name for name in template.fields if name != "label"]
    if len(set(fields)) != 1:
        raise ValueError(
            f"--text fills one field, and data.template {run.data.template!r} has"
            f" {', '.join(fields)}: give a file of records"
        )
    return [Record({fields[0]: arguments.text}, TEXT)]


def _encoded(
    run: RunConfig, records: Iterable[Record], tokenizer: Any, template: Template
) -> Choices:
    """Return records with every label word, as an evaluation ranks them."""
    from blockwalk.data.encode import encode_choices

    # which class is right plays no part in the scores of all
    label = {run.data.label_field: template.words[0]}
    labelled = [replace(record, fields={**record.fields, **label}) for record in records]
    return encode_choices(labelled, tokenizer, template, max_length=run.data.max_length)


def _answer(record: Record, template: Template, scores_W: list[float]) -> dict[str, Any]:
    """Return the answer for a record: its scores, W of them, as shares of their exponentials."""
    import numpy as np

    weights_W = np.exp(np.asarray(scores_W) - max(scores_W))
    shares_W = weights_W / weights_W.sum()
    probabilities = dict(zip(template.words, np.round(shares_W, 6).tolist(), strict=True))
    label = template.words[int(shares_W.argmax())]
    return {
        "label": label,
        "probability": probabilities[label],
        "probabilities": probabilities,
        "record": record.fields,
    }
