"""Codecs and lazily decoded linears: gigabytes a second, and seconds beside dense layers.

    python benchmarks/codecs.py [--threads N] [--json FILE] [--check]

Decoding is in cache (a chunk of 1 M elements over and over), in GB of output a second. A lazy
linear is compared with ``F.linear`` on a dense bf16 weight, calls taken in turn, each on another
copy of the weight so that neither finds it in cache, as in a walk; medians. ``--check`` exits with
1 where int4 decodes to bf16 under 40 GB/s and thread, or where a model's linears together take more
than 1.15 times the dense ones."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from blockwalk.numerics.codecs.codecs import decode_rows, encode_rows
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.weights import EncodedWeight
from blockwalk.numerics.lazy_linear import lazy_linear
from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.plan.placement import Codec
from tests.support.native import by

DECODE_BOUND = 40.0
LINEAR_BOUND = 1.15
MODELS = {
    "Qwen2.5-0.5B": (896, 128, 4864),
    "Qwen2.5-1.5B": (1536, 256, 8960),
    "Qwen2.5-3B": (2048, 256, 11008),
}
"""Hidden size, key and value size, intermediate size."""
TOKENS = 256
_COPIES_BYTES = 96 << 20


def seconds(calls: list[Callable[[], Any]], repeats: int = 9, inner: int = 1) -> list[float]:
    """Median seconds of each call, all of them in turn; the first round is not counted."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            for _ in range(inner):
                call()
            if repeat:
                taken.append((time.perf_counter() - start) / inner)
    return [statistics.median(taken) for taken in times]


def encoded(
    tensor: torch.Tensor, codec: Codec, group_size: int = 32
) -> tuple[torch.Tensor, Layout]:
    layout = Layout(
        tuple(tensor.shape), codec, str(tensor.dtype).removeprefix("torch."), group_size
    )
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    return encode_rows(tensor, buffer, layout, 0), layout


def decoding() -> list[dict[str, Any]]:
    """GB of output a second: all columns of some rows, and 128 columns of all rows (what backward
    asks for)."""
    results = []
    for codec, group in ((Codec.INT4, 32), (Codec.INT4, 64), (Codec.INT8, 32), (Codec.FP8, 32)):
        buffer, layout = encoded(torch.randn(1024, 1024), codec, group)
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            out = torch.empty(1024, 1024, dtype=dtype)
            part = torch.empty(1024, 128, dtype=dtype)

            def whole(
                buffer: torch.Tensor = buffer, layout: Layout = layout, out: torch.Tensor = out
            ) -> None:
                decode_rows(buffer, layout, 0, 1024, out)

            def columns(
                buffer: torch.Tensor = buffer, layout: Layout = layout, out: torch.Tensor = part
            ) -> None:
                decode_rows(buffer, layout, 0, 1024, out, columns=(256, 384))

            def plain(
                buffer: torch.Tensor = buffer, layout: Layout = layout, out: torch.Tensor = out
            ) -> None:
                by(False, decode_rows, buffer, layout, 0, 1024, out)

            taken = seconds([whole, columns], inner=20)
            (slow,) = seconds([plain], repeats=3)
            results.append(
                {
                    "codec": f"{codec}/{group}" if codec is Codec.INT4 else str(codec),
                    "dtype": str(dtype).removeprefix("torch."),
                    "rows_gb_per_s": out.nbytes / taken[0] / 1e9,
                    "columns_gb_per_s": part.nbytes / taken[1] / 1e9,
                    "torch_gb_per_s": out.nbytes / slow / 1e9,
                }
            )
    return results


def encoding() -> list[dict[str, Any]]:
    """Millions of float32 elements encoded a second, to nearest and stochastically."""
    x_RD = torch.randn(1024, 2048)
    key = NoiseKey(1, 1, 0, "weight", "rounding")
    results = []
    for codec in (Codec.BF16, Codec.FP16, Codec.FP8, Codec.INT8, Codec.INT4):
        layout = Layout(tuple(x_RD.shape), codec)
        out = torch.empty(layout.nbytes, dtype=torch.uint8)

        def nearest(layout: Layout = layout, out: torch.Tensor = out) -> None:
            encode_rows(x_RD, out, layout, 0)

        def stochastic(layout: Layout = layout, out: torch.Tensor = out) -> None:
            encode_rows(x_RD, out, layout, 0, rounding=key)

        seconds_taken = seconds(
            [nearest] if codec is Codec.INT4 else [nearest, stochastic], repeats=5
        )
        rates = [x_RD.numel() / each / 1e6 for each in seconds_taken]
        results.append(
            {
                "codec": str(codec),
                "nearest": rates[0],
                "stochastic": rates[1] if len(rates) > 1 else None,
            }
        )
    return results


