"""Figures of a run's folder."""

from __future__ import annotations

import json
from pathlib import Path


def losses(folder: Path) -> list[float]:
    return [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
