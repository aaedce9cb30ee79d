"""Zeroth-order steps with the blocks on disk, beside everything in memory and beside a naive MeZO loop.

Full-parameter float32 training of random weights at true dimensions. Cases that are compared take one step each in turn, round
after round, every other round in the opposite order; a ratio is the median, over rounds (over cycles of ``flush_every`` rounds,
where that is not 1), of those within one round, so that drift of the machine meets both alike. Few are compared at a time, the
offloaded cases by twos: on a virtual machine whose host takes idle memory back, what waited for others may page its weights in
again. Peak memory is that of a process of its own for each case (RssAnon + RssShmem + VmSwap + VmPTE). ``flush_every`` is tuned
first, among ``--flush``.

    python benchmarks/zo_offload.py [--model OPT-125M OPT-350M] [--batch 4] [--seq 512] [--rounds 5] [--flush 1 2]
        [--noise gaussian] [--no-naive] [--no-ablations] [--no-memory]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

NOISES = ("gaussian", "rademacher")
BY_NAIVE = 1.5
"""Tokens a second of resident ``mezo`` by those of the naive loop, at least."""
WARM = 2
"""Rounds that do not count: the first step makes buffers and applies nothing, and heaps settle."""
OFFLOADED = {"zo2": 0.97, "zo2 on the host": 0.98}
"""Tokens a second of ``zo2``, its blocks on disk or on the host, by those of resident ``mezo``, at least."""


def settings_of(noise: str, flush_every: int) -> dict[str, Any]:
    return {"zo": {"noise": noise}, "update": {"flush_every": flush_every}}


def peak(case: str, name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Peak bytes of two steps of one case, in this process, and what importing torch alone takes of them."""
    import torch  # noqa: F401

    from blockwalk.system.process_memory import PeakMemory, process_bytes

    imported = process_bytes()
    from benchmarks import zo_runs
    from benchmarks.common import random_store

    from blockwalk.plan.placement import Codec

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

    from blockwalk.plan.placement import Codec

    if len(arguments.flush) == 1:
        return int(arguments.flush[0])
    store = random_store(name, Codec.RAW, "float32")
    with ExitStack() as stack:
        runs = {}
        for k in arguments.flush:
            walker = stack.enter_context(zo_runs.open_walker("zo2", store, "disk", "cpu", **settings_of("gaussian", k)))
            runs[str(k)] = zo_runs.stepper(walker, arguments.batch, arguments.seq)
        interleaved(runs, 1)
        rounds = 3 * max(arguments.flush)  # every cycle of flushes is whole in it
        seconds = {k: sum(values) for k, values in interleaved(runs, rounds).items()}
    print(f"{name}: seconds a step by flush_every: " + ", ".join(f"{k}: {s / rounds:.2f}" for k, s in seconds.items()))
    return int(min(seconds, key=seconds.__getitem__))


def measure(
    name: str, cases: Sequence[tuple[str, str]], flush_every: int, arguments: argparse.Namespace
) -> dict[tuple[str, str], list[float]]:
    """Seconds of a step in each round by (case, noise), all cases in turn."""
    from benchmarks import zo_runs
    from benchmarks.common import interleaved, random_store

    from blockwalk.plan.placement import Codec

    store = random_store(name, Codec.RAW, "float32")
    began, runs = time.monotonic(), {}
    with ExitStack() as stack:
        for case, noise in cases:
            if case == zo_runs.NAIVE:
                model = zo_runs.naive_model(name, "float32", "cpu")
                runs[f"{case}|"] = zo_runs.naive_stepper(model, arguments.batch, arguments.seq)
                continue
            flush = 1 if case == "zo2, no deferred update" else flush_every
            walker = stack.enter_context(zo_runs.open_walker(case, store, "disk", "cpu", **settings_of(noise, flush)))
            runs[f"{case}|{noise}"] = zo_runs.stepper(walker, arguments.batch, arguments.seq)
        interleaved(runs, WARM)
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
            if time.monotonic() > began + 60 * arguments.minutes:
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


