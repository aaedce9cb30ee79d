"""Oracle: autograd through torch.nn.functional.cross_entropy on whole logits, and the loss of
transformers' own models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blockwalk.numerics.losses.cross_entropy import chunked_cross_entropy, chunked_losses
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.losses import IGNORE
from blockwalk.plan.sizes import LOSS_BUDGET, chunk_sizes
from tests.support.messages import refused


@dataclass
class Rows:
    """A weight that keeps the protocol to the letter: what it returned is overwritten by the next
    call."""

    weight_VD: Tensor

    def __post_init__(self) -> None:
        self.shape = tuple(self.weight_VD.shape)
        self.dtype = self.weight_VD.dtype
        self._scratch = torch.empty_like(self.weight_VD)

    def rows(self, start: int, stop: int) -> Tensor:
        self._scratch.fill_(torch.nan)
        return self._scratch[: stop - start].copy_(self.weight_VD[start:stop])

    def columns(self, start: int, stop: int) -> Tensor:
        return self.weight_VD[:, start:stop].clone()

    def gather(self, index: Tensor) -> Tensor:
        return self.weight_VD[index]


@dataclass
class Reference:
    """Loss and gradients by autograd on whole logits."""

    loss_sum: Tensor
    hidden_ND: Tensor
    head_VD: Tensor
    bias_V: Tensor


def reference(
    hidden_ND: Tensor,
    labels_N: Tensor,
    head_VD: Tensor,
    bias_V: Tensor,
    scale: float,
    cap: float | None,
    factor: float,
) -> Reference:
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden_ND, head_VD, bias_V)]
    logits_NV = (leaves[0] @ leaves[1].t() + leaves[2]).to(
        torch.promote_types(hidden_ND.dtype, torch.float32)
    ) * scale
    if cap is not None:
        logits_NV = torch.tanh(logits_NV / cap) * cap
    loss = torch.nn.functional.cross_entropy(
        logits_NV, labels_N, reduction="sum", ignore_index=IGNORE
    )
    return Reference(loss.detach(), *torch.autograd.grad(loss * factor, leaves))


def relative(ours: Tensor | None, theirs: Tensor) -> float:
    assert ours is not None
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30))


def random_case(
    tokens: int,
    hidden: int,
    vocab: int,
    *,
    ignored: int = 0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    head_VD = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    bias_V = torch.randn(vocab, generator=generator, dtype=torch.float64)
    labels_N = torch.randint(0, vocab, (tokens,), generator=generator)
    labels_N[torch.randperm(tokens, generator=generator)[:ignored]] = IGNORE
    return hidden_ND.to(dtype), labels_N, head_VD.to(dtype), bias_V.to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 70),
    hidden=st.integers(1, 9),
    vocab=st.integers(1, 60),
    chunk=st.integers(1, 70),
    ignored=st.integers(0, 70),
    scale=st.sampled_from([1.0, 0.0625, 2.5]),
    cap=st.sampled_from([None, 3.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_any_chunks(
    tokens: int,
    hidden: int,
    vocab: int,
    chunk: int,
    ignored: int,
    scale: float,
    cap: float | None,
    seed: int,
) -> None:
    """Oracle: autograd in float64. One pass (frozen), two passes (head and bias trained) and the
    loss alone."""
    hidden_ND, labels_N, head_VD, bias_V = random_case(
        tokens, hidden, vocab, ignored=min(ignored, tokens), seed=seed
    )
    theirs = reference(hidden_ND, labels_N, head_VD, bias_V, scale, cap, 0.3)
    options: dict[str, Any] = {
        "bias": bias_V,
        "scale": scale,
        "soft_cap": cap,
        "vocab_chunk": chunk,
    }
    head_grad = torch.ones_like(head_VD)  # added to, not overwritten
    bias_grad = torch.ones_like(bias_V)
    one = chunked_cross_entropy(hidden_ND, labels_N, Rows(head_VD), grad_scale=0.3, **options)
    two = chunked_cross_entropy(
        hidden_ND,
        labels_N,
        Rows(head_VD),
        grad_scale=0.3,
        head_grad=head_grad,
        bias_grad=bias_grad,
        **options,
    )
    (losses_N,) = chunked_losses([(hidden_ND, labels_N)], Rows(head_VD), **options)
    assert not losses_N[labels_N == IGNORE].any()
    for loss_sum in (one.loss_sum, two.loss_sum, losses_N.sum()):
        assert loss_sum.dtype == torch.float64
        torch.testing.assert_close(loss_sum, theirs.loss_sum, rtol=1e-12, atol=1e-13)
    for result in (one, two):
        torch.testing.assert_close(result.grad_hidden_ND, theirs.hidden_ND, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(head_grad - 1, theirs.head_VD, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(bias_grad - 1, theirs.bias_V, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize(
    ("dtype", "loss_error", "grad_error"),
    [(torch.float32, 1e-6, 1e-6), (torch.float16, 1e-4, 2e-3), (torch.bfloat16, 1e-3, 1e-2)],
)
def test_every_compute_dtype(
    dtype: torch.dtype, loss_error: float, grad_error: float, cap: float | None
) -> None:
    """Oracle: autograd in the same dtype with float32 logits; 16 bits to the rounding of their
    products."""
    hidden_ND, labels_N, head_VD, bias_V = random_case(41, 48, 700, ignored=5, dtype=dtype)
    hidden_ND = hidden_ND * 0.3
    theirs = reference(hidden_ND, labels_N, head_VD, bias_V, 0.7, cap, 0.02)
    options: dict[str, Any] = {
        "bias": bias_V,
        "scale": 0.7,
        "soft_cap": cap,
        "vocab_chunk": 128,
        "grad_scale": 0.02,
    }
    head_grad = torch.zeros(700, 48)
    bias_grad = torch.zeros(700)
    one = chunked_cross_entropy(hidden_ND, labels_N, Rows(head_VD), **options)
    two = chunked_cross_entropy(
        hidden_ND, labels_N, Rows(head_VD), head_grad=head_grad, bias_grad=bias_grad, **options
    )
    for result in (one, two):
        assert relative(result.loss_sum, theirs.loss_sum) < loss_error
        assert result.grad_hidden_ND is not None
        assert result.grad_hidden_ND.dtype == dtype
        assert relative(result.grad_hidden_ND, theirs.hidden_ND) < grad_error
    assert relative(head_grad, theirs.head_VD) < grad_error
    assert relative(bias_grad, theirs.bias_V) < grad_error


@pytest.mark.parametrize("trained", [False, True])
def test_tokens_that_the_model_already_predicts(trained: bool) -> None:
    """Oracle: autograd in float64 on the same bfloat16 values. With p of the label near 1 (here q =
    1 − p is near 1e-3), p − y taken after a 16-bit product would be off by as much as it is
    itself."""
    hidden_ND, labels_N, head_VD, bias_V = random_case(40, 64, 500, dtype=torch.bfloat16)
    hidden_ND = head_VD[labels_N] * 0.28 + hidden_ND * 0.1
    wide = [tensor.double() for tensor in (hidden_ND, head_VD, bias_V * 0)]
    theirs = reference(wide[0], labels_N, wide[1], wide[2], 1.0, None, 1.0)
    assert 1e-4 < float(theirs.loss_sum) / 40 < 1e-2
    head_grad = torch.zeros(500, 64) if trained else None
    ours = chunked_cross_entropy(
        hidden_ND, labels_N, Rows(head_VD), grad_scale=1.0, head_grad=head_grad, vocab_chunk=100
    )
    assert relative(ours.grad_hidden_ND, theirs.hidden_ND) < 0.03
    assert relative(ours.loss_sum, theirs.loss_sum) < 0.03


def test_logits_far_apart() -> None:
    """Oracle: autograd in float64, with logits up to ±2,000, where exp overflows and label
    probabilities vanish."""
    hidden_ND, labels_N, head_VD, bias_V = random_case(30, 8, 90)
    theirs = reference(hidden_ND * 300, labels_N, head_VD, bias_V, 1.0, None, 1.0)
    head_grad = torch.zeros_like(head_VD)
    for grad in (None, head_grad):
        ours = chunked_cross_entropy(
            hidden_ND * 300,
            labels_N,
            Rows(head_VD),
            grad_scale=1.0,
            bias=bias_V,
            head_grad=grad,
            vocab_chunk=16,
        )
        torch.testing.assert_close(ours.loss_sum, theirs.loss_sum, rtol=1e-12, atol=0)
        torch.testing.assert_close(ours.grad_hidden_ND, theirs.hidden_ND, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(head_grad, theirs.head_VD, rtol=1e-9, atol=1e-9)


def test_lora_on_the_head() -> None:
    """Oracle: autograd through h·Wᵀ + s·(h·Aᵀ)·Bᵀ: the head [W, B] on [h, s·h·Aᵀ], with the
    gradient of B's columns alone."""
    hidden_ND, labels_N, head_VD, _ = random_case(33, 12, 120, ignored=4)
    a_RD = torch.randn(3, 12, dtype=torch.float64)
    b_VR = torch.randn(120, 3, dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden_ND, a_RD, b_VR)]
    logits_NV = leaves[0] @ head_VD.t() + 2.0 * (leaves[0] @ leaves[1].t()) @ leaves[2].t()
    loss = torch.nn.functional.cross_entropy(logits_NV, labels_N, reduction="sum")
    theirs = torch.autograd.grad(loss, leaves)

    low_NR = 2.0 * hidden_ND @ a_RD.t()
    b_grad = torch.zeros_like(b_VR)
    ours = chunked_cross_entropy(
        torch.cat([hidden_ND, low_NR], 1),
        labels_N,
        Rows(torch.cat([head_VD, b_VR], 1)),
        grad_scale=1.0,
        head_grad=b_grad,
        vocab_chunk=50,
    )
    assert ours.grad_hidden_ND is not None
    through_ND, through_NR = ours.grad_hidden_ND.split([12, 3], 1)
    torch.testing.assert_close(through_ND + 2.0 * through_NR @ a_RD, theirs[0])
    torch.testing.assert_close(2.0 * through_NR.t() @ hidden_ND, theirs[1])
    torch.testing.assert_close(b_grad, theirs[2])


SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("kind", "extra", "transform"),
    [
        ("llama", {}, {}),
        ("gemma2", {"final_logit_softcapping": 0.4}, {"soft_cap": 0.4}),
        ("cohere", {"logit_scale": 3.0}, {"scale": 3.0}),
        ("granite", {"logits_scaling": 0.2}, {"scale": 5.0}),
        ("phi", {}, {}),
    ],
)
def test_the_loss_of_the_models_themselves(
    kind: str, extra: dict[str, float], transform: dict[str, float]
) -> None:
    """Oracle: the model's own loss, logits and autograd in float32: soft-capped, scaled, divided
    and biased heads."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings_ = {k: v for k, v in SMALL.items() if not (kind == "phi" and k == "head_dim")}
    model = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings_, **extra))
        .float()
        .eval()
    )
    head = model.get_output_embeddings()
    torch.nn.init.normal_(head.weight)  # logits far enough apart for a cap and a scale to show
    seen: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].retain_grad()
        seen.append(inputs[0])

    head.register_forward_pre_hook(keep)
    ids_BS = torch.randint(1, 97, (2, 11))
    labels_BS = ids_BS.masked_fill(torch.rand(2, 11) < 0.3, IGNORE)
    loss = model(input_ids=ids_BS, labels=labels_BS, use_cache=False).loss
    loss.backward()
    assert seen[0].grad is not None
    tokens = int((labels_BS[:, 1:] != IGNORE).sum())
    ours = chunked_cross_entropy(
        seen[0].detach()[:, :-1].reshape(-1, 32),
        labels_BS[:, 1:].reshape(-1),
        Rows(head.weight.detach()),
        bias=None if head.bias is None else head.bias.detach(),
        grad_scale=1.0 / tokens,
        vocab_chunk=20,
        **transform,
    )
    assert float(ours.loss_sum) / tokens == pytest.approx(float(loss.detach()), rel=1e-6)
    assert relative(ours.grad_hidden_ND, seen[0].grad[:, :-1].reshape(-1, 32)) < 1e-6


def test_no_label_that_counts() -> None:
    """Oracle: closed form. Nothing to predict: loss 0, no tokens, gradients 0 and the head's as
    they were."""
    hidden_ND, _, head_VD, bias_V = random_case(6, 4, 10)
    head_grad = torch.full_like(head_VD, 2.0)
    ours = chunked_cross_entropy(
        hidden_ND,
        torch.full((6,), IGNORE),
        Rows(head_VD),
        grad_scale=1.0,
        bias=bias_V,
        head_grad=head_grad,
    )
    assert float(ours.loss_sum) == 0.0
    assert torch.equal(ours.grad_hidden_ND, torch.zeros_like(hidden_ND))
    assert torch.equal(head_grad, torch.full_like(head_VD, 2.0))


def test_what_it_refuses() -> None:
    """Oracle: closed form. Each call breaks the one rule that the message names."""
    hidden_ND, labels_N, head_VD, _ = random_case(6, 4, 10)
    for wrong in (10, -1):
        bad_N = labels_N.clone()
        bad_N[3] = wrong
        with refused(ValueError, f"label {wrong} 10"):
            chunked_cross_entropy(hidden_ND, bad_N, Rows(head_VD), grad_scale=1.0)
    with pytest.raises(AssertionError):
        chunked_cross_entropy(hidden_ND, labels_N[:5], Rows(head_VD), grad_scale=1.0)
    with pytest.raises(AssertionError):
        chunked_cross_entropy(hidden_ND.float(), labels_N, Rows(head_VD), grad_scale=1.0)
    with refused(AssertionError, "torch.float64"):
        chunked_cross_entropy(
            hidden_ND, labels_N, Rows(head_VD), grad_scale=1.0, head_grad=torch.zeros(10, 4)
        )
    with pytest.raises(AssertionError):
        chunked_cross_entropy(hidden_ND, labels_N, Rows(head_VD), grad_scale=1.0, soft_cap=0.0)


class _Largest(TorchDispatchMode):
    """Bytes of the largest storage that any operation inside wrote or made."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_never_whole(dtype: torch.dtype, trained: bool) -> None:
    """Oracle: closed form. No storage that an operation writes (torch's dispatcher counts) is near
    the logits' bytes, and what the scratch holds with a chunk of the head is within the budget, for
    token counts below and above one chunk."""
    for tokens, hidden, vocab in ((300, 8, 60_000), (1500, 8, 9_000)):
        hidden_ND, labels_N, head_VD, _ = random_case(tokens, hidden, vocab, dtype=dtype)
        head_grad = torch.zeros(vocab, hidden) if trained else None
        token_chunk, vocab_chunk = chunk_sizes(
            tokens, hidden, vocab, dtype.itemsize, soft_cap=False
        )
        assert token_chunk < tokens or vocab_chunk < vocab
        scratch = ScratchArena()
        with _Largest() as largest:
            chunked_cross_entropy(
                hidden_ND,
                labels_N,
                Rows(head_VD),
                grad_scale=1.0,
                head_grad=head_grad,
                scratch=scratch,
            )
        held = scratch.nbytes
        assert largest.nbytes <= LOSS_BUDGET["cpu"] / 2 < tokens * vocab * 4 / 5
        assert held + vocab_chunk * hidden * dtype.itemsize <= LOSS_BUDGET["cpu"]
        chunked_cross_entropy(
            hidden_ND, labels_N, Rows(head_VD), grad_scale=1.0, head_grad=head_grad, scratch=scratch
        )
        assert scratch.nbytes == held


