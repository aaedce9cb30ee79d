"""Objectives on whole logits, as their papers have them. Not a test: no oracle.

Each is a function of the log-probabilities of learnt tokens, a list of one tensor a sequence, the
chosen sequence of each pair first. Sums and means are those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from blockwalk.plan.objectives import PREFIX

Formula = Callable[[Sequence[Tensor], Mapping[str, Tensor]], Tensor]


def _pairs(values: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(values[::2], values[1::2], strict=True))


def _ratios(logps: Sequence[Tensor], numbers: Mapping[str, Tensor]) -> list[Tensor]:
    reference = numbers["reference_log_probabilities"]
    return [logp.sum() - ref for logp, ref in zip(logps, reference, strict=True)]


def _mean(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()


def dpo(logps: Sequence[Tensor], numbers: Mapping[str, Tensor]) -> Tensor:
    pairs = _pairs(_ratios(logps, numbers))
    return _mean([-F.logsigmoid(0.3 * (chosen - rejected)) for chosen, rejected in pairs])


def ipo(logps: Sequence[Tensor], numbers: Mapping[str, Tensor]) -> Tensor:
    ratios = _ratios(logps, numbers)
    pairs = _pairs([ratio / len(logp) for ratio, logp in zip(ratios, logps, strict=True)])
    return _mean([(chosen - rejected - 1 / 0.6) ** 2 for chosen, rejected in pairs])


def simpo(logps: Sequence[Tensor], numbers: Mapping[str, Tensor]) -> Tensor:
    pairs = _pairs([logp.mean() for logp in logps])
    return _mean([-F.logsigmoid(2.0 * (c - r) - 0.5) for c, r in pairs])


def _chosen(logps: Sequence[Tensor]) -> Tensor:
    return -torch.cat(list(logps[::2])).mean()


def cpo(logps: Sequence[Tensor], numbers: Mapping[str, Tensor]) -> Tensor:
    pairs = _pairs([logp.sum() for logp in logps])
    losses = [
        -0.9 * F.logsigmoid(0.3 * (c - r)) - 0.1 * F.logsigmoid(0.3 * (r - c)) for c, r in pairs
    ]
    return _mean(losses) + _chosen(logps)


def orpo(logps: Sequence[Tensor], numbers: Mapping[str, Tensor]) -> Tensor:
    def log_odds(logp: Tensor) -> Tensor:
        return logp.mean() - torch.log1p(-logp.mean().exp())

    pairs = _pairs([log_odds(logp) for logp in logps])
    return _mean([-0.3 * F.logsigmoid(c - r) for c, r in pairs]) + _chosen(logps)


def kto(logps: Sequence[Tensor], numbers: Mapping[str, Tensor]) -> Tensor:
    losses = []
    for number, ratio in enumerate(_ratios(logps, numbers)):
        above = 0.3 * (ratio - numbers["baseline"][number])
        wanted = bool(numbers["desirable"][number])
        losses.append(1 - torch.sigmoid(above) if wanted else 2 * (1 - torch.sigmoid(-above)))
    return _mean(losses)


def _clipped(ratio: Tensor, advantage: Tensor) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)


def dapo(logps: Sequence[Tensor], numbers: Mapping[str, Tensor]) -> Tensor:
    losses = [
        _clipped((logp - old).exp(), advantage)
        for logp, old, advantage in zip(
            logps, numbers["old_log_probabilities"], numbers["advantages"], strict=True
        )
    ]
    return torch.cat(losses).mean()


def grpo(logps: Sequence[Tensor], numbers: Mapping[str, Tensor]) -> Tensor:
    losses = [
        _clipped((logp - old).exp(), advantage).mean()
        for logp, old, advantage in zip(
            logps, numbers["old_log_probabilities"], numbers["advantages"], strict=True
        )
    ]
    return _mean(losses)


def rloo(logps: Sequence[Tensor], numbers: Mapping[str, Tensor]) -> Tensor:
    losses = [
        _clipped((logp.sum() - old.sum()).exp(), advantage)
        for logp, old, advantage in zip(
            logps, numbers["old_log_probabilities"], numbers["advantages"], strict=True
        )
    ]
    return _mean(losses)


FORMULAS: dict[str, Formula] = {
    "dpo(beta=0.3)": dpo,
    "ipo(beta=0.3)": ipo,
    "simpo(beta=2.0)": simpo,
    "cpo(beta=0.3, label_smoothing=0.1)": cpo,
    "orpo(beta=0.3)": orpo,
    "kto(beta=0.3, undesirable_weight=2.0)": kto,
    "policy_gradient(epsilon_high=0.3)": dapo,
    "policy_gradient(loss_type='grpo', epsilon_high=0.3)": grpo,
    "policy_gradient(loss_type='rloo', epsilon_high=0.3)": rloo,
}
"""Formulas by the name of a row with settings."""


def judged_batch(seed: int = 0, rows: int = 8, sequence: int = 14) -> dict[str, Tensor]:
    """Return rows of unequal length with every number that an objective may read: the first token
    learnt is the fourth."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(3, 101, (rows, sequence), generator=generator)
    mask_BS = torch.ones_like(ids_BS)
    for row in range(rows):
        mask_BS[row, sequence - (5 * row + seed) % (sequence - 5) :] = 0
    labels_BS = ids_BS.masked_fill(mask_BS == 0, -100)
    labels_BS[:, :3] = -100
    learnt_B = (labels_BS[:, 1:] != -100).sum(1).double()
    noise_B = torch.rand(rows, generator=generator, dtype=torch.float64)
    old_BS = -4.6 + 0.3 * torch.randn(rows, sequence, generator=generator, dtype=torch.float64)
    numbers = {
        "reference_log_probabilities": -4.6 * learnt_B + 4 * noise_B,
        "desirable": (torch.arange(rows) % 3 > 0).double(),
        "baseline": torch.full((rows,), 0.2, dtype=torch.float64),
        "advantages": torch.randn(rows, generator=generator, dtype=torch.float64),
        "old_log_probabilities": old_BS.masked_fill(labels_BS == -100, 0.0),
    }
    return {
        "input_ids": ids_BS,
        "attention_mask": mask_BS,
        "labels": labels_BS,
        **{f"{PREFIX}{name}": values for name, values in numbers.items()},
    }


def on_whole_logits(formula: Formula, logits_BSV: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return an objective of whole logits, float64 0-d."""
    labels_BS = batch["labels"][:, 1:]
    logp_BS = -F.cross_entropy(
        logits_BSV[:, :-1].double().transpose(1, 2),
        labels_BS,
        ignore_index=-100,
        reduction="none",
    )
    learnt_BS = labels_BS != -100
    logps = [logp_S[learnt_S] for logp_S, learnt_S in zip(logp_BS, learnt_BS, strict=True)]
    numbers = {name.removeprefix(PREFIX): v for name, v in batch.items() if name.startswith(PREFIX)}
    old_BS = numbers["old_log_probabilities"][:, 1:]
    of_tokens = [old_S[learnt_S] for old_S, learnt_S in zip(old_BS, learnt_BS, strict=True)]
    return formula(logps, {**numbers, "old_log_probabilities": of_tokens})  # type: ignore[dict-item]
