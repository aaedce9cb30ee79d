"""Twelve minutes on one accelerator: ``gpu.sh --minutes 12``.

Parts by value, in one process, whose last moment is known before the first row: a part ends when
its share of the minutes is over, a row that would not end in time is not begun, and the process is
ended with the minutes. Each row is written and printed when it is there. Nothing is fetched; random
models are made in place (:mod:`benchmarks.drawn_models`). Each of our rows stands beside its
forecast.

The shares are those of twelve minutes; what a part leaves over goes to the next."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from benchmarks import gpu_facts, zo_runs
from benchmarks.common import Bound, finish, machine, median
from benchmarks.drawn_models import drawn
from benchmarks.gpu import ROOT, Bench, correct, rows_of, union, write
from benchmarks.vs_peft import PEERS, Peer, theirs

from blockwalk import Walker, method
from blockwalk.numerics.device import is_cpu
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.placement import Codec

EXAMPLE = "examples/quickstart.yaml"
BEGAN = "BLOCKWALK_GPU_BEGAN"
"""The variable that tells the parts' process when the minutes began, as :func:`time.time` does."""
RESERVE = 8.0
"""Seconds before the end of the minutes in which no row is begun: the figures are printed then."""

Opened = tuple[Callable[[], float], Callable[[], None]]
"""A function that takes a step and answers its seconds, and one that lets go of all."""


# ---- what a step does on the card ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel, copy or fill on the device, in µs of one clock."""

    name: str
    start: float
    end: float


def occupied(spans: Iterable[Span]) -> dict[str, float]:
    """Sum up what a device did: milliseconds in which a kernel ran (two at once count once),
    kernels started, copies, and the milliseconds of all copies."""
    kernels = []
    copies = []
    for span in spans:
        if span.name.startswith("Memcpy"):
            copies.append(span)
        elif not span.name.startswith("Memset"):
            kernels.append(span)
    busy = sum(end - start for start, end in union([(k.start, k.end) for k in kernels]))
    return {
        "busy_ms": busy / 1e3,
        "starts": len(kernels),
        "copies": len(copies),
        "copies_ms": sum(span.end - span.start for span in copies) / 1e3,
    }


def activity(device: torch.device, step: Callable[[], float]) -> dict[str, float]:
    """Take a step under PyTorch's profiler of the device; nothing where it knows none of its
    kind."""
    profiler = torch.profiler
    kinds = {"cuda": "CUDA", "xpu": "XPU"}
    if device.type not in kinds:
        return {}
    activities = [profiler.ProfilerActivity.CPU]
    activities.append(getattr(profiler.ProfilerActivity, kinds[device.type]))
    with profiler.profile(activities=activities) as profile:
        step()
    on_host = torch.autograd.DeviceType.CPU
    return occupied(
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        # torch.optim names its step, as a span of the device that is no kernel
        if event.device_type != on_host and not getattr(event, "is_user_annotation", False)
    )


def measured(
    bench: Bench,
    name: str,
    open_: Callable[[], Opened],
    batch: int,
    *,
    needs: float,
    rounds: int = 0,
) -> None:
    """Measure a row: seconds of opening, of the first step and of later ones, what a step does on
    the card, the peak, and the forecast of ours.

    Args:
        needs: seconds that the row takes on a card, about: it is not begun where fewer are left.
        rounds: steps that are timed; the part's number unless told.
    """

    def measure(row: dict[str, Any]) -> None:
        began = time.perf_counter()
        step, close = open_()
        try:
            opened = time.perf_counter()
            row["open_s"] = opened - began
            row["first_step_s"] = step()
            step()
            seconds = [step() for _ in range(rounds or bench.rounds)]
            row |= {"seconds": seconds, "step_ms": median(seconds) * 1e3}
            row["tokens_per_s"] = batch * bench.sequence / median(seconds)
            row |= activity(bench.device, step)
            row |= getattr(step, "foreseen", dict)()
        finally:
            close()

    bench.row(name, measure, needs=needs)


