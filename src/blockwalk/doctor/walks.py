"""Small walks in a process of their own: what a process holds beside its tensors, and what an operation costs to start.

``python -m blockwalk.doctor.walks KIND FOLDER`` prints a line of JSON; ``blockwalk doctor`` runs it for each kind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BOUNDED = ("streamed", "forwards")
"""Walks that bound their free heap, and hold library buffers within it."""

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
LARGE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 8000}
MODELS = {"small": (SMALL, (1, 8)), "large": (LARGE, (2, 256))}
"""Sizes of a model, and the shape of its batch."""
WALKS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "graphs": ("plain", False, {}),
    "adapters": ("plain", True, {}),
    "recompute": ("plain", False, {"recompute": "all"}),
    "streamed": ("mebp", True, {}),
    "forwards": ("mezo", False, {}),
}
"""Method, whether adapters are trained, and settings of each kind of walk (``simulate.memory.KINDS``)."""

STEPS = 5

_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
"""Variables that torchrun gives a rank: a walk in a process of its own must not have them."""


@dataclass(frozen=True, slots=True)
class Found:
    """Bytes and seconds that one kind of walk shows."""

    process_bytes: int
    """Bytes that the process holds beside the tensors of a walk that has next to none."""
    beside: int
    """Bytes that a larger model's walk holds in addition: buffers of libraries, free heap."""
    transients: int
    """Bytes of tensors that come and go in it."""
    start_seconds: float


def process_bytes(walks: Mapping[str, Found]) -> dict[str, int]:
    """Bytes that a process holds beside its tensors and free heap, by kind of walk: with the buffers that libraries make for
    any model of some size, which are most of the bytes that forwards alone leave."""
    return {kind: found.process_bytes + _buffers(kind, walks) for kind, found in walks.items()}


def slack(walks: Mapping[str, Found]) -> dict[str, float]:
    """Free heap by kind of walk, as a multiple of what comes and goes."""
    return {kind: max(found.beside - _buffers(kind, walks), 0) / found.transients for kind, found in walks.items()}


def _buffers(kind: str, walks: Mapping[str, Found]) -> int:
    """Bytes of libraries' buffers that a kind of walk does not bound."""
    return walks["forwards"].beside if "forwards" in walks and kind not in BOUNDED else 0


def measure(kinds: tuple[str, ...] = tuple(WALKS)) -> dict[str, Found]:
    """Every kind of walk, one after the other, on models that are made before: a process that made its own would keep their
    heap."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (sizes, _) in MODELS.items():
            _make(sizes, Path(folder) / name)
        return _run(kinds, folder)


def _make(sizes: dict[str, Any], path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = AutoConfig.for_model("llama", **heads, tie_word_embeddings=True, dtype="float32", **sizes)
    made: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    path.mkdir()
    config.save_pretrained(path)
    save_file(dict(made.named_parameters()), path / "model.safetensors")


def _run(kinds: tuple[str, ...], folder: str) -> dict[str, Found]:
    found = {}
    alone = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    for kind in kinds:
        command = [sys.executable, "-W", "ignore", "-m", "blockwalk.doctor.walks", kind, folder]
        done = subprocess.run(command, capture_output=True, text=True, env=alone, check=False)
        if done.returncode == 0:
            found[kind] = Found(**json.loads(done.stdout.strip().splitlines()[-1]))
    return found


def walk(kind: str, folder: str) -> Found:
    """One kind of walk, in this process: a small model, then a larger one."""
    from blockwalk.simulate.process_memory import tensors, transients
    from blockwalk.system.process_memory import PeakMemory

    with PeakMemory(0.002) as memory:
        small, seconds, operations = _steps(kind, Path(folder), "small")
        base = memory.take() - tensors(small)
        large, _, _ = _steps(kind, Path(folder), "large")
        beside = memory.take() - tensors(large) - base
    return Found(base, beside, transients(large), seconds / operations)


def _steps(kind: str, folder: Path, model_name: str) -> tuple[Any, float, int]:
    """A program, its best step's seconds, and the operations that it starts."""
    import torch

    from blockwalk.plan.choices import LoraSettings
    from blockwalk.plan.methods import method
    from blockwalk.program.program import OpKind, Shape, StepKind
    from blockwalk.simulate.hardware import Hardware
    from blockwalk.simulate.seconds import UPDATE_STARTS, CostModel
    from blockwalk.walk.walker import Walker

    name, adapters, settings = WALKS[kind]
    sizes, (batch, sequence) = MODELS[model_name]
    shape, plan, taken = Shape(batch, sequence), method(name, **settings), []
    lora = LoraSettings(rank=8) if adapters else None
    ids = torch.randint(3, sizes["vocab_size"], (batch, sequence))
    with Walker(folder / model_name, plan, lora=lora, workdir=folder / f"{kind} {model_name}") as walker:
        for _ in range(STEPS):
            began = time.perf_counter()
            walker.step({"input_ids": ids, "labels": ids.clone()})
            taken.append(time.perf_counter() - began)
        program = walker.program(StepKind.TRAIN, shape, foresee=True)
        costs = walker.costs(shape)
        model = CostModel(plan, walker.spec, Hardware("none", device_bytes=1, flops={"float32": 1.0}), costs, program)
        operations = sum(model.work(op).all for op in program.ops)
        updated = [walker.spec.units[op.unit].part(True) for op in program.ops if op.kind is OpKind.UPDATE]
        operations += UPDATE_STARTS * sum(map(len, updated))
    return program, min(taken), operations


if __name__ == "__main__":
    print(json.dumps(asdict(walk(*sys.argv[1:3]))))
