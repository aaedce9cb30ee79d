"""Accuracy against forward passes and seconds: exact gradients beside zeroth order, on the
project's own small model.

All parameters of ``examples/tiny-llama`` are trained in float32 on its sentiment task, every method
on the same batches. Each method's learning rate is the one of its ``rates`` whose short run with
seed 0 ends with the lowest held-out loss; then three seeds at that rate. A forward pass is counted
on one batch: two for each pair of two-point SPSA, N + 1 for FZOO, 2q + 1 for HiZOO; exact gradients
count four (the forward, its recomputation, and a backward of twice a forward). The gap is between
the model as it came and the best that exact gradients reach.

Every run is written to ``--results`` when it ends, and one that is there is not repeated: a
benchmark of many minutes can be done in pieces (``--minutes``: start no run after so many). Runs
are ``--jobs`` processes of one thread each.

    python benchmarks/zo_converge.py [--forwards 1000] [--seeds 0 1 2] [--minutes 5] [--plot
    FILE.svg] [--check]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.common import Bound, finish, machine, parser
from benchmarks.zo_converge_plot import draw

from blockwalk import Plan, Walker, method
from blockwalk.data.batching import Batches
from blockwalk.data.corpus import asks_of
from blockwalk.data.dataset import Choices
from blockwalk.data.encode import encode_choices
from blockwalk.data.sources import read_records
from blockwalk.data.tokenizer import load_tokenizer
from blockwalk.plan.run_config import DataSettings
from blockwalk.train.evaluation import HeldOut

ROOT = Path(__file__).resolve().parents[1]
DATA = DataSettings(
    train=str(ROOT / "examples/data/sentiment_train.jsonl"),
    eval=str(ROOT / "examples/data/sentiment_heldout.jsonl"), template="{text} It was {label}.",
    label_words=("terrible", "great"), max_length=128,
)  # fmt: skip
EXACT = "exact (mebp)"
SHARE = 0.5
"""Of the gap that exact gradients close, zeroth order must close at least this."""


RESULTS = ROOT / "benchmarks/results/zo_converge.json"


@dataclass(frozen=True)
class Case:
    """One method, the forward passes of its steps, and the learning rates that are tried."""

    method: str
    forwards: int
    rates: tuple[float, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0
    """Of ``--forwards`` that it runs: exact gradients need fewer."""

    def plan(self, rate: float, seed: int) -> Plan:
        """The plan, with everything on the device, and in float32 unless the case says otherwise:
        neither method is to begin from rounded weights."""
        usual = {"frozen": "device", "trainable": "device × fp32", "compute_dtype": "float32"}
        optimizer = {"learning_rate": rate, **self.settings.get("optimizer", {})}
        return method(self.method, seed=seed, **{**usual, **self.settings, "optimizer": optimizer})


CASES: dict[str, Case] = {
    EXACT: Case("mebp", 4, (1e-4,), {"optimizer": {"name": "adamw"}}, share=0.3),
    "two-point": Case("mezo", 2, (3e-5, 6e-5, 1.2e-4), {"zo": {"epsilon": 1e-3}}),
    "q = 4": Case("mezo", 8, (1e-4, 2e-4, 4e-4), {"zo": {"epsilon": 1e-3, "queries": 4}}),
    "FZOO": Case(
        "mezo",
        9,
        (3e-4, 1e-3, 3e-3),
        {"zo": {"kind": "fzoo", "queries": 8, "epsilon": 1e-3, "noise": "rademacher"}},
    ),
    "HiZOO": Case(
        "mezo",
        3,
        (3e-5, 6e-5, 1.2e-4),
        {"zo": {"kind": "hizoo", "epsilon": 1e-3, "hessian_alpha": 1e-8}},
    ),
}
METHODS = tuple(CASES)
"""The cases that are run unless others are named; the rest are variants of theirs."""


TWO_POINT = (2.4e-4, 4.8e-4)


def bfloat16(rounding: str) -> Case:
    """Two-point with masters and forwards in 16 bits."""
    places = {"trainable": "device × bf16", "compute_dtype": "bfloat16"}
    return Case("mezo", 2, TWO_POINT, {"zo": {"epsilon": 1e-3, "rounding": rounding}, **places})


def scales(codec: str, epsilon: float, rates: tuple[float, ...], clip: float = 0.0) -> Case:
    """Two-point on the scales of weights in 4 or 8 bits."""
    clipped = {"optimizer": {"max_grad_norm": clip}}
    return Case(
        "mezo",
        2,
        rates,
        {
            "zo": {"epsilon": epsilon, "target": "scales"},
            "trainable": f"device × {codec}",
            **clipped,
        },
    )


CASES |= {
    "Gaussian": Case("mezo", 2, TWO_POINT, {"zo": {"epsilon": 1e-3}}),
    "Rademacher": Case("mezo", 2, TWO_POINT, {"zo": {"epsilon": 1e-3, "noise": "rademacher"}}),
    "low rank": Case(
        "mezo", 2, TWO_POINT, {"zo": {"epsilon": 1e-3, "noise": "lowrank", "noise_rank": 4}}
    ),
    "64 directions": Case("mezo", 2, TWO_POINT, {"zo": {"epsilon": 1e-3, "seed_pool": 64}}),
    "scales, int8": scales("int8", 1e-5, (1e-8, 3e-8)),
    "scales, int4": scales("int4", 1e-4, (1e-6, 1e-5)),
    "int4, clipped": scales("int4", 1e-4, (1e-5,), clip=50.0),
    "bf16": bfloat16("nearest"),
    "bf16 stoch.": bfloat16("stochastic"),
}


@dataclass(frozen=True)
class Run:
    """What one run is: found again in the results by this."""

    case: str
    rate: float
    seed: int
    forwards: int
    points: int
    batch: int
    held_out: int

    @property
    def name(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in asdict(self).items())


@dataclass(frozen=True)
class Curve:
    """Held-out accuracy and loss of one run, against forward passes on one batch and against
    seconds of its steps."""

    forwards: list[int]
    seconds: list[float]
    accuracy: list[float]
    loss: list[float]


def task(held_out: int) -> tuple[Choices, HeldOut]:
    """Training records, and the held-out ones that are looked at (0: all)."""
    tokenizer = load_tokenizer(ROOT / "examples/tiny-llama")
    template = asks_of(DATA)
    assert template is not None
    rows = encode_choices(read_records(DATA.train), tokenizer, template, max_length=DATA.max_length)
    records = list(read_records(DATA.eval))[: held_out or None]
    return rows, HeldOut(
        encode_choices(records, tokenizer, template, max_length=DATA.max_length), 64, DATA
    )


def train(run: Run, device: str) -> Curve:
    """One run, measured before its first step and then ``points`` times at equal distances; in a
    process of one thread."""
    torch.set_num_threads(1)
    case = CASES[run.case]
    rows, held_out = task(run.held_out)
    batches = Batches(rows.answered(), run.batch, seed=run.seed, padding_multiple=8)
    steps = max(1, int(run.forwards * case.share) // case.forwards)
    marks = {max(1, round(steps * (i + 1) / run.points)) for i in range(run.points)}
    curve = Curve([], [], [], [])
    with Walker(
        ROOT / "examples/tiny-llama", case.plan(run.rate, run.seed), device=device
    ) as walker:

        def measure(step: int, seconds: float) -> None:
            evaluation = held_out.evaluate(walker)
            assert evaluation.accuracy is not None
            curve.forwards.append(step * case.forwards)
            curve.seconds.append(seconds)
            curve.accuracy.append(evaluation.accuracy)
            curve.loss.append(evaluation.loss)

        measure(0, 0.0)
        seconds = 0.0
        for step in range(1, steps + 1):
            seconds += walker.step(next(batches)).seconds
            if step in marks:
                measure(step, seconds)
    return curve


def complete(
    runs: list[Run], found: dict[str, Curve], arguments: argparse.Namespace, until: float
) -> list[Run]:
    """Do what is missing among ``runs`` and write each to the results when it ends; answers what
    time did not allow."""
    waiting = [run for run in runs if run.name not in found]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        started: dict[Any, Run] = {}
        while started or (waiting and time.monotonic() < until):
            while waiting and len(started) < arguments.jobs and time.monotonic() < until:
                run = waiting.pop(0)
                started[pool.submit(train, run, arguments.device)] = run
            future = next(as_completed(started))
            run = started.pop(future)
            curve = found[run.name] = future.result()
            write(found, arguments.results)
            print(
                f"{run.case:<13} rate {run.rate:<8g} seed {run.seed}  {curve.forwards[-1]:>5}"
                f" forwards {curve.seconds[-1]:>6.1f} s  accuracy {100 * curve.accuracy[-1]:.1f}%"
                f"  loss {curve.loss[-1]:.3f}",
                flush=True,
            )
    return waiting


def read(path: Path) -> dict[str, Curve]:
    if not path.exists():
        return {}
    return {name: Curve(**values) for name, values in json.loads(path.read_text())["runs"].items()}


def write(found: dict[str, Curve], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            {"machine": machine(), "runs": {n: asdict(c) for n, c in found.items()}}, indent=1
        )
        + "\n"
    )


def worth(name: str, curves: dict[str, list[Curve]]) -> float:
    """Steps of a method that bring held-out loss as far as one step with exact gradients: as many
    as it ran, over those after which the mean loss of exact gradients, by interpolation, was where
    the method's ended."""
    end = statistics.fmean(curve.loss[-1] for curve in curves[name])
    exact = [
        statistics.fmean(losses)
        for losses in zip(*(curve.loss for curve in curves[EXACT]), strict=True)
    ]
    steps = [forwards / CASES[EXACT].forwards for forwards in curves[EXACT][0].forwards]
    after = next((i for i, loss in enumerate(exact) if loss <= end), None)
    if not after:
        return float("nan")
    part = (exact[after - 1] - end) / (exact[after - 1] - exact[after])
    reached = steps[after - 1] + part * (steps[after] - steps[after - 1])
    return curves[name][0].forwards[-1] / CASES[name].forwards / reached


