"""The table of codecs: the forms that a parameter's elements are written in.

A codec is a row here and, where its elements are codes, a file of its name beside
:mod:`blockwalk.numerics.codecs.codecs`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    tried_for: tuple[str, ...] = ()
    """The uses for which nobody has to name it. ``frozen``: weights that come a block at a time, by
    the planner and by ``auto``, which tries the codecs in the table's order. ``gathered`` and
    ``trainable``: by the planner, for weights that ranks gather, and for those of zeroth order."""
    implementation: Any = None
    """The ``MatrixCodec``, of a codec of codes registered from elsewhere; None: that of the file of
    its name in :mod:`blockwalk.numerics.codecs`."""
    as_it_came: bool = False
    """True where a parameter keeps the codec that its source has it in."""
    trainable: bool = False
    """True where a trainable parameter may be kept in these codes, rounded stochastically (zeroth
    order only)."""

    def refuses(self, plan: Any, kind: str) -> Iterator[str]:
        """Yield what speaks against a plan with a kind of state in this codec."""
        placement = getattr(plan, kind)
        codec = placement.codec
        if kept := _KEPT_AS.get(kind):
            if codec not in ("raw", kept):
                because = "as blocks compute it" if kept == "raw" else "in 32 bits"
                tier = placement.tier
                yield f"{kind} is {placement}, and is kept {because}; set {kind}: {tier} × {kept}"
            return
        if self.chosen_later:
            if kind != "frozen" or placement.tier.facts.resident:
                yield (
                    f"{kind} is {placement}; {codec} is for frozen weights on disk or the host:"
                    " name a codec, such as raw"
                )
        elif not self.written:
            yield (
                f"{kind} is {placement}; {codec} is read from files that have it, and not"
                " written: set raw"
            )
        if not self.encoded:
            return
        if kind == "frozen" and plan.compile:
            yield (
                "compile is true, and a compiled block needs its weights whole, where frozen:"
                f" {placement} decodes a range at a time; set compile: false, or frozen: device"
            )
        if kind == "trainable" and not (self.trains or plan.target.scales):
            codecs = (name for name, facts in CODECS.items() if facts.trains)
            yield (
                f"a trainable parameter cannot be kept in {codec}, which has no stochastic"
                f" rounding; use {', '.join(codecs)}"
            )

    @property
    def written(self) -> bool:
        """True where Blockwalk writes it; others are read from files that have it."""
        return not (self.block_bytes or self.parted or self.chosen_later)

    @property
    def trains(self) -> bool:
        """True where a trainable parameter may be kept in it."""
        return not self.chosen_later and (self.trainable or not self.encoded)

    @property
    def encoded(self) -> bool:
        """True where a matrix is codes and scales, which are decoded when they are read."""
        return self.bits > 0


_KEPT_AS = {"gradient": "fp32", "optimizer_state": "fp32", "activation": "raw"}
"""The one codec, beside raw, of kinds of state that are no parameters."""


def _blocks(bits: int, elements: int, nbytes: int) -> CodecFacts:
    return CodecFacts(bits=bits, group_sizes=(elements,), interleaved=True, block_bytes=nbytes)


class Codecs(Table[CodecFacts]):
    """Codecs by name."""

    @property
    def written(self) -> list[str]:
        """The names of those that Blockwalk writes."""
        return [name for name, facts in self.items() if facts.written]

    def tried(self, use: str) -> list[str]:
        """Return the names of those that are tried for a use."""
        return [name for name, facts in self.items() if use in facts.tried_for]

    @property
    def help(self) -> str:
        return f"{', '.join(self.written)}, or what a file has"


CODECS = Codecs(
    "codec",
    {
        "raw": CodecFacts(as_it_came=True, tried_for=("frozen", "trainable")),
        "auto": CodecFacts(chosen_later=True),
        "fp32": CodecFacts("float32"),
        "bf16": CodecFacts("bfloat16"),
        "fp16": CodecFacts("float16"),
        "fp8": CodecFacts(
            codes="float8_e4m3fn",
            bits=8,
            scales=("float32",),
            trainable=True,
            tried_for=("trainable",),
        ),
        "int8": CodecFacts(
            codes="int8",
            bits=8,
            scales=("float32",),
            trainable=True,
            tried_for=("frozen", "gathered"),
        ),
        "int4": CodecFacts(
            bits=4, scales=("float16",), group_sizes=(32, 64), tried_for=("gathered",)
        ),
        "int4a": CodecFacts(
            bits=4,
            scales=("float16", "float16"),
            group_sizes=(32,),
            interleaved=True,
            tried_for=("frozen",),
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
