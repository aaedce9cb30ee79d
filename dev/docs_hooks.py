"""Pages of the site: README is its first page, links to files that are not pages name the file
instead, and what a docstring refers to stands as its name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_ROLE = re.compile(r":[a-z]+:<code>(~(?:\w+\.)*)?([\w.]+)</code>")
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add README as the first page."""
    from mkdocs.structure.files import File

    if files.get_file_from_path("index.md") is None:
        files.append(
            File.generated(
                config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")
            )
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text, with the links that lead out of docs/ as names."""
    folder = ROOT if page.file.src_uri == "index.md" else (ROOT / "docs" / page.file.src_uri).parent

    def linked(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = (folder / target).resolve()
        if path.is_relative_to(ROOT / "docs") and path.is_file():
            here = (ROOT / "docs" / page.file.src_uri).parent
            mark = "!" if found[0].startswith("!") else ""
            return f"{mark}[{text}]({os.path.relpath(path, here)}{anchor or ''})"
        name = str(path.relative_to(ROOT))
        return f"`{name}`" if text in name else f"{text} (`{name}`)"

    return _LINK.sub(linked, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """The page's HTML, with the roles of docstrings as names; one with a tilde as the last part of
    its name."""
    return _ROLE.sub(r"<code>\2</code>", html)
