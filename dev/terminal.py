"""A terminal's output as an SVG picture.

    blockwalk train examples/quickstart.yaml | python dev/terminal.py > docs/terminal.svg

Lines are shown as they came; of the steps the first three and the last two.
"""

from __future__ import annotations

import io
import sys

from rich.console import Console
from rich.text import Text

COMMAND = "blockwalk train examples/quickstart.yaml"


def main() -> None:
    lines = [
        line.rstrip("\n")
        for line in sys.stdin
        if not line.startswith("evaluation ") or " at step " in line
    ]
    steps = [at for at, line in enumerate(lines) if line.startswith("step ")]
    shown = [line for at, line in enumerate(lines) if at not in steps[3:-2]]
    if len(steps) > 5:
        shown.insert(shown.index(lines[steps[2]]) + 1, "...")
    console = Console(record=True, width=128, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {COMMAND}", style="bold"))
    for line in shown:
        console.print(
            Text.from_ansi(
                line, style="" if line.startswith(("step", "held-out", "saved")) else "dim"
            ),
            soft_wrap=True,
        )
    print(console.export_svg(title="blockwalk", clear=False), end="")


if __name__ == "__main__":
    main()
