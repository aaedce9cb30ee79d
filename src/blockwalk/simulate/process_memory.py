"""The memory of a process on a CPU at a step's peak: its tensors, and the bytes that come with them.

A program counts tensors. The interpreter and its libraries are there before; the C allocator keeps freed memory that it cannot
use again. ``blockwalk doctor`` measures both on a small walk of its own. Nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter

from blockwalk.plan.mesh import ranks_over
from blockwalk.plan.plan import Plan
from blockwalk.program.program import OpKind, Pool, Program
from blockwalk.simulate.hardware import Hardware

KINDS = ("graphs", "adapters", "recompute", "streamed", "forwards")
"""Kinds of walk that leave the allocator differently: graphs kept over the step, of all parameters or of adapters; blocks
recomputed; streamed, which bounds its free heap (:mod:`blockwalk.system.heap`); forwards alone."""

GUESSED = "free heap and buffers of libraries are foreseen as they were elsewhere; blockwalk doctor measures them here"
"""The words of a forecast on a machine that was not measured."""


def walk_kind(plan: Plan, program: Program, *, adapters: bool) -> str:
    """The one of :data:`KINDS` that a step is."""
    if plan.zeroth_order:
        return "forwards"
    if program.streamed:
        return "streamed"
    if not any(op.keep_graph for op in program.ops):
        return "recompute"
    return "adapters" if adapters else "graphs"


def tensors(program: Program) -> int:
    """Bytes of tensors in a processor's own memory at the step's peak."""
    peaks = program.peaks()
    return peaks[Pool.DEVICE] + peaks[Pool.HOST]


def transients(program: Program) -> int:
    """Those that come and go within the step."""
    held = Counter(dict(program.static))
    return tensors(program) - held[Pool.DEVICE] - held[Pool.HOST]


def process_peak(program: Program, plan: Plan, hardware: Hardware, *, adapters: bool, process: int = 0) -> int:
    """Bytes of the whole process, pages of mapped files left out. ``process``: those that it holds before a model is opened,
    where they are known; doctor's walks tell of a bare one."""
    kind = walk_kind(plan, program, adapters=adapters)
    bare, held = max(hardware.process_bytes.get(kind, 0), process), tensors(program) - transients(program)
    return bare + held + step_growth(program, plan, hardware, adapters=adapters)


def step_growth(program: Program, plan: Plan, hardware: Hardware, *, adapters: bool) -> int:
    """Bytes that a process with an open model grows by in a step: what comes and goes, and the free heap that it leaves."""
    kind, moving = walk_kind(plan, program, adapters=adapters), transients(program)
    return moving + int(hardware.slack.get(kind, 0.0) * moving) + 2 * _gather_copy(plan, program)


def _gather_copy(plan: Plan, program: Program) -> int:
    """Bytes of gloo's own copy of the largest gather, whose whole output it makes before it hands it over. It counts twice:
    the hole that it leaves is kept as other free heap is."""
    if not plan.sharded:
        return 0
    ranks = ((op.nbytes, ranks_over(plan.mesh, op.axes)) for op in program.ops if op.kind is OpKind.GATHER)
    return max((nbytes * n // (n - 1) for nbytes, n in ranks if n > 1), default=0)
