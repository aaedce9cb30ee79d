"""``blockwalk report``: a run as one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from blockwalk import files
from blockwalk.report import html


def report(arguments: argparse.Namespace) -> int:
    """Write ``report.html`` into a run's folder."""
    out = Path(arguments.run) / "report.html"
    files.write_bytes(out, html.report(arguments.run).encode())
    print(f"written to {out}")
    return 0
