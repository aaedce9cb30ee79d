"""Oracle: the operating system's own counters, and allocations of a known size."""

import json
import mmap
from pathlib import Path

import psutil
import pytest

from blockwalk.system.atomic_files import Damaged
from blockwalk.system.process_memory import PeakMemory, peak_resident_bytes, process_bytes
from blockwalk.train.metrics_log import MetricsLog
from tests.support.messages import refused

MIB = 1 << 20


def test_an_anonymous_allocation_is_counted() -> None:
    before = process_bytes()
    held = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for _ in range(64):
        held.write(b"\1" * MIB)  # a whole source string might stay in the heap when it is freed
    after = process_bytes()
    held.close()
    assert 64 * MIB <= after - before < 72 * MIB


def test_file_backed_pages_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"\1" * 64 * MIB)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = process_bytes()
        assert sum(mapped[:: mmap.PAGESIZE]) == 64 * MIB // mmap.PAGESIZE  # touch every page
        assert process_bytes() - before < 8 * MIB
        resident = psutil.Process().memory_info().rss
        assert peak_resident_bytes() >= resident > process_bytes() + 60 * MIB, (
            "what top shows has them"
        )


def test_the_sampler_sees_a_peak_that_is_gone(tmp_path: Path) -> None:
    with PeakMemory(interval=0.001) as memory:
        base = memory.take()
        held = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for start in range(0, 64 * MIB, MIB):
            held[start : start + MIB] = b"\1" * MIB
        for _ in range(
            100_000
        ):  # let the thread run while the map is held: no deadline, it needs a single turn
            if memory.highest - base >= 60 * MIB:
                break
            process_bytes()
        held.close()
        assert memory.take() - base >= 60 * MIB
        assert memory.take() - base < 32 * MIB, "take starts a new peak"
    assert memory.highest - base >= 60 * MIB


@pytest.mark.parametrize("line", ['{"loss": 4}', "[4]", '{"step": 2, "digest": "00"}', "{"])
def test_a_line_that_no_run_wrote_is_damage(tmp_path: Path, line: str) -> None:
    """Oracle: the file's name and the line's number, wherever a newline ends the line."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with refused(Damaged, "metrics.jsonl damaged 1|2"):
        MetricsLog(path, source=path, keep_until=9)


def lines(path: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("keep_until", "kept"), [(-1, []), (2, [1, 2]), (9, [1, 2, 3])])
@pytest.mark.parametrize("torn", ['{"step": 4, "lo', "\0\0\n", '\0\0\n{"step": 5}\n'])
def test_a_resumed_log_ends_at_the_checkpoint(
    tmp_path: Path, torn: str, keep_until: int, kept: list[int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n' + torn)
    log = MetricsLog(path, source=path, keep_until=keep_until)
    assert [line["step"] for line in lines(path)] == kept
    log.write({"step": 7})
    assert lines(path)[-1].items() >= {"step": 7}.items(), (
        "a line can be read as soon as it is written"
    )
    log.close()
