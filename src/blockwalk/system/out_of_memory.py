"""Refused memory: how it is recognised, and the error that a run ends with."""

from __future__ import annotations


class OutOfMemory(RuntimeError):
    """A run was refused memory while it ran; the message has the forecast, what was measured, and
    the next plan that fits."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an allocator's, of the interpreter, a processor or an
    accelerator."""
    refused = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and refused)
