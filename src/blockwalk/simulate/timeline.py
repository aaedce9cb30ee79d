"""A step's timeline in Chrome's trace format, for Perfetto: of a simulation or of a real run, with
the same lanes and names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from blockwalk.program.program import Lane, Op, Program
from blockwalk.system import atomic_files

HOST = "host"
"""The name of the lane in which the host starts what an accelerator computes."""

Timed = tuple[Op, float, float]
"""An op, and when it began and ended, in seconds."""


def events(
    program: Program,
    steps: Sequence[Iterable[Timed]],
    *,
    process: str,
    host: Sequence[Timed] = (),
) -> list[dict[str, Any]]:
    """Return complete events, a microsecond a unit, from the first op's begin; one thread for each
    lane, in the program's order, and one for the times in which the ``host`` starts ops."""
    lanes = {lane: number for number, lane in enumerate(Lane)}
    timed = [(of_op, lanes[of_op[0].lane]) for step in steps for of_op in step]
    timed += [(of_op, len(lanes)) for of_op in host]
    start = min((began for (_, began, _), _ in timed), default=0.0)
    busy = {thread for _, thread in timed}
    threads = [("thread_name", lanes[lane], str(lane)) for lane in Lane if lanes[lane] in busy]
    threads += [("thread_name", len(lanes), HOST)] if host else []
    named = [
        {"ph": "M", "name": field, "pid": process, "tid": tid, "args": {"name": text}}
        for field, tid, text in [("process_name", 0, process), *threads]
    ]
    return named + [
        {
            "ph": "X",
            "name": name(program, op),
            "cat": str(op.kind),
            "pid": process,
            "tid": thread,
            "ts": round(1e6 * (began - start), 3),
            "dur": round(1e6 * (ended - began), 3),
            "args": {
                "op": op.index,
                "bytes": op.nbytes,
                "flops": op.flops,
                "micro_batch": op.micro_batch,
            },
        }
        for (op, began, ended), thread in timed
        if ended > began
    ]


def name(program: Program, op: Op) -> str:
    """Return ``FETCH block 3 frozen``."""
    state = "graph" if op.of_graph else op.part
    part = f" {state}" if state is not None else ""
    return f"{op.kind} {program.unit_names[op.unit]}{part}"


def write(path: str | Path, trace: Sequence[dict[str, Any]]) -> None:
    """Write events as one JSON file, which is whole or not there."""
    text = json.dumps({"traceEvents": list(trace), "displayTimeUnit": "ms"})
    atomic_files.write_bytes(path, text.encode())
