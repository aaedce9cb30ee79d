"""The folders that a run leaves, found from its own: the adapter, the model, and the file of its
settings."""

from __future__ import annotations

from pathlib import Path

from blockwalk.system.paths import StrPath

ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's file of an adapter's settings."""
SETTINGS = "config.yaml"
"""The file of a run's resolved settings."""


def adapter_of(folder: StrPath) -> Path:
    """Return the adapter that a folder is, or that the run in it has trained; the folder itself
    where it holds neither."""
    path = Path(folder).expanduser()
    inner = path / "adapter"
    return (
        inner
        if not (path / ADAPTER_CONFIG).is_file() and (inner / ADAPTER_CONFIG).is_file()
        else path
    )


def is_model(folder: StrPath) -> bool:
    """Return whether a folder holds a model: its configuration, and no run's settings."""
    return (Path(folder) / "config.json").is_file()
