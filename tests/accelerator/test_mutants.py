"""Oracle: the CPU's steps, which a walk with one rule broken must miss. Each test puts back a
mistake that accelerators punish and processors forgive: the simulated device must show it, or the
tests beside this one prove nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blockwalk.engine import sharded_part
from blockwalk.engine.sharded_part import ShardedPart
from blockwalk.numerics.device import recorded
from blockwalk.numerics.losses import cross_entropy
from blockwalk.plan.methods import method
from blockwalk.program import backprop
from blockwalk.program.program import Lane
from blockwalk.tiers.unit_buckets import UnitBuckets
from blockwalk.walk import batch_parts, lanes, walker
from blockwalk.walk.lanes import Lanes, Mark
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.simulated_device import Simulated
from tests.support.simulated_runs import Outcome, run, same
from tests.support.visits import visited_host

ORDERS = range(8)


def missed(name: str, sim: Simulated, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a row's steps differ from a CPU's, which are run with nothing broken; a step that
    read what it must not may also have met no number, or an index that is none."""
    try:
        found = run(name, folder / "sim", "sim:1", ORDERS, sim)
    except (FloatingPointError, IndexError):
        return True
    monkeypatch.undo()
    expected: Outcome = run(name, folder / "cpu", "cpu", ORDERS)
    return not same(found, expected)


def test_a_wait_between_lanes_left_out(
    sim: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Lanes._run

    def unordered(
        self: Lanes, lane: object, work: object, after: tuple[Mark, ...], mark: Mark
    ) -> None:
        kept(self, lane, work, tuple(Mark(each.future) for each in after), mark)  # type: ignore[arg-type]

    monkeypatch.setattr(Lanes, "_run", unordered)
    assert missed("zo2", sim, tmp_path, monkeypatch)


def test_a_buffer_filled_before_its_last_input_has_left(
    sim: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backprop._Backprop, "_leaves_buffer", lambda _: [])
    assert missed("plain, activations on the host", sim, tmp_path, monkeypatch)


def test_a_lane_on_device_0(sim: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without a number is another one in each thread."""

    def made_on(device: torch.device) -> int:
        numbers: list[int] = []
        queues = Lanes(device)
        queues.begin()
        queues.drain(
            [
                queues.submit(
                    Lane.FETCH,
                    lambda: numbers.append(torch.ones(1, device=device).device.index),
                    (),
                )
            ]
        )
        queues.close()
        return numbers[0]

    torch.accelerator.set_device_index(1)
    assert made_on(torch.device("sim", 1)) == 1
    monkeypatch.setattr(Lanes, "_enter", lambda _: None)
    assert made_on(torch.device("sim")) == 0


def test_a_host_tensor_at_a_device_operator(
    sim: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "sent", lambda tensor, _: tensor)
    with refused(RuntimeError, "host tensor"):
        run("plain", tmp_path, "sim:1", [0], sim)


def test_weights_read_before_they_arrived(
    sim: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stored(device: str) -> torch.Tensor:
        model = tiny_model("opt", dropout=0.0)
        with walker.Walker(model, method("zo2"), workdir=tmp_path, device=device) as walk:
            for step in range(2):
                walk.step(random_batch(seed=step))
            walk.flush()
            bucket = walk.engine.trained.tier.bucket(2)  # type: ignore[union-attr]
            assert bucket is not None
            return bucket.clone()

    with visited_host():
        expected = stored("cpu")
    assert torch.equal(stored("sim:1"), expected)
    monkeypatch.setattr(
        UnitBuckets, "bucket", lambda self, unit: self._memory.bytes((self._kind, unit))
    )
    assert not torch.equal(stored("sim:1"), expected)


def test_copies_from_pageable_memory_are_counted(
    sim: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        batch_parts, "sent", lambda tensor, device: tensor.to(device, non_blocking=True)
    )
    with refused(AssertionError, "pageable memory"):
        run("mezo", tmp_path, "sim:1", ORDERS, sim)


def test_lanes_of_collectives_are_issued_by_one_thread(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the program's order, with those of the compute lane; other lanes have threads."""
    import threading

    def threads(order: list[Lane]) -> list[int]:
        found: list[int] = []
        queues = Lanes(torch.device("sim", 1))
        queues.begin()
        queues.drain(
            [queues.submit(lane, lambda: found.append(threading.get_ident()), ()) for lane in order]
        )
        queues.close()
        return found

    communicate = [Lane.INTRA, Lane.COMPUTE, Lane.INTER, Lane.INTER_SUMS, Lane.INTRA]
    assert set(threads(communicate)) == {threading.get_ident()}
    assert threading.get_ident() not in threads([Lane.FETCH])
    monkeypatch.setattr(lanes, "_ISSUED_BY_CALLER", ())
    assert len(set(threads(communicate))) == 4


def test_a_slice_that_stays_is_not_written_while_its_memory_is_read(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is what the compute lane let go of when it had issued its last read."""
    device = torch.device("sim", 0)
    part = ShardedPart.__new__(ShardedPart)
    part._model = SimpleNamespace(device=device)  # type: ignore[assignment]

    def doubled() -> list[float]:
        own = torch.full((6,), 7.0, device=device)
        read = torch.full((6,), 5.0, device=device)
        gathered = recorded(device)
        address = read.data_ptr()
        answer = read * 2
        del read
        kept = torch.empty_like(own)
        assert kept.data_ptr() == address
        work = part._cache(kept, own)
        with torch.Stream(device=device) as lane:
            lane.wait_event(gathered)
            work()
            lane.synchronize()
        return answer.cpu().tolist()

    def right() -> bool:
        found = []
        for seed in ORDERS:
            sim.order(seed)
            found.append(doubled() == [10.0] * 6)
        return all(found)

    assert right()
    monkeypatch.setattr(sharded_part, "is_cpu", lambda _: True)
    assert not right()
