"""Several GPUs, a rank each: DistZO2 (OPT dimensions, fp16, 4 × 2048), or first order sharded:
memory, speed, the same numbers.

Every case is a program of its own under torchrun; rank 0 prints what it found. The scalars of every
step, of which all updates are made, are compared with those of one process that cuts the batch the
same way, and the ranks' weights with each other by checksum. Where ranks outnumber the GPUs they
share them over gloo, and no speed is claimed.

    benchmarks/gpu_dist.sh [--model OPT-1.3B ...] [--steps 5] [--dtype float16] [--slice 0]
                           [--check] [--json FILE]
    benchmarks/gpu_sharded.sh [--model Qwen2.5-1.5B ...]
    benchmarks/gpu_dist.sh --device cpu --tiny     # the script itself, end to end
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from blockwalk.ranks import place

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from benchmarks.common import Bound, finish, machine, median, parser, random_store
from benchmarks.zo_runs import stepper

from blockwalk import Walker, method
from blockwalk.numerics.device import chosen, is_cpu
from blockwalk.plan.placement import Codec
from blockwalk.ranks import launch

RESULTS = Path(__file__).resolve().parent / "results"
CASES: dict[str, tuple[str, dict[str, int]]] = {
    "mezo": ("mezo", {}),
    "zo2": ("zo2", {}),
    "zo2, batch in 2": ("zo2", {}),
    "perturb 2": ("distzo2", {"perturb": 2}),
    "data 2": ("distzo2", {"data": 2}),
    "2 × 2": ("distzo2", {"data": 2, "perturb": 2}),
}
"""Method and mesh; the paper's columns, and one process that cuts the batch as two ranks do."""
SHARDED: dict[str, tuple[str, dict[str, int]]] = {
    "plain, batch in 2": ("plain", {}),
    **{
        f"{name} {world}": (name, {"world": world})
        for name in ("zero3", "zeropp", "mics", "fcdp", "hzp")
        for world in (2, 4, 8)
    },
}
"""The same of first order: every rank has the same number of sequences, and losses are those of one
process to rounding."""
LOSSES = 1e-3
"""The relative difference of losses in bfloat16 whose sums are in another order."""
# tokens a second on H20: mezo, zo2, perturb 2, data 2, 2 × 2 (Wang et al. 2025, DistZO2, table 1)
PUBLISHED = {
    "OPT-1.3B": (18720, 18625, 34225, 31585, 60091),
    "OPT-6.7B": (4133, 4133, 7653, 7062, 14417),
    "OPT-30B": (976, 976, 1820, 1661, 3221),
}


def ranks_of(case: str) -> int:
    mesh = {**CASES, **SHARDED}[case][1]
    return mesh.get("world", 1) * mesh.get("data", 1) * mesh.get("perturb", 1)


def worker(arguments: argparse.Namespace) -> None:
    """One case on this rank; rank 0 prints its figures."""
    rank_place = place.place()
    name, mesh = {**CASES, **SHARDED}[arguments.worker]
    sharded = arguments.worker in SHARDED
    with launch.joined(rank_place, Path(arguments.output), 300.0):
        settings: dict[str, Any] = {"frozen": "host", "trainable": "host"} if "zo2" in name else {}
        if sharded:
            settings = {"compute_dtype": "bfloat16"}
        if rank_place.world > 1:
            settings["mesh"] = {"world": rank_place.world, **mesh}
            if name == "distzo2":
                settings["trainable"] = f"host × raw × {'node' if arguments.slice else 'nobody'}"
        if "batch in 2" in arguments.worker:
            settings["gradient_accumulation_steps"] = 2
        store = random_store(
            arguments.model[0], Codec.RAW, "float32" if sharded else arguments.dtype
        )
        batch = arguments.batch * (
            max(rank_place.world, 2) if sharded else 1
        )  # of all ranks together
        with Walker(store, method(name, seed=1, **settings), device=arguments.device) as walker:
            losses: list[float] = []
            taken = walker.step
            walker.step = lambda *given, **options: losses.append(taken(*given, **options).loss)  # type: ignore[assignment, method-assign, func-returns-value]
            step = stepper(walker, batch, arguments.seq)
            step()
            on_device = walker.device.type != "cpu"
            if on_device:
                torch.accelerator.reset_peak_memory_stats()
            seconds = [step() for _ in range(arguments.steps)]
            peak = torch.accelerator.max_memory_allocated() if on_device else 0
            numbers = losses if sharded else walker.estimator.entries  # type: ignore[union-attr]
            scalars = hashlib.sha256(repr(numbers).encode()).hexdigest()
            everyone: list[Any] = [scalars]
            if rank_place.world > 1:
                everyone = [None] * rank_place.world
                dist.all_gather_object(everyone, scalars)
                walker.flush()
                if not sharded:
                    walker.ranks.compare_copies(
                        walker.steps_done, walker.engine.sums_of_copies(), "its ledger"
                    )
            found = {
                "tokens_per_s": batch * arguments.seq / median(seconds),
                "peak_MB": peak / 1e6,
                "scalars": scalars,
                "losses": losses,
                "ranks that agree": everyone.count(scalars),
            }
        if rank_place.rank == 0:
            print(json.dumps(found), flush=True)