@pytest.mark.parametrize(
    ("hidden", "vocab"), [(896, 151_936), (2048, 151_936), (2560, 262_144), (5120, 32_000)]
)
@pytest.mark.parametrize("tokens", [1, 255, 1023, 8191])
def test_chunks_of_real_models_stay_within_the_budget(hidden: int, vocab: int, tokens: int) -> None:
    """Oracle: closed form. The bytes of one chunk of head, logits and sums, counted here, in
    bfloat16 and with a soft cap."""
    token_chunk, vocab_chunk = chunk_sizes(tokens, hidden, vocab, 2, soft_cap=True)
    logits = token_chunk * vocab_chunk * (2 + 4 + 4)
    sums = token_chunk * hidden * (4 + 2 + 2)
    assert logits + sums + vocab_chunk * hidden * 2 <= LOSS_BUDGET["cpu"]
    parts = -(-tokens // token_chunk)
    assert parts * token_chunk - tokens < parts  # tokens are cut evenly
    assert vocab_chunk == chunk_sizes(1, hidden, vocab, 2, soft_cap=False)[1]  # by the head alone


def test_a_loss_alone_reads_the_head_once() -> None:
    """Oracle: the loss that comes with a gradient, and each batch's by itself, to the last bit, and
    the vocabulary: a head that is decoded or perturbed when it is read is made once, however many
    batches and chunks of tokens there are."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(tokens, 768, generator=generator),
            torch.randint(0, 4000, (tokens,), generator=generator),
        )
        for tokens in (1500, 37, 700)
    ]
    read: list[int] = []

    class Counted(Rows):
        def rows(self, start: int, stop: int) -> Tensor:
            read.append(stop - start)
            return super().rows(start, stop)

    head = Counted(torch.randn(4000, 768, generator=generator))
    together = chunked_losses(batches, head)
    assert sum(read) == 4000
    for batch, losses_N in zip(batches, together, strict=True):
        (alone_N,) = chunked_losses([batch], head)
        assert torch.equal(losses_N, alone_N)
    read.clear()
    differentiated = chunked_cross_entropy(*batches[0], head, grad_scale=1.0)
    assert sum(read) > 4000  # there were several chunks of tokens
    torch.testing.assert_close(together[0].sum(), differentiated.loss_sum, rtol=1e-15, atol=0.0)
