"""Oracle: an interpreter without the modules, signals and calls that Windows lacks, in which every
module is imported.

What such a system does then was not tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import importlib, os, pkgutil, select, signal, sys
import torch, transformers, peft, numpy, psutil, huggingface_hub, tokenizers
import torch.distributed, torch.distributed.elastic

for name in ("fcntl", "resource", "termios", "pwd", "grp", "syslog"):
    sys.modules[name] = None
for name in ("SIGHUP", "SIGUSR1", "SIGALRM", "SIGKILL"):
    delattr(signal, name)
for name in ("fork", "geteuid", "sched_getaffinity", "preadv", "pwritev", "posix_fadvise",
             "fdatasync", "O_DIRECT", "sysconf"):
    delattr(os, name)
del select.poll
import blockwalk
import_errors = {}
modules = ["blockwalk", *(m.name for m in pkgutil.walk_packages(blockwalk.__path__, "blockwalk."))]
for name in modules:
    if name.endswith("__main__") or ".kernels." in name:
        continue
    try:
        importlib.import_module(name)
    except Exception as error:
        import_errors[name] = repr(error)
assert len(modules) > 200, modules
assert not import_errors, import_errors
from blockwalk.system import locks, open_files, process_limits, process_memory
assert process_limits.limit("RLIMIT_AS") == (process_limits.UNLIMITED, process_limits.UNLIMITED)
assert process_memory.memory_limits()
open_files.raise_limit()
with open(__file__) as file:
    assert locks.lock(file.fileno(), __file__), "a system without locks goes on"
print("imported", len(modules))
"""


def test_every_module_is_imported_without_what_windows_lacks(tmp_path: Path) -> None:
    """Modules of Triton kernels are left out: Triton is for Linux."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("imported")


@pytest.mark.fast
def test_limits_are_those_of_the_kernel() -> None:
    """Oracle: ``ulimit`` of a shell that this process starts."""
    from blockwalk.system.process_limits import UNLIMITED, limit

    for kind, flag in (("RLIMIT_NOFILE", "n"), ("RLIMIT_AS", "v")):
        shown = [
            subprocess.run(
                ["sh", "-c", f"ulimit -{way}{flag}"], capture_output=True, text=True
            ).stdout.strip()
            for way in ("S", "H")
        ]
        expected = [
            UNLIMITED if text == "unlimited" else int(text) * (1024 if flag == "v" else 1)
            for text in shown
        ]
        assert list(limit(kind)) == expected  # type: ignore[arg-type]
