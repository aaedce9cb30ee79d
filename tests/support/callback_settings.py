"""Settings of a tiny run with callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import TinyRun


def settings(tiny_run: TinyRun, out: Path, **more: Any) -> dict[str, Any]:
    data = {"train": str(tiny_run.train), "eval": str(tiny_run.eval), "format": "text"}
    return {
        "model": str(tiny_run.model),
        "data": data,
        "output_dir": str(out),
        "batch_size": 4,
        "method": "plain",
        **more,
    }
