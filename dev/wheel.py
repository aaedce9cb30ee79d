"""Build the wheel and the source distribution, install each into a fresh environment, and use it
there.

python dev/wheel.py      # a minute; needs the package `build` and, for its backend, a package index

The dependencies are those of the environment that runs this: what is tried is what the
distributions hold and how they start."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, folder: Path = ROOT) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=folder, text=True, capture_output=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    path = os.environ["PATH"]
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        run(sys.executable, "-m", "build", "--outdir", here / "dist")
        machine = (
            platform.machine()
        )  # its wheel brings compiled kernels, and is tried without a compiler
        os.environ["BLOCKWALK_WHEEL"] = machine
        run(sys.executable, "-m", "build", "--wheel", "--outdir", here / "dist")
        for distribution in sorted((here / "dist").iterdir()):
            place = here / distribution.name
            os.environ["PATH"] = (
                str(place / "env" / "bin") if machine in distribution.name else path
            )
            os.environ["BLOCKWALK_CACHE"] = str(place / "cache")
            run(sys.executable, "-m", "venv", place / "env")
            python = next((place / "env").glob("bin/python"))
            packages = Path(
                run(
                    python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"
                ).strip()
            )
            (packages / "others.pth").write_text(
                sysconfig.get_paths()["purelib"]
            )  # torch and the others; not blockwalk
            run(
                python,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--force-reinstall",
                distribution,
            )
            blockwalk = place / "env" / "bin" / "blockwalk"
            version = run(blockwalk, "--version", folder=place).strip()
            run(blockwalk, "init", "--examples", folder=place)
            run(blockwalk, "plan", "examples/mezo.yaml", "--hardware", "laptop", folder=place)
            said = run(
                blockwalk,
                "train",
                "examples/quickstart.yaml",
                "--data.eval",
                "",
                "--max_steps",
                "12",
                folder=place,
            )
            assert "saved to           runs/quickstart/adapter" in said, said
            code = (
                "from blockwalk.numerics import native; print([native.load(n) is not None for n"
                " in ('noise', 'codecs')])"
            )
            assert run(python, "-c", code, folder=place).strip() == "[True, True]", (
                distribution.name
            )
            where = run(
                python, "-c", "import blockwalk; print(blockwalk.__file__)", folder=place
            ).strip()
            assert where.startswith(str(packages)), where
            print(
                f"{distribution.name}: {distribution.stat().st_size / 1e6:.1f} MB, {version},"
                " trains from a clean environment"
            )


if __name__ == "__main__":
    main()
