"""Kinds of state, and the place and form of each: tier × codec × group, as plain values.

Nothing here imports torch at run time: planning and simulation read these values without it. Bytes
are bytes, shapes are in elements."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from blockwalk.plan.codecs import CODECS, CodecFacts
from blockwalk.plan.table import RowName
from blockwalk.plan.tiers import TIERS, TierFacts


class Tier(RowName):
    """A memory that state can live in."""

    table = TIERS
    facts: TierFacts


class Codec(RowName):
    """The form in which a parameter's elements are written on its tier. ``RAW`` keeps the dtype
    that the model came in."""

    table = CODECS
    facts: CodecFacts

    @property
    def written(self) -> bool:
        """True where Blockwalk writes it; others are read from files that have it."""
        return self.facts.written

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

    def __str__(self) -> str:
        return f"{self.tier} × {self.codec} × {self.group}"


DTYPE_BYTES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "int8", "uint8", "bool"), 1),
}
"""Bytes per element, by torch's name of the dtype without its ``torch.`` prefix."""
