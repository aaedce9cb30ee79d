"""Oracle: the same walk with dense tensors bound. Lazily decoded weights give the same logits and
gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from blockwalk.cutting.anatomy import canonical_name
from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.peft_models import add_adapter, lora_config
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.cutting.small_instance import TOLERANCE, difference
from blockwalk.cutting.verify import certified
from blockwalk.numerics.codecs import layout as codecs_layout
from blockwalk.numerics.codecs.weights import DenseWeight, EncodedWeight
from blockwalk.numerics.lazy_parameter import LazyParameter
from blockwalk.plan.placement import Codec
from tests.support.architectures import TABLE
from tests.support.codecs import encode
from tests.support.control import tiny_batch, tiny_config, tiny_model


def step(cut: CutModel, values: dict, batch):
    """Loss (of the model's own head) and adapter gradients, block by block."""
    last = cut.epilogue_index
    units = cut.spec().units
    grads = {}
    for unit, spec in enumerate(units):
        cut.bind(unit, {p.name: values[p.name] for p in spec.params if unit in (0, last)})
    if cut.head.tied:
        cut.bind(last, {cut.head.weight: values[cut.head.weight]})
    prologue = cut.prologue(batch)
    saved = [prologue.hidden_BSD.detach()]
    for call in prologue.calls:
        cut.bind(call.unit, {p.name: values[p.name] for p in units[call.unit].params})
        with torch.no_grad():
            saved.append(cut.forward(call, saved[-1]))
        cut.unbind(call.unit)
    hidden = saved.pop().requires_grad_()
    loss = cut.own_loss(prologue, hidden, batch)
    loss.backward()
    for call in reversed(prologue.calls):
        grad = hidden.grad
        hidden = saved.pop().requires_grad_()
        leaves = cut.bind(call.unit, {p.name: values[p.name] for p in units[call.unit].params})
        cut.forward(call, hidden).backward(grad)
        cut.unbind(call.unit)
        grads |= {name: leaf.grad for name, leaf in leaves.items()}
    cut.unbind(0)
    cut.unbind(last)
    return loss.detach(), grads


def encoded(cut: CutModel, values: dict[str, torch.Tensor], codec: Codec | None):
    """(lazy, dense): providers for every 2-D quantizable weight, and the tensors that they decode
    to."""
    lazy = dict(values)
    dense = dict(values)
    for spec in cut.spec().params():
        if spec.quantizable and not spec.trainable and len(spec.shape) == 2:
            if codec is None:
                lazy[spec.name] = DenseWeight(values[spec.name])
            else:
                layout = codecs_layout.Layout(spec.shape, codec, "float32")
                buffer = encode(
                    values[spec.name], codec, torch.empty(layout.nbytes, dtype=torch.uint8)
                )
                lazy[spec.name] = EncodedWeight(buffer, layout, torch.float32)
                dense[spec.name] = lazy[spec.name].rows(0, spec.shape[0]).clone()
    return lazy, dense


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "falcon",
        "gemma3_text",
        "gpt2",
        "opt",
        "phi",
        "qwen2",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v3",
    ],
)
@pytest.mark.parametrize("codec", [None, Codec.INT4])
def test_lazy_weights_are_dense_ones(model_type: str, codec: Codec | None, monkeypatch) -> None:
    """Oracle: the walk with dense tensors (for int4 those that the codec decodes): loss and LoRA
    gradients."""
    config = tiny_config(model_type, **TABLE[model_type])
    plain = add_adapter(tiny_model(config), lora_config(2), seed=1)
    with torch.no_grad():
        for name, param in plain.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.2, generator=torch.Generator().manual_seed(3))
    values = {
        canonical_name(name, ("default",)): param.detach()
        for name, param in plain.named_parameters()
    }
    cut = certified(add_adapter(build_skeleton(config), lora_config(2)))
    cut.take_parameters()
    cut.model.eval()
    lazy, dense = encoded(cut, values, codec)
    assert any(not isinstance(value, torch.Tensor) for value in lazy.values())
    batch = tiny_batch(config.vocab_size)
    expected_loss, expected = step(cut, dense, batch)
    wholes = []
    decoded = LazyParameter.decoded
    monkeypatch.setattr(LazyParameter, "decoded", lambda self: wholes.append(self) or decoded(self))
    loss, grads = step(cut, lazy, batch)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert difference(grad, expected[name]) < TOLERANCE, name
    assert not wholes, [tuple(whole.shape) for whole in wholes]


def test_a_lazy_parameter_is_its_weight_under_any_operation() -> None:
    """Oracle: the dense tensor under the same torch function."""
    torch.manual_seed(0)
    dense_ND = torch.randn(6, 4)
    x_BD = torch.randn(3, 4)
    y_BN = torch.randn(3, 6)
    lazy = LazyParameter(DenseWeight(dense_ND), torch.device("cpu"))
    assert (lazy.shape, lazy.dtype, lazy.device, lazy.ndim, lazy.requires_grad) == (
        dense_ND.shape,
        torch.float32,
        torch.device("cpu"),
        2,
        False,
    )
    for operation in (
        lambda w: F.linear(x_BD, w),
        lambda w: F.linear(x_BD, w, torch.ones(6)),
        lambda w: x_BD @ w.T,
        lambda w: x_BD @ w.t(),
        lambda w: y_BN @ w,
        lambda w: torch.matmul(x_BD, w.transpose(0, 1)),
        lambda w: torch.addmm(torch.ones(4), y_BN, w),
        lambda w: F.embedding(torch.tensor([[0, 5], [2, 2]]), w),
        lambda w: F.linear(x_BD.double(), w.double()),
        lambda w: w @ x_BD.T,
        lambda w: w + 1,
        lambda w: torch.cat([w, w]),
        lambda w: w[2:4],
        lambda w: w.T.contiguous(),
        lambda w: F.linear(w, w),
        lambda w: torch.addmm(w, torch.eye(6), w),
    ):
        torch.testing.assert_close(operation(lazy), operation(dense_ND))
