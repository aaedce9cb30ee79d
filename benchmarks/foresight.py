"""Predicted against measured on this machine: peak memory, seconds a step, bytes read and written;
calibrated by doctor, and by a shallow instance of the model on this machine's clock.

Each case runs in a process of its own: a random model of true dimensions, a first step, then three
or as many as take two seconds, of which the fastest counts (where the host takes free memory back
steps differ severalfold: the JSON has all). Memory is that of the whole process, from its start:
what the kernel cannot drop. Bytes are those that the kernel counted in ``/proc/self/io`` in a step
that begins with a cold page cache, but for what the kernel keeps around mapped pages; the program's
are what it reads from disk and writes.

    python benchmarks/foresight.py [--sizes tiny,25M] [--ranks] [--json FILE] [--join FILE ...]
    [--check]

``--ranks``: the methods for several ranks, on two ranks of a core each, calibrated by a doctor on
both; bytes are the loopback device's."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import CACHE, Bound, finish, machine, median, parser, random_batch

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "vocab_size": 4000,
        "heads": 4,
    },
    "25M": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "vocab_size": 8000,
        "heads": 8,
    },
    "125M": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "vocab_size": 32000,
        "heads": 12,
    },
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "vocab_size": 151936,
        "heads": 14,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "vocab_size": 151936,
        "heads": 12,
    },
}
DTYPES = {"0.5B": "bfloat16", "1.5B": "bfloat16"}
"""Of the larger sizes; the others are in float32."""

METHODS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "plain": ("plain", {}, False),
    "plain, recompute": ("plain", {"recompute": "all"}, False),
    "plain, LoRA": ("plain", {}, True),
    "mebp": ("mebp", {"frozen": "disk × int4a"}, True),
    "mezo": ("mezo", {}, False),
    "zo2": ("zo2", {}, False),
    "zo2, disk": ("zo2", {"trainable": "disk × raw"}, False),
}
"""Method, settings, and whether adapters are trained."""

RANKED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "distzo2": ("distzo2", {"mesh": {"perturb": 2}}, False),
    "distzo2, data": ("distzo2", {"mesh": {"data": 2}}, False),
    "distzo2, LoRA": ("distzo2", {"mesh": {"perturb": 2}}, True),
    "zero3": ("zero3", {}, False),
    "zeropp": ("zeropp", {}, False),
    "mics": ("mics", {}, False),
    "fcdp": ("fcdp", {}, False),
    "fcdp, LoRA": ("fcdp", {}, True),
    "hzp": ("hzp", {}, False),
}
"""The same over two ranks of this machine, a core each, described by a doctor that was run on
both."""

BATCH = 2
SEQUENCE = 256
STEPS = 3
SECONDS = 2.0


def model_folder(size: str) -> Path:
    """A random model; made once, in a process of its own."""
    values = dict(SIZES[size])
    dtype = DTYPES.get(size, "float32")
    heads = values.pop("heads")
    target = {"model_type": "llama", "num_attention_heads": heads,
              "num_key_value_heads": heads // 2, "dtype": dtype, "tie_word_embeddings": True,
              **values}  # fmt: skip
    path = CACHE / f"foresight-{size}-{dtype}"
    if not (path / "model.safetensors").exists():
        script = (
            "import json,sys,torch; from transformers import AutoConfig, AutoModelForCausalLM as"
            " M; torch.manual_seed(0);"
            " M.from_config(AutoConfig.for_model(**json.loads(sys.argv[1])),"
            f" dtype=torch.{dtype}).save_pretrained(sys.argv[2])"
        )
        subprocess.run(
            [sys.executable, "-c", script, json.dumps(target), str(path)],
            check=True,
            capture_output=True,
        )
    return path


def counted() -> dict[str, int]:
    """The kernel's counters of this process: bytes fetched from and sent to storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, _, value in (line.partition(":") for line in lines)}


def cold(*folders: Path) -> int:
    """Drop what the page cache holds of some folders' files. Return the bytes that stayed: the
    kernel keeps up to a megabyte around a page that is mapped."""
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, paths)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sum(map(int, lines.split()))


