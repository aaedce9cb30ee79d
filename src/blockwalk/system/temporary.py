"""The place of temporary files where the system has none that can be written to."""

from __future__ import annotations

import tempfile
from pathlib import Path

from blockwalk.system.atomic_files import nearest
from blockwalk.system.paths import StrPath


def require_temporary(folder: StrPath) -> None:
    """Let temporary files lie in ``folder``, or the nearest folder around it that is there, where
    neither TMPDIR nor the usual places (``/tmp``, ``/var/tmp``, the working folder) can be written
    to."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tempfile.tempdir = str(nearest(Path(folder)))
