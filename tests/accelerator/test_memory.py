"""Oracle: the definition of a piece, and the simulated driver: memory that it was told of is copied
without a wait."""

from __future__ import annotations

import gc
import json
import mmap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.cli.machine import describe
from blockwalk.doctor.machine import device_of_rank
from blockwalk.numerics import device
from blockwalk.numerics.device import card_of, chosen, described, host_buffers, left_on, pieces
from blockwalk.numerics.fused_rows import fused_rows
from blockwalk.numerics.scratch import shared_arena
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.plan.placement import Codec, Tier
from blockwalk.program.program import Lane, Pool, Shape, StepKind
from blockwalk.system.card import Card
from blockwalk.tiers.activations import Activations
from blockwalk.tiers.memories import Memories
from blockwalk.tiers.unit_buckets import Staged
from blockwalk.walk.device_card import card
from blockwalk.walk.lanes import Lanes
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.simulated_device import Simulated


def test_buffers_share_pieces_in_order_and_none_crosses_a_border() -> None:
    assert pieces([3, 3, 3, 9, 1, 10, 20, 1], most=10) == [3, 2, 1, 1, 1]
    assert pieces([], most=10) == []
    assert pieces([0, 0], most=10) == [2]
    assert sum(pieces([1 << 30] * 350)) == 350


