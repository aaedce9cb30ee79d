"""Closed form: the kernel's list format, as documented in cpuset(7); the kernel's own answer of
what a process may use."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from blockwalk.ranks import launch
from blockwalk.ranks import launch as affinity


def test_core_lists() -> None:
    assert launch.parse_cores("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert launch.parse_cores("5\n") == {5}
    assert launch.parse_cores("\n") == set()


def test_a_process_stays_on_the_cores_beside_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    device = tmp_path / "0000:3b:00.0"
    device.mkdir()
    (device / "local_cpulist").write_text(f"{core},4000-4095\n")
    monkeypatch.setattr(affinity, "PCI_DEVICES", tmp_path)
    told = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    try:
        assert launch.bind_to_gpu(told) == {core}
        assert os.sched_getaffinity(0) == {core}
        (device / "local_cpulist").write_text(
            "4000\n"
        )  # none that this process may use: it keeps those that it has
        assert launch.bind_to_gpu(told) == {core}
    finally:
        os.sched_setaffinity(0, before)
