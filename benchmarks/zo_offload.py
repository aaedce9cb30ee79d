"""Zeroth-order steps with the blocks on disk, beside everything in memory and beside a naive MeZO loop.

Full-parameter float32 training of random weights at true dimensions. In one process the cases take one step each in turn,
round after round, every other round in the opposite order; a ratio is the median, over rounds (over cycles of ``flush_every``
rounds, where that is not 1), of those within one round, so that drift of the machine meets both alike. Peak memory is that of a process of its own for each case (RssAnon + RssShmem +
VmSwap + VmPTE). ``flush_every`` is tuned first, among ``--flush``, and named.

    python benchmarks/zo_offload.py [--model OPT-125M OPT-350M] [--batch 4] [--seq 512] [--rounds 5] [--flush 1 2]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BEGAN = time.monotonic()
NOISES = ("gaussian", "rademacher")
BOUNDS = {"gaussian": 1.0, "rademacher": 1.3}
"""Tokens a second of resident ``mezo`` by those of the naive loop, at least."""
OFFLOADED = 0.97
"""Tokens a second of ``zo2`` on disk by those of resident ``mezo``, at least."""


def settings_of(noise: str, flush_every: int) -> dict[str, Any]:
    return {"zo": {"noise": noise}, "update": {"flush_every": flush_every}}


def peak(case: str, name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Peak bytes of two steps of one case, in this process, and what importing torch alone takes of them."""
    import torch  # noqa: F401

    from blockwalk.metrics import PeakMemory, process_bytes

    imported = process_bytes()
    from benchmarks import zo_runs
    from benchmarks.common import random_store

    from blockwalk.state import Codec

    batch, sequence = arguments.batch, arguments.seq
    with PeakMemory(0.003) as memory:
        if case == zo_runs.NAIVE:
            step = zo_runs.naive_stepper(zo_runs.naive_model(name, "float32", "cpu"), batch, sequence)
            step(), step()
        else:
            store = random_store(name, Codec.RAW, "float32")
            with zo_runs.open_walker(case, store, "disk", "cpu", **settings_of("gaussian", 1)) as walker:
                step = zo_runs.stepper(walker, batch, sequence)
                step(), step()
        return {"peak_MB": memory.highest / 1e6, "import_torch_MB": imported / 1e6}


