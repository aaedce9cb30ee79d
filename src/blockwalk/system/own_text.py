"""Texts that are written beside files of others: the last line has a digest, so that only an
unchanged one is replaced."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from blockwalk.system import atomic_files

_SIGNED = re.compile(rb".*written by blockwalk, digest ([0-9a-f]{16})[^\n]*\n?")


def refuse_foreign(path: Path) -> None:
    """Raise ValueError where a path is taken by anything but a text of :func:`write` that nobody
    has changed since."""
    if not os.path.lexists(path):
        return
    if path.is_symlink():
        raise ValueError(
            f"{path} is a link to {os.readlink(path)} and is not replaced: move it away"
        )
    if not path.is_file():
        raise ValueError(f"{path} is no file and is not replaced: move it away")
    text, _, signature = path.read_bytes().removesuffix(b"\n").rpartition(b"\n")
    signed = _SIGNED.fullmatch(signature)
    if signed is None or signed[1].decode() != _digest(text + b"\n"):
        raise ValueError(
            f"{path} is there already, and was not written by blockwalk, or was changed since: it"
            " is not replaced; move it away, or give it another name"
        )


def write(path: Path, text: str, comment: str) -> None:
    """Write a text, with a last line that tells whose it is.

    Args:
        text: it ends with a newline.
        comment: a comment of the text's language, with ``{}`` in the place of that line's words.

    Raises:
        ValueError: as :func:`refuse_foreign`.
    """
    refuse_foreign(path)
    assert text.endswith("\n"), f"{path}: its last line has no end"
    signed = comment.format(f"written by blockwalk, digest {_digest(text.encode())}")
    atomic_files.write_bytes(path, f"{text}{signed}\n".encode())


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=8).hexdigest()
