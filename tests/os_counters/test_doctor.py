"""Oracle: the kernel's own figures of memory, and the description read back from its file."""

from __future__ import annotations

from pathlib import Path

from blockwalk.simulate import hardware, probe


def test_doctor_measures_and_writes_what_plan_reads(tmp_path: Path) -> None:
    found = probe.measure(tmp_path)
    total = int(Path("/proc/meminfo").read_text().partition("MemTotal:")[2].split()[0]) * 1024
    machine = found.hardware
    assert machine.host_bytes <= total
    bounded, limited = probe.host_memory()
    assert (bounded < total) == limited
    assert set(machine.flops) == {"float32", "bfloat16", "float16"}
    assert min(machine.disk_read.bandwidth, machine.disk_write.bandwidth, machine.noise_rate, machine.decode_rate) > 0
    assert not list(tmp_path.iterdir()), "what was written to measure the disk is gone"
    hardware.save(machine, tmp_path / "hardware.yaml")
    assert hardware.load(tmp_path / "hardware.yaml") == machine
    assert found.seconds < 60
