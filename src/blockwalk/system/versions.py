"""Versions of the packages that a run's numbers depend on."""

from __future__ import annotations

from importlib import metadata

PACKAGES = ("blockwalk", "torch", "transformers", "peft", "safetensors", "numpy")


def installed(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Installed versions by package; "not installed" where there is none."""
    there = {name for name in packages if any(metadata.distributions(name=name))}
    return {name: metadata.version(name) if name in there else "not installed" for name in packages}
