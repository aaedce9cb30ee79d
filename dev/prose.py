"""Words a sentence of README and docs/, and turns of phrase that no page has. `make docs` holds the
pages to both.

python dev/prose.py            # a line a page; exits with 1 where one is over, or has such a phrase
python dev/prose.py --longest  # and the ten longest sentences of each page that is over
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

BOUNDS = {"README.md": 20, "docs/start-here.md": 20, "docs/how-to/*.md": 20, "docs/**/*.md": 24}
"""Words a sentence, on average, by the first pattern that a page matches."""

GENERATED = {"docs/model-types.md", "docs/tested-with.md", "docs/settings.md", "docs/api.md"}
"""Pages that a program writes, whose sentences stand in its messages."""

PHRASES = ("one's own", "goes without saying", "said once", "beside which")
"""Turns of phrase that readers had to read twice."""


def pages() -> list[Path]:
    """Return README and the pages of docs/ that people write."""
    names = sorted(str(path.relative_to(ROOT).as_posix()) for path in (ROOT / "docs").rglob("*.md"))
    return [ROOT / name for name in ["README.md", *names] if name not in GENERATED]


def prose(text: str) -> list[str]:
    """Return the paragraphs and items of lists, without code, tables, headings, pictures and links'
    targets."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = []
    for line in text.splitlines():
        if re.match(r" {4,}|\||#|!\[", line):
            lines.append("")
        elif re.match(r"\s*([-*]|\d+\.) ", line):
            lines += ["", re.sub(r"^\s*([-*]|\d+\.) ", "", line)]
        else:
            lines.append(line.strip())
    paragraphs = [" ".join(part.split()) for part in "\n".join(lines).split("\n\n")]
    return [re.sub(r"\]\([^)]*\)", "]", paragraph) for paragraph in paragraphs if paragraph]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page: they end with a period, a question mark, an exclamation mark
    or a colon before a space."""
    for paragraph in prose(text):
        plain = re.sub(r"`[^`]*`", "code", paragraph)
        for sentence in re.split(r"(?<=[.!?:])[)\"*]* +(?=[(\"*\[]*[A-Z0-9⟦])", plain):
            if len(sentence.split()) > 1:
                yield sentence


def bound(page: Path) -> int:
    """Return the words a sentence that a page may have on average."""
    name = page.relative_to(ROOT)
    return next(
        words
        for pattern, words in BOUNDS.items()
        if name.match(pattern.replace("**/", "")) or name.match(pattern)
    )


def average(text: str) -> float:
    """Return the mean words a sentence; 0 for a page without any."""
    counts = [len(sentence.split()) for sentence in sentences(text)]
    return sum(counts) / len(counts) if counts else 0.0


def main() -> int:
    """Print a line a page, and return 1 where one breaks its bound or has a banned phrase."""
    code = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        mean = average(text)
        found = [phrase for phrase in PHRASES if phrase in " ".join(text.split())]
        over = mean > bound(page)
        code |= over or bool(found)
        name = page.relative_to(ROOT).as_posix()
        verdict = "OVER" if over else ""
        print(f"{name:<40} {mean:5.1f} of {bound(page)} {verdict} {', '.join(found)}".rstrip())
        if over and "--longest" in sys.argv:
            for sentence in sorted(sentences(text), key=lambda s: -len(s.split()))[:10]:
                print(f"    {len(sentence.split())}: {sentence}")
    return code


if __name__ == "__main__":
    sys.exit(main())
