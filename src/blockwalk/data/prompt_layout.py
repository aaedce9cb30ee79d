"""The layout in which a run's records were learnt, and a user's text in it: what stands before the
answer."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator

from blockwalk.data.records import Record, Template
from blockwalk.plan.data_source import listed
from blockwalk.plan.parsing import fields_of
from blockwalk.plan.run_config import DataSettings


def prompts_of(settings: DataSettings) -> list[str]:
    """Return the texts of ``data.prompt``, and those that sources of ``data.train`` have of their
    own, each once."""
    source_prompts = itertools.chain.from_iterable(
        source.prompt for source in listed(settings.train)
    )
    return list(dict.fromkeys([*settings.prompt, *source_prompts]))


def filled(settings: DataSettings, text: str) -> str | None:
    """Return a text in the layout of ``data.prompt``: in place of the one column of the one layout
    that has one column. A text that has that layout stays as it is. None: no layout, or several,
    may be filled so."""
    single = [
        prompt for prompt in prompts_of(settings) if len(set(fields_of(prompt, "data.prompt"))) == 1
    ]
    if len(single) != 1:
        return None
    literals = list(_literals(single[0]))
    start = literals[0].strip()
    end = literals[-1].strip()
    if (start or end) and text.strip().startswith(start) and text.strip().endswith(end):
        return text
    return text.join(literals)


def field_of(settings: DataSettings) -> str | None:
    """Return the one field of a record that a prompt is made of; None: there are several, or the
    records are a task's."""
    if settings.task:
        return None
    layouts = [settings.template] if settings.template else prompts_of(settings)
    if not layouts:
        return "prompt" if settings.format == "completion" else "text"
    fields = {name for layout in layouts for name in fields_of(layout, "data.prompt")} - {"label"}
    return fields.pop() if len(fields) == 1 else None


def example(settings: DataSettings, word: str) -> str | None:
    """Return a prompt to try on what a run has learnt: a word, where :func:`filled` puts it in the
    layout or there is none; else the layout with the word in every column. None: it has several
    lines, or is a task's own."""
    prompts = prompts_of(settings)
    if settings.task:
        return None
    if settings.template:
        template = Template(settings.template, settings.label_words, settings.label_field)
        text = template.prompt(Record(dict.fromkeys(template.fields, word), "data.template"))
    elif not prompts or filled(settings, word) is not None:
        return word
    else:
        text = word.join(_literals(prompts[0]))
    return None if "\n" in text else text


def _literals(prompt: str) -> Iterator[str]:
    """Yield the texts around a prompt's columns: one more than there are columns."""
    text = ""
    for literal, name, _, _ in string.Formatter().parse(prompt):
        text += literal
        if name is not None:
            yield text
            text = ""
    yield text
