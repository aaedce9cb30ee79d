"""A step's timeline in Chrome's trace format, for Perfetto: of a simulation or of a real run, with
the same lanes and names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from blockwalk.program.program import Lane, Op, Program
from blockwalk.system import atomic_files

Timed = tuple[Op, float, float]
"""An op, and when it began and ended, in seconds."""


def events(
    program: Program, steps: Sequence[Iterable[Timed]], *, process: str
) -> list[dict[str, Any]]:
    """Complete events, a microsecond a unit, from the first op's begin; one thread for each lane,
    in the program's order."""
    lanes = {lane: number for number, lane in enumerate(Lane)}
    timed = [each for step in steps for each in step]
    start = min((began for _, began, _ in timed), default=0.0)
    used = {op.lane for op, _, _ in timed}
    names = [
        ("process_name", 0, process),
        *(("thread_name", lanes[lane], str(lane)) for lane in Lane if lane in used),
    ]
    named = [
        {"ph": "M", "name": what, "pid": process, "tid": tid, "args": {"name": each}}
        for what, tid, each in names
    ]
    return named + [
        {
            "ph": "X",
            "name": name(program, op),
            "cat": str(op.kind),
            "pid": process,
            "tid": lanes[op.lane],
            "ts": round(1e6 * (began - start), 3),
            "dur": round(1e6 * (ended - began), 3),
            "args": {
                "op": op.index,
                "bytes": op.nbytes,
                "flops": op.flops,
                "micro_batch": op.micro_batch,
            },
        }
        for op, began, ended in timed
        if ended > began
    ]


def name(program: Program, op: Op) -> str:
    """Return ``FETCH block 3 frozen``."""
    part = f" {op.part}" if op.part is not None else ""
    return f"{op.kind} {program.unit_names[op.unit]}{part}"


def write(path: str | Path, found: Sequence[dict[str, Any]]) -> None:
    """Write events as one JSON file, which is whole or not there."""
    atomic_files.write_bytes(
        path, json.dumps({"traceEvents": list(found), "displayTimeUnit": "ms"}).encode()
    )