def table(curves: dict[str, list[Curve]], rates: dict[str, float]) -> list[Bound]:
    """Print what was found, and answer the bounds."""
    ends = "accuracy at the end, by seed"
    print(
        f"{'method':<13} {'rate':>6} {'forwards':>9} {'seconds':>8} {ends:<29} {'loss':>6}"
        f" {'best mean':>9} {'of gap':>7} {'steps an exact one':>19}"
    )
    closed: dict[str, float] = {}
    bounds: list[Bound] = []
    for name, runs in curves.items():
        best = max(
            statistics.fmean(values)
            for values in zip(*(curve.accuracy for curve in runs), strict=True)
        )
        closed[name] = best - runs[0].accuracy[0]
        share = closed[name] / closed[EXACT] if closed.get(EXACT) else float("nan")
        ends = "  ".join(f"{100 * curve.accuracy[-1]:.1f}%" for curve in runs)
        seconds = statistics.fmean(curve.seconds[-1] for curve in runs)
        loss = statistics.fmean(curve.loss[-1] for curve in runs)
        steps = worth(name, curves) if EXACT in curves else float("nan")
        print(
            f"{name:<13} {rates[name]:>6g} {runs[0].forwards[-1]:>9} {seconds:>8.1f} {ends:<29}"
            f" {loss:>6.3f} {100 * best:>8.1f}% {share:>7.2f} {steps:>19.1f}"
        )
        if name != EXACT and EXACT in curves:
            bounds.append(
                Bound(
                    f"{name}: share of the gap that exact gradients close",
                    share,
                    SHARE,
                    at_most=False,
                )
            )
    return bounds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--case", nargs="+", choices=list(CASES), default=METHODS)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--forwards", type=int, default=1000, help="forward passes of a run")
    options.add_argument(
        "--sweep-forwards", type=int, default=480, help="of the runs that choose the learning rate"
    )
    options.add_argument(
        "--points", type=int, default=5, help="times that accuracy is measured in a run"
    )
    options.add_argument("--batch", type=int, default=16)
    options.add_argument(
        "--held-out", type=int, default=0, help="held-out records that are looked at; 0: all"
    )
    options.add_argument("--device", default="cpu")
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="start no run after so many; the rest another time",
    )
    options.add_argument("--results", type=Path, default=RESULTS, help="where runs are kept")
    options.add_argument("--plot", type=Path, help="write the curves here as SVG")
    arguments = options.parse_args()
    if not (ROOT / "examples/tiny-llama").exists():
        raise SystemExit(
            "examples/tiny-llama is not there; make it with: python examples/build_tiny.py"
        )
    until = time.monotonic() + 60 * arguments.minutes
    found = read(arguments.results)

    def run(case: str, rate: float, seed: int, forwards: int, points: int) -> Run:
        return Run(case, rate, seed, forwards, points, arguments.batch, arguments.held_out)

    sweeps = {
        name: [run(name, rate, 0, arguments.sweep_forwards, 1) for rate in CASES[name].rates]
        for name in arguments.case
    }
    remaining = complete(
        [each for tried in sweeps.values() if len(tried) > 1 for each in tried],
        found,
        arguments,
        until,
    )
    if remaining:
        raise SystemExit(f"{len(remaining)} runs of the sweep are left: run this again")

    def best_rate(runs: list[Run]) -> float:
        if len(runs) == 1:
            return runs[0].rate
        return min(runs, key=lambda run: found[run.name].loss[-1]).rate

    rates = {name: best_rate(runs) for name, runs in sweeps.items()}
    finals = {
        name: [
            run(name, rates[name], seed, arguments.forwards, arguments.points)
            for seed in arguments.seeds
        ]
        for name in arguments.case
    }
    remaining = complete(
        [each for runs in finals.values() for each in runs], found, arguments, until
    )
    if remaining:
        raise SystemExit(f"{len(remaining)} runs are left: run this again")
    curves = {name: [found[each.name] for each in runs] for name, runs in finals.items()}
    bounds = table(curves, rates)
    if arguments.plot:
        arguments.plot.write_text(draw(curves))
    finish(
        arguments,
        {name: [asdict(curve) for curve in runs] for name, runs in curves.items()},
        bounds,
    )


if __name__ == "__main__":
    main()
