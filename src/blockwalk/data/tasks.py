"""Tasks of MeZO's experiments by name: prompts, label words, candidates and splits (``data.task``).

Source: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (2023), appendix E.2
and E.4 (tables 13 and 14) and its code's sampling. TREC is posed to masked models alone there
("[MASK]: <S1>"); a causal model needs the word last, so its wording here is our own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from blockwalk.data.records import Question, Record, Template
from blockwalk.plan.run_config import DataSettings
from blockwalk.plan.words import counted

SEPARATOR = "\n\n"
"""The text between demonstrations."""
ANSWER_TOKENS = 50
"""Tokens of a generated answer at most; it ends at the end of its line."""


def _with(record: Record, **fields: Any) -> Record:
    return replace(record, fields={**record.fields, **fields})


def _sentence(record: Record) -> Record:
    return _with(record, sentence=record.text("sentence").strip())


def _boolq(record: Record) -> Record:
    """Return the question as a sentence; Google's own records have a Boolean ``answer`` where
    SuperGLUE's have ``label``."""
    question = record.text("question").rstrip("?")
    label = record.fields.get("label", record.fields.get("answer"))
    label = int(label) if isinstance(label, bool) else label
    return _with(record, question=f"{question[:1].upper()}{question[1:]}?", label=label)


def _wsc(record: Record) -> Record:
    return _with(record, span2_text=record.text("span2_text").lower())


def _copa(record: Record) -> Question:
    kinds = {"effect": "so", "cause": "because"}
    kind = record.text("question")
    label = record.fields.get("label")
    if kind not in kinds or label not in (0, 1):
        raise ValueError(
            f"{record.place}: 'question' must be cause or effect, and 'label' 0 or 1; they are"
            f" {kind!r}, {label!r}"
        )
    choices = [record.text(name) for name in ("choice1", "choice2")]
    words = tuple(
        " " + (choice if choice.split(" ")[0] == "I" else choice[:1].lower() + choice[1:])
        for choice in choices
    )
    premise = record.text("premise").rstrip().removesuffix(".")
    return Question(f"{premise} {kinds[kind]}", words, (label,), place=record.place)


def _record(record: Record) -> Question:
    """Return the query with each entity of the passage in the placeholder's stead; several answers
    may be right."""
    entities, answers = (_texts(record, name) for name in ("entities", "answers"))
    query = record.text("query")
    words = tuple(" " + query.replace("@placeholder", entity) for entity in entities)
    right = tuple(i for i, entity in enumerate(entities) if entity in answers)
    if not right:
        raise ValueError(f"{record.place}: no answer of {answers} is among the entities")
    right = tuple(sorted(right, key=lambda i: answers.index(entities[i])))
    return Question(
        record.text("passage").replace("@highlight\n", "- ") + "\n-",
        words,
        right,
        place=record.place,
    )


def _texts(record: Record, name: str, *inner: str) -> list[str]:
    """Return a list of texts, which hub data may hold one level down (``answers.text``)."""
    texts = record.fields.get(name)
    for key in inner:
        texts = texts.get(key) if isinstance(texts, Mapping) else texts
    listed = isinstance(texts, Sequence) and not isinstance(texts, str)
    if not listed or not texts or not all(isinstance(entry, str) for entry in texts):
        raise ValueError(f"{record.place}: field {name!r} must hold a list of texts, not {texts!r}")
    return list(texts)


def _squad(record: Record) -> Question:
    title, context, question = (record.text(name) for name in ("title", "context", "question"))
    answers = _texts(record, "answers", "text")
    prompt = f"Title: {title}\nContext: {context}\nQuestion: {question.strip()}\nAnswer:"
    return Question.asked(prompt, answers, record.place)


def _drop(record: Record) -> Question:
    answers = _texts(record, "answers_spans", "spans")
    prompt = (
        f"Passage: {record.text('passage')}\nQuestion: {record.text('question').strip()}\nAnswer:"
    )
    return Question.asked(prompt, answers, record.place)


