"""Oracle: torch's dispatcher, whose operators on a device are counted, against the number that the
shapes ask for; and a CPU's bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blockwalk.numerics import wide_products
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.weights import DenseWeight, EncodedWeight
from blockwalk.numerics.lazy_linear import grouped_linear, lazy_linear
from blockwalk.numerics.losses.cross_entropy import chunked_cross_entropy
from blockwalk.numerics.scratch import shared_arena
from blockwalk.numerics.updates import NORM_CHUNK, square_sums
from blockwalk.plan.placement import Codec
from blockwalk.plan.sizes import decoded_bytes
from blockwalk.system.versions import is_older
from tests.support.codecs import encode
from tests.support.simulated_device import Simulated

VIEWS = [
    "view",
    "slice",
    "select",
    "detach",
    "alias",
    "empty",
    "split",
    "transpose",
    "t",
    "unsqueeze",
    "squeeze",
    "expand",
]
"""Operators that launch nothing."""


class Launches(TorchDispatchMode):
    """Counts the operators of the calling thread by name, without views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if name.removesuffix("_") not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_a_norm_takes_a_few_launches_for_512_chunks(sim: Simulated) -> None:
    """Eight million elements: of 515 chunks 512 together, then two and the rest."""
    gradient = torch.randn(514 * NORM_CHUNK + 7, generator=torch.Generator().manual_seed(0))
    there = gradient.to("sim:1")
    with Launches() as mode:
        sums = square_sums(there)
    assert mode.counts.total() <= 2 + 3 * 3, mode.counts
    assert torch.equal(sums.cpu(), square_sums(gradient))


@pytest.mark.parametrize(("rows", "inside"), [(128, True), (129, False)])
def test_a_matrix_is_decoded_inside_products_of_few_rows_alone(
    rows: int, inside: bool, sim: Simulated
) -> None:
    layout = Layout((64, 96), Codec.INT4A)
    weight_ND = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    buffer = encode(weight_ND, Codec.INT4A, torch.empty(layout.nbytes, dtype=torch.uint8)).to(
        "sim:1"
    )
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(1)).to("sim:1")
    with Launches() as mode:
        lazy_linear(x, EncodedWeight(buffer, layout, torch.float32))
    assert ("product_" in mode.counts) is inside, mode.counts


def test_the_loss_of_a_7b_model_takes_a_third_of_the_launches(sim: Simulated) -> None:
    """Qwen2.5-7B's head and 8,192 tokens, on tensors without data: 7,516 launches where 16-bit sums
    are lifted in a processor's portions."""
    hidden_ND = torch.empty(8192, 3584, dtype=torch.bfloat16, device="meta")
    head = DenseWeight(torch.empty(152064, 3584, dtype=torch.bfloat16, device="meta"))
    with Launches() as mode:
        chunked_cross_entropy(hidden_ND, torch.randint(0, 152064, (8192,)), head, grad_scale=1.0)
    assert mode.counts.total() < 7516 / 2.5, mode.counts


