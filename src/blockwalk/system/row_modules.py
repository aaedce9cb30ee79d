"""Modules that bring rows from outside: by ``--import``, or by an entry point of an installed
package.

A module's code runs, so nothing is looked up where a stranger may have put a file: not beside a
run's file, and not on the path that the working folder is put on. A name that its user wrote is
looked up in the working folder, and among installed modules."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from blockwalk.system import cache
from blockwalk.system.ownership import exposed
from blockwalk.system.paths import StrPath

log = logging.getLogger(__name__)

GROUP = "blockwalk.rows"
"""The group of entry points whose modules are imported wherever Blockwalk is."""
PACKAGE = __name__.partition(".")[0]
DIGITS = 16
"""Hexadecimal digits of a digest in a run's settings."""


@dataclass(frozen=True, slots=True)
class RowModule:
    """A module that has been imported for its rows."""

    name: str
    file: str
    """The absolute path of its file, or of its package's ``__init__.py``."""
    digest: str
    """The sha256 of its source, of a package of all its files of Python, in hexadecimal digits."""

    @property
    def stamp(self) -> str:
        """The name and the digest, as a run's settings have them: ``my_rows@0123456789abcdef``."""
        return f"{self.name}@{self.digest[:DIGITS]}"


_LOADED: dict[str, RowModule] = {}
"""The modules that this process has imported by ``--import``, in order."""


def name_of(entry: str) -> str:
    """Return the name of the module that an entry means: ``rows/my_rows.py``, ``my_rows`` and
    ``my_rows@0123456789abcdef`` are of ``my_rows``."""
    name, _, _ = entry.partition("@")
    return Path(name).stem if _is_path(name) else name


def digest_in(entry: str) -> str:
    """Return the digest that an entry of a run's settings has; empty if it has none."""
    return entry.partition("@")[2]


def stamps() -> list[str]:
    """Return the modules that this process has imported by ``--import``, each with its digest."""
    return [module.stamp for module in _LOADED.values()]


def files() -> list[tuple[str, str]]:
    """Return the names and files of :func:`stamps`, for a process that this one starts."""
    return [(module.name, module.file) for module in _LOADED.values()]


def load_all(modules: Iterable[tuple[str, str]]) -> None:
    """Import modules by name and file, as the process that started this one has them."""
    for name, file in modules:
        load(name, file)


def load(entry: str, file: StrPath | None = None) -> RowModule:
    """Import the module that a user named, once.

    Args:
        entry: a module's name, or the path of a file; see :func:`name_of`.
        file: where the module lies; None: it is looked up.

    Raises:
        ValueError: it is not there, or in two places, its name is taken, or its own code fails.
    """
    name = name_of(entry)
    if name in _LOADED:
        return _LOADED[name]
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        raise ValueError(f"--import {entry}: {name!r} is no name of a module; rename the file")
    top, _, inner = name.partition(".")
    path = _file_of(entry, top) if file is None else _top_file(Path(file), inner)
    if path is not None:
        _execute(top, path.resolve(), entry)
    return _registered(name, _imported(name, entry))


def require(entry: str, setting: str) -> RowModule:
    """Return the module that a run's settings name, which must be imported already: settings may
    come from anybody, and never import.

    Raises:
        ValueError: it is not.
    """
    name = name_of(entry)
    if name in _LOADED:
        return _LOADED[name]
    if getattr(sys.modules.get(name), "__file__", None):
        return _registered(name, sys.modules[name])
    raise ValueError(
        f"{setting} has {name!r}, whose code is not run because a file asks for it: add --import"
        f" {name}, or the path of the module's file, if you trust it (in Python, import it first)"
    )


def _registered(name: str, module: ModuleType) -> RowModule:
    """Return the facts of a module that is imported, which is remembered as one with rows."""
    file = Path(str(module.__file__)).resolve()
    _LOADED[name] = RowModule(name, os.fspath(file), digest_of(file))
    return _LOADED[name]


