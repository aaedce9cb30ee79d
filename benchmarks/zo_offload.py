"""Zeroth-order steps with the blocks on disk, beside everything in memory and beside a naive MeZO
loop.

Full-parameter float32 training of random weights at true dimensions. Cases that are compared take
one step each in turn, round after round, every other round in the opposite order; a ratio is the
median, over rounds (over cycles of ``flush_every`` rounds, where that is not 1), of those within
one round, so that drift of the machine meets both alike. Few are compared at a time, the offloaded
cases by twos: on a virtual machine whose host takes idle memory back, what waited for others may
page its weights in again. Peak memory is that of a process of its own for each case (RssAnon +
RssShmem + VmSwap + VmPTE). ``flush_every`` is tuned first, among ``--flush``.

On a virtual machine the host may move a disk's bytes with the guest's own cores: each row says how
many seconds of a core were stolen, a step (``/proc/stat``), and ``mezo`` is run once more while
another process moves as many bytes to and from the same disk as ``zo2`` does. What is missing of
that is the engine's; what is missing of ``mezo`` is the machine's as well.

    python benchmarks/zo_offload.py [--model OPT-125M OPT-350M] [--batch 4] [--seq 512] [--rounds 5]
    [--flush 1 2]
        [--noise gaussian] [--no-naive] [--no-ablations] [--no-memory]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
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
"""Tokens a second of ``zo2``, its blocks on disk or on the host, by those of resident ``mezo``, at
least."""
BESIDE_TRAFFIC = "mezo beside such traffic"
STEAL = 8
"""The place of stolen time in the first line of ``/proc/stat``, in hundredths of a second of a
core."""


def stolen() -> float:
    """Seconds of this machine's cores that its host has used otherwise, when they had work."""
    with open("/proc/stat") as file:
        return int(file.readline().split()[STEAL]) / 100


def move_blocks(path: str, flush_every: int, sizes: Sequence[int]) -> None:
    """For each line on standard input, a number of seconds, read blocks of a file past the page
    cache over that time, write them each ``flush_every``-th time, as ``zo2`` does in a step, and
    answer with a line."""
    import mmap

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.ftruncate(fd, sum(sizes))
    buffer = mmap.mmap(-1, max(sizes))
    buffer.write(os.urandom(len(buffer)))
    for count, line in enumerate(sys.stdin, 1):
        began = time.monotonic()
        offset = 0
        for number, size in enumerate(sizes):
            time.sleep(max(0.0, began + float(line) * number / len(sizes) - time.monotonic()))
            view = memoryview(buffer)[:size]
            os.preadv(fd, [view], offset)
            if count % flush_every == 0:
                os.pwritev(fd, [view], offset)
                os.fdatasync(fd)
            offset += size
        print("moved", flush=True)


