"""Small C kernels, compiled on this machine when they are first used.

:func:`load` compiles ``<name>.c`` of this folder with the system's C compiler, for this processor,
into a cache folder and opens it with ctypes. Where there is no compiler, a wheel for the platform
has brought libraries for a few processors (:data:`LEVELS`); without these as well (or with
``BLOCKWALK_NATIVE=0``) :func:`load` answers None and the caller takes its torch or numpy path,
which gives the same bits. Fused multiply-add is off (``-ffp-contract=off``): C rounds where torch
does.

The kernels start no threads: they share their work out over torch's own (:func:`team`). ctypes
releases the interpreter's lock during a call.

A library runs as whoever opens it: one that another user could have put into the cache, or changed
there, is not opened, and the kernel is compiled into a folder of this process alone. So it is if
the cache cannot be written. The name of a library has the digest of its bytes: one in which a bit
has flipped is compiled again.

Environment: ``BLOCKWALK_NATIVE=0`` never compiles or loads; ``CC`` names the compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import uuid
import warnings
from pathlib import Path

from blockwalk.system import cache
from blockwalk.system.ownership import exposed, is_private

FLAGS = ("-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-ffp-contract=off")
"""No fast-math anywhere: the kernels promise bits."""

LEVELS = {
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
    "x86-64-v3": "avx2 bmi1 bmi2 f16c fma movbe",
    "armv8-a": "asimd",
}
"""Processors, as ``-march`` names them, that wheels bring ``<name>-<level>.so`` for, and what the
system says of one that is such or better; the best first."""

log = logging.getLogger(__name__)

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_LONG = ctypes.c_int64
_WORD = ctypes.c_uint64
ARGUMENTS = {
    "blockwalk_decode": (
        *(_INT, _INT, _INT),  # codec, half a group, dtype
        *(_POINTER, _POINTER, _LONG, _LONG),  # scales, codes, bytes of a row, groups
        *(_POINTER, _LONG, _LONG, _LONG, _LONG),  # row index, first row, rows, first column, last
        *(_POINTER, _POINTER, _INT),  # out, the team, its threads
    ),
    "blockwalk_encode": (
        *(_INT, _POINTER, _POINTER, _POINTER, _POINTER),  # codec, values, draws, scales, codes
        *(_LONG, _LONG, _POINTER, _INT),  # rows, columns, the team, its threads
    ),
    "blockwalk_encode_groups": (
        *(_INT, _INT, _INT, _POINTER, _POINTER),  # codec, elements of a group, dtype, values, table
        *(_POINTER, _LONG, _LONG),  # scales, bytes of a row, of a group
        *(_POINTER, _LONG, _LONG),  # codes, bytes of a row, of a group
        *(_LONG, _LONG, _POINTER, _INT),  # rows, columns, the team, its threads
    ),
    "blockwalk_largest": (_INT, _POINTER, _LONG, _POINTER),  # dtype, values, their number, out
    "blockwalk_noise": (
        *(_POINTER, _INT, _LONG),  # source
        *(_POINTER, _INT, _LONG),  # out
        *(_LONG, _LONG, _LONG, _LONG, _POINTER),  # rows, width, start, pitch, row index
        *(_INT, _WORD, _WORD, ctypes.c_float),  # kind, key, scale
        *(_INT, _WORD, _WORD),  # rounding
        *(_POINTER, _POINTER),  # coefficients, table
        *(_POINTER, _INT),  # the team, its threads
    ),
    "blockwalk_noise_runs": (
        *(_POINTER, _LONG, _INT),  # runs, their number, kind
        *(_POINTER, _POINTER),  # coefficients, table
        *(_POINTER, _INT, _LONG),  # the team, its threads, elements for each
    ),
    "blockwalk_add_products": (_POINTER, _LONG, _LONG, _LONG, _LONG, *(_POINTER,) * 4, _INT),
    "blockwalk_attention": (
        *(_POINTER, _POINTER, _POINTER, _LONG),  # tensors, strides, pieces, their number
        *(_LONG, _LONG, _LONG, _LONG),  # heads, those that share keys, features, tokens
        *(_POINTER, _POINTER, _LONG),  # log-sums, memory for tiles, floats of it for a thread
        *(ctypes.c_float, _INT, _POINTER, _INT),  # scale, backward, the team, its threads
    ),
    "blockwalk_product": (
        *(_POINTER, _LONG, _INT),  # a, the distance of its rows, whether it lies turned
        *(_POINTER, _LONG, _INT, _POINTER),  # b, or what it is decoded of
        *(_POINTER, _LONG, _POINTER, _LONG, _INT, _LONG),  # two thin matrices, and their inner side
        *(_POINTER, _POINTER, _LONG),  # bias, out
        *(_LONG, _LONG, _LONG, _LONG),  # rows, summands, columns, rows of a task
        *(_POINTER, ctypes.c_float, _INT, _POINTER, _INT),  # memory, factor, adds, team, threads
    ),
    "blockwalk_chain": (
        *(_INT, *(_POINTER,) * 6),  # kind; two inputs, a gradient, two outs, a number a row
        *(_LONG, _LONG, ctypes.c_float, _POINTER, _INT),  # rows, width, eps, the team, its threads
    ),
    "blockwalk_rotary": (
        *(_POINTER,) * 5,  # x, cosine, sine, out, strides
        *(_LONG,) * 4,  # rows, heads, tokens, features
        *(_INT, _POINTER, _INT),  # backward, the team, its threads
    ),
    "blockwalk_name_faults": (_POINTER, _POINTER, _POINTER),  # two texts, steps done
    "blockwalk_draws": (_POINTER, _INT, _LONG, _LONG, _WORD, _WORD, _POINTER, _INT),
}
"""The arguments of each function of the kernels; none answers anything."""

_COMPILE_SECONDS = 120
_lock = threading.Lock()
_loaded: dict[str, ctypes.CDLL | None] = {}


def load(name: str) -> ctypes.CDLL | None:
    """Return the compiled library of ``<name>.c``, or None where it cannot be had; the caller then
    takes its other path.

    Compiles at most once per machine and source, and tries at most once per process. A compiler
    that fails is reported once, as a ``RuntimeWarning``."""
    if os.environ.get("BLOCKWALK_NATIVE", "1") == "0":
        return None
    if name in _loaded:  # a step asks hundreds of times
        return _loaded[name]
    with _lock:
        if name not in _loaded:
            try:
                library = _loaded[name] = _build(name)
                for function, types in ARGUMENTS.items():
                    if hasattr(library, function):
                        getattr(library, function).argtypes = types
                        getattr(library, function).restype = None
            except (OSError, subprocess.SubprocessError) as error:
                detail = getattr(error, "stderr", None) or str(error)
                warnings.warn(
                    f"the native kernel {name!r} could not be built, a slower path with the same"
                    " results is used "
                    f"(BLOCKWALK_CACHE moves the cache folder, BLOCKWALK_NATIVE=0 silences this): "
                    f"{detail.strip()[:800]}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                _loaded[name] = None
        return _loaded[name]


@functools.cache
def team() -> int | None:
    """GOMP_parallel of the OpenMP runtime that torch runs its own operators on, or None where it
    has another.

    A kernel works for tens or hundreds of microseconds between two of torch's. Threads of its own
    would take as long to wake, and compete with torch's, which spin for a while after each
    operator: the same team does both."""
    import torch

    try:
        function = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def _build(name: str) -> ctypes.CDLL | None:
    """Compile ``name`` unless the cache has it, and open it; without a compiler what a wheel
    brought, else None."""
    source = Path(__file__).with_name(f"{name}.c")
    compiler = _compiler()
    if compiler is None:
        flags = set(processor().split())
        levels = [level for level, needs in LEVELS.items() if flags.issuperset(needs.split())]
        brought = (source.with_name(f"{name}-{level}.so") for level in levels)
        if library_of_wheel := next(filter(Path.exists, brought), None):
            return ctypes.CDLL(str(library_of_wheel))
        _say_no_compiler()
        return None
    parts = (
        source.read_bytes(),
        *(header.read_bytes() for header in sorted(source.parent.glob("*.h"))),
        " ".join(FLAGS).encode(),
        processor().encode(),
        _version(compiler).encode(),
    )
    digest = hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
    stem = f"{name}-{digest}"
    try:
        return _of_cache(stem, compiler, source)
    except _ExposedError as error:
        reason = (
            f"{error} is another user's, or others may write to it. Give it to you or root,"
            " writable by its owner alone"
        )
    except OSError as error:
        reason = f"the cache folder cannot be used ({error})"
    warnings.warn(
        f"{reason}; {name!r} is compiled for this process alone, which takes seconds."
        " BLOCKWALK_CACHE moves the cache folder",
        RuntimeWarning,
        stacklevel=3,
    )
    with tempfile.TemporaryDirectory(prefix="blockwalk-") as private:
        return ctypes.CDLL(str(_compile(compiler, source, Path(private) / f"{stem}.so")))


class _ExposedError(Exception):
    """The path of a library, or of a folder around it, that another user may change."""


def _of_cache(stem: str, compiler: tuple[str, ...], source: Path) -> ctypes.CDLL:
    """Open a library of the cache, compiled if it is not there.

    Raises:
        _ExposedError: another user may have put it there, or may exchange it.
        OSError: the cache cannot be read or written.
    """
    folder = cache.folder() / "native"
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o755, exist_ok=True)
    if (place := exposed(folder)) is not None:
        raise _ExposedError(place)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # of what is open now, whatever takes the folder's name from here on
        if not is_private(os.fstat(descriptor)):
            raise _ExposedError(folder)
        library = _undamaged(folder, descriptor, stem)
        if library is None:
            scratch = _compile(compiler, source, folder / f"{stem}.{uuid.uuid4().hex[:8]}.tmp")
            library = f"{stem}-{_digest(scratch.read_bytes())}.so"
            os.replace(scratch, folder / library)
        path = f"/proc/self/fd/{descriptor}/{library}"
        # the loader knows a library by its path: this one has the digest of its bytes
        return ctypes.CDLL(path if os.path.exists(path) else str(folder / library))
    finally:
        os.close(descriptor)


def _undamaged(folder: Path, descriptor: int, stem: str) -> str | None:
    """Return the name of a compiled library in an open folder, its bytes compared with the digest
    in its name; None if there is none.

    Raises:
        _ExposedError: another user may have written it.
    """
    for name in os.listdir(descriptor):
        if not name.startswith(stem) or not name.endswith(".so"):
            continue
        flags = os.O_RDONLY | os.O_NOFOLLOW
        with open(os.open(name, flags, dir_fd=descriptor), "rb") as file:
            if not is_private(os.fstat(file.fileno())):
                raise _ExposedError(folder / name)
            if name == f"{stem}-{_digest(file.read())}.so":
                return name
    return None


def _digest(library: bytes) -> str:
    return hashlib.blake2b(library, digest_size=8).hexdigest()


@functools.cache
def _say_no_compiler() -> None:
    """Say once in a process what the want of a compiler costs."""
    log.warning(
        "no C compiler was found (cc, gcc, clang, or the one that CC names): noise and 4-bit"
        " decoding take torch's slower paths, with the same results"
    )


def _compile(compiler: tuple[str, ...], source: Path, library: Path) -> Path:
    """Compile ``source`` to ``library``, which whoever may enter its folder may read."""
    # Written beside and renamed: two processes may build at once, and a killed one must leave no
    # half library.
    handle, scratch = tempfile.mkstemp(suffix=".tmp", dir=library.parent)
    os.close(handle)
    try:
        command = [*compiler, *FLAGS, str(source), "-o", scratch, "-lm"]
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS
        )
        os.chmod(scratch, library.parent.stat().st_mode & 0o755)
        os.replace(scratch, library)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return library


def _compiler() -> tuple[str, ...] | None:
    """Return the compiler's command line: ``$CC`` (which may carry flags), else the first of cc,
    gcc and clang found."""
    candidates = [tuple(shlex.split(os.environ.get("CC", ""))), ("cc",), ("gcc",), ("clang",)]
    return next((c for c in candidates if c and shutil.which(c[0])), None)


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    """Return the compiler's own version line: a new compiler builds anew."""
    answer = subprocess.run(
        [*compiler, "--version"], check=True, capture_output=True, text=True, timeout=30
    )
    return " ".join(compiler) + answer.stdout


@functools.cache
def processor() -> str:
    """Return the processor's facts that ``-march=native`` depends on: a cache folder may be shared
    by machines of different processors."""
    text = f"{platform.system()} {platform.machine()}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # where platform.processor() starts no program of its own
        return f"{text} {platform.processor()}"
    keys = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join([text, *sorted({line for line in lines if line.startswith(keys)})])
