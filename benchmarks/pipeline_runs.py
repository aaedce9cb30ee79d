"""Runs over stages that ``pipeline.py`` compares with one process: every gradient, 20 steps, and
random plans."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from blockwalk.cutting.verify import certified
from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.closed_form.test_stages import random_plan
from tests.models import random_batch, tiny_model
from tests.ranks.test_stages import CLIPPED, KINDS
from tests.support.held import masters
from tests.support.processes import run_ranks

COUNTS = (1, 3, 4, 8)
"""Micro-batches of a step."""
STEPS = 20
_DEEP: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 8},
    "bloom": {"n_layer": 8},
    "gemma3_text": {
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
}
"""What makes a kind eight blocks deep, where it is not ``num_hidden_layers``."""

NO_DROPOUT = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0}}
"""Ranks that share a micro-batch's rows draw for their own: what they drop is another's."""

Case = tuple[str, int, int]
"""The method, chunks of a stage, and micro-batches."""


def deep(kind: str, **changes: Any) -> Any:
    """Return a random model of eight blocks."""
    depth = _DEEP.get(kind, {"num_hidden_layers": 8})
    return tiny_model(kind, **{**KINDS[kind], **depth, **changes})


def _walker(model: Any, row: str, stages: int, chunks: int, count: int, context: int = 1) -> Walker:
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = {"world": world, "ranks_per_node": world, "pipeline": stages, "context": context}
    settings = {"pipeline.chunks": chunks, "gradient_accumulation_steps": count, **CLIPPED}
    return Walker(model, method(row, mesh=mesh, **settings), device="cpu")


def walked(rank: int, kind: str, stages: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Return gradients, and for four micro-batches of a model without tied ends the losses and
    weights of 20 steps."""
    answers = []
    for row, chunks, count in cases:
        with _walker(deep(kind), row, stages, chunks, count) as walker:
            answer: dict[str, Any] = {"gradients": walker.gradients(random_batch(2 * count, 10))}
            if count == 4 and not KINDS[kind].get("tied"):
                batches = [random_batch(2 * count, 10, seed=seed) for seed in range(STEPS)]
                answer["losses"] = [walker.step(batch).loss for batch in batches]
                answer["masters"] = masters(walker)
            answers.append(answer)
    return answers


def _unlike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> int:
    assert one.keys() == other.keys()
    return sum(not torch.equal(one[name], value) for name, value in other.items())


def exact(kind: str, stages: int) -> dict[str, Any]:
    """Compare one and two chunks a stage, by micro-batches, with one process: bits, and with tied
    ends the worst difference of a gradient, of its norm."""
    certified(deep(kind))
    single = dict(zip(COUNTS, walked(0, kind, 1, [("zero3", 1, n) for n in COUNTS]), strict=True))
    cases = [("zero3", chunks, count) for chunks, count in product((1, 2), COUNTS)]
    unlike = 0
    runs = 0
    runs_unlike = 0
    worst = 0.0
    for answers in run_ranks(stages, walked, kind, stages, cases, timeout=500):
        for (_, _, count), answer in zip(cases, answers, strict=True):
            reference = single[count]
            gradients = reference["gradients"]
            if KINDS[kind].get("tied"):
                changes = {k: (answer["gradients"][k] - v).norm() for k, v in gradients.items()}
                worst = max(worst, *(float(c / gradients[k].norm()) for k, c in changes.items()))
            else:
                unlike += _unlike(answer["gradients"], gradients)
            if "losses" in reference:
                runs += 1
                same = answer["losses"] == reference["losses"]
                runs_unlike += not same or _unlike(answer["masters"], reference["masters"]) > 0
    return {
        "combinations": len(cases),
        "unlike": unlike,
        "worst tied": worst,
        "runs": runs // stages,
        "runs unlike": runs_unlike,
    }


# ---- stages of ranks that share state and sequences ------------------------------------------

MIXED = tuple(KINDS)
_ROWS = ("zero3", "hzp", "fcdp", "zeropp", "mics")
_NO_PARTS = ("bloom", "qwen3_next")
"""Kinds whose sequences no ranks share parts of."""


