"""An hour on one accelerator: parts in the order of their value, each in a process of its own,
within eight minutes, 100 GiB of host memory and 50 GiB of disk. A row is written when it is there,
a JSON file of rows a part: a part that was killed, or one of whose rows failed, goes on from the
rows that it has. What is done is not done again.

    benchmarks/gpu.sh [--part NAME ...] [--again] [--check]
    benchmarks/gpu.sh --minutes 12 [--check]   # what matters most, by a clock (gpu_minutes.py)
    benchmarks/gpu.sh --device cpu --tiny   # the script itself, without a GPU: proves no number

Each bound says what it rests on. Peaks are the allocator's: without the driver's context and the
libraries' workspaces."""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks import gpu_facts, zo_runs
from benchmarks.common import (
    CACHE,
    Bound,
    finish,
    interleaved,
    machine,
    median,
    parser,
    random_batch,
    random_store,
)
from benchmarks.vs_peft import theirs

from blockwalk import Walker, method
from blockwalk.numerics.device import card_of, chosen, is_cpu
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.placement import Codec
from blockwalk.program.program import Pool, Shape, StepKind
from blockwalk.simulate.hardware import of_this_machine, save, with_facts
from blockwalk.simulate.simulator import simulate
from blockwalk.system import card as cards

RESULTS = Path(__file__).resolve().parent / "results"
SECONDS = 480
HOST = 100 << 30
DISK = 50 << 30
"""A part's limits: seconds, bytes of host memory that may be in use, bytes of disk that benchmarks
may keep."""
ROOT = Path(__file__).resolve().parents[1]
PUBLISHED_MB = {"OPT-1.3B": 3750, "OPT-6.7B": 4992}
"""ZO2's peak in fp16 at batch 1 × 2048 on an A100 (Wang et al. 2025, table 1). Ours is to be half
of it."""
TINY = {
    "OPT-1.3B": "OPT-tiny",
    "OPT-6.7B": "OPT-tiny",
    "OPT-13B": "OPT-tiny",
    "Qwen2.5-1.5B": "Qwen2-tiny",
    "Qwen2.5-7B": "Qwen2-tiny",
    "Llama-3-70B": "Qwen2-tiny",
}

ROWS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "plain": ("plain", {"recompute": "all"}, False),
    "plain, activations on the host": ("plain", {"recompute": "all", "activation": "host"}, True),
    "plain, all from the host": (
        "plain",
        {"trainable": "host × fp32", "optimizer_state": "host × fp32"},
        False,
    ),
    "mebp": ("mebp", {}, True),
    "mebp int4": ("mebp", {"frozen": "host × int4", "activation": "host"}, True),
    "mebp nf4": ("mebp", {"frozen": "host × nf4", "activation": "host"}, True),
    "mezo": ("mezo", {}, False),
    "zo2": ("zo2", {}, False),
    "zo2 fp8": ("zo2", {"trainable": "host × fp8", "gradient_accumulation_steps": 2}, False),
    "zo2 int8": ("zo2", {"trainable": "host × int8"}, False),
    "zo2 disk": ("zo2", {"trainable": "disk", "frozen": "disk"}, False),
    "zero3": ("zero3", {}, False),
    "fcdp": ("fcdp", {"gradient_accumulation_steps": 2}, False),
    "hzp, states on the host": ("hzp", {"optimizer_state": "host × fp32"}, False),
}
"""Method, settings, and whether adapters are trained; float32, so that devices differ by the order
of sums alone."""


