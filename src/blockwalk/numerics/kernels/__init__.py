"""Triton's kernels, for accelerators: each is an operator of :mod:`blockwalk.numerics.operators` beside the CPU's.

Where bits count, they are a CPU's: products and sums round separately (every launch turns the fusing of multiply and add off),
divisions to nearest even, codes and 16-bit numbers by integers. Triton's interpreter runs them on CPU tensors, and its compiler
writes an absent GPU's instructions: so both are tested without one.
"""

from __future__ import annotations

import sys
from types import ModuleType


def loaded() -> ModuleType:
    """This package with all its modules, which import triton.

    Raises:
        ImportError: triton is not installed.
    """
    from blockwalk.numerics.kernels import codecs, noise, products, updates  # noqa: F401

    return sys.modules[__name__]
