"""Oracle: the norm over all sums of squares of all ranks, sent one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from blockwalk.cutting.verify import certified
from blockwalk.engine import gradients
from blockwalk.plan.methods import method
from blockwalk.ranks.groups import Groups
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.processes import run_ranks

VOCABULARY = 12_000
"""Rows of embeddings and head, so that a rank has more sums of squares than numbers to send."""


def _norm(parts_of: Callable[[Sequence[float]], list[float]]) -> tuple[float, int]:
    """Return a step's norm, and the most numbers that this rank sent in one exchange of it."""
    lengths: list[int] = []
    exchange = Groups.exchange

    def counted(self: Groups, values: Sequence[float]) -> list[list[float]]:
        lengths.append(len(values))
        return exchange(self, values)

    plan = method("zero3", mesh={"world": 2}, optimizer={"max_grad_norm": 0.5})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Groups, "exchange", counted)
        patch.setattr(gradients, "exact_parts", parts_of)
        with Walker(tiny_model("llama", vocab_size=VOCABULARY), plan) as walker:
            norm = walker.step(random_batch(4, 8)).grad_norm
    assert norm is not None
    return norm, max(lengths)


def _norms(rank: int) -> list[tuple[float, int]]:
    return [_norm(gradients.exact_parts), _norm(list)]


def test_clipping_sends_a_few_numbers_and_has_the_bits_of_all_sums() -> None:
    certified(tiny_model("llama", vocab_size=VOCABULARY))
    for (norm, numbers), (expected, sums) in run_ranks(2, _norms, timeout=300):
        assert norm == expected
        assert numbers <= 64
        assert sums > numbers  # what was sent before
