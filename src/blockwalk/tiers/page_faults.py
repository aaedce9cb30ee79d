"""Bus errors: one line that names the file whose page could not be brought, before they end the
process.

A file map of a file that was cut, of a sparse file on a full disk, or on a disk that fails has
pages that the kernel cannot bring. A read() would answer with an error; a map has the signal
SIGBUS, which ends a process without a line. No code of ours can go on: the bytes are not there."""

from __future__ import annotations

import ctypes
import functools
import os
import signal

from blockwalk.numerics import native

_ADVICE = (
    ". The file was cut or written anew while it was in use, or its disk is full or fails. Put the"
    " file back as it was, or free some room, and start again, a run from its last checkpoint"
    " (--resume_from_checkpoint latest)\n"
)
_steps_done = ctypes.c_int64(-1)
_texts: list[bytes] = []
"""The texts that the handler reads: they outlive every call."""


@functools.cache
def name_faults() -> None:
    """Have a bus error of this process write a line to standard error: file, byte and step. The
    signal then acts as before. Without the native kernels nothing is done."""
    kernel = native.load("faults") if hasattr(signal, "SIGBUS") else None
    if kernel is not None:
        # a bar may stand on a terminal's last line
        beginning = "\nblockwalk: error: " if os.isatty(2) else "blockwalk: error: "
        _texts.extend([beginning.encode(), _ADVICE.encode()])
        kernel.blockwalk_name_faults(*_texts, ctypes.addressof(_steps_done))


def note_steps(steps_done: int) -> None:
    """Note the steps that are done, for the line."""
    _steps_done.value = steps_done