# ---- rows ----------------------------------------------------------------------------------------


def peft(bench: Bench, named: str, batch: int, peer: Peer, *, four_bits: bool = False) -> Opened:
    """Open transformers with PEFT, all of it on the device."""
    take = theirs(
        bench.model(named),
        bench.sequence,
        peer=peer,
        device=str(bench.device),
        batch=batch,
        holds_tokenizer=False,
        four_bits=four_bits,
    )
    count = iter(range(1 << 30))

    def step() -> float:
        zo_runs.wait(bench.device)
        began = time.perf_counter()
        take(next(count))
        zo_runs.wait(bench.device)
        return time.perf_counter() - began

    return step, lambda: None


def lora(bench: Bench, named: str, batch: int, codec: str, tier: str) -> Opened:
    """Open ``mebp`` with adapters of rank 16."""
    settings = {"frozen": f"{tier} × {codec}"}
    if tier == "host":
        settings["activation"] = "host"
    with drawn(bench.model(named), Codec(codec), device=bench.device) as model:
        walker = Walker(
            model, method("mebp", **settings), lora=LoraSettings(rank=16), device=bench.device
        )
    return bench.walk(walker, batch)


def zeroth(bench: Bench, named: str, batch: int, case: str) -> Opened:
    """Open the naive loop, ``mezo`` on the device or ``zo2`` from the host, in float16."""
    name = bench.model(named)
    if case == zo_runs.NAIVE:
        model = zo_runs.naive_model(name, "float16", str(bench.device))
        return zo_runs.naive_stepper(model, batch, bench.sequence), lambda: None
    with drawn(name, Codec.RAW, "float16", device=bench.device) as folder:
        walker = zo_runs.open_walker(case, Path(folder), "host", str(bench.device))
    return bench.walk(walker, batch)


# ---- parts ---------------------------------------------------------------------------------------


def start(bench: Bench) -> list[Bound]:
    """A new user's first half minute: ``train``, ``eval`` and ``generate`` of README's example."""
    few = ["--data.eval_limit", "16"]
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        lines = {
            "train": [EXAMPLE, "--output_dir", run, "--max_steps", "3", "--log_every", "1", *few],
            "eval": [run, *few],
            "generate": [run, "--prompt", "Hugo went to the theater.", "--max_new_tokens", "8"],
        }
        for command, arguments in lines.items():

            def measure(
                row: dict[str, Any], command: str = command, arguments: list[str] = arguments
            ) -> None:
                row |= command_line(bench, [command, *arguments])

            bench.row(f"blockwalk {command}", measure, needs=6)
    rests = "what a new user types first"
    return [
        Bound(f"{name}: exit code", row["code"], 0, rests=rests)
        for name, row in bench.rows.items()
        if "code" in row
    ]


def command_line(bench: Bench, arguments: list[str]) -> dict[str, Any]:
    """Run ``blockwalk`` in a process of its own: its exit code, seconds until the first loss of a
    step and until the end, and its last words."""
    # a command that was ended tells little: it may take half a minute of the next part
    left = max((bench.ends or float("inf")) - time.perf_counter() + 30, 1)
    command = [sys.executable, "-m", "blockwalk", *arguments, "--device", str(bench.device)]
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    killer = threading.Timer(min(left, 600), process.kill)
    killer.start()
    words: list[str] = []
    first_loss = None
    assert process.stdout is not None
    for line in process.stdout:
        words.append(line)
        if first_loss is None and line.lstrip().startswith("step ") and "loss" in line:
            first_loss = time.perf_counter() - began
    code = process.wait()
    killer.cancel()
    row = {"code": code, "seconds": time.perf_counter() - began, "words": "".join(words)[-1500:]}
    if code:
        print("".join(words[-3:]), flush=True)
    return row if first_loss is None else {**row, "first_loss_s": first_loss}