def run(case: str, name: str, arguments: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """A case in processes of its own: rank 0's figures."""
    ranks = ranks_of(case)
    before = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else []
    )
    command = [
        sys.executable,
        *before,
        __file__,
        "--worker",
        case,
        "--model",
        name,
        "--dtype",
        arguments.dtype,
    ]
    command += [
        "--batch",
        str(arguments.batch),
        "--seq",
        str(arguments.seq),
        "--steps",
        str(arguments.steps),
    ]
    command += ["--slice", str(arguments.slice), "--output", str(logs)]
    command += ["--device", arguments.device] if arguments.device else []
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        return {"error": process.stderr.strip()[-2000:]}
    report: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return report


def measure(
    name: str, arguments: argparse.Namespace, logs: Path
) -> tuple[dict[str, Any], list[Bound]]:
    """All cases of one model that this machine has devices for; two ranks in any case."""
    devices = 0 if is_cpu(chosen(arguments.device)) else torch.accelerator.device_count()
    cases = SHARDED if arguments.family == "sharded" else CASES
    rows = {
        case: run(case, name, arguments, logs)
        for case in cases
        if ranks_of(case) <= max(devices, 2)
    }
    bounds = []
    for case, row in rows.items():
        ranks = ranks_of(case)
        alone = "zo2, batch in 2" if "data" in cases[case][1] else "zo2"
        alone = "plain, batch in 2" if cases is SHARDED else alone
        shared = ranks > devices
        speed = "" if ranks > 1 and shared else f"{row.get('tokens_per_s', float('nan')):>10.1f}"
        print(
            f"{name:<9} {case:<16} {row.get('peak_MB', float('nan')):>9.0f} {speed:>10}"
            f" {row.get('error', '')}",
            flush=True,
        )
        if ranks == 1 or "error" in row or "error" in rows[alone]:
            bounds += [Bound(f"{name}, {case}: ran", 0, 1, at_most=False)] if "error" in row else []
            continue
        if cases is SHARDED and ranks == 2:  # the global batch that the one process had
            off = max(
                abs(a / b - 1) for a, b in zip(row["losses"], rows[alone]["losses"], strict=True)
            )
            bounds.append(
                Bound(
                    f"{name}, {case}: losses by one process's",
                    off,
                    LOSSES,
                    rests="bfloat16, another order",
                )
            )
        if cases is SHARDED:
            bounds.append(
                Bound(
                    f"{name}, {case}: ranks that agree",
                    row["ranks that agree"],
                    ranks,
                    at_most=False,
                )
            )
            continue
        same = row["ranks that agree"] * (row["scalars"] == rows[alone]["scalars"])
        bounds.append(
            Bound(f"{name}, {case}: ranks with one process's ledger", same, ranks, at_most=False)
        )
        if not shared and name in PUBLISHED and case in ("perturb 2", "data 2"):
            ratio = row["tokens_per_s"] / rows["zo2"]["tokens_per_s"]
            one = PUBLISHED[name][1]
            two = PUBLISHED[name][2 if case == "perturb 2" else 3]
            bounds.append(
                Bound(
                    f"{name}, {case}: speed-up, the published one", ratio, two / one, at_most=False
                )
            )
    return rows, bounds


def main() -> None:
    arguments = options()
    if arguments.worker:
        worker(arguments)
        return
    device = chosen(arguments.device)
    if is_cpu(device) and not arguments.tiny:
        raise SystemExit(
            f"torch {torch.__version__} sees no accelerator here; --device cpu --tiny tries the"
            " script itself"
        )
    if arguments.tiny:
        arguments.model = ["OPT-tiny"]
        arguments.seq = 32
        arguments.steps = 2
        arguments.dtype = "float32"
    arguments.results.mkdir(parents=True, exist_ok=True)
    gpu = (
        "cpu"
        if is_cpu(device)
        else machine()["accelerators"][0].replace(" ", "-").replace("/", "-")
    )
    gpu += "-sharded" if arguments.family == "sharded" else "-dist"
    print(f"{'model':<9} {'case':<16} {'peak MB':>9} {'tokens/s':>10}")
    figures: dict[str, Any] = {}
    bounds: list[Bound] = []
    for name in arguments.model:
        figures[name], added = measure(name, arguments, arguments.results / f"{gpu}-logs")
        bounds += added
        value = {"machine": machine(), "batch": arguments.batch, "sequence": arguments.seq,
                 "dtype": arguments.dtype, "figures": figures,
                 "bounds": [{**vars(bound), "holds": bound.holds} for bound in bounds]}  # fmt: skip
        # written after each model: a later one may be stopped
        (arguments.results / f"{gpu}.json").write_text(json.dumps(value, indent=1) + "\n")
    finish(arguments, figures, bounds)


def options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--family", choices=["zeroth", "sharded"], default="zeroth")
    options.add_argument("--model", nargs="+")
    options.add_argument("--dtype", default="float16")
    options.add_argument(
        "--device", help="unless given, torch's accelerator; cpu tries the script itself"
    )
    options.add_argument("--tiny", action="store_true", help="a tiny model: proves that it runs")
    options.add_argument("--results", type=Path, default=RESULTS, help=argparse.SUPPRESS)
    for name, default, help in (
        ("batch", 4, "sequences of a step"), ("seq", 2048, "tokens of a sequence"),
        ("steps", 5, "after the first"),
        ("slice", 1, "1: the ranks of a node hold one copy; 0: each its own"),
    ):  # fmt: skip
        options.add_argument(f"--{name}", type=int, default=default, help=help)
    options.add_argument("--worker", help=argparse.SUPPRESS)
    options.add_argument("--output", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    arguments.model = arguments.model or (
        ["Qwen2.5-1.5B"] if arguments.family == "sharded" else list(PUBLISHED)
    )
    return arguments


if __name__ == "__main__":
    main()
