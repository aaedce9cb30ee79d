"""Bind a rank to the processor cores beside its GPU, so that host memory that it touches first lies on that NUMA node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PCI_DEVICES = Path("/sys/bus/pci/devices")


def cores_beside(pci_address: str) -> set[int]:
    """The cores of the NUMA node of a PCI device such as ``0000:3b:00.0``; none where the kernel does not say."""
    listed = PCI_DEVICES / pci_address.lower() / "local_cpulist"
    return parse_cores(listed.read_text()) if listed.is_file() else set()


def parse_cores(text: str) -> set[int]:
    """The kernel's list format: ``0-3,8`` are cores 0, 1, 2, 3 and 8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def bind_to_gpu(index: int) -> set[int]:
    """Keep this process, and the threads that it starts from here on, on the cores beside a CUDA device, as far as it may use
    them; answers the cores that it has then."""
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    cores = cores_beside(address) & allowed
    if cores:
        os.sched_setaffinity(0, cores)
    return cores or allowed
