"""The simulated accelerator: ``simulated.cpp`` built once, and torch's module ``torch.sim`` over
it.

Registering ``sim`` as a process's accelerator cannot be undone: :mod:`tests.accelerator.conftest`
gives each test a process."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from blockwalk.system import cache

SOURCE = Path(__file__).with_name("simulated.cpp")
FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC", "-w")
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch")
COMPILE_SECONDS = 900
DEVICES = 4


def compiler() -> str | None:
    """The C++ compiler's path, or None."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def build() -> Path:
    """The library, compiled for this torch, in a minute, unless the cache has it. RuntimeError has
    the compiler's words."""
    command = [compiler() or "c++", *FLAGS, *(f"-I{path}" for path in include_paths())]
    command += [f"-L{path}" for path in library_paths()]
    facts = b"\0".join(
        [SOURCE.read_bytes(), torch.__version__.encode(), " ".join(command).encode()]
    )
    library = (
        cache.folder()
        / "accelerator"
        / f"sim-{hashlib.blake2s(facts, digest_size=16).hexdigest()}.so"
    )
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open(
        "w"
    ) as lock:  # one of several workers builds, the others wait
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = library.with_suffix(".tmp")
            command += [str(SOURCE), "-o", str(partial), *LIBRARIES]
            compiled = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
            )
            if compiled.returncode:
                raise RuntimeError(compiled.stderr[:4000])
            partial.replace(library)
    return library


@dataclass(frozen=True)
class Counts:
    """Counts since :meth:`Simulated.start_counting`: operators queued, waits of the host by what
    waited, pageable copies, allocations of pinned memory, and segments that the device's allocator
    took anew."""

    ops: int
    waits: dict[str, int]
    pageable: int
    pinned: int
    segments: int

    @property
    def here(self) -> int:
        """Waits of the thread that counts, which issues the steps."""
        return sum(times for why, times in self.waits.items() if not why.startswith("elsewhere"))


class Simulated:
    """The four devices ``sim:0`` to ``sim:3``, of the process that first asks for the library."""

    @property
    def driver(self) -> ctypes.CDLL:
        return load()

    def order(self, seed: int) -> None:
        """From here on, tasks run in the order that this seed draws. A multiple of 12 is the
        laziest: a task runs when somebody waits for it, and for nothing else."""
        self.driver.sim_seed(seed)

    def start_counting(self) -> None:
        self.driver.sim_reset_counts()

    def counts(self) -> Counts:
        waits = [
            part.partition("=") for part in self.driver.sim_waits().decode().split(";") if part
        ]
        waits_by_cause = {why: int(times) for why, _, times in waits}
        ops, _, *others = (self.driver.sim_count(which) for which in range(5))
        return Counts(ops, waits_by_cause, *others)

    def waiting(self) -> int:
        """Tasks that have not run."""
        return int(self.driver.sim_waiting())


@functools.cache
def load() -> ctypes.CDLL:
    """Register the devices with torch, in the laziest order."""
    import torch._meta_registrations  # shapes of operators that have no kernel for them in C++

    library = ctypes.CDLL(str(build()))
    library.sim_count.restype = library.sim_waiting.restype = ctypes.c_int64
    library.sim_waits.restype = ctypes.c_char_p
    library.sim_seed.argtypes = [ctypes.c_uint64]
    library.sim_manual_seed.argtypes = [ctypes.c_uint64, ctypes.c_int]
    library.sim_rng_state.argtypes = library.sim_set_rng_state.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    library.sim_rng_state.restype = ctypes.c_size_t
    library.sim_pin.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.sim_unpin.argtypes = [ctypes.c_void_p]
    torch.utils.rename_privateuse1_backend("sim")
    library.sim_start()
    torch._register_device_module("sim", module_of(library))
    torch.utils.generate_methods_for_privateuse1_backend()
    library.sim_available(True)
    library.sim_seed(0)
    return library


def module_of(library: ctypes.CDLL) -> types.ModuleType:
    """``torch.sim``, with what torch itself and ``torch.get_device_module`` ask of such a
    module."""
    module = types.ModuleType("torch.sim")

    def manual_seed(seed: int, index: int = -1) -> None:
        library.sim_manual_seed(seed % 2**64, index)

    def number(device: torch.device | str | int) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        return int(library.sim_device()) if index is None else index

    def rng_state(device: torch.device | str | int = "sim") -> torch.Tensor:
        state = torch.empty(library.sim_rng_state(number(device), None), dtype=torch.uint8)
        library.sim_rng_state(number(device), state.data_ptr())
        return state

    def set_rng_state(state: torch.Tensor, device: torch.device | str | int = "sim") -> None:
        library.sim_set_rng_state(number(device), state.data_ptr())

    facts = {
        "is_available": lambda: bool(library.sim_is_available()),
        "is_initialized": lambda: True,  # torch asks from 2.14 on
        "device_count": lambda: DEVICES,
        "current_device": library.sim_device,
        "set_device": torch.accelerator.set_device_index,
        "synchronize": torch.accelerator.synchronize,
        "manual_seed": manual_seed,
        "manual_seed_all": lambda seed: [manual_seed(seed, index) for index in range(DEVICES)],
        "get_rng_state": rng_state,
        "set_rng_state": set_rng_state,
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "Stream": torch.Stream,
        "Event": torch.Event,
    }
    for name, value in facts.items():
        setattr(module, name, value)
    sys.modules["torch.sim"] = module
    return module
