"""Causal attention in bfloat16 on a processor: our kernel beside torch's, and a step with and
without it.

    python benchmarks/attention.py [--json FILE]
    python benchmarks/attention.py --model FOLDER --data FILE.jsonl [--json FILE]

Calls are taken in turn, forward and backward apart; figures are medians of rounds, ratios medians
of those of single rounds. torch computes what the walk would ask of it: rows of one length by its
kernel for causal attention, documents side by side each by itself. With ``--model`` a step of LoRA
in ``mebp`` is taken in turn with our kernel and without, on the same records."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from benchmarks.common import finish, median, parser
from torch import Tensor

from blockwalk.numerics import causal_attention

SHAPES = {
    "4 × 512": (4, 9, 512, 64),
    "1 × 2,048": (1, 9, 2048, 64),
    "8 documents of 150": (8, 9, 150, 64),
}
"""Rows, heads, tokens, features of a head."""
ROUNDS = 15
WARM = 2
STEPS = 12


def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return causal_attention.attention(query, key, value, causal_attention.rows(query))


def torchs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def forward_and_backward(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], shape: tuple[int, ...]
) -> tuple[float, float]:
    """Return the seconds of one forward and of one backward on random numbers."""
    inputs = [torch.randn(shape).to(torch.bfloat16).requires_grad_() for _ in range(3)]
    gradient = torch.randn(shape).to(torch.bfloat16)
    began = time.perf_counter()
    out = attend(*inputs)
    middle = time.perf_counter()
    out.backward(gradient)
    return middle - began, time.perf_counter() - middle


def kernels() -> dict[str, Any]:
    """Print and return milliseconds of each shape."""
    figures: dict[str, Any] = {}
    print("shape                 ours: forward, backward ms   torch: forward, backward ms   ratio")
    for name, shape in SHAPES.items():
        taken: dict[str, list[tuple[float, float]]] = {"ours": [], "torch": []}
        for _ in range(ROUNDS + 1):
            taken["ours"].append(forward_and_backward(ours, shape))
            taken["torch"].append(forward_and_backward(torchs, shape))
        rounds = {side: found[1:] for side, found in taken.items()}
        milliseconds = {
            side: [1e3 * median([pair[part] for pair in found]) for part in (0, 1)]
            for side, found in rounds.items()
        }
        pairs = zip(rounds["ours"], rounds["torch"], strict=True)
        ratio = median([sum(mine) / sum(theirs) for mine, theirs in pairs])
        figures[name] = {**milliseconds, "ratio": ratio}
        mine = milliseconds["ours"]
        theirs = milliseconds["torch"]
        print(
            f"{name:20s} {mine[0]:14.1f} {mine[1]:9.1f} {theirs[0]:20.1f} {theirs[1]:9.1f}"
            f" {ratio:13.2f}"
        )
    return figures


def steps(model: Path, data: Path) -> dict[str, Any]:
    """Print and return the seconds of a step of LoRA with the kernel and without, in turn."""
    from benchmarks.step_profile import opened
    from benchmarks.vs_peft import batches

    fits = causal_attention.fits
    figures: dict[str, Any] = {}
    with opened(str(model)) as walker:
        batch_of = batches(str(model), walker.spec.vocab_size, 4, 512, data)

        def step(number: int, *, with_kernel: bool) -> float:
            causal_attention.fits = fits if with_kernel else (lambda *tensors: False)
            batch = batch_of(number)
            began = time.perf_counter()
            walker.step(batch)
            return time.perf_counter() - began

        seconds: dict[str, list[float]] = {"with": [], "without": []}
        for number in range(WARM + STEPS):
            # whoever goes first finds nothing of this length
            for side in sorted(seconds, reverse=bool(number % 2)):
                taken = step(number, with_kernel=side == "with")
                if number >= WARM:
                    seconds[side].append(taken)
    causal_attention.fits = fits
    ratio = median([w / n for w, n in zip(seconds["with"], seconds["without"], strict=True)])
    figures = {side: median(found) for side, found in seconds.items()}
    print(f"a step of {model.name}, 4 × ≤ 512: {figures['with']:.2f} s with the kernel,")
    print(f"  {figures['without']:.2f} s without, {ratio:.2f} of it")
    return {**figures, "ratio": ratio}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, help="folder of a real model")
    options.add_argument("--data", type=Path, help="JSON lines of its data")
    arguments = options.parse_args()
    figures: dict[str, Any] = {"kernels": kernels()}
    if arguments.model:
        figures["step"] = steps(arguments.model, arguments.data)
    finish(arguments, figures, [])


if __name__ == "__main__":
    main()
