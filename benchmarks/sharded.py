"""First-order training over two nodes: bytes between them, seconds at several rates, overlap; FSDP2
beside it, as it comes and as an expert sets it (HSDP).

    sudo python benchmarks/sharded.py [--part bytes|seconds|sweep|overlap|memory|hsdp ...] [--check]
    [--json FILE] [--plot FILE.svg]

Nodes are network namespaces joined by a bridge (root), ranks are processes with one thread each,
bytes are the kernel's on each node's link. The systems of a task are opened side by side in the
same ranks and step in turn, round after round."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import Bound, finish, median, parser
from benchmarks.sharded_peers import DEEPSPEED
from benchmarks.sharded_plot import draw
from benchmarks.sharded_runs import (
    PAIRS,
    TOGETHER,
    Case,
    formula,
    limit,
    make_model,
    open_run,
    wire_seconds,
)

from blockwalk.program.program import Lane
from blockwalk.walk.lanes import Lanes, Mark
from tests.support import held as support
from tests.support.cluster import Cluster, cluster, sent_payload

OURS = ("zero3", "zeropp", "mics", "fcdp", "hzp")
BOUNDED = ("fcdp", "hzp")
TASKS = tuple(itertools.product((False, True), (1, 4)))
"""LoRA or not, micro-batches."""
AT_200 = {(False, 1): 2.0, (False, 4): 6.0, (True, 1): 8.0, (True, 4): 8.0}
"""FSDP2's seconds by ours at 200 Mbit/s, at least."""
PLAIN = ("fsdp2", "fsdp2-a2a")
OTHERS = (*PLAIN, *DEEPSPEED)
"""What ours is compared with outside of part ``hsdp``; DeepSpeed where it is installed."""
BESIDE_HSDP = (*BOUNDED, *(name + TOGETHER for name in BOUNDED))
"""What of ours is compared with HSDP, the best of which counts."""
TUNED = ("hsdp", "fsdp2-node", "fsdp2-a2a", *DEEPSPEED)
"""HSDP, and what it is compared with in the same rounds."""
HSDP_TASKS = (
    (Case("", False, 4), "50mbit", 0.95),
    (Case("", False, 1, max_norm=1.0), "50mbit", 1.08),
    (Case("", True, 4), "20mbit", 0.85),
    (Case("", True, 4), None, 0.85),
)
"""Task, rate, and the most that the best of ours may take of HSDP's seconds."""
AT_2x4 = (*BOUNDED, "mics", "mics" + PAIRS, "hsdp")
"""The systems whose bytes part ``hsdp`` counts on two nodes of four ranks: state over node and
world, over the node, over pairs; all of them at the bound."""
PARTS = ("bytes", "seconds", "sweep", "overlap", "memory", "hsdp")

Rows = dict[str, Any]


# ---- on a rank -----------------------------------------------------------------------------------


def count(
    rank: int, arguments: argparse.Namespace, cases: Sequence[Case]
) -> list[tuple[float, int, int]]:
    """Bytes that this rank's node sends in a steady step, and the model's parameters, all and
    trained."""
    found = []
    for case in cases:
        run = open_run(arguments, case)
        for _ in range(2):
            run.step()
        run.settle()
        dist.barrier()
        payload_before = sent_payload()
        dist.barrier()
        run.step()
        run.settle()
        dist.barrier()
        nbytes = sent_payload() - payload_before
        sizes = (
            (run.walker.spec.numel(), run.walker.spec.numel(trainable=True))
            if run.walker
            else (0, 0)
        )
        dist.barrier()
        run.close()
        found.append((float(nbytes), *sizes))
    return found


