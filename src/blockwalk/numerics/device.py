"""The device that blocks compute on, a CPU or one accelerator of any kind that torch knows, and the
host memory beside it.

Streams and events are torch's own for all accelerators. Host memory that copies need not wait for
is torch's pinned memory, or, on a device with a row in :data:`REGISTRARS`, mapped and registered:
torch rounds each pinned allocation up to a power of two, which for a model of 350 GB takes 200 GB
more."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from typing import TypeVar

import torch
from torch import Tensor

from blockwalk.system.card import Card

PIECE = 32 << 30
"""Bytes of host memory that are registered at once, at most: drivers refuse 512 GiB in small
pages."""


BY_NAME = {
    "mps": "Apple's GPU computes without float64 and without our kernels, and nothing was tried on"
    " it"
}
"""Types of accelerators that are taken only where somebody names them, with the reason."""


_stands_for: ContextVar[str] = ContextVar("stands for", default="cpu")
"""The device that a processor's tensors without data stand for."""

R = TypeVar("R")


def standing_for(device: str, work: Callable[[], R]) -> R:
    """Return the answer of ``work``, in which a processor's tensors without data are computed with
    as those of ``device`` are."""
    context = copy_context()
    context.run(_stands_for.set, device)
    return context.run(work)


def of_processor(tensor: Tensor) -> bool:
    """Return whether a tensor is a processor's, and stands for no other device's."""
    return tensor.device.type == "cpu" == _stands_for.get()


def type_of(tensor: Tensor) -> str:
    """Return torch's name of the type of a tensor's device, or of the one that it stands for."""
    device = tensor.device.type
    return _stands_for.get() if device == "cpu" else device


def chosen(named: str | torch.device | None = None) -> torch.device:
    """Return the device that is named, or else ``BLOCKWALK_DEVICE``, or else torch's accelerator
    where there is one, or else the CPU. A device of :data:`BY_NAME` is never taken unnamed.

    An accelerator always has its number: without one it would be another device in each thread.

    Raises:
        ValueError: torch has no such device here.
    """
    requested = named or os.environ.get("BLOCKWALK_DEVICE")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    unnamed = "cpu" if accelerator is None or accelerator.type in BY_NAME else accelerator
    device = torch.device(requested or unnamed)
    if is_processor(device):
        return torch.device(device.type)
    count = 0
    if accelerator is not None and accelerator.type == device.type:
        count = torch.accelerator.device_count()
    index = device.index or 0
    if device.index is None and count:
        index = torch.accelerator.current_device_index()
    if index >= count:
        raise ValueError(
            f"device {requested} is not here: torch {torch.__version__} finds {count} of its type;"
            " set --device or BLOCKWALK_DEVICE to one that is, or to cpu"
        )
    return torch.device(device.type, index)


def is_cpu(device: torch.device) -> bool:
    """Return whether a device is the processor."""
    return device.type == "cpu"


def is_processor(device: torch.device) -> bool:
    """Return whether a device is the processor, or torch's meta device: a processor on paper, whose
    tensors have sizes and no bytes."""
    return device.type in ("cpu", "meta")


