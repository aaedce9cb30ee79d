"""Kinds of state, where each may live, and what a model is made of, as plain values.

Nothing here imports torch at run time: planning and simulation read these values without it. Bytes
are bytes, shapes are in elements."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """A memory that state can live in, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class CodecFacts:
    """The form of one codec's elements: plain numbers of a dtype, or codes of a few bits in groups
    that share scales."""

    dtype: str | None = None
    """torch's name of the dtype, where every element is a number by itself; None keeps the
    parameter's own or has codes."""
    codes: str = "uint8"
    """The dtype that codes are stored in; codes of four bits share an element of it."""
    bits: int = 0
    """Bits of a code; 0 where elements are numbers."""
    scales: tuple[str, ...] = ()
    """The dtypes of the numbers that each group of codes is decoded with."""
    group_sizes: tuple[int, ...] = ()
    """Elements of a row that may form a group; without any, a row is one group."""
    interleaved: bool = False
    """True where a group's scales stand before its codes; else all scales of a parameter come
    first, then all codes."""
    block_bytes: int = 0
    """Bytes of a group that is one block of another tool's format, which the codec's own file takes
    apart: such a codec is read and never written. 0 elsewhere."""
    parted: bool = False
    """True where codes, scales and zero points are tensors of their own in another tool's files:
    such a codec is read and never written."""
    chosen_later: bool = False
    """True where it stands for a codec that is chosen when the model and the machine are known."""
    trainable: bool = False
    """True where a trainable parameter may be kept in these codes, rounded stochastically (zeroth
    order only)."""


_AS_IT_IS = CodecFacts()


def _blocks(bits: int, elements: int, nbytes: int) -> CodecFacts:
    return CodecFacts(bits=bits, group_sizes=(elements,), interleaved=True, block_bytes=nbytes)


class Codec(StrEnum):
    """The form in which a parameter's elements are written on its tier. ``RAW`` keeps the dtype
    that the model came in.

    A codec is a row here and, where its elements are codes, a file of its name beside
    :mod:`blockwalk.numerics.codecs.codecs`."""

    facts: CodecFacts

    def __new__(cls, value: str, facts: CodecFacts = _AS_IT_IS) -> Codec:
        member = str.__new__(cls, value)
        member._value_ = value
        member.facts = facts
        return member

    RAW = "raw", _AS_IT_IS
    AUTO = "auto", CodecFacts(chosen_later=True)
    FP32 = "fp32", CodecFacts("float32")
    BF16 = "bf16", CodecFacts("bfloat16")
    FP16 = "fp16", CodecFacts("float16")
    FP8 = "fp8", CodecFacts(codes="float8_e4m3fn", bits=8, scales=("float32",), trainable=True)
    INT8 = "int8", CodecFacts(codes="int8", bits=8, scales=("float32",), trainable=True)
    INT4 = "int4", CodecFacts(bits=4, scales=("float16",), group_sizes=(32, 64))
    INT4A = (
        "int4a",
        CodecFacts(bits=4, scales=("float16", "float16"), group_sizes=(32,), interleaved=True),
    )
    NF4 = "nf4", CodecFacts(bits=4, scales=("float32",), group_sizes=(32, 64))
    Q8_0 = "q8_0", _blocks(8, 32, 34)
    Q4_0 = "q4_0", _blocks(4, 32, 18)
    Q5_0 = "q5_0", _blocks(5, 32, 22)
    Q5_1 = "q5_1", _blocks(5, 32, 24)
    Q4_K = "q4_k", _blocks(4, 256, 144)
    Q5_K = "q5_k", _blocks(5, 256, 176)
    Q6_K = "q6_k", _blocks(6, 256, 210)
    FP8_BLOCKS = "fp8_blocks", CodecFacts(bits=8, parted=True)
    BITSANDBYTES = "bitsandbytes", CodecFacts(bits=4, parted=True)
    GPTQ = "gptq", CodecFacts(bits=4, parted=True)
    AWQ = "awq", CodecFacts(bits=4, parted=True)
    COMPRESSED = "compressed-tensors", CodecFacts(bits=8, parted=True)
    MXFP4 = "mxfp4", CodecFacts(bits=4, parted=True)
    STACKED = "stacked", CodecFacts(bits=4, parted=True)

    @property
    def written(self) -> bool:
        """True where Blockwalk writes it; others are read from files that have it."""
        return not (self.facts.block_bytes or self.facts.parted or self.facts.chosen_later)

    @property
    def encoded(self) -> bool:
        """True where a matrix is codes and scales, which are decoded when they are read."""
        return self.facts.bits > 0

    def dtype_of(self, dtype: str) -> str:
        """Return the dtype of the numbers that a parameter of ``dtype`` is written as; of an
        encoded one, its own."""
        return self.facts.dtype or dtype


NOBODY = "nobody"
NODE = "node"
WORLD = "world"
"""The groups of every mesh that state may be spread over: one rank, the ranks of a node, all
ranks."""


class StateKind(StrEnum):
    """Kinds of state that a training step reads and writes."""

    FROZEN = "frozen"
    TRAINABLE = "trainable"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    ACTIVATION = "activation"


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one kind of state: a slice on a tier, in a codec, gathered over a group."""

    tier: Tier = Tier.DEVICE
    codec: Codec = Codec.RAW
    group: str = NOBODY
    """The name of a group of the mesh: ``nobody``, ``node``, ``world``, or one of
    ``mesh.groups``."""

    @property
    def on_device(self) -> bool:
        return self.tier is Tier.DEVICE

    @property
    def on_host(self) -> bool:
        return self.tier is Tier.HOST

    @property
    def on_disk(self) -> bool:
        return self.tier is Tier.DISK

    def __str__(self) -> str:
        return f"{self.tier} × {self.codec} × {self.group}"


DTYPE_BYTES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "int8", "uint8", "bool"), 1),
}
"""Bytes per element, by torch's name of the dtype without its ``torch.`` prefix."""