def digest_of(file: Path) -> str:
    """Return the sha256 of a module's source, in hexadecimal digits."""
    sources = [file]
    if file.name == "__init__.py":
        sources = sorted(file.parent.rglob("*.py"))
    digest = hashlib.sha256()
    for source in sources:
        content = source.read_bytes()
        digest.update(f"{source.relative_to(file.parent)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _is_path(name: str) -> bool:
    return name.endswith(".py") or os.sep in name


def _top_file(file: Path, inner: str) -> Path | None:
    """Return the file of the package that a module ``top.inner`` lies in, or of ``top`` itself
    where ``inner`` is empty; None: Python's import finds it."""
    depth = len(inner.split(".")) if inner else 0
    for _ in range(depth):
        file = (file.parent if file.name == "__init__.py" else file).parent / "__init__.py"
    top = file.parent.name if file.name == "__init__.py" else file.stem
    return None if _same(file, _installed_file(top)) else file


def _file_of(entry: str, top: str) -> Path | None:
    """Return the file of a module in the working folder, or where the entry's path says; None:
    Python's import finds it.

    Raises:
        ValueError: there is none, or there are two.
    """
    name = entry.partition("@")[0]
    if _is_path(name):
        path = Path(name).expanduser()
        if path.is_dir():
            path /= "__init__.py"
        if not path.is_file():
            raise ValueError(f"--import {entry}: there is no file {path}")
        return path
    candidates = [Path(f"{top}.py"), Path(top, "__init__.py")]
    local = next((path for path in candidates if path.is_file()), None)
    installed = _installed_file(top)
    if local is None and not installed:
        raise ValueError(
            f"--import {entry}: there is no module {top!r}, neither {candidates[0]} or {top}/ in"
            f" the working folder ({Path.cwd()}) nor an installed one; give the path of a file, or"
            " install it"
        )
    if local is not None and installed and not _same(local, installed):
        raise ValueError(
            f"--import {entry}: {top!r} is both {local} in the working folder and {installed};"
            f" write --import ./{local} for the first, or rename it"
        )
    return local


def _installed_file(top: str) -> str:
    """Return the file of a module that Python's import finds, or the word for one without; empty
    if there is none."""
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return "a module of Python's own"
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a module without a spec, such as __main__
        return ""
    return "" if spec is None else spec.origin or ""


def _same(file: Path, other: str) -> bool:
    return os.path.exists(other) and os.path.samefile(file, other)


def _execute(name: str, file: Path, entry: str) -> None:
    """Run a file as the module ``name``, unless it is imported already. Its source is read here: a
    compiled file in ``__pycache__`` may be another's.

    Raises:
        ValueError: the name is another module's, or the code fails.
    """
    current = sys.modules.get(name)
    if current is not None:
        if _same(file, getattr(current, "__file__", None) or ""):
            return
        raise ValueError(
            f"--import {entry}: the name {name!r} is taken by"
            f" {getattr(current, '__file__', None) or 'a module of Python itself'}; rename {file}"
        )
    module = ModuleType(name)
    module.__file__ = os.fspath(file)
    module.__spec__ = ModuleSpec(name, None, origin=module.__file__)
    if file.name == "__init__.py":
        module.__path__ = [os.fspath(file.parent)]
        module.__spec__.submodule_search_locations = module.__path__
    sys.modules[name] = module
    try:
        exec(compile(file.read_bytes(), file, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"--import {entry}: {_said(error, file)}") from error


def _imported(name: str, entry: str) -> ModuleType:
    """Return a module by Python's own import.

    Raises:
        ValueError: it has no file, or it fails.
    """
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        file = Path(getattr(sys.modules.get(name.partition(".")[0]), "__file__", None) or name)
        raise ValueError(f"--import {entry}: {_said(error, file)}") from error
    if not getattr(module, "__file__", None):
        raise ValueError(f"--import {entry}: {name} has no file: name one of its modules")
    return module


def _said(error: BaseException, file: Path) -> str:
    """Return an error with the line of the module that it comes from."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == os.fspath(file)
    ]
    line = lines[-1] if lines else getattr(error, "lineno", None)
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{file}{'' if line is None else f':{line}'} cannot be imported: {kind}{error}"


def load_installed() -> None:
    """Import the modules that installed packages name for :data:`GROUP`. One that fails is one line
    of the log: it may be none of this user's doing, and no command should end for it."""
    from importlib.metadata import entry_points  # with its own imports, 50 ms of a processor

    points = entry_points(group=GROUP)
    if not any(point.module.partition(".")[0] == PACKAGE for point in points):
        log.warning(
            "note: what is installed of %s is older than its source, and lacks rows of its own (zo."
            "noise: mezo, elastic): install it again (pip install -e .)",
            PACKAGE,
        )
    for point in points:
        try:
            point.load()
        except Exception as error:
            package = point.module if point.dist is None else point.dist.name
            log.warning(
                "note: the rows of the package %s (%s) cannot be imported: %s: %s",
                *(package, point.value, type(error).__name__, error),
            )


# ---- what a user allowed -------------------------------------------------------------------------


def _record(folder: StrPath) -> str:
    """Return the name of the entry that the cache has for a run's folder."""
    return f"imports/{cache.key(os.fsencode(os.path.realpath(folder)))}"


def remember(folder: StrPath) -> None:
    """Keep for a run's folder which modules its user allowed. The entry lies in this user's cache
    folder, under the path of the run's: a folder that somebody hands over brings none."""
    record = _record(folder)
    if not _LOADED and not cache.file_of(record).exists():
        return
    modules = {module.name: [module.file, module.digest] for module in _LOADED.values()}
    with suppress(OSError):
        cache.file_of(record).parent.mkdir(parents=True, exist_ok=True)
    cache.write_sealed(record, {"folder": os.path.realpath(folder), "modules": modules})


def load_allowed(folder: StrPath, entry: str) -> None:
    """Import a module that this user allowed for a run's folder, where it is the same still; do
    nothing where it was never allowed.

    Raises:
        ValueError: it has changed since, or others may change it.
    """
    name = name_of(entry)
    if name in _LOADED or name not in (modules := _allowed(folder)):
        return
    file, digest = modules[name]
    again = f"--import {name} allows it again, if you trust it"
    if not os.path.isfile(file):
        raise ValueError(f"{name} was imported from {file}, which is not there: {again}")
    if place := exposed(Path(file)):
        raise ValueError(f"{name} lies in {file}, and others may change {place}: {again}")
    now = digest_of(Path(file))
    if now != digest:
        raise ValueError(
            f"{file} has changed since it was imported for the run in {os.fspath(folder)}"
            f" ({digest[:DIGITS]}, now {now[:DIGITS]}): {again}"
        )
    load(name, file)


def _allowed(folder: StrPath) -> dict[str, tuple[str, str]]:
    """Return the modules that this user allowed for a run's folder: file and digest by name."""

    def parse(record: dict[str, Any]) -> dict[str, tuple[str, str]]:
        if record["folder"] != os.path.realpath(folder):
            raise ValueError("the entry is another folder's")
        return {
            name: (str(file), str(digest)) for name, (file, digest) in record["modules"].items()
        }

    record = _record(folder)
    try:
        if exposed(cache.file_of(record)):
            return {}
    except OSError:  # nothing was allowed
        return {}
    return cache.read_sealed(record, parse) or {}
