"""Oracle: the forward and autograd of the model that was handed over, as its owner changed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from blockwalk import Walker, method
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.owners_changes import embedding_class, loss_function

EXACT = {"compute_dtype": "float32", "optimizer.max_grad_norm": 0.0}


def _plan(name: str) -> Any:
    return method(name, **EXACT, **({"frozen": "disk × raw"} if name == "mebp" else {}))


def _hook(model: Any) -> None:
    # not linear: its gradient reads the output, which a recomputation may leave out elsewhere
    model.model.layers[1].mlp.register_forward_hook(lambda _m, _i, out: torch.tanh(4 * out))


def _patch_by_closure(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    original = mlp.forward
    mlp.forward = lambda x: original(x) * 3


def _before_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _m, args: (args[0] * 2, *args[1:]))


def _after_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _m, _i, out: out * 2)


class _Steering:
    def __init__(self, model: Any) -> None:
        self.source = model.model.layers[0].mlp.up_proj

    def add(self, _module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return out + 1e3 * self.source(inputs[0])[..., :32]


def _another_module(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.register_forward_hook(_Steering(model).add)


def _first_position(model: Any) -> None:
    def steer(_module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out[:, :1] + 1, out[:, 1:]], 1)

    model.model.layers[1].self_attn.o_proj.register_forward_hook(steer)


def _activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()


def _scale(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 3.0


def _eps(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon *= 1e6


def _head_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda _m, _i, out: out / 3)


def _patched_model(model: Any) -> None:
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss * 2
        return output

    model.forward = forward


class _Halved(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


def _head_class(model: Any) -> None:
    head = _Halved(32, 101, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head


CHANGES: dict[str, Callable[[Any], None]] = {
    function.__name__.strip("_"): function
    for function in (
        _hook, _patch_by_closure, _before_layers, _after_layers, _another_module, _first_position,
        _activation, _scale, _eps, embedding_class,
        loss_function, _head_hook, _patched_model, _head_class,
    )
}  # fmt: skip


def _model(change: Callable[[Any], None]) -> Any:
    model: Any = tiny_model("llama")
    model.requires_grad_(False)
    for name in ("embed_tokens", "layers.0", "layers.1.mlp.down_proj"):
        model.model.get_submodule(name).requires_grad_(True)
    change(model)
    return model


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_model_has_its_own_loss_and_gradients(change: Callable[[Any], None]) -> None:
    batch = random_batch(batch=2)
    model = _model(change)
    loss = model(**batch).loss
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    plain = tiny_model("llama")(**batch).loss
    assert abs(loss - plain) > 1e-5, "the change is none"
    for name in ("plain", "mebp"):
        with Walker(_model(change), _plan(name)) as walker:
            assert walker.evaluate(batch).loss == pytest.approx(loss.item(), abs=2e-6)
            gradients = walker.gradients(batch)
        assert gradients.keys() == expected.keys()
        for parameter, gradient in gradients.items():
            distance = (gradient - expected[parameter]).norm() / expected[parameter].norm()
            assert distance < 2e-5, (name, parameter)


def test_the_model_that_was_handed_over_stays_as_it_was() -> None:
    model = _model(_patch_by_closure)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hooks = len(model.model.layers[1].mlp._forward_hooks)
    with Walker(model, _plan("mebp")) as walker:
        walker.step(random_batch())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert len(model.model.layers[1].mlp._forward_hooks) == hooks


def _row_hook(gradient: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(gradient)
    mask[90:] = 1
    return gradient * mask


def _in_place(gradient: torch.Tensor) -> None:
    gradient[:90] = 0


@pytest.mark.parametrize("hook", [_row_hook, _in_place, lambda g: g.clamp(-1e-3, 1e-3)])
@pytest.mark.parametrize(("name", "clip"), [("plain", 0.0), ("plain", 1e-3), ("mebp", 0.0)])
def test_a_hook_of_a_gradient_is_followed(hook: Any, name: str, clip: float) -> None:
    def made() -> Any:
        model: Any = tiny_model("llama", tied=True).requires_grad_(False)
        model.model.embed_tokens.weight.requires_grad_(True).register_hook(hook)
        return model

    batch = random_batch()
    batch["input_ids"][:, 5] = 95
    model = made()
    weight = model.model.embed_tokens.weight
    before = weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    model(**batch).loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_([weight], clip)
    optimizer.step()
    moved = weight.detach() - before
    # plain SGD: the update is the gradient itself
    settings = {"optimizer.learning_rate": 0.5, "optimizer.name": "sgd"}
    settings |= {"optimizer.weight_decay": 0.0, "optimizer.max_grad_norm": clip}
    plan = method(
        name,
        compute_dtype="float32",
        **settings,
        **({"frozen": "disk × raw"} if name == "mebp" else {}),
    )
    with Walker(made(), plan) as walker:
        walker.step(batch)
        after = walker.state_dict()["model.embed_tokens.weight"]
    assert torch.equal((after - before).abs().amax(1) > 0, moved.abs().amax(1) > 0)
    torch.testing.assert_close(after - before, moved, atol=1e-7, rtol=1e-3)


def test_a_hook_that_a_plan_cannot_follow_is_named() -> None:
    def made(hook: str) -> Any:
        model: Any = tiny_model("llama")
        getattr(model.model.norm.weight, hook)(lambda value: None)
        return model

    with refused(ValueError, "model.norm.weight register_hook mezo plain"):
        Walker(made("register_hook"), method("mezo"))
    with refused(ValueError, "model.norm.weight register_post_accumulate_grad_hook register_hook"):
        Walker(made("register_post_accumulate_grad_hook"), _plan("plain"))
