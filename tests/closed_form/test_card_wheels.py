"""Oracle: pip, which installs what is left of a wheel, and the files that the wheel had."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from dev.card_wheels import for_one_cuda

from tests.support.messages import refused

NAME = "bitsandbytes-0.1-py3-none-any.whl"
INFO = "bitsandbytes-0.1.dist-info"
FILES = {
    "bitsandbytes/__init__.py": "version = 1\n",
    "bitsandbytes/libbitsandbytes_cpu.so": "c" * 1000,
    "bitsandbytes/libbitsandbytes_cuda124.so": "a" * 1000,
    "bitsandbytes/libbitsandbytes_cuda130.so": "b" * 1000,
    "bitsandbytes/libbitsandbytes_rocm72.so": "r" * 1000,
    "bitsandbytes/libother.so": "kept",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 0.1\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}
LEFT = {name for name in FILES if "libbitsandbytes_" not in name or "cuda130" in name}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "whole" / NAME
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as out:
        for name, text in FILES.items():
            out.writestr(name, text)
        out.writestr(f"{INFO}/RECORD", "".join(f"{name},,\n" for name in FILES))
    return path


def test_pip_installs_the_library_of_one_cuda_version(wheel: Path, tmp_path: Path) -> None:
    for_one_cuda(wheel, tmp_path / NAME, "130")
    target = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", str(target), str(tmp_path / NAME)], check=True)
    libraries = {path.name for path in (target / "bitsandbytes").glob("*.so")}
    assert libraries == {"libbitsandbytes_cuda130.so", "libother.so"}
    assert (target / "bitsandbytes" / "libbitsandbytes_cuda130.so").read_text() == "b" * 1000
    with zipfile.ZipFile(tmp_path / NAME) as cut:
        assert {*cut.namelist()} == LEFT | {f"{INFO}/RECORD"}
        rows = cut.read(f"{INFO}/RECORD").decode().splitlines()
    assert {row.partition(",")[0] for row in rows} == LEFT | {f"{INFO}/RECORD"}
    assert all(",sha256=" in row for row in rows[:-1])


def test_a_version_that_the_wheel_lacks_is_refused_with_those_that_it_has(
    wheel: Path, tmp_path: Path
) -> None:
    with refused(ValueError, "--cuda 999 libbitsandbytes_cuda124.so libbitsandbytes_cuda130.so"):
        for_one_cuda(wheel, tmp_path / NAME, "999")
    assert not (tmp_path / NAME).exists()
