"""Where the seconds of a step on a processor go, beside what the processor can do at those shapes.

Every operation of the compute lane is timed by torch's profiler with its shapes. Each distinct
product and attention is then run alone, in the same process, on tensors of the same shapes; an
element-wise pass and the decoding of weights are priced at the memory's measured bandwidth. What
the profiler does not see inside an op of the program is Python; what lies between the ops is
waiting for a lane."""

from __future__ import annotations

import math
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from blockwalk.numerics import native_products
from blockwalk.numerics.codecs.weights import EncodedWeight
from blockwalk.numerics.row_tiles import multiplied_in
from blockwalk.program.program import Lane

DECODING = "blockwalk::decode "
"""The beginning of such an operation's name; the elements that it decodes follow."""
PRODUCT = "blockwalk::product "
"""The same of a product by our kernel, which decodes a weight inside it and adds an adapter's; its
rows, summands and columns follow."""
OPERANDS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::addmm_": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::baddbmm_": (1, 2),
}
"""Products, and the places of their two matrices among the arguments."""
ATTENTION = "scaled_dot_product", "causal_attention"
VIEWS = (
    "aten::empty", "aten::empty_strided", "aten::view", "aten::as_strided", "aten::t",
    "aten::transpose", "aten::slice", "aten::select", "aten::reshape", "aten::detach",
    "aten::expand", "aten::permute", "aten::unsqueeze", "aten::narrow", "aten::split",
    "aten::_unsafe_view", "aten::alias", "aten::squeeze", "aten::chunk", "aten::resize_",
)  # fmt: skip
"""Operations that move nothing: their seconds are the price of starting them."""
CLASSES = ("products", "thin products", "attention", "element-wise", "decoding", "starts")
THIN = 64
"""Rows, columns or summands under which a product counts as thin: an adapter's."""
REPEATS = 5
UNEXPLAINED = 0.10
"""The most of a step that may be neither an operation nor waiting."""


@dataclass(frozen=True)
class Call:
    """One operation of the profile, without those that it called."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    began: int
    """Nanoseconds."""
    seconds: float
    """Its own, those of operations within it left out."""


@dataclass
class Row:
    """One kind of op of the program: seconds by class, and those that this processor can do."""

    wall: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    attainable: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))

    @property
    def python(self) -> float:
        """Seconds in which no operation ran."""
        return self.wall - sum(self.spent.values())


@dataclass(frozen=True)
class Roofline:
    """One step."""

    seconds: float
    rows: dict[str, Row]
    waiting: float
    """Seconds in which the compute lane had nothing to do."""
    idle_share: float
    """The share of the cores' time that no thread used."""
    faults: int
    fault_seconds: float
    """Page faults of the step, and their seconds at the measured price of one: a part of the
    classes', not beside them."""

    @property
    def unexplained(self) -> float:
        """The share of the step that is neither an operation nor waiting."""
        return sum(row.python for row in self.rows.values()) / self.seconds


def roofline(walker: Any, batch: Any) -> Roofline:
    """Profile one step of a walker that is warm."""
    walker.timeline = []
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    walker.step(batch)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    faults = after.ru_minflt - before.ru_minflt
    walker.timeline = []
    with (
        _decoding(),
        _multiplying(),
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled,
    ):
        began_ns = time.time_ns()
        began = time.perf_counter()
        walker.step(batch)
        profiled_seconds = time.perf_counter() - began
    timeline = walker.timeline
    walker.timeline = None
    spans = [
        (str(op.kind), start, end)
        for _, ops in timeline
        for op, start, end in ops
        if op.lane is Lane.COMPUTE
    ]
    calls = list(_calls(profiled))
    rows = _by_op(spans, calls, began_ns - int(began * 1e9))
    busy = sum(row.wall for row in rows.values())
    threads = torch.get_num_threads()
    return Roofline(
        seconds=profiled_seconds,
        rows=rows,
        waiting=profiled_seconds - busy,
        idle_share=1 - processor / (threads * seconds),
        faults=faults,
        fault_seconds=faults * _fault_seconds(),
    )


