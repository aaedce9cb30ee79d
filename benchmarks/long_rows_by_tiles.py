"""Seconds of a step whose blocks are computed by tiles of the sequence, over those of the same step
computed whole; and the gradients of both. Two blocks of Qwen2.5-0.5B at true dimensions, random
weights, a small vocabulary, so that blocks alone count. A part of ``long_rows.py``."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from benchmarks.common import Bound, interleaved, median, random_batch
from benchmarks.common_models import MODELS
from torch import Tensor

from blockwalk import Walker, method
from blockwalk.plan.choices import LoraSettings

CASES = {1024: (512, 1.05, 21), 8192: ("auto", 1.10, 5)}
"""Tokens of a row: the tile, the most that tiles may take of the whole's seconds, and rounds."""
EXACT_TOKENS = 1024
ERROR = 1e-6
"""The largest difference of a gradient, relative to its norm, in float32."""


def _walker(dtype: torch.dtype, tile: int | str) -> Walker:
    from transformers import AutoConfig, AutoModelForCausalLM

    few = {"num_hidden_layers": 2, "vocab_size": 4096}
    settings = {**MODELS["Qwen2.5-0.5B"], **few}
    torch.manual_seed(0)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plan = method("mebp", frozen="host × raw", sequence_tile=tile)
    lora = LoraSettings(rank=8, options={"init_lora_weights": False})
    return Walker(model, plan, lora=lora, device="cpu")


def _both(dtype: torch.dtype, tile: int | str, opened: ExitStack) -> dict[str, Walker]:
    """Return the walker that goes by tiles and the one that does not, with the same numbers."""
    settings = {"tiled": tile, "whole": "off"}
    return {name: opened.enter_context(_walker(dtype, of)) for name, of in settings.items()}


def _gradients(figures: dict[str, Any]) -> Bound:
    """Compare the gradients of adapters in float32."""
    tile = CASES[EXACT_TOKENS][0]
    with ExitStack() as opened:
        walkers = _both(torch.float32, tile, opened)
        batch = random_batch(walkers["whole"].spec.vocab_size, 1, EXACT_TOKENS)
        tiled, whole = (walkers[name].gradients(batch) for name in ("tiled", "whole"))
    errors = {name: _difference(tiled[name], whole[name]) for name in whole}
    equal = sum(error == 0 for error in errors.values())
    worst = max(errors, key=lambda name: errors[name])
    figures["gradients"] = {"tensors": len(errors), "bit for bit": equal, worst: errors[worst]}
    print(f"gradients by tiles of {tile}: {figures['gradients']}", flush=True)
    return Bound(f"gradients at {EXACT_TOKENS:,} tokens, float32", errors[worst], ERROR)


def _seconds(walker: Walker, batch: dict[str, Tensor]) -> float:
    return walker.step(batch).seconds


def _difference(tensor: Tensor, expected: Tensor) -> float:
    return float((tensor - expected).norm() / expected.norm())


def of_tiles(figures: dict[str, Any], tokens: int) -> list[Bound]:
    """Measure both in turn on rows of so many tokens, and return the bounds on them."""
    tile, limit, rounds = CASES[tokens]
    bounds = [_gradients(figures)] if tokens == EXACT_TOKENS else []
    with ExitStack() as opened:
        walkers = _both(torch.bfloat16, tile, opened)
        batch = random_batch(walkers["whole"].spec.vocab_size, 1, tokens)
        runs = {name: partial(_seconds, walker, batch) for name, walker in walkers.items()}
        interleaved(runs, 1)  # the first step makes what stays
        seconds = interleaved(runs, rounds)
    ratio = median([a / b for a, b in zip(seconds["tiled"], seconds["whole"], strict=True)])
    case = f"{tokens:,} tokens by tiles: {tile}"
    figures[case] = {**seconds, "ratio": ratio}
    print(f"{case}: {seconds}, ratio {ratio:.3f}", flush=True)
    return [*bounds, Bound(f"{case}, seconds over the whole's", ratio, limit)]