CHECKPOINTED = PEERS["bf16 checkpointed"]
STEPS: dict[str, tuple[Callable[..., Opened], tuple[Any, ...], float]] = {
    zo_runs.NAIVE: (zeroth, ("OPT-1.3B", zo_runs.NAIVE), 9),
    zo_runs.MEZO: (zeroth, ("OPT-1.3B", zo_runs.MEZO), 9),
    "zo2": (zeroth, ("OPT-1.3B", "zo2"), 9),
    "PEFT": (peft, ("Qwen2.5-1.5B", CHECKPOINTED), 10),
    "int4a, device": (lora, ("Qwen2.5-1.5B", "int4a", "device"), 12),
    "raw, host": (lora, ("Qwen2.5-1.5B", "raw", "host"), 10),
    "raw, device": (lora, ("Qwen2.5-1.5B", "raw", "device"), 10),
}
"""How each row of part *steps* is opened, and about how many seconds it takes."""
ISSUED = {
    "mezo, 1": 4.05, "mezo, 4": 1.8, "zo2, 4": 1.2,
    "raw, host, 1": 3.25, "int4a, device, 1": 4.5,
    "raw, host, 4": 1.2, "int4a, device, 4": 1.85,
}  # fmt: skip
"""Half of a step's wall time by the card's busy time, as both were on an H200 at first."""


def opening(
    bench: Bench, open_: Callable[..., Opened], facts: tuple[Any, ...], batch: int
) -> Callable[[], Opened]:
    named, *rest = facts
    return lambda: open_(bench, named, batch, *rest)


def steps(bench: Bench) -> list[Bound]:
    """Wall time, the card's busy time, starts, copies and peak of a step, ours and the peers'."""
    for batch in (1, 4):
        for name, (open_, facts, needs) in STEPS.items():
            if batch == 4 and name == "raw, device":
                continue
            measured(
                bench, f"{name}, {batch}", opening(bench, open_, facts, batch), batch, needs=needs
            )
    rests = "half of what it was at first"
    bounds = [
        Bound(f"{name}: step by the card's busy time", ratio, limit, rests=rests)
        for name, limit in ISSUED.items()
        if (ratio := wall_by_busy(bench.rows.get(name, {}))) is not None
    ]
    for batch, limit in ((1, 1.2), (4, 1.0)):
        sides = f"mezo, {batch}", f"{zo_runs.NAIVE}, {batch}"
        title = f"seconds of mezo by the naive loop's, {batch} × 2048"
        bounds += bench.compared(title, "step_ms", *sides, limit, rests="the same forwards")
        sides = f"int4a, device, {batch}", f"PEFT, {batch}"
        title = f"seconds of int4a on the device by PEFT's, checkpointed, {batch} × 2048"
        bounds += bench.compared(title, "step_ms", *sides, 1.3, rests="and a pass of decoding")
    return bounds


def wall_by_busy(row: Mapping[str, Any]) -> float | None:
    """Return a step's wall time by the card's busy time; None where one was not measured."""
    return row["step_ms"] / row["busy_ms"] if row.get("busy_ms") and "step_ms" in row else None


def thirteen(bench: Bench) -> list[Bound]:
    """OPT-13B: ``zo2`` from the host, ``mezo`` on the device and the naive loop."""
    for batch, case, needs in ((4, "zo2", 25), (1, "zo2", 20), (1, zo_runs.MEZO, 15)):
        open_ = opening(bench, zeroth, ("OPT-13B", case), batch)
        measured(bench, f"{case}, {batch}", open_, batch, needs=needs, rounds=3)
    open_ = opening(bench, zeroth, ("OPT-13B", zo_runs.NAIVE), 1)
    measured(bench, f"{zo_runs.NAIVE}, 1", open_, 1, needs=15, rounds=3)
    sides = "zo2, 1", "mezo, 1"
    rests = "2 slots of 24 blocks and more"
    return bench.compared("peak of zo2 by mezo's, OPT-13B", "peak_MB", *sides, 0.3, rests=rests)


