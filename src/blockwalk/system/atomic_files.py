"""Files that appear whole or not at all: written beside their place, synced, renamed, and the folder synced.

A rename within one file system is atomic (POSIX): whoever looks sees the old file or the new one, and after a loss of
power the same holds because the data is on the disk before the name changes. A process killed in between leaves only a
leftover whose name starts with ``.`` and ends with ``.partial``; :func:`remove_leftovers` sweeps those.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml

from blockwalk.system.locks import lock
from blockwalk.system.paths import StrPath

PARTIAL = ".partial"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A disk that is full, a quota that is used up, a file longer than ``ulimit -f`` allows."""
LOCK = ".lock"
"""The file in a folder that :func:`locked` holds; it says who does."""


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")


def fsync(path: StrPath) -> None:
    """Make the names in a folder, or the bytes of a file, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Make a folder, and those around it, with durable names; leave one that is there alone."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        fsync(path.parent)


def fsync_tree(path: StrPath) -> None:
    """Make every file below a folder, and every folder's names, durable."""
    for root, _, names in os.walk(path):
        for name in names:
            fsync(os.path.join(root, name))
        fsync(root)


@contextmanager
def naming(path: StrPath, nbytes: int | None = None) -> Iterator[None]:
    """Add to an error about a full disk the file's path, the bytes that it was to have, and the bytes that are free. Libraries
    in Rust, such as safetensors and tokenizers, have errors of their own for it, with the number in their text."""
    try:
        yield
    except Exception as error:
        in_rust = re.search(r"\(os error (\d+)\)", str(error))
        number = error.errno if isinstance(error, OSError) else int(in_rust[1]) if in_rust else None
        if number not in NO_ROOM or getattr(error, "filename", None) is not None:
            raise
        size, free = "" if nbytes is None else f" of {nbytes / 1e6:.3g} MB", shutil.disk_usage(Path(path).parent).free
        text = f"{os.strerror(number)} for a file{size} where {free / 1e6:.3g} MB are free"
        raise OSError(number, text, os.fspath(path)) from error


@contextmanager
def atomic_open(path: StrPath) -> Iterator[IO[bytes]]:
    """Open a file for writing that replaces ``path`` when the block ends well, and leaves it alone when it raises. It is synced
    before it takes its name."""
    path = Path(path)
    partial = _beside(path)
    try:
        with naming(path), open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def write_bytes(path: StrPath, data: bytes | bytearray | memoryview) -> None:
    """Replace ``path`` by ``data``, atomically and durably."""
    with atomic_open(path) as file:
        file.write(data)


def write_json(path: StrPath, value: Any) -> None:
    """Replace ``path`` by ``value`` as indented JSON, atomically and durably. NaN and infinity are refused."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_bytes(path, (text + "\n").encode())


def read_json(path: Path) -> Any:
    """The value in a file of JSON. Raises json.JSONDecodeError, UnicodeError or OSError where there is none."""
    return json.loads(path.read_text(encoding="utf-8"))


class Damaged(ValueError):
    """A file, named in the message, is missing, or its bytes are not those that were written."""


@contextmanager
def reading(path: StrPath) -> Iterator[None]:
    """Turn what fails while a file's values are taken apart into a :class:`Damaged` that names the file: whoever made it may
    have been careless, or mean harm."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Damaged(f"{os.fspath(path)} is damaged: {type(error).__name__}: {error}") from None
    except (UnicodeError, json.JSONDecodeError) as error:
        raise Damaged(f"{os.fspath(path)} is damaged: {error}") from None


def read_yaml(path: Path, loader: type[yaml.SafeLoader]) -> Any:
    """The values in a YAML file. Raises ValueError where it is no valid YAML."""
    with reading(path):
        try:
            return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


_SEAL = ', "digest": "'


def seal(text: str, before: str = "") -> tuple[str, str]:
    """A JSON object's text with its digest as its last value, and that digest: 16 hexadecimal digits, of ``before`` and of the
    text. The text that ``before`` is the digest of is sealed with it, so that lines make a chain."""
    digest = hashlib.blake2b((before + text).encode(), digest_size=8).hexdigest()
    return text[:-1] + _SEAL + digest + '"}', digest


def unseal(sealed: str, before: str = "") -> tuple[dict[str, Any], str]:
    """The JSON object that :func:`seal` was given, and its digest.

    Raises:
        ValueError: the digest is missing, or another one: the text or what came before it has changed.
    """
    text = sealed.rstrip().rpartition(_SEAL)[0] + "}"
    again, digest = seal(text, before)
    if again != sealed.rstrip():
        raise ValueError("its digest is not that of its text")
    found: dict[str, Any] = json.loads(text)
    return found, digest