class Bench:
    """The device, the sizes and the measure of a part, and its rows, those of an earlier try
    included.

    Args:
        path: of the file of rows.
        facts_path: of the card's figures for a planner.
    """

    def __init__(
        self, arguments: argparse.Namespace, path: Path, facts_path: Path | None = None
    ) -> None:
        self.began = time.perf_counter()
        self.path = path
        self.facts_path = facts_path or path.with_name("gpu-facts.json")
        self.rows: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        self.failed: dict[str, str] = {}
        """The rows that raised, with their errors: they are tried again when the part is."""
        self.ends: float | None = None
        """The moment of :func:`time.perf_counter` after which no row is begun."""
        self.late: list[str] = []
        """The rows that were not begun for want of time."""
        self.tiny = arguments.tiny
        self.device = chosen(arguments.device)
        self.rounds, self.sequence = (2, 32) if self.tiny else (5, 2048)

    def model(self, name: str) -> str:
        return TINY[name] if self.tiny else name

    @contextmanager
    def peak(self, row: dict[str, Any]) -> Iterator[None]:
        """Put the highest bytes that are allocated inside into a row."""
        gc.collect()
        if not is_cpu(self.device):
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()
        try:
            yield
        except torch.OutOfMemoryError:
            row["out_of_memory"] = True
        if not is_cpu(self.device):
            row["peak_MB"] = torch.accelerator.max_memory_allocated() / 1e6

    def row(
        self, name: str, measure: Callable[[dict[str, Any]], None], *, needs: float = 0.0
    ) -> dict[str, Any]:
        """A row by its name: that of an earlier try, or else what ``measure`` puts into it, and
        where the device's memory did not suffice that. Another failure is noted, and the rest of
        the part goes on. A row that ``needs`` more seconds than the part has left is not begun."""
        if name not in self.rows:
            row: dict[str, Any] = {}
            margin = 0.0 if self.tiny else needs
            if self.ends is not None and time.perf_counter() + margin > self.ends:
                self.late.append(name)
                return row
            try:
                with self.peak(row):
                    measure(row)
            except Exception as error:
                traceback.print_exc()
                self.failed[name] = f"{type(error).__name__}: {error}"
                return row
            self.rows[name] = row
            write(self.path, self.rows)
            shown = {
                key: float(f"{value:.5g}")
                for key, value in row.items()
                if isinstance(value, int | float)
            }
            print(f"{name}: {json.dumps(shown)}", flush=True)
        return self.rows[name]

    def run(self, name: str, open_: Callable[[], Any], batch: int) -> dict[str, Any]:
        """Tokens a second and peak of what ``open_`` answers, a function of a step's seconds, with
        all that it holds."""

        def measure(row: dict[str, Any]) -> None:
            step, close = open_()
            try:
                step(), step()
                seconds = [step() for _ in range(self.rounds)]
                row |= {"tokens_per_s": batch * self.sequence / median(seconds), "seconds": seconds}
                row |= getattr(step, "foreseen", dict)()
            finally:
                close()

        return self.row(name, measure)

    def compared(
        self,
        title: str,
        key: str,
        one: str,
        other: str,
        limit: float,
        *,
        at_most: bool = True,
        rests: str,
    ) -> list[Bound]:
        """The bound of a figure of one row by that of another; none where one of them has no such
        figure."""
        figures = [self.rows.get(name, {}).get(key) for name in (one, other)]
        if None in figures:
            return []
        return [Bound(title, figures[0] / figures[1], limit, at_most=at_most, rests=rests)]

    def walk(self, walker: Walker, batch: int) -> Any:
        step = zo_runs.stepper(walker, batch, self.sequence)
        step.foreseen = lambda: self.foreseen(walker, batch)  # type: ignore[attr-defined]
        return step, walker.close

    def foreseen(self, walker: Walker, batch: int) -> dict[str, Any]:
        """Foresee tokens a second and peak as the planner does, with the card's facts where they
        are there. A forecast that fails is told and costs no row."""
        try:
            here = of_this_machine(self.device.type, card_of(self.device))
            if self.facts_path.exists() and not is_cpu(self.device):
                here = with_facts(here, cards.read(self.facts_path))
            shape = Shape(batch, self.sequence)
            program = walker.program(StepKind.TRAIN, shape, foresee=True)
            outcome = simulate((program,), walker.plan, walker.spec, here, walker.costs(shape))
        except Exception as error:
            return {"not_foreseen": f"{type(error).__name__}: {error}"}
        tokens_per_s = batch * self.sequence / outcome.seconds
        return {
            "foreseen_tokens_per_s": tokens_per_s,
            "foreseen_MB": outcome.peaks.get(Pool.DEVICE, 0) / 1e6,
        }

    def lora(self, name: str, **settings: Any) -> Walker:
        store = random_store(name, Codec(settings.pop("stored", "raw")))
        return Walker(
            store, method("mebp", **settings), lora=LoraSettings(rank=16), device=self.device
        )


