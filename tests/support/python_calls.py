"""Calls of Python, and from Python, that a piece of work makes, as a profiler counts them.

A simulated device asks torch's Python for the shapes of its operators, which a real one has in C++:
calls beneath these are left out."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__)
_SHAPES = tuple(
    os.path.join(_TORCH, part)
    for part in (
        "_compile.py",
        "_decomp",
        "_library",
        "_meta_registrations",
        "_prims",
        "_refs",
        "_subclasses",
        "library.py",
    )
)
"""Files and folders of torch, by the beginning of their paths, in which shapes are computed."""


class _Profile:
    """Counts of calls by the file and name of whoever made them."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self._depth = 0
        """Frames beneath the first one that computes shapes."""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call":
            if self._depth or code.co_filename.startswith(_SHAPES):
                self._depth += 1
            else:
                self.calls[code.co_filename, code.co_name] += 1
        elif event == "return":
            self._depth -= bool(self._depth)
        elif event == "c_call" and not self._depth:
            self.calls[code.co_filename, code.co_name] += 1


def python_calls(work: Callable[[], object]) -> Counter[tuple[str, str]]:
    """Return the calls that ``work`` makes in this thread: of functions of Python by the function,
    of functions in C by their caller."""
    profile = _Profile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return profile.calls
