"""Collect the wheels that a machine with a card often lacks, for one without a network: isal, which
Blockwalk needs, and the peers bitsandbytes, with the library of one CUDA version alone, and Liger.

    python -m dev.card_wheels FOLDER [--python 3.12] [--cuda 130]

There: ``pip install --no-index --no-deps FOLDER/*.whl``. They take at most 20 MB together."""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

LIMIT = 20_000_000
"""Bytes of all wheels."""
PACKAGES = ("isal", "bitsandbytes", "liger-kernel")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")
LIBRARY = re.compile(r"bitsandbytes/libbitsandbytes_[a-z]+\d*[^/]*\.(so|dll|dylib)$")


def download(package: str, python: str, folder: Path) -> Path:
    """Have pip download one package's wheel for Linux on x86-64."""
    number = python.replace(".", "")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", number]
    for abi in (f"cp{number}", "abi3", "none"):
        command += ["--abi", abi]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "--dest", str(folder), package], check=True)
    (wheel,) = folder.glob(f"{package.replace('-', '_')}-*.whl")
    return wheel


def without(wheel: Path, target: Path, dropped: Callable[[str], bool]) -> None:
    """Write a wheel without some of its files; its RECORD names those that are left.

    Raises:
        ValueError: nothing would be left, or nothing goes.
    """
    record = ""
    rows = []
    removed = 0
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out,
    ):
        for item in source.infolist():
            if item.filename.endswith(".dist-info/RECORD"):
                record = item.filename
            elif dropped(item.filename):
                removed += 1
            else:
                content = source.read(item)
                out.writestr(item, content, zipfile.ZIP_DEFLATED, 9)
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
                rows.append((item.filename, f"sha256={digest.decode().rstrip('=')}", len(content)))
        if not (rows and removed and record):
            raise ValueError(
                f"{wheel.name}: {removed} files to leave out, {len(rows)} to keep; another --cuda?"
            )
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
        out.writestr(record, text.getvalue())


def for_one_cuda(wheel: Path, target: Path, cuda: str) -> None:
    """Write bitsandbytes' wheel with the library of one CUDA version.

    Raises:
        ValueError: it has none of that version.
    """
    kept = f"bitsandbytes/libbitsandbytes_cuda{cuda}.so"
    with zipfile.ZipFile(wheel) as source:
        libraries = sorted(name for name in source.namelist() if LIBRARY.match(name))
    if kept not in libraries:
        found = ", ".join(name.removeprefix("bitsandbytes/") for name in libraries)
        raise ValueError(f"--cuda {cuda}: {wheel.name} has {found}")
    without(wheel, target, lambda name: name in libraries and name != kept)


def collect(folder: Path, python: str, cuda: str) -> int:
    """Put the wheels into a folder, and return their bytes.

    Raises:
        ValueError: they take more than :data:`LIMIT`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    with tempfile.TemporaryDirectory() as temporary:
        for package in PACKAGES:
            wheel = download(package, python, Path(temporary))
            target = folder / wheel.name
            if package == "bitsandbytes":
                for_one_cuda(wheel, target, cuda)
            else:
                target.write_bytes(wheel.read_bytes())
            total += target.stat().st_size
            print(f"{target.name}: {target.stat().st_size / 1e6:.1f} MB", flush=True)
    if total > LIMIT:
        raise ValueError(
            f"the wheels take {total / 1e6:.1f} MB, above {LIMIT / 1e6:.0f}: try another --cuda"
        )
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the version there")
    parser.add_argument("--cuda", default="130", help="of the torch there, without its point")
    options = parser.parse_args()
    print(f"{collect(options.folder, options.python, options.cuda) / 1e6:.1f} MB together")


if __name__ == "__main__":
    main()
