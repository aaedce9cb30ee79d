"""Text of tokens that come one by one: a piece is given out as soon as no later token can change
it."""

from __future__ import annotations

from dataclasses import dataclass, field

from blockwalk.data.rendered import Tokenizer

HALF = "\ufffd"
"""The sign that stands for bytes which are no whole character yet."""


@dataclass(slots=True)
class TextStream:
    """The tokens so far, and how much of their text was given out."""

    tokenizer: Tokenizer
    token_ids: list[int] = field(default_factory=list)
    _begin: int = 0
    """The first token that is decoded again: blanks between tokens depend on the one before."""
    _shown: int = 0
    """Tokens whose text was given out."""

    def add(self, token: int) -> str:
        """Return the text that another token brings; empty where a character is not whole yet."""
        self.token_ids.append(token)
        piece = self._rest()
        if not piece or piece.endswith(HALF):
            return ""
        self._begin = self._shown
        self._shown = len(self.token_ids)
        return piece

    def end(self) -> str:
        """Return the text that was held back, after the last token."""
        return self._rest() if self._shown < len(self.token_ids) else ""

    @property
    def text(self) -> str:
        """All of the text."""
        return str(self.tokenizer.decode(self.token_ids, skip_special_tokens=True))

    def _rest(self) -> str:
        shown = self.tokenizer.decode(
            self.token_ids[self._begin : self._shown], skip_special_tokens=True
        )
        decoded = self.tokenizer.decode(self.token_ids[self._begin :], skip_special_tokens=True)
        return str(decoded[len(shown) :])
