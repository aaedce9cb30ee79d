"""Oracle: the kernel. In a hard memory cgroup, page cache included, a step on more weights than fit
completes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from benchmarks.common import RandomSource
from benchmarks.memory_limit import limited_run, run_limited, why_not

from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.cutting.verify import certified
from blockwalk.plan.placement import Codec
from blockwalk.tiers.block_store.writer import write_store
from tests.support.versions import has_cuda_libraries

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(
        has_cuda_libraries, reason="480 MB do not hold the libraries of a build for CUDA"
    ),
]

WEIGHTS = 400 * 10**6
LIMIT = 480 * 10**6
"""Bytes: with the ~290 MB that importing torch and transformers takes, the weights cannot stay in
memory."""


def test_weights_that_do_not_fit_beside_the_process_are_walked(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=12,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path / "config")
    skeleton = build_skeleton(config, torch.bfloat16)
    spec = certified(skeleton).spec()
    source = RandomSource({p.name: p.shape for p in spec.params()}, torch.bfloat16)
    write_store(tmp_path / "store", source, spec, Codec.BF16, copy_from=tmp_path / "config")
    size = sum(path.stat().st_size for path in (tmp_path / "store").iterdir())
    assert size > WEIGHTS
    result, peak = limited_run(tmp_path / "store", LIMIT, steps=1)
    assert peak <= LIMIT
    assert all(
        loss == pytest.approx(10.4, abs=0.5) for loss in result["losses"]
    )  # random weights: about log(32000)


def test_the_limit_is_hard() -> None:
    """The control: a process that wants more than the limit is killed."""
    done, _ = run_limited(
        [sys.executable, "-c", "b = bytearray(300 << 20); print(len(b))"], 200 << 20
    )
    assert done.returncode != 0
