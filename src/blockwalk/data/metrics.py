"""Metrics of answers: F1 over classes, and exact match and F1 over the words of a text."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def macro_f1(chosen: Sequence[int], targets: Sequence[int], classes: int) -> float:
    """Return the mean over classes of 2·TP / (2·TP + FP + FN); a class that is neither there nor
    chosen counts as 0."""
    scores = []
    for c in range(classes):
        hits = sum(a == b == c for a, b in zip(chosen, targets, strict=True))
        misses = sum((a == c) != (b == c) for a, b in zip(chosen, targets, strict=True))
        scores.append(2 * hits / (2 * hits + misses) if hits else 0.0)
    return sum(scores) / classes


def words_of(text: str) -> list[str]:
    """Return a text's words in small letters, without punctuation and articles (Rajpurkar et al.,
    "SQuAD: 100,000+ Questions for Machine Comprehension of Text", 2016, section 6.1)."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def exact_match(text: str, answers: Sequence[str]) -> float:
    """Return 1 where a text has the words of one of the answers, else 0."""
    return float(any(words_of(text) == words_of(answer) for answer in answers))


def token_f1(text: str, answers: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over words, of the answer with which it is
    highest."""
    return max(_overlap(words_of(text), words_of(answer)) for answer in answers)


def _overlap(words: list[str], answer: list[str]) -> float:
    common = (Counter(words) & Counter(answer)).total()
    return 2 * common / (len(words) + len(answer)) if common else 0.0
