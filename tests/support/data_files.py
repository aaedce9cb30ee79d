"""A tiny tokenizer, and files of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>"]


BEGIN = 1


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, begin token added: a row's length is its number of characters, and
    one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate([*SPECIAL, *alphabet])}, merges=[])
    )
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BEGIN)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def jsonl(path: Path, *lines: Any) -> Path:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path
