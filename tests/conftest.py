"""What several rooms of tests share: a tiny model on disk with a tokenizer and data, all made from
seeds."""

import gc
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.support")

settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    # the same examples in every run there; elsewhere new ones each time
    settings.load_profile("ci")

os.register_at_fork(after_in_child=gc.freeze)
"""A forked process collects nothing that it inherits: garbage of an earlier test may own a thread
that is not there."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, under ``-m fast``, modules and folders that have no such test: collecting them
    would import torch."""
    if config.option.markexpr != "fast":
        return None
    tests = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return not any("pytest.mark.fast" in path.read_text() for path in tests) or None


@pytest.fixture(scope="session", autouse=True)
def _the_fast_tests_import_no_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    assert request.config.option.markexpr != "fast" or "torch" not in sys.modules, (
        "a fast test needs no torch"
    )


@pytest.fixture(scope="module", autouse=True)
def _what_was_imported_is_no_garbage() -> None:
    """Keep the collector from what is there before a module's first test. Every walker collects:
    through half a million objects of torch and transformers otherwise (0.3 s), and every forked
    rank would copy the pages that they lie in."""
    gc.collect()
    gc.freeze()


WORDS = {"good": ["fresh", "kind", "clean", "warm"], "bad": ["stale", "rude", "dirty", "cold"]}


@dataclass(frozen=True)
class TinyRun:
    """A folder with a random model, and two data files of a task that can be learnt in a few dozen
    steps."""

    model: Path
    train: Path
    eval: Path

    def arguments(self, output_dir: Path) -> list[str]:
        """Flags of a classification run."""
        settings = {
            "model": self.model,
            "output_dir": output_dir,
            "data.train": self.train,
            "data.eval": self.eval,
            "data.template": "{text} It was {label}.",
            "data.label_words": "good,bad",
            "batch_size": 4,
        }
        return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """See :func:`make_tiny_run`."""
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))


def make_tiny_run(folder: Path) -> TinyRun:
    """A Llama of three blocks with bytes for tokens, float32, and reviews of one word."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder / "m")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
        )
    ).save_pretrained(folder / "m")
    draw = random.Random(0)
    for name, count in (("train", 64), ("eval", 10)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                label = draw.choice(["good", "bad"])
                print(
                    json.dumps({"text": f"{draw.choice(WORDS[label])}.", "label": label}), file=file
                )
    return TinyRun(folder / "m", folder / "train.jsonl", folder / "eval.jsonl")