def write_sealed(path: StrPath, value: dict[str, Any]) -> None:
    """Replace ``path`` by ``value`` as sealed, indented JSON, atomically and durably."""
    write_bytes(path, (seal(json.dumps(value, indent=1))[0] + "\n").encode())


def read_sealed(path: StrPath) -> dict[str, Any]:
    """The JSON object in a file of :func:`write_sealed`, compared with its digest.

    Raises:
        Damaged: the file is missing, or is not as it was written.
    """
    try:
        with reading(path):
            return dict(unseal(Path(path).read_text(encoding="utf-8"))[0].items())
    except FileNotFoundError:
        raise Damaged(f"{os.fspath(path)} is missing") from None
    except Damaged:
        raise
    except ValueError as error:
        raise Damaged(f"{os.fspath(path)} is damaged: {error}") from None


@contextmanager
def atomic_folder(path: StrPath, *, replace: bool = False) -> Iterator[Path]:
    """Build a folder beside ``path``, which takes that name, synced, when the block ends well and goes when it raises.

    Args:
        replace: take the place of a folder that is there, which stays until this one is whole.

    Raises:
        ValueError: ``path`` exists already, before or after the building, and is not to be replaced.
    """
    path = Path(path)
    if not replace:
        refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(path)
    partial.mkdir()
    try:
        with naming(path):
            yield partial
            fsync_tree(partial)
        if replace and path.exists():
            old = _beside(path)
            os.rename(path, old)
            os.rename(partial, path)
            shutil.rmtree(old)
        else:
            refuse_existing(path)  # os.rename would silently replace an empty folder
            os.rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    fsync(path.parent)


def refuse_existing(path: StrPath) -> None:
    """Raise ValueError where an output exists already."""
    if os.path.lexists(path):
        raise ValueError(f"{os.fspath(path)} exists already and is not overwritten: choose another output or remove it")


@contextmanager
def locked(folder: StrPath) -> Iterator[None]:
    """Hold a folder, made where it is not there, against every other process. The lock ends with this process, however that
    ends; what was made here of it and of the folders around it, and stays empty, goes again.

    Raises:
        ValueError: the folder is a file, or another process holds it; the message says which, where and since when.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, and a folder is needed: choose another name")
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    make_folder(folder)
    path = folder / LOCK
    while True:
        with path.open("a+", encoding="utf-8") as file:
            if not lock(file.fileno(), folder):
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise ValueError(f"{folder} is in use by {holder}: wait for its end, or choose another folder")
            try:
                if os.fstat(file.fileno()).st_ino != path.stat().st_ino:
                    continue
            except FileNotFoundError:  # whoever held the lock has just removed it: this file has no name any more
                continue
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
            file.flush()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                with suppress(OSError):  # not empty
                    for each in made:
                        each.rmdir()
            return


def remove_leftovers(folder: StrPath) -> list[Path]:
    """Remove what killed writers left in ``folder``, and return it. Call it only where no other writer is at work."""
    leftovers = [p for p in Path(folder).iterdir() if p.name.startswith(".") and p.name.endswith(PARTIAL)]
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return leftovers


def nearest(path: Path) -> Path:
    """The path, absolute, or the nearest folder around it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def require_space(path: StrPath, nbytes: int, what: str) -> None:
    """Raise ValueError where the disk of ``path`` (which need not exist yet) has less than ``nbytes`` bytes free."""
    folder = nearest(Path(path))
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ValueError(
            f"{what} needs {nbytes / 1e9:.2f} GB on the disk of {folder}, which has {free / 1e9:.2f} GB free: "
            f"free some space or choose an output on another disk"
        )


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The file's lines of JSON, each with its step, up to one that a kill or a loss of power left torn; none where there is
    no file. Lines of a log that has seals are compared with them.

    Raises:
        Damaged: another line than the last is torn, or one is not as it was written.
    """
    *texts, last = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else [""]
    sealed = any(_SEAL in text for text in (*texts, last))
    lines: list[dict[str, Any]] = []
    for number, text in enumerate([*texts, last[: last.rfind("}") + 1]], 1):
        try:
            line = unseal(text)[0] if sealed else json.loads(text)
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                raise ValueError("it does not tell its step")
        except ValueError as error:
            if number > len(texts) or "\0\0" in text:  # a hole that a loss of power left
                break
            raise Damaged(f"{path} is damaged: line {number}: {error}") from None
        lines.append(line)
    return lines
