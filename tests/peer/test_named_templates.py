"""Oracle: TRL's copies of the templates that the families publish; and for what TRL has not, the
published text written out."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from blockwalk.data.chat_template import render_chat
from blockwalk.data.given_template import missing_marks, set_template
from blockwalk.data.named_templates import TEMPLATES
from tests.conftest import TinyRun
from tests.support.messages import refused

SYSTEM, USER, ANSWER = (
    {"role": role, "content": f" {role} é\n"} for role in ("system", "user", "assistant")
)
CONVERSATIONS = {
    "question": [USER],
    "answered": [USER, ANSWER],
    "with_system": [SYSTEM, USER, ANSWER],
    "two_turns": [SYSTEM, USER, ANSWER, USER, ANSWER],
}
PEERS = {"llama3": "llama3", "gemma": "gemma3", "phi3": "phi3", "chatml": "qwen2_5"}


@pytest.fixture
def tokenizer(tiny_run: TinyRun) -> Any:
    return AutoTokenizer.from_pretrained(tiny_run.model)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", PEERS)
def test_a_template_writes_what_the_family_writes(
    tokenizer: Any, name: str, conversation: str
) -> None:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("needs trl")
    messages = CONVERSATIONS[conversation]
    if name == "chatml" and messages[0]["role"] != "system":
        messages = [SYSTEM, *messages]  # Qwen's puts a system prompt of its own before others
    for ask in (False, True):
        tokenizer.chat_template = (
            Path(spec.origin).parent / "chat_templates" / f"{PEERS[name]}.jinja"
        ).read_text()
        theirs = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        tokenizer.chat_template = TEMPLATES[name].text
        assert render_chat(tokenizer, messages, add_generation_prompt=ask) == theirs


def test_mistral_writes_instructions_in_brackets(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATES["mistral"].text
    turns = [
        ("system", "Be kind."),
        ("user", "Hi"),
        ("assistant", "Ho"),
        ("user", "And?"),
        ("assistant", "Yes"),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = "<s>[INST] Be kind.\n\nHi [/INST] Ho</s>[INST] And? [/INST]"
    assert render_chat(tokenizer, messages[:-1], add_generation_prompt=True) == expected
    assert render_chat(tokenizer, messages) == expected + " Yes</s>"


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_a_conversation_that_the_family_refuses_is_refused(tokenizer: Any, name: str) -> None:
    tokenizer.chat_template = TEMPLATES[name].text
    with refused(Exception, "alternate"):
        render_chat(tokenizer, [USER, USER])


def test_the_end_of_text_ends_a_turn_where_the_tokenizer_lacks_the_mark(tokenizer: Any) -> None:
    """Oracle: the tokenizer's vocabulary: an answer must end in one token, at which generation can
    stop."""
    set_template(tokenizer, "chatml", {})
    text = render_chat(tokenizer, [USER, ANSWER])
    assert text.endswith(" assistant é\n</s>\n")
    assert "<|im_start|>user" in text
    note = missing_marks("chatml", tokenizer)
    assert "'<|im_start|>' as plain text" in note
    assert "'</s>' ends a turn" in note
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    set_template(tokenizer, "chatml", {})
    assert tokenizer.chat_template == TEMPLATES["chatml"].text
    assert missing_marks("chatml", tokenizer) == ""


def test_arguments_reach_the_template_and_a_record_wins(tokenizer: Any, tmp_path: Path) -> None:
    """Oracle: transformers' own ``apply_chat_template`` with the same arguments."""
    (tmp_path / "mine.jinja").write_text(
        "{{ mood }}:{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    set_template(tokenizer, str(tmp_path / "mine.jinja"), {"mood": "calm"})
    for options in ({}, {"mood": "loud"}):
        theirs = tokenizer.apply_chat_template(
            [USER], tokenize=False, **{"mood": "calm", **options}
        )
        assert render_chat(tokenizer, [USER], **options) == theirs


@pytest.mark.parametrize(
    ("template", "arguments", "words"),
    [
        ("chatmm", {}, ["data.chat_template", "chatmm", "chatml"]),
        (
            "chatml",
            {"add_generation_prompt": True},
            ["data.chat_template_arguments", "add_generation_prompt"],
        ),
        ("chatml", {"tools": []}, ["data.chat_template_arguments", "tools"]),
    ],
)
def test_what_cannot_be_set_is_refused(
    tokenizer: Any, template: str, arguments: Any, words: list[str]
) -> None:
    with pytest.raises(ValueError) as refusal:
        set_template(tokenizer, template, arguments)
    assert all(word in str(refusal.value) for word in words)
