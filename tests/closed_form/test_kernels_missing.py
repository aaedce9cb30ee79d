"""Oracle: a Python without triton, a search path without a compiler, a folder without headers: each
is named in a sentence."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from blockwalk.numerics import kernels
from tests.support.messages import refused

FAILED = subprocess.CalledProcessError(1, ["gcc", "main.c"])
NONE = RuntimeError("Failed to find C compiler. Please specify via CC environment variable")


def test_a_python_without_triton_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("blockwalk.numerics.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("codecs", "noise", "products", "updates"):
        monkeypatch.delattr(kernels, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with refused(ImportError, "triton --device cpu"):
        kernels.loaded()


def test_a_launcher_that_is_not_compiled_says_what_the_system_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert "install gcc" in kernels.missing(NONE)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert (
        f"{tmp_path / 'Python.h'} is not there: install the package python3-dev"
        in kernels.missing(FAILED)
    )
    (tmp_path / "Python.h").touch()
    assert not kernels.missing(FAILED), "neither is missing: its words are the compiler's"
    monkeypatch.setenv("PATH", "")
    assert not kernels.missing(RuntimeError("out of memory"))