def peaks(name: str, cases: list[str], arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Peak memory of each case, each in a process of its own."""
    found = {}
    print(f"{'case':<25} {'peak MB':>9} {'above what importing torch takes':>33}")
    for case in cases:
        command = [sys.executable, __file__, "--worker", case, "--model", name, "--batch", str(arguments.batch)]
        done = subprocess.run([*command, "--seq", str(arguments.seq)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}, {case}: {done.stderr[-2000:]}")
        row = found[case] = json.loads(done.stdout.splitlines()[-1])
        print(f"{case:<25} {row['peak_MB']:>9.0f} {row['peak_MB'] - row['import_torch_MB']:>33.0f}", flush=True)
    return found


def tuned(name: str, arguments: argparse.Namespace) -> int:
    """The ``flush_every`` of the fastest steps: fewer bytes written, against more noise at each fetch."""
    from benchmarks import zo_runs
    from benchmarks.common import interleaved, random_store

    from blockwalk.state import Codec

    if len(arguments.flush) == 1:
        return int(arguments.flush[0])
    store = random_store(name, Codec.RAW, "float32")
    with ExitStack() as stack:
        runs = {}
        for k in arguments.flush:
            walker = stack.enter_context(zo_runs.open_walker("zo2", store, "disk", "cpu", **settings_of("gaussian", k)))
            runs[str(k)] = zo_runs.stepper(walker, arguments.batch, arguments.seq)
        interleaved(runs, 1)
        rounds = max(arguments.flush)  # every cycle of flushes is whole in it
        seconds = {k: sum(values) for k, values in interleaved(runs, rounds).items()}
    print(f"{name}: seconds a step by flush_every: " + ", ".join(f"{k}: {s / rounds:.2f}" for k, s in seconds.items()))
    return int(min(seconds, key=seconds.__getitem__))


def measure(name: str, flush_every: int, arguments: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    """Seconds of a step in each round by (case, noise), all cases in turn. The naive loop has noise of its own."""
    from benchmarks import zo_runs
    from benchmarks.common import interleaved, random_store

    from blockwalk.state import Codec

    store = random_store(name, Codec.RAW, "float32")
    taken_out = [case for case in zo_runs.ABLATIONS if case != "zo2"] if arguments.ablations else []
    cases = [
        *((case, noise) for noise in NOISES for case in (zo_runs.MEZO, "zo2")),
        *((c, NOISES[0]) for c in taken_out),
    ]
    with ExitStack() as stack:
        model = zo_runs.naive_model(name, "float32", "cpu")
        runs = {zo_runs.NAIVE: zo_runs.naive_stepper(model, arguments.batch, arguments.seq)}
        for case, noise in cases:
            flush = 1 if case == "zo2, no deferred update" else flush_every
            walker = stack.enter_context(zo_runs.open_walker(case, store, "disk", "cpu", **settings_of(noise, flush)))
            runs[f"{case}|{noise}"] = zo_runs.stepper(walker, arguments.batch, arguments.seq)
        interleaved(runs, 1)  # the first step makes buffers and applies nothing
        seconds: dict[str, list[float]] = {key: [] for key in runs}
        for number in range(-(-arguments.rounds // flush_every)):
            turn = dict(reversed(runs.items())) if number % 2 else runs
            for key, values in interleaved(turn, flush_every).items():
                seconds[key] += values
            print(
                "  " + ", ".join(f"{key} {values[-1]:.2f}" for key, values in seconds.items()),
                file=sys.stderr,
                flush=True,
            )
            if time.monotonic() > BEGAN + 60 * arguments.minutes:
                break
    found = {}
    for key, values in seconds.items():
        case, _, noise = key.partition("|")
        found[case, noise] = [
            sum(values[i : i + flush_every]) / flush_every for i in range(0, len(values), flush_every)
        ]
    return found


def ratio(seconds: list[float], others: list[float]) -> float:
    """How much faster than the others' steps these are: the median of the rounds' ratios."""
    from benchmarks.common import median

    return median([other / own for own, other in zip(seconds, others, strict=True)])


def main() -> None:
    arguments = options()
    if arguments.worker:
        print(json.dumps(peak(arguments.worker, arguments.model[0], arguments)))
        return
    from benchmarks import zo_runs
    from benchmarks.common import Bound, finish, median, random_store

    from blockwalk.state import Codec

    figures: list[dict[str, Any]] = []
    bounds: list[Bound] = []
    tokens = arguments.batch * arguments.seq
    for name in arguments.model:
        random_store(name, Codec.RAW, "float32")
        flush_every = tuned(name, arguments)
        load = os.getloadavg()[0]
        print(f"{name}, batch {arguments.batch} × {arguments.seq}, flush_every {flush_every}, load {load:.1f}")
        print(f"{'case':<25} {'noise':<11} {'tokens/s':>9} {'of mezo':>8} {'of naive':>8}")
        seconds = measure(name, flush_every, arguments)
        naive = seconds[zo_runs.NAIVE, ""]
        for (case, noise), each in seconds.items():
            row = {"model": name, "case": case, "noise": noise, "flush_every": flush_every,
                   "tokens_per_s": tokens / median(each), "of_naive": ratio(each, naive), "rounds": len(each),
                   "of_mezo": ratio(each, seconds[zo_runs.MEZO, noise or NOISES[0]])}  # fmt: skip
            figures.append(row)
            print(
                f"{case:<25} {noise:<11} {row['tokens_per_s']:>9.1f} {row['of_mezo']:>8.3f} {row['of_naive']:>8.3f}",
                flush=True,
            )
        if arguments.memory:
            held = peaks(name, [zo_runs.NAIVE, zo_runs.MEZO, "zo2"], arguments)
            figures += [{"model": name, "case": case, **bytes_} for case, bytes_ in held.items()]
        for noise in NOISES:
            mezo = seconds[zo_runs.MEZO, noise]
            offloaded = ratio(seconds["zo2", noise], mezo)
            bounds.append(Bound(f"{name}, {noise}: zo2 on disk by mezo", offloaded, OFFLOADED, at_most=False))
            resident = ratio(mezo, naive)
            bounds.append(Bound(f"{name}, {noise}: mezo by naive MeZO", resident, BOUNDS[noise], at_most=False))
    finish(arguments, figures, bounds)


def options() -> argparse.Namespace:
    from benchmarks.common import parser

    made = parser(__doc__)
    made.add_argument("--model", nargs="+", default=["OPT-125M", "OPT-350M"])
    made.add_argument("--batch", type=int, default=4)
    made.add_argument("--seq", type=int, default=512)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument(
        "--minutes", type=float, default=6.0, help="no further round after so many, from the start of the run"
    )
    made.add_argument("--flush", type=int, nargs="+", default=[1, 2], help="candidates for update.flush_every")
    made.add_argument("--no-ablations", dest="ablations", action="store_false")
    made.add_argument(
        "--no-memory", dest="memory", action="store_false", help="leave out the peaks: two steps of each case"
    )
    made.add_argument("--worker", help=argparse.SUPPRESS)
    return made.parse_args()


if __name__ == "__main__":
    main()
