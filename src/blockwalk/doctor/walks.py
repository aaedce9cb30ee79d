"""Small walks in a process of their own: what a process holds beside its tensors.

``python -m blockwalk.doctor.walks KIND FOLDER`` prints a line of JSON; ``blockwalk doctor`` runs it
for each kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockwalk.ranks.launch import OF_A_RANK
from blockwalk.system.child_python import SAFE_PATH, python_command

if TYPE_CHECKING:
    from blockwalk.program.program import Program, Shape
    from blockwalk.walk.walker import Walker

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
LARGE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "vocab_size": 8000,
}
WIDE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 3,
    "vocab_size": 8000,
}
MODELS = {"small": SMALL, "large": LARGE, "wide": WIDE}
ONE = ("large", ((2, 256),))
TWO = ("large", ((2, 256), (6, 256)))
LENGTHS = ("wide", ((2, 100), (2, 200), (2, 330), (2, 416), (6, 416)))
"""Larger models and their batches: the last two of a streamed walk make a line. Those before it in
16 bits bring every length that attention is filled up to and every number of rows that products are
made in (:mod:`blockwalk.numerics.row_tiles`), as the records of a run do; what these keep grows
with the widest matrix."""
WALKS: dict[str, tuple[str, bool, dict[str, Any], tuple[str, tuple[tuple[int, int], ...]]]] = {
    "graphs": ("plain", False, {}, ONE),
    "adapters": ("plain", True, {}, ONE),
    "recompute": ("plain", False, {"recompute": "all"}, ONE),
    "streamed": ("mebp", True, {}, TWO),
    "streamed, 16 bits": ("mebp", True, {"compute_dtype": "bfloat16"}, LENGTHS),
    "forwards": ("mezo", False, {}, ONE),
}
"""Method, whether adapters are trained, settings and batches of each kind of walk
(``simulate.process_memory.KINDS``)."""

STEPS = 5
MORE = 3
"""Steps of the small model, and of a larger one at each batch."""

_LAUNCHED = (*OF_A_RANK, "OMP_NUM_THREADS")
"""Variables that torchrun gives a rank: a walk in a process of its own must not have them."""


@dataclass(frozen=True, slots=True)
class WalkMemory:
    """Bytes that one kind of walk shows."""

    process_bytes: int
    """Bytes that the process holds beside its tensors when a small model is open."""
    small_growth: int
    """Bytes that the steps of that model add, which has next to no tensors."""
    growth: tuple[tuple[int, int], ...]
    """Pairs of bytes, one of each walk of a larger model: tensors that come and go, and those that
    the process holds in addition, which are buffers of libraries and free heap."""


def beside_tensors(walks: Mapping[str, WalkMemory]) -> dict[str, dict[str, Any]]:
    """Return bytes that a process holds beside its tensors, by kind of walk, as a description of
    hardware has them: ``process_bytes``; and the line ``buffers + slack × what comes and goes``
    through a kind's last two walks. Where there is but one the line begins at the buffers that
    libraries make for any model of some size, which are most of the bytes that forwards alone
    leave."""
    description: dict[str, dict[str, Any]] = {"process_bytes": {}, "buffers": {}, "slack": {}}
    for kind, walked in walks.items():
        start = walks["forwards"].growth[-1][1] if "forwards" in walks and kind != "forwards" else 0
        (smaller, smaller_growth), (larger, larger_growth) = ((0, start), *walked.growth)[-2:]
        rise = max(larger_growth - smaller_growth, 0) / (larger - smaller)
        slack = min(rise, larger_growth / larger)
        description["process_bytes"][kind] = walked.process_bytes
        description["buffers"][kind] = walked.small_growth + int(larger_growth - slack * larger)
        description["slack"][kind] = slack
    return description


def measure(kinds: tuple[str, ...] = tuple(WALKS)) -> dict[str, WalkMemory]:
    """Return every kind of walk, one after the other, on models that are made before: a process
    that made its own would keep their heap."""
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in MODELS.items():
            make(sizes, Path(folder) / name)
        return _run(kinds, folder)


def make(sizes: dict[str, Any], path: Path) -> None:
    """Write a random llama of these sizes into a folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = AutoConfig.for_model(
        "llama", **heads, tie_word_embeddings=True, dtype="float32", **sizes
    )
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    path.mkdir()
    config.save_pretrained(path)
    save_file(dict(model.named_parameters()), path / "model.safetensors")


def _run(kinds: tuple[str, ...], folder: str) -> dict[str, WalkMemory]:
    walks = {}
    variables = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    environment = {**variables, **SAFE_PATH}
    for kind in kinds:
        command = python_command("-W", "ignore", "-m", "blockwalk.doctor.walks", kind, folder)
        completed = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False
        )
        if completed.returncode == 0:
            values = json.loads(completed.stdout.strip().splitlines()[-1])
            walks[kind] = WalkMemory(**{**values, "growth": tuple(map(tuple, values["growth"]))})
    return walks


def walk(kind: str, folder: str) -> WalkMemory:
    """Return one kind of walk, in this process: a small model, then a larger one."""
    from blockwalk.program.program import Shape
    from blockwalk.simulate.process_memory import tensors, transients
    from blockwalk.system.process_memory import PeakMemory, process_bytes

    with PeakMemory(0.002) as memory:
        with _opened(kind, Path(folder), "small") as walker:
            shape = Shape(1, 8)
            # what foreseeing itself brings is there before bytes are counted
            _program(walker, shape)
            process_held = process_bytes()
            _steps(walker, shape, STEPS)
            program = _program(walker, shape)
            process_held -= tensors(program) - transients(program)
        base = memory.take() - tensors(program)
        growth = []
        name, batches = WALKS[kind][-1]
        with _opened(kind, Path(folder), name) as walker:
            for shape in (Shape(*batch) for batch in batches):
                _steps(walker, shape, MORE)
                program = _program(walker, shape)
                growth.append((transients(program), memory.take() - tensors(program) - base))
    return WalkMemory(process_held, base - process_held, tuple(growth))


def _opened(kind: str, folder: Path, model_name: str) -> Walker:
    from blockwalk.engine.frozen_codec import already_said
    from blockwalk.plan.choices import LoraSettings
    from blockwalk.plan.methods import method
    from blockwalk.walk.walker import Walker

    name, adapters, settings, _ = WALKS[kind]
    lora = LoraSettings(rank=8) if adapters else None
    with already_said():
        return Walker(
            folder / model_name,
            method(name, **settings),
            lora=lora,
            workdir=folder / f"{kind} {model_name}",
        )


def _program(walker: Walker, shape: Shape) -> Program:
    from blockwalk.program.program import StepKind

    return walker.program(StepKind.TRAIN, shape, foresee=True)


def _steps(walker: Walker, shape: Shape, steps: int) -> None:
    """Take so many steps at one shape."""
    import torch

    ids = torch.randint(3, walker.spec.vocab_size, (shape.batch, shape.sequence))
    for _ in range(steps):
        walker.step({"input_ids": ids, "labels": ids.clone()})


if __name__ == "__main__":
    print(json.dumps(asdict(walk(*sys.argv[1:3]))))
