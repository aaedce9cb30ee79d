"""Versions of the packages that a run's numbers depend on."""

from __future__ import annotations

from importlib import metadata

PACKAGES = ("blockwalk", "torch", "transformers", "peft", "safetensors", "numpy")

NEWEST_TESTED = {"torch": "2.14", "transformers": "5.24"}
"""The newest version, major and minor, of each package that tests were run with (``make
test-range`` runs all of them)."""


def installed(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return installed versions by package; "not installed" where there is none."""
    present = {name for name in packages if any(metadata.distributions(name=name))}
    return {
        name: metadata.version(name) if name in present else "not installed" for name in packages
    }


def is_older(package: str, than: str) -> bool:
    """Return whether an installed package is older than a version, by its major and minor number;
    False where it is not installed."""
    version = installed((package,))[package]
    return _minor(version) != (0, 0) and _minor(version) < _minor(than)


def untested(versions: dict[str, str] | None = None) -> str:
    """Return one note that names the packages that are newer than any tested version; empty where
    none is.

    Args:
        versions: versions by package; the installed ones unless given.
    """
    versions = installed(tuple(NEWEST_TESTED)) if versions is None else versions
    newer = [
        f"{package} {versions[package]} (tested to {tested})"
        for package, tested in NEWEST_TESTED.items()
        if package in versions and _minor(versions[package]) > _minor(tested)
    ]
    if not newer:
        return ""
    return (
        f"note: not tested with {' and '.join(newer)}: compare a few losses with a tested version"
    )


def _minor(version: str) -> tuple[int, int]:
    """Return major and minor number; (0, 0) for a version that has none."""
    major, _, remainder = version.partition(".")
    minor = remainder.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
