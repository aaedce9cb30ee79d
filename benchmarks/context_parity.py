"""Ranks that hold parts of sequences, beside one process: losses and every gradient, in float32.

    python benchmarks/context_parity.py [--worlds 2 4] [--kinds llama …] [--check] [--json FILE]

Each kind of model × way × {all parameters, LoRA} × {padded, packed}, over two and four ranks, with
parts over all of them and over two; the five methods that share weights take turns. The oracle is
the model's own forward and autograd on every document by itself, in float32 and in float64. A case
whose gradients differ by more than 1e-6 is looked at again: on 16 other batches the errors of its
gradients against float64 are to be no larger than one process's own in float32."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Bound, finish, parser

from tests.support.rows_in_parts import (
    KINDS,
    TOLERANCE,
    Case,
    errors,
    errors_against_float64,
)

METHODS = ("hzp", "fcdp", "zero3", "zeropp", "mics")
SECONDS = 2400
"""The time that the ranks of one world may take."""
SEEDS = range(100, 116)
"""Of the batches on which a case is looked at again."""
NO_LARGER = 1.1
"""Root mean squares of as many errors of rounding differ by so much, at most."""


def cases_of(world: int, kinds: list[str]) -> list[Case]:
    methods = itertools.cycle(METHODS)
    counts = [count for count in (2, 4) if count <= world]
    rows = itertools.product(kinds, (False, True), ("keys", "heads"), counts)
    return [(kind, lora, next(methods), way, count) for kind, lora, way, count in rows]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--worlds", nargs="+", type=int, default=[2, 4])
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    arguments = options.parse_args()
    figures: dict[str, Any] = {}
    bounds = []
    for world in arguments.worlds:
        cases = cases_of(world, arguments.kinds)
        for case, found in zip(cases, errors(world, cases, timeout=SECONDS), strict=True):
            kind, lora, name, way, count = case
            tuned = "LoRA" if lora else "full"
            title = f"{kind}, {tuned}, {way}, {count} parts over {world} ranks, {name}"
            figures[title] = found
            worst = max(found, key=lambda figure: found[figure])
            print(f"{title}: {found[worst]:.1e} ({worst})", flush=True)
            if found[worst] <= TOLERANCE or not worst.endswith("gradients"):
                bounds.append(Bound(title, found[worst], TOLERANCE))
                continue
            ours, alone = errors_against_float64(world, case, SEEDS, timeout=SECONDS)
            figures[title] = {**found, "float64: ranks": ours, "float64: one process": alone}
            print(f"  against float64: {ours:.2e}, one process {alone:.2e}", flush=True)
            name = f"{title}: {found[worst]:.1e}; error against float64 over one process's"
            bounds.append(Bound(name, ours / alone, NO_LARGER))
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()