# ---- the parts -----------------------------------------------------------------------------------


def write(path: Path, value: Any) -> None:
    """Put a value into a JSON file, which is never half written."""
    path.with_suffix(".tmp").write_text(json.dumps(value, indent=1) + "\n")
    path.with_suffix(".tmp").replace(path)


def correct(bench: Bench, *, command: bool = True) -> list[Bound]:
    """Our operators, bit for bit, and every row against the CPU: three losses and an evaluation;
    the command of README's example where ``command`` says so."""
    bounds = []
    differing = bench.row("operators", lambda row: row.update(operators(bench.device)))
    for name, differ in differing.items():
        if name in ("peak_MB", "out_of_memory"):
            continue
        bounds.append(
            Bound(
                f"operator {name}: elements that differ",
                differ,
                0,
                rests="each operation rounds by itself",
            )
        )
    for name, (row, settings, adapters) in ROWS.items():

        def measure(
            losses: dict[str, Any],
            row: str = row,
            settings: dict[str, Any] = settings,
            adapters: bool = adapters,
        ) -> None:
            for device in dict.fromkeys((str(bench.device), "cpu")):
                lora = LoraSettings(rank=2, alpha=4) if adapters else None
                stored = method(row, **settings).frozen.codec if row == "mebp" else Codec.RAW
                store = random_store("Qwen2-tiny" if adapters else "OPT-tiny", stored, "float32")
                with Walker(store, method(row, **settings), lora=lora, device=device) as walker:
                    vocab = walker.spec.vocab_size
                    found = [
                        walker.step(random_batch(vocab, 4, 32, seed=step)).loss for step in range(3)
                    ]
                    losses[device] = [
                        *found,
                        walker.evaluate(random_batch(vocab, 2, 32, seed=9)).loss,
                    ]
            pairs = zip(losses[str(bench.device)], losses["cpu"], strict=True)
            losses["worst"] = max(abs(a - b) / abs(b) for a, b in pairs)

        losses = bench.row(name, measure)
        if "worst" in losses:
            title = f"{name}: losses by the CPU's"
            rests = "float32, sums in another order"
            bounds.append(Bound(title, losses["worst"], 1e-4, rests=rests))
    if not command:
        return bounds
    code = bench.row("blockwalk train", lambda row: row.update(trained(bench))).get("code", 1)
    return [
        *bounds,
        Bound(
            "blockwalk train examples/quickstart.yaml: exit code",
            code,
            0,
            rests="it learns its task",
        ),
    ]


def trained(bench: Bench) -> dict[str, Any]:
    """Run the example from the command line: its exit code, seconds and last words. It ends before
    its part does, for nobody would end it afterwards."""
    left = max(SECONDS - 20 - (time.perf_counter() - bench.began), 1)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "blockwalk", "train", "examples/quickstart.yaml"]
        command += ["--device", str(bench.device), "--data.eval_limit", "40"]
        command += ["--max_steps", "4" if bench.tiny else "40"]
        command += ["--output_dir", folder + "/run"]
        began = time.perf_counter()
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=left
        )
    words = (ended.stdout + ended.stderr)[-2000:]
    return {"code": ended.returncode, "seconds": time.perf_counter() - began, "words": words}


