"""Oracle: RssAnon + RssShmem in /proc/self/status of a child process, sampled while it packs and
merges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blockwalk.tiers.model_folder import safetensors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")

VOCAB = 16384
HIDDEN = 1024
RANK = 4
LARGEST = VOCAB * HIDDEN * 4
"""Bytes of the embedding, and of the head: 67 MB each."""
BOUND = 32 << 20
"""Bytes that packing and merging may take beyond what the process held before."""

CHILD = """
import sys, threading, time
from pathlib import Path
from blockwalk.convert.merge import merge
from blockwalk.engine.pack import pack
from blockwalk.plan.placement import Codec

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    rows = (line for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return sum(int(row.split()[1]) << 10 for row in rows)

def peak_of(work):
    peak, done = anonymous(), threading.Event()
    def sample():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.002)
    before, sampler = peak, threading.Thread(target=sample)
    sampler.start()
    work()
    done.set()
    sampler.join()
    print(work.__name__, peak - before)

folder = Path(sys.argv[1])
# imports, and the check of how the model is cut
pack(folder / "small", folder / "warm", Codec.INT4)
merge(folder / "small", folder / "small adapter", folder / "warm merge")
def packing(): pack(folder / "large", folder / "store", Codec.INT4)
def merging(): merge(folder / "large", folder / "adapter", folder / "merged")
def merging_store(): merge(folder / "store", folder / "adapter", folder / "merged store")
for work in (packing, merging, merging_store):
    peak_of(work)
def whole(): held.append(torch.ones(VOCAB_HIDDEN))
import torch
from blockwalk.system.heap import give_back
held, VOCAB_HIDDEN = [], int(sys.argv[2])
give_back()  # the matrix would go where the merges have left room
peak_of(whole)
"""


def make(folder: Path, name: str, vocab: int, hidden: int) -> None:
    """A random llama of one block and an adapter on its head, written without holding either."""
    from transformers import AutoConfig

    from blockwalk.cutting.skeleton import build_skeleton

    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=8,
        intermediate_size=64,
    )
    model = build_skeleton(config)
    config.save_pretrained(folder / name)
    entries = {n: safetensors.Entry(tuple(p.shape), p.dtype) for n, p in model.named_parameters()}
    pieces = (torch.randn(entry.shape) for entry in entries.values())
    safetensors.write(folder / name / "model.safetensors", entries, pieces)

    adapter = folder / ("adapter" if name == "large" else "small adapter")
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8})
    )
    prefix = "base_model.model.lm_head.lora_"
    float32 = torch.float32
    factors = {
        f"{prefix}A.weight": safetensors.Entry((RANK, hidden), float32),
        f"{prefix}B.weight": safetensors.Entry((vocab, RANK), float32),
    }
    pieces = (torch.randn(entry.shape) for entry in factors.values())
    safetensors.write(adapter / "adapter_model.safetensors", factors, pieces)


def test_packing_and_merging_hold_less_than_one_matrix(tmp_path: Path) -> None:
    """Oracle: the child's counters; its control, one matrix held whole, shows that they count."""
    make(tmp_path, "small", 64, 64)
    make(tmp_path, "large", VOCAB, HIDDEN)
    assert LARGEST >= 2 * BOUND
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), str(VOCAB * HIDDEN)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    taken = {
        name: int(nbytes) for name, nbytes in (line.split() for line in run.stdout.splitlines())
    }
    assert taken.pop("whole") >= 0.9 * LARGEST
    assert taken.keys() == {"packing", "merging", "merging_store"}
    assert max(taken.values()) <= BOUND, taken
