"""Oracle: the kernel's list of a process's threads. What the tokenizer's threads keep, they keep
for the whole run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="threads are listed in Linux's /proc"
)

COUNT = """
import os, sys
from blockwalk.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
before = len(os.listdir("/proc/self/task"))
tokenizer(["A hundred words, or some of them. " * 20] * 600)
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_tokenising_leaves_no_thread_behind() -> None:
    folder = Path(__file__).parents[2] / "examples" / "tiny-llama"
    done = subprocess.run(
        [sys.executable, "-c", COUNT, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert int(done.stdout) == 0
