"""Oracle: ``transformers.Trainer`` with the same metrics on the same model in memory: predictions,
labels, inputs and losses that it hands to them, and what they answer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

import blockwalk
from blockwalk.integrations import BlockwalkTrainer
from tests.models import tiny_model

logging.getLogger("transformers").setLevel(logging.ERROR)


def rows(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    lengths = (5, 9, 12, 7)
    drawn = [
        torch.randint(3, 101, (lengths[n % 4],), generator=generator).tolist() for n in range(count)
    ]
    return [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in drawn]


def padded(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(example["input_ids"]) for example in examples)

    def laid(name: str, filling: int) -> torch.Tensor:
        lines = [
            [*example[name], *[filling] * (longest - len(example[name]))] for example in examples
        ]
        return torch.tensor(lines)

    ids = laid("input_ids", 0)
    labels = laid("labels", -100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


class Metrics:
    """Metrics that keep what they were given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        self.given.append(prediction)
        chosen = np.asarray(prediction.predictions)
        chosen = chosen.argmax(-1) if chosen.ndim == 3 else chosen
        labels = np.asarray(prediction.label_ids)
        counted = labels[:, 1:] != -100
        right = chosen[:, :-1] == labels[:, 1:]
        return {"accuracy": float(right[counted].mean()), "tokens": float(counted.sum())}


def evaluated(cls: Any, folder: Path, metrics: Metrics, more: dict[str, Any], **given: Any) -> Any:
    args = TrainingArguments(
        str(folder), per_device_eval_batch_size=3, report_to=[], use_cpu=True, **more
    )
    run = cls(
        tiny_model("llama"),
        args=args,
        eval_dataset=rows(7),
        data_collator=padded,
        compute_metrics=metrics,
        **given,
    )
    figures = run.evaluate()
    return {name: value for name, value in figures.items() if name.endswith(("s", "cy"))}


@pytest.mark.parametrize(
    ("more", "given", "plan"),
    [
        ({}, {}, "plain"),
        ({}, {}, "zo2"),
        ({"include_for_metrics": ["inputs", "loss"], "eval_accumulation_steps": 1}, {}, "plain"),
        ({"batch_eval_metrics": True}, {}, "plain"),
        ({}, {"preprocess_logits_for_metrics": lambda logits, _: logits.argmax(-1)}, "plain"),
    ],
    ids=["plain", "zo2", "inputs and losses", "by batch", "chosen tokens"],
)
def test_metrics_are_those_of_the_trainer(
    more: dict[str, Any], given: dict[str, Any], plan: str, tmp_path: Path
) -> None:
    ours, theirs = Metrics(), Metrics()
    walk = {"plan": blockwalk.method(plan)}
    found = evaluated(BlockwalkTrainer, tmp_path / "ours", ours, more, **given, **walk)
    expected = evaluated(Trainer, tmp_path / "theirs", theirs, more, **given)
    for name in ("eval_loss", "eval_accuracy", "eval_tokens"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert len(ours.given) == len(theirs.given)
    for mine, other in zip(ours.given, theirs.given, strict=True):
        labels = np.asarray(other.label_ids)
        np.testing.assert_array_equal(np.asarray(mine.label_ids), labels)
        before = np.roll(labels != -100, -1, axis=1)
        shown, wanted = np.asarray(mine.predictions), np.asarray(other.predictions)
        assert shown.shape == wanted.shape
        np.testing.assert_allclose(shown[before], wanted[before], atol=2e-5)
        for name in ("inputs", "losses"):
            if getattr(other, name) is not None and not more.get("batch_eval_metrics"):
                np.testing.assert_allclose(getattr(mine, name), getattr(other, name), rtol=1e-5)


def test_predictions_are_those_of_the_trainer(tmp_path: Path) -> None:
    answers = []
    for cls in (BlockwalkTrainer, Trainer):
        args = TrainingArguments(
            str(tmp_path), per_device_eval_batch_size=8, report_to=[], use_cpu=True
        )
        run = cls(tiny_model("llama"), args=args, data_collator=padded)
        answers.append(run.predict(rows(4)))
    ours, theirs = answers
    before = np.roll(theirs.label_ids != -100, -1, axis=1)
    np.testing.assert_array_equal(ours.label_ids, theirs.label_ids)
    np.testing.assert_allclose(ours.predictions[before], theirs.predictions[before], atol=2e-5)
