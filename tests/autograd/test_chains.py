"""Oracle: transformers' own norms and feed-forward layers in float64, differentiated by torch.

Modules: numerics/chains.py, cutting/fused_chains.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from blockwalk.cutting import cut_model
from blockwalk.cutting.fused_chains import fuse_chains, unfuse_chains
from blockwalk.numerics import chains
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.program.program import Shape
from blockwalk.walk.unit_costs import UnitCosts

pytestmark = pytest.mark.skipif(not chains.is_there(), reason="there is no C compiler here")
ROUNDED = 6e-3
"""The relative distance of numbers that are rounded to bfloat16 twice (2e-3 each), with room."""
NORM, NORM_BACKWARD = "blockwalk::rms_norm", "blockwalk::rms_norm_backward"
GATE, GATE_BACKWARD = "blockwalk::gated", "blockwalk::gated_backward"
NORMS = (chains.rms_norm, chains.rms_norm_less_one)
GATES = (chains.swiglu, chains.geglu)


def config(**settings: Any) -> LlamaConfig:
    return LlamaConfig(hidden_size=40, intermediate_size=72, num_attention_heads=4, **settings)


def norm(module: Any = None) -> nn.Module:
    module = module or LlamaRMSNorm(40, eps=1e-5)
    nn.init.normal_(module.weight)
    return module  # type: ignore[no-any-return]


def gemma() -> nn.Module:
    return Gemma2MLP(Gemma2Config(hidden_size=40, intermediate_size=72))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "norm": norm,
    "norm of 1 + weight": lambda: norm(Gemma2RMSNorm(40)),
    "feed-forward": lambda: LlamaMLP(config()),
    "feed-forward with biases": lambda: LlamaMLP(config(mlp_bias=True)),
    "feed-forward with gelu": gemma,
}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def ran(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[list[Tensor], set[str]]:
    """The answer and the gradients of input and parameters, and what torch dispatched."""
    leaf = x.clone().requires_grad_()
    with torch.profiler.profile() as profiled:
        answer = module(leaf)
        grads = torch.autograd.grad(answer, [leaf, *module.parameters()], grad)
    names = {event.name for event in profiled.events() if event.name.startswith("blockwalk")}
    return [answer.detach(), *grads], names


@pytest.mark.parametrize("shape", [(1, 40), (2, 7, 40), (700, 40)])
@pytest.mark.parametrize("name", MODULES)
def test_answers_and_gradients(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(len(shape))
    module = MODULES[name]().to(torch.bfloat16)
    exact = copy.deepcopy(module).double()
    fuse_chains(module)
    x = 3 * drawn(*shape)
    grad = drawn(*shape)
    found, names = ran(module, x, grad)
    wanted, _ = ran(exact, x.double(), grad.double())
    assert names == ({NORM, NORM_BACKWARD} if "norm" in name else {GATE, GATE_BACKWARD})
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        # the parts of a feed-forward layer round their products too
        assert (one.double() - other).norm() <= 2 * ROUNDED * other.norm()


@pytest.mark.parametrize("rows", [1, 3])
def test_rotary_positions(rows: int) -> None:
    """The attention of a model, whose positions are one row's or each row's own."""
    torch.manual_seed(rows)
    settings = config(num_key_value_heads=2)
    settings._attn_implementation = "sdpa"
    module = LlamaAttention(settings, 0).to(torch.bfloat16)
    exact = copy.deepcopy(module).double()
    fuse_chains(module)
    x, grad = drawn(3, 70, 40), drawn(3, 70, 40)
    cosine, sine = drawn(rows, 70, 10), drawn(rows, 70, 10)
    found, names = ran(alone_of(module, cosine, sine), x, grad)
    wanted, _ = ran(alone_of(exact, cosine.double(), sine.double()), x.double(), grad.double())
    assert names == {"blockwalk::rotary"}
    for one, other in zip(found, wanted, strict=True):
        # products and attention round too
        assert (one.double() - other).norm() <= 4 * ROUNDED * other.norm()


def alone_of(attention: nn.Module, cosine: Tensor, sine: Tensor) -> nn.Module:
    """Attention as a function of its hidden state."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            answer: Tensor = self.attention(x, (cosine, sine), None, is_causal=True)[0]
            return answer

    return Alone()


