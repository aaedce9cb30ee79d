"""Oracle: TRL's own data path. Pairs and labelled answers have the tokens, and the learnt ones,
that its DPO and KTO trainers make of the same records; cut ones those of its collator."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from blockwalk.data.dataset import Encoded
from blockwalk.data.encode import encode
from blockwalk.data.records import Record
from blockwalk.plan.objectives import OBJECTIVES
from tests.support import chat_tokenizers

pytest.importorskip("trl")

THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think></think>{% endif %}"
)
"""A template whose generation prompt opens what it does not write into a turn."""


def words() -> Any:
    """A tokenizer that melts letters together, over the border of prompt and answer too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["the answer answers the question, questions answer"] * 9, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    fast.chat_template = THINKS
    return fast


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {"bytes": chat_tokenizers.tokenizer(chat_tokenizers.PLAIN, begin=True), "words": words()}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ASKED = [{"role": "system", "content": "be brief"}, user("a question"), said("what?"), user("one")]

PAIRS: dict[str, list[dict[str, Any]]] = {
    "turns": [
        {"prompt": ASKED, "chosen": [said("the answer")], "rejected": [said("no")]},
        {"prompt": [user("q")], "chosen": [said("yes"), user("sure?"), said("yes")],
         "rejected": [said("  ye\n")]},
    ],
    "turns without a prompt": [
        {"chosen": [*ASKED, said("the answer")], "rejected": [*ASKED, said("the question")]},
        {"chosen": [user("q"), said("a"), user("b"), said("c")],
         "rejected": [user("q"), said("d"), user("b"), said("c")]},
    ],
    "texts": [
        {"prompt": "the question: ", "chosen": "answers", "rejected": "questions"},
        {"prompt": "the answer", "chosen": "s the question", "rejected": " the question</s>"},
        {"prompt": "q", "chosen": "é\n", "rejected": "日本"},
    ],
    "texts without a prompt": [
        {"chosen": "the question: answer", "rejected": "the question: answers"},
        {"chosen": "Q one A two", "rejected": "Q one A  three"},
        {"chosen": "Q one A four", "rejected": "Q one A fourteen"},
    ],
}  # fmt: skip

LABELLED: dict[str, list[dict[str, Any]]] = {
    "turns": [
        {"prompt": ASKED, "completion": [said("the answer")], "label": True},
        {"prompt": [user("q")], "completion": [said("no\n")], "label": False},
    ],
    "texts": [
        {"prompt": "the question: ", "completion": "answers", "label": False},
        {"prompt": "the answer", "completion": "s", "label": True},
    ],
}


def ours(records: Iterable[Any], tokenizer: Any, objective: str, length: int | None) -> Encoded:
    numbered = [Record(dict(fields), f"r {n}") for n, fields in enumerate(records)]
    return encode(numbered, tokenizer, max_length=length, objective=OBJECTIVES[objective])


def prepared(trainer: Any, rows: list[Any], tokenizer: Any, length: int | None, **more: Any) -> Any:
    """Return a data set as a trainer's own preparation leaves it."""
    from datasets import Dataset

    settings = SimpleNamespace(
        dataset_num_proc=None, max_length=length, truncation_mode="keep_start"
    )
    own = SimpleNamespace(_tokenizer=tokenizer, **more)
    return trainer._prepare_dataset(own, Dataset.from_list(rows), tokenizer, settings, "eval")


def rows_of(encoded: Encoded) -> list[tuple[list[int], list[int]]]:
    rows = (encoded[row] for row in range(len(encoded)))
    return [(ids.tolist(), learnt.astype(int).tolist()) for ids, learnt in rows]


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("name", ["bytes", "words"])
def test_pairs_are_the_tokens_of_trl(tokenizers: dict[str, Any], name: str, kind: str) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    tokenizer = tokenizers[name]
    expected = []
    for row in prepared(DPOTrainer, PAIRS[kind], tokenizer, None):
        prompt = row["prompt_ids"]
        for answer in (row["chosen_ids"], row["rejected_ids"]):
            expected.append((prompt + answer, [0] * len(prompt) + [1] * len(answer)))
    encoded = ours(PAIRS[kind], tokenizer, "dpo", None)
    assert rows_of(encoded) == expected
    assert (encoded.group, encoded.examples) == (2, len(PAIRS[kind]))


@pytest.mark.parametrize("kind", LABELLED)
@pytest.mark.parametrize("name", ["bytes", "words"])
def test_labelled_answers_are_the_tokens_of_trl(
    tokenizers: dict[str, Any], name: str, kind: str
) -> None:
    from trl.trainer.kto_trainer import KTOTrainer

    tokenizer = tokenizers[name]
    rows = prepared(KTOTrainer, LABELLED[kind], tokenizer, None, calculate_KL=False)
    expected = []
    for row in rows:
        prompt, answer = row["prompt_ids"], row["completion_ids"]
        expected.append((prompt + answer, [0] * len(prompt) + [1] * len(answer)))
    encoded = ours(LABELLED[kind], tokenizer, "kto", None)
    assert rows_of(encoded) == expected
    assert encoded.numbers["desirable"].tolist() == [float(row["label"]) for row in rows]


@pytest.mark.parametrize("length", [12, 24, 40])
def test_cut_pairs_are_those_of_its_collator(tokenizers: dict[str, Any], length: int) -> None:
    from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer

    tokenizer = tokenizers["bytes"]
    pairs = [*PAIRS["texts"], *PAIRS["texts without a prompt"]]
    pairs = [
        {"prompt": "Q", "chosen": pair["chosen"] * 3, "rejected": pair["rejected"]}
        if n % 2
        else {"prompt": pair["chosen"] * 2, "chosen": pair["chosen"], "rejected": "no"}
        for n, pair in enumerate(pairs)
    ]
    left = prepared(DPOTrainer, pairs, tokenizer, length)
    collated = DataCollatorForPreference(pad_token_id=0, max_length=length)(list(left))
    encoded = ours(pairs, tokenizer, "dpo", length)
    assert encoded.report.truncated > 0
    assert encoded.report.dropped == len(pairs) - len(left)
    order = [*range(0, len(encoded), 2), *range(1, len(encoded), 2)]  # TRL's chosen ones come first
    assert len(order) == len(collated["input_ids"])
    for row, ids, mask, learnt in zip(
        order,
        collated["input_ids"].tolist(),
        collated["attention_mask"].tolist(),
        collated["completion_mask"].tolist(),
        strict=True,
    ):
        count = sum(mask)
        assert rows_of(encoded)[row] == (ids[:count], learnt[:count])
