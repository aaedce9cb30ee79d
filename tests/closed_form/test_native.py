"""Oracle: the contract of load: a broken kernel never an error, no compiler no kernel."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from blockwalk import native


def test_a_broken_kernel_warns_once_and_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the contract of load."""
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.c").write_text("int answer(void) { return ; ")
    (tmp_path / "good.c").write_text("int answer(void) { return 42; }")
    if native._compiler() is None:
        pytest.skip("no C compiler")
    with pytest.warns(RuntimeWarning, match="'broken' could not be built"):
        assert native.load("broken") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load("broken") is None
        good = native.load("good")
    assert good is not None
    assert good.answer() == 42
    assert [file.suffix for file in (tmp_path / "cache" / "native").iterdir()] == [".so"], "no scratch is left"
    monkeypatch.setenv("BLOCKWALK_NATIVE", "0")
    assert native.load("good") is None


def test_no_compiler_is_no_kernel_and_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: an empty PATH."""
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load("noise") is None
