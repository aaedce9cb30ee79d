"""Triton's kernels, for accelerators: each is an operator of :mod:`blockwalk.numerics.operators`
beside the CPU's.

Where bits count, they are a CPU's: products and sums round separately (every launch turns the
fusing of multiply and add off), divisions to nearest even, codes and 16-bit numbers by integers.
Triton's interpreter runs them on CPU tensors, and its compiler writes an absent GPU's instructions:
so both are tested without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType


def loaded() -> ModuleType:
    """Return this package with all its modules, which import triton.

    Raises:
        ImportError: triton is not installed.
    """
    try:
        from blockwalk.numerics.kernels import codecs, noise, products, updates  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(
            "our kernels for an accelerator need triton, which is not installed: pip install"
            " triton (on Windows"
            " triton-windows), or compute with --device cpu"
        ) from error
    return sys.modules[__name__]


def missing(error: Exception) -> str:
    """Return the sentence for a launch that failed because Triton could not compile its launcher, a
    file in C; empty where it failed for another reason. It is asked after the failure: launchers in
    Triton's cache need no compiler."""
    if (
        not isinstance(error, subprocess.CalledProcessError)
        and "compiler" not in str(error).lower()
    ):
        return ""
    names = filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))
    if not any(map(shutil.which, names)):
        return (
            "our kernels for an accelerator need a C compiler, and none is here: install gcc, or"
            " set CC to one"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return (
            f"our kernels for an accelerator need Python's headers, and {header} is not there:"
            " install the package python3-dev"
            " (python3-devel), or use a Python that brings them"
        )
    return ""