class WideProducts(TorchDispatchMode):
    """A device that multiplies 16 bits into float32 results, which a processor's torch does not; in
    float64, rounded once."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        if func is torch.ops.aten.mm.dtype_out:
            return keywords["out"].copy_(args[0].double() @ args[1].double())
        if func is torch.ops.aten.addmm.dtype_out:
            product = args[1].double() @ args[2].double()
            sums = keywords.get("beta", 1) * args[0].double() + keywords.get("alpha", 1) * product
            return keywords["out"].copy_(sums)
        return func(*args, **keywords)


@pytest.mark.skipif(
    is_older("torch", "2.12"),
    reason="torch 2.11 does not tell at once that the simulated device lacks an operator",
)
@pytest.mark.parametrize("trains_head", [False, True])
def test_products_with_float32_results_are_taken_where_the_device_has_them(
    trains_head: bool, sim: Simulated
) -> None:
    """Oracle for the numbers: autograd through float64 logits."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(60, 32, generator=generator).bfloat16()
    head_VD = (torch.randn(200, 32, generator=generator) / 4).bfloat16()
    labels_N = torch.randint(0, 200, (60,), generator=generator)

    def taken() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Counter[str]]:
        head_grad_VD = torch.zeros(200, 32, device="sim:1") if trains_head else None
        with Launches() as mode:
            result = chunked_cross_entropy(
                hidden_ND.to("sim:1"), labels_N, DenseWeight(head_VD.to("sim:1")), grad_scale=1.0,
                vocab_chunk=64, head_grad=head_grad_VD,
            )  # fmt: skip
        head_grad_VD = torch.zeros(200, 32) if head_grad_VD is None else head_grad_VD
        return result.loss_sum.cpu(), result.grad_hidden_ND.cpu(), head_grad_VD.cpu(), mode.counts

    *_, narrow = taken()
    wide_products.has.cache_clear()
    with WideProducts():
        loss, grad_ND, head_grad_VD, wide = taken()
    wide_products.has.cache_clear()
    h_ND, w_VD = (each.double().requires_grad_() for each in (hidden_ND, head_VD))
    exact = torch.nn.functional.cross_entropy(h_ND @ w_VD.t(), labels_N, reduction="sum")
    exact.backward()
    assert h_ND.grad is not None
    assert w_VD.grad is not None
    torch.testing.assert_close(loss, exact.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(grad_ND.double(), h_ND.grad, rtol=2e-2, atol=2e-3)
    if trains_head:
        torch.testing.assert_close(head_grad_VD.double(), w_VD.grad, rtol=2e-2, atol=4e-3)
    assert wide["mm"] == 4 * (1 + trains_head) + 1, (
        "four chunks of the vocabulary, and the product that is tried"
    )
    assert wide["copy_"] < narrow["copy_"]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_layers_experts_are_decoded_in_one_launch(transposed: bool, sim: Simulated) -> None:
    """Oracle for the numbers: a processor's loop over experts. The second one has no row, and the
    last row no expert."""
    layout = Layout((4, 24, 32), Codec.INT4A)
    generator = torch.Generator().manual_seed(0)
    buffer = encode(
        torch.randn(96, 32, generator=generator),
        Codec.INT4A,
        torch.empty(layout.nbytes, dtype=torch.uint8),
    )
    offs_E = torch.tensor([3, 3, 10, 11], dtype=torch.int32)
    x = torch.randn(12, 24 if transposed else 32, generator=generator)
    answers = []
    for device in ("cpu", "sim:1"):
        experts = EncodedWeight(buffer.to(device), layout, torch.float32)
        leaf = x.clone().to(device).requires_grad_()
        offs_here = offs_E.to(device)
        with Launches() as mode:
            out = grouped_linear(leaf, experts, offs_here, transposed=transposed)[:11]
        if device != "cpu":
            assert mode.counts["decode_"] == 1, mode.counts
            assert mode.counts["_grouped_mm"] == 1, mode.counts
            foreseen = decoded_bytes(4 * 24 * 32, 4, "sim", experts=True)
            assert shared_arena(torch.device("sim", 1)).nbytes == foreseen
        out.square().sum().backward()
        assert leaf.grad is not None
        answers.append((out.detach().cpu(), leaf.grad[:11].cpu()))
    for theirs, ours in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_experts_that_are_too_many_for_the_device_are_decoded_one_by_one(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blockwalk.numerics.codecs import weights

    layout = Layout((4, 24, 32), Codec.INT4A)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device="sim:1")
    experts = EncodedWeight(buffer, layout, torch.float32)
    assert experts.whole() is not None
    monkeypatch.setattr(weights, "EXPERTS_BYTES", 4 * 24 * 32 * 4 - 1)
    assert experts.whole() is None
    assert EncodedWeight(buffer.cpu(), layout, torch.float32).whole() is None
