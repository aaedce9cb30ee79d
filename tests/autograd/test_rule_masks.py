"""Oracle: autograd over the model in memory under the mask that transformers makes of S × S, and
``F.scaled_dot_product_attention`` under all elements of a mask at once. What a walk allocates is
counted at PyTorch's dispatcher."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blockwalk import method
from blockwalk.numerics import row_tiles, rule_mask
from blockwalk.numerics.rule_mask import RuleMask
from blockwalk.plan.placement import Tier
from blockwalk.plan.plan import Plan
from blockwalk.program.program import Shape
from blockwalk.walk.unit_costs import UnitCosts
from blockwalk.walk.walker import Walker
from tests.models import tiny_model

TOKENS = 1100
LEFT = 40
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 2048,
}
SLIDING = {**SMALL, "sliding_window": 150}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "padded": ("llama", SMALL),
    "sliding": ("mistral", SLIDING),
    "sliding and full": (
        "gemma3_text",
        {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "chunked": (
        "llama4_text",
        {**SMALL, "attention_chunk_size": 128, "num_local_experts": 2, "intermediate_size_mlp": 24},
    ),
    "biased by distance": ("bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2}),
}


class LargestMask(TorchDispatchMode):
    """The most elements of a boolean tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        for tensor in answer if isinstance(answer, tuple | list) else (answer,):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.bool:
                self.elements = max(self.elements, tensor.numel())
        return answer


def left_padded() -> dict[str, Tensor]:
    """Two rows, of which the second begins with padding, so that no padding can be cut off."""
    ids = torch.randint(3, 101, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :LEFT] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed() -> dict[str, Tensor]:
    """One row of three documents."""
    ids = torch.randint(3, 101, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in (500, 400, TOKENS - 900)])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def check(
    kind: str, settings: dict[str, Any], batch: dict[str, Tensor], plan: Plan | None = None
) -> int:
    """Compare losses and gradients of a walk with the model's own; return the largest mask."""
    model = tiny_model(kind, **settings).eval()
    control = copy.deepcopy(model)
    plan = plan or method("plain", compute_dtype="float32")
    with Walker(model, plan, device="cpu") as walker:
        with LargestMask() as largest:
            gradients = walker.gradients(batch)
        loss = walker.evaluate(batch).loss
    expected = control(**batch, use_cache=False).loss
    expected.backward()
    assert abs(loss - expected.item()) < 1e-5
    for name, parameter in control.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=2e-6)
    return largest.elements


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "biased by distance"])
def test_a_long_row_has_no_mask_of_its_length_squared(family: str) -> None:
    batch = left_padded()
    assert check(*FAMILIES[family], batch) < TOKENS**2


def test_a_packed_row_has_no_mask_of_its_length_squared() -> None:
    assert check("llama", SMALL, packed()) < TOKENS**2


@pytest.mark.parametrize("batch", [left_padded, packed])
def test_graphs_that_are_saved_to_the_disk_have_no_mask_either(
    batch: Callable[[], dict[str, Tensor]],
) -> None:
    plan = method("mebp", frozen="disk × raw", trainable="disk", compute_dtype="float32")
    assert plan.activation.tier is Tier.DISK
    assert check("llama", SMALL, batch(), plan) < TOKENS**2


def test_a_model_that_reads_its_mask_gets_all_of_it() -> None:
    """BLOOM makes a bias of its mask: the mask is whole then, and the numbers are right."""
    assert check(*FAMILIES["biased by distance"], left_padded()) >= TOKENS**2