def seven(bench: Bench) -> list[Bound]:
    """LoRA of Qwen2.5-7B beside PEFT's settings and bitsandbytes, 4 × 2048."""
    named = "Qwen2.5-7B"
    offloads = Peer("bfloat16", checkpointing=True, offloads=True)
    rows: dict[str, tuple[Callable[..., Opened], tuple[Any, ...]]] = {
        "int4a, device": (lora, (named, "int4a", "device")),
        "PEFT, checkpointed": (peft, (named, CHECKPOINTED)),
        "int4a, host": (lora, (named, "int4a", "host")),
        "PEFT": (peft, (named, PEERS["bf16"])),
        "raw, device": (lora, (named, "raw", "device")),
    }
    if not is_cpu(bench.device):  # it pins memory
        rows["PEFT, activations on the host"] = (peft, (named, offloads))
    for name, (open_, facts) in rows.items():
        needs = 16 if open_ is peft else 12
        measured(bench, f"{name}, 4", opening(bench, open_, facts, 4), 4, needs=needs, rounds=3)
    if find_spec("bitsandbytes"):

        def coded() -> Opened:
            return peft(bench, named, 4, CHECKPOINTED, four_bits=True)

        measured(bench, "PEFT + bitsandbytes, 4", coded, 4, needs=20, rounds=3)
    if find_spec("liger_kernel"):  # the last row: it changes transformers for good

        def fused() -> Opened:
            from liger_kernel.transformers import apply_liger_kernel_to_qwen2

            apply_liger_kernel_to_qwen2()
            return peft(bench, named, 4, CHECKPOINTED)

        measured(bench, "PEFT + Liger, 4", fused, 4, needs=20, rounds=3)
    rests = "a 7B opens within 5 s: codes are drawn on the card"
    return opened_within(bench, "int4a, device, 4", 5, rests)


def seventy(bench: Bench) -> list[Bound]:
    """LoRA of Llama-3-70B in int4a from host memory."""
    for batch, needs in ((4, 60), (1, 45)):
        open_ = opening(bench, lora, ("Llama-3-70B", "int4a", "host"), batch)
        measured(bench, f"int4a, host, {batch}", open_, batch, needs=needs, rounds=2)
    rests = "a 70B in int4a opens within 15 s: 40 GB are pinned, and copied from the card"
    return opened_within(bench, "int4a, host, 4", 15, rests)


def opened_within(bench: Bench, name: str, seconds: float, rests: str) -> list[Bound]:
    """The bound of the seconds in which a row was opened; none where it was not measured."""
    row = bench.rows.get(name, {})
    return [Bound(f"{name}: seconds to open", row["open_s"], seconds, rests=rests)] * (
        "open_s" in row
    )


def forecasts(rows: Mapping[str, Mapping[str, Any]]) -> list[Bound]:
    """The bounds of forecasts beside what was found, of seconds and of memory."""
    bounds = []
    for name, row in rows.items():
        for shown, foreseen, found, limit in (
            ("seconds", "foreseen_tokens_per_s", "tokens_per_s", 0.25),
            ("memory", "foreseen_MB", "peak_MB", 0.03),
        ):
            if row.get(foreseen) and row.get(found):
                pair = (row[foreseen], row[found])
                title = f"{name}: {shown} foreseen, error"
                rests = "the program that runs"
                bounds.append(Bound(title, max(pair) / min(pair) - 1, limit, rests=rests))
    return bounds


def right(bench: Bench) -> list[Bound]:
    return correct(bench, command=False)


PARTS: dict[str, tuple[Callable[[Bench], list[Bound]], float]] = {
    "start": (start, 30),
    "steps": (steps, 150),
    "correct": (right, 60),
    "13B": (thirteen, 90),
    "facts": (gpu_facts.facts, 40),
    "7B": (seven, 120),
    "70B": (seventy, 120),
}
"""Parts by value, with the seconds of each, of twelve minutes."""
WHOLE = sum(seconds for _, seconds in PARTS.values())


def shares(seconds: float) -> dict[str, float]:
    """The second at which each part ends, of so many for all. What they have more than the parts
    take is the last part's."""
    scale = min(seconds / WHOLE, 1.0)
    ends = {}
    total = 0.0
    for name, (_, share) in PARTS.items():
        total += share * scale
        ends[name] = total
    ends[name] = seconds
    return ends


