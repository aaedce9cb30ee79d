"""Oracle: each model's own forward and autograd. Walked block by block, loss, logits and every gradient are the same.

The walk runs on a skeleton (no weights; buffers made by `build_skeleton`), to which each unit's parameters are bound while
it works, so a buffer that is wrong or a parameter read out of turn shows up here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F

from blockwalk.blocks import CutModel
from blockwalk.skeleton import build_skeleton, model_class, shrink

SEED = 11


TABLE: dict[str, dict] = {
    # Architecture → settings beside its defaults; dimensions come from `shrink`, which keeps a layer of every kind.
    "apertus": {},
    "bloom": {},
    "cohere": {},
    "cohere2": {},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v3": {},
    "exaone4": {},
    "falcon": {},
    "falcon_h1": {},
    "gemma": {},
    "gemma2": {"tie_word_embeddings": False},
    "gemma3_text": {},
    "gemma4_text": {},
    "glm4": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {},
    "gpt_neox": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "gpt_oss": {},
    "gptj": {"resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "granite": {"logits_scaling": 4.0, "attention_dropout": 0.2},
    "jamba": {},
    "lfm2": {},
    "llama": {"attention_dropout": 0.1},
    "llama4_text": {},
    "mamba": {},
    "mistral": {},
    "mixtral": {},
    "modernbert-decoder": {},
    "mpt": {},
    "nanochat": {},
    "olmo2": {},
    "olmoe": {},
    "openai-gpt": {},
    "opt": {"word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {"resid_pdrop": 0.1},
    "phi3": {},
    "phimoe": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {"use_parallel_residual": True},
    "starcoder2": {},
    "xglm": {},
    "xlstm": {},
}


def tiny_config(model_type: str, **settings: object):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return shrink(CONFIG_MAPPING[model_type](**settings))


def tiny_model(config, dtype: torch.dtype = torch.float32):
    """A real model with random weights large enough that caps, norms and routers do something."""
    torch.manual_seed(SEED)
    model = model_class(config)._from_config(copy.deepcopy(config), dtype=dtype)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape) * (0.7 / param.shape[-1] ** 0.5 if param.ndim > 1 else 0.1)
            param.copy_(noise if param.ndim > 1 else param + noise)
    return model


def tiny_batch(vocab_size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, vocab_size, (2, 9), generator=torch.Generator().manual_seed(SEED))
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def control(model, batch, layers, *, seeded: bool):
    """Loss, logits and gradients by the model's own forward and autograd; hooks seed each unit's dropout."""
    hooks = []
    if seeded:
        for unit, layer in enumerate(layers, 1):
            hooks.append(layer.register_forward_pre_hook(lambda *_, s=SEED + unit: torch.manual_seed(s) and None))
        last = SEED + len(layers) + 1
        hooks.append(layers[-1].register_forward_hook(lambda *_: torch.manual_seed(last) and None))
    torch.manual_seed(SEED)
    out = model(**batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    names, params = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    grads = torch.autograd.grad(out.loss, params, allow_unused=True)
    return out.loss.detach(), out.logits.detach(), {n: g for n, g in zip(names, grads, strict=True) if g is not None}


def head_loss(cut: CutModel, normed: torch.Tensor, values: Mapping[str, torch.Tensor], labels: torch.Tensor):
    """Logits and loss from what `HeadSpec` says of the head."""
    head = cut.head
    logits = F.linear(normed, values[head.weight], values[head.bias] if head.bias else None) * head.scale
    if head.soft_cap:
        logits = torch.tanh(logits / head.soft_cap) * head.soft_cap
    return logits, F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def walk(cut: CutModel, params: Mapping[str, torch.Tensor], batch):
    """Forward without a graph, then each block recomputed with one, the prologue's graph last; units hold their own only."""
    units = cut.spec().units
    grads: dict[str, torch.Tensor] = {}

    def bind(unit: int) -> dict[str, torch.Tensor]:
        return cut.bind(unit, {spec.name: params[spec.name] for spec in units[unit].params})

    def collect(leaves: Mapping[str, torch.Tensor]) -> None:
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                grads[name] = grads[name] + leaf.grad if name in grads else leaf.grad

    last = cut.epilogue_index
    first_leaves = bind(0)
    prologue = cut.prologue(batch, SEED)
    cut.unbind(0)
    saved = [prologue.hidden_BSD.detach()]
    with torch.no_grad():
        for call in prologue.calls:
            bind(call.unit)
            saved.append(cut.forward(call, saved[-1], SEED + call.unit))
            cut.unbind(call.unit)
    hidden = saved.pop().requires_grad_()
    leaves = bind(last)
    if cut.head.tied:
        leaves |= cut.bind(last, {cut.head.weight: params[cut.head.weight]})
    if cut.head.custom:
        logits = cut.logits(prologue, hidden.detach(), batch, SEED + last)
        loss = cut.own_loss(prologue, hidden, batch, SEED + last)
    else:
        normed = cut.head_input(prologue, hidden, batch, SEED + last)
        logits, loss = head_loss(cut, normed, params | leaves, batch["labels"])
    loss.backward()
    cut.unbind(last)
    collect(leaves)
    for call in reversed(prologue.calls):
        grad, hidden = hidden.grad, saved.pop().requires_grad_()
        leaves = bind(call.unit)
        cut.forward(call, hidden, SEED + call.unit).backward(grad)
        cut.unbind(call.unit)
        collect(leaves)
    prologue.backward(hidden.grad)
    collect(first_leaves)
    return loss.detach(), logits.detach(), grads


