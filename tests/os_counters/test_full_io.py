"""Oracle: the kernel's count of what a process reads from the disk and dirties, /proc/self/io, in a
hard memory cgroup."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.memory_limit import run_limited, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ROOM = 80 << 20
"""Bytes of page cache beside the process: for a few units, where all state is 700 MB."""
ROOM_OF_GRAPHS = 120 << 20
"""The same where a unit has, beside its state, what an update may go back to and what its graph
saves."""
LAYERS = 36
SLIDE = {
    "trainable": "disk × fp32",
    "optimizer_state": "disk × fp32",
    "gradient": "disk × fp32",
    "recompute": "all",
}
WORKER = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from blockwalk import Walker, method
from blockwalk.program.program import Lane, Shape, StepKind
from blockwalk.system.process_memory import process_bytes
folder, work, name, settings, room = sys.argv[1:]
ids = torch.randint(3, 900, (1, 32), generator=torch.Generator().manual_seed(0))
batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
def counted():
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}
groups = Path("/proc/self/cgroup").read_text().splitlines()
group = next(line.split(":")[2] for line in groups if ":memory:" in line)
limit = Path("/sys/fs/cgroup/memory" + group) / "memory.limit_in_bytes"
with Walker(folder, method(name, **json.loads(settings)), device="cpu", workdir=work) as walker:
    walker.step(batch)
    limit.write_text(str(process_bytes() + int(room)))
    walker.step(batch)
    before = counted()
    steps = []
    for _ in range(3):
        result = walker.step(batch)
        after = counted()
        read, written = (after[name] - before[name] for name in ("read_bytes", "write_bytes"))
        steps.append((read, written, result))
        before = after
    read, written, result = sorted(steps, key=lambda step: step[0])[1]
    foreseen = walker.program(StepKind.TRAIN, Shape(*ids.shape), foresee=True).bytes_by_lane()
    parameters = walker.spec.numel(trainable=True)
print(json.dumps({
    "read": read, "said to read": result.bytes[Lane.FETCH],
    "written": written, "said to write": result.bytes[Lane.STORE],
    "parameters": parameters,
    "foreseen to read": foreseen[Lane.FETCH], "foreseen to write": foreseen[Lane.STORE],
}))
"""


def moved(folder: Path, name: str, settings: dict[str, str], room: int) -> dict[str, int]:
    """Return the bytes of a step of full fine-tuning on a random model, by the kernel and by the
    program.

    It is the middle one of three steps by what they read: beside other work the kernel takes pages
    that are read again."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=320,
        intermediate_size=960,
        num_hidden_layers=LAYERS,
        num_attention_heads=5,
        num_key_value_heads=5,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder / "model")
    paths = [str(folder / "model"), str(folder / "work")]
    done, _ = run_limited(
        [sys.executable, "-c", WORKER, *paths, name, json.dumps(settings), str(room)], 4 << 30
    )
    assert done.returncode == 0, done.stderr
    counted: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counted


def test_a_step_from_disk_moves_what_its_program_says(tmp_path: Path) -> None:
    """Full fine-tuning, 24 bytes read a parameter and 16 written. The page cache saves reads of
    :data:`ROOM` bytes at most. The process's own code is read again where memory is short: 15 MB or
    so."""
    found = moved(tmp_path, "plain", SLIDE, ROOM)
    assert found["said to write"] == pytest.approx(16 * found["parameters"], rel=0.01)
    assert found["said to read"] == pytest.approx(24 * found["parameters"], rel=0.02)
    assert found["written"] == pytest.approx(found["said to write"], rel=0.02)
    said = found["said to read"]
    assert said - ROOM <= found["read"] <= 1.05 * said, (
        found
    )  # the cache that there is keeps so much at most


@pytest.mark.parametrize("recompute", ["all", "none"])
def test_what_graphs_write_to_file_maps_and_read_there_is_in_the_program(
    tmp_path: Path, recompute: str
) -> None:
    """Updates at the turn: 24 bytes a parameter are written beside graphs, which hold the
    trainables in bfloat16. A graph that is kept is read again; no page is read only to be
    overwritten, which would be 108 MB more. The kernel counts large pages whole: up to 2 MB at
    either end of a graph, which are 1 MB each on average."""
    settings = {"frozen": "disk × raw", "recompute": recompute}
    found = moved(tmp_path, "mebp", settings, ROOM_OF_GRAPHS)
    assert found["said to write"] > 26 * found["parameters"], found
    for what in ("read", "write"):
        assert found[f"foreseen to {what}"] == pytest.approx(found[f"said to {what}"], rel=0.01), (
            found
        )
    said = found["said to write"]
    of_large_pages = LAYERS * 2 * 2**20
    assert 0.98 * said <= found["written"] <= 1.02 * said + of_large_pages, found
    said = found["said to read"]
    assert said - ROOM_OF_GRAPHS <= found["read"] <= 1.02 * said + of_large_pages, found
