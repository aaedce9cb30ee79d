"""The cores that this process may use: those of its affinity, and of its control group's quota. No
torch."""

from __future__ import annotations

import math
import os
from pathlib import Path

from blockwalk.system.process_memory import group_files


def usable_cores(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> int:
    """Return the number of cores that this process may keep busy, at least 1: those that its
    affinity allows (``taskset``, SLURM), and no more than the quota of its control group, of either
    version, and of the groups around it (containers)."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(root, groups))]))


def _quotas(root: Path, groups: Path) -> list[float]:
    """Return the cores' worth of processor time of each control group that has a limit."""
    quotas: list[float] = []
    for path in group_files(root, groups, "cpu", v1="cpu.cfs_quota_us", v2="cpu.max"):
        try:
            words = path.read_text(encoding="ascii").split()
            if path.name == "cpu.cfs_quota_us":
                words.append(
                    path.with_name("cpu.cfs_period_us").read_text(encoding="ascii").strip()
                )
            quota = int(words[0])
            period = int(words[1])
        except (OSError, ValueError, IndexError):  # no such file, or "max"
            continue
        if quota > 0 < period:
            quotas.append(quota / period)
    return quotas