def case(size: str, name: str, hardware: str, steps: int | None = None) -> dict[str, Any]:
    """Predict, then run: on each of two ranks where the method is for several; the first one's
    figures count."""
    from blockwalk.system.process_memory import PeakMemory

    with PeakMemory(0.002) as memory:
        import blockwalk
        from blockwalk.plan.choices import LoraSettings
        from blockwalk.plan.placement import StateKind, Tier
        from blockwalk.program.program import Lane, OpKind, Shape, StepKind
        from blockwalk.simulate import hardware as machines
        from blockwalk.simulate.process_memory import process_peak, tensors
        from blockwalk.simulate.simulator import simulate
        from blockwalk.walk.unit_costs import UnitCosts
        from blockwalk.walk.walker import Walker
        from tests.support.cluster import sent_payload

        world = 2 if name in RANKED else 1
        row, settings, adapters = {**METHODS, **RANKED}[name]
        if world > 1:
            import torch.distributed as dist

            settings = {
                "mesh": {"world": world, "ranks_per_node": world, **settings.get("mesh", {})}
            }
            dist.init_process_group("gloo")
        barrier = dist.barrier if world > 1 else lambda: None
        plan = blockwalk.method(row, **settings)
        lora = LoraSettings(rank=8) if adapters else None
        machine = machines.load(hardware)
        made = model_folder(size)
        shape = Shape(BATCH, SEQUENCE)
        with (
            tempfile.TemporaryDirectory(dir=CACHE) as folder,
            Walker(made, plan, lora=lora, workdir=folder) as walker,
        ):
            shares = world if plan.home.gathered else plan.mesh.data
            batch = random_batch(walker.spec.vocab_size, BATCH * shares, SEQUENCE)
            program = walker.program(StepKind.TRAIN, shape, foresee=True)
            predicted = process_peak(program, plan, machine, walker.spec)
            if predicted > 0.9 * machine.host_bytes:
                return {"size": size, "method": name, "predicted_bytes": predicted, "fits": False}
            walker.step(batch)
            program = walker.program(
                StepKind.TRAIN, shape, foresee=True
            )  # with what the first step leaves pending
            costs = walker.costs(shape)
            simulation = simulate((program,), plan, walker.spec, machine, costs)
            seconds = []
            steps = steps or (
                STEPS if simulation.seconds > 0.5 else round(SECONDS / simulation.seconds)
            )  # the same on every rank
            for _ in range(steps):
                barrier()
                began = time.perf_counter()
                walker.step(batch)
                seconds.append(time.perf_counter() - began)
            measured = memory.take()
            began = time.perf_counter()
            if machine.measured:
                unit_costs = UnitCosts(made, lora=lora, padded=True, cut=True)
                timed = unit_costs.timed(plan, shape, f"{machine} {began}")
                costs = dataclasses.replace(costs, timed=timed)
                simulation = simulate((program,), plan, walker.spec, machine, costs)
            timing_seconds = time.perf_counter() - began
            stayed = 0
            stored = {"read_bytes": 0, "write_bytes": 0}
            wanted = {"read_bytes": 0, "write_bytes": 0}
            if world > 1:
                lanes = program.bytes_by_lane()
                wanted = {
                    "wire_bytes": world * (lanes.get(Lane.INTRA, 0) + lanes.get(Lane.INTER, 0))
                }
                barrier()
                sent = sent_payload("lo")
                barrier()
                walker.step(batch)
                barrier()
                stored = {"wire_bytes": sent_payload("lo") - sent}
            elif Tier.DISK in (plan.frozen.tier, plan.trainable.tier):
                moved = [
                    op for op in program.ops if op.part in (StateKind.FROZEN, StateKind.TRAINABLE)
                ]
                fetched = {
                    (op.unit, op.part): op.nbytes
                    for op in moved
                    if op.kind is OpKind.FETCH and op.unit
                }
                wanted = {
                    "read_bytes": sum(fetched.values()),
                    "write_bytes": sum(op.nbytes for op in moved if op.kind is OpKind.STORE),
                }
                stayed = cold(made, Path(folder))
                before = counted()
                walker.step(batch)
                os.sync()
                stored = {key: counted()[key] - before[key] for key in stored}
    return {
        "size": size, "method": name, "fits": True, "tensors": tensors(program),
        "predicted_bytes": predicted, "measured_bytes": measured,
        "predicted_seconds": simulation.seconds, "measured_seconds": min(seconds),
        "all_seconds": seconds, "timing_seconds": timing_seconds, "predicted_moved": wanted,
        "measured_moved": stored, "stayed_bytes": stayed,
        "spent": dict(list(simulation.critical.items())[:4]),
    }  # fmt: skip


