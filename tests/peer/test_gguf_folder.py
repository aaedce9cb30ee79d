"""Oracle: the GGUF file's own metadata, and the files that transformers made of them first. What
stands for a file in the cache is of that file as it is now, bit for bit."""

from __future__ import annotations

import json
import os
import struct
import threading
from pathlib import Path

import pytest

from blockwalk.cli import main
from blockwalk.models.gguf import read_header
from blockwalk.models.gguf_folder import folder_of
from blockwalk.system import atomic_files, cache
from blockwalk.tiers.model_folder.identity import weights_digest
from tests.conftest import TinyRun

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def content(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF file's bytes."""
    file = tmp_path_factory.mktemp("gguf") / "m.gguf"
    assert main.main(["gguf", str(tiny_run.model), str(file), "--dtype", "f32"]) == 0
    return file.read_bytes()


@pytest.fixture
def file(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, and an empty cache."""
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(content)
    return tmp_path / "m.gguf"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.is_symlink()}


def rope_base(folder: Path) -> float:
    config = json.loads((folder / "config.json").read_text())
    return float(config["rope_parameters"]["rope_theta"])


@pytest.mark.parametrize("in_place", [True, False])
def test_another_file_of_its_size_and_time_is_another(in_place: bool, file: Path) -> None:
    """Oracle: the number that was written into the file."""
    before = file.stat()
    old = folder_of(file)
    assert rope_base(old) == read_header(file).metadata["llama.rope.freq_base"]
    content = bytearray(file.read_bytes())
    place = content.index(b"rope.freq_base") + len(b"rope.freq_base") + 4
    struct.pack_into("<f", content, place, 500000.0)
    if not in_place:
        file.unlink()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert read_header(file).metadata["llama.rope.freq_base"] == 500000.0
    assert rope_base(folder_of(file)) == 500000.0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "gguf.json", "missing"])
def test_a_folder_with_another_bit_is_made_again(name: str, file: Path) -> None:
    """Oracle: the files of the folder when it was made."""
    folder = folder_of(file)
    whole = files(folder)
    digest = weights_digest(file)
    damaged = folder / ("config.json" if name == "missing" else name)
    if name == "missing":
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes().replace(b"1", b"3", 1))
    assert folder_of(file) == folder
    assert files(folder) == whole
    assert weights_digest(file) == digest


def test_a_cache_that_cannot_be_written_is_done_without(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the files in a cache that can; the process makes its folder once."""
    kept = files(folder_of(file))
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "a file" / "cache"))
    folder = folder_of(file)
    assert files(folder) == kept
    assert folder_of(file) == folder
    assert "BLOCKWALK_CACHE" in caplog.text


def test_one_model_waits_for_its_own_maker_alone(file: Path, content: bytes) -> None:
    """Oracle: a lock that is held: another file's folder is made meanwhile, this one's after it."""
    other = file.with_name("n.gguf")
    other.write_bytes(content)
    folder = folder_of(file)
    (folder / "config.json").unlink()
    made = []
    maker = threading.Thread(target=lambda: made.append(folder_of(file)))
    with atomic_files.in_turn(folder.with_name(f"{folder.name}.lock")):
        maker.start()
        assert folder_of(other).parent == folder.parent == cache.folder() / "gguf"
        assert made == []
    maker.join()
    assert made == [folder]
    assert (folder / "config.json").is_file()
