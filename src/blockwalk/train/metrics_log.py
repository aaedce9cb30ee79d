"""A log of a run: one JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockwalk.system import atomic_files, links
from blockwalk.system.atomic_files import whole_lines


class MetricsLog:
    """``metrics.jsonl``: one JSON object a line, with its digest, one line a step, readable while
    the run goes on.

    Args:
        path: the file; made if it is not there.
        source: the log that is gone on with, if any: of this file, or of the run that is resumed in
            another folder.
        keep_until: the step that the run goes on from: later lines are dropped.
    """

    def __init__(self, path: Path, *, source: Path | None = None, keep_until: int = -1) -> None:
        with atomic_files.reading(source or path):
            earlier = [] if source is None else whole_lines(source)
            kept = [line for line in earlier if line["step"] <= keep_until]
        text = "".join(f"{atomic_files.seal(json.dumps(line))[0]}\n" for line in kept)
        atomic_files.write_bytes(path, text.encode())
        self.first_line: Mapping[str, Any] | None = kept[0] if kept else None
        self.last_line: Mapping[str, Any] | None = kept[-1] if kept else None
        self.path = path
        self._file = links.append_to(path)

    @property
    def last_step(self) -> int:
        """The step of the last line; −1 where there is none."""
        return int(self.last_line["step"]) if self.last_line else -1

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line; it is readable at once and safe after the next :meth:`sync`. Every
        figure is finite: JSON has no other."""
        with atomic_files.naming(self._file.name):
            self._file.write(f"{atomic_files.seal(json.dumps(line, allow_nan=False))[0]}\n")
        self.first_line = self.first_line or line
        self.last_line = line

    def sync(self) -> None:
        """Make every line so far survive a power cut."""
        with atomic_files.naming(self._file.name):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()