def test_host_memory_is_registered_to_the_byte_and_let_go_with_its_last_buffer(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[int, int] = {}

    def register(address: int, nbytes: int) -> None:
        held[address] = nbytes
        sim.driver.sim_pin(address, nbytes)

    def let_go(address: int) -> None:
        sim.driver.sim_unpin(address)
        del held[address]

    monkeypatch.setitem(device.REGISTRARS, "sim", lambda: (register, let_go))
    sizes = [5000, 100, 0, 9000]  # pages: 2, 1, 0, 3
    monkeypatch.setattr(device.pieces, "__defaults__", (3 * mmap.PAGESIZE,))
    buffers = host_buffers(sizes, torch.device("sim", 0))
    assert [len(each) for each in buffers] == sizes
    assert all(each.data_ptr() % mmap.PAGESIZE == 0 for each in buffers if len(each))
    assert list(held.values()) == [3 * mmap.PAGESIZE] * 2, "no power of two, and in pieces"
    there = torch.empty(9000, dtype=torch.uint8, device="sim:0")
    sim.start_counting()
    there.copy_(buffers[3].fill_(7), non_blocking=True)
    buffers[3][:10].copy_(there[:10], non_blocking=True)
    assert sim.counts().waits == {}
    assert there.cpu().sum() == 7 * 9000
    last: Any = buffers.pop(1)
    buffers.clear()
    gc.collect()
    assert len(held) == 1
    del last
    gc.collect()
    assert not held


def test_the_device_has_a_number_and_comes_from_whoever_names_it(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.accelerator.set_device_index(2)
    assert chosen() == chosen("sim") == torch.device("sim", 2)
    assert chosen("sim:1") == torch.device("sim", 1)
    monkeypatch.setenv("BLOCKWALK_DEVICE", "cpu")
    assert chosen() == torch.device("cpu")
    assert chosen("sim:3") == torch.device("sim", 3)
    with refused(ValueError, "BLOCKWALK_DEVICE"):
        chosen("sim:4")
    with refused(ValueError, "0 type"):
        chosen("cuda")


def test_apple_s_device_is_taken_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: what torch answers on such a machine; its module tells no name of a model."""
    monkeypatch.delenv("BLOCKWALK_DEVICE", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    assert chosen() == torch.device("cpu")
    assert "--device mps takes it" in described(chosen())
    assert chosen("mps") == torch.device("mps", 0)
    assert "float64" in described(chosen("mps"))
    assert describe()["accelerator"].startswith("mps: mps")
    monkeypatch.setenv("BLOCKWALK_DEVICE", "cpu")
    assert described(chosen()) == "cpu"


def test_a_torch_for_gpus_that_sees_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOCKWALK_DEVICE", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert described(chosen()) == "cpu"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "built for CUDA and sees no such device; docker run needs --gpus all" in described(
        chosen()
    )


def test_a_rank_measures_its_own_device(sim: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert device_of_rank() == torch.device("sim", 2)
    assert torch.accelerator.current_device_index() == 2


def test_a_step_has_what_contexts_and_communicators_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed form: of 80 GB are 8 not free, of which 5 are this process's own tensors."""
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (72 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 5 * 10**9)
    assert left_on(torch.device("cuda", 1)) == 77 * 10**9


def test_a_card_is_what_its_driver_says(sim: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's answers; a device whose memory torch does not tell of has no size, and a
    processor is no card."""
    torch.accelerator.set_device_index(1)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (3, 5))
    monkeypatch.setattr(
        torch.get_device_module("sim"), "get_device_name", lambda _: "Simulated 3000", raising=False
    )
    assert card_of(torch.device("sim", 1)) == card("sim") == Card("Simulated 3000", 5, 3, True)
    assert card("cuda") == card_of(torch.device("cpu")) == Card()

    def refused(_: object) -> tuple[int, int]:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", refused)
    assert card("sim") == Card("Simulated 3000", 0, 0, True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "ROCm: our kernels compile for it, and nothing was tried on it" in described(
        torch.device("sim", 1)
    )


def test_a_measured_card_decodes_inside_products_up_to_its_own_number_of_rows(
    sim: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        torch.get_device_module("sim"), "get_device_name", lambda _: "Simulated 3000", raising=False
    )
    facts = {"name": "Simulated 3000", "fused_crossing_rows": {"int4a": 96.0}}
    (tmp_path / "gpu-facts-sim.json").write_text(json.dumps(facts))
    device = torch.device("sim", 1)
    rows = [fused_rows(codec, device, 128) for codec in (Codec.INT4A, Codec.NF4)]
    assert [*rows, fused_rows(Codec.INT4A, torch.device("cpu"), 128)] == [96, 128, 128]


def test_forward_and_backward_decode_into_one_arena(sim: Simulated) -> None:
    """Autograd's threads are others than the forward's, which on a processor have an arena each."""
    found: list[object] = []

    def ask(name: str) -> None:
        found.append(shared_arena(torch.device(name)))

    for name in ("sim:1", "cpu"):
        thread = threading.Thread(target=ask, args=(name,))
        thread.start()
        thread.join()
        ask(name)
    assert found[0] is found[1]
    assert found[2] is not found[3]


def test_an_op_is_finished_when_the_device_has_done_it(sim: Simulated) -> None:
    """A watch that counted what was issued would see no end of a step while the thread that issues
    it waits for the device."""
    lanes = Lanes(torch.device("sim", 1))
    lanes.begin()
    there = torch.ones(4, device="sim:1")

    def double() -> None:
        there.mul_(2)

    marks = [lanes.submit(Lane.COMPUTE, double, ()) for _ in range(2)]
    lanes.drain(marks)
    assert lanes.finished() == 0
    for mark in marks:
        assert mark.event is not None
        mark.event.synchronize()
    assert lanes.finished() == 2
    assert there.sum() == 16


def test_what_is_brought_back_lies_in_its_places_for_good(sim: Simulated, tmp_path: Path) -> None:
    """However far the host runs ahead: as many buffers as the plan prefetches blocks, and one."""
    activations = Activations(Tier.HOST, Memories(torch.device("sim", 1), tmp_path), 2)
    activations.begin(12)
    addresses = []
    for key in range(5):
        activations.save(key, *activations.stage(torch.full((3,), float(key), device="sim:1")))
    for key in range(5):
        loaded = activations.load(key, activations.place())
        addresses.append(loaded.data_ptr())
        assert loaded.tolist() == [key] * 3
    assert addresses == [addresses[0], addresses[1]] * 2 + [addresses[0]]
    assert len(set(addresses)) == 2


INPUT = 8 * 48 * 32 * 4
"""Bytes of a block's input in :func:`streamed`: rows, tokens, hidden size, float32."""


def streamed(layers: int, folder: Path) -> Walker:
    """A walk of which little lies on the device but adapters and activations: 7 kB a layer, and
    inputs of 49 kB."""
    plan = method("mebp", frozen="host × raw", activation="host")
    model = tiny_model("llama", num_hidden_layers=layers)
    return Walker(
        model,
        plan,
        lora=LoraSettings(rank=1, target_modules=("q_proj",)),
        workdir=folder,
        device="sim:1",
    )


def test_inputs_on_their_way_to_the_host_are_on_the_device_in_few_places(
    sim: Simulated, tmp_path: Path
) -> None:
    """Oracle: the simulated allocator, in whose peak memory counts until its last reader is done.
    Twelve more blocks take no more of it than their adapters, with moments and what a step may go
    back to, however far the host runs ahead."""
    peaks = []
    for layers in (4, 16):
        with streamed(layers, tmp_path / str(layers)) as walker:
            walker.step(random_batch(8, 48, seed=0))
            torch.accelerator.synchronize("sim:1")
            gc.collect()
            torch.accelerator.reset_peak_memory_stats("sim:1")
            sim.order(0)  # nothing runs before somebody waits for it
            walker.step(random_batch(8, 48, seed=1))
            peaks.append(torch.accelerator.max_memory_allocated("sim:1"))
            foreseen = walker.program(StepKind.TRAIN, Shape(8, 48)).peaks()[Pool.DEVICE]
            assert foreseen > (walker.plan.prefetch + 1) * INPUT
    assert peaks[1] - peaks[0] < 2 * INPUT, (peaks, INPUT)


def test_buffers_of_the_longest_rows_are_made_once(
    sim: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the driver, which is told of memory in the first step alone where the run's longest
    rows are known. Where they are not, it lets go of nothing that a copy still needs."""
    registered: list[int] = []
    unfinished: list[int] = []
    running: list[Walker] = []

    def register(address: int, nbytes: int) -> None:
        registered.append(nbytes)
        sim.driver.sim_pin(address, nbytes)

    def let_go(address: int) -> None:
        unfinished.extend(len(walk.lanes._marks) - walk.lanes.finished() for walk in running)
        sim.driver.sim_unpin(address)

    monkeypatch.setitem(device.REGISTRARS, "sim", lambda: (register, let_go))
    losses = []
    for known in (True, False):
        with streamed(4, tmp_path / str(known)) as walker:
            running[:] = [walker]
            if known:
                walker.reserve(Shape(8, 48))
            losses.append([walker.step(random_batch(8, 16, seed=0)).loss])
            first = len(registered)
            unfinished.clear()
            for step, tokens in enumerate((48, 24), 1):
                losses[-1].append(walker.step(random_batch(8, tokens, seed=step)).loss)
            assert (len(registered) == first) == known
            assert bool(unfinished) != known
            assert not any(unfinished), unfinished
        gc.collect()
    assert losses[0] == losses[1]


class Slow:
    """A tier that writes when it is told to (a UnitTier)."""

    def __init__(self) -> None:
        self.go, self.units = threading.Event(), {0: torch.zeros(64, dtype=torch.uint8)}

    def step(self, unit: int) -> int:
        return 0

    def read_unit(self, unit: int, out_P: torch.Tensor) -> int:
        out_P.copy_(self.units[unit])
        return 3

    def write_unit(self, unit: int, data_P: torch.Tensor, step: int) -> None:
        assert self.go.wait(30)
        if step < 0:
            raise OSError("no room")
        self.units[unit] = data_P.clone()

    def bucket(self, unit: int) -> torch.Tensor | None:
        return self.units[unit]

    def close(self) -> None:
        self.units.clear()


def test_no_slot_waits_for_a_disk(sim: Simulated) -> None:
    """Oracle: the bytes that were written, read after them; the write itself is held up until
    then."""
    device = torch.device("sim", 1)
    slow = Slow()
    tier = Staged(slow, 64, device)
    tier.write_unit(0, torch.full((64,), 7, dtype=torch.uint8, device=device), 3)
    assert (tier.step(0), int(slow.units[0].sum())) == (3, 0)
    threading.Timer(0.2, slow.go.set).start()
    out_P = torch.empty(64, dtype=torch.uint8, device=device)
    assert tier.read_unit(0, out_P) == 3
    assert int(out_P.cpu().sum()) == 7 * 64
    tier.write_unit(0, out_P, -1)
    with refused(OSError, "room"):
        tier.bucket(0)
    tier.close()
