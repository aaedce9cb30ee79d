"""``blockwalk convert-config``: a run's file from a file of another tool."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from blockwalk.plan.words import counted
from blockwalk.system import atomic_files
from blockwalk.system.terminal import say
from blockwalk.train import config
from blockwalk.train.conversion import Conversion, convert, pairs_of

WIDTH = 100
"""Columns of a line of comments."""
NEEDED = {"model": "OWNER/NAME", "data.train": "train.jsonl"}
"""Settings that a run cannot be without, each with an example."""


def convert_config(arguments: argparse.Namespace) -> None:
    """Write a run's file with the settings of another tool's file.

    Raises:
        ValueError: the output exists, or the file asks for what cannot be followed.
    """
    source = Path(arguments.file)
    out = Path(arguments.out)
    atomic_files.refuse_existing(out)
    conversion = convert(source)
    text = "\n".join(lines(conversion, source, out))
    atomic_files.write_bytes(out, f"{text}\n".encode())
    say(
        f"written to {out}: {counted(len(conversion.settings), 'setting')} from {source}"
        f" ({conversion.tool})"
    )
    if conversion.differences:
        said = counted(len(conversion.differences), "line")
        say(f"{said} of {source} not followed; the comments at the end of {out} say why")
    missing = [name for name in NEEDED if name not in conversion.settings]
    if missing:
        say(f"{source} names no {' and no '.join(missing)}: write it in {out}")
    say(f"next: blockwalk train {out} --dry-run")


def lines(conversion: Conversion, source: Path, out: Path) -> Iterator[str]:
    """Yield lines of a run's file."""
    yield f"# From {source.name}, a file for {conversion.tool}."
    yield f"# Check it: blockwalk train {out} --dry-run. Settings: blockwalk settings NAME."
    yield ""
    for name in NEEDED:
        if name not in conversion.settings:
            yield f"# {name}: {NEEDED[name]}"
    sections: dict[str, dict[str, Any]] = {}
    pairs = pairs_of(conversion)
    for name, value in pairs:
        section, _, inner = name.partition(".")
        if inner:
            sections.setdefault(section, {})[inner] = value
        # a section of its own says that adapters are trained
        elif not any(other.startswith(f"{name}.") for other, _ in pairs):
            yield from _setting(name, value, conversion.origins.get(name, ""), "")
    for section, settings in sections.items():
        yield f"{section}:"
        yield from _section(section, settings, conversion.origins)
    if conversion.differences:
        yield from ("", "# Not followed:")
        for difference in conversion.differences:
            yield from textwrap.wrap(
                difference, WIDTH, initial_indent="# - ", subsequent_indent="#   "
            )
    if conversion.left_out:
        yield from ("", "# Left out, for they change nothing here:")
        yield from textwrap.wrap(
            ", ".join(conversion.left_out), WIDTH, initial_indent="# ", subsequent_indent="# "
        )


def _section(
    section: str, settings: Mapping[str, Any], origins: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines of a section; parts of a mapping of its own stand below one another."""
    nested: dict[str, dict[str, Any]] = {}
    for inner, value in settings.items():
        head, _, part = inner.partition(".")
        if part:
            nested.setdefault(head, {})[part] = value
        else:
            yield from _setting(inner, value, origins.get(f"{section}.{inner}", ""), "  ")
    for head, parts in nested.items():
        yield f"  {head}:"
        for part, value in parts.items():
            origin = origins.get(f"{section}.{head}.{part}", "")
            yield from _setting(part, value, origin, "    ")


def _setting(name: str, value: Any, origin: str, indent: str) -> Iterator[str]:
    """Yield a setting as a line of YAML, with what it comes from behind it; above it where the line
    would be too long."""
    line = indent + config.as_yaml_line(name, value)
    text = f"{line:<36}  # {origin}" if origin else line
    if len(text) > WIDTH and origin:
        mark = f"{indent}# "
        yield from textwrap.wrap(origin, WIDTH, initial_indent=mark, subsequent_indent=mark)
        text = line
    yield text
