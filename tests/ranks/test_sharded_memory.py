"""Oracle: the kernel's proportional set size of a rank, before and after its walker was made."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from blockwalk.cutting.verify import certified
from blockwalk.plan.methods import method
from blockwalk.system.heap import give_back
from blockwalk.walk.walker import Walker
from tests.models import tiny_model
from tests.support import held as support
from tests.support.processes import private_bytes, run_ranks

SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 1024}


def _grown(rank: int, folder: Path) -> dict[str, tuple[int, int]]:
    """Bytes that each method's walker took, measured and held."""
    names = ("zero3", "fcdp", "zero3")  # the first time also pays for what is imported and stays
    return {name: _taken(name, folder) for name in names}


def _taken(name: str, folder: Path) -> tuple[int, int]:
    plan = method(name, mesh={"world": 2, "ranks_per_node": 1}, gradient_accumulation_steps=2)
    gc.collect()
    give_back()
    before = private_bytes()
    with Walker(folder, plan, device="cpu") as walker:
        engine: Any = walker.engine
        zeros = support.buffers(engine)
        held = sum(support.held(engine).values()) + sum(buffer.nbytes for buffer in zeros)
        zeros += [
            t
            for s in engine.trained.units.values()
            for t in (s.gradient, s.accumulator, *s.moments.values())
            if t is not None
        ]
        for tensor in zeros:
            tensor.fill_(1)  # they are not in memory before something is written
        return private_bytes() - before, held


def test_the_kernel_sees_what_the_engine_says_it_holds(tmp_path: Path) -> None:
    model = tiny_model("llama", **SIZES)
    certified(model)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    found = run_ranks(2, _grown, tmp_path, fresh=True)[0]
    for name in ("fcdp", "zero3"):
        measured, held = found[name]
        assert held > 40e6
        assert measured == pytest.approx(held, rel=0.05), name
    host_cache = found["fcdp"][0] - found["zero3"][0]
    assert host_cache == pytest.approx(found["fcdp"][1] - found["zero3"][1], rel=0.1)
