"""Memory of this process: what it holds, its peak, and the limits that it is under.

Memory here means the bytes that the kernel cannot drop: RssAnon + RssShmem + VmSwap + VmPTE of
``/proc/self/status``, of the whole process. Pages of mapped files are not counted; they are there
as long as there is room for them. Nothing here imports torch."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blockwalk.system.atomic_files import nearest
from blockwalk.system.process_limits import UNLIMITED, limit

DIRTY_SHARE = 10
"""One part in so many of the free memory: beyond it Linux writes dirty pages out at once
(``vm.dirty_background_ratio``)."""

_STATUS = Path("/proc/self/status")
_STATM = "/proc/self/statm"
_PAGE = mmap.PAGESIZE
_COUNTED = (b"RssAnon:", b"RssShmem:", b"VmSwap:", b"VmPTE:")


def process_bytes() -> int:
    """Return bytes of memory that this process holds and the kernel cannot drop.

    Where there is no ``/proc``: psutil's unique set size.
    """
    if (nbytes := _status(_COUNTED)) is not None:
        return nbytes
    import psutil

    return int(psutil.Process().memory_full_info().uss)


def peak_resident_bytes() -> int:
    """Return bytes of the most resident memory that this process has had, file pages that the
    kernel can drop included: what ``top`` shows as RSS; 0 where there is no ``/proc``."""
    return _status((b"VmHWM:",)) or 0


def address_space_bytes() -> int:
    """Return bytes of this process's address space, what ``ulimit -v`` counts; 0 where there is no
    ``/proc``."""
    try:
        fd = os.open(_STATM, os.O_RDONLY)
    except OSError:
        return 0
    try:
        return int(os.read(fd, 64).split()[0]) * _PAGE
    finally:
        os.close(fd)


def _status(names: tuple[bytes, ...]) -> int | None:
    """Return the sum of the kernel's figures of these names, in bytes; None where there is no
    ``/proc``."""
    try:
        status = _STATUS.read_bytes()
    except OSError:
        return None
    return (
        sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(names)) * 1024
    )


COUNTED = "private memory of the whole process, which the kernel cannot drop"
"""The memory that :func:`process_bytes` counts, in words."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes of memory that the machine, a control group or ``ulimit`` allows this process."""

    nbytes: int
    source: str
    swap: int = 0
    """Bytes that may go to swap beside ``nbytes``."""
    of_process: bool = False
    """Whether the limit counts this process alone, not others of its group or machine."""


def memory_limits(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> list[Limit]:
    """Return every limit of memory that this process is under: the machine's, those of its control
    group and of those around it, of either version, and that of its address space (``ulimit
    -v``)."""
    import psutil

    swap = int(psutil.swap_memory().total)
    limits = [Limit(int(psutil.virtual_memory().total), "this machine", swap)]
    for path in group_files(root, groups, "memory", v1="memory.limit_in_bytes", v2="memory.max"):
        if (bound := _number(path)) is not None:
            swap_limit = _number(path.with_name("memory.swap.max"))
            limits.append(
                Limit(bound, str(path), swap if swap_limit is None else min(swap, swap_limit))
            )
    address_space = limit("RLIMIT_AS")[0]
    if address_space != UNLIMITED:
        limits.append(Limit(address_space, "ulimit -v", of_process=True))
    return limits


def host_memory() -> tuple[int, bool]:
    """Return bytes of memory that this process may use, and whether a cgroup's limit is what bounds
    it."""
    machine, *groups = [limit.nbytes for limit in memory_limits() if not limit.of_process]
    bound = min([machine, *groups])
    return bound, bound < machine


def free_memory() -> int:
    """Return bytes of memory that this process may still take: those that are free, under the
    limits of its control groups."""
    import psutil

    bound, limited = host_memory()
    free = int(psutil.virtual_memory().available)
    return max(min(free, bound - process_bytes()) if limited else free, 0)


def _number(path: Path) -> int | None:
    """Return the number in a file of a control group; None where there is no such file, or no limit
    (``max``)."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def group_files(root: Path, groups: Path, controller: str, *, v1: str, v2: str) -> Iterator[Path]:
    """Yield the files in which limits of this process may stand: those of its control group and of
    the groups around it, which are named ``v1`` or ``v2`` by the version of control groups."""
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines or ["0::/", f"0:{controller}:/"]:
        _, controllers, group = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            base, name = (root / controller, v1) if controllers else (root, v2)
            group_folder = base / group.strip("/")
            yield from (
                folder / name
                for folder in (group_folder, *group_folder.parents)
                if folder.is_relative_to(base)
            )


def page_cache(folder: Path) -> int:
    """Return bytes of file maps that a run may keep dirty: :data:`DIRTY_SHARE` of the memory that
    is free for it now, at most half of the disk that ``folder`` is on or will be, and nothing where
    that is memory itself."""
    import psutil

    room = free_memory() // DIRTY_SHARE
    place = nearest(folder.resolve())
    mounts = [p for p in psutil.disk_partitions(all=True) if place.is_relative_to(p.mountpoint)]
    mount = max(mounts, key=lambda p: len(p.mountpoint), default=None)
    in_memory = mount is not None and mount.fstype in ("tmpfs", "ramfs")
    return 0 if in_memory else min(room, shutil.disk_usage(place).free // 2)


class PeakMemory:
    """The highest :func:`process_bytes` since the last :meth:`take`, sampled by a thread.

    >>> with PeakMemory() as memory:
    ...     held = bytearray(1 << 20)
    ...     peak = memory.take()

    Args:
        interval: seconds between samples.
    """

    def __init__(self, interval: float = 0.005) -> None:
        self._interval = interval
        self._peak = 0
        self.highest = 0
        """Bytes of the highest sample since the start."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="blockwalk-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._record()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._record()

    def take(self) -> int:
        """Return peak bytes since the last call, this moment included."""
        self._record()
        with self._lock:
            peak = self._peak
            self._peak = 0
        return peak

    def _record(self) -> None:
        now = process_bytes()
        with self._lock:
            self._peak = max(self._peak, now)
            self.highest = max(self.highest, now)

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            self._record()
