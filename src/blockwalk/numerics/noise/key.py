"""The key of one parameter's noise, and the part of a parameter that a range of its elements stands
for."""

from __future__ import annotations

import functools
import hashlib
import struct
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

GENERATOR_VERSION = 1
"""The version of the words, the table and the key's derivation together; it stands in every ledger,
and in every key."""

NoiseKind = Literal["gaussian", "rademacher"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Key(Protocol):
    """Anything that has the two words of a key."""

    @property
    def signed(self) -> tuple[int, int]: ...

    def philox_key(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """The values that one parameter's noise depends on.

    ``name`` is the canonical parameter name. ``domain`` keeps uses apart that share the rest:
    ``"noise"`` for perturbations, ``"rounding"`` for stochastic rounding. ``seed`` is any integer
    from 0 to 2^64 − 1; 0 is a seed."""

    seed: int
    step: int
    query: int
    name: str
    domain: str = "noise"

    def __post_init__(self) -> None:
        if 0 <= self.seed < 2**64 and 0 <= self.step < 2**64 and 0 <= self.query < 2**64:
            return
        for field in ("seed", "step", "query"):
            value = getattr(self, field)
            if not 0 <= value < 2**64:
                raise ValueError(f"{field} is {value}; choose a {field} from 0 to 2^64 − 1")

    def philox_key(self) -> tuple[int, int]:
        """Return the two 64-bit words of the key: BLAKE2b of 128 bits, personalised by
        "blockwalk-noise" and the version, of seed, step and query (64-bit little-endian each),
        domain, a zero byte and name (UTF-8), read little-endian."""
        digest = _digest(self.seed, self.step, self.query, self.domain, self.name)
        return struct.unpack("<QQ", digest)

    @property
    def signed(self) -> tuple[int, int]:
        """The words as an operator takes them: as signed integers."""
        return _signed(self.seed, self.step, self.query, self.domain, self.name)


def signed(word: int) -> int:
    """Return a 64-bit word as a signed integer of the same bits."""
    return word - 2**64 if word >= 2**63 else word


def derive_seed(*parts: int | str | bytes) -> int:
    """Return a seed from 0 to 2^63 − 1 out of any values, for generators that are not ours (a
    unit's dropout, a data order).

    The BLAKE2b hash of the parts, each with its type and length, so that ("ab", "c") and ("a",
    "bc") differ."""
    digest = hashlib.blake2b(digest_size=8, person=b"blockwalk-seed")
    for part in parts:
        tag = b"i" if isinstance(part, int) else b"s" if isinstance(part, str) else b"b"
        body = part if isinstance(part, bytes) else str(part).encode()
        digest.update(tag + struct.pack("<Q", len(body)) + body)
    return int.from_bytes(digest.digest(), "little") >> 1


class Window(NamedTuple):
    """The place of a tensor's memory in its parameter: ``rows`` × ``width`` elements, in elements
    throughout."""

    rows: int
    width: int
    pitch: int


class Write(NamedTuple):
    """One write of noise, its arguments checked: ``out`` = cast(float32(source) + scale·z)."""

    source: Tensor | None
    """None: zeros."""
    out: Tensor
    key: Key | None
    """None: no noise."""
    start: int
    """The element of the parameter at which the window begins."""
    scale: float
    kind: NoiseKind | None
    rounding: Key | None
    """The draws of stochastic rounding; None: to nearest even."""
    place: Window
    rows: Tensor | None
    """The window's rows in the parameter, int64 [rows], where they do not follow each other."""


def window(tensor: Tensor, other: Tensor, pitch: int | None, rows: Tensor | None) -> Window:
    """Return the window of two tensors of one shape; asserts that the kernels can walk it."""
    assert (tensor.shape, tensor.device) == (other.shape, other.device), "source and out must agree"
    if not {tensor.dtype, other.dtype} <= {*FLOATS}:
        raise ValueError(
            f"noise is added to float32, bfloat16 and float16 tensors, not {tensor.dtype} and"
            f" {other.dtype}"
        )
    contiguous = tensor.is_contiguous() and other.is_contiguous()
    if pitch is None:
        assert rows is None, "rows needs pitch: the length of the parameter's rows"
        assert contiguous, (
            "without pitch the tensor must be contiguous: pass the length of the parameter's rows"
        )
        return Window(1, tensor.numel(), 0)
    height, width = tensor.shape
    assert width <= 1 or tensor.stride(1) == other.stride(1) == 1, (
        "pitch needs a 2-D tensor with contiguous rows"
    )
    if rows is not None:
        assert (rows.shape, rows.dtype, rows.device) == ((height,), torch.int64, tensor.device), (
            "not int64 indices"
        )
    elif pitch == width and contiguous:
        return Window(1, height * width, 0)
    return Window(height, width, pitch)


_PERSON = f"blockwalk-noise{GENERATOR_VERSION}".encode()


@functools.lru_cache(maxsize=1 << 12)
def _digest(seed: int, step: int, query: int, domain: str, name: str) -> bytes:
    message = struct.pack("<QQQ", seed, step, query) + f"{domain}\0{name}".encode()
    return hashlib.blake2b(message, digest_size=16, person=_PERSON).digest()


@functools.lru_cache(maxsize=1 << 12)
def _signed(seed: int, step: int, query: int, domain: str, name: str) -> tuple[int, int]:
    return struct.unpack("<qq", _digest(seed, step, query, domain, name))
