"""Oracle: a mark that files of the working folder leave when they run. They are named like a module
of Python's own, and like this package; whatever starts a process runs neither."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from blockwalk.doctor import walks
from blockwalk.numerics import native
from blockwalk.ranks import launch, place
from blockwalk.walk import timed_units

ROOT = Path(__file__).parents[2]
STARTS = ("exec", "fork", "popen", "posix_spawn", "spawn", "startfile", "system")
"""Beginnings of the functions of ``os`` that start a process."""
OTHERS = ("multiprocessing", "ProcessPool", "create_subprocess", "pty.spawn", "getoutput")
MARK = 'import os\nopen(os.path.join({folder!r}, "mark"), "a").write(__file__ + "\\n")\n'


def dotted(node: ast.AST) -> str:
    """Return the name of what is called, such as ``subprocess.run``."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def starts_a_process(name: str) -> bool:
    module, _, function = name.partition(".")
    if module == "os":
        return function.startswith(STARTS)
    return module == "subprocess" or any(word in name for word in OTHERS)


def places() -> set[str]:
    """Return the functions of the package and of the examples that start a process."""
    places = set()
    for folder in ("src/blockwalk", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for function in ast.walk(tree):
                if isinstance(function, ast.ImportFrom) and function.module == "subprocess":
                    places.add(f"{file.relative_to(ROOT)} imports from subprocess")
                if not isinstance(function, ast.FunctionDef):
                    continue
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
                if any(starts_a_process(dotted(call.func)) for call in calls):
                    places.add(f"{file.relative_to(ROOT)} {function.name}")
    return places


def ranks(folder: Path) -> None:
    assert launch.start(["--version"], 2, 1) == 0


def timed_walk(folder: Path) -> None:
    load: Any = SimpleNamespace(belongs=lambda process: None)
    with pytest.raises(ValueError, match="Unpickling"):
        timed_units._walked(b"no request", load)


def doctor(folder: Path) -> None:
    assert walks._run(("forwards",), str(folder / "missing")) == {}


def scontrol(folder: Path) -> None:
    program = folder / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho node-1\n")
    program.chmod(0o755)
    os.environ["PATH"] = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    assert place._first_node("node-[1-2]") == "node-1"


def kernels(folder: Path) -> None:
    if native._compiler() is None:
        pytest.skip("no C compiler")
    native._loaded.clear()
    native._version.cache_clear()
    assert native.load("chains") is not None


def ray_worker(folder: Path) -> None:
    names = ("ray", "ray.train", "ray.train.torch")
    stand_ins = {name: ModuleType(name) for name in names}
    for name in ("FailureConfig", "RunConfig", "ScalingConfig", "TorchTrainer"):
        setattr(stand_ins["ray.train"], name, None)
        setattr(stand_ins["ray.train.torch"], name, None)
    sys.modules.update(stand_ins)
    os.environ["MASTER_PORT"] = "29500"
    try:
        work = runpy.run_path(str(ROOT / "examples/cluster/ray_train.py"))["work"]
        with suppress(subprocess.CalledProcessError):
            work({"arguments": ["--no-such-setting"], "folder": str(folder)})
    finally:
        for name in names:
            del sys.modules[name]


DRIVERS: dict[str, Callable[[Path], None]] = {
    "src/blockwalk/ranks/launch.py start": ranks,
    "src/blockwalk/ranks/place.py _first_node": scontrol,
    "src/blockwalk/walk/timed_units.py _walked": timed_walk,
    "src/blockwalk/doctor/walks.py _run": doctor,
    "src/blockwalk/numerics/native/__init__.py _compile": kernels,
    "src/blockwalk/numerics/native/__init__.py _version": kernels,
    "examples/cluster/ray_train.py work": ray_worker,
}
"""What makes each place start its process."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with files in the places of modules."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in ("random.py", "blockwalk.py"):
        (folder / name).write_text(MARK.format(folder=str(tmp_path)))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    for name in ("PATH", "MASTER_PORT"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return folder


def test_every_place_that_starts_a_process_is_driven() -> None:
    """Oracle: the calls in the source."""
    assert places() == DRIVERS.keys()


@pytest.mark.parametrize("driver", dict.fromkeys(DRIVERS.values()))
def test_no_process_runs_a_file_of_the_working_folder(
    driver: Callable[[Path], None], folder: Path
) -> None:
    driver(folder)
    assert not (folder.parent / "mark").exists()


def test_the_printed_command_runs_none_either(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the mark, once the printed line has run, of one node in the place of two."""
    assert launch.start(["--version"], 1, 2) == 0
    line = capsys.readouterr().out.splitlines()[1]
    torchrun = f"{sys.executable} -P -m torch.distributed.run"
    here = line.replace("torchrun", torchrun).replace("--nnodes 2", "--nnodes 1")
    here = here.replace("HOST", "127.0.0.1")
    printed = subprocess.run(here, shell=True, capture_output=True, text=True, check=False)
    assert printed.returncode == 0, printed.stderr
    assert not (folder.parent / "mark").exists()
    without = here.replace("PYTHONSAFEPATH=1 ", "")
    subprocess.run(without, shell=True, capture_output=True, check=False)
    assert (folder.parent / "mark").exists(), "without it, the file runs"
