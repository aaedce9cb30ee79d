"""The memory of a process on a CPU at a step's peak: its tensors, and the bytes that come with
them.

A program counts tensors. The interpreter and its libraries are there before. Steps bring buffers
and compiled products, which hardly depend on the model; and the C allocator keeps freed memory that
it cannot use again, which grows with what comes and goes. ``blockwalk doctor`` measures all three
on small walks of its own. Nothing here imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from blockwalk.plan.mesh import ranks_over
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.plan import Plan
from blockwalk.program.program import OpKind, Pool, Program
from blockwalk.program.state_sizes import compute_dtype
from blockwalk.simulate.hardware import Hardware

KINDS = ("graphs", "adapters", "recompute", "streamed", "streamed, 16 bits", "forwards")
"""Kinds of walk that leave the allocator differently: graphs kept over the step, of all parameters
or of adapters; blocks recomputed; streamed, which bounds its free heap
(:mod:`blockwalk.system.heap`), in float32 or in 16 bits, whose products oneDNN compiles and keeps
(:mod:`blockwalk.numerics.row_tiles`); forwards alone."""

GUESSED = (
    "free heap and buffers of libraries are foreseen as they were elsewhere; blockwalk doctor"
    " measures them here"
)
"""The words of a forecast on a machine that was not measured."""

_FREE_IN_LONG_STEPS = 16 * 10**6
"""Bytes of free heap among the smaller tensors of a step that gives large ones back at once: 20 to
29 MB by the C library's own figures at the peaks of a step of 4,096 tokens (three blocks of
Qwen2.5-0.5B), not all of it in memory; a whole run of 8,192 held 5 MB more than was foreseen
without any."""


def walk_kind(plan: Plan, program: Program, model: ModelSpec) -> str:
    """Return the one of :data:`KINDS` that a step is."""
    if not plan.estimator.facts.walks_back:
        return "forwards"
    if program.streamed:
        return "streamed" if compute_dtype(plan, model) == "float32" else "streamed, 16 bits"
    if not any(op.keep_graph for op in program.ops):
        return "recompute"
    return "adapters" if model.numel(trainable=False) else "graphs"


def found_for(kind: str, figures: Mapping[str, float]) -> float:
    """Return the figure of a kind of walk, 0 without one; an older description has one of streamed
    walks in any dtype."""
    return figures.get(kind, figures.get(kind.partition(",")[0], 0))


def tensors(program: Program) -> int:
    """Return bytes of tensors in a processor's own memory at the step's peak."""
    peaks = program.peaks()
    return peaks[Pool.DEVICE] + peaks[Pool.HOST]


def transients(program: Program) -> int:
    """Return those that come and go within the step."""
    static = Counter(dict(program.static))
    return tensors(program) - static[Pool.DEVICE] - static[Pool.HOST]


def process_peak(
    program: Program, plan: Plan, hardware: Hardware, model: ModelSpec, *, process: int = 0
) -> int:
    """Return bytes of the whole process, pages of mapped files left out. ``process``: those that it
    holds before a model is opened, where they are known; doctor's walks tell of a bare one."""
    bare = max(found_for(walk_kind(plan, program, model), hardware.process_bytes), process)
    return (
        int(bare)
        + tensors(program)
        - transients(program)
        + step_growth(program, plan, hardware, model)
    )


def step_growth(program: Program, plan: Plan, hardware: Hardware, model: ModelSpec) -> int:
    """Return bytes that a process with an open model grows by in its steps: libraries' buffers,
    what comes and goes, and the free heap that it leaves."""
    kind = walk_kind(plan, program, model)
    moving = transients(program)
    returned = plan.returns_memory(program.shape.sequence, "cpu")
    freed = _FREE_IN_LONG_STEPS if returned else found_for(kind, hardware.slack) * moving
    return moving + int(found_for(kind, hardware.buffers) + freed) + 2 * _gather_copy(plan, program)


def _gather_copy(plan: Plan, program: Program) -> int:
    """Return bytes of gloo's own copy of the largest gather, whose whole output it makes before it
    hands it over. It counts twice: the hole that it leaves is kept as other free heap is."""
    if not plan.home.gathered:
        return 0
    ranks = (
        (op.nbytes, ranks_over(plan.mesh, op.axes))
        for op in program.ops
        if op.kind is OpKind.GATHER
    )
    return max((nbytes * n // (n - 1) for nbytes, n in ranks if n > 1), default=0)
