"""Oracle: transformers' tokenizer, called on the whole text, with what it puts around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blockwalk.cli.speaker import Speaker
from blockwalk.data.encode import encode
from blockwalk.data.records import Record
from tests.support.chat_tokenizers import tokenizer

MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"

# What stands around a text, and what training adds behind that.
LAYOUTS = {
    "nothing": ("$A", "</s>"),
    "a beginning": ("<s> $A", "</s>"),
    "two that are no bos": ("<|user|> <|end|> $A", "</s>"),
    "a beginning and one more": ("<s> <|user|> $A", "</s>"),
    "the end before": ("</s> $A", "</s>"),
    "the end behind": ("<s> $A </s>", ""),
    "a language behind the end": ("$A </s> <|user|>", ""),
    "a language before, another end": ("<|user|> $A <|end|>", "</s>"),
}


def _tokenizer(layout: str) -> Any:
    from tokenizers import processors

    fast = tokenizer("")
    names = [name for name in layout.split() if name != "$A"]
    ids = fast.convert_tokens_to_ids(names)
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=layout, special_tokens=list(zip(names, ids, strict=True))
    )
    return fast


def _row(fields: dict[str, Any], fast: Any, max_length: int = 100) -> tuple[list[int], list[bool]]:
    ids, mask = encode([Record(fields, "x.jsonl line 1")], fast, max_length=max_length)[0]
    return ids.tolist(), mask.tolist()


@pytest.mark.parametrize(("layout", "end"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_text_is_learnt_with_the_tokens_that_the_tokenizer_puts_around_it(
    layout: str, end: str
) -> None:
    fast = _tokenizer(layout)
    whole = fast("one two")["input_ids"]
    expected = whole + fast.convert_tokens_to_ids(end.split())
    plain = len(fast("one two", add_special_tokens=False)["input_ids"])
    begun = len(fast("")["input_ids"]) - len(layout.partition("$A")[2].split())
    text = _row({"text": "one two"}, fast)
    assert text[0] == expected
    pair = _row({"prompt": "one", "completion": " two"}, fast)
    prompt = begun + len(fast("one", add_special_tokens=False)["input_ids"])
    assert pair == (expected, [False] * prompt + [True] * (len(expected) - prompt))
    assert text[1] == [i >= max(begun, 1) for i in range(len(expected))]
    assert plain + begun + len(layout.partition("$A")[2].split()) == len(whole)


@pytest.mark.parametrize("layout", [layout for layout, _ in LAYOUTS.values()], ids=LAYOUTS)
def test_a_prompt_is_asked_as_it_was_learnt(layout: str) -> None:
    fast = _tokenizer(layout)
    speaker = Speaker(None, fast, frozenset(), 0, str(MODEL))
    asked = speaker.tokens("one", special=True)[0].tolist()
    learnt, mask = _row({"prompt": "one", "completion": " two"}, fast)
    assert asked == learnt[: mask.index(True)]
    assert speaker.tokens("", special=True)[0].tolist() == asked[:-3]


def test_tokens_that_the_text_has_are_not_doubled_and_an_incomplete_beginning_is_completed() -> (
    None
):
    fast = _tokenizer("<s> <|user|> $A </s> <|end|>")
    expected = fast("one")["input_ids"]
    for text in ("one", "<s>one", "<s><|user|>one", "<s>one</s>", "one</s><|end|>"):
        assert _row({"text": text}, fast)[0] == expected, text


def test_all_of_the_beginning_stays_where_a_prompt_is_cut() -> None:
    fast = _tokenizer("<s> <|user|> $A")
    ids, _ = _row({"prompt": "one two one two", "completion": " two"}, fast, max_length=9)
    begun = fast.convert_tokens_to_ids(["<s>", "<|user|>"])
    behind = fast("wo two</s>", add_special_tokens=False)["input_ids"]
    assert ids == begun + behind


def test_a_vocabulary_of_words_has_its_tokens_around_too() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "<lang>", "</s>", "one", "two"]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(names[:3])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> <lang> $A", special_tokens=[("<s>", 0), ("<lang>", 1)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert _row({"text": "one two"}, fast)[0] == [0, 1, 3, 4, 2]
