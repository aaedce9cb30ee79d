"""Oracle: the kernel's count of this process's peak memory, and transformers' own rendering of what
is within bounds."""

from __future__ import annotations

import resource
import signal
from typing import Any

import pytest

from blockwalk.data import chat_template
from blockwalk.data.chat_template import render_chat
from tests.support.messages import refused

TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
LOOP = "{%- for m in messages -%}<{{ m.role }}>{{ m.content }}{%- endfor -%}"
MUCH = (
    "{%- set ns = namespace(x='aaaaaaaaaaaaaaaa') -%}"
    "{%- for i in range(40) -%}{%- set ns.x = STEP -%}{%- endfor -%}{{ ns.x|length }}"
)
BOMBS = [
    "{{ 'a' * 6000000000 }}",
    "{% set x = 'a' * 6000000000 %}",
    MUCH.replace("STEP", "ns.x ~ ns.x"),
    MUCH.replace("STEP", "ns.x + ns.x"),
    MUCH.replace("STEP", "ns.x|replace('a', 'aaa')"),
    MUCH.replace("STEP", "[ns.x, ns.x]|join(ns.x)"),
    MUCH.replace("STEP", "ns.x ~ ns.x")
    .replace("'aaaaaaaaaaaaaaaa'", "[1]")
    .replace("ns.x ~ ns.x", "ns.x + ns.x"),
    "{{ 'a'|center(6000000000) }}",
    "{{ 'a'|indent(6000000000, true) }}",
    "{{ '%6000000000d'|format(1) }}",
    "{{ '{:>6000000000}'.format(1) }}",
    "{{ 'a'.ljust(6000000000) }}",
    "{{ [1]|batch(600000000, 'x')|list|length }}",
    "{{ [[1]]|tojson(indent=6000000000) }}",
    "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaa{% endfor %}{%"
    " endfor %}{% endset %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaa{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ 'a' * 60000000 }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
]


def tokenizer_of(template: str) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    found = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    found.chat_template = template
    return found


@pytest.mark.parametrize("template", BOMBS)
def test_a_template_cannot_take_more_memory_than_its_bound(template: str) -> None:
    """At most four times 64 MB more than before, and the limit on the address space as it was."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with refused(Exception, "template|recursion"):
        render_chat(tokenizer_of(template), TURNS)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "kilobytes"
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_a_template_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    spin = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with refused(ValueError, "0.3"):
        render_chat(tokenizer_of(spin), TURNS)


def test_a_text_within_the_bound_is_transformers_own() -> None:
    """Also a long one: a thousand characters for each of a record's are more than 64 MB."""
    tokenizer = tokenizer_of(LOOP)
    for turns in (TURNS, [{"role": "user", "content": "x" * 20_000_000}]):
        expected = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False)
        assert render_chat(tokenizer, turns, add_generation_prompt=False) == expected
    wide = tokenizer_of(LOOP + "{{ 'b' * 900 * (messages[0].content|length) }}")
    turns = [{"role": "user", "content": "x" * 100_000}]
    assert len(render_chat(wide, turns)) > 90_000_000
