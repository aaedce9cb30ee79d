"""The table of codecs: the forms that a parameter's elements are written in.

A codec is a row here and, where its elements are codes, a file of its name beside
:mod:`blockwalk.numerics.codecs.codecs`."""

from __future__ import annotations

from dataclasses import dataclass

from blockwalk.plan.table import Table


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

    @property
    def written(self) -> bool:
        """True where Blockwalk writes it; others are read from files that have it."""
        return not (self.block_bytes or self.parted or self.chosen_later)

    @property
    def encoded(self) -> bool:
        """True where a matrix is codes and scales, which are decoded when they are read."""
        return self.bits > 0


def _blocks(bits: int, elements: int, nbytes: int) -> CodecFacts:
    return CodecFacts(bits=bits, group_sizes=(elements,), interleaved=True, block_bytes=nbytes)


class Codecs(Table[CodecFacts]):
    """Codecs by name."""

    @property
    def written(self) -> list[str]:
        """The names of those that Blockwalk writes."""
        return [name for name, facts in self.items() if facts.written]

    @property
    def help(self) -> str:
        return f"{', '.join(self.written)}, or what a file has"


CODECS = Codecs(
    "codec",
    {
        "raw": CodecFacts(),
        "auto": CodecFacts(chosen_later=True),
        "fp32": CodecFacts("float32"),
        "bf16": CodecFacts("bfloat16"),
        "fp16": CodecFacts("float16"),
        "fp8": CodecFacts(codes="float8_e4m3fn", bits=8, scales=("float32",), trainable=True),
        "int8": CodecFacts(codes="int8", bits=8, scales=("float32",), trainable=True),
        "int4": CodecFacts(bits=4, scales=("float16",), group_sizes=(32, 64)),
        "int4a": CodecFacts(
            bits=4, scales=("float16", "float16"), group_sizes=(32,), interleaved=True
        ),
        "nf4": CodecFacts(bits=4, scales=("float32",), group_sizes=(32, 64)),
        "q8_0": _blocks(8, 32, 34),
        "q4_0": _blocks(4, 32, 18),
        "q5_0": _blocks(5, 32, 22),
        "q5_1": _blocks(5, 32, 24),
        "q4_k": _blocks(4, 256, 144),
        "q5_k": _blocks(5, 256, 176),
        "q6_k": _blocks(6, 256, 210),
        "fp8_blocks": CodecFacts(bits=8, parted=True),
        "bitsandbytes": CodecFacts(bits=4, parted=True),
        "gptq": CodecFacts(bits=4, parted=True),
        "awq": CodecFacts(bits=4, parted=True),
        "compressed-tensors": CodecFacts(bits=8, parted=True),
        "mxfp4": CodecFacts(bits=4, parted=True),
        "stacked": CodecFacts(bits=4, parted=True),
    },
)
"""Codecs by name."""
