"""An object whose unpickling leaves a file: nothing that is read may make one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Bomb:
    """Whoever unpickles this makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)