def moved_bytes(row: dict[str, Any], key: str, wanted: int) -> int:
    """What a step moved. Of what stayed in the page cache it may have read any part, so that the
    nearest to what was foreseen counts."""
    moved: int = row["measured_moved"][key]
    stayed = row.get("stayed_bytes", 0) if key == "read_bytes" else 0
    return min(max(wanted, moved), moved + stayed)


def show(row: dict[str, Any]) -> str:
    """A case as a line."""
    head = f"{row['size']:<6} {row['method']:<18}"
    if not row["fits"]:
        return f"{head} is foreseen not to fit: {row['predicted_bytes'] / 1e9:.1f} GB"
    memory = row["predicted_bytes"]
    real = row["measured_bytes"]
    seconds = row["predicted_seconds"]
    took = row["measured_seconds"]
    text = (
        f"{head} process {memory / 1e6:8.0f} MB predicted, {real / 1e6:8.0f} measured"
        f" ({memory / real:.2f});"
    )
    text += f" step {seconds:7.3f} s, {took:7.3f} ({seconds / took:.2f})"
    for key, wanted in row["predicted_moved"].items():
        if wanted:
            text += f"; {key[:-6]} {wanted / 1e6:.1f} MB, {row['measured_moved'][key] / 1e6:.1f}"
    if stayed := row.get("stayed_bytes"):
        text += f" and of {stayed / 1e6:.1f} that stayed in memory"
    return text


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", default=",".join(SIZES), help=f"of {', '.join(SIZES)}")
    arguments.add_argument(
        "--methods", default="", help=f"of {'; '.join(METHODS)}; with --ranks {'; '.join(RANKED)}"
    )
    arguments.add_argument(
        "--ranks", action="store_true", help="the methods for several ranks, on two"
    )
    arguments.add_argument(
        "--hardware", default="", help="what doctor wrote; measured first unless given"
    )
    arguments.add_argument("--case", nargs=2, help="run one case and print it")
    arguments.add_argument(
        "--steps",
        type=int,
        help="of that case, after the first one; as many as take two seconds unless given",
    )
    arguments.add_argument(
        "--join",
        nargs="*",
        default=[],
        metavar="FILE",
        help="cases that earlier runs wrote with --json",
    )
    given = arguments.parse_args()
    if given.case:
        found = case(*given.case, given.hardware, given.steps)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found))
        return
    figures: list[dict[str, Any]] = [
        row for path in given.join for row in json.loads(Path(path).read_text())["figures"]["cases"]
    ]
    for row in figures:
        print(show(row))
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        hardware = given.hardware or str(Path(folder) / "hardware.yaml")
        python = [sys.executable, "-W", "ignore"]
        if given.ranks:
            python = [
                *python,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc_per_node",
                "2",
                "--no-python",
                *python,
            ]
        if not Path(hardware).exists():
            subprocess.run([*python, "-m", "blockwalk", "doctor", "--out", hardware], check=True)
        for size in filter(None, given.sizes.split(",")):
            model_folder(size)
            for name in (
                given.methods.split(";") if given.methods else (RANKED if given.ranks else METHODS)
            ):
                command = [*python, __file__, "--case", size, name, "--hardware", hardware]
                process = subprocess.run(command, check=False, capture_output=True, text=True)
                if process.returncode:
                    print(
                        f"{size:<6} {name:<18} failed: {process.stderr.strip().splitlines()[-1]}",
                        flush=True,
                    )
                    continue
                figures.append(json.loads(process.stdout.strip().splitlines()[-1]))
                print(show(figures[-1]), flush=True)
                if given.json:  # what was measured is kept if a later case is cut short
                    Path(given.json).write_text(json.dumps({"figures": {"cases": figures}}))
    ran = [row for row in figures if row["fits"]]
    errors = {
        key: [abs(row[f"predicted_{key}"] / row[f"measured_{key}"] - 1) for row in ran]
        for key in ("bytes", "seconds")
    }
    moved = [
        abs(moved_bytes(row, key, wanted) / wanted - 1)
        for row in ran
        for key, wanted in row["predicted_moved"].items()
        if wanted
    ]
    bounds = [
        Bound("peak memory of the process, median error", median(errors["bytes"]), 0.05),
        Bound("peak memory of the process, worst error", max(errors["bytes"]), 0.10),
        Bound("seconds a step, median error", median(errors["seconds"]), 0.15),
        Bound("bytes to and from disk, worst error", max(moved, default=0.0), 0.02),
    ]
    finish(given, {"machine": machine(), "cases": figures}, bounds)


if __name__ == "__main__":
    main()
