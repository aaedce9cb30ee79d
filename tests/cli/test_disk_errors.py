"""Oracle: the call that fails. A disk's error names the file of that call, and the step."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import blockwalk
from blockwalk.system import atomic_files
from blockwalk.tiers.disk import MappedFile
from tests.conftest import TinyRun
from tests.support.callback_settings import settings
from tests.support.messages import refused

KINDS = {"fsync": "plain", "fdatasync": "mezo", "write": "mezo"}
"""Calls that fail, with a method that makes them."""


def failing(call: Callable[..., Any], number: int, folder: Path, calls: list[str]) -> Any:
    """A call that answers EIO when it is made the ``number``-th time for a file below a folder."""

    def fails(descriptor: int, *arguments: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.startswith(str(folder)):
            calls.append(path)
            if len(calls) == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(descriptor, *arguments)

    return fails


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="paths of descriptors are Linux's")
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_disk_names_file_and_step(
    kind: str, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the path of the descriptor, for some calls of a run and the last."""
    call = getattr(os, kind)
    more = {"method": KINDS[kind], "max_steps": 2, "save_every": 1}
    calls: list[str] = []
    monkeypatch.setattr(os, kind, failing(call, 0, tmp_path / "whole", calls))
    blockwalk.train(settings(tiny_run, tmp_path / "whole", **more))
    count = len(calls)
    assert count > 1
    for number in sorted({max(1, count // 2), count}):
        out = tmp_path / f"run-{number}"
        calls.clear()
        monkeypatch.setattr(os, kind, failing(call, number, out, calls))
        with pytest.raises(OSError, match="Input/output error") as raised:
            blockwalk.train(settings(tiny_run, out, **more))
        named = Path(str(raised.value.filename))
        path = Path(calls[number - 1])
        # a file that is written beside its place is named by that place
        assert named in (path, *path.parents) or named.name in path.name, (named, path)
        assert named.is_relative_to(out) or named == tmp_path
        assert "at step" in str(raised.value), (path, raised.value)


def test_a_library_in_rust_is_understood(tmp_path: Path) -> None:
    """Oracle: the text of Rust's own error."""
    with refused(OSError, f"{tmp_path} 5"), atomic_files.naming(tmp_path):
        raise RuntimeError("I/O error: Input/output error (os error 5)")


def test_a_map_of_a_file_that_was_cut_names_it(tmp_path: Path) -> None:
    """Oracle: the kernel, which has no pages behind a file's end."""
    path = tmp_path / "weights"
    path.write_bytes(b"\1" * (1 << 20))
    with MappedFile(path) as file:
        os.truncate(path, 4096)
        with refused(OSError, f"{path} shorter"):
            file.will_need([(0, 1 << 20)])