def rows(
    name: str, seconds: dict[tuple[str, str], list[float]], flush_every: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Print each case beside resident ``mezo`` of the same rounds, and beside the naive loop where it ran with them."""
    from benchmarks import zo_runs
    from benchmarks.common import median

    made, naive = [], seconds.get((zo_runs.NAIVE, ""))
    for (case, noise), each in seconds.items():
        row = {"model": name, "case": case, "noise": noise, "flush_every": flush_every, "rounds": len(each),
               "tokens_per_s": arguments.batch * arguments.seq / median(each),
               "of_mezo": ratio(each, seconds[zo_runs.MEZO, noise or arguments.noise[0]])}  # fmt: skip
        if naive is not None:
            row["of_naive"] = ratio(each, naive)
        beside = f"{row['of_naive']:>8.3f}" if naive is not None else ""
        print(f"{case:<25} {noise:<11} {row['tokens_per_s']:>9.1f} {row['of_mezo']:>8.3f} {beside}", flush=True)
        made.append(row)
    return made


def main() -> None:
    arguments = options()
    if arguments.worker:
        print(json.dumps(peak(arguments.worker, arguments.model[0], arguments)))
        return
    from benchmarks import zo_runs
    from benchmarks.common import Bound, finish, random_store

    from blockwalk.plan.placement import Codec

    figures: list[dict[str, Any]] = []
    bounds: list[Bound] = []
    for name in arguments.model:
        random_store(name, Codec.RAW, "float32")
        flush_every = tuned(name, arguments)
        load = os.getloadavg()[0]
        print(f"{name}, batch {arguments.batch} × {arguments.seq}, flush_every {flush_every}, load {load:.1f}")
        print(f"{'case':<25} {'noise':<11} {'tokens/s':>9} {'of mezo':>8} {'of naive':>8}")
        noises, resident = arguments.noise, [(zo_runs.MEZO, noise) for noise in arguments.noise]
        pairs = [[each, (case, each[1])] for each in resident for case in OFFLOADED]
        beside_naive = [[(zo_runs.NAIVE, ""), *resident]] if arguments.naive else []
        for cases in (*pairs, *beside_naive):
            seconds = measure(name, cases, flush_every, arguments)
            figures += rows(name, seconds, flush_every, arguments)
            for case, noise in cases[1:]:
                (other, _), own = cases[0], seconds[case, noise]
                least = BY_NAIVE if other == zo_runs.NAIVE else OFFLOADED[case]
                found = ratio(own, seconds[cases[0]])
                bounds.append(Bound(f"{name}, {noise}: {case} by {other}", found, least, at_most=False))
        if arguments.ablations:
            cases = [(case, noises[0]) for case in (zo_runs.MEZO, *zo_runs.ABLATIONS)]
            figures += rows(name, measure(name, cases, flush_every, arguments), flush_every, arguments)
        if arguments.memory:
            held = peaks(name, [zo_runs.NAIVE, zo_runs.MEZO, "zo2"], arguments)
            figures += [{"model": name, "case": case, **bytes_} for case, bytes_ in held.items()]
    finish(arguments, figures, bounds)


def options() -> argparse.Namespace:
    from benchmarks.common import parser

    made = parser(__doc__)
    made.add_argument("--model", nargs="+", default=["OPT-125M", "OPT-350M"])
    made.add_argument("--batch", type=int, default=4)
    made.add_argument("--seq", type=int, default=512)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--minutes", type=float, default=4.0, help="no further round of the same cases after so many")
    made.add_argument("--flush", type=int, nargs="+", default=[1, 2], help="candidates for update.flush_every")
    made.add_argument("--noise", nargs="+", choices=NOISES, default=list(NOISES))
    made.add_argument("--no-ablations", dest="ablations", action="store_false")
    made.add_argument("--no-naive", dest="naive", action="store_false")
    made.add_argument(
        "--no-memory", dest="memory", action="store_false", help="leave out the peaks: two steps of each case"
    )
    made.add_argument("--worker", help=argparse.SUPPRESS)
    return made.parse_args()


if __name__ == "__main__":
    main()
