"""Notes of libraries on kernels that no walk calls."""

from __future__ import annotations

import logging
import os

_LOGS = ("bitsandbytes.backends.cpu.ops",)
"""Logs of libraries that look for kernels of their own as soon as PEFT imports them."""


def silence() -> None:
    """Keep the logs to errors, where nobody has set their level or debugs (``BLOCKWALK_DEBUG``)."""
    if os.environ.get("BLOCKWALK_DEBUG", "") not in ("", "0"):
        return
    for name in _LOGS:
        log = logging.getLogger(name)
        if log.level == logging.NOTSET:
            log.setLevel(logging.ERROR)
