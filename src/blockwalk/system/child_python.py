"""The commands by which this program starts Python again.

``python -m`` puts the working folder before all others that modules are imported from: a file
``random.py`` there would run in place of Python's own. The folder may hold anything, such as the
recipe of somebody else. ``-P`` keeps it out, as it is kept out of the command ``blockwalk``."""

from __future__ import annotations

import sys

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""The variable that does what ``-P`` does, for every Python that a process starts in its turn."""


def python_command(*arguments: str) -> list[str]:
    """Return the command that runs this Python with ``arguments``, such as ``-m MODULE``."""
    return [sys.executable, "-P", *arguments]
