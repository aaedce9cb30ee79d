"""The calls of Python that a piece of work makes on all of its threads, those of autograd among
them: functions of Python and of C, as cProfile counts them.

What stands in for a device is left out, since a real one does it itself: shapes that torch works
out in Python for the simulated one, and a processor's kernels behind our operators."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from blockwalk.numerics import operators

_SHAPES = (
    "torch/_prims",
    "torch/_refs",
    "torch/_meta_registrations",
    "torch/fx/",
    "torch/_decomp",
    "torch/_library",
    "torch/_dynamo",
    "torch/_compile",
    "torch/_subclasses",
    "torch/_ops.py",
    "torch/library.py",
    "torch/utils/_pytree",
)
"""Places of the code by which torch works out the shapes of an operator that a device lacks."""


class PythonCalls:
    """A counter, for threads that begin after it is made, and for this one."""

    def __init__(self) -> None:
        self.by_caller: Counter[str] = Counter()
        """Calls by the function that makes them, ``file:function``."""
        self._counts = False
        self._inside = threading.local()
        """The call on each thread that is left out, with all that it calls."""
        self._is_left_out: dict[CodeType, bool] = {}
        threading.setprofile(self._note)
        _on_thread_of_backward(lambda: sys.setprofile(self._note))

    def of(self, work: Callable[[], object]) -> int:
        """Return the number of calls that ``work`` makes."""
        self.by_caller.clear()
        sys.setprofile(self._note)
        self._counts = True
        try:
            work()
        finally:
            self._counts = False
            sys.setprofile(None)
        return sum(self.by_caller.values())

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._counts:
            return
        outermost = getattr(self._inside, "frame", None)
        if event == "return" and outermost is frame:
            self._inside.frame = None
        elif event == "call" and outermost is None:
            if self._leaves_out(frame.f_code):
                self._inside.frame = frame
            elif frame.f_back is not None:
                self._add(frame.f_back.f_code)
        elif event == "c_call" and outermost is None:
            self._add(frame.f_code)

    def _add(self, caller: CodeType) -> None:
        self.by_caller[f"{caller.co_filename}:{caller.co_name}"] += 1

    def _leaves_out(self, code: CodeType) -> bool:
        if code not in self._is_left_out:
            name = code.co_filename.replace("\\", "/")
            kernel = code.co_filename == operators.__file__ and code.co_name == "on_cpu"
            self._is_left_out[code] = kernel or any(place in name for place in _SHAPES)
        return self._is_left_out[code]


def _on_thread_of_backward(work: Callable[[], None]) -> None:
    """Do some work on the thread on which autograd runs the backward passes of the accelerator."""

    class Here(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            work()
            return grad

    device = torch.accelerator.current_accelerator()
    index = torch.accelerator.current_device_index()
    x = torch.ones(1, device=f"{device}:{index}", requires_grad=True)
    Here.apply(x).sum().backward()  # type: ignore[no-untyped-call]
