"""Oracle: arithmetic on a heap whose every byte is known."""

from __future__ import annotations

import subprocess
import sys

import pytest

from blockwalk.system import heap

MB = 1 << 20


class Heap:
    """A heap of which ``kept`` bytes are in use and ``free`` ones are not given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept = 300 * MB
        self.free = 0
        self.peak = 0
        self.trims = 0
        monkeypatch.setattr(heap, "_anonymous_bytes", lambda: self.kept + self.free)
        monkeypatch.setattr(heap, "_trimmer", lambda: self.trim)

    def trim(self, _: int) -> int:
        self.free = 0
        self.trims = self.trims + 1
        return 1

    def block(self, needs: int, stays: int = 0, holes: int = 0) -> None:
        """Take and give back ``needs`` bytes; ``stays`` more are kept, and ``holes`` are lost until
        the next trim."""
        self.kept += stays
        self.free = max(self.free, needs) + holes
        self.peak = max(self.peak, self.kept + self.free)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_large_blocks_are_returned_while_that_is_asked() -> None:
    """Oracle: glibc's own count of the bytes that it has taken from the system a block at a time
    (``mallinfo2``), in a process in which a block of 24 MB has come and gone before."""
    code = """
import ctypes
from blockwalk.system import heap
libc = ctypes.CDLL(None)
class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
libc.mallinfo2.restype, libc.malloc.restype = Info, ctypes.c_void_p
def one_by_one(size):
    before = libc.mallinfo2().hblkhd
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
    found = libc.mallinfo2().hblkhd - before
    libc.free(block)
    return found >= size
print(one_by_one(24 << 20), one_by_one(2 << 20))
with heap.large_returned():
    print(one_by_one(4 << 20))
print(one_by_one(8 << 20))
heap.Slack()
with heap.large_returned():
    print(one_by_one(16 << 20))
print(one_by_one(40 << 20))
slack = heap.Slack()
for returns in (True, False):
    slack.return_large(returns)
    print(one_by_one(80 << 20))  # more than is free in the heap
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    answers = ["True", "False", "True", "False", "True", "False", "True", "False"]
    assert done.stdout.split() == answers


def test_what_the_first_blocks_leave_for_good_is_not_taken_for_what_a_block_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first blocks compile their products, 30 MB each; later ones need 40 MB and leave holes of
    2 MB."""
    there = Heap(monkeypatch)
    slack = heap.Slack()
    for turn in range(100):
        there.block(40 * MB, stays=30 * MB if turn < 4 else 0, holes=2 * MB)
        slack.bound()
        if turn == 10:
            there.peak = 0
    assert there.kept == 420 * MB
    assert there.peak <= there.kept + 40 * MB + heap.MARGIN + 3 * 2 * MB, (
        there.peak - there.kept
    ) / MB
    assert there.trims < 40, "the heap is not given back after every block"


def test_a_step_of_other_lengths_begins_with_no_heap_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks need 40 MB; what one of a step leaves serves its others, and is all holes to the next
    step's."""
    peaks = {}
    for anew in (False, True):
        there = Heap(monkeypatch)
        slack = heap.Slack()
        for step in range(20):
            for block in range(10):
                slack.bound(anew=anew and block == 0)
                there.block(40 * MB, holes=there.free if block == 0 else 0)
            if step == 2:
                there.peak = 0
        peaks[anew] = there.peak - there.kept
        assert there.trims <= 20, "once a step"
    assert peaks == {False: 80 * MB, True: 40 * MB}