def operators(device: torch.device) -> dict[str, int]:
    """Elements in which an operator's answer on the device is not the CPU's, by operator."""
    from blockwalk.numerics.codecs import codecs
    from blockwalk.numerics.codecs.layout import Layout
    from blockwalk.numerics.noise.key import NoiseKey
    from blockwalk.numerics.noise.noise import perturbed
    from blockwalk.numerics.operators import sent

    def differ(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> int:
        theirs, ours = (
            function(*(each.to(where, copy=True) for each in tensors)).cpu()
            for where in ("cpu", device)
        )
        return int((theirs.view(torch.uint8) != ours.view(torch.uint8)).sum())

    key = NoiseKey(1, 2, 0, "w")
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(300, 1000, generator=generator)
    found = {}
    words = [w for k in (0, 1) for w in sent(NoiseKey(1, 3, k, "w"))]
    factors = [0.99, 1e-3]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):

        def advance(x: torch.Tensor) -> torch.Tensor:
            torch.ops.blockwalk.advance_([x], [], [0], words, factors, 1, 1, True, "gaussian")
            return x

        found[f"perturbed {dtype}"] = differ(
            lambda x: perturbed(x, x, key, 77, 1e-3), weights.to(dtype)
        )
        found[f"advance {dtype}"] = differ(advance, weights.to(dtype))
    for codec in (Codec.FP8, Codec.INT8, Codec.INT4, Codec.INT4A, Codec.NF4):
        layout = Layout((300, 1000), codec)
        bytes_P = codecs.encode_rows(
            weights, torch.empty(layout.nbytes, dtype=torch.uint8), layout, 0
        )

        def decode(bytes_P: torch.Tensor, layout: Layout = layout) -> torch.Tensor:
            out = torch.empty(300, 1000, dtype=torch.bfloat16, device=bytes_P.device)
            return codecs.decode_rows(bytes_P, layout, 0, 300, out)

        def advance_rows(bytes_P: torch.Tensor, layout: Layout = layout) -> torch.Tensor:
            places = layout.scales(bytes_P), layout.codes(bytes_P), layout.codec
            torch.ops.blockwalk.advance_rows_(*places, 0, words, factors, 1, 1, True, "gaussian")
            return bytes_P

        found[f"decode {codec}"] = differ(decode, bytes_P)
        if codec.facts.trainable:
            found[f"advance {codec}"] = differ(advance_rows, bytes_P)
    return found


def zeroth(bench: Bench, named: str) -> list[Bound]:
    """The naive loop, ``mezo``, ``zo2`` and its ablations, fp16, 1 × 2048; then naive and ``zo2``
    in turn, 4 × 2048."""
    name = bench.model(named)
    device = str(bench.device)

    def opened(case: str, batch: int) -> Any:
        if case == zo_runs.NAIVE:
            model = zo_runs.naive_model(name, "float16", device)
            return zo_runs.naive_stepper(model, batch, bench.sequence), lambda: None
        store = random_store(name, Codec.RAW, "float16")
        return bench.walk(zo_runs.open_walker(case, store, "host", device), batch)

    for case in (zo_runs.NAIVE, zo_runs.MEZO, *zo_runs.ABLATIONS):
        bench.run(case, lambda case=case: opened(case, 1), 1)

    def in_turn(row: dict[str, Any]) -> None:
        (naive, _) = opened(zo_runs.NAIVE, 4)
        (streamed, close) = opened("zo2", 4)
        try:
            interleaved({"naive": naive, "zo2": streamed}, 2)
            row |= interleaved({"naive": naive, "zo2": streamed}, bench.rounds)
        finally:
            close()

    found = bench.row("4 in turn", in_turn)
    bounds = []
    if "zo2" in found:
        ratio = median([a / b for a, b in zip(found["naive"], found["zo2"], strict=True)])
        rests = (
            "two forwards take 4·T FLOPs a parameter, the link 2 bytes each way: 7,000 tokens"
            " hide it at 700 TFLOP/s"
        )
        rests = f"4 × 2048: {rests} and 50 GB/s"
        bounds.append(
            Bound(f"{named}: zo2 by naive MeZO, 4 × 2048", ratio, 0.97, at_most=False, rests=rests)
        )
    else:  # the baseline has no room
        bench.run("zo2, 4 alone", lambda: opened("zo2", 4), 4)
    if "peak_MB" in bench.rows.get("zo2", {}):
        peak = bench.rows["zo2"]["peak_MB"]
        limit = PUBLISHED_MB[named] / 2
        bounds.append(Bound(f"{named}: peak MB of zo2", peak, limit, rests="half of ZO2's table 1"))
    return bounds