def race(
    rank: int,
    arguments: argparse.Namespace,
    cases: Sequence[Case],
    rates: Sequence[str | None],
    steps: int,
) -> dict[tuple[Case, str | None], dict[str, list[float]]]:
    """Seconds of a step, the mean of so many that follow each other with all that they send, and
    where it is one the share of communication hidden; of cases that step in turn. A case whose
    bytes take the wire half of ``patience`` steps once a round, and sits out once its steps have
    taken all of it."""
    runs = {case: open_run(arguments, case) for case in cases}
    found: dict[tuple[Case, str | None], dict[str, list[float]]] = {}
    for run in (*runs.values(), *runs.values()):
        run.step()
        run.settle()
    for rate in rates:
        if rank % arguments.ranks_per_node == 0:
            limit(rate)
        rows = {case: {"seconds": [], "hidden": []} for case in cases}
        for _ in range(arguments.rounds):
            for case, run in runs.items():
                row: dict[str, list[float]] = rows[case]
                is_slow = wire_seconds(arguments, case, rate) > arguments.patience / 2
                if is_slow and _sits_out(arguments, row["seconds"]):
                    continue
                looks = run.walker is not None and steps == 1
                if looks:
                    run.walker.timeline = []
                count = 1 if is_slow else steps
                dist.barrier()
                start = time.perf_counter()
                for _ in range(count):
                    run.step()
                run.settle()
                dist.barrier()
                row["seconds"].append((time.perf_counter() - start) / count)
                if looks:
                    row["hidden"].append(hidden_share(run.walker.timeline[0][1]))
        found |= {(case, rate): row for case, row in rows.items()}
    if rank % arguments.ranks_per_node == 0:
        limit(None)
    dist.barrier()
    for run in runs.values():
        run.close()
    return found


def _sits_out(arguments: argparse.Namespace, seconds: Sequence[float]) -> bool:
    """Whether a case steps no more, by rank 0's clock."""
    late = torch.tensor([float(sum(seconds) > arguments.patience)])
    dist.broadcast(late, 0)
    return bool(late)


class InTurn(Lanes):
    """Lanes of which one is busy at a time: an op has ended before the next one is submitted."""

    def submit(self, lane: Lane, work: Callable[[], None], after: Iterable[Mark]) -> Mark:
        mark = super().submit(lane, work, after)
        if mark.future is not None:
            mark.future.result()
        return mark


def blocking(
    rank: int, arguments: argparse.Namespace, cases: Sequence[Case], rate: str
) -> dict[Case, list[list[float]]]:
    """Seconds of steps whose ops run one after the other, and of steps as they are; and the share
    hidden in these."""
    found: dict[Case, list[list[float]]] = {}
    for case in cases:
        run = open_run(arguments, case)
        lanes = (InTurn(run.walker.device), run.walker.lanes)
        for _ in range(2):
            run.step()
        if rank % arguments.ranks_per_node == 0:
            limit(rate)
        rows: list[list[float]] = [[], [], []]
        for _ in range(arguments.rounds):
            for column, how in enumerate(lanes):
                run.walker.lanes = how
                run.walker.timeline = []
                dist.barrier()
                began = time.perf_counter()
                run.step()
                dist.barrier()
                rows[column].append(time.perf_counter() - began)
            rows[2].append(hidden_share(run.walker.timeline[0][1]))
        if rank % arguments.ranks_per_node == 0:
            limit(None)
        dist.barrier()
        lanes[0].close()
        run.close()
        found[case] = rows
    return found


def hidden_share(ops: list[tuple[Any, float, float]]) -> float:
    """Of the time that the communication lanes were busy, the share in which the compute lane was
    busy as well."""
    busy = [(began, ended) for op, began, ended in ops if op.lane == "compute"]
    total = hidden = 0.0
    for op, began, ended in ops:
        if op.lane.link in ("intra-node", "inter-node"):
            total += ended - began
            hidden += sum(max(0.0, min(ended, e) - max(began, b)) for b, e in busy)
    return hidden / total if total else 1.0


def held(rank: int, arguments: argparse.Namespace, cases: Sequence[Case]) -> list[dict[str, int]]:
    """Bytes of the tensors that each method holds between steps on this rank, and of its slots and
    buffers; of a peer those of its slices, as ``device``."""
    found = []
    for case in cases:
        run = open_run(arguments, case)
        run.step()
        if run.held is not None:
            found.append({"device": run.held()})
            continue
        engine = run.walker.engine
        row = {str(pool): nbytes for pool, nbytes in support.held(engine).items()}
        row["buffers"] = sum(buffer.nbytes for buffer in support.buffers(engine))
        row["numel"] = support.numel(engine)
        found.append(row)
        run.close()
    return found


# ---- the parts -----------------------------------------------------------------------------------