def assert_same(walked, controlled, tolerance: float) -> None:
    loss, logits, grads = walked
    own_loss, own_logits, own_grads = controlled
    torch.testing.assert_close(loss, own_loss, rtol=tolerance, atol=0)
    torch.testing.assert_close(logits, own_logits, rtol=tolerance, atol=tolerance * float(own_logits.abs().max()))
    assert grads.keys() == own_grads.keys()
    largest = max(float(grad.float().norm()) for grad in own_grads.values())
    for name, own in own_grads.items():
        bound = tolerance * max(float(own.float().norm()), 1e-3 * largest)
        assert float((grads[name].float() - own.float()).norm()) <= bound, name


def check(model_type: str, dtype: torch.dtype, tolerance: float, settings: dict, *, train: bool = True) -> CutModel:
    config = tiny_config(model_type, **settings)
    model = tiny_model(config, dtype)
    cut = CutModel(build_skeleton(config, dtype).model)
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
    """Oracle: the model's own autograd, in training mode, with whatever dropout the architecture has."""
    check(model_type, torch.float32, 2e-6, TABLE[model_type])


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "mixtral", "opt", "qwen3"])
def test_walk_is_the_model_in_bfloat16(model_type: str) -> None:
    """Oracle: the model's own autograd in bfloat16; only a tied weight's two gradients are added in another order."""
    check(model_type, torch.bfloat16, 5e-3, TABLE[model_type], train=False)


@pytest.mark.parametrize("model_type", ["bart", "trocr", "xlnet"])
def test_own_loss_where_the_head_is_custom(model_type: str) -> None:
    """Oracle: the model's own autograd. These models' losses are not the shifted cross-entropy of a linear head."""
    assert check(model_type, torch.float32, 1e-5, {}).head.custom


def test_heads_are_described() -> None:
    """Oracle: the formulas of the models' papers and configurations (soft cap 30, logits × 0.0625, logits / 4)."""

    def head(model_type: str, **settings: object):
        return CutModel(build_skeleton(tiny_config(model_type, **settings)).model).head

    assert head("gemma2").soft_cap == 30.0
    assert head("cohere").scale == 0.0625
    assert head("granite", logits_scaling=4.0).scale == 0.25
    qwen = head("qwen2", tie_word_embeddings=True)
    assert (qwen.weight, qwen.tied, qwen.scale, qwen.soft_cap) == ("model.embed_tokens.weight", True, 1.0, None)
    assert head("phi").bias == "lm_head.bias"


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("hrm_text", {}, "looped"),
        ("gemma3n_text", {}, "hands state to other layers"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits"),
        ("opt", {"layerdrop": 0.1}, "layerdrop"),
        ("xlm", {}, "cannot be walked"),
        ("inkling2_text", {}, "cannot be walked"),
    ],
)
def test_what_is_no_sequence_of_layers_is_refused(model_type: str, settings: dict, reason: str) -> None:
    """Oracle: the models' own code: looped, sharing keys and values, skipping layers, reading every router, ..."""
    with pytest.raises(ValueError, match=reason):
        CutModel(build_skeleton(tiny_config(model_type, **settings)).model)


def test_encoder_decoders_are_refused() -> None:
    """Oracle: `config.is_encoder_decoder`."""
    from transformers import BartConfig, BartForConditionalGeneration, T5Config

    with torch.device("meta"):
        model = BartForConditionalGeneration(shrink(BartConfig()))
    with pytest.raises(ValueError, match="encoder–decoder"):
        CutModel(model)
    with pytest.raises(ValueError, match="no causal language model"):
        build_skeleton(T5Config())
