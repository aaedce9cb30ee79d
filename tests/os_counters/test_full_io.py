"""Oracle: the kernel's count of what a process reads from the disk and dirties, /proc/self/io, in a hard memory cgroup."""

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
WORKER = f"""
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from blockwalk import Walker, method
from blockwalk.program.program import Lane
from blockwalk.system.process_memory import process_bytes
folder, work = sys.argv[1:]
on_disk = {{"trainable": "disk × fp32", "optimizer_state": "disk × fp32", "gradient": "disk × fp32", "recompute": "all"}}
ids = torch.randint(3, 900, (1, 32), generator=torch.Generator().manual_seed(0))
batch = {{"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}}
def counted():
    lines = Path("/proc/self/io").read_text().splitlines()
    return {{name: int(value) for name, value in (line.split(": ") for line in lines)}}
group = next(line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
limit = Path("/sys/fs/cgroup/memory" + group) / "memory.limit_in_bytes"
with Walker(folder, method("plain", **on_disk), device="cpu", workdir=work) as walker:
    walker.step(batch)
    limit.write_text(str(process_bytes() + {ROOM}))
    walker.step(batch)
    before = counted()
    result = walker.step(batch)
    after = counted()
    parameters = walker.spec.numel(trainable=True)
print(json.dumps({{
    "read": after["read_bytes"] - before["read_bytes"], "said to read": result.bytes[Lane.FETCH],
    "written": after["write_bytes"] - before["write_bytes"], "said to write": result.bytes[Lane.STORE],
    "parameters": parameters,
}}))
"""


def test_a_step_from_disk_moves_what_its_program_says(tmp_path: Path) -> None:
    """Full fine-tuning, 24 bytes read a parameter and 16 written. The page cache saves reads of :data:`ROOM` bytes at most. The
    process's own code is read again where memory is short: 15 MB or so."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=320,
        intermediate_size=960,
        num_hidden_layers=36,
        num_attention_heads=5,
        num_key_value_heads=5,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", WORKER, str(tmp_path / "model"), str(tmp_path / "work")]
    done, _ = run_limited(command, 4 << 30)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["said to write"] == pytest.approx(16 * found["parameters"], rel=0.01)
    assert found["said to read"] == pytest.approx(24 * found["parameters"], rel=0.02)
    assert found["written"] == pytest.approx(found["said to write"], rel=0.02)
    said = found["said to read"]
    assert said - ROOM <= found["read"] <= 1.05 * said, found  # the cache that there is keeps so much at most
