"""Files that appear whole or not at all: written beside their place, synced, renamed, and the
folder synced.

A rename within one file system is atomic (POSIX): whoever looks sees the old file or the new one,
and after a loss of power the same holds because the data is on the disk before the name changes. A
process killed in between leaves only ``.NAME.<8 hexadecimal digits>.partial``, and of a folder that
was to be replaced ``.NAME.<8 hexadecimal digits>.replaced``."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml

from blockwalk.system import links
from blockwalk.system.lfs import refuse_pointer
from blockwalk.system.locks import lock
from blockwalk.system.partial_outputs import held
from blockwalk.system.paths import StrPath

log = logging.getLogger(__name__)

PARTIAL = ".partial"
ASIDE = ".replaced"
"""The ends of the names of what is being written, and of the folder whose place it takes."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A disk that is full, a quota that is used up, a file longer than ``ulimit -f`` allows."""
OF_DISK = (*NO_ROOM, errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.ESTALE)
"""These, and a disk that fails, is gone, or may be read alone."""
LOCK = ".lock"
"""The file in a folder that :func:`locked` holds; it says who does."""
_HOLDER = re.compile(r"process \d+ on ")


def beside(path: Path, end: str = PARTIAL) -> Path:
    """Return a path of its own beside another, for what is to take its name, or has given it up."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{end}")


def fsync(path: StrPath) -> None:
    """Make the names in a folder, or the bytes of a file, durable."""
    if os.name == "nt" and os.path.isdir(path):  # Windows opens no folder
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Make a folder, and those around it, with durable names; leave one that is there alone, or
    that another rank makes now.

    Raises:
        ValueError: the path, or one around it, is a file, or a link that leads nowhere.
    """
    if path.is_dir():
        return
    if path.is_symlink():
        raise ValueError(
            f"{path} is a link to {os.readlink(path)}, which is no folder: remove it, or make that"
            " folder"
        )
    make_folder(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if path.is_dir():
            return
        raise ValueError(f"{path} is a file, and a folder is needed: choose another name") from None
    fsync(path.parent)


def fsync_tree(path: StrPath) -> None:
    """Make every file below a folder, and every folder's names, durable."""
    for root, _, names in os.walk(path):
        for name in names:
            fsync(os.path.join(root, name))
        fsync(root)


@contextmanager
def naming(path: StrPath, nbytes: int | None = None) -> Iterator[None]:
    """Add to an error of the disk the file's path; if it is full, the bytes that the file was to
    have, and the bytes that are free. Libraries in Rust, such as safetensors and tokenizers, have
    errors of their own for it, with the number in their text."""
    try:
        yield
    except Exception as error:
        in_rust = re.search(r"\(os error (\d+)\)", str(error))
        number = error.errno if isinstance(error, OSError) else int(in_rust[1]) if in_rust else None
        if number not in OF_DISK or getattr(error, "filename", None) is not None:
            raise
        if number not in NO_ROOM:
            raise OSError(number, os.strerror(number), os.fspath(path)) from error
        size = "" if nbytes is None else f" of {nbytes / 1e6:.3g} MB"
        free = shutil.disk_usage(Path(path).parent).free
        text = f"{os.strerror(number)} for a file{size} where {free / 1e6:.3g} MB are free"
        raise OSError(number, text, os.fspath(path)) from error


@contextmanager
def atomic_open(path: StrPath) -> Iterator[IO[bytes]]:
    """Open a file for writing that replaces ``path`` when the block ends well, and leaves it alone
    when it raises. It is synced before it takes its name."""
    path = Path(path)
    partial = beside(path)
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
    """Replace ``path`` by ``value`` as indented JSON, atomically and durably. NaN and infinity are
    refused."""
    write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Return ``value`` as indented JSON. NaN and infinity are refused."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


def read_json(path: Path) -> Any:
    """Return the value in a file of JSON. Raises json.JSONDecodeError, UnicodeError or OSError
    where there is none."""
    return json.loads(path.read_text(encoding="utf-8"))


class Damaged(ValueError):
    """A file, named in the message, is missing, or its bytes are not those that were written."""


@contextmanager
def reading(path: StrPath) -> Iterator[None]:
    """Turn what fails while a file's values are taken apart into a :class:`Damaged` that names the
    file: whoever made it may have been careless, or mean harm."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Damaged(f"{os.fspath(path)} is damaged: {type(error).__name__}: {error}") from None
    except (UnicodeError, json.JSONDecodeError) as error:
        refuse_pointer(path)
        raise Damaged(f"{os.fspath(path)} is damaged: {error}") from None


def read_yaml(path: Path, loader: type[yaml.SafeLoader]) -> Any:
    """Return the values in a YAML file. Raises ValueError where it is no valid YAML."""
    with reading(path):
        try:
            return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


_SEAL = ', "digest": "'


def seal(text: str, before: str = "") -> tuple[str, str]:
    """Return a JSON object's text with its digest as its last value, and that digest: 16
    hexadecimal digits, of ``before`` and of the text. The text that ``before`` is the digest of is
    sealed with it, so that lines make a chain."""
    digest = hashlib.blake2b((before + text).encode(), digest_size=8).hexdigest()
    return text[:-1] + _SEAL + digest + '"}', digest


def unseal(sealed: str, before: str = "") -> tuple[dict[str, Any], str]:
    """Return the JSON object that :func:`seal` was given, and its digest.

    Raises:
        ValueError: the digest is missing, or another one: the text or what came before it has
            changed.
    """
    text = sealed.rstrip().rpartition(_SEAL)[0] + "}"
    again, digest = seal(text, before)
    if again != sealed.rstrip():
        raise ValueError("its digest is not that of its text")
    value: dict[str, Any] = json.loads(text)
    return value, digest


def write_sealed(path: StrPath, value: dict[str, Any]) -> None:
    """Replace ``path`` by ``value`` as sealed, indented JSON, atomically and durably."""
    write_bytes(path, (seal(json.dumps(value, indent=1))[0] + "\n").encode())


def read_sealed(path: StrPath) -> dict[str, Any]:
    """Return the JSON object in a file of :func:`write_sealed`, compared with its digest.

    Raises:
        Damaged: the file is missing, or is not as it was written.
    """
    try:
        with reading(path):
            text, end, beyond = Path(path).read_bytes().decode().rpartition("\n")
            if not end or beyond:  # a seal covers all but the last byte
                raise ValueError("it does not end as it was written")
            return dict(unseal(text)[0].items())
    except FileNotFoundError:
        raise Damaged(f"{os.fspath(path)} is missing") from None
    except Damaged:
        raise
    except ValueError as error:
        raise Damaged(f"{os.fspath(path)} is damaged: {error}") from None


@contextmanager
def atomic_folder(path: StrPath, *, replace: bool = False, sweeps: bool = False) -> Iterator[Path]:
    """Build a folder beside ``path``, which takes that name, synced, when the block ends well and
    goes when it raises.

    Args:
        replace: take the place of a folder that is there, which stays until this one is whole: a
            kill leaves it in its place or beside it, for :func:`bring_back`. A link that is there
            goes, and where it leads stays.
        sweeps: remove what processes that were killed left of this folder: a command's output, in a
            place that no run sweeps.

    Raises:
        ValueError: ``path`` exists already, before or after the building, and is not to be
            replaced.
    """
    path = Path(path)
    if not replace:
        refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(path)
    with ExitStack() as stack:
        if sweeps:
            stack.enter_context(held(partial, path, partial.mkdir, PARTIAL))
        else:
            partial.mkdir()
        try:
            with naming(path):
                yield partial
                fsync_tree(partial)
            _take_name(partial, path, replace=replace)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    fsync(path.parent)


def _take_name(partial: Path, path: Path, *, replace: bool) -> None:
    """Give a whole folder the name that it was built for."""
    if not (replace and os.path.lexists(path)):
        refuse_existing(path)  # os.rename would silently replace an empty folder
        os.rename(partial, path)
        return
    old = beside(path, ASIDE)
    os.rename(path, old)
    try:
        os.rename(partial, path)
    except BaseException:
        os.rename(old, path)
        raise
    fsync(path.parent)
    discard(old)


def refuse_existing(path: StrPath) -> None:
    """Raise ValueError where an output exists already."""
    if os.path.lexists(path):
        raise ValueError(
            f"{os.fspath(path)} exists already and is not overwritten: choose another output or"
            " remove it"
        )


@contextmanager
def locked(folder: StrPath) -> Iterator[None]:
    """Hold a folder, made where it is not there, against every other process. The lock ends with
    this process, however that ends; what was made here of it and of the folders around it, and
    stays empty, goes again.

    Raises:
        ValueError: the folder is a file, or another process holds it; the message says which, where
            and since when; or the lock's name is taken by a link, or by another file.
    """
    folder = Path(folder)
    new_folders = [
        new_folder for new_folder in (folder, *folder.parents) if not new_folder.exists()
    ]
    make_folder(folder)
    path = folder / LOCK
    while True:
        with links.append_to(path) as file:
            if not lock(file.fileno(), folder):
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise ValueError(
                    f"{folder} is in use by {holder}: wait for its end, or choose another folder"
                )
            try:
                if os.fstat(file.fileno()).st_ino != path.stat().st_ino:
                    continue
            except FileNotFoundError:
                continue  # whoever held the lock has just removed it, and this file's name
            file.seek(0)
            if (text := file.read()) and not _HOLDER.match(text):
                raise ValueError(
                    f"{path} is not Blockwalk's, which keeps a lock under that name: move it away"
                )
            file.truncate(0)
            file.write(
                f"process {os.getpid()} on {socket.gethostname()} since"
                f" {time.strftime('%Y-%m-%d %H:%M:%S')}"
            )
            file.flush()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                with suppress(OSError):  # not empty
                    for new_folder in new_folders:
                        new_folder.rmdir()
            return


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Hold a file as a lock, made if it is not there, after every process that holds it now. The
    file stays: whoever removed it would let two processes in.

    Raises:
        ValueError: its name is taken by a link, or by another file.
    """
    with links.append_to(path) as file:
        if not lock(file.fileno(), path):
            log.info("another process holds %s: waiting for it", path)
            lock(file.fileno(), path, wait=True)
        yield


@contextmanager
def tolerating_use(path: Path) -> Iterator[None]:
    """Turn the failure to remove a path into a warning. An NFS client keeps a file that some
    process has open or mapped (as ``.nfs…``, in its folder) until that one lets go of it; no run
    ends for want of a removal."""
    try:
        yield
    except OSError as error:
        log.warning("%s is not removed now, and is left for the next run: %s", path, error)


def discard(path: Path) -> None:
    """Remove a file, a link or a folder that nobody will ask for again; it stops being named as it
    was first. A file that cannot be removed now stays as a leftover, with a warning, for the next
    sweep."""
    leftover = path if path.name.endswith((PARTIAL, ASIDE)) else beside(path)
    with tolerating_use(path):
        if leftover != path:
            os.rename(path, leftover)
        links.remove(leftover)


def left_aside(path: Path) -> list[Path]:
    """Return the folders that :func:`atomic_folder` took from a path, and had no time to remove."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(ASIDE)}")
    return (
        sorted(sibling for sibling in path.parent.iterdir() if name.fullmatch(sibling.name))
        if path.parent.is_dir()
        else []
    )


def bring_back(path: Path) -> None:
    """Give a folder that a killed :func:`atomic_folder` was about to replace its place again, or
    remove it where the new one has taken that."""
    for old in left_aside(path):
        if os.path.lexists(path):
            links.remove(old)
        else:
            os.rename(old, path)


def nearest(path: Path) -> Path:
    """Return the path, absolute, or the nearest folder around it that exists."""
    return next(
        candidate for candidate in (path.absolute(), *path.absolute().parents) if candidate.exists()
    )


def require_space(path: StrPath, nbytes: int, what: str) -> None:
    """Raise ValueError where the disk of ``path`` (which need not exist yet) has less than
    ``nbytes`` bytes free."""
    folder = nearest(Path(path))
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ValueError(
            f"{what} needs {nbytes / 1e9:.2f} GB on the disk of {folder}, which has"
            f" {free / 1e9:.2f} GB free: free some space or choose an output on another disk"
        )


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the file's lines of JSON, each with its step, up to one that a kill or a loss of power
    left torn; none where there is no file. Lines of a log that has seals are compared with them.

    Raises:
        Damaged: another line than the last is torn, or one is not as it was written.
    """
    *texts, torn = (
        path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else [""]
    )
    sealed = any(_SEAL in text for text in (*texts, torn))
    lines: list[dict[str, Any]] = []
    for number, text in enumerate([*texts, torn[: torn.rfind("}") + 1]], 1):
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