def rule(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A window of 30 keys; row 1 does not see its first seven tokens."""
    return (key <= query) & (key > query - 30) & ((row != 1) | (key >= 7))


@pytest.mark.parametrize("key_heads", [4, 2], ids=["a key head each", "shared key heads"])
@pytest.mark.parametrize("offset", [0, 64])
def test_attention_by_tiles_is_attention_under_the_whole_mask(
    key_heads: int, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_mask, "TILE_ELEMENTS", 1)
    queries = 200
    mask = RuleMask([(rule, 2)], [slice(offset, offset + queries)], (0, queries + offset), "cpu")
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, queries, 8, generator=generator, requires_grad=True)
    key = torch.randn(2, key_heads, queries + offset, 8, generator=generator, requires_grad=True)
    value = torch.randn(2, key_heads, queries + offset, 6, generator=generator, requires_grad=True)
    grad = torch.randn(2, 4, queries, 6, generator=generator)
    leaves = (query, key, value)
    options = {"scale": 0.3, "enable_gqa": key_heads < 4}
    out = F.scaled_dot_product_attention(*leaves, mask, **options)
    control = F.scaled_dot_product_attention(*leaves, mask.whole(), **options)
    if offset == 0:  # queries that see no key have no answer
        grad[1, :, :7] = 0
        out = out.masked_fill(grad == 0, 0)
        control = control.masked_fill(grad == 0, 0)
    torch.testing.assert_close(out, control)
    found = torch.autograd.grad(out, leaves, grad)
    expected = torch.autograd.grad(control, leaves, grad)
    for gradient, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-6)


def test_what_reads_a_mask_as_a_tensor_gets_its_elements() -> None:
    mask = RuleMask([(rule, 2)], [slice(0, 40)], (0, 40), "cpu")
    places = torch.arange(40)
    rows = torch.arange(2).view(2, 1, 1, 1)
    elements = rule(rows, rows, places[:, None], places[None])
    assert mask.shape == elements.shape
    assert mask.dtype == torch.bool
    assert torch.equal(mask | False, elements)
    assert torch.equal(mask[:, :, 3:7], elements[:, :, 3:7])
    assert mask[:, :, :, :40] is mask
    twice = torch.cat([mask, mask])
    assert isinstance(twice, RuleMask)
    assert torch.equal(twice.whole(), torch.cat([elements, elements]))
    assert torch.equal(mask, mask)
    assert not torch.equal(mask, RuleMask([(rule, 2)], [slice(1, 41)], (0, 40), "cpu"))


@pytest.mark.parametrize("family", ["padded", "sliding"])
def test_a_mask_of_a_long_row_is_not_foreseen_either(family: str) -> None:
    """Closed form: what a prologue holds for a token is the same at any length."""
    kind, settings = FAMILIES[family]
    config = tiny_model(kind, **{**settings, "max_position_embeddings": 1 << 15}).config
    plan = method("plain", compute_dtype="float32")
    costs = [UnitCosts(config, padded=True)(plan, Shape(1, length)) for length in (2000, 16000)]
    short, long = (dict(cost.units)["prologue"].forward_transient for cost in costs)
    assert long < 8.5 * short


@pytest.mark.parametrize("products", ["bfloat16", "float32"])
def test_narrow_attention_under_a_rule_has_few_shapes_and_no_whole_mask(
    products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same attention in float32 under all elements. Its products are made in bfloat16,
    or of float32 copies as on a processor without 16-bit products."""
    monkeypatch.setattr(row_tiles, "multiplied_in", lambda dtype: getattr(torch, products))
    monkeypatch.setattr(rule_mask, "TILE_ELEMENTS", 1)
    generator = torch.Generator().manual_seed(0)
    mask = RuleMask([(rule, 2)], [slice(0, TOKENS)], (0, TOKENS), "cpu")
    leaves = [
        torch.randn(2, 2, TOKENS, 8, generator=generator).bfloat16().requires_grad_()
        for _ in range(3)
    ]
    grad = torch.randn(2, 2, TOKENS, 8, generator=generator)
    grad[1, :, :7] = 0
    with LargestMask() as largest, row_tiles.narrow_products(leaves[0]):
        out = F.scaled_dot_product_attention(*leaves, mask)
        gradients = torch.autograd.grad(out, leaves, grad.bfloat16())
    assert largest.elements < TOKENS**2
    controls = [leaf.detach().float().requires_grad_() for leaf in leaves]
    control = F.scaled_dot_product_attention(*controls, mask.whole())
    control = control.masked_fill(grad == 0, 0)
    torch.testing.assert_close(out.float().masked_fill(grad == 0, 0), control, rtol=2e-2, atol=2e-2)
    expected = torch.autograd.grad(control, controls, grad)
    for gradient, reference in zip(gradients, expected, strict=True):
        error = (gradient.float() - reference).norm() / reference.norm()
        assert error < 1e-2


def test_a_lengthened_mask_hides_what_is_appended() -> None:
    mask = RuleMask([(rule, 2)], [slice(0, 40)], (0, 40), "cpu").lengthened(8)
    elements = mask.whole()
    assert mask.shape == (2, 1, 48, 48)
    assert not elements[..., 40:].any()
    assert elements[:, :, 40:, :40].all()


@pytest.mark.parametrize("queries", [[slice(0, 2048)], [slice(512, 1024), slice(3072, 3584)]])
def test_a_foreseen_tile_sees_its_window(queries: list[slice]) -> None:
    """Closed form: a tile of 512 queries sees itself and the window before it."""
    window = 300

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - window)

    mask = RuleMask([(seen, 1)], queries, (0, 4096), "cpu")
    spans = mask.foreseen_spans()
    firsts = [begin for piece in queries for begin in range(piece.start, piece.stop, 512)]
    expected = [(max(0, (first - window + 1) // 128 * 128), first + 512) for first in firsts]
    assert [(span.keys.start, span.keys.stop) for span in spans] == expected
    assert [(span.queries, span.keys) for span in mask.spans()] == [
        (span.queries, span.keys) for span in spans
    ]
