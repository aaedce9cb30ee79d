"""Oracle: transformers. The token ids of its chat templates, and the assistant mask from ``{%
generation %}`` marks."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from blockwalk.data.encode import encode
from blockwalk.data.records import Record
from tests.support.messages import refused

WORDS = [
    "one two three four",
    "Is seven more than six?",
    " yes, by one.\n",
    "And eight than nine?",
    "no</think>",
    "é ü 漢字",
]

# Each template twice: with the marks that transformers' mask needs, and, as nearly all published
# ones, without.
PLAIN = (
    "<s>{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>{% endgeneration %}{{"
    " '\\n' }}"
    "{% else %}{{ m['content'] }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[ASK] {{ m['content'] }} [/ASK]"
    "{% elif m['role'] == 'assistant' %}{% generation %} {{ m['content'] | trim }}</s>{%"
    " endgeneration %}"
    "{% else %}{{ m['content'] }}\n{% endif %}{% endfor %}"
)
# The end of a conversation is written once, after the last turn.
LAST_END = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:"
    "{% generation %} {{ m['content'] }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}Q: {{ m['content'] }}\n{% endif %}{% if loop.last and not add_generation_prompt"
    " %}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
TEMPLATES = {"plain": PLAIN, "brackets": BRACKETS, "last_end": LAST_END}

CONVERSATIONS = {
    "one_turn": [("user", WORDS[0]), ("assistant", WORDS[1])],
    "system_and_three": [
        ("system", WORDS[3]),
        ("user", WORDS[0]),
        ("assistant", WORDS[1]),
        ("user", WORDS[1]),
        ("assistant", WORDS[5]),
        ("user", WORDS[1]),
        ("assistant", WORDS[1]),
    ],
    "assistant_first": [("assistant", WORDS[0]), ("user", WORDS[3]), ("assistant", WORDS[0])],
    "user_last": [("user", WORDS[0]), ("assistant", WORDS[3]), ("user", WORDS[0])],
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges reach over blanks, as real ones do."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        WORDS * 3,
        trainers.BpeTrainer(
            vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


def unmarked(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def turns(name: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in CONVERSATIONS[name]]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_ids_and_mask_are_those_of_transformers(
    tokenizer: Any, template: str, conversation: str
) -> None:
    messages = turns(conversation)
    tokenizer.chat_template = TEMPLATES[template]
    theirs = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    tokenizer.chat_template = unmarked(TEMPLATES[template])
    encoded = encode([Record({"messages": messages}, "x")], tokenizer, max_length=512)
    ids, mask = encoded[0]
    assert ids.tolist() == theirs["input_ids"]
    expected = theirs["assistant_masks"]
    if template == "last_end" and conversation != "user_last":
        # What follows the last turn stands outside of the marks. It is learnt too: it is what stops
        # generation.
        after = len(expected) - expected[::-1].index(1)
        expected[after:] = [1] * (len(expected) - after)
    if (
        conversation == "assistant_first"
    ):  # an opening turn answers nothing, and what it was given is not known
        expected[: expected.index(0, expected.index(1))] = [0] * expected.index(
            0, expected.index(1)
        )
    assert encoded.report.turns_left_out == (conversation == "assistant_first")
    assert mask.astype(int).tolist() == expected
    assert 0 < mask.sum() < len(mask)


def test_turns_that_the_template_rewrites_are_left_out_and_counted(tokenizer: Any) -> None:
    """A template that opens a reasoning section in the last turn only, as Qwen3's does."""
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>"
        "{% if m['role'] == 'assistant' and loop.last %}{% generation %}<think></think>{{"
        " m['content'] }}</s>"
        "{% endgeneration %}{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    messages = turns("system_and_three")
    theirs = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    encoded = encode([Record({"messages": messages}, "x")], tokenizer, max_length=512)
    assert encoded[0][0].tolist() == theirs["input_ids"]
    assert encoded[0][1].astype(int).tolist() == theirs["assistant_masks"]
    assert encoded.report.turns_left_out == 2
    assert encoded.report.warnings()[0].startswith("2 assistant turns are not learnt")


def test_a_turn_whose_reasoning_the_prompt_opens_and_the_template_drops(tokenizer: Any) -> None:
    """transformers' assistant mask of a template of DeepSeek-R1's form: its generation prompt ends
    in open reasoning, and a turn is written without its own."""
    template = (
        "<s>{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{% generation %}"
        "{{ m['content'].split('</think>')[-1] }}</s>{% endgeneration %}{% else %}<|{{ m['role']"
        " }}|>{{ m['content'] }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    )
    messages = turns("system_and_three")
    messages[4]["content"] = "<think>\none two</think>" + messages[4]["content"]
    tokenizer.chat_template = template
    theirs = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    tokenizer.chat_template = unmarked(template)
    encoded = encode([Record({"messages": messages}, "x")], tokenizer, max_length=512)
    assert encoded[0][0].tolist() == theirs["input_ids"]
    assert encoded[0][1].astype(int).tolist() == theirs["assistant_masks"]
    assert encoded.report.turns_left_out == 0


def test_where_nothing_is_learnt_the_reason_is_said(tokenizer: Any) -> None:
    """Oracle: the one reason there is, a turn that opens its conversation."""
    tokenizer.chat_template = unmarked(PLAIN)
    with refused(ValueError, "1 records|record assistant"):
        encode([Record({"messages": turns("assistant_first")[:1]}, "x")], tokenizer, max_length=512)


def test_what_precedes_the_learnt_tokens_is_what_generation_is_given(tokenizer: Any) -> None:
    """transformers' generation prompt, token by token: training and inference see the same ids."""
    tokenizer.chat_template = unmarked(PLAIN)
    messages = turns("one_turn")
    prompt = tokenizer.apply_chat_template(
        messages[:1], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    ids, mask = encode([Record({"messages": messages}, "x")], tokenizer, max_length=512)[0]
    assert ids[: mask.argmax()].tolist() == prompt


def test_completion_ids_are_those_of_the_joined_text(tokenizer: Any) -> None:
    record = Record({"prompt": "one two", "completion": " three four"}, "x")
    ids, mask = encode([record], tokenizer, max_length=512)[0]
    assert ids.tolist() == [*tokenizer("one two three four")["input_ids"], tokenizer.eos_token_id]
    assert ids[mask].tolist() == [*tokenizer(" three four")["input_ids"], tokenizer.eos_token_id]
