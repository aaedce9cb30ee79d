"""Oracle: TRL's own loss code, on the same log-probabilities."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockwalk.data.batch import LearntCounts
from blockwalk.estimators.objectives import Sequences, weighed
from blockwalk.plan.objectives import BASELINE, OBJECTIVES, REFERENCE

LENGTHS = (5, 3, 1, 6, 4, 4)
EXACT = 1e-6


def tokens(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities [R, S] padded with 0, the mask of their tokens, and references
    [R]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    logp_RS = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    mask_RS = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    logp_RS = logp_RS * mask_RS
    reference_R = logp_RS.sum(1) + torch.randn(shape[0], generator=generator, dtype=torch.float64)
    return logp_RS, mask_RS, reference_R


def ours(
    objective: str, logp_RS: Tensor, mask_RS: Tensor, **numbers: Tensor
) -> tuple[float, Tensor, dict[str, float]]:
    """Return the objective, its gradient [R, S] and its metrics."""
    rows_RS = torch.arange(len(logp_RS))[:, None].expand_as(mask_RS)
    chosen = int(mask_RS[::2].sum())
    counts = LearntCounts(int(mask_RS.sum()), len(logp_RS), chosen)
    sequences = Sequences(logp_RS[mask_RS], rows_RS[mask_RS], len(logp_RS), numbers, counts)
    result = weighed(OBJECTIVES[objective], sequences)
    gradient_RS = torch.zeros_like(logp_RS)
    gradient_RS[mask_RS] = -result.weights_N
    return (
        float(result.value),
        gradient_RS,
        {name: float(metric) for name, metric in result.metrics.items()},
    )


def in_trls_order(rows: Tensor) -> Tensor:
    """Rows with the chosen of all pairs first, as TRL's batches have them."""
    return torch.cat([rows[::2], rows[1::2]])


