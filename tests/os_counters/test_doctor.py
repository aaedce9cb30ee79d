"""Oracle: the kernel's own figures of memory, and the description read back from its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blockwalk.doctor import events, host
from blockwalk.doctor import machine as probe
from blockwalk.doctor import walks as probe_walk
from blockwalk.doctor.events import event_seconds
from blockwalk.doctor.host import HostStep
from blockwalk.doctor.walks import WalkMemory
from blockwalk.simulate import hardware
from blockwalk.system import load, process_memory


def test_doctor_measures_and_writes_what_plan_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round of each rate; the middle one of several is a closed form, below. Others that
    compute are told by their number."""
    monkeypatch.setattr(probe, "ROUNDS", 1)
    monkeypatch.setattr(load, "computing", lambda _: 1000)
    found = probe.measure(tmp_path, walk=False)
    total = int(Path("/proc/meminfo").read_text().partition("MemTotal:")[2].split()[0]) * 1024
    machine = found.hardware
    assert machine.host_bytes <= total
    bounded, limited = process_memory.host_memory()
    assert (bounded < total) == limited
    assert set(machine.flops) == {"float32", "bfloat16", "float16"}
    assert (
        min(
            machine.disk_read.bandwidth,
            machine.disk_write.bandwidth,
            machine.noise_rate,
            machine.decode_rate,
            machine.op_seconds,
        )
        > 0
    )
    assert not list(tmp_path.iterdir()), "what was written to measure the disk is gone"
    assert "1000.0 threads" in found.warnings[0]
    hardware.save(machine, tmp_path / "hardware.yaml")
    assert hardware.load(tmp_path / "hardware.yaml") == machine


def test_what_comes_with_tensors_is_told_apart_by_the_walks() -> None:
    """Closed form: buffers that forwards alone leave belong to every process that keeps graphs,
    what is above them to its free heap; two walks make a line, which neither falls nor begins below
    nothing."""
    walks = {
        "forwards": WalkMemory(90, 10, ((10, 30),)),
        "graphs": WalkMemory(100, 10, ((100, 80),)),
        "recompute": WalkMemory(100, 10, ((100, 20),)),
        "streamed": WalkMemory(110, 10, ((10, 30), (20, 40))),
        "streamed, 16 bits": WalkMemory(110, 10, ((1, 99), (10, 10), (20, 40))),
    }
    assert probe_walk.beside_tensors(walks) == {
        "process_bytes": {
            "forwards": 90,
            "graphs": 100,
            "recompute": 100,
            "streamed": 110,
            "streamed, 16 bits": 110,
        },
        "buffers": {
            "forwards": 10,
            "graphs": 40,
            "recompute": 30,
            "streamed": 30,
            "streamed, 16 bits": 10,
        },
        "slack": {
            "forwards": 3.0,
            "graphs": 0.5,
            "recompute": 0.0,
            "streamed": 1.0,
            "streamed, 16 bits": 2.0,
        },
    }


def test_of_several_rounds_the_middle_one_counts() -> None:
    """Closed form: the median of each figure by itself; one slow round moves nothing."""
    rates = iter([3.0, 30.0, 1.0, 90.0, 2.0, 20.0])
    probes = {"flops": lambda: next(rates), "noise": lambda: next(rates)}
    assert probe.medians(probes) == {"flops": 2.0, "noise": 30.0}


def test_file_maps_get_a_tenth_of_what_is_free_and_none_of_a_disk_in_memory() -> None:
    """Oracle: the kernel's MemAvailable, and /proc/mounts."""
    available = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    limit, _ = process_memory.host_memory()
    kinds = dict(line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines())
    if kinds.get("/dev/shm") == "tmpfs":
        assert process_memory.page_cache(Path("/dev/shm")) == 0
    if kinds.get("/") not in ("tmpfs", "ramfs"):
        assert 0 < process_memory.page_cache(Path("/")) <= 1.05 * min(available, limit) / 10
        assert process_memory.page_cache(Path("/not/made/yet")) > 0


def test_two_steps_tell_the_host_s_seconds_apart() -> None:
    """Closed form: steps of so many starts of 38 µs and turns of 1.45 ms. Where no two figures of
    at least nothing make both steps, one alone comes as near as it can."""
    exact = [HostStep(s, t, 38e-6 * s + 1.45e-3 * t) for s, t in ((4180, 78), (9744, 86))]
    assert host.explained(exact) == pytest.approx((38e-6, 1.45e-3))
    by_starts = [HostStep(100, 10, 1.0), HostStep(200, 10, 2.2)]
    assert host.explained(by_starts) == pytest.approx(((100 + 2 * 220) / 50000, 0.0))
    by_turns = [HostStep(100, 10, 1.0), HostStep(400, 20, 1.5)]
    assert host.explained(by_turns) == pytest.approx((0.0, (10 + 30) / 500))


def test_a_processor_has_no_events_that_tell_the_time() -> None:
    """The contract of ``event_seconds``: whoever asks takes the host's clock."""
    assert event_seconds(lambda: None, torch.device("cpu")) is None


def test_events_stand_in_the_queue_behind_what_keeps_the_device_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the order in which a device without work of its own is told; its events are 3 ms
    apart."""
    told: list[str] = []

    class Event:
        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            told.append("event")

        def elapsed_time(self, other: object) -> float:
            return 3.0

    class Filler:
        def copy_(self, source: object) -> None:
            told.append("copy")

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: told.append("wait"))
    monkeypatch.setattr(events, "_filler", lambda device: (Filler(), Filler()))
    events._tells_time.cache_clear()
    assert event_seconds(lambda: told.append("work"), torch.device("meta")) == 3e-3
    events._tells_time.cache_clear()
    assert told[:3] == ["event", "event", "wait"], "whether events tell the time at all"
    assert told[3:] == ["copy"] * events.FILLS + ["event", "work", "event", "wait"]
