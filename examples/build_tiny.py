"""Make ``examples/tiny-llama/`` and ``examples/data/``: a small Llama of our own, its tokenizer and
its data sets.

    python examples/build_tiny.py [--steps 1500] [--out examples] [--family llama]

Seeded: on one kind of machine the same files come out again. Under fifteen minutes on two cores.
The model is trained in float32 with ``method: plain`` on documents of ``tiny_language.py`` and
saved in bfloat16. Other families learn the same language: ``opt`` has learned positions,
``qwen2_moe`` has routers and gates of one row (``benchmarks/quality.py``)."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny_language
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import blockwalk
from blockwalk.data.batch import Batch
from blockwalk.data.batching import Batches
from blockwalk.data.encode import encode
from blockwalk.data.formats import Format
from blockwalk.data.records import Record

VOCABULARY = 1024
SPECIAL = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token"
    " }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SHIPPED_DOCUMENTS = 3_000
BATCH_SIZE = 32
LEARNING_RATE = 2e-3


def write_chat(messages: list[dict[str, str]]) -> str:
    """A conversation as the chat template writes it, but for the begin and end tokens that every
    document gets."""
    return "</s>".join(f"<|{message['role']}|>{message['content']}" for message in messages)


def build_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: it can write any text, and has a token for each word of the language."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 32,
              "tie_word_embeddings": True},
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 192},
    "qwen2_moe": {
        "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def build_model(family: str = "llama") -> PreTrainedModel:
    """2.6 million parameters (the Llama); every dimension is a multiple of 64, so that any codec's
    groups fit."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{"init_std" if family == "opt" else "initializer_range": 0.04},
        **FAMILIES[family],
    )
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def train(model: PreTrainedModel, batches: Iterator[Batch], steps: int, folder: Path) -> None:
    """Train with everything resident, the plain row of the table, and save in bfloat16."""
    plan = blockwalk.method(
        "plain",
        optimizer={
            "name": "adamw",
            "learning_rate": LEARNING_RATE,
            "betas": (0.9, 0.98),
            "weight_decay": 0.05,
            "schedule": "cosine",
            "warmup_steps": 50,
            "total_steps": steps,
            "max_grad_norm": 1.0,
        },
    )
    started = time.perf_counter()
    with blockwalk.Walker(model, plan) as walker, tempfile.TemporaryDirectory() as exact:
        for _ in range(steps):
            result = walker.step(next(batches))
            if result.step % 50 == 0 or result.step in (1, steps):
                seconds = time.perf_counter() - started
                print(
                    f"step {result.step}/{steps}: loss {result.loss:.4f}, {seconds:.0f} s",
                    flush=True,
                )
        walker.save_pretrained(exact)
        AutoModelForCausalLM.from_pretrained(exact, dtype=torch.bfloat16).save_pretrained(folder)


def language(count: int) -> list[str]:
    """The first documents that the model is trained on."""
    return tiny_language.corpus(count, seed=2, write_chat=write_chat)


def tokenizer_documents() -> list[str]:
    return tiny_language.corpus(20_000, seed=1, write_chat=write_chat)


def write_data(folder: Path) -> None:
    """Every data set: a part of the language, and the two tasks with their held-out files."""
    write_jsonl(
        folder / "language_train.jsonl", [{"text": text} for text in language(SHIPPED_DOCUMENTS)]
    )
    held_out = tiny_language.corpus(300, seed=3, write_chat=write_chat)
    write_jsonl(folder / "language_heldout.jsonl", [{"text": text} for text in held_out])
    visits = tiny_language.sentiment_task(1400, seed=4)
    write_jsonl(folder / "sentiment_train.jsonl", visits[:1000])
    write_jsonl(folder / "sentiment_heldout.jsonl", visits[1000:])
    write_jsonl(folder / "cards_train.jsonl", tiny_language.card_task(held_out=False))
    write_jsonl(folder / "cards_heldout.jsonl", tiny_language.card_task(held_out=True))


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=1500, help=f"training steps of {BATCH_SIZE} documents"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="folder to write into"
    )
    parser.add_argument("--family", default="llama", choices=FAMILIES)
    options = parser.parse_args()
    data = options.out / "data"
    folder = options.out / f"tiny-{options.family}"

    write_data(data)
    tokenizer = build_tokenizer(tokenizer_documents())
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    documents = language(options.steps * BATCH_SIZE)
    records = (Record({"text": text}, f"document {i}") for i, text in enumerate(documents))
    rows = encode(records, tokenizer, max_length=64, format=Format.TEXT)
    train(
        build_model(options.family),
        Batches(rows, BATCH_SIZE, padding_multiple=8),
        options.steps,
        folder,
    )


if __name__ == "__main__":
    main()
