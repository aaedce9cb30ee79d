"""Predicted against measured on this machine: peak memory, seconds a step, bytes on each lane; calibrated by doctor alone.

Each case runs in a process of its own: a random model of true dimensions, three steps. Memory is what the kernel cannot
drop (anonymous pages) above what the process held before the model was made, with a tiny step behind it.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Bound, finish, machine, median, parser, random_batch

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 4000, "heads": 4},
    "25M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 8000, "heads": 8},
    "125M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32000, "heads": 12},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936, "heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "vocab_size": 151936, "heads": 12},
}
METHODS = {"plain": None, "plain, recompute": None, "plain, LoRA": 8, "mebp": 8, "mezo": None, "zo2": None}
BATCH, SEQUENCE = 2, 256


def config(size: str, dtype: str) -> dict[str, Any]:
    values = dict(SIZES[size])
    heads = values.pop("heads")
    return {"model_type": "llama", "num_attention_heads": heads, "num_key_value_heads": heads // 2,
            "tie_word_embeddings": True, "dtype": dtype, **values}  # fmt: skip


def plan_of(name: str) -> Any:
    import blockwalk

    row, _, changed = name.partition(", ")
    return blockwalk.method(row, **({"recompute": "all"} if changed == "recompute" else {}))


def case(size: str, name: str, dtype: str, hardware: str) -> dict[str, Any]:
    """Predict, then run."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from blockwalk.compile import compile
    from blockwalk.config import LoraSettings
    from blockwalk.costs import unit_costs
    from blockwalk.metrics import PeakMemory, process_bytes
    from blockwalk.program import Pool, Shape, StepKind
    from blockwalk.simulate import hardware as machines
    from blockwalk.simulate.simulator import simulate
    from blockwalk.walker import Walker

    def settings_of(values: dict[str, Any]) -> Any:
        return AutoConfig.for_model(**values)

    plan, lora = plan_of(name), LoraSettings(rank=8) if METHODS[name] else None
    shape = Shape(BATCH, SEQUENCE)

    def build(values: dict[str, Any], workdir: str) -> Walker:
        torch.manual_seed(0)
        settings = settings_of(values)
        folder = Path(workdir) / "model"
        AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, dtype)).save_pretrained(folder)
        return Walker(folder, plan, lora=lora, workdir=Path(workdir) / "work")

    with tempfile.TemporaryDirectory() as folder, build(config("tiny", dtype), folder) as small:
        small.step(random_batch(4000, BATCH, SEQUENCE))
    with tempfile.TemporaryDirectory() as folder:
        target = config(size, dtype)
        costs = unit_costs(settings_of(target), plan, shape, lora=lora)
        made = Path(folder) / "model"
        script = (
            "import json,sys,torch; from transformers import AutoConfig, AutoModelForCausalLM as M; torch.manual_seed(0);"
            f" M.from_config(AutoConfig.for_model(**json.loads(sys.argv[1])), dtype=torch.{dtype}).save_pretrained(sys.argv[2])"
        )
        subprocess.run([sys.executable, "-c", script, json.dumps(target), str(made)], check=True, capture_output=True)
        batch = random_batch(target["vocab_size"], BATCH, SEQUENCE)
        ctypes.CDLL(None).malloc_trim(0)  # what the small run left in the heap would be used again, and not be seen
        before = process_bytes()
        with Walker(made, plan, lora=lora, workdir=Path(folder) / "work") as walker, PeakMemory(0.002) as memory:
            program = compile(plan, walker.spec, StepKind.TRAIN, shape, costs=costs)
            walker.step(batch)
            memory.take()
            seconds, moved = [], {}
            for _ in range(3):
                began = time.perf_counter()
                moved = walker.step(batch).bytes
                seconds.append(time.perf_counter() - began)
            measured = memory.take() - before
            found = simulate(program, plan, walker.spec, machines.load(hardware), costs)
    peaks = program.peaks()
    return {
        "size": size, "method": name, "dtype": dtype,
        "predicted_bytes": peaks.get(Pool.DEVICE, 0) + peaks.get(Pool.HOST, 0), "measured_bytes": measured,
        "predicted_seconds": found.seconds, "measured_seconds": median(seconds),
        "predicted_moved": sum(found.bytes_by_lane.values()), "measured_moved": sum(moved.values()),
    }  # fmt: skip


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", default="tiny,25M,125M", help=f"of {', '.join(SIZES)}")
    arguments.add_argument("--dtype", default="float32")
    arguments.add_argument("--hardware", default="", help="what doctor wrote; measured first unless given")
    arguments.add_argument("--case", nargs=2, help="run one case and print it")
    given = arguments.parse_args()
    if given.case:
        print(json.dumps(case(*given.case, given.dtype, given.hardware)))
        return
    with tempfile.TemporaryDirectory() as folder:
        hardware = given.hardware or str(Path(folder) / "hardware.yaml")
        if not given.hardware:
            subprocess.run([sys.executable, "-m", "blockwalk", "doctor", "--out", hardware], check=True)
        figures = []
        for size in given.sizes.split(","):
            for name in METHODS:
                command = [sys.executable, __file__, "--case", size, name, "--dtype", given.dtype, "--hardware", hardware]
                done = subprocess.run(command, check=False, capture_output=True, text=True)
                if done.returncode:
                    print(f"{size:<6} {name:<18} failed: {done.stderr.strip().splitlines()[-1]}")
                    continue
                row = json.loads(done.stdout.strip().splitlines()[-1])
                figures.append(row)
                (memory, real), (seconds, took) = (
                    (row[f"predicted_{key}"], row[f"measured_{key}"]) for key in ("bytes", "seconds")
                )
                print(f"{size:<6} {name:<18} memory {memory / 1e6:8.1f} MB predicted, {real / 1e6:8.1f} measured", end="")
                print(f" ({memory / real:.2f}); step {seconds:.3f} s, {took:.3f} ({seconds / took:.2f})", flush=True)
    errors = {
        key: [abs(row[f"predicted_{key}"] / row[f"measured_{key}"] - 1) for row in figures if row[f"measured_{key}"]]
        for key in ("bytes", "seconds", "moved")
    }
    bounds = [
        Bound("peak memory, median error", median(errors["bytes"]), 0.05),
        Bound("peak memory, worst error", max(errors["bytes"]), 0.10),
        Bound("seconds a step, median error", median(errors["seconds"]), 0.15),
        Bound("bytes moved, worst error", max(errors["moved"], default=0.0), 0.02),
    ]
    finish(given, {"machine": machine(), "cases": figures}, bounds)


if __name__ == "__main__":
    main()
