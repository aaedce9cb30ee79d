"""Oracle: the products of the decoded weight and autograd through them, in float64, within the
bound on a product's rounding.

Not to the last bit of ``F.linear``: how a processor adds up a product depends on its shape (AMX,
MKL), and a chunk has another shape than the whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.weights import DenseWeight, EncodedWeight
from blockwalk.numerics.lazy_linear import _chunks, lazy_linear, lora_linear
from blockwalk.plan.placement import Codec
from blockwalk.plan.sizes import DECODE_BYTES
from tests.support.codecs import encode
from tests.support.messages import refused


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def encoded_weight(
    shape: tuple[int, int], codec: Codec, dtype: torch.dtype, seed: int = 0
) -> EncodedWeight:
    layout = Layout(shape, codec)
    buffer = encode(random(*shape, seed=seed), codec, torch.empty(layout.nbytes, dtype=torch.uint8))
    return EncodedWeight(buffer, layout, dtype)


def assert_product(
    got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """a [P, I] times b [I, O] within Higham's bound γ_I·|a|·|b| of float32 sums, and half a unit of
    the result's last place (*Accuracy and Stability of Numerical Algorithms*, 2002, section
    3.5)."""
    a = a.detach().double().reshape(-1, a.shape[-1])
    b = b.detach().double()
    exact = a @ b
    size = a.abs() @ b.abs()
    if bias is not None:
        exact = exact + bias.detach().double()
        size = size + bias.detach().double().abs()
    bound = (a.shape[1] + 1) * 2**-24 * size + torch.finfo(got.dtype).eps / 2 * exact.abs()
    assert ((got.detach().double().reshape(exact.shape) - exact).abs() <= 1.01 * bound).all()


CASES = [
    # x without its last dimension, [N, D], bias, transposed
    ((2, 9), (200, 96), True, False),
    ((2, 9), (200, 96), True, True),
    ((300,), (192, 320), False, False),
    ((300,), (192, 320), False, True),
    ((), (64, 70), True, False),
    ((1,), (256, 128), False, False),
    ((2, 1, 16), (70, 33), True, True),
    (
        (256,),
        (264, 553),
        False,
        False,
    ),  # eight features beyond whole chunks: alone they would take another kernel
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("leading", "shape", "has_bias", "transposed"), CASES)
@pytest.mark.parametrize("codec", [Codec.INT4, Codec.INT8, Codec.BF16])
def test_forward_and_gradients(
    codec: Codec,
    leading: tuple[int, ...],
    shape: tuple[int, int],
    has_bias: bool,
    transposed: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the product and its derivatives, over one chunk and over several."""
    weight = encoded_weight(shape, codec, dtype)
    w_OI = weight.rows(0, shape[0]).clone()
    w_OI = w_OI.t() if transposed else w_OI
    n_out, n_in = w_OI.shape
    x = random(*leading, n_in, seed=1, dtype=dtype).requires_grad_()
    bias = random(n_out, seed=2, dtype=dtype).requires_grad_() if has_bias else None
    grad_y = random(*leading, n_out, seed=3, dtype=dtype)
    for chunk_bytes in (DECODE_BYTES["cpu"], 64 * n_in * dtype.itemsize):
        monkeypatch.setitem(DECODE_BYTES, "cpu", chunk_bytes)
        y = lazy_linear(x, weight, bias, transposed=transposed)
        assert y.shape == (*leading, n_out)
        assert_product(y, x, w_OI.t(), bias)
        grad_x, *grad_bias = torch.autograd.grad(y, [x] if bias is None else [x, bias], grad_y)
        assert_product(grad_x, grad_y, w_OI)
        for got in grad_bias:
            assert torch.equal(got, grad_y.reshape(-1, n_out).sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_at_the_dimensions_of_a_model(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the product and its derivative, at dimensions where BLAS blocks its loops, cut as a
    large weight is cut."""
    weight = encoded_weight((1088, 896), Codec.INT4, dtype)
    w_ND = weight.rows(0, 1088).clone()
    x = random(256, 896, seed=1, dtype=dtype).requires_grad_()
    monkeypatch.setitem(DECODE_BYTES, "cpu", 1 << 19)
    y = lazy_linear(x, weight)
    grad_y = random(256, 1088, seed=2, dtype=dtype)
    assert_product(y, x, w_ND.t())
    assert_product(torch.autograd.grad(y, x, grad_y)[0], grad_y, w_ND)


def test_chunks_of_a_real_models_matrices_are_of_one_shape() -> None:
    """Oracle: division. Qwen2.5-0.5B's, 1.5B's and Llama-3-8B's feed-forward, forward and backward;
    a width without a divisor is cut nearly equally."""
    for inner, outer in ((896, 4864), (1536, 8960), (4096, 14336)):
        for n_in, n_out in ((inner, outer), (outer, inner)):
            chunks = _chunks(n_in, n_out, torch.empty(1, n_in, dtype=torch.bfloat16))
            widths = {stop - start for start, stop in chunks}
            assert len(widths) == 1, (n_in, n_out, chunks)
            assert 2 << 20 <= n_in * widths.pop() * 2 <= DECODE_BYTES["cpu"]
    chunks = _chunks(896, 7 * 11 * 13 * 64, torch.empty(1, 896, dtype=torch.bfloat16))
    widths = {stop - start for start, stop in chunks}
    assert max(widths) - min(widths) == 64


def test_scratch_may_be_overwritten_before_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: autograd. Two layers share one scratch; the gradient of a sum is an expanded
    tensor."""
    monkeypatch.setitem(DECODE_BYTES, "cpu", 1 << 14)
    first, second = (
        encoded_weight(shape, Codec.INT4, torch.float32, seed)
        for seed, shape in enumerate([(160, 96), (64, 160)])
    )
    dense = [weight.rows(0, weight.shape[0]).clone() for weight in (first, second)]
    x = random(5, 96, seed=3).requires_grad_()
    loss = lazy_linear(lazy_linear(x, first), second).sum()
    expected = F.linear(F.linear(x, dense[0]), dense[1]).sum()
    torch.testing.assert_close(*(torch.autograd.grad(each, x)[0] for each in (loss, expected)))


def test_nothing_is_saved_for_backward() -> None:
    """Oracle: autograd's own hooks on what it saves; the dense layer saves its weight."""
    weight = encoded_weight((96, 64), Codec.INT4, torch.float32)
    dense = DenseWeight(weight.rows(0, 96).clone())
    x = random(4, 64).requires_grad_()
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        F.linear(x, dense.tensor)
        assert len(saved) == 1
        lazy_linear(x, weight)
        lazy_linear(x, dense)
        assert len(saved) == 1


def test_no_gradient_is_computed_that_nobody_asks_for() -> None:
    """Oracle: autograd. A frozen input with a trained bias, as in bias-only fine-tuning."""
    weight = encoded_weight((96, 64), Codec.INT4, torch.float32)
    bias = random(96).requires_grad_()
    y = lazy_linear(random(4, 64), weight, bias)
    y.backward(torch.ones_like(y))
    assert torch.equal(bias.grad, torch.full((96,), 4.0))
    assert not lazy_linear(random(4, 64), weight).requires_grad


def test_what_does_not_fit_is_refused() -> None:
    """Oracle: the shapes and dtypes by hand."""
    weight = encoded_weight((96, 64), Codec.INT4, torch.bfloat16)
    with refused(AssertionError, "96"):
        lazy_linear(random(4, 96, dtype=torch.bfloat16), weight)
    with refused(AssertionError, "float32"):
        lazy_linear(random(4, 64), weight)
    with refused(AssertionError, "64"):
        lazy_linear(random(4, 64, dtype=torch.bfloat16), weight, random(64, dtype=torch.bfloat16))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: F.linear and autograd on the device, to rounding where its BLAS splits sums by
    shape."""
    layout = Layout((1088, 896), Codec.INT4)
    buffer = encode(
        random(1088, 896), Codec.INT4, torch.empty(layout.nbytes, dtype=torch.uint8)
    ).cuda()
    weight = EncodedWeight(buffer, layout, torch.float32)
    dense = weight.rows(0, 1088).clone()
    x = random(256, 896, seed=1).cuda().requires_grad_()
    for chunk_bytes in (DECODE_BYTES["cuda"], 1 << 20):
        monkeypatch.setitem(DECODE_BYTES, "cuda", chunk_bytes)
        y = lazy_linear(x, weight)
        expected = F.linear(x, dense)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
        grads = [torch.autograd.grad(each.sum(), x)[0] for each in (y, expected)]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_fused_adapter_is_peft_s_sum(dtype: torch.dtype, transposed: bool) -> None:
    """Oracle: W·x + b + s·B·A·x written with F.linear, and autograd; in bfloat16 within its
    rounding of the float32 result."""
    generator = torch.Generator().manual_seed(0)
    w_ND, a_RD, b_NR = (
        torch.randn(*s, generator=generator) * 0.2 for s in ((96, 64), (4, 64), (96, 4))
    )
    x, bias, grad = (torch.randn(*s, generator=generator) for s in ((2, 5, 64), (96,), (2, 5, 96)))
    exact = [t.to(dtype).double().requires_grad_() for t in (x, a_RD, b_NR)]
    w_used = w_ND.to(dtype).double()
    expected = F.linear(exact[0], w_used, bias.to(dtype).double()) + 0.5 * F.linear(
        F.linear(exact[0], exact[1]), exact[2]
    )
    expected_grads = torch.autograd.grad(expected, exact, grad.to(dtype).double())
    leaves = [t.to(dtype).requires_grad_() for t in (x, a_RD, b_NR)]
    weight = DenseWeight((w_ND.t().contiguous() if transposed else w_ND).to(dtype))
    y = lora_linear(
        leaves[0], weight, bias.to(dtype), leaves[1], leaves[2], 0.5, transposed=transposed
    )
    grads = torch.autograd.grad(y, leaves, grad.to(dtype))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for mine, theirs in zip((y, *grads), (expected, *expected_grads), strict=True):
        assert (mine.double() - theirs).norm() <= tolerance * theirs.norm()
