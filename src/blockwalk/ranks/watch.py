"""The watch over a run's ranks: heartbeats in the store, and an end with a reason where a rank is
dead or stuck."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from blockwalk.plan.choices import MeshSettings
from blockwalk.ranks.place import LOST, LostRank, Place, reason_of
from blockwalk.system.terminal import say

DEAD_AFTER = 20.0
"""Seconds without a sign of life after which a rank counts as dead; noticed within another five."""

START_TIMEOUT = 120.0
"""Seconds that a rank waits for the others to come."""

STUCK_AFTER = 30.0
"""Seconds without a finished op after which a step counts as stuck, if ten usual steps are not
longer."""


def _end_process(message: str) -> None:
    """Say why, once, and leave at once: a thread that waits in a collective would never return."""
    say(message, file=sys.stderr)
    os._exit(LOST)


class Watch:
    """A watch that ends this process when another rank is dead, or when this one is stuck. Two
    threads: one talks to the store over a connection of its own, where a link that is down can hold
    it for minutes; the other looks at the clock.

    It begins when every rank has come, which it waits for. Every three seconds a rank counts its
    own beat up and reads those of its node and of the next, of however many ranks there are; the
    others hear through the store why it ends. A rank whose beat stands still for
    :data:`DEAD_AFTER` seconds is dead, stopped or unreachable; so is the store's host where it does
    not answer for as long.

    Inside a step (see :meth:`begin_step`) the time since the last finished op is watched: more than
    :data:`STUCK_AFTER` seconds and ten usual steps, and the step is stuck. A slow step whose ops
    finish is left alone, and so is a first step of any length.

    If a silent rank of this node still uses its processor, it is busy (a library can keep every
    other thread of a process waiting), and this rank counts its beat up for it. Any other is killed
    with SIGKILL, because a stopped process ignores its launcher's SIGTERM.

    Args:
        here: this process among the ranks.
        store: of keys, the one that all ranks share.
        end: what to do, given the message; ends the process unless given.

    Raises:
        LostRank: a rank has not come within ``start_timeout`` seconds; its number and node are
            named.
    """

    current: ClassVar[Watch | None] = None
    """The one that watches this process."""
    _made: ClassVar[int] = 0

    def __init__(
        self,
        here: Place,
        store: Any,
        *,
        start_timeout: float = START_TIMEOUT,
        interval: float = 3.0,
        dead_after: float = DEAD_AFTER,
        stuck_after: float = STUCK_AFTER,
        end: Callable[[str], None] = _end_process,
    ) -> None:
        self.interval = interval
        self.dead_after = dead_after
        self.stuck_after = stuck_after
        self.end = end
        self._here = here
        self._rank = here.rank
        self._done = threading.Event()
        self._progress: float | None = None
        self._finished: Callable[[], int] = int
        self._count = 0
        self._began = 0.0
        self._steps: list[float] = []
        self._about = f"blockwalk/watch-{Watch._made}"
        Watch._made += 1
        node = here.ranks_per_node
        leader = here.rank // node * node
        following = (leader + node) % here.world
        self._node = range(leader, leader + node)
        self._watched = sorted({*self._node, *range(following, following + node)})
        """The ranks whose beats this one reads."""
        self._end_key = f"{self._about}/end"
        self._heard = ""
        """The message with which a rank has ended that saw others silent."""
        self._seen: dict[int, tuple[bytes, float]] = {}
        """Each rank's newest beat, and when that was first seen."""
        self._processes: dict[int, str] = {}
        """The process of each rank of this node: its number, when it began, and its host."""
        self._used: dict[int, int] = {}
        """Processor time that each silent rank of this node had used when it was last looked at."""
        self._trouble = ""
        self._store = store.clone()
        self._meet(start_timeout)
        self._store.set_timeout(timedelta(seconds=dead_after / 2))
        self._lived = 0.0
        """Seconds on this rank's clock: while its process is stopped, or no thread of it gets to
        run, it stands still."""
        self._answered = 0.0
        """Seconds on that clock at which the store last answered; all times below are on it."""
        works = (self._beat, self._look)
        self._threads = [
            threading.Thread(target=work, name="blockwalk watch", daemon=True) for work in works
        ]
        for thread in self._threads:
            thread.start()
        Watch.current = self

    def _meet(self, timeout: float) -> None:
        """Wait until every rank has come. All ranks name the same missing ones."""
        rank = self._here.rank
        store = self._store
        missing = f"{self._about}/missing"
        count = f"{self._about}/present"
        wait = 0.01
        deadline = time.monotonic() + timeout
        try:
            store.set(self._beat_of(rank), "0")
            process = os.getpid()
            store.set(self._process(rank), f"{process} {_began(process)} {platform.node()}")
            store.add(count, 1)
            while store.add(count, 0) < self._here.world:
                if store.check([missing]):
                    raise LostRank(store.get(missing).decode())
                if time.monotonic() > deadline:
                    store.set(missing, self._absent(timeout))
                    # rank 0 may hold the store: let the others read it
                    time.sleep(min(1.0, timeout / 4))
                time.sleep(wait)
                wait = min(2 * wait, 0.2)
            keys = map(self._process, self._node)
            values = store.multi_get(list(keys))
            self._processes = dict(zip(self._node, map(bytes.decode, values), strict=True))
        except (RuntimeError, OSError) as error:
            if isinstance(error, LostRank):
                raise
            raise LostRank(
                f"rank {rank} lost the store of ranks while it waited for the others: {error}"
            ) from None

    def _absent(self, timeout: float) -> str:
        """Return the message that names the ranks that have not come."""
        hosts: dict[int, str] = {}
        absent: list[int] = []
        for rank in range(self._here.world):
            key = self._process(rank)
            if self._store.check([key]):
                hosts[rank // len(self._node)] = self._store.get(key).decode().split()[2]
            else:
                absent.append(rank)
        ranks = []
        for rank in absent:
            node = rank // len(self._node)
            host = hosts.get(node, "from which no rank has come")
            ranks.append(f"rank {rank} (node {node}, {host})")
        return (
            f"{', '.join(ranks)} did not come within {timeout:g} s (start_timeout): not started,"
            " stopped, or unable to reach the others"
        )

    def begin_step(self, finished: Callable[[], int] = int) -> None:
        """Watch a step of which so many ops have ``finished``: on an accelerator one that is issued
        can still be stuck, and a thread that waits for the device issues none."""
        self._finished = finished
        self._count = 0
        self._began = time.monotonic()
        self._progress = self._lived

    def _count_finished(self) -> None:
        """Note whether ops were done since this was last asked."""
        count = self._finished() if self._progress is not None else self._count
        if count != self._count:
            self._count = count
            self.progress()

    def progress(self) -> None:
        """Note that an op is done."""
        if self._progress is not None:
            self._progress = self._lived

    def end_step(self) -> None:
        self._progress = None
        self._steps = [*self._steps[-19:], time.monotonic() - self._began]

    def close(self) -> None:
        """Stop watching, when every rank has come this far."""
        if not self._done.is_set():
            dist.barrier()
            self._done.set()
            for thread in self._threads:
                thread.join()
            Watch.current = None

    def stuck(self) -> str | None:
        """Return the message that ends a rank whose step is stuck; None where it is not."""
        progress = self._progress
        steps = self._steps
        if progress is None or not steps:
            return None
        waited = self._lived - progress
        usual = statistics.median(steps)
        if waited <= max(self.stuck_after, 10 * usual):
            return None
        return (
            f"rank {self._rank}: no operation of this step has finished for {waited:.0f} s, and a"
            f" step usually takes {usual:.1f} s: it is stuck. The run ends; start it again to"
            " resume"
        )

    def ended(self, within: float = 1.0) -> list[int]:
        """Return the ranks of this node whose process has ended, as soon as there is one, or after
        ``within`` seconds: a process lets go of its connections a little before its end."""
        deadline = time.monotonic() + within
        while True:
            ranks = [rank for rank, process in self._processes.items() if not _runs(process)]
            if ranks or time.monotonic() > deadline:
                return ranks
            time.sleep(0.01)

    def _beat(self) -> None:
        """Count up, and read how far the others are."""
        beats = 0
        while not self._done.wait(self.interval):
            beats += 1
            try:
                self._store.set(self._beat_of(self._rank), str(beats))
                values = self._store.multi_get(list(map(self._beat_of, self._watched)))
                if self._store.check([self._end_key]):
                    self._heard = self._store.get(self._end_key).decode()
                now = self._answered = self._lived
                for rank, value in zip(self._watched, values, strict=True):
                    if rank not in self._seen or self._seen[rank][0] != value:
                        self._seen[rank] = (value, now)
                    elif (
                        rank in self._node
                        and now - self._seen[rank][1] > self.dead_after / 2
                        and self._works(rank)
                    ):
                        self._store.set(self._beat_of(rank), f"{beats} of rank {self._rank}")
            except Exception as error:
                # a store that fails once may answer again, over another connection
                self._trouble = f" ({str(error).splitlines()[0]})"
                with contextlib.suppress(Exception):
                    self._store = self._store.clone()

    def _works(self, rank: int) -> bool:
        """Return whether the process of a silent rank of this node has used its processor since
        this was last asked."""
        earlier = self._used.get(rank)
        ticks = _used(self._store.get(self._process(rank)).decode())
        self._used[rank] = ticks
        return earlier is not None and ticks > earlier

    def _look(self) -> None:
        """End the process where the clock says so."""
        looked_at = time.monotonic()
        while not self._done.wait(self.interval / 2):
            now = time.monotonic()
            self._lived += min(now - looked_at, self.interval)
            looked_at = now
            self._count_finished()
            message = self.unheard() or self.stuck()
            if message is not None and not self._done.is_set():
                self.end(message)
                return

    def unheard(self) -> str | None:
        """Return the message that ends this rank where others are silent, or None; silent ranks of
        this node are killed."""
        now = self._lived
        silence = now - self._answered
        if silence > self.dead_after:
            return (
                f"rank {self._rank}: the host of rank 0 does not answer for {silence:.0f}"
                f" s{self._trouble}: the run ends; start it again to resume"
            )
        silent = [
            rank for rank, (_, since) in list(self._seen.items()) if now - since > self.dead_after
        ]
        if not silent:
            return f"rank {self._rank}: {self._heard}" if self._heard else None
        for rank in silent:
            if rank in self._node:
                _kill(self._store.clone().get(self._process(rank)).decode())
        message = (
            f"no sign of life from rank {', '.join(map(str, silent))} for"
            f" {self.dead_after:.0f} s: dead, stopped or unreachable. The run ends; start it again"
            " to resume"
        )
        # in a thread of its own: the store's host may be gone as well
        telling = threading.Thread(target=self._tell, args=(message,), daemon=True)
        telling.start()
        telling.join(self.interval)
        return f"rank {self._rank}: {message}"

    def _tell(self, message: str) -> None:
        """Leave the reason of the end for ranks that do not read the silent ones' beats."""
        with contextlib.suppress(Exception):
            self._store.clone().set(self._end_key, message)

    def _beat_of(self, rank: int) -> str:
        """Return the key of a rank's beat."""
        return f"{self._about}/beat/{rank}"

    def _process(self, rank: int) -> str:
        """Return the key of a rank's process: its number, when it began, and its host."""
        return f"{self._about}/process/{rank}"


@contextlib.contextmanager
def naming(watch: Watch | None) -> Iterator[None]:
    """Name the ranks of this node that have ended, where a connection to another rank breaks: gloo
    says its address alone.

    Raises:
        LostRank: the error of a connection, with those ranks.
    """
    try:
        yield
    except RuntimeError as error:
        ranks = watch.ended() if watch is not None and "gloo" in str(error) else []
        if not ranks:
            raise
        names = ", ".join(f"rank {rank}" for rank in ranks)
        verb = "have" if len(ranks) > 1 else "has"
        raise LostRank(
            f"{names} {verb} ended ({reason_of(error)}). The run ends; start it again to resume"
        ) from error


def begin_watch(mesh: MeshSettings) -> Watch:
    """Return a watch over ranks whose process group is there already; every rank calls this
    together."""
    rank = dist.get_rank()
    node = mesh.ranks_per_node
    c10d: Any = dist.distributed_c10d
    return Watch(Place(rank, mesh.world, rank % node, node), c10d._get_default_store())


def _stat(process: int) -> list[str]:
    """Return the kernel's fields about a process of this machine, from the third field of proc(5)'s
    stat; nothing where it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _began(process: int) -> str:
    """Return the time, in the kernel's ticks, at which a process of this machine began: with its
    number, it is that process and no other."""
    return (_stat(process) or [""] * 20)[19]


def _runs(process: str) -> bool:
    """Return whether a process, given as its number and its beginning, is there and runs: one that
    nobody has waited for is still listed, as Z, when it has ended."""
    number, began, *_ = process.split(" ")
    fields = _stat(int(number))
    return not began or (bool(fields) and fields[19] == began and fields[0] not in "ZX")


def _used(process: str) -> int:
    """Return processor time of a process, given as its number and its beginning, in the kernel's
    ticks; 0 where it is gone."""
    number, began, *_ = process.split(" ")
    fields = _stat(int(number))
    return int(fields[11]) + int(fields[12]) if fields and fields[19] == began else 0


def _kill(process: str) -> None:
    """Kill a process, given as its number and its beginning, if it is still there."""
    number, began, *_ = process.split(" ")
    if began and _began(int(number)) == began:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(number), signal.SIGKILL)