def count_bytes(
    nodes: Cluster, arguments: argparse.Namespace, cases: Sequence[Case], bounds: list[Bound]
) -> Rows:
    answers = nodes.run(count, arguments, cases, timeout=500)
    local = nodes.ranks_per_node
    shape = f"{nodes.nodes}×{local}"
    sizes = {case.lora: answers[0][k][1:] for k, case in enumerate(cases) if case.system in OURS}
    print(f"{sizes[False][0] / 1e6:.1f}M parameters; MB sent by a node per optimizer step, {shape}")
    bounded = {*BOUNDED, *(AT_2x4 if "hsdp" in arguments.part else ())}
    rows: Rows = {}
    for k, case in enumerate(cases):
        sent = max(answer[k][0] for answer in answers)
        parameters, trained = sizes[case.lora]
        expected = formula(case, nodes.nodes, local, parameters, trained)
        rows[str(case)] = {"measured": sent, "formula": expected}
        print(f"  {case!s:<20} {sent / 1e6:>9.3f}   formula {expected / 1e6:>9.3f}")
        if case.system in bounded:
            least = (nodes.nodes - 1) / nodes.nodes * 8 * trained
            bounds.append(Bound(f"bytes of {case}, {shape}", sent, 1.02 * least + 16_384))
    return rows


def time_tasks(
    nodes: Cluster,
    arguments: argparse.Namespace,
    tasks: Sequence[Case],
    rates: Sequence[str | None],
    systems: Sequence[str] = (*BOUNDED, *OTHERS),
    steps: int = 1,
) -> dict[tuple[Case, str | None], dict[str, float]]:
    """Median seconds, of each round the slowest rank's."""
    found = {}
    for task in tasks:
        cases = [replace(task, system=system) for system in systems]
        answers = nodes.run(race, arguments, cases, rates, steps, timeout=1200)
        for key, row in answers[0].items():
            steps = [
                max(times)
                for times in zip(*(answer[key]["seconds"] for answer in answers), strict=True)
            ]
            found[key] = {"seconds": median(steps), "rounds": len(steps)}
            if row["hidden"]:
                found[key]["hidden"] = median(row["hidden"])
    return found


def seconds(nodes: Cluster, arguments: argparse.Namespace, bounds: list[Bound]) -> Rows:
    tasks = [Case("", lora, a) for lora, a in TASKS]
    timed = time_tasks(nodes, arguments, tasks, (None, "200mbit"))
    rows: Rows = defaultdict(dict)
    for (case, rate), row in timed.items():
        rows[f"{case.task}, {rate or 'unshaped'}"][case.system] = row
    for (lora, a), rate in itertools.product(TASKS, (None, "200mbit")):
        name = f"{Case('', lora, a).task}, {rate or 'unshaped'}"
        best = min(rows[name][system]["seconds"] for system in BOUNDED)
        ratio, a2a = (rows[name][peer]["seconds"] / best for peer in PLAIN)
        times = "  ".join(f"{system} {row['seconds']:.3f}" for system, row in rows[name].items())
        print(f"  {name:<20} {times}   FSDP2/ours {ratio:.2f} (a2a {a2a:.2f})")
        least = 0.95 if rate is None else AT_200[lora, a]
        bounds.append(Bound(f"FSDP2 / ours, {name}", ratio, least, at_most=False))
    return dict(rows)


def sweep(nodes: Cluster, arguments: argparse.Namespace, bounds: list[Bound]) -> Rows:
    """Throughput kept at each rate, LoRA with four micro-batches."""
    rates = (None, *arguments.rates.split(","))
    others = [
        system for system in OTHERS if system != "fsdp2-a2a"
    ]  # adapters' gradients are too small to tell them apart
    timed = {}
    for rate in rates:  # opened anew for each: at the slowest a step of FSDP2 takes minutes
        systems = (*BOUNDED, *others)
        timed |= time_tasks(nodes, arguments, [Case("", True, 4)], [rate], systems)
        row = {case.system: timed[case, rate]["seconds"] for case, at in timed if at == rate}
        print(
            f"  {rate or 'unshaped':<10} " + "  ".join(f"{s} {t:.3f} s" for s, t in row.items()),
            flush=True,
        )
    rows: Rows = defaultdict(dict)
    for (case, rate), row in timed.items():
        kept = timed[case, None]["seconds"] / row["seconds"]
        rows[case.system][rate or "unshaped"] = {**row, "kept": kept}
    print("  LoRA A=4: seconds per step, and the share of the unshaped throughput that is kept")
    for system, by_rate in rows.items():
        print(
            f"  {system:<10} "
            + "  ".join(f"{r}: {x['seconds']:.3f} ({x['kept']:.3f})" for r, x in by_rate.items())
        )
    slow = [rate for rate in rates if rate and rows["fsdp2"][rate]["kept"] <= 0.05]
    if slow:  # rates go from slow to fast
        kept = max(rows[system][slow[-1]]["kept"] for system in BOUNDED)
        bounds.append(Bound(f"LoRA throughput kept at {slow[-1]}", kept, 0.9, at_most=False))
    return dict(rows)


