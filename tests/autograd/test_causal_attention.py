"""The C kernel of causal attention beside a softmax in float64, differentiated by torch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from blockwalk.numerics import causal_attention, native
from blockwalk.numerics.documents import ByDocument
from blockwalk.numerics.row_tiles import narrow_products

pytestmark = pytest.mark.skipif(
    native.load("attention") is None, reason="there is no C compiler here"
)
ROUNDED = 6e-3
"""The relative distance of numbers that are rounded to bfloat16 once (2e-3), with room: backward
reads the rounded answer."""

CASES = {
    "one tile": (2, 2, 2, 48, 64, None),
    "a length and a width that fill no tile": (2, 4, 2, 70, 40, None),
    "several tiles, and pieces of them": (1, 6, 2, 700, 64, None),
    "wide heads": (1, 2, 1, 130, 256, None),
    "documents, some of one token": (1, 3, 1, 300, 64, [0, 1, 18, 19, 83, 299, 300]),
}


def drawn(batch: int, heads: int, groups: int, tokens: int, width: int) -> list[Tensor]:
    """Queries, keys and values, and a gradient of the answer, in the order that models have."""
    torch.manual_seed(tokens)
    tensors = [
        torch.randn(batch, tokens, count, width).to(torch.bfloat16).transpose(1, 2)
        for count in (heads, groups, groups, heads)
    ]
    return [tensor.requires_grad_() for tensor in tensors[:3]] + tensors[3:]


def spans_of(batch: int, tokens: int, borders: list[int] | None) -> list[tuple[int, int, int]]:
    if borders is None:
        return [(row, 0, tokens) for row in range(batch)]
    return [(0, begin, end) for begin, end in pairwise(borders)]


def in_float64(
    tensors: list[Tensor], spans: list[tuple[int, int, int]], scale: float
) -> list[Tensor]:
    """The answer, and gradients of queries, keys and values."""
    query, key, value, grad = (t.detach().double().clone() for t in tensors)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    of_group = query.shape[1] // key.shape[1]
    answer = torch.zeros_like(query)
    for row, begin, end in spans:
        q, k, v = (t[row, :, begin:end] for t in leaves)
        k, v = (t.repeat_interleave(of_group, 0) for t in (k, v))
        scores = scale * q @ k.transpose(-1, -2)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        answer[row, :, begin:end] = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    answer.backward(grad)
    return [answer.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_near(ours: Tensor, exact: Tensor) -> None:
    assert ours.dtype == torch.bfloat16
    assert (ours.double() - exact).norm() <= ROUNDED * exact.norm()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_answer_and_gradients(name: str, scale: float | None) -> None:
    batch, heads, groups, tokens, width, borders = CASES[name]
    tensors = drawn(batch, heads, groups, tokens, width)
    spans = spans_of(batch, tokens, borders)
    query, key, value, grad = tensors
    assert causal_attention.fits(query, key, value)
    out = causal_attention.attention(query, key, value, spans, scale)
    out.backward(grad)
    exact = in_float64(tensors, spans, width**-0.5 if scale is None else scale)
    for ours, theirs in zip((out, query.grad, key.grad, value.grad), exact, strict=True):
        assert ours is not None
        assert_near(ours, theirs)


def test_bits_depend_on_neither_threads_nor_neighbours() -> None:
    """Oracle: the same document alone, by one thread."""
    query, key, value, grad = drawn(1, 3, 3, 500, 64)
    borders = [(0, 0, 200), (0, 200, 210), (0, 210, 500)]
    out = causal_attention.attention(query, key, value, borders)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for _, begin, end in borders:
            alone = [t[:, :, begin:end].detach().requires_grad_() for t in (query, key, value)]
            out_alone = causal_attention.attention(*alone, [(0, 0, end - begin)])
            grads_alone = torch.autograd.grad(out_alone, alone, grad[:, :, begin:end])
            for whole, part in zip((out, *grads), (out_alone, *grads_alone), strict=True):
                assert torch.equal(whole[:, :, begin:end], part)
    finally:
        torch.set_num_threads(threads)


def test_nothing_of_later_tokens_reaches_earlier_ones() -> None:
    """Oracle: the answer where later tokens are others."""
    query, key, value, _ = (t.detach() for t in drawn(1, 2, 2, 200, 64))
    out = causal_attention.attention(query, key, value, [(0, 0, 200)])
    for tensor in (query, key, value):
        tensor[:, :, 100:] = 1e30
    other = causal_attention.attention(query, key, value, [(0, 0, 200)])
    assert torch.equal(out[:, :, :100], other[:, :, :100])


def test_what_is_not_a_number_is_seen() -> None:
    """Oracle: the definition: a query's NaN makes its own answer NaN, a key's those after it."""
    query, key, value, _ = (t.detach() for t in drawn(1, 1, 1, 100, 64))
    query[0, 0, 7] = float("nan")
    key[0, 0, 50] = float("nan")
    out = causal_attention.attention(query, key, value, [(0, 0, 100)])
    lost = out[0, 0].isnan().any(-1).nonzero().view(-1).tolist()
    assert lost == [7, *range(50, 100)]


def test_models_attention_is_the_kernels() -> None:
    """Oracle: torch's dispatcher, which names what ran; float64 for the numbers."""
    tensors = drawn(1, 2, 2, 96, 64)
    query, key, value, _ = tensors
    spans = [(0, 0, 60), (0, 60, 96)]
    place = torch.arange(96)
    document = (place >= 60).long()
    mask = (place[:, None] >= place) & (document[:, None] == document)
    with (
        torch.profiler.profile() as profiled,
        narrow_products(query),
        ByDocument([(0, 60), (60, 96)], torch.bfloat16),
    ):
        causal = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        packed = F.scaled_dot_product_attention(query, key, value, mask[None, None])
    names = [event.name for event in profiled.events()]
    assert names.count("blockwalk::causal_attention") == 2
    assert_near(causal.detach(), in_float64(tensors, [(0, 0, 96)], 64**-0.5)[0])
    assert_near(packed.detach(), in_float64(tensors, spans, 64**-0.5)[0])


def test_other_attention_is_left_to_torch() -> None:
    """Oracle: the cases that the kernel does not compute, by their definition."""
    query, key, value, _ = drawn(1, 2, 2, 32, 64)
    assert not causal_attention.fits(query.float(), key.float(), value.float())
    assert not causal_attention.fits(query[:, :, :5], key, value)
    assert not causal_attention.fits(query, key, value[..., :32])
    with torch.profiler.profile() as profiled, narrow_products(query):
        F.scaled_dot_product_attention(query, key, value)
        F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.5)
    names = [event.name for event in profiled.events()]
    assert "blockwalk::causal_attention" not in names
