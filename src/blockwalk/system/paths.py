"""The type of a path that a caller gives."""

from __future__ import annotations

import os

StrPath = str | os.PathLike[str]
"""The name of a file or folder, as a string or as any object that stands for one."""