def _gradients(rank: int, kind: str, stages: int, cases: list[tuple[str, int, int, int]]) -> Any:
    answers = []
    for row, chunks, count, context in cases:
        model = deep(kind, **NO_DROPOUT.get(kind, {}))
        with _walker(model, row, stages, chunks, count, context) as walker:
            answers.append(walker.gradients(random_batch(8, 10)))
    return answers


def mixed(kind: str) -> dict[str, Any]:
    """Compare two stages of two ranks, which share state or parts of sequences, with one process:
    the worst difference of a gradient, of its norm or a thousandth of the largest one's."""
    certified(deep(kind))
    alone = _gradients(0, kind, 1, [("zero3", 1, 8, 1)])[0]
    ways = (1,) if kind in _NO_PARTS else (1, 2)
    cases = [(row, chunks, 4, way) for row, chunks, way in product(_ROWS, (1, 2), ways)]
    largest = max(float(value.norm()) for value in alone.values())
    differences: dict[str, float] = {}
    for answers in run_ranks(4, _gradients, kind, 2, cases, timeout=500):
        for (row, chunks, _, way), gradients in zip(cases, answers, strict=True):
            assert gradients.keys() == alone.keys()
            title = f"{row}, {chunks} chunks, {'rows' if way == 1 else 'parts of rows'}"
            for name, value in alone.items():
                size = max(float(value.norm()), 1e-3 * largest)
                change = float((gradients[name] - value).norm()) / size
                differences[title] = max(differences.get(title, 0.0), change)
    return {
        "combinations": len(cases),
        "worst": max(differences.values()),
        "differences": differences,
    }


# ---- random plans ----------------------------------------------------------------------------


def seeds_of_four_ranks(count: int) -> dict[int, list[int]]:
    """Return the first so many seeds whose random plan takes four ranks, by its stages."""
    seeds: dict[int, list[int]] = {}
    seed = 0
    while sum(map(len, seeds.values())) < count:
        mesh = random_plan(random.Random(seed))[0].mesh
        if mesh.world == 4:
            seeds.setdefault(mesh.pipeline, []).append(seed)
        seed += 1
    return seeds


def _losses(rank: int, seeds: list[int], over_stages: bool) -> list[float]:
    """Return the losses of two steps under random plans, over stages or over as many ranks as one
    has."""
    losses = []
    for seed in seeds:
        plan, blocks = random_plan(random.Random(seed))
        mesh = plan.mesh
        count = plan.gradient_accumulation_steps
        model = tiny_model("llama", num_hidden_layers=mesh.pipeline * plan.pipeline.chunks * blocks)
        sizes = {
            "world": dist.get_world_size(),
            "ranks_per_node": dist.get_world_size(),
            "pipeline": mesh.pipeline if over_stages else 1,
        }
        settings: dict[str, Any] = {
            "gradient_accumulation_steps": count,
            "prefetch": plan.prefetch,
            "together": plan.together,
            "activation": str(plan.activation.tier),
            "recompute": plan.recompute,
            **CLIPPED,
        }
        if over_stages:
            settings["pipeline.chunks"] = plan.pipeline.chunks
            settings["pipeline.reuse"] = plan.pipeline.reuse
            settings["pipeline.shared_sums"] = plan.pipeline.shared_sums
        with Walker(model, method(plan.method, mesh=sizes, **settings), device="cpu") as walker:
            batches = [random_batch(2 * count, 8, seed=step) for step in range(2)]
            losses += [walker.step(batch).loss for batch in batches]
    return losses


def random_runs(stages: int, seeds: list[int]) -> dict[str, Any]:
    """Run random plans of four ranks, beside as many ranks as a stage has without stages."""
    certified(tiny_model("llama"))
    over = run_ranks(4, _losses, seeds, True, timeout=500)[0]
    alone = run_ranks(4 // stages, _losses, seeds, False, timeout=500)[0]
    worst = max(abs(a / b - 1) for a, b in zip(over, alone, strict=True))
    return {"plans": len(seeds), "worst": worst}
