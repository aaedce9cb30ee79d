"""Oracle: the definition of causality, tried on each model's own forward: one later token becomes
another, and logits before it stay as they are."""

from __future__ import annotations

import pytest
import torch

from blockwalk.cutting.causality import CAUSAL_TOLERANCE, later_changes
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.cutting.verify import certified
from blockwalk.system.versions import is_older
from tests.support.control import tiny_config, tiny_model
from tests.support.messages import refused

ENCODERS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
    "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
    "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
"""Causal language models of transformers that are encoders unless ``is_decoder`` says otherwise."""
SEE_THE_FUTURE: list[tuple[str, dict]] = [
    *((kind, {}) for kind in ENCODERS),
    ("cpmant", {}),
    ("xlnet", {}),
    ("xlm", {}),
    ("llama", {"is_causal": False}),
    ("mixtral", {"is_causal": False}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
    ("gemma", {"use_bidirectional_attention": True}),
    ("paligemma", {}),
]
CAUSAL: list[tuple[str, dict]] = [
    *((kind, {"is_decoder": True}) for kind in ("bert", "electra", "roberta", "megatron-bert")),
    ("xlm", {"causal": True}),
    ("gpt2", {}),
    ("gemma3_text", {}),
    ("gemma3", {}),
    ("llama4_text", {}),
    ("mixtral", {}),
    ("qwen3_moe", {}),
    ("mamba", {}),
]


def reads_the_last_token(model_type: str, settings: dict) -> bool:
    """Whether another last token moves the logits of the tokens before it, in the model's own
    forward."""
    model = tiny_model(tiny_config(model_type, **settings)).eval()
    ids = torch.randint(3, 100, (1, 13), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, -1] += 1
    with torch.no_grad():
        before, after = (
            model(input_ids=each, use_cache=False).logits[:, :-1] for each in (ids, other)
        )
    return float((before - after).abs().max()) > 1e-4 * float(before.abs().max())


@pytest.mark.parametrize(("model_type", "settings"), SEE_THE_FUTURE, ids=lambda value: str(value))
def test_what_attends_to_later_tokens_is_refused(model_type: str, settings: dict) -> None:
    assert reads_the_last_token(model_type, settings)
    with refused(ValueError, "later tokens"):
        certified(build_skeleton(tiny_config(model_type, **settings)))


@pytest.mark.parametrize(("model_type", "settings"), CAUSAL, ids=lambda value: str(value))
def test_a_causal_model_changes_by_rounding_alone(model_type: str, settings: dict) -> None:
    if model_type == "megatron-bert" and is_older("transformers", "5.23"):
        pytest.skip("older versions of transformers let it attend to later tokens")
    assert not reads_the_last_token(model_type, settings)
    changes_T = later_changes(tiny_model(tiny_config(model_type, **settings)).eval())
    assert len(changes_T) == 23
    assert float(changes_T.max()) <= CAUSAL_TOLERANCE


def test_an_encoder_that_is_made_a_decoder_is_walked() -> None:
    certified(build_skeleton(tiny_config("bert", is_decoder=True)))


def test_a_refusal_names_the_setting_that_lets_it_see() -> None:
    for kind, settings, words in (
        ("electra", {}, "is_decoder false true"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention true"),
    ):
        with refused(ValueError, words):
            certified(build_skeleton(tiny_config(kind, **settings)))