class _Accelerator(SimpleNamespace):
    device = torch.device("cpu")

    @staticmethod
    def gather(value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    @staticmethod
    def unwrap_model(model: Any) -> Any:
        return model

    @staticmethod
    def reduce(value: Tensor, reduction: str) -> Tensor:
        return value


def of_dpo_trainer(
    logp_RS: Tensor, mask_RS: Tensor, reference_R: Tensor, **settings: Any
) -> tuple[Tensor, dict[str, list[float]]]:
    """Run ``DPOTrainer._compute_loss`` on log-probabilities in place of a model's."""
    from trl import DPOTrainer

    outputs = SimpleNamespace(
        log_probs=logp_RS,
        entropy=torch.zeros_like(logp_RS),
        mean_logits=torch.zeros_like(logp_RS),
        is_top1=torch.zeros_like(mask_RS),
    )

    chosen, rejected = reference_R.chunk(2)
    mask = torch.cat([torch.zeros(len(mask_RS), 1, dtype=torch.int64), mask_RS.long()], 1)
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    trainer = SimpleNamespace(
        accelerator=_Accelerator(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_weights=[1.0],
        use_weighting=False,
        label_smoothing=settings.get("label_smoothing", 0.0),
        loss_types=[settings["loss_type"]],
        beta=settings["beta"],
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)
    return loss, trainer._metrics["train"]


@pytest.mark.parametrize(("objective", "loss_type"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_dpo_and_ipo(objective: str, loss_type: str) -> None:
    """Loss, gradient, reward accuracy and margin."""
    logp_RS, mask_RS, reference_R = tokens()
    value, gradient_RS, metrics = ours(
        f"{objective}(beta=0.3)", logp_RS, mask_RS, **{REFERENCE: reference_R}
    )
    leaf_RS = logp_RS.clone().requires_grad_()
    loss, logged = of_dpo_trainer(
        in_trls_order(leaf_RS),
        in_trls_order(mask_RS),
        in_trls_order(reference_R),
        loss_type=loss_type,
        beta=0.3,
    )
    loss.backward()
    assert value == pytest.approx(float(loss.detach()), rel=EXACT)
    torch.testing.assert_close(gradient_RS, leaf_RS.grad * mask_RS, rtol=EXACT, atol=1e-12)
    assert metrics["margin"] == pytest.approx(logged["rewards/margins"][0], rel=EXACT)
    assert metrics["reward_accuracy"] == pytest.approx(logged["rewards/accuracies"][0])


def test_label_smoothing_of_dpo() -> None:
    """TRL's ``aot`` on one pair is DPO with smoothed labels: it sorts what is one number."""
    for pair in range(3):
        logp_RS, mask_RS, reference_R = (
            tensor[2 * pair : 2 * pair + 2] for tensor in tokens(seed=1)
        )
        loss, _ = of_dpo_trainer(
            logp_RS, mask_RS, reference_R, loss_type="aot", beta=0.2, label_smoothing=0.1
        )
        value, _, _ = ours(
            "dpo(beta=0.2, label_smoothing=0.1)", logp_RS, mask_RS, **{REFERENCE: reference_R}
        )
        assert value == pytest.approx(float(loss), rel=EXACT)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["cpo", "simpo"])
def test_cpo_and_simpo(kind: str, smoothing: float) -> None:
    """``CPOTrainer.cpo_loss``, with the cross-entropy of chosen answers beside it."""
    from trl.experimental.cpo import CPOTrainer

    logp_RS, mask_RS, _ = tokens(seed=2)
    leaf_RS = logp_RS.clone().requires_grad_()
    sums_R = leaf_RS.sum(1)
    rewards_R = sums_R / mask_RS.sum(1) if kind == "simpo" else sums_R
    trainer = SimpleNamespace(
        accelerator=_Accelerator(),
        alpha=0.0,
        beta=0.4,
        simpo_gamma=0.6,
        label_smoothing=smoothing,
        loss_type="simpo" if kind == "simpo" else "sigmoid",
    )
    losses, chosen, rejected = CPOTrainer.cpo_loss(trainer, rewards_R[::2], rewards_R[1::2])
    loss = losses.mean() - 0.7 * leaf_RS[::2][mask_RS[::2]].mean()
    loss.backward()
    gamma = "gamma=0.6, " * (kind == "simpo")
    settings = f"beta=0.4, {gamma}label_smoothing={smoothing}, cpo_alpha=0.7"
    value, gradient_RS, metrics = ours(f"{kind}({settings})", logp_RS, mask_RS)
    assert value == pytest.approx(float(loss.detach()), rel=EXACT)
    torch.testing.assert_close(gradient_RS, leaf_RS.grad * mask_RS, rtol=EXACT, atol=1e-12)
    assert metrics["margin"] == pytest.approx(float((chosen - rejected).mean()), rel=EXACT)


def test_orpo() -> None:
    """``ORPOTrainer.odds_ratio_loss``, and the cross-entropy of chosen answers. TRL's code computes
    in float32."""
    from trl.experimental.orpo import ORPOTrainer

    logp_RS, mask_RS, _ = tokens(seed=3)
    leaf_RS = logp_RS.clone().requires_grad_()
    means_R = leaf_RS.sum(1) / mask_RS.sum(1)
    trainer = SimpleNamespace(accelerator=_Accelerator(), beta=0.4)
    losses, *_ = ORPOTrainer.odds_ratio_loss(trainer, means_R[::2], means_R[1::2])
    loss = -leaf_RS[::2][mask_RS[::2]].mean() - losses.mean()
    loss.backward()
    value, gradient_RS, _ = ours("orpo(beta=0.4)", logp_RS, mask_RS)
    assert value == pytest.approx(float(loss.detach()), rel=EXACT)
    torch.testing.assert_close(gradient_RS, leaf_RS.grad * mask_RS, rtol=5e-6, atol=1e-7)


def test_orpo_of_a_certain_answer() -> None:
    """Oracle: the limit. An answer of probability 1 has an odds ratio that is finite here."""
    logp_RS = torch.tensor([[-1e-18], [-2.0]], dtype=torch.float64)
    value, gradient_RS, _ = ours("orpo(beta=0.4)", logp_RS, torch.ones(2, 1, dtype=torch.bool))
    assert 0 <= value < 1e-12
    assert bool(gradient_RS.isfinite().all())


def test_kto() -> None:
    """``KTOTrainer._compute_loss``: the baseline is the mean log-ratio of its mismatched rows."""
    from trl import KTOTrainer

    logp_RS, mask_RS, reference_R = tokens(seed=4)
    desirable_R = torch.tensor([1, 0, 1, 1, 0, 0])
    mismatched_R = torch.randn(6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    leaf_RS = logp_RS.clone().requires_grad_()
    zeros_RS = torch.zeros_like(logp_RS)
    outputs = SimpleNamespace(log_probs=leaf_RS, entropy=zeros_RS, mean_logits=zeros_RS)

    mask = torch.cat([torch.zeros(6, 1, dtype=torch.int64), mask_RS.long()], 1)
    batch = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "label": desirable_R,
        "ref_logps": reference_R,
        "ref_KL_logps": torch.zeros_like(mismatched_R),
    }
    trainer = SimpleNamespace(
        accelerator=_Accelerator(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.5,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        _compute_kl_logps=lambda *_: mismatched_R,
    )
    loss = KTOTrainer._compute_loss(trainer, lambda **_: outputs, batch, return_outputs=False)
    loss.backward()
    baseline_R = mismatched_R.mean().clamp(min=0).expand(6)
    value, gradient_RS, _ = ours(
        "kto(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)",
        logp_RS,
        mask_RS,
        **{REFERENCE: reference_R, BASELINE: baseline_R, "desirable": desirable_R.double()},
    )
    assert value == pytest.approx(float(loss.detach()), rel=EXACT)
    torch.testing.assert_close(gradient_RS, leaf_RS.grad * mask_RS, rtol=EXACT, atol=1e-12)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize(
    ("level", "delta", "is_old_known"),
    [("token", None, True), ("sequence", None, True), ("token", 1.4, True), ("token", None, False)],
)
def test_grpo(loss_type: str, level: str, delta: float | None, is_old_known: bool) -> None:
    """``GRPOTrainer._compute_loss``."""
    from trl import GRPOTrainer

    logp_RS, mask_RS, _ = tokens(seed=5)
    generator = torch.Generator().manual_seed(6)
    advantages_R = torch.randn(6, generator=generator, dtype=torch.float64)
    noise_RS = torch.randn(logp_RS.shape, generator=generator, dtype=torch.float64)
    old_RS = (logp_RS + 0.4 * noise_RS) * mask_RS
    leaf_RS = logp_RS.clone().requires_grad_()
    mask = mask_RS.double()
    inputs = {
        "prompt_ids": torch.zeros(6, 2, dtype=torch.int64),
        "prompt_mask": torch.ones(6, 2, dtype=torch.int64),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": advantages_R,
        "num_items_in_batch": mask.sum(),
        **({"old_per_token_logps": old_RS} if is_old_known else {}),
    }
    zeros_RS = torch.zeros_like(logp_RS)
    args = SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(
            gather=lambda value: value, reduce=lambda value, reduction: value, num_processes=1
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf_RS, zeros_RS, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=0.0,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=0.3,
        args=args,
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=7,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    settings = f"loss_type={loss_type!r}, importance_sampling_level={level!r}, epsilon_high=0.3"
    if delta is not None:
        settings += f", delta={delta}"
    if loss_type == "dr_grpo":
        settings += ", max_completion_length=7"
    old = {"old_log_probabilities": old_RS[mask_RS]} if is_old_known else {}
    value, gradient_RS, _ = ours(
        f"policy_gradient({settings})", logp_RS, mask_RS, advantages=advantages_R, **old
    )
    assert value == pytest.approx(float(loss.detach()), rel=EXACT)
    torch.testing.assert_close(gradient_RS, leaf_RS.grad * mask_RS, rtol=EXACT, atol=1e-12)


def test_rloo() -> None:
    """``RLOOTrainer._compute_loss``."""
    from trl import RLOOTrainer

    logp_RS, mask_RS, _ = tokens(seed=7)
    generator = torch.Generator().manual_seed(8)
    advantages_R = torch.randn(6, generator=generator, dtype=torch.float64)
    old_RS = (logp_RS + 0.2 * torch.randn(6, 6, generator=generator).double()) * mask_RS
    leaf_RS = logp_RS.clone().requires_grad_()
    inputs = {
        "prompt_ids": torch.zeros(6, 2, dtype=torch.int64),
        "prompt_mask": torch.ones(6, 2, dtype=torch.int64),
        "completion_ids": torch.zeros(6, 6, dtype=torch.int64),
        "completion_mask": mask_RS.double(),
        "advantages": advantages_R,
        "old_logps": old_RS.sum(1),
    }
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(
            gather=lambda value: value, reduce=lambda value, reduction: value
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf_RS, old_RS, None),
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.3,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    loss = RLOOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    value, gradient_RS, _ = ours(
        "policy_gradient(loss_type='rloo', epsilon_high=0.3)",
        logp_RS,
        mask_RS,
        advantages=advantages_R,
        old_log_probabilities=old_RS[mask_RS],
    )
    assert value == pytest.approx(float(loss.detach()), rel=EXACT)
    torch.testing.assert_close(gradient_RS, leaf_RS.grad * mask_RS, rtol=EXACT, atol=1e-12)
