"""Oracle: the text and the marks written out by hand, for templates of one line; the counts of
tokens are arithmetic."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from blockwalk.data.batching import Batches
from blockwalk.data.dataset import Encoded
from blockwalk.data.encode import encode, first_example
from blockwalk.data.records import Record
from blockwalk.data.sources import read_records
from blockwalk.data.tokenizer import require_rows
from tests.support.chat_tokenizers import END, PLAIN, chat, tokenizer
from tests.support.messages import refused

PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{% if part.type == 'text'"
    " %}{{ part.text }}"
    "{% endif %}{% endfor %}</s>{% endfor %}" + END
)


CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}</s>{% endfor %}" + END
)


CALLS_AS_TEXT = CALLS.replace("c.function.arguments | tojson", "'' + c.function.arguments")


THINKS_LAST = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last"
    " %}<think></think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name"
    " }}</tool_call>{% endfor %}</s>"
    "{% endfor %}" + END
)


def read(template: str, fields: dict[str, Any], **settings: Any) -> tuple[str, Encoded]:
    """A record as the model sees it, what is learnt in brackets; and its tokens."""
    tokens = tokenizer(template, **settings)
    rows = encode([Record(fields, "x.jsonl line 1")], tokens, max_length=400)
    return "".join(
        f"⟦{text}⟧" if learnt else text for text, learnt in first_example(rows, tokens)
    ), rows


@pytest.mark.parametrize(
    "mark",
    [
        {"weight": 0},
        {"train": False},
        {"loss": False},
        {"train_on_turn": False},
        {"masked": True},
        {"weight": "0"},
    ],
)
def test_a_turn_that_is_marked_is_not_learnt(mark: dict[str, Any]) -> None:
    text, rows = read(PLAIN, chat({"content": "two", **mark}, "three"))
    assert text == "<|user|>one</s><|assistant|>two</s><|user|>one</s><|assistant|>⟦three</s>⟧"
    assert rows.report.turns_marked == 1


@pytest.mark.parametrize("mark", [{"weight": 1}, {"train": True}, {"masked": False}])
def test_a_mark_on_a_turn_that_is_never_learnt_is_named(mark: dict[str, Any]) -> None:
    fields = chat("two", "three")
    fields["messages"][0] |= mark
    text, rows = read(PLAIN, fields)
    assert text == "<|user|>one</s><|assistant|>⟦two</s>⟧<|user|>one</s><|assistant|>⟦three</s>⟧"
    (note,) = rows.report.warnings()
    assert note.startswith(
        "1 turn of other roles than the assistant's is marked as to be learnt, and not learnt"
    )
    fields["messages"][2] |= mark
    assert (
        read(PLAIN, fields)[1]
        .report.warnings()[0]
        .startswith("2 turns of other roles than the assistant's are marked")
    )


def test_a_prompt_and_a_completion_of_turns_are_a_chat_that_learns_the_completion() -> None:
    """The form of TRL's conversational data: of the prompt nothing is learnt, of its answers
    neither."""
    prompt = [*chat("two")["messages"], {"role": "user", "content": "three"}]
    completion = [{"role": "assistant", "content": "four"}]
    text, rows = read(PLAIN, {"prompt": prompt, "completion": completion})
    assert text == "<|user|>one</s><|assistant|>two</s><|user|>three</s><|assistant|>⟦four</s>⟧"
    assert not rows.report.warnings()
    text, rows = read(PLAIN, {"prompt": prompt, "completion": completion, "system": "be brief"})
    assert text == (
        "<|system|>be brief</s><|user|>one</s><|assistant|>two</s><|user|>three</s>"
        "<|assistant|>⟦four</s>⟧"
    )
    turns = [
        *completion,
        {"role": "user", "content": "five"},
        {"role": "assistant", "content": "six"},
    ]
    text, rows = read(PLAIN, {"prompt": prompt[-1:], "completion": turns})
    assert text == "<|user|>three</s><|assistant|>⟦four</s>⟧<|user|>five</s><|assistant|>⟦six</s>⟧"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [{"role": "user", "content": "one"}], "completion": "two"}, "prompt"),
        ({"prompt": "one", "completion": [{"role": "assistant", "content": "two"}]}, "completion"),
        ({"prompt": [{"role": "user", "content": "one"}], "completion": []}, "completion"),
        ({"prompt": [{"role": "user", "content": "one"}],
          "completion": [{"role": "user", "content": "two"}]}, "assistant"),
        ({"prompt": [{"role": "user"}], "completion": [{"role": "assistant", "content": "two"}]},
         "prompt [0]"),
    ],
)  # fmt: skip
def test_a_prompt_and_a_completion_that_are_no_chat_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with refused(ValueError, f"x.jsonl 1 {message}"):
        read(PLAIN, fields)


def test_a_mark_that_is_neither_yes_nor_no_is_refused() -> None:
    with refused(ValueError, "x.jsonl 1 weight 0.5"):
        read(PLAIN, chat({"content": "two", "weight": 0.5}))


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": "0.0"}, {"train": False}])
def test_a_conversation_that_is_marked_is_not_learnt(mark: dict[str, Any]) -> None:
    tok = tokenizer(PLAIN)
    records = [
        Record({**chat("two"), **mark}, "x.jsonl line 1"),
        Record(chat("three"), "x.jsonl line 2"),
    ]
    encoded = encode(records, tok, max_length=100)
    assert "".join(text for text, learnt in first_example(encoded, tok) if learnt) == "three</s>"
    assert len(encoded) == encoded.report.turns_marked == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            {
                "content": "two",
                "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}],
            },
            "train_detail",
        ),
        ({"content": "two", "loss_weight": 0.1}, "loss_weight"),
        ({"content": "two", "ignore": True}, "ignore"),
        ({"content": [{"type": "text", "text": "two", "train": False}]}, "turns"),
    ],
)
def test_marks_that_are_not_read_are_refused(answer: dict[str, Any], message: str) -> None:
    with refused(ValueError, f"x.jsonl 1 {message}"):
        read(PLAIN, chat(answer))


def test_reasoning_that_the_template_drops_is_named() -> None:
    for name in ("reasoning_content", "thinking"):
        text, rows = read(PLAIN, chat({"content": "two", name: "why"}))
        assert text == "<|user|>one</s><|assistant|>⟦two</s>⟧"
        assert "drops content, reasoning or a call of 1 turn" in "".join(rows.report.warnings())
    writes = PLAIN.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
    assert "drops" not in "".join(
        read(writes, chat({"content": "two", "reasoning_content": "why"}))[1].report.warnings()
    )


def test_variables_of_a_template_and_tools_under_an_older_name_are_the_records() -> None:
    template = (
        "{{ mood }}{% for t in tools or [] %}{{ t.type }} {{ t.function.name }}{% endfor %}" + PLAIN
    )
    for variables in ({"mood": "calm"}, '{"mood": "calm"}'):
        given = {**chat("two"), "functions": [{"name": "f"}], "chat_template_kwargs": variables}
        assert read(template, given)[0] == "calmfunction f<|user|>one</s><|assistant|>⟦two</s>⟧"
    for variables, message in (({"tokenize": True}, "tokenize"), (3, "object")):
        with refused(ValueError, f"x.jsonl 1 {message}"):
            read(template, {**chat("two"), "chat_template_kwargs": variables})


def test_half_a_character_within_json_text_is_named() -> None:
    half = '"\\ud83d"'
    with refused(ValueError, "x.jsonl 1 ud83d"):
        read(
            CALLS,
            chat(
                {
                    "content": "",
                    "tool_calls": [{"function": {"name": "f", "arguments": f'{{"a": {half}}}'}}],
                }
            ),
        )


def test_a_pair_of_conversations_is_refused_with_the_settings_that_read_it() -> None:
    turns = chat("two")["messages"]
    with refused(ValueError, "data.columns messages=chosen data.format"):
        read(PLAIN, {"chosen": turns, "rejected": turns})


@pytest.mark.parametrize("template", [PLAIN, PARTS])
def test_content_is_text_or_parts_as_the_template_wants_it(template: str) -> None:
    for content in ("two", [{"type": "text", "text": "t"}, {"type": "text", "text": "wo"}]):
        assert (
            read(template, chat({"content": content}))[0] == "<|user|>one</s><|assistant|>⟦two</s>⟧"
        )
    with refused(ValueError, "image"):
        read(template, chat({"content": [{"type": "image"}]}))


@pytest.mark.parametrize("template", [CALLS, CALLS_AS_TEXT])
@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}', {}, None, "{}"])
def test_arguments_of_a_call_are_an_object_or_json_text(template: str, arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    written = json.dumps({"a": 1}) if arguments in ({"a": 1}, '{"a": 1}') else "{}"
    text, _ = read(template, chat({"content": None, "tool_calls": [call]}))
    assert text == f"<|user|>one</s><|assistant|>⟦{written}</s>⟧"


def test_parts_are_not_written_as_python_where_the_template_changes_a_text() -> None:
    text, _ = read(
        PLAIN.replace("{{ m.content }}", "{{ m.content | replace('o', '0') }}"), chat("twe")
    )
    assert text == "<|user|>0ne</s><|assistant|>⟦twe</s>⟧"


def test_an_empty_list_of_calls_is_none() -> None:
    template = PLAIN.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.tool_calls is defined %}!{% endif %}"
    )
    assert (
        read(template, chat({"content": "two", "tool_calls": []}))[0]
        == "<|user|>one</s><|assistant|>⟦two</s>⟧"
    )


def test_a_call_that_the_template_writes_differently_later_is_left_out() -> None:
    call = {
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    }
    text, rows = read(THINKS_LAST, chat(call, "two"))
    assert "⟦<tool_call>" not in text
    assert rows.report.turns_left_out == 1


def test_the_mark_of_the_next_turn_is_not_learnt() -> None:
    last = PLAIN.replace("</s>", "{% if loop.last and m.role == 'assistant' %}<|end|>{% endif %}")
    text, _ = read(last, chat("two", "three"), eos="<|end|>")
    assert text == "<|user|>one<|assistant|>⟦two⟧<|user|>one<|assistant|>⟦three<|end|>⟧"


OPENED_EARLY = (
    "{% for m in messages %}{% if m.role == 'tool' %}<tool_call>{{ m.content }}</tool_call>{%"
    " else %}<|{{ m.role }}|>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}!{% endfor %}{% if not"
    " m.tool_calls %}</s>"
    "{% elif loop.last %}<tool_call>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|assistant|>{% endif %}"
)
"""A template that opens the tool's turn at the end of a call, and leaves the assistant's header out
of the prompt after it."""


OPENED_LATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}" + END


@pytest.mark.parametrize(
    ("eos", "learnt"), [("</s>", "⟦f!⟧<tool_call>"), ("<tool_call>", "⟦f!<tool_call>⟧")]
)
def test_what_the_next_turn_writes_of_itself_is_learnt_only_as_a_stop(
    eos: str, learnt: str
) -> None:
    call = {
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    }
    fields = chat(call)
    fields["messages"] += [
        {"role": "tool", "content": "21"},
        {"role": "assistant", "content": "two"},
    ]
    text, _ = read(OPENED_EARLY, fields, eos=eos)
    assert text == f"<|user|>one</s><|assistant|>{learnt}21</tool_call><|assistant|>⟦two</s>⟧"


def test_a_stop_that_opens_the_next_turn_is_learnt_and_a_turn_without_one_named() -> None:
    text, rows = read(OPENED_LATE, chat("two", "three"), eos="<|user|>")
    assert text == "<|user|>one<|assistant|>⟦two<|user|>⟧one<|assistant|>⟦three⟧"
    (note,) = rows.report.warnings()
    assert note.startswith("1 of 2 turns are learnt without an end")
    text, rows = read(OPENED_LATE, chat("two", "three"), eos="</s>")
    assert text == "<|user|>one<|assistant|>⟦two⟧<|user|>one<|assistant|>⟦three⟧"
    assert "2 of 2 turns are learnt without an end" in rows.report.warnings()[0]


def test_nothing_behind_a_stop_is_learnt() -> None:
    text, _ = read(PLAIN.replace("</s>", "</s><|end|>"), chat("two", "three"))
    assert text == (
        "<|user|>one</s><|end|><|assistant|>⟦two</s>⟧<|end|>"
        "<|user|>one</s><|end|><|assistant|>⟦three</s>⟧<|end|>"
    )


def test_a_call_that_the_template_drops_is_not_learnt_as_an_empty_answer() -> None:
    call = {
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    text, rows = read(PLAIN, chat(call, "two"))
    assert text == "<|user|>one</s><|assistant|></s><|user|>one</s><|assistant|>⟦two</s>⟧"
    assert "drops content, reasoning or a call of 1 turn" in rows.report.warnings()[1]


def test_an_empty_turn_and_an_empty_completion_leave_their_end_to_learn() -> None:
    assert read(PLAIN, chat(""))[0] == "<|user|>one</s><|assistant|>⟦</s>⟧"
    assert read(PLAIN, {"prompt": "one", "completion": ""})[0] == "one⟦</s>⟧"
    with refused(ValueError, "1 records|record token"):
        read(PLAIN, {"text": ""})


def test_roles_are_known_to_the_template_or_refused() -> None:
    assert read(PLAIN, chat("two", role="human"))[0] == "<|user|>one</s><|assistant|>⟦two</s>⟧"
    with refused(ValueError, "x.jsonl 1 wizard"):
        read(PLAIN, chat("two", role="wizard"))
    fields = chat("two")
    fields["messages"] += [{"role": "wizard", "content": "a"}, {"role": "critic", "content": "b"}]
    with refused(ValueError, "wizard critic system human"):
        read(PLAIN, fields)
    fields = chat("two")
    fields["messages"].insert(0, {"role": "developer", "content": "be brief"})
    dropping = "{% for m in messages if m.role != 'developer' %}" + PLAIN.removeprefix(
        "{% for m in messages %}"
    )
    (note,) = read(dropping, fields)[1].report.warnings()
    assert (
        "drops content, reasoning or a call of 1 turn, the first in x.jsonl line 1 (role"
        " 'developer')" in note
    )


def test_two_system_turns_are_refused_unless_they_are_one() -> None:
    fields = chat("two")
    fields["messages"].insert(0, {"role": "system", "content": "be brief"})
    assert read(PLAIN, {**fields, "system": "be brief"})[0].count("be brief") == 1
    with refused(ValueError, "system turn"):
        read(PLAIN, {**fields, "system": "be long"})


def test_a_beginning_is_not_doubled() -> None:
    assert read(PLAIN, {"text": "<s>two"}, begin=True)[0] == "<s>⟦two</s>⟧"
    assert read(PLAIN, {"text": "two"}, begin=True)[0] == "<s>⟦two</s>⟧"
    assert (
        read(PLAIN, {"prompt": "<s>one", "completion": "two"}, begin=True)[0] == "<s>one⟦two</s>⟧"
    )


def test_ends_at_which_generation_does_not_stop_are_named() -> None:
    assert not read(PLAIN, chat("two"))[1].report.warnings()
    _, rows = read(PLAIN, chat("two"), eos="<|end|>")
    (note,) = rows.report.warnings()
    assert "'</s>'" in note
    assert "'<|end|>'" in note
    assert rows.report.stops == (1,)
    _, endless = read(PLAIN.replace("</s>", ""), chat("two"))
    assert "without an end" in endless.report.warnings()[0]
    assert endless.report.stops == ()


def test_a_token_without_a_row_is_named_with_its_record() -> None:
    tokens = tokenizer(PLAIN)
    rows = encode(
        [Record({"text": "one"}, "a line 1"), Record({"text": "one</s>"}, "a line 2")],
        tokens,
        max_length=9,
    )
    token, where = rows.report.largest
    assert token == int(rows.token_ids.max())
    assert where == "a line 1"
    require_rows(rows.report.largest, tokens, token + 1, "data.train")
    with refused(ValueError, f"1 token {token} model {token} rows"):
        require_rows(rows.report.largest, tokens, token, "data.train")


def test_a_run_goes_on_on_another_day_and_says_what_else_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers.utils.chat_template_utils as theirs

    dated = "{{ strftime_now('%d %B %Y') }}" + PLAIN

    def batches(template: str = dated, answer: str = "two", eos: str = "</s>") -> Batches:
        return Batches(
            encode([Record(chat(answer), "x")], tokenizer(template, eos=eos), max_length=400), 1
        )

    saved = batches().state_dict()

    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.now(tz) + datetime.timedelta(days=40)

    monkeypatch.setattr(theirs, "datetime", Tomorrow)
    assert batches().state_dict()["data"] != saved["data"]
    batches().load_state_dict(saved)
    for other, changed in ((batches(answer="six"), "text"), (batches(dated + " "), "template")):
        with refused(ValueError, f"{changed} changed"):
            other.load_state_dict(saved)


def test_nulls_of_arrow_are_not_taught(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    calls = [
        {"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": 1}, {"b": 2})
    ]
    rows = [
        {**chat({"content": "", "tool_calls": [call]}), "tools": [call["function"]]}
        for call in calls
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "calls.parquet")
    assert [record.fields["tools"] for record in read_records(tmp_path / "calls.parquet")] == [
        r["tools"] for r in rows
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (rb'{"text": "\ud800 a"}', "character"),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\xbd"}]}', "character"),
        (b'{"a": ' + b"[" * 200_000, "nested"),
    ],
)
def test_records_that_cannot_be_read_name_file_and_line(
    tmp_path: Path, line: bytes, message: str
) -> None:
    file = tmp_path / "half.jsonl"
    file.write_bytes(b'{"text": "a"}\n' + line + b"\n")
    with refused(ValueError, f"half.jsonl 2 {message}"):
        list(read_records(file))