def linears(group_size: int) -> list[dict[str, Any]]:
    """Milliseconds of each linear of a model, dense bf16 and lazy int4, forward and backward (dX
    alone)."""
    results = []
    for model, (hidden, kv, inner) in MODELS.items():
        shapes = {
            "q, o": (hidden, hidden, 2),
            "k, v": (kv, hidden, 2),
            "gate, up": (inner, hidden, 2),
        }
        shapes["down"] = (hidden, inner, 1)
        for layer, (n, d, count) in shapes.items():
            copies = min(-(-_COPIES_BYTES // (2 * n * d)), 64)
            w_ND = torch.randn(n, d, dtype=torch.bfloat16).div_(d**0.5)
            dense = [w_ND.clone() for _ in range(copies)]
            buffer, layout = encoded(w_ND, Codec.INT4, group_size)
            lazy = [EncodedWeight(buffer.clone(), layout, torch.bfloat16) for _ in range(copies)]
            x_PD = torch.randn(TOKENS, d, dtype=torch.bfloat16, requires_grad=True)
            grad_PN = torch.randn(TOKENS, n, dtype=torch.bfloat16)
            turn = iter(range(1 << 30))
            kept: list[torch.Tensor] = []

            def backward(
                x_PD: torch.Tensor = x_PD,
                grad_PN: torch.Tensor = grad_PN,
                kept: list[torch.Tensor] = kept,
            ) -> None:
                torch.autograd.grad(kept.pop(), x_PD, grad_PN)

            def dense_forward(
                x_PD: torch.Tensor = x_PD,
                dense: list[torch.Tensor] = dense,
                turn: Any = turn,
                kept: list[torch.Tensor] = kept,
            ) -> None:
                kept.append(F.linear(x_PD, dense[next(turn) // 2 % len(dense)]))

            def lazy_forward(
                x_PD: torch.Tensor = x_PD,
                lazy: list[EncodedWeight] = lazy,
                turn: Any = turn,
                kept: list[torch.Tensor] = kept,
            ) -> None:
                kept.append(lazy_linear(x_PD, lazy[next(turn) // 2 % len(lazy)]))

            taken = seconds([dense_forward, backward, lazy_forward, backward])
            names = ("dense_forward", "dense_backward", "lazy_forward", "lazy_backward")
            row: dict[str, Any] = {
                name: value * 1e3 for name, value in zip(names, taken, strict=True)
            }
            results.append({"model": model, "layer": layer, "shape": [n, d], "count": count} | row)
    return results


def totals(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each model, seconds of a block's linears, lazy over dense."""
    return {
        model: {
            way: sum(r["count"] * r[f"lazy_{way}"] for r in rows if r["model"] == model)
            / sum(r["count"] * r[f"dense_{way}"] for r in rows if r["model"] == model)
            for way in ("forward", "backward")
        }
        for model in MODELS
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    decoded = decoding()
    print("one thread, in cache   GB/s of output:  rows   columns   torch alone")
    for r in decoded:
        rates = f"{r['rows_gb_per_s']:9.1f} {r['columns_gb_per_s']:9.1f} {r['torch_gb_per_s']:9.1f}"
        print(f"  {r['codec']:8s} -> {r['dtype']:10s}           {rates}")
    torch.set_num_threads(args.threads)
    rates = encoding()
    print(
        f"\n{args.threads} threads           million elements encoded a second: nearest  stochastic"
    )
    for r in rates:
        print(
            f"  {r['codec']:8s} {r['nearest']:40.0f} "
            + (f"{r['stochastic']:10.0f}" if r["stochastic"] else "")
        )
    rows = linears(args.group_size)
    print(
        f"\n{args.threads} threads, {TOKENS} tokens, ms    dense forward, backward   lazy int4"
        " forward, backward"
    )
    for r in rows:
        dense, lazy = (
            f"{r[f'{k}_forward']:9.2f} {r[f'{k}_backward']:9.2f}" for k in ("dense", "lazy")
        )
        print(f"  {r['model']:13s} {r['layer']:9s} {r['shape']!s:14s} {dense}   {lazy}")
    ratios = totals(rows)
    for model, ratio in ratios.items():
        print(
            f"  {model}: lazy/dense {ratio['forward']:.3f} forward, {ratio['backward']:.3f}"
            " backward"
        )
    if args.json:
        result = {
            "threads": args.threads,
            "decoding": decoded,
            "encoding": rates,
            "linears": rows,
            "ratios": ratios,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if not args.check:
        return 0
    slow = [r for r in decoded if r["codec"].startswith("int4") and r["dtype"] == "bfloat16"]
    missed = [
        f"{r['codec']} decodes at {r['rows_gb_per_s']:.1f} GB/s"
        for r in slow
        if r["rows_gb_per_s"] < DECODE_BOUND
    ]
    missed += [
        f"{m} {w}: {v:.3f}"
        for m, each in ratios.items()
        for w, v in each.items()
        if v > LINEAR_BOUND
    ]
    print("\n".join(["missed:", *missed]) if missed else "all bounds hold")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
