"""Oracle: the operating system's peak of the process, and the buffers of a model that was really
built."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from blockwalk.cutting.skeleton import build_skeleton, model_class, persistent_buffers
from tests.support.architectures import TABLE
from tests.support.control import tiny_config

PROBE = """
import json, sys
from transformers import AutoConfig
from blockwalk.cutting.peft_models import add_adapter, lora_config
from blockwalk.cutting.skeleton import build_skeleton
import peft

def peak():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def config(**sizes):
    return AutoConfig.for_model("qwen2", num_attention_heads=16, num_key_value_heads=2, **sizes)

tiny = config(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=64)
large = config(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, vocab_size=151936)
small = build_skeleton(tiny)
# imports, and the run of a small instance that shows which modules are reached
add_adapter(small, lora_config(8))
before = peak()
model = build_skeleton(large)
built = peak()
add_adapter(model, lora_config(8))
weights = sum(p.numel() * p.element_size() for p in model.parameters() if p.is_meta)
adapter = sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
print(json.dumps({"built": built - before, "with": peak() - before,
                  "weights": weights >> 10, "adapter": adapter >> 10}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_a_skeleton_of_three_billion_parameters_takes_a_few_megabytes() -> None:
    """Oracle: VmHWM, the operating system's peak of resident memory, in a process of its own."""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE], capture_output=True, text=True, check=True
    )
    figures = json.loads(out.stdout.splitlines()[-1])
    assert figures["weights"] > 10_000_000
    assert figures["built"] < 20_000, figures
    assert figures["with"] < figures["built"] + figures["adapter"] + 20_000, figures


@pytest.mark.parametrize("model_type", TABLE)
def test_buffers_are_those_of_a_real_model(model_type: str) -> None:
    """Oracle: the buffers and the state dict of the model built with its weights."""
    config = tiny_config(model_type, **TABLE[model_type])
    skeleton = build_skeleton(config, torch.bfloat16)
    real = model_class(config)._from_config(config, dtype=torch.bfloat16)
    buffers = dict(real.named_buffers())
    made = dict(skeleton.named_buffers())
    assert made.keys() == buffers.keys()
    for name, buffer in buffers.items():
        assert not made[name].is_meta
        assert made[name].dtype == buffer.dtype, name
        assert torch.equal(made[name], buffer), name
    stored = set(real.state_dict()) - {
        name for name, _ in real.named_parameters(remove_duplicate=False)
    }
    assert set(persistent_buffers(skeleton)) == stored
    assert persistent_buffers(real) == persistent_buffers(skeleton)
    for (name, param), (real_name, real_param) in zip(
        skeleton.named_parameters(), real.named_parameters(), strict=True
    ):
        assert (name, param.shape, param.dtype) == (real_name, real_param.shape, real_param.dtype)
        assert param.is_meta
