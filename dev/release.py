"""The lines that change on the day of a release: how to install Blockwalk, and where its pages are.

    python -m dev.release

writes them into README.md, mkdocs.yml and the notebook for newcomers. :data:`RELEASED` decides."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

RELEASED = ""
"""The address of the site of documentation, once the package is on its index; empty: it is not."""

NOTEBOOK = "examples/fine_tune.ipynb"
_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
_EXTRAS = "data,gguf"


def install_lines(address: str) -> list[str]:
    """Return the commands that install Blockwalk, for README.

    Args:
        address: see :data:`RELEASED`.
    """
    package = f"'{'blockwalk' if address else '.'}[{_EXTRAS}]'"
    lines = [
        (_TORCH, "the small wheel, without CUDA"),
        (f"pip install {package}", "hub data sets, Parquet, GGUF"),
    ]
    if address:
        lines.append((f"pipx install {package}", "or: the commands alone"))
    clone = [] if address else ["git clone <this repository> blockwalk && cd blockwalk"]
    return clone + [f"{command:<{len(_TORCH)}}   # {reason}" for command, reason in lines]


def readme(text: str, address: str) -> str:
    """Return README with the commands of its section *Install*."""
    before, heading, after = text.partition("## Install\n\n```bash\n")
    assert heading, "README has no section Install"
    _, fence, others = after.partition("```\n")
    return before + heading + "\n".join(install_lines(address)) + "\n" + fence + others


def site(text: str, address: str) -> str:
    """Return mkdocs.yml with the address of the site, or without one."""
    without = re.sub(r"^site_url: .*\n", "", text, flags=re.MULTILINE)
    if not address:
        return without
    return without.replace("docs_dir:", f"site_url: {address}\ndocs_dir:", 1)


def notebook(text: str, address: str) -> str:
    """Return the notebook with the commands of its first cell of code."""
    document = json.loads(text)
    cell = next(cell for cell in document["cells"] if cell["cell_type"] == "code")
    lines = [f"%{_TORCH}", "%pip install .  # in a clone of the repository, whose folder this is"]
    if address:
        lines = [f"%{_TORCH}", "%pip install blockwalk", "!blockwalk init --examples"]
    cell["source"] = [f"{line}\n" for line in lines[:-1]] + [lines[-1]]
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


PAGES = {"README.md": readme, "mkdocs.yml": site, NOTEBOOK: notebook}
"""The files that hold such lines, each with what writes them."""


def main() -> None:
    for name, written in PAGES.items():
        path = ROOT / name
        path.write_text(written(path.read_text(encoding="utf-8"), RELEASED), encoding="utf-8")


if __name__ == "__main__":
    main()