def test_rotary_gradients_are_the_transpose() -> None:
    """Oracle: the definition in float64, element by element."""
    torch.manual_seed(0)
    x = drawn(2, 3, 5, 8).requires_grad_()
    cosine, sine = drawn(2, 5, 8), drawn(2, 5, 8)
    grad = drawn(2, 3, 5, 8)
    out = chains.rotary(x, cosine, sine)
    out.backward(grad)
    leaf = x.detach().double().requires_grad_()
    turned = torch.cat((-leaf[..., 4:], leaf[..., :4]), -1)
    exact = leaf * cosine[:, None].double() + turned * sine[:, None].double()
    exact.backward(grad.double())
    for one, other in ((out, exact), (x.grad, leaf.grad)):
        assert one is not None
        assert other is not None
        assert (one.double() - other).norm() <= ROUNDED * other.norm()


def test_extreme_numbers() -> None:
    """Oracle: the definitions in float64, differentiated by torch; what is not a number stays so,
    in its row alone."""
    numbers = torch.tensor([[-1e4, -90.0, -20.0, -0.0, 1e-30, 20.0, 90.0, 1e30]])
    for chain, activation in (
        (chains.swiglu, F.silu),
        (chains.geglu, partial(F.gelu, approximate="tanh")),
    ):
        gate = numbers.to(torch.bfloat16).requires_grad_()
        chain(gate, torch.ones_like(gate)).sum().backward()
        exact = gate.detach().double().requires_grad_()
        activation(exact).sum().backward()
        answers = (chain(gate, torch.ones_like(gate)), activation(exact))
        for one, other in (answers, (gate.grad, exact.grad)):
            assert one is not None
            assert other is not None
            assert torch.allclose(one.double(), other, rtol=2**-7, atol=1e-30)
    assert chains.geglu(torch.full_like(gate, float("nan")), gate).isnan().all()
    rows = drawn(3, 40)
    rows[1, 7] = float("nan")
    normed = chains.rms_norm(rows, drawn(40), 1e-6)
    assert normed.isnan().all(-1).tolist() == [False, True, False]
    assert not normed[[0, 2]].isnan().any()


def test_bits_depend_on_neither_threads_nor_neighbours() -> None:
    """Oracle: the same rows alone, by one thread."""
    x, other, weight_D = drawn(900, 72), drawn(900, 72), drawn(72)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = [chain(x, weight_D, 1e-5) for chain in NORMS] + [chain(x, other) for chain in GATES]
        torch.set_num_threads(1)
        rows = slice(333, 341)
        alone = [chain(x[rows], weight_D, 1e-5) for chain in NORMS]
        alone += [chain(x[rows], other[rows]) for chain in GATES]
    finally:
        torch.set_num_threads(threads)
    for one, part in zip(whole, alone, strict=True):
        assert torch.equal(one[rows], part)


class TwoMore(Gemma2RMSNorm):
    """A norm that no model has: its weight is kept less two."""

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self._norm(x.float()) * (2.0 + self.weight.float())
        return answer.to(x.dtype)


@pytest.mark.parametrize(
    "module",
    [
        norm(TwoMore(40)),
        nn.LayerNorm(40, bias=False),
        LlamaMLP(config(hidden_act="gelu")),
        LlamaMLP(config(hidden_act="quick_gelu")),
        norm().double(),
    ],
    ids=["2 + weight", "with a mean", "gelu without tanh", "quick gelu", "other numbers"],
)
def test_what_is_no_such_chain_keeps_its_code(module: nn.Module) -> None:
    """Oracle: the module's own bits."""
    if next(module.parameters()).dtype != torch.float64:
        module.to(torch.bfloat16)
    own = copy.deepcopy(module)
    fuse_chains(module)
    x = torch.randn(9, 40, dtype=next(module.parameters()).dtype)
    assert torch.equal(module(x), own(x))


def test_fused_modules_have_their_code_back() -> None:
    """Oracle: the class's own bits."""
    module = norm().to(torch.bfloat16)
    own = copy.deepcopy(module)
    fuse_chains(module)
    assert "forward" in module.__dict__
    unfuse_chains(module)
    assert "forward" not in module.__dict__
    x = drawn(9, 40)
    assert torch.equal(module(x), own(x))


def test_forecasts_for_an_accelerator_have_the_models_own_chains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Oracle: the costs of a model that nothing is fused in. A processor's are others: its graphs
    keep fewer tensors."""
    plan = method("mebp", frozen="disk × raw", recompute="none")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    found = {}
    for fused in (True, False):
        monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / str(fused)))
        if not fused:
            monkeypatch.setattr(cut_model, "fuse_chains", lambda _model: None)
        for device in ("cpu", "cuda"):
            of_model = LlamaConfig(num_hidden_layers=2, vocab_size=64, dtype="bfloat16", **sizes)
            costs = UnitCosts(of_model, lora=LoraSettings(rank=4), device=device)
            found[device, fused] = costs(plan, Shape(2, 32))
    assert found["cuda", True] == found["cuda", False]
    assert found["cpu", True] != found["cpu", False]
