"""The place of temporary files where the system has none that can be written to.

It is settled before torch is imported: that imports dill where it is installed, which asks for the
place as it is imported."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from blockwalk.system.atomic_files import nearest
from blockwalk.system.paths import StrPath


def require_temporary(folder: StrPath | None = None) -> None:
    """Let temporary files lie in ``folder``, or the nearest folder around it that is there, where
    neither TMPDIR nor the usual places (``/tmp``, ``/var/tmp``, the working folder) can be written
    to; those of processes that are started here, too.

    Raises:
        ValueError: it cannot be written either, or none is named.
    """
    try:
        tempfile.gettempdir()
        return
    except FileNotFoundError:
        pass
    place = None if folder is None else nearest(Path(folder).expanduser())
    if place is None or not os.access(place, os.W_OK | os.X_OK):
        beside = "" if place is None else f", nor can {place}"
        raise ValueError(
            "no folder for temporary files can be written: not TMPDIR, /tmp, /var/tmp or the"
            f" working folder{beside}; set TMPDIR to one that can"
        )
    tempfile.tempdir = os.environ["TMPDIR"] = str(place)
