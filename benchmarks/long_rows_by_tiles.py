"""Seconds of a step whose blocks are computed by tiles of the sequence, over those of the same step
computed whole, and the gradients of both; and seconds where tiles keep their graphs. Two blocks of
Qwen2.5-0.5B at true dimensions, random weights, a small vocabulary, so that blocks alone count. A
part of ``long_rows.py``."""

from __future__ import annotations

from collections.abc import Mapping
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
KEPT_TOKENS = 4096
KEPT_ROUNDS = 7
"""Tokens of the row, and rounds, where tiles keep their graphs."""
EXACT_TOKENS = 1024
ERROR = 1e-6
"""The largest difference of a gradient, relative to its norm, in float32."""
NO_LARGER = 1.1
"""Root mean squares of as many errors of rounding differ by so much, at most."""


def _walker(dtype: torch.dtype, **settings: Any) -> Walker:
    from transformers import AutoConfig, AutoModelForCausalLM

    few = {"num_hidden_layers": 2, "vocab_size": 4096}
    sizes = {**MODELS["Qwen2.5-0.5B"], **few}
    torch.manual_seed(0)
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    # the same weights in any dtype, to its rounding
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype)
    plan = method("mebp", **settings)
    lora = LoraSettings(rank=8, options={"init_lora_weights": False})
    return Walker(model, plan, lora=lora, device="cpu")


def _both(dtype: torch.dtype, tile: int | str, opened: ExitStack) -> dict[str, Walker]:
    """Return the walker that goes by tiles and the one that does not, with the same numbers."""
    tiles = {"tiled": tile, "whole": "off"}
    return {
        name: opened.enter_context(_walker(dtype, frozen="host × raw", sequence_tile=of))
        for name, of in tiles.items()
    }


def _gradients(figures: dict[str, Any]) -> Bound:
    """Compare the gradients of adapters in float32. Where one differs by more than :data:`ERROR`,
    those by tiles are to be as near to float64's as those of the whole."""
    tile = CASES[EXACT_TOKENS][0]
    case = f"gradients at {EXACT_TOKENS:,} tokens, float32"
    with ExitStack() as opened:
        walkers = _both(torch.float32, tile, opened)
        batch = random_batch(walkers["whole"].spec.vocab_size, 1, EXACT_TOKENS)
        tiled, whole = (walkers[name].gradients(batch) for name in ("tiled", "whole"))
        exactly = _walker(torch.float64, frozen="host × raw", sequence_tile="off")
        exact = opened.enter_context(exactly).gradients(batch)
    errors = {name: _difference(tiled[name], whole[name]) for name in whole}
    equal = sum(error == 0 for error in errors.values())
    worst = max(errors, key=lambda name: errors[name])
    figures["gradients"] = {"tensors": len(errors), "bit for bit": equal, worst: errors[worst]}
    print(f"gradients by tiles of {tile}: {figures['gradients']}", flush=True)
    if errors[worst] <= ERROR:
        return Bound(case, errors[worst], ERROR)
    ours, alone = (_root_mean_square(of, exact) for of in (tiled, whole))
    figures["gradients"] |= {"float64: by tiles": ours, "float64: whole": alone}
    print(f"  against float64: {ours:.2e} by tiles, {alone:.2e} whole", flush=True)
    name = f"{case}: {errors[worst]:.1e}; error against float64 over the whole's"
    return Bound(name, ours / alone, NO_LARGER)


def _root_mean_square(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """The root mean square of the tensors' errors."""
    errors = [_difference(gradients[name].double(), exact[name].double()) for name in exact]
    return float(torch.tensor(errors, dtype=torch.float64).square().mean().sqrt())


def _seconds(walker: Walker, batch: dict[str, Tensor]) -> float:
    return walker.step(batch).seconds


def _difference(tensor: Tensor, expected: Tensor) -> float:
    return float((tensor - expected).norm() / expected.norm())


def of_tiles(figures: dict[str, Any], tokens: int) -> list[Bound]:
    """Measure both in turn on rows of so many tokens, and return the bounds on them."""
    tile, limit, rounds = CASES[tokens]
    bounds = [_gradients(figures)] if tokens == EXACT_TOKENS else []
    case = f"{tokens:,} tokens by tiles: {tile}"
    with ExitStack() as opened:
        walkers = _both(torch.bfloat16, tile, opened)
        ratio = _in_turn(case, walkers, tokens, rounds, figures)
    return [*bounds, Bound(f"{case}, seconds over the whole's", ratio, limit)]


def of_kept(figures: dict[str, Any]) -> list[Bound]:
    """Measure blocks whose tiles keep their graphs, in turn with those that compute them again."""
    case = f"{KEPT_TOKENS:,} tokens, tiles keep their graphs"
    with ExitStack() as opened:
        walkers = {
            name: opened.enter_context(
                _walker(torch.bfloat16, frozen="disk × int4", recompute=recompute)
            )
            for name, recompute in {"kept": "none", "again": "all"}.items()
        }
        ratio = _in_turn(case, walkers, KEPT_TOKENS, KEPT_ROUNDS, figures)
    return [Bound(f"{case}, seconds over those that do not", ratio, 1.0)]


def _in_turn(
    case: str, walkers: dict[str, Walker], tokens: int, rounds: int, figures: dict[str, Any]
) -> float:
    """Take steps of both walkers in turn, and return the first one's seconds over the second's:
    the median of the rounds."""
    batch = random_batch(next(iter(walkers.values())).spec.vocab_size, 1, tokens)
    runs = {name: partial(_seconds, walker, batch) for name, walker in walkers.items()}
    interleaved(runs, 1)  # the first step makes what stays
    seconds = interleaved(runs, rounds)
    ratio = median([a / b for a, b in zip(*seconds.values(), strict=True)])
    figures[case] = {**seconds, "ratio": ratio}
    print(f"{case}: {seconds}, ratio {ratio:.3f}", flush=True)
    return ratio