def overlap(nodes: Cluster, arguments: argparse.Namespace, bounds: list[Bound]) -> Rows:
    cases = [Case(system, lora, 1) for system in BOUNDED for lora in (False, True)]
    answers = nodes.run(blocking, arguments, cases, arguments.overlap_rate, timeout=500)
    rows: Rows = {}
    for case in cases:
        one, all_ = (
            median([max(t) for t in zip(*(a[case][k] for a in answers), strict=True)])
            for k in (0, 1)
        )
        hidden = median([share for answer in answers for share in answer[case][2]])
        rows[str(case)] = {"blocking": one, "asynchronous": all_, "hidden": hidden}
        print(
            f"  {case!s:<14} blocking {one:.3f} s  asynchronous {all_:.3f} s  communication"
            f" hidden {hidden:.2f}"
        )
        if not case.lora:  # of adapters' few bytes nothing can be gained
            bounds.append(Bound(f"asynchronous / blocking seconds of {case}", all_ / one, 1.0))
    return rows


def memory(nodes: Cluster, arguments: argparse.Namespace, bounds: list[Bound]) -> Rows:
    cases = [Case(system, False, a) for a in (1, 4) for system in OURS]
    answers = nodes.run(held, arguments, cases)[0]
    rows = {str(case): answer for case, answer in zip(cases, answers, strict=True)}
    print(
        f"  MB per rank between steps ({nodes.nodes}×{nodes.ranks_per_node}), float32: device,"
        " host; slots and buffers"
    )
    for name, row in rows.items():
        print(
            f"  {name:<16} {row['device'] / 1e6:>8.2f} {row.get('host', 0) / 1e6:>8.2f}"
            f" {row['buffers'] / 1e6:>8.2f}"
        )
    for a in (1, 4):
        ratio = rows[f"fcdp full A={a}"]["device"] / rows[f"zero3 full A={a}"]["device"]
        bounds.append(Bound(f"device bytes of fcdp by zero3's, A={a}", abs(ratio - 1), 0.01))
    world = nodes.nodes * nodes.ranks_per_node
    node = nodes.ranks_per_node
    row = rows["hzp full A=4"]  # float32: 4 bytes a gathered parameter
    expected = row["numel"] * (12 / world + 4 / node + 4 / node)
    bounds.append(
        Bound("device bytes of hzp by the formula, A=4", abs(row["device"] / expected - 1), 0.03)
    )
    return rows


def hsdp(nodes: Cluster, arguments: argparse.Namespace, bounds: list[Bound]) -> Rows:
    """Seconds beside HSDP, an expert's setting of FSDP2, in the same rounds; device bytes beside
    its own."""
    rows: Rows = {}
    rates: dict[Case, list[str | None]] = defaultdict(list)
    for task, rate, _ in HSDP_TASKS:
        rates[task].append(rate)
    for task, of_task in rates.items():
        ours = BESIDE_HSDP if task.micro_batches > 1 else BOUNDED  # one is always together
        systems = (*ours, *arguments.peers)
        timed = time_tasks(nodes, arguments, [task], of_task, systems, arguments.steps)
        for (case, rate), row in timed.items():
            rows.setdefault(f"{task.task}, {rate or 'unshaped'}", {})[case.system] = row
    for task, rate, most in HSDP_TASKS:
        name = f"{task.task}, {rate or 'unshaped'}"
        row = rows[name]
        ours = [system for system in BESIDE_HSDP if system in row]
        best = min(ours, key=lambda system: row[system]["seconds"])
        ratio = row[best]["seconds"] / row["hsdp"]["seconds"]
        times = "  ".join(f"{system} {timed['seconds']:.3f}" for system, timed in row.items())
        print(f"  {name:<28} {times}   {best}/HSDP {ratio:.2f}", flush=True)
        bounds.append(Bound(f"{name}: best of ours / HSDP", ratio, most))
    pair = ("fcdp", "hsdp")
    answers = nodes.run(held, arguments, [Case(system, False, 4) for system in pair])[0]
    device = {system: row["device"] for system, row in zip(pair, answers, strict=True)}
    rows["device bytes"] = device
    print(f"  device bytes: fcdp {device['fcdp'] / 1e6:.2f} MB, HSDP {device['hsdp'] / 1e6:.2f} MB")
    bounds.append(Bound("device bytes of fcdp / HSDP's", device["fcdp"] / device["hsdp"], 0.52))
    return rows