@dataclass(frozen=True)
class Task:
    """A task: its data set on the hub, and the question that each of its records is."""

    hub: str
    subset: str
    form: Template | Callable[[Record], Question]
    """The prompt with the words of the classes; or a function, where candidates differ from record
    to record or the answer is generated."""
    prepare: Callable[[Record], Record] = lambda record: record
    """Changes to the fields of a record before its prompt is made."""
    held_out: str = "validation"
    """The split of the hub's data set that is evaluated on."""

    def question(self, record: Record) -> Question:
        """Return the record as a question. Raises ValueError, with the record's place, where it has
        not the task's fields."""
        return (
            self.form.question(self.prepare(record))
            if isinstance(self.form, Template)
            else self.form(record)
        )


def _super(subset: str, prompt: str, *words: str, **more: Any) -> Task:
    """Return a task of SuperGLUE whose answer stands in a line of its own."""
    return Task("aps/super_glue", subset, Template(prompt + "\n{label}", words), **more)


_TREC = ("Expression", "Entity", "Description", "Human", "Location", "Number")
TASKS: dict[str, Task] = {
    "sst2": Task(
        "nyu-mll/glue",
        "sst2",
        Template("{sentence} It was {label}", ("terrible", "great")),
        _sentence,
    ),
    "sst5": Task(
        "SetFit/sst5",
        "",
        Template("{text} It was {label}", ("terrible", "bad", "okay", "good", "great")),
    ),
    "rte": _super(
        "rte", '{premise}\nDoes this mean that "{hypothesis}" is true? Yes or No?', "Yes", "No"
    ),
    "cb": _super(
        "cb",
        'Suppose {premise} Can we infer that "{hypothesis}"? Yes, No, or Maybe?',
        "Yes",
        "No",
        "Maybe",
    ),
    "boolq": _super("boolq", "{passage} {question}", "No", "Yes", prepare=_boolq),
    "wsc": _super(
        "wsc.fixed",
        '{text}\nIn the previous sentence, does the pronoun "{span2_text}" refer to'
        " {span1_text}? Yes or No?",
        *("No", "Yes"),
        prepare=_wsc,
    ),
    "wic": _super(
        "wic",
        'Does the word "{word}" have the same meaning in these two sentences? Yes, No?\n'
        "{sentence1}\n{sentence2}",
        *("No", "Yes"),
    ),
    "multirc": _super(
        "multirc",
        '{paragraph}\nQuestion: {question}\nI found this answer "{answer}". Is that correct?'
        " Yes or No?",
        *("No", "Yes"),
    ),
    "copa": Task("aps/super_glue", "copa", _copa),
    "record": Task("aps/super_glue", "record", _record),
    "trec": Task(
        "CogComp/trec", "", Template("{text} Type: {label}", _TREC, "coarse_label"), held_out="test"
    ),
    "squad": Task("rajpurkar/squad", "", _squad),
    "drop": Task("ucinlp/drop", "", _drop),
}


def part_of(
    records: Sequence[Record], settings: DataSettings, part: str, source: str
) -> list[Record]:
    """Return the records of a part (train, dev, test, or known: all that may be shown) in their
    order drawn from ``data.task_seed``.

    The draw is numpy's legacy permutation, as the original's, so that the same seed has the same
    records. The last ``data.task_dev`` of those drawn from the training data are for development.

    Raises:
        ValueError: nothing is left to train on.
    """
    order = [
        records[i]
        for i in np.random.RandomState(settings.task_seed).permutation(len(records)).tolist()
    ]
    if part in ("test", "known"):
        return order[: settings.task_eval or None] if part == "test" else order
    drawn = order[: settings.task_train + settings.task_dev] if settings.task_train else order
    trained = len(drawn) - settings.task_dev
    if trained < 1:
        raise ValueError(
            f"{source} has {counted(len(records), 'record')}, which"
            f" data.task_dev={settings.task_dev} takes all; set it lower (MeZO takes 100 of CB and"
            " COPA), or 0 for none"
        )
    return drawn[:trained] if part == "train" else drawn[trained:]


def demonstrations(questions: Sequence[Question]) -> str:
    """Return the text that stands before a question in context: others with their answers, blank
    lines between."""
    return "".join(
        (question.prompt + question.learnt).strip() + SEPARATOR for question in questions
    )