def described(device: torch.device) -> str:
    """Return a run's device in words: an accelerator with its model, a processor with the reason
    why no accelerator was taken."""
    if device.type in BY_NAME:
        return f"{device}; {BY_NAME[device.type]}"
    if not is_cpu(device):
        untried = "; ROCm: our kernels compile for it, and nothing was tried on it"
        name = ", ".join(filter(None, (str(device), model_of(device))))
        return name + (untried if torch.version.hip else "")
    if os.environ.get("BLOCKWALK_DEVICE"):  # by its user's wish
        return str(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in BY_NAME:
        override = f"--device {accelerator.type} takes it all the same"
        return f"{device}; {BY_NAME[accelerator.type]}: {override}"
    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    built = next((kind for kind, version in kinds.items() if version), None)
    if accelerator is None and built is not None:
        container = "; docker run needs --gpus all" if built == "CUDA" else ""
        found_none = f"torch {torch.__version__} is built for {built} and sees no such device"
        return f"{device}; {found_none}{container}"
    return str(device)


def model_of(device: torch.device) -> str:
    """Return the name of an accelerator's model; empty where torch's module of its type does not
    tell it."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return "" if name is None else str(name(device))


def left_on(device: torch.device) -> int:
    """Return bytes of an accelerator that a step's tensors may take: what the driver's context,
    loaded kernels, communicators and other processes leave; 0 on a CPU, and where torch does not
    tell it."""
    if is_cpu(device):
        return 0
    try:
        free, _ = torch.accelerator.get_memory_info(device)
        return int(free + torch.accelerator.memory_reserved(device))
    except (RuntimeError, NotImplementedError):
        return 0


def card_of(device: torch.device) -> Card:
    """Return the facts of an accelerator that torch tells, as plain values; of a processor none."""
    if is_cpu(device):
        return Card()
    free = left_on(device)
    _, memory = torch.accelerator.get_memory_info(device) if free else (0, 0)
    bfloat16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return Card(model_of(device), memory, free, bfloat16)


def peak_on(device: torch.device) -> int:
    """Return the allocator's peak on an accelerator, in bytes; 0 on a CPU, and where torch does not
    tell it."""
    if is_cpu(device):
        return 0
    try:
        return int(torch.accelerator.max_memory_allocated(device))
    except (RuntimeError, NotImplementedError, AttributeError):
        return 0


def recorded(device: torch.device, *, timing: bool = False) -> torch.Event:
    """Return an event at the end of what the calling thread has issued on its current stream.

    Args:
        timing: has it tell seconds, where the device's events can.
    """
    try:
        event = torch.Event(device, enable_timing=timing)
    except (RuntimeError, NotImplementedError):
        if not timing:
            raise
        return recorded(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def issued(device: torch.device) -> torch.Event | None:
    """Return an event at the end of what the calling thread has issued on an accelerator's current
    stream; None on a processor, which has done it by now."""
    return None if is_cpu(device) else recorded(device)


def wait_for(device: torch.device) -> None:
    """Wait until an accelerator has done all that was issued; a processor has."""
    if not is_cpu(device):
        torch.accelerator.synchronize(device)


STAGING_BYTES = 1 << 20
"""Bytes of a :class:`Staging` at first: the tables and batches of several steps."""


class Staging:
    """Pinned memory through which the host's tensors go to a device, for one thread and stream.

    Torch pins memory for each tensor, which takes a call of the driver whenever no block of its own
    is free: a step sends some hundred tables. This memory is made once. Its halves take turns, and
    a half is written again when the copies from it are done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._half_bytes = 0
        self._memory_P = torch.empty(0, dtype=torch.uint8)
        self._left: list[torch.Event | None] = [None, None]
        """The ends of the copies from each half."""
        self._half = 0
        self._next = 0

    def sent(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host's on the device, by a copy that nobody waits for."""
        start = self._place(tensor.nbytes)
        staged_P = self._memory_P[start : start + tensor.nbytes]
        staged = staged_P.view(tensor.dtype).view(tensor.shape)
        return staged.copy_(tensor).to(self._device, non_blocking=True)

    def _place(self, nbytes: int) -> int:
        """Return the first byte of a place for so many."""
        if nbytes > self._half_bytes:
            size = max(STAGING_BYTES, 1 << (4 * nbytes - 1).bit_length())
            # torch's allocator of pinned memory keeps the old one until its copies are done
            self._memory_P = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._half_bytes = size // 2
            self._left = [None, None]
            self._half = self._next = 0
        if self._next + nbytes > (self._half + 1) * self._half_bytes:
            self._left[self._half] = recorded(self._device)
            self._half = 1 - self._half
            self._next = self._half * self._half_bytes
            event = self._left[self._half]
            if event is not None:
                event.synchronize()
        start = self._next
        self._next = start + -(-nbytes // 64) * 64
        return start


class _Stagings(threading.local):
    def __init__(self) -> None:
        self.by_stream: dict[tuple[torch.device, int], Staging] = {}


_STAGINGS = _Stagings()


def elapsed(start: torch.Event, end: torch.Event) -> float | None:
    """Return seconds between two events; None on a device whose events tell none."""
    try:
        return float(start.elapsed_time(end)) / 1e3
    except (RuntimeError, NotImplementedError):
        return None


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host's on the device, by a copy that nobody waits for."""
    if is_processor(device) or not is_cpu(tensor.device) or not tensor.numel():
        return tensor.to(device)
    if tensor.is_pinned():  # the device may be about to write it: the host must not read it
        return tensor.to(device, non_blocking=True)
    key = (device, torch.accelerator.current_stream(device).stream_id)
    staging = _STAGINGS.by_stream.get(key)
    if staging is None:
        staging = _STAGINGS.by_stream[key] = Staging(device)
    return staging.sent(tensor)


# ---- host memory ---------------------------------------------------------------------------------


Registrar = tuple[Callable[[int, int], object], Callable[[int], object]]
"""Functions that register pages (address, bytes) with a driver, and that let go of (address)."""


def _cuda() -> Registrar:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(address: int, nbytes: int) -> None:
        if code := int(runtime.cudaHostRegister(address, nbytes, 0)):
            raise RuntimeError(
                f"cudaHostRegister of {nbytes / 1e9:.1f} GB of host memory failed with code {code}"
            )

    return register, runtime.cudaHostUnregister


REGISTRARS: dict[str, Callable[[], Registrar]] = {"cuda": _cuda}
"""Registrars by type of device."""


def host_buffers(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return zeroed buffers (CPU uint8) of these sizes in bytes, each at the beginning of a page
    where pages are registered, of a cache line elsewhere, which copies to and from ``device`` need
    not wait for. Their memory goes with the last of them."""
    buffers: list[Tensor] = []
    grain = mmap.PAGESIZE if device.type in REGISTRARS else 64
    rounded = [-(-size // grain) * grain for size in sizes]
    for count in pieces(rounded):
        begin = len(buffers)
        piece_P = _piece(sum(rounded[begin : begin + count]), device)
        start = 0
        for number in range(begin, begin + count):
            buffers.append(piece_P[start : start + sizes[number]])
            start += rounded[number]
    return buffers


def pieces(sizes: Sequence[int], most: int = PIECE) -> list[int]:
    """Return the numbers of consecutive buffers that share a piece of at most ``most`` bytes; a
    larger buffer has its own."""
    counts: list[int] = []
    room = 0
    for size in sizes:
        if not counts or size > room:
            counts.append(0)
            room = most
        counts[-1] += 1
        room -= size
    return counts


def _piece(nbytes: int, device: torch.device) -> Tensor:
    registrar = REGISTRARS.get(device.type)
    if not nbytes or registrar is None:
        place = device if device.type == "meta" else torch.device("cpu")
        return torch.zeros(
            nbytes, dtype=torch.uint8, device=place, pin_memory=not is_processor(device)
        )
    pages = (ctypes.c_char * nbytes).from_buffer(mmap.mmap(-1, nbytes))
    register, let_go = registrar()
    register(ctypes.addressof(pages), nbytes)
    # not at exit: the process's end takes the driver's with it
    weakref.finalize(pages, let_go, ctypes.addressof(pages)).atexit = False
    return torch.frombuffer(pages, dtype=torch.uint8)


def require_usual_torch() -> None:
    """Raise ValueError where torch makes tensors that no gradient, or no file, may read: in
    inference mode, or by another default than float32 on the processor."""
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "torch.inference_mode is on, and its tensors take no gradient: leave it"
            " (torch.no_grad is fine)"
        )
    if torch.get_default_dtype() != torch.float32:
        raise ValueError(
            f"torch's default dtype is {torch.get_default_dtype()}, and a walk makes tensors in"
            " torch.float32: call torch.set_default_dtype(torch.float32), and choose compute_dtype"
        )
    if torch.get_default_device().type != "cpu":
        raise ValueError(
            f"torch's default device is {torch.get_default_device()}, and a walk makes tensors on"
            " the cpu: call torch.set_default_device(None), and choose Walker(device=...)"
        )
