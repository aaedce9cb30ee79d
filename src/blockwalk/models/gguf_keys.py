"""The keys of a GGUF file's metadata, asked for one by one: those which nobody has asked for can
then be refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Keys:
    """The metadata under an architecture's name, and the keys of it that were asked for.

    Args:
        where: the file, for messages.
    """

    def __init__(self, where: str, architecture: str, metadata: Mapping[str, Any]) -> None:
        self.where = where
        self.architecture = architecture
        prefix = f"{architecture}."
        self.values = {
            key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)
        }
        self.used: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value; of an array of equal numbers the number."""
        self.used.add(key)
        value = self.values.get(key, default)
        if isinstance(value, tuple) and key != "attention.sliding_window_pattern":
            if len(set(value)) != 1:
                why = "and every block must have the same: models whose blocks differ are not read"
                raise self.error(key, why)
            return value[0]
        return value

    def need(self, key: str) -> Any:
        """Return the positive number of a key that must be there."""
        if key not in self.values:
            raise ValueError(
                f"{self.where} lacks {self.architecture}.{key}, without which its model is unknown"
            )
        value = self.get(key)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(key, "which is no positive number")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a key's finite number, or the default of a missing one."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, "which is no number")
        return float(value)

    def must(self, key: str, *allowed: Any, why: str) -> None:
        """Refuse a key that is there with another value than one of ``allowed``."""
        if key in self.values and self.get(key) not in allowed:
            raise self.error(key, why)

    def error(self, key: str, why: str) -> ValueError:
        """Return the error that refuses a key's value, with the reason."""
        value = self.values[key]
        text = str(value)
        if isinstance(value, tuple):
            text = f"[{', '.join(map(str, value[:8]))}{', …' if len(value) > 8 else ''}]"
        return ValueError(f"{self.where} has {self.architecture}.{key} = {text}, {why}")