PEFT = {"PEFT": False, "PEFT + bitsandbytes": True}
"""Peers, and whether their linear layers are in four bits."""
TIERS = {
    "mebp raw, host": {"frozen": "host × raw", "activation": "host"},
    "mebp int4a, device": {"frozen": "device × int4a"},
    "mebp int4a, host": {"frozen": "host × int4a", "activation": "host"},
    "mebp int4a, disk": {"frozen": "disk × int4a"},
}


def lora(bench: Bench, named: str, *, raw: bool) -> list[Bound]:
    """LoRA, rank 16, bf16: PEFT with gradient checkpointing in device memory, in bfloat16 and in
    bitsandbytes' nf4; ``mebp`` in int4a from the device, the host and the disk, and ``raw`` from
    the host."""
    name = bench.model(named)
    peers = [
        peer
        for peer in PEFT
        if not PEFT[peer] or gpu_facts.installed("bitsandbytes") != "not installed"
    ]
    rows = [row for row in TIERS if raw or "raw" not in row]
    for batch in (1, 4):

        def peft(peer: str, batch: int = batch) -> Any:
            take = theirs(
                name,
                bench.sequence,
                device=str(bench.device),
                batch=batch,
                holds_tokenizer=False,
                four_bits=PEFT[peer],
            )
            count = iter(range(1 << 30))

            def step() -> float:
                zo_runs.wait(bench.device)
                began = time.perf_counter()
                take(next(count))
                zo_runs.wait(bench.device)
                return time.perf_counter() - began

            return step, lambda: None

        for peer in peers:
            bench.run(f"{peer}, {batch}", lambda peer=peer, peft=peft: peft(peer), batch)
        for row in rows:
            settings = {**TIERS[row], "stored": "raw" if "raw" in row else "int4a"}
            bench.run(
                f"{row}, {batch}",
                lambda settings=settings, batch=batch: bench.walk(
                    bench.lora(name, **settings), batch
                ),
                batch,
            )
    bounds = []
    host = [
        each
        for each in ("mebp int4a, host, 4", "PEFT, 4")
        if "tokens_per_s" in bench.rows.get(each, {})
    ]
    if len(host) == 2:  # the peak of a row that ran out of memory is the card's
        title = f"{named}: peak of mebp int4a from the host by PEFT's, 4 × 2048"
        bounds += bench.compared(
            title, "peak_MB", *host, 0.5, rests="weights are 2 slots of 0.6 bytes"
        )
    for tier, limit in (("device", 0.9), ("host", 0.85)):
        title = f"{named}: tokens/s of mebp int4a from the {tier} by bitsandbytes', 4 × 2048"
        rests = "both decode apart, and 0.6 bytes a parameter and pass hide behind 8,192 tokens"
        sides = f"mebp int4a, {tier}, 4", "PEFT + bitsandbytes, 4"
        bounds += bench.compared(title, "tokens_per_s", *sides, limit, at_most=False, rests=rests)
    title = f"{named}: tokens/s of mebp raw by PEFT's, 4 × 2048"
    rests = (
        "8,192 tokens: 6·T FLOPs a parameter, recomputation included, beside 4 bytes fetched,"
        " hide them at 600 TFLOP/s"
    )
    sides = "mebp raw, host, 4", "PEFT, 4"
    rests = f"{rests} and 50 GB/s; that is the edge"
    return bounds + bench.compared(title, "tokens_per_s", *sides, 0.9, at_most=False, rests=rests)


