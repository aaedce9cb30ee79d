"""A record as one text, and which of its characters are learnt; nothing here knows of tokens.

format           begin, end added   learnt                            too long
messages         by the template    each assistant turn with its end  cut on the right
sharegpt         as messages
alpaca           as messages; without a template, a record without history is a completion
completion       yes, yes           the completion and the end        prompt cut on the left,
                                                                      then right
  of turns       as messages; learnt are the assistant's turns in the completion
classification   yes, no            the label word                    prompt cut on the left
text             yes, yes           all of it                         cut on the right
"""

from __future__ import annotations

import string
from collections.abc import Collection, Sequence

from blockwalk.data.chat_template import chat_bounds
from blockwalk.data.conversation import render_turns
from blockwalk.data.formats import (
    JUDGED,
    Format,
    alpaca_columns,
    alpaca_prompt,
    answer_column,
    in_turns,
    system_text,
)
from blockwalk.data.named_templates import TEMPLATES
from blockwalk.data.records import Record
from blockwalk.data.rendered import Rendered, Tokenizer, render_pair
from blockwalk.plan.parsing import fields_of


def render(
    record: Record,
    kind: Format,
    tokenizer: Tokenizer,
    stops: Sequence[str] = (),
    prompts: Sequence[str] = (),
) -> Rendered:
    """Return a record of any format but classification, of which the template says what it becomes.

    ``prompts`` are texts with columns in braces (``data.prompt``), of which one stands before the
    answer. ``stops`` are the texts of the tokens that generation stops at: a turn is learnt as far
    as the first of them.

    Raises:
        ValueError: it lacks what its format needs, or needs a chat template that the tokenizer has
            not.
    """
    if prompts:
        answer = answer_column(kind, record)
        prompt = filled_prompt(prompts, record, (answer,))
        return render_pair(prompt, record.text(answer), record.place)
    if kind is Format.TEXT:
        return render_pair("", record.text("text"), record.place)
    if kind is Format.COMPLETION and not in_turns(record):
        prompt = below(system_text(record), record.text("prompt"))
        return render_pair(prompt, record.text("completion"), record.place)
    if not getattr(tokenizer, "chat_template", None):
        if kind is Format.ALPACA:
            prompt = below(system_text(record), alpaca_prompt(record)) + "\n"
            return render_pair(prompt, record.text(alpaca_columns(record)[1]), record.place)
        raise needs_template(record, kind)
    with chat_bounds(tokenizer, record.fields):
        return render_turns(record, kind, tokenizer, stops)


def needs_template(record: Record, kind: Format) -> ValueError:
    """Return the refusal of a conversation for which the tokenizer has no chat template."""
    of_turns = "of turns " * (kind is Format.COMPLETION or kind in JUDGED)
    way_out = "give prompt and answer as texts"
    if kind not in JUDGED:
        way_out = "give records with 'prompt' and 'completion', or 'text'"
    return ValueError(
        f"{record.place}: format {kind} {of_turns}needs a chat template, and the tokenizer has"
        f" none: set data.chat_template to one of {', '.join(TEMPLATES)} or to a file, or {way_out}"
    )


def below(system: str, prompt: str) -> str:
    """Return a prompt, below the text that stands before it where there is one."""
    return f"{system}\n{prompt}" if system else prompt


def filled_prompt(prompts: Sequence[str], record: Record, answers: Collection[str]) -> str:
    """Return the first of the prompts whose columns the record fills, with its values; the last one
    where none is. ``answers`` are the columns of what is learnt.

    Raises:
        ValueError: a column is missing, or is an answer itself.
    """
    for prompt in prompts:
        names = fields_of(prompt, "data.prompt")
        if answer := next((name for name in names if name in answers), ""):
            raise ValueError(
                f"{record.place}: data.prompt names {{{answer}}}, which is the answer that is"
                " learnt"
            )
        if prompt == prompts[-1] or all(record.fields.get(name) for name in names):
            break
    if missing := [name for name in names if name not in record.fields]:
        raise ValueError(
            f"{record.place}: data.prompt names {', '.join(map(repr, missing))}, and the record has"
            f" {record.names}"
        )
    values = {name: "" if record.fields[name] is None else record.text(name) for name in names}
    parts = string.Formatter().parse(prompt)
    return "".join(
        literal + (values[name] if name is not None else "") for literal, name, _, _ in parts
    )