def in_words(found: Roofline) -> Iterator[str]:
    """Yield a table: seconds of each class by kind of op, and the share that the processor can
    do."""
    total = Row()
    for row in found.rows.values():
        total.wall += row.wall
        for name in CLASSES:
            total.spent[name] += row.spent[name]
            total.attainable[name] += row.attainable[name]
    yield "| op | seconds | " + " | ".join(CLASSES) + " | Python |"
    yield "|---|---|" + "---|" * (len(CLASSES) + 1)
    for kind, row in [*found.rows.items(), ("all", total)]:
        cells = [f"{row.spent[name]:.3f} ({row.attainable[name]:.3f})" for name in CLASSES]
        yield f"| {kind.lower()} | {row.wall:.3f} | {' | '.join(cells)} | {row.python:.3f} |"
    yield ""
    yield (
        f"step {found.seconds:.3f} s; waiting for lanes {found.waiting:.3f} s; cores idle"
        f" {100 * found.idle_share:.0f}%; {found.faults} page faults, {found.fault_seconds:.3f} s;"
        f" unexplained {100 * found.unexplained:.1f}%"
    )


# ---- the profile ---------------------------------------------------------------------------------


@contextmanager
def _decoding() -> Iterator[None]:
    """Record the calls of the decoder as operations."""
    elements: dict[str, Callable[..., int]] = {
        "rows": lambda weight, start, stop: (stop - start) * weight.layout.columns,
        "columns": lambda weight, start, stop: (stop - start) * weight.shape[0],
        "gather": lambda weight, index: index.numel() * weight.layout.columns,
    }
    originals = {name: getattr(EncodedWeight, name) for name in elements}

    def recorded(function: Callable[..., Any], count: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with record_function(f"{DECODING}{count(*args)}"):
                return function(*args)

        return call

    for name, function in originals.items():
        setattr(EncodedWeight, name, recorded(function, elements[name]))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(EncodedWeight, name, function)


@contextmanager
def _multiplying() -> Iterator[None]:
    """Record the calls of our kernel of products as operations."""
    original = native_products.run

    def recorded(a_PI: Any, b: Any, out_PO: Any, *args: Any, **kwargs: Any) -> None:
        with record_function(f"{PRODUCT}{a_PI.shape[0]} {a_PI.shape[1]} {out_PO.shape[1]}"):
            original(a_PI, b, out_PO, *args, **kwargs)

    native_products.run = recorded
    try:
        yield
    finally:
        native_products.run = original


def _calls(profiled: Any) -> Iterator[Call]:
    """Yield the operations of the thread that ran most of them; their own seconds are what calls
    within them leave."""
    by_thread: dict[int, list[Any]] = defaultdict(list)
    for event in profiled.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CPU:
            by_thread[event.start_thread_id()].append(event)
    events = max(by_thread.values(), key=len)
    events.sort(key=lambda event: (event.start_ns(), -event.duration_ns()))
    within: list[list[Any]] = []  # open calls: event, nanoseconds of its children
    for event in [*events, None]:
        while within and (event is None or _end(within[-1][0]) <= event.start_ns()):
            closed, children = within.pop()
            own = (closed.duration_ns() - children) / 1e9
            yield Call(
                closed.name(),
                tuple(tuple(shape) for shape in closed.shapes()),
                tuple(closed.dtypes()),
                closed.start_ns(),
                own,
            )
        if event is not None:
            if within:
                within[-1][1] += event.duration_ns()
            within.append([event, 0])


def _end(event: Any) -> int:
    return int(event.start_ns() + event.duration_ns())


def _by_op(
    spans: Sequence[tuple[str, float, float]], calls: Sequence[Call], offset: int
) -> dict[str, Row]:
    """Return calls added up by the kind of the op that they began in."""
    rows: dict[str, Row] = defaultdict(Row)
    attainable = Attainable()
    starts = sorted((int(began * 1e9) + offset, kind, began, ended) for kind, began, ended in spans)
    for _, kind, began, ended in starts:
        rows[kind].wall += ended - began
    place = 0
    for call in sorted(calls, key=lambda call: call.began):
        while place + 1 < len(starts) and starts[place + 1][0] <= call.began:
            place += 1
        start, kind, began, ended = starts[place]
        if not start <= call.began <= start + int((ended - began) * 1e9):
            continue
        name = class_of(call)
        rows[kind].spent[name] += call.seconds
        rows[kind].attainable[name] += attainable.seconds(call, name)
    return dict(rows)


def class_of(call: Call) -> str:
    """Return the one of :data:`CLASSES` that an operation is of."""
    if call.name.startswith(DECODING):
        return "decoding"
    if any(name in call.name for name in ATTENTION):
        return "attention"
    if call.name in OPERANDS or call.name.startswith(PRODUCT):
        return "thin products" if min(_sides(call)) < THIN else "products"
    if call.name in VIEWS or not any(map(math.prod, filter(None, call.shapes))):
        return "starts"
    return "element-wise"


def _sides(call: Call) -> list[int]:
    """Return the sides of a product's matrices."""
    if call.name.startswith(PRODUCT):
        return [int(side) for side in call.name.removeprefix(PRODUCT).split()]
    return [side for place in OPERANDS[call.name] for side in call.shapes[place][-2:]]


# ---- what this processor can do ------------------------------------------------------------------


class Attainable:
    """Seconds of an operation alone, measured once for each shape; the best of several runs."""

    def __init__(self) -> None:
        self._known: dict[Any, float] = {}
        self._bandwidth = _bandwidth()
        self._flops = _flops()

    def seconds(self, call: Call, name: str) -> float:
        """Return the least seconds of such a call here; no more than it took."""
        if name == "starts":
            return 0.0
        key = (call.name, call.shapes, call.dtypes)
        if key not in self._known:
            self._known[key] = self._measured(call, name)
        return min(self._known[key], call.seconds)

    def _measured(self, call: Call, name: str) -> float:
        if name == "decoding":  # codes of half a byte are read, bfloat16 is written
            return 2.5 * int(call.name.removeprefix(DECODING)) / self._bandwidth
        if name == "attention":
            return _attention_flops(call) / self._flops
        if call.name.startswith(PRODUCT):
            rows, inner, columns = _sides(call)
            a = torch.ones(rows, inner, dtype=torch.bfloat16)
            b = torch.ones(inner, columns, dtype=torch.bfloat16)
            return _best(lambda: torch.matmul(a, b))
        tensors = {
            place: torch.ones(shape, dtype=_DTYPES[dtype])
            for place, (shape, dtype) in enumerate(zip(call.shapes, call.dtypes, strict=False))
            if shape and dtype in _DTYPES
        }
        if name in ("products", "thin products"):
            a, b = (tensors[place] for place in OPERANDS[call.name])
            return _best(lambda: torch.matmul(a, b))
        sizes = [tensor.nbytes for tensor in tensors.values()]
        return (sum(sizes) + max(sizes, default=0)) / self._bandwidth


def _attention_flops(call: Call) -> int:
    """Return FLOPs of causal attention [B, H, S, D], forward or backward."""
    batch, heads, length, size = call.shapes[0]
    forward = 2 * batch * heads * length * length * size
    return forward * 5 // 2 if call.name.endswith("backward") else forward


_DTYPES = {
    "c10::BFloat16": torch.bfloat16,
    "c10::Half": torch.float16,
    "float": torch.float32,
    "long int": torch.int64,
    "bool": torch.bool,
    "unsigned char": torch.uint8,
}


def _best(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _bandwidth() -> float:
    """Return bytes/s of a copy from memory to memory, read and written."""
    source = torch.ones(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best(lambda: target.copy_(source))


def _flops() -> float:
    """Return FLOP/s of a large product in the dtype that 16-bit numbers are multiplied in."""
    side = 2048
    a, b = (torch.ones(side, side, dtype=multiplied_in(torch.bfloat16)) for _ in range(2))
    return 2 * side**3 / _best(lambda: torch.mm(a, b))


def _fault_seconds() -> float:
    """Return seconds of one page fault of fresh memory, beside writing the page."""
    import mmap

    size = 32 << 20

    def touch() -> None:
        with mmap.mmap(-1, size) as fresh:
            torch.frombuffer(fresh, dtype=torch.uint8).fill_(1)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    seconds = _best(touch)
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / (REPEATS + 1)
    return seconds / max(faults, 1)