def beside(bench: Bench, named: str) -> list[Bound]:
    """``zo2`` from the host beside ``mezo`` on the device, fp16, 1 × 2048 and 4 × 2048."""
    store = random_store(bench.model(named), Codec.RAW, "float16")
    bounds = []
    for batch in (1, 4):
        for case in (zo_runs.MEZO, "zo2"):
            bench.run(
                f"{case}, {batch}",
                lambda case=case, batch=batch: bench.walk(
                    zo_runs.open_walker(case, store, "host", str(bench.device)), batch
                ),
                batch,
            )
        rests = "two forwards take 4·T FLOPs a parameter, the link 2 bytes each way"
        limit = 0.9 if batch == 4 else 0.5
        sides = f"zo2, {batch}", f"{zo_runs.MEZO}, {batch}"
        title = f"{named}: zo2 by mezo, {batch} × 2048"
        bounds += bench.compared(title, "tokens_per_s", *sides, limit, at_most=False, rests=rests)
    return bounds


def streamed(bench: Bench) -> list[Bound]:
    """All parameters of Qwen2.5-1.5B, float32 masters and Adam's moments in device or in host
    memory."""
    name = bench.model("Qwen2.5-1.5B")
    store = random_store(name, Codec.RAW, "float32")
    cases = {
        "device": ("plain", {"trainable": "device × fp32"}),
        "host": ("plain", {"trainable": "host × fp32", "optimizer_state": "host × fp32"}),
        "hzp, host states": ("hzp", {"optimizer_state": "host × fp32 × world"}),
        "hzp, device states": ("hzp", {}),
    }
    for case, (row, settings) in cases.items():
        plan = method(row, compute_dtype="bfloat16", recompute="all", prefetch=1, **settings)
        bench.run(
            case, lambda plan=plan: bench.walk(Walker(store, plan, device=bench.device), 4), 4
        )
    if any("tokens_per_s" not in bench.rows.get(case, {}) for case in ("host", "device")):
        return []
    title = "peak with states on the host by that on the device"
    return bench.compared(title, "peak_MB", "host", "device", 0.75, rests="8 of 14 bytes leave")