class Traffic:
    """Another process that moves blocks of so many bytes each time that a step is made."""

    def __init__(self, sizes: Sequence[int], flush_every: int, folder: Path) -> None:
        self.path = folder / f"traffic-{os.getpid()}"
        command = [
            sys.executable,
            __file__,
            "--move",
            str(self.path),
            str(flush_every),
            *map(str, sizes),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def beside(self, step: Callable[[], float]) -> Callable[[], float]:
        """A step, and its seconds, while the blocks are moved; the first one only says how long a
        step takes."""
        last = 0.0

        def run() -> float:
            nonlocal last
            if not last:
                last = step()
                return last
            print(0.9 * last, file=self._process.stdin, flush=True)
            seconds = step()
            self._process.stdout.readline()  # type: ignore[union-attr]
            return seconds

        return run

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self.path.unlink(missing_ok=True)


def settings_of(noise: str, flush_every: int) -> dict[str, Any]:
    return {"zo": {"noise": noise}, "update": {"flush_every": flush_every}}


def peak(case: str, name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Peak bytes of two steps of one case, in this process, and what importing torch alone takes of
    them."""
    import torch  # noqa: F401

    from blockwalk.system.process_memory import PeakMemory, process_bytes

    imported = process_bytes()
    from benchmarks import zo_runs
    from benchmarks.common import random_store

    from blockwalk.plan.placement import Codec

    batch = arguments.batch
    sequence = arguments.seq
    with PeakMemory(0.003) as memory:
        if case == zo_runs.NAIVE:
            step = zo_runs.naive_stepper(
                zo_runs.naive_model(name, "float32", "cpu"), batch, sequence
            )
            step(), step()
        else:
            store = random_store(name, Codec.RAW, "float32")
            with zo_runs.open_walker(
                case, store, "disk", "cpu", **settings_of("gaussian", 1)
            ) as walker:
                step = zo_runs.stepper(walker, batch, sequence)
                step(), step()
        return {"peak_MB": memory.highest / 1e6, "import_torch_MB": imported / 1e6}


def peaks(
    name: str, cases: list[str], arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Peak memory of each case, each in a process of its own."""
    found = {}
    print(f"{'case':<25} {'peak MB':>9} {'above what importing torch takes':>33}")
    for case in cases:
        command = [
            sys.executable,
            __file__,
            "--worker",
            case,
            "--model",
            name,
            "--batch",
            str(arguments.batch),
        ]
        process = subprocess.run(
            [*command, "--seq", str(arguments.seq)], capture_output=True, text=True, check=False
        )
        if process.returncode:
            raise SystemExit(f"{name}, {case}: {process.stderr[-2000:]}")
        row = found[case] = json.loads(process.stdout.splitlines()[-1])
        print(
            f"{case:<25} {row['peak_MB']:>9.0f} {row['peak_MB'] - row['import_torch_MB']:>33.0f}",
            flush=True,
        )
    return found


def tuned(name: str, arguments: argparse.Namespace) -> int:
    """The ``flush_every`` of the fastest steps: fewer bytes written, against more noise at each
    fetch."""
    from benchmarks import zo_runs
    from benchmarks.common import interleaved, random_store

    from blockwalk.plan.placement import Codec

    if len(arguments.flush) == 1:
        return int(arguments.flush[0])
    store = random_store(name, Codec.RAW, "float32")
    with ExitStack() as stack:
        runs = {}
        for k in arguments.flush:
            walker = stack.enter_context(
                zo_runs.open_walker("zo2", store, "disk", "cpu", **settings_of("gaussian", k))
            )
            runs[str(k)] = zo_runs.stepper(walker, arguments.batch, arguments.seq)
        interleaved(runs, 1)
        rounds = 3 * max(arguments.flush)  # every cycle of flushes is whole in it
        seconds = {k: sum(values) for k, values in interleaved(runs, rounds).items()}
    print(
        f"{name}: seconds a step by flush_every: "
        + ", ".join(f"{k}: {s / rounds:.2f}" for k, s in seconds.items())
    )
    return int(min(seconds, key=seconds.__getitem__))


def measure(
    name: str, cases: Sequence[tuple[str, str]], flush_every: int, arguments: argparse.Namespace
) -> tuple[dict[tuple[str, str], list[float]], dict[tuple[str, str], float]]:
    """Seconds of a step in each round by (case, noise), all cases in turn; and the median of those
    that were stolen in one."""
    from benchmarks import zo_runs
    from benchmarks.common import CACHE, interleaved, median, random_store

    from blockwalk.engine.slots import PAGE
    from blockwalk.plan.placement import Codec

    store = random_store(name, Codec.RAW, "float32")
    began = time.monotonic()
    runs: dict[str, Callable[[], float]] = {}
    walkers: dict[tuple[str, str], Any] = {}
    taken: dict[str, list[float]] = {}

    def watched(key: str, step: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            before = stolen()
            seconds = step()
            taken.setdefault(key, []).append(stolen() - before)
            return seconds

        return run

    with ExitStack() as stack:
        for case, noise in cases:
            if case == zo_runs.NAIVE:
                model = zo_runs.naive_model(name, "float32", "cpu")
                step = zo_runs.naive_stepper(model, arguments.batch, arguments.seq)
            elif case == BESIDE_TRAFFIC:
                buckets = walkers["zo2", noise].engine.trained
                sizes = [
                    buckets.units[unit].nbytes // PAGE * PAGE for unit in sorted(buckets.streamed)
                ]
                step = stack.enter_context(Traffic(sizes, flush_every, CACHE)).beside(
                    runs[f"{zo_runs.MEZO}|{noise}"]
                )
            else:
                flush = 1 if case == "zo2, no deferred update" else flush_every
                walker = zo_runs.open_walker(
                    case, store, "disk", "cpu", **settings_of(noise, flush)
                )
                walkers[case, noise] = stack.enter_context(walker)
                step = zo_runs.stepper(walker, arguments.batch, arguments.seq)
            runs[f"{case}|{noise}"] = watched(f"{case}|{noise}", step)
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
    lost = {}
    for key, values in seconds.items():
        case, _, noise = key.partition("|")
        found[case, noise] = [
            sum(values[i : i + flush_every]) / flush_every
            for i in range(0, len(values), flush_every)
        ]
        lost[case, noise] = median(taken[key][WARM:])
    return found, lost


def ratio(seconds: list[float], others: list[float]) -> float:
    """How much faster than the others' steps these are: the median of the rounds' ratios."""
    from benchmarks.common import median

    return median([other / own for own, other in zip(seconds, others, strict=True)])


def rows(
    name: str,
    seconds: dict[tuple[str, str], list[float]],
    lost: dict[tuple[str, str], float],
    flush_every: int,
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Print each case beside resident ``mezo`` of the same rounds, and beside the naive loop where
    it ran with them."""
    from benchmarks import zo_runs
    from benchmarks.common import median

    made = []
    naive = seconds.get((zo_runs.NAIVE, ""))
    for (case, noise), each in seconds.items():
        row = {"model": name, "case": case, "noise": noise, "flush_every": flush_every,
               "rounds": len(each), "tokens_per_s": arguments.batch * arguments.seq / median(each),
               "of_mezo": ratio(each, seconds[zo_runs.MEZO, noise or arguments.noise[0]]),
               "stolen_s": lost[case, noise]}  # fmt: skip
        if naive is not None:
            row["of_naive"] = ratio(each, naive)
        beside = f"{row['of_naive']:>8.3f}" if naive is not None else ""
        figures = (
            f"{row['tokens_per_s']:>9.1f} {row['stolen_s']:>9.2f} {row['of_mezo']:>8.3f} {beside}"
        )
        print(f"{case:<25} {noise:<11} {figures}", flush=True)
        made.append(row)
    return made


def main() -> None:
    arguments = options()
    if arguments.move:
        path, flush_every, *sizes = arguments.move
        move_blocks(path, int(flush_every), [int(size) for size in sizes])
        return
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
        print(
            f"{name}, batch {arguments.batch} × {arguments.seq}, flush_every {flush_every}, load"
            f" {load:.1f}"
        )
        print(
            f"{'case':<25} {'noise':<11} {'tokens/s':>9} {'stolen, s':>9} {'of mezo':>8}"
            f" {'of naive':>8}"
        )
        noises = arguments.noise
        resident = [(zo_runs.MEZO, noise) for noise in arguments.noise]
        pairs = [[each, (case, each[1])] for each in resident for case in OFFLOADED]
        for cases in pairs:
            cases += [(BESIDE_TRAFFIC, noise) for case, noise in cases if case == "zo2"]
        beside_naive = [[(zo_runs.NAIVE, ""), *resident]] if arguments.naive else []
        for cases in (*pairs, *beside_naive):
            seconds, lost = measure(name, cases, flush_every, arguments)
            figures += rows(name, seconds, lost, flush_every, arguments)
            compared = [(case, cases[0]) for case in cases[1:]]
            if cases[-1][0] == BESIDE_TRAFFIC:
                compared[-1] = cases[1], cases[-1]
            for (case, noise), other in compared:
                least = BY_NAIVE if other[0] == zo_runs.NAIVE else OFFLOADED[case]
                found = ratio(seconds[case, noise], seconds[other])
                bounds.append(
                    Bound(f"{name}, {noise}: {case} by {other[0]}", found, least, at_most=False)
                )
        if arguments.ablations:
            cases = [(case, noises[0]) for case in (zo_runs.MEZO, *zo_runs.ABLATIONS)]
            figures += rows(
                name, *measure(name, cases, flush_every, arguments), flush_every, arguments
            )
        if arguments.memory:
            peak_bytes = peaks(name, [zo_runs.NAIVE, zo_runs.MEZO, "zo2"], arguments)
            figures += [
                {"model": name, "case": case, **bytes_} for case, bytes_ in peak_bytes.items()
            ]
    finish(arguments, figures, bounds)


def options() -> argparse.Namespace:
    from benchmarks.common import parser

    options = parser(__doc__)
    options.add_argument("--model", nargs="+", default=["OPT-125M", "OPT-350M"])
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--seq", type=int, default=512)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument(
        "--minutes",
        type=float,
        default=4.0,
        help="no further round of the same cases after so many",
    )
    options.add_argument(
        "--flush", type=int, nargs="+", default=[1, 2], help="candidates for update.flush_every"
    )
    options.add_argument("--noise", nargs="+", choices=NOISES, default=list(NOISES))
    options.add_argument("--no-ablations", dest="ablations", action="store_false")
    options.add_argument("--no-naive", dest="naive", action="store_false")
    options.add_argument(
        "--no-memory",
        dest="memory",
        action="store_false",
        help="leave out the peaks: two steps of each case",
    )
    options.add_argument("--worker", help=argparse.SUPPRESS)
    options.add_argument("--move", nargs="+", help=argparse.SUPPRESS)
    return options.parse_args()


if __name__ == "__main__":
    main()
