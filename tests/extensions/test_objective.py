"""Oracle: torch's autograd on whole logits, with a loss of pairs that src does not know: SLiC's
hinge (Zhao et al., 2023), as TRL has it."""

from __future__ import annotations

import copy
import importlib
import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import blockwalk
from blockwalk.estimators import objectives
from blockwalk.estimators.objectives import Answer, Sequences
from blockwalk.plan.methods import method
from blockwalk.plan.objectives import OBJECTIVES, ObjectiveFacts
from blockwalk.plan.row_settings import setting
from blockwalk.walk.walker import Walker
from tests.conftest import TinyRun
from tests.models import tiny_model
from tests.support.objectives import judged_batch, on_whole_logits


@dataclass(frozen=True)
class HingeSettings:
    """Settings of the hinge."""

    beta: float = setting(0.5, above=0, help="The factor on the margin of a pair.")


def hinge(sequences: Sequences, settings: HingeSettings) -> Answer:
    """Return the mean over pairs of what their margin lacks to 1."""
    rewards_R = settings.beta * sequences.sums_R
    losses_P = torch.relu(1 - (rewards_R[::2] - rewards_R[1::2]))
    return objectives.mean_of_pairs(sequences, losses_P, rewards_R)


def row(settings: HingeSettings) -> ObjectiveFacts:
    return ObjectiveFacts(
        hinge,
        group=2,
        mean_over="pairs",
        metrics=("reward_accuracy", "margin"),
        settings=settings,
    )


def formula(logps: Sequence[Tensor], _numbers: Mapping[str, Tensor]) -> Tensor:
    sums = [0.25 * logp.sum() for logp in logps]
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return torch.stack([torch.relu(1 - (c - r)) for c, r in pairs]).mean()


def test_a_row_from_outside(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Its gradients, and a run that reads pairs for it because its row says so."""
    OBJECTIVES.register("hinge", row, HingeSettings)
    try:
        model = tiny_model("llama")
        batch = judged_batch(seed=9)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        on_whole_logits(formula, model(**inputs, use_cache=False).logits, batch).backward()
        plan = method("plain", objective="hinge(beta=0.25)", gradient_accumulation_steps=2)
        with Walker(copy.deepcopy(model), plan, device="cpu") as walker:
            gradients = walker.gradients(batch)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            change = float((gradients[name] - parameter.grad).norm())
            assert change <= 2e-6 * float(parameter.grad.norm()), name
        path = tmp_path / "pairs.jsonl"
        records = [{"prompt": "say a: ", "chosen": "A" * n, "rejected": "b"} for n in (1, 2)]
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        blockwalk.train(
            {
                "model": str(tiny_run.model),
                "data": {"train": str(path), "show_first": False},
                "objective": {"name": "hinge", "beta": 0.25},
                "batch_size": 2,
                "max_steps": 1,
                "lora": {"rank": 2},
                "output_dir": str(tmp_path / "run"),
            }
        )
        line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
        assert {"margin", "reward_accuracy"} <= line.keys()
    finally:
        OBJECTIVES.unregister("hinge")


def test_the_page_has_this_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the page's block of Python, as the module that it says."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "add-an-objective.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "my_objectives.py").write_text(textwrap.dedent(block))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_objectives")
    try:
        assert OBJECTIVES["slic(beta=0.25)"].settings.beta == 0.25
    finally:
        OBJECTIVES.unregister("slic")
        del sys.modules["my_objectives"]
