"""Blockwalk behind the interfaces that people already use: transformers' Trainer, and the
evaluation harness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockwalk.system import kernel_notes

if TYPE_CHECKING:
    from blockwalk.integrations.trainer import BlockwalkTrainer as BlockwalkTrainer

__all__ = ["BlockwalkTrainer"]

kernel_notes.silence()  # accelerate imports what writes them


def __getattr__(name: str) -> Any:
    """Import an integration, and the library that it speaks to, when it is first used."""
    if name == "BlockwalkTrainer":
        from blockwalk.integrations.trainer import BlockwalkTrainer

        return BlockwalkTrainer
    raise AttributeError(f"module 'blockwalk.integrations' has no attribute {name!r}")
