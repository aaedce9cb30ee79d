"""Oracle: the changes that each test makes to a model in memory: with our copy made to lose one, a
run must not begin; and the object's state, read before and after."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from blockwalk import Walker, method
from blockwalk.cutting import bound_units, verify
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.engine import model_weights
from tests.models import tiny_model
from tests.support.messages import refused
from tests.support.owners_changes import (
    disable_adapter,
    embedding_class,
    freeze_factors,
    loss_function,
    scale_adapter,
)

EXACT = {"compute_dtype": "float32", "optimizer.max_grad_norm": 0.0}
COPIED = method("mebp", frozen="disk × raw", **EXACT)
RESIDENT = method("plain", **EXACT)


def _plain(change: Callable[[Any], Any]) -> Any:
    model: Any = tiny_model("llama")
    model.requires_grad_(False)
    for name in ("model.layers.0", "model.layers.1.mlp.down_proj", "model.embed_tokens"):
        model.get_submodule(name).requires_grad_(True)
    change(model)
    return model


def _adapted(change: Callable[[Any], Any]) -> Any:
    torch.manual_seed(3)
    targets = ["q_proj", "down_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=4, init_lora_weights=False)
    model = get_peft_model(tiny_model("llama"), config)
    change(model)
    return model


def _activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def _eps(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon *= 10


def _scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 3.0


def _patched(model: Any) -> None:
    original = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: original(x) * 3


def _weight_hook(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.register_forward_pre_hook(
        lambda _module, args: (F.layer_norm(args[0], (32,)),)
    )


def _training_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(
        lambda module, _args, out: out * 2 if module.training else out
    )


def _gradient_hook(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient * 0.5)


def _tied_gradient_hook(model: Any) -> None:
    model.model.embed_tokens.weight.register_hook(lambda gradient: gradient.clamp(min=0))


def _head_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda _module, _args, out: out / 3)


def _merged(model: Any) -> None:
    model.merge_adapter()


def _made_anew(model: Any, dtype: torch.dtype) -> Any:
    """A model of the configuration, in the place of a copy of the object."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    anew: Any = build_skeleton(base.config, dtype)
    if base is model:
        for name, param in anew.named_parameters():
            param.requires_grad_(model.get_parameter(name).requires_grad)
        return anew
    adapted = get_peft_model(anew, model.peft_config["default"])
    for name, _ in list(adapted.named_parameters()):
        if "lora_" in name:
            owner, _, leaf = name.rpartition(".")
            value = model.get_parameter(name).detach().clone()
            adapted.get_submodule(owner)._parameters[leaf] = nn.Parameter(value)
    return adapted


