"""Oracle: the kernel's own counters (/proc/self/pagemap, status and io, page faults) and the bytes
of the file."""

from __future__ import annotations

import errno
import gc
import os
import resource
import sys
from pathlib import Path

import pytest
import torch

from blockwalk.engine.bucket_tensors import Initial
from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec
from blockwalk.plan.placement import Codec
from blockwalk.tiers import disk
from blockwalk.tiers.block_store.store import BlockStore
from blockwalk.tiers.block_store.writable import DIRECT_BYTES
from blockwalk.tiers.disk import PAGE, MappedFile
from tests.support.messages import refused
from tests.support.writable import writable_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")

PAGES = 64


def mapped_pages(file: MappedFile) -> set[int]:
    """The pages of the map that are mapped into this process now: bit 63 of each entry in
    /proc/self/pagemap."""
    first = file.bytes_P.data_ptr() // PAGE
    count = -(-file.nbytes // PAGE)
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * first)
        entries = pagemap.read(8 * count)
    return {page for page in range(count) if entries[8 * page + 7] & 0x80}


def counter(file: str, key: str) -> int:
    for line in Path(f"/proc/self/{file}").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise AssertionError(key)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(i % 251 for i in range(PAGES * PAGE - 100)))
    return path


@pytest.mark.parametrize("populate", [disk._POPULATE_READ, 9999], ids=["populate", "touch"])
def test_pages_come_and_go_as_asked(
    path: Path, populate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: /proc/self/pagemap and page faults. 9999 is an advice that no kernel knows."""
    monkeypatch.setattr(disk, "_POPULATE_READ", populate)
    with MappedFile(path) as file:
        assert mapped_pages(file) == set()
        ranges = [(20 * PAGE + 5, 3 * PAGE), (40 * PAGE, PAGE), (PAGES * PAGE - 200, 100)]
        assert file.will_need(ranges) == 4 * PAGE + 100
        assert mapped_pages(file) >= {
            20,
            21,
            22,
            23,
            40,
            PAGES - 1,
        }  # the kernel maps cached neighbours too

        bytes_P = file.bytes_P
        torch.ones(3 * PAGE, dtype=torch.uint8).sum(
            dtype=torch.int64
        ).item()  # the code itself may have been paged out
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        assert bytes_P[20 * PAGE + 5 : 23 * PAGE + 5].sum(dtype=torch.int64).item() == sum(
            i % 251 for i in range(20 * PAGE + 5, 23 * PAGE + 5)
        )
        assert resource.getrusage(resource.RUSAGE_SELF).ru_majflt == faults

        file.dont_need(ranges)
        assert not mapped_pages(file) & {20, 21, 22, 23, 40, PAGES - 1}
        file.dont_need([(0, file.nbytes)])
        assert mapped_pages(file) == set()
        assert bytes_P[20 * PAGE].item() == 20 * PAGE % 251, "given back, not gone"
        del bytes_P


def test_giving_back_neighbours_takes_the_shared_page_along(path: Path) -> None:
    """Oracle: /proc/self/pagemap. Ranges that meet inside a page leave nothing behind."""
    with MappedFile(path) as file:
        file.will_need([(0, 10 * PAGE)])
        file.dont_need([(0, 4 * PAGE + 7), (4 * PAGE + 7, 6 * PAGE - 7)])
        assert not mapped_pages(file) & set(range(10))


def test_dropping_the_cache_goes_to_the_disk_again(path: Path) -> None:
    """Oracle: read_bytes in /proc/self/io, which counts what the disk delivered."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())

    def read_bytes_of(drop: bool) -> int:
        with MappedFile(path) as file:
            file.will_need([(0, file.nbytes)])
            file.dont_need([(0, file.nbytes)], drop_cache=drop)
            before = counter("io", "read_bytes")
            file.will_need([(0, file.nbytes)])
            return counter("io", "read_bytes") - before

    assert read_bytes_of(drop=False) == 0
    dropped = read_bytes_of(drop=True)
    if dropped == 0:
        pytest.skip("this file system has no disk below it (tmpfs, overlay)")
    assert dropped >= path.stat().st_size // PAGE * PAGE


def test_views_cost_no_anonymous_memory(tmp_path: Path) -> None:
    """Oracle: RssAnon in /proc/self/status, and the pages mapped."""
    path = tmp_path / "file"
    nbytes = 64 << 20
    with open(path, "wb") as file:
        file.truncate(nbytes)
    with MappedFile(path) as file:
        file.view(0, 8, torch.float32, (2,)).sum()
        anonymous = counter("status", "RssAnon")
        view_ND = file.view(0, nbytes, torch.float32, (1024, nbytes // 4096))
        assert view_ND.sum().item() == 0
        assert counter("status", "RssAnon") - anonymous < 1024  # kB
        assert len(mapped_pages(file)) == nbytes // PAGE
        file.dont_need([(0, nbytes)])
        assert mapped_pages(file) == set()


def test_written_pages_are_the_files(tmp_path: Path) -> None:
    """Oracle: the file's bytes, read by another descriptor, and its blocks on the disk."""
    path = tmp_path / "scratch"
    file = MappedFile(path, length=3 * PAGE)
    assert path.stat().st_blocks * 512 >= 3 * PAGE, "the room is reserved, not promised"
    view_ND = file.view(PAGE, 4 * 12, torch.float32, (3, 4))
    view_ND.copy_(torch.arange(12.0).view(3, 4))
    file.dont_need([(0, 3 * PAGE)])
    with open(path, "rb") as written:
        os.fsync(written.fileno())
    assert path.read_bytes()[PAGE : PAGE + 48] == torch.arange(12.0).numpy().tobytes()
    assert view_ND[2, 3].item() == 11.0
    file.close()


def test_a_view_keeps_the_map_and_the_map_goes_with_it(path: Path) -> None:
    """Oracle: /proc/self/maps and /proc/self/fd."""
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    file = MappedFile(path)
    view_P = file.view(PAGE, 16, torch.uint8, (16,))
    file.close()
    file.close()
    assert view_P.tolist() == [i % 251 for i in range(PAGE, PAGE + 16)]
    assert str(path) in Path("/proc/self/maps").read_text()
    del view_P
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_odd_offsets_and_empty_shapes(path: Path) -> None:
    """Oracle: int.from_bytes over the file's bytes."""
    data = path.read_bytes()
    with MappedFile(path) as file:
        assert file.view(3, 8, torch.int32, (2,)).tolist() == [
            int.from_bytes(data[i : i + 4], "little", signed=True) for i in (3, 7)
        ]
        assert file.view(5, 0, torch.float32, (0, 4)).shape == (0, 4)
        assert file.view(4, 4, torch.int32, ()).item() == int.from_bytes(
            data[4:8], "little", signed=True
        )


def test_what_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    """Oracle: what the test made of the file. The descriptor is not leaked."""
    (tmp_path / "empty").touch()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with refused(ValueError, "empty"):
        MappedFile(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        MappedFile(tmp_path / "absent")
    assert len(os.listdir("/proc/self/fd")) == before


def test_large_units_move_past_the_page_cache(tmp_path: Path) -> None:
    """Oracle: the bytes that the kernel fetched from the disk, though they had just been written; a
    closed form of the contents, read through the page cache as well."""
    numel = DIRECT_BYTES // 4 + 1000  # no whole number of pages
    params = (ParamSpec("w", (numel,), "float32"),)
    spec = ModelSpec("toy", UnitSpec("prologue", "prologue", ()),
                     (UnitSpec("block 0", "block", params),), UnitSpec("epilogue", "epilogue", ()),
                     1, 1)  # fmt: skip
    source = Initial(spec, None, {"w": torch.arange(numel, dtype=torch.float32)}, {})
    with writable_store(tmp_path / "store", source, spec, Codec.RAW) as store:
        if store._direct[1] < 0:
            pytest.skip("this file system has no O_DIRECT")
        nbytes = store.units[1].nbytes
        whole_P = torch.empty(nbytes + PAGE, dtype=torch.uint8)
        aligned_P = whole_P[-whole_P.data_ptr() % PAGE :][:nbytes]
        odd_P = whole_P[-whole_P.data_ptr() % PAGE + 64 :][:nbytes]
        for step in (1, 2, 3):
            aligned_P.view(torch.float32)[:numel] = torch.arange(numel, dtype=torch.float32) * step
            expected_P = aligned_P.clone()
            store.write_unit(1, aligned_P, step)
            before = counter("io", "read_bytes")
            assert store.read_unit(1, aligned_P.zero_()) == step
            assert counter("io", "read_bytes") - before >= nbytes // PAGE * PAGE
            assert torch.equal(aligned_P, expected_P)
            store.read_unit(1, odd_P)  # through the page cache
            assert torch.equal(odd_P, expected_P)
            store.write_unit(1, odd_P, step)
            store.read_unit(1, aligned_P.zero_())
            assert torch.equal(aligned_P, expected_P)
    reader = BlockStore(tmp_path / "store")
    assert reader.steps[1] == 3
    assert torch.equal(reader.weights(["w"])["w"], torch.arange(numel, dtype=torch.float32) * 3)


def test_a_file_system_that_cannot_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a closed form of the contents. The descriptor opens, and every transfer by it is
    refused."""
    numel = DIRECT_BYTES // 4
    params = (ParamSpec("w", (numel,), "float32"),)
    spec = ModelSpec("toy", UnitSpec("prologue", "prologue", ()),
                     (UnitSpec("block 0", "block", params),), UnitSpec("epilogue", "epilogue", ()),
                     1, 1)  # fmt: skip
    source = Initial(spec, None, {"w": torch.zeros(numel)}, {})
    with writable_store(tmp_path / "store", source, spec, Codec.RAW) as store:
        refused = os.open(os.devnull, os.O_RDONLY)
        store._direct[1] = os.dup(refused)

        def transfer(call: str) -> None:
            through = getattr(os, call)

            def instead(fd: int, *rest: object) -> int:
                if fd == store._direct[1]:
                    raise OSError(errno.EINVAL, "Invalid argument")
                moved: int = through(fd, *rest)
                return moved

            monkeypatch.setattr(os, call, instead)

        transfer("preadv"), transfer("pwritev")
        whole_P = torch.empty(store.units[1].nbytes + PAGE, dtype=torch.uint8)
        aligned_P = whole_P[-whole_P.data_ptr() % PAGE :][: store.units[1].nbytes]
        aligned_P.view(torch.float32).copy_(torch.arange(numel))
        store.write_unit(1, aligned_P, 1)
        assert store._direct[1] == -1
        assert store.read_unit(1, aligned_P.zero_()) == 1
        assert torch.equal(aligned_P.view(torch.float32), torch.arange(numel, dtype=torch.float32))
        os.close(refused)
