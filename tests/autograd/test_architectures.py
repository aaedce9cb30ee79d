"""Oracle: each model's own forward and autograd. Walked block by block, loss, logits and every
gradient are the same.

The walk runs on a skeleton (no weights; buffers made by `build_skeleton`), to which each unit's
parameters are bound while it works, so a buffer that is wrong or a parameter read out of turn shows
up here."""

from __future__ import annotations

import pytest
import torch

from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.shrink import shrink
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.cutting.verify import certified, study
from tests.support.architectures import TABLE
from tests.support.control import assert_same, control, tiny_batch, tiny_config, tiny_model, walk
from tests.support.messages import refused


def check(
    model_type: str, dtype: torch.dtype, tolerance: float, settings: dict, *, train: bool = True
) -> CutModel:
    config = tiny_config(model_type, **settings)
    model = tiny_model(config, dtype)
    cut = certified(build_skeleton(config, dtype))
    params = {name: param.detach() for name, param in model.named_parameters()}
    batch = tiny_batch(config.get_text_config().vocab_size)
    model.train(train)
    cut.model.train(train)
    layers = [model.get_submodule(block.name) for block in cut.spec().blocks]
    assert_same(walk(cut, params, batch), control(model, batch, layers, seeded=train), tolerance)
    assert all(param.is_meta for param in cut.model.parameters()), "a parameter stayed behind"
    return cut


@pytest.mark.parametrize("model_type", TABLE)
def test_walk_is_the_model_in_float32(model_type: str) -> None:
    """Oracle: the model's own autograd, in training mode, with whatever dropout the architecture
    has."""
    check(model_type, torch.float32, 2e-6, TABLE[model_type])


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "mixtral", "opt", "qwen3"])
def test_walk_is_the_model_in_bfloat16(model_type: str) -> None:
    """Oracle: the model's own autograd in bfloat16; only a tied weight's two gradients are added in
    another order."""
    check(model_type, torch.bfloat16, 5e-3, TABLE[model_type], train=False)


@pytest.mark.parametrize("model_type", ["bart", "trocr"])
def test_own_loss_where_the_head_is_custom(model_type: str) -> None:
    """Oracle: the model's own autograd. These models' losses are not the shifted cross-entropy of a
    linear head."""
    assert check(model_type, torch.float32, 1e-5, {}).head.custom


def test_heads_are_described() -> None:
    """Oracle: the formulas of the models' papers and configurations (soft cap 30, logits × 0.0625,
    logits / 4)."""

    def head(model_type: str, **settings: object):
        return certified(build_skeleton(tiny_config(model_type, **settings))).head

    assert head("gemma2").soft_cap == 30.0
    assert head("cohere").scale == 0.0625
    assert head("granite", logits_scaling=4.0).scale == 0.25
    qwen = head("qwen2", tie_word_embeddings=True)
    assert (qwen.weight, qwen.tied, qwen.scale, qwen.soft_cap) == (
        "model.embed_tokens.weight",
        True,
        1.0,
        None,
    )
    assert head("phi").bias == "lm_head.bias"


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("hrm_text", {}, "looped"),
        ("gemma3n_text", {}, "parameters"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits"),
        ("opt", {"layerdrop": 0.1}, "layerdrop"),
        ("xlm", {}, "walked"),
        ("zaya", {}, "figures"),
        ("inkling2_text", {}, "figures"),
    ],
)
def test_what_is_no_sequence_of_layers_is_refused(
    model_type: str, settings: dict, reason: str
) -> None:
    """Oracle: the models' own code: looped, sharing keys and values, skipping layers, reading every
    router, ..."""
    with refused(ValueError, reason):
        certified(build_skeleton(tiny_config(model_type, **settings)))


def test_encoder_decoders_are_refused() -> None:
    """Oracle: `config.is_encoder_decoder`."""
    from transformers import BartConfig, BartForConditionalGeneration, T5Config

    with torch.device("meta"):
        model = BartForConditionalGeneration(shrink(BartConfig()))
    with refused(ValueError, "encoder–decoder"):
        certified(model)
    with refused(ValueError, "causal language model"):
        build_skeleton(T5Config())


def test_a_study_does_not_depend_on_the_mode_of_its_caller() -> None:
    """Closed form: a verdict is kept on the disk, so a model that was first cut where gradients are
    off must not be refused."""
    from transformers import LlamaForCausalLM

    config = tiny_config("llama")
    with torch.no_grad():
        verdict = study(LlamaForCausalLM, config)
    assert verdict == study(LlamaForCausalLM, config)
