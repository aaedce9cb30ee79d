"""Oracle: the kernel's own counters of a process's memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GRANTED = Path("/sys/kernel/mm/transparent_hugepage/enabled")

LOOK = """
import {package}
import torch
tensor = torch.ones(64 << 20, dtype=torch.uint8)
lines = open("/proc/self/smaps_rollup")
print(sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")))
"""


@pytest.mark.skipif(
    not GRANTED.exists() or "[madvise]" not in GRANTED.read_text(),
    reason="the system grants pages of 2 MB to all or to none"
    " (/sys/kernel/mm/transparent_hugepage/enabled is not madvise)",
)
def test_a_large_tensor_lies_in_huge_pages() -> None:
    """Memory is fragmented now and then: half of the tensor is enough, and a process without the
    walker has none."""
    environment = {
        name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"
    }

    def kilobytes(package: str) -> int:
        command = [sys.executable, "-c", LOOK.format(package=package)]
        return int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)

    assert kilobytes("blockwalk.walk.walker") >= 32 << 10
    assert kilobytes("sys") == 0
