"""The order in which ranks that hold parts of the same rows share out their tokens
(``mesh.context``)."""

from __future__ import annotations

from dataclasses import dataclass


def part_tokens(length: int, count: int) -> int:
    """Return the tokens of one of ``count`` equal parts of a row of ``length`` tokens: of two
    pieces, the last of which is filled up.

    >>> part_tokens(13, 2)
    8
    """
    return 2 * -(-length // (2 * count))


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The tokens of every part of a row.

    A folded row is cut into 2c pieces, and part r has pieces r and 2c − 1 − r. Under a causal mask
    all parts then see as many pairs of tokens (Llama 3, Dubey et al. 2024, section 3.3.2). Rows of
    packed documents are not folded: transformers reads a jump of positions as a document's border.

    >>> RowOrder(2, 4, folded=True).pieces(0)
    [slice(0, 2, None), slice(6, 8, None)]
    """

    count: int
    """Parts, c."""
    tokens: int
    """Tokens of a part, even."""
    folded: bool

    @property
    def length(self) -> int:
        """Tokens of a row, with those that it is filled up with."""
        return self.count * self.tokens

    def pieces(self, number: int) -> list[slice]:
        """Return the tokens of one part, in ascending order."""
        if not self.folded:
            return [slice(number * self.tokens, (number + 1) * self.tokens)]
        size = self.tokens // 2
        places = (number, 2 * self.count - 1 - number)
        return [slice(place * size, (place + 1) * size) for place in places]