def overlap(bench: Bench) -> list[Bound]:
    """The share of the copies of ``zo2`` and ``mebp`` that compute hides, from the ops' own
    events."""
    bounds = []
    name = bench.model("OPT-1.3B")
    cases = {
        "zo2": lambda: zo_runs.open_walker(
            "zo2", random_store(name, Codec.RAW, "float16"), "host", str(bench.device)
        ),
        "mebp": lambda: bench.lora(
            bench.model("Qwen2.5-1.5B"), frozen="host × raw", activation="host"
        ),
    }
    for case, open_ in cases.items():

        def measure(row: dict[str, Any], open_: Callable[[], Walker] = open_) -> None:
            with open_() as walker:
                step = zo_runs.stepper(walker, 4, bench.sequence)
                step(), step()
                walker.timeline = []
                step()
                row["spans"] = [
                    (str(op.lane), began, ended) for op, began, ended in walker.timeline[-1][1]
                ]

        spans = bench.row(case, measure).get("spans")
        if spans is None:
            continue
        copying = union([(a, b) for lane, a, b in spans if lane in ("fetch", "store")])
        computing = union([(a, b) for lane, a, b in spans if lane == "compute"])
        hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in copying for c, d in computing)
        total = sum(b - a for a, b in copying)
        rests = "8,192 tokens; the first fetch and the last store stand alone"
        bounds.append(
            Bound(
                f"{case}: hidden share of copies",
                hidden / max(total, 1e-9),
                0.8,
                at_most=False,
                rests=rests,
            )
        )
    return bounds


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time, those that touch joined."""
    out: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if out and began <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], ended))
        else:
            out.append((began, ended))
    return out


def encoded(bench: Bench) -> list[Bound]:
    """``zo2`` in fp16, fp8 and int8."""
    name = bench.model("OPT-6.7B")
    device = bench.device
    store = random_store(name, Codec.RAW, "float16")
    for codec in ("raw", "fp8", "int8"):
        plan = method("zo2", frozen="host", trainable=f"host × {codec}")
        bench.run(codec, lambda plan=plan: bench.walk(Walker(store, plan, device=device), 1), 1)
    rests = "1 × 2048, where fp16 waits for the link: fp8 moves half"
    return bench.compared(
        "zo2 fp8 by fp16, tokens/s", "tokens_per_s", "fp8", "raw", 1.2, at_most=False, rests=rests
    )


def forecast(bench: Bench) -> list[Bound]:
    """Seconds and peaks of three rows, foreseen from this machine's doctor alone, against what is
    measured."""
    from blockwalk.doctor.machine import measure

    CACHE.mkdir(parents=True, exist_ok=True)
    hardware = measure(CACHE, walk=not bench.tiny).hardware
    save(hardware, CACHE / "gpu-doctor.yaml")
    opt = random_store(bench.model("OPT-1.3B"), Codec.RAW, "float16")
    bounds = []
    cases: dict[str, Callable[[], Walker]] = {
        "mezo": lambda: zo_runs.open_walker("mezo", opt, "device", str(bench.device)),
        "zo2": lambda: zo_runs.open_walker("zo2", opt, "host", str(bench.device)),
        "mebp": lambda: bench.lora(
            bench.model("Qwen2.5-1.5B"), frozen="host × int4", activation="host", stored="int4"
        ),
    }
    for case, open_ in cases.items():

        def measure(row: dict[str, Any], open_: Callable[[], Walker] = open_) -> None:
            with open_() as walker:
                step = zo_runs.stepper(walker, 4, bench.sequence)
                shape = Shape(4, bench.sequence)
                step()
                program = walker.program(StepKind.TRAIN, shape, foresee=True)
                foreseen = simulate(
                    (program,), walker.plan, walker.spec, hardware, walker.costs(shape)
                )
                measured = median([step() for _ in range(bench.rounds)])
                row |= {"foreseen_s": foreseen.seconds, "measured_s": measured}
                row["foreseen_MB"] = foreseen.peaks.get(Pool.DEVICE, 0) / 1e6

        row = bench.row(case, measure)
        if "measured_s" in row:
            rests = "doctor's rates of this machine, nothing fitted"
            off = abs(row["foreseen_s"] / row["measured_s"] - 1)
            bounds.append(Bound(f"{case}: seconds foreseen, error", off, 0.35, rests=rests))
        if "peak_MB" in row and "foreseen_MB" in row:
            off = abs(row["foreseen_MB"] / row["peak_MB"] - 1)
            bounds.append(
                Bound(
                    f"{case}: device peak foreseen, error", off, 0.15, rests="the program's sizes"
                )
            )
    return bounds


PARTS: dict[str, tuple[Callable[[Bench], list[Bound]], float, float]] = {
    "facts": (gpu_facts.facts, 4, 0),
    "correct": (correct, 1, 0.1),
    "lora-7B": (lambda bench: lora(bench, "Qwen2.5-7B", raw=False), 45, 5),
    "zo2-13B": (lambda bench: beside(bench, "OPT-13B"), 60, 26),
    "zeroth-1.3B": (lambda bench: zeroth(bench, "OPT-1.3B"), 10, 2.7),
    "lora-1.5B": (lambda bench: lora(bench, "Qwen2.5-1.5B", raw=True), 12, 4.3),
    "zeroth-6.7B": (lambda bench: zeroth(bench, "OPT-6.7B"), 45, 13.4),
    "streamed": (streamed, 60, 6.3),
    "overlap": (overlap, 12, 0),
    "encoded": (encoded, 45, 0),
    "forecast": (forecast, 12, 0.2),
}
"""Parts by value, with the host memory and the new disk that each takes, in GB."""


def unfit(part: str) -> str:
    """The reason why a part would not fit this machine now; empty where it does."""
    import psutil

    _, host, disk = PARTS[part]
    memory = min(psutil.virtual_memory().available, HOST)
    CACHE.mkdir(parents=True, exist_ok=True)
    cache_bytes = sum(each.stat().st_size for each in CACHE.rglob("*") if each.is_file())
    free = min(shutil.disk_usage(CACHE).free, DISK - cache_bytes)
    if host * 1e9 > memory:
        return f"it takes {host:.0f} GB of host memory, and {memory / 1e9:.0f} are free"
    return (
        f"it takes {disk:.0f} GB of disk in {CACHE}, and {free / 1e9:.0f} are left"
        if disk * 1e9 > free
        else ""
    )


def worker(arguments: argparse.Namespace, path: Path) -> None:
    """One part, in this process; its figures go to its file."""
    bench = Bench(
        arguments, rows_of(path), arguments.results / f"gpu-facts-{path.parent.name}.json"
    )
    began = time.perf_counter()
    bounds = PARTS[arguments.worker][0](bench)
    bounds += [
        Bound(f"{arguments.worker}: {name} ran ({error})", 0, 1, at_most=False)
        for name, error in bench.failed.items()
    ]
    shown = [{**vars(bound), "holds": bound.holds} for bound in bounds]
    value = {"machine": machine(), "device": str(bench.device), "tiny": bench.tiny,
             "part": arguments.worker, "seconds": time.perf_counter() - began,
             "figures": bench.rows, "failed": bench.failed, "bounds": shown}  # fmt: skip
    write(path, value)


def rows_of(path: Path) -> Path:
    """The file of the rows that a part has so far, beside that of the part."""
    return path.with_suffix(".rows.json")


def done(path: Path) -> bool:
    """Whether a part has been measured, without a row that failed."""
    return path.exists() and not json.loads(path.read_text()).get("failed")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, help="end by then (gpu_minutes.py)")
    options.add_argument("--part", nargs="+", help="some parts alone")
    options.add_argument(
        "--device", help="unless given, torch's accelerator; cpu tries the script itself"
    )
    options.add_argument("--tiny", action="store_true", help="tiny models: proves that it runs")
    options.add_argument("--again", action="store_true", help="measure also what has been measured")
    options.add_argument("--results", type=Path, default=RESULTS, help=argparse.SUPPRESS)
    options.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    from benchmarks import gpu_minutes

    names = list(PARTS if arguments.minutes is None else gpu_minutes.PARTS)
    arguments.part = arguments.part or names
    if unknown := sorted({*arguments.part} - {*names}):
        options.error(f"--part {unknown[0]} is none of {', '.join(names)}")
    device = chosen(arguments.device)
    if is_cpu(device) and not arguments.tiny:
        raise SystemExit(
            f"torch {torch.__version__} sees no accelerator here; --device cpu --tiny tries the"
            " script itself"
        )
    hardware = machine()["accelerators"][device.index or 0] if not is_cpu(device) else "cpu"
    folder = (
        arguments.results
        / f"{hardware.replace(' ', '-').replace('/', '-')}{'-tiny' if arguments.tiny else ''}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.minutes is not None:
        arguments.device = str(device)
        (gpu_minutes.work if arguments.worker else gpu_minutes.run)(arguments, folder)
        return
    if arguments.worker:
        worker(arguments, folder / f"{arguments.worker}.json")
        return
    bounds: list[Bound] = []
    for part in arguments.part:
        path = folder / f"{part}.json"
        if arguments.again:
            path.unlink(missing_ok=True)
            rows_of(path).unlink(missing_ok=True)
        reason = "" if arguments.tiny or done(path) else unfit(part)
        if not reason and not done(path):
            print(f"{part} ...", flush=True)
            command = [
                sys.executable,
                __file__,
                "--worker",
                part,
                "--device",
                str(device),
                "--results",
                str(arguments.results),
            ]
            try:
                ended = subprocess.run(
                    [*command, *["--tiny"] * arguments.tiny], timeout=SECONDS, check=False
                )
                reason = f"it ended with code {ended.returncode}" if ended.returncode else ""
            except subprocess.TimeoutExpired:
                reason = f"it took more than {SECONDS} seconds"
        if reason:
            bounds.append(Bound(f"{part}: ran ({reason})", 0, 1, at_most=False))
            continue
        found = json.loads(path.read_text())["bounds"]
        if (
            arguments.tiny and part != "correct"
        ):  # nothing there is of a size that a bound is about, but it has to run
            found = [each for each in found if " ran (" in each["name"]]
        bounds += [
            Bound(**{key: value for key, value in each.items() if key != "holds"}) for each in found
        ]
    finish(arguments, {"folder": str(folder)}, bounds)


if __name__ == "__main__":
    main()