LOST = {
    "copy": (model_weights, "without_weights", _made_anew),
    "head": (verify, "of_live_model", lambda _model, _base, anatomy: anatomy),
    "gradients": (bound_units, "gradient_hooks", lambda _parameters: {}),
}
"""What of our following is lost: the module, the name in it, and what takes its place."""
KINDS: dict[str, tuple[Callable[[Callable[[Any], Any]], Any], Callable[[Any], Any], str, str]] = {
    "activation": (_plain, _activation, "copy", "model.layers.1 output"),
    "eps by 10": (_plain, _eps, "copy", "model.layers.1 output"),
    "embedding class": (_plain, embedding_class, "copy", "model.embed_tokens output"),
    "scaling": (_plain, _scaling, "copy", "model.layers.1 output"),
    "patched forward": (_plain, _patched, "copy", "model.layers.1 output"),
    "hook on a weight's input": (_plain, _weight_hook, "copy", "model.layers.1 output"),
    "hook in training": (_plain, _training_hook, "copy", "model.layers.1 output training"),
    "hook on a gradient": (
        _plain,
        _gradient_hook,
        "gradients",
        "gradient model.layers.0.mlp.up_proj.weight",
    ),
    "hook on the head": (_plain, _head_hook, "head", "lm_head loss"),
    "loss_function": (_plain, loss_function, "head", "lm_head loss"),
    "merged": (_adapted, _merged, "copy", "model.layers.0 output"),
    "scaled": (_adapted, scale_adapter, "copy", "model.layers.0 output"),
    "disabled": (_adapted, disable_adapter, "copy", "lora_A.weight trained"),
    "frozen": (_adapted, freeze_factors, "copy", "lora_A.weight trained"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_that_the_walk_loses_is_refused_by_its_module(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, change, lost, facts = KINDS[kind]
    monkeypatch.setattr(model_weights, "refuse_adapter_state", lambda _model: None)
    monkeypatch.setattr(*LOST[lost])
    model = make(change)
    with refused(ValueError, f"{facts} compare" if "trained" not in facts else facts):
        Walker(model, COPIED).close()
    unchanged = make(lambda _model: None)
    Walker(unchanged, COPIED).close()


@pytest.mark.parametrize("plan", [RESIDENT, COPIED], ids=["resident", "copied"])
@pytest.mark.parametrize("change", [_gradient_hook, _tied_gradient_hook, _training_hook, _patched])
def test_what_is_followed_is_not_refused(plan: Any, change: Callable[[Any], Any]) -> None:
    model: Any = tiny_model("llama", tied=True)
    change(model)
    Walker(model, plan).close()


@pytest.mark.parametrize("lora", [True, {"num_virtual_tokens": 2}], ids=["lora", "prefix"])
@pytest.mark.parametrize("plan", [RESIDENT, COPIED], ids=["resident", "copied"])
def test_adapters_that_the_walk_adds_are_no_difference(plan: Any, lora: Any) -> None:
    model: Any = tiny_model("llama")
    _activation(model)
    Walker(model, plan, lora=lora).close()


def test_a_loss_that_is_not_finite_is_no_difference() -> None:
    model: Any = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    Walker(model, RESIDENT).close()


OBJECT: Any = None


def _by_a_global(model: Any) -> None:
    global OBJECT
    OBJECT = model

    def forward(x: torch.Tensor) -> torch.Tensor:
        mlp = OBJECT.model.layers[0].mlp
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

    model.model.layers[0].mlp.forward = forward


def _head_attribute(model: Any) -> None:
    model.logit_scale = 1.0


@pytest.mark.parametrize(
    ("kind", "change", "facts"),
    [
        ("llama", _by_a_global, "gradient model.layers.0 compare"),
        ("cohere", _head_attribute, "lm_head loss compare"),
    ],
)
def test_what_following_cannot_see_is_refused(
    kind: str, change: Callable[[Any], Any], facts: str
) -> None:
    model: Any = _cohere() if kind == "cohere" else tiny_model(kind)
    change(model)
    with refused(ValueError, facts):
        Walker(model, COPIED).close()
    never = method("mebp", frozen="disk × raw", compare="never", **EXACT)
    Walker(model, never).close()


class _Counting:
    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[int] = []

    def __call__(self, _module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(out.shape[1])
        torch.rand(1)
        numpy.random.rand()
        random.random()
        return out


def _numbers() -> tuple[Any, ...]:
    state = numpy.random.get_state(legacy=False)
    return (torch.get_rng_state().tolist(), str(state), random.getstate())


def test_the_object_and_the_generators_are_as_they_were() -> None:
    model: Any = tiny_model("gpt2")  # with dropout
    hook = _Counting()
    model.transformer.h[0].mlp.register_forward_hook(hook)
    model.register_buffer("running", torch.zeros(1))

    def runs(module: Any, _args: Any) -> None:
        module.running += 1
        module.last = "call"

    model.register_forward_pre_hook(runs)
    model.eval()
    before = _numbers()
    names = set(vars(model))
    params = dict(model.named_parameters())
    Walker(model, COPIED).close()
    assert _numbers() == before
    assert (hook.calls, hook.seen, float(model.running)) == (0, [], 0.0)
    assert not any(module.training for module in model.modules())
    assert set(vars(model)) == names
    assert all(model.get_parameter(name) is param for name, param in params.items())
    assert all(param.grad is None for param in params.values())


def test_a_hook_that_raises_ends_the_run_by_its_name() -> None:
    def on_long_rows(_module: Any, args: Any) -> None:
        assert args[0].shape[1] > 8, "rows of eight tokens"

    model: Any = tiny_model("llama")
    model.model.layers[1].register_forward_pre_hook(on_long_rows)
    with refused(ValueError, "on_long_rows model.layers.1 AssertionError compare"):
        Walker(model, COPIED).close()


def _cohere() -> Any:
    return tiny_model(
        "cohere",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )


@pytest.mark.parametrize("training", [True, False], ids=["zeroth order", "evaluation"])
def test_a_walk_without_gradients_compares_losses(training: bool) -> None:
    model = _cohere()
    _head_attribute(model)
    plan = method("mezo", compute_dtype="float32") if training else COPIED
    with refused(ValueError, "lm_head loss compare"):
        Walker(model, plan, training=training).close()
