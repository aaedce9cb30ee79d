"""The chat template that was saved with a model or an adapter."""

from __future__ import annotations

from pathlib import Path

from blockwalk.system import atomic_files
from blockwalk.system.paths import StrPath

FILE = "chat_template.jinja"
"""The file that transformers keeps a chat template in."""


LARGEST = 1 << 20
"""Bytes of a template's file at most; the longest published ones have some 20,000."""


def read_template(path: Path) -> str:
    """Return the text of a template's file.

    Raises:
        ValueError: it is too large for one, or no text.
    """
    if path.stat().st_size > LARGEST:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes; a chat template has {LARGEST:,} at most"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(
            f"{path} is a chat template that is not UTF-8 text: save it as UTF-8"
        ) from None


def saved_with(folder: StrPath | None) -> str:
    """Return the chat template that was saved with an adapter, as text; empty where there is none.

    transformers keeps it in a file of its own; older versions kept it in ``tokenizer_config.json``.
    """
    if not folder:
        return ""
    path = Path(folder) / FILE
    if path.is_file():
        return read_template(path)
    config = Path(folder) / "tokenizer_config.json"
    if not config.is_file():
        return ""
    with atomic_files.reading(config):
        template = atomic_files.read_json(config).get("chat_template")
    return template if isinstance(template, str) else ""