# ---- main ----------------------------------------------------------------------------------------


def options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--ranks-per-node", type=int, default=2)
    options.add_argument("--hidden", type=int, default=512)
    options.add_argument("--layers", type=int, default=6)
    options.add_argument(
        "--rows", type=int, default=1, help="sequences of each rank in a micro-batch"
    )
    options.add_argument("--sequence", type=int, default=64)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument(
        "--steps", type=int, default=2, help="steps that follow each other, part hsdp"
    )
    options.add_argument(
        "--peers", nargs="+", choices=TUNED, default=TUNED, help="of part hsdp, HSDP among them"
    )
    options.add_argument(
        "--patience", type=float, default=40.0, help="seconds of steps after which a case sits out"
    )
    options.add_argument("--prefetch", type=int, default=2)
    options.add_argument(
        "--recompute", default="none", help="none, as FSDP2 does; all trades compute for memory"
    )
    options.add_argument(
        "--rates", default="10mbit,20mbit,100mbit,1gbit", help="of the sweep, from slow to fast"
    )
    options.add_argument("--overlap-rate", default="1gbit")
    options.add_argument("--plot", metavar="FILE.svg", help="draw the sweep")
    return options.parse_args()


def main() -> None:
    arguments = options()
    torch.set_num_threads(1)
    import blockwalk.walk.walker  # noqa: F401  # imported and certified once, before ranks are forked
    from blockwalk.cutting.verify import certified

    for lora in (False, True):
        certified(make_model(arguments, lora))
    settings = {
        k: v for k, v in vars(arguments).items() if k not in ("json", "plot", "check", "part")
    }
    figures: Rows = {"arguments": dict.fromkeys(arguments.part, settings)}
    bounds: list[Bound] = []
    cases = [Case(system, lora, a) for lora, a in TASKS for system in (*OURS, *OTHERS)]
    with cluster(2, arguments.ranks_per_node) as nodes:
        for part, work in (
            ("seconds", seconds),
            ("sweep", sweep),
            ("overlap", overlap),
            ("memory", memory),
            ("hsdp", hsdp),
        ):
            if part in arguments.part:
                print(part)
                figures[part] = work(nodes, arguments, bounds)
        if "bytes" in arguments.part:
            figures["bytes"] = {
                f"2×{arguments.ranks_per_node}": count_bytes(nodes, arguments, cases, bounds)
            }
    if "bytes" in arguments.part and arguments.ranks_per_node < 4:
        with cluster(2, 4) as nodes:
            wider = argparse.Namespace(**{**vars(arguments), "ranks_per_node": 4})
            fewer = [case for case in cases if case.system in (*BOUNDED, "fsdp2")]
            figures["bytes"]["2×4"] = count_bytes(nodes, wider, fewer, bounds)
    if "hsdp" in arguments.part:
        with cluster(2, 4) as nodes:
            wider = argparse.Namespace(**{**vars(arguments), "ranks_per_node": 4})
            bounded = [Case(system, False, a) for system in AT_2x4 for a in (1, 4)]
            figures["hsdp"]["bytes, 2×4"] = count_bytes(nodes, wider, bounded, bounds)
    if arguments.plot:
        Path(arguments.plot).write_text(draw(figures["sweep"]))
    if arguments.json and Path(arguments.json).exists():
        figures, bounds = _with_earlier(
            json.loads(Path(arguments.json).read_text()), figures, bounds
        )
    finish(arguments, figures, bounds)


def _with_earlier(earlier: Rows, figures: Rows, bounds: list[Bound]) -> tuple[Rows, list[Bound]]:
    """The parts that an earlier run measured stay."""
    arguments = {**earlier["figures"]["arguments"], **figures["arguments"]}
    bound_names = {bound.name for bound in bounds}
    kept = [
        Bound(b["name"], b["value"], b["limit"], b["at_most"])
        for b in earlier["bounds"]
        if b["name"] not in bound_names
    ]
    return {**earlier["figures"], **figures, "arguments": arguments}, [*kept, *bounds]


if __name__ == "__main__":
    main()
