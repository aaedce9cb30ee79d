"""The chat template that was saved with a model or an adapter."""

from __future__ import annotations

from pathlib import Path

from blockwalk.system import atomic_files
from blockwalk.system.paths import StrPath

FILE = "chat_template.jinja"
"""The file that transformers keeps a chat template in."""


def saved_with(folder: StrPath | None) -> str:
    """The chat template that was saved with an adapter, as text; empty where there is none.

    transformers keeps it in a file of its own; older versions kept it in ``tokenizer_config.json``.
    """
    if not folder:
        return ""
    path = Path(folder) / FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    config = Path(folder) / "tokenizer_config.json"
    if not config.is_file():
        return ""
    with atomic_files.reading(config):
        template = atomic_files.read_json(config).get("chat_template")
    return template if isinstance(template, str) else ""
