"""Children that are killed, and harm that is done before a call."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch


def child(work: Callable[[], int]) -> int:
    """The exit code of a process that does this; 128 more than the signal that ended it."""
    if (process := os.fork()) == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            code = work()
        finally:
            os._exit(code)
    status = os.waitpid(process, 0)[1]
    return os.waitstatus_to_exitcode(status)


def before(
    place: Any, name: str, harm: Callable[[], object], when: Callable[..., bool] = lambda *_: True
) -> None:
    """Do harm before a function is called with arguments that ``when`` holds for."""
    call = getattr(place, name)

    def harmed(*arguments: Any, **options: Any) -> Any:
        if when(*arguments):
            harm()
        return call(*arguments, **options)

    setattr(place, name, harmed)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
