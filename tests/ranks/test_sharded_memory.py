"""Oracle: the kernel's figures of a rank's memory, before and after its walker was made, and a
checkpoint copied."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from blockwalk.checkpoints import distributed
from blockwalk.cutting.verify import certified
from blockwalk.plan.methods import method
from blockwalk.program.compile import checkpoint_copies
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


COPIES: dict[str, dict[str, Any]] = {
    "zero3": {},
    "mics": {"mesh.ranks_per_node": 1},  # each rank has all of it, and writes a half
    "hzp": {"mesh.pipeline": 2},  # the prologue, which both hold, is the first's to write
}


def _copied(rank: int, folder: Path) -> dict[str, tuple[int, int]]:
    """Bytes that a rank's copy of a checkpoint takes while it is written, and those foreseen."""
    bytes_of = {}
    write = distributed.write_folder
    for name, settings in COPIES.items():
        mesh = {"mesh.world": 2, "mesh.ranks_per_node": 2}
        plan = method(name, **{**mesh, **settings})
        with pytest.MonkeyPatch.context() as patch, Walker(folder, plan, device="cpu") as walker:
            walker.save_state(folder / f"first-{name}")  # groups and threads are made for it
            measured = threading.Event()

            def later(*written: Any, event: threading.Event = measured) -> None:
                event.wait(60)
                write(*written)

            patch.setattr(distributed, "write_folder", later)
            gc.collect()
            give_back()
            before = private_bytes()
            walker.save_state(folder / name, wait=False)
            taken = private_bytes() - before
            measured.set()
            walker.wait_saved()
            model = walker.engine.model
            foreseen = checkpoint_copies(plan, model.full_spec)
            bytes_of[name] = (taken, foreseen[model.stage.number])
    return bytes_of


def test_the_copy_of_a_checkpoint_is_foreseen(tmp_path: Path) -> None:
    model = tiny_model("llama", tied=True, **SIZES | {"vocab_size": 16384})
    certified(model)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    first, second = run_ranks(2, _copied, tmp_path, fresh=True)
    for name in COPIES:
        for measured, foreseen in (first[name], second[name]):
            assert measured == pytest.approx(foreseen, rel=0.05), name
    assert first["hzp"][1] > 1.2 * second["hzp"][1], "the prologue is written once"