def work(arguments: argparse.Namespace, folder: Path) -> None:
    """All parts, in this process. A part that fails is told, and the next goes on."""
    began = time.perf_counter()
    spent = time.time() - float(os.environ.get(BEGAN, time.time()))
    seconds = max(arguments.minutes * 60 - RESERVE - spent, 0.0)
    for name, end in shares(seconds).items():
        if arguments.part and name not in arguments.part:
            continue
        path = folder / f"minutes-{name}.json"
        bench = Bench(arguments, rows_of(path), folder.parent / f"gpu-facts-{folder.name}.json")
        bench.ends = began + end
        print(f"{name} ({spent + time.perf_counter() - began:.0f} s)", flush=True)
        try:
            bounds = PARTS[name][0](bench)
        except Exception as error:
            bench.failed[name] = f"{type(error).__name__}: {error}"
            bounds = []
        bounds += forecasts(bench.rows)
        bounds += [
            Bound(f"{name}: {row} ran ({error})", 0, 1, at_most=False)
            for row, error in bench.failed.items()
        ]
        value = {"machine": machine(), "device": str(bench.device), "tiny": bench.tiny,
                 "part": name, "seconds": time.perf_counter() - began, "figures": bench.rows,
                 "failed": bench.failed, "late": bench.late,
                 "bounds": [vars(bound) for bound in bounds]}  # fmt: skip
        write(path, value)


SHOWN = ("step_ms", "busy_ms", "starts", "peak_MB", "open_s")
"""The figures of a row that its line of the table has."""


def summary(parts: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """The lines of the table: a row's milliseconds, busy milliseconds, starts and peak."""
    yield f"{'row':38} {'ms':>9} {'busy':>8} {'starts':>7} {'peak MB':>8} {'open s':>7}"
    for part, value in parts.items():
        for name, row in value["figures"].items():
            if "step_ms" in row:
                cells = [row.get(key) for key in SHOWN]
                shown = [f"{cell:.1f}" if cell is not None else "–" for cell in cells]
                yield "{:38} {:>9} {:>8} {:>7} {:>8} {:>7}".format(f"{part}: {name}", *shown)
        if value.get("late"):
            yield f"{part}: no time for {', '.join(value['late'])}"


def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Run all parts in a process that ends with the minutes, and print what they found."""
    seconds = arguments.minutes * 60
    for name in PARTS:
        path = folder / f"minutes-{name}.json"
        path.unlink(missing_ok=True)
        if arguments.again:
            rows_of(path).unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--worker", "minutes"]
    command += ["--minutes", str(arguments.minutes), "--device", str(arguments.device)]
    command += ["--results", str(arguments.results), *["--tiny"] * arguments.tiny]
    command += ["--part", *arguments.part] if arguments.part else []
    began = time.time()
    environment = {**os.environ, BEGAN: str(began), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(timeout=seconds)
        reason = f"it ended with code {code}" if code else ""
    except subprocess.TimeoutExpired:
        reason = f"the {arguments.minutes:g} minutes were over"
    finally:
        if process.poll() is None:  # with the commands that it has begun
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    parts = {}
    for name in PARTS:
        path = folder / f"minutes-{name}.json"
        if path.exists():
            parts[name] = json.loads(path.read_text())
        elif rows_of(path).exists():
            parts[name] = {"figures": json.loads(rows_of(path).read_text()), "bounds": []}
    print("\n".join(summary(parts)), flush=True)
    bounds = [Bound(**bound) for value in parts.values() for bound in value["bounds"]]
    if arguments.tiny:  # nothing there is of a size that a bound is about, but it has to run
        bounds = [bound for bound in bounds if " ran (" in bound.name]
    if reason:
        bounds.append(Bound(f"all parts ran ({reason})", 0, 1, at_most=False))
    finish(arguments, {"folder": str(folder), "seconds": time.time() - began}, bounds)
