"""Oracle: counting pairs of tokens."""

from __future__ import annotations

import pytest

from blockwalk.plan.row_order import RowOrder, part_tokens


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_every_token_of_a_row_is_in_one_part(count: int, *, folded: bool) -> None:
    order = RowOrder(count, part_tokens(101, count), folded)
    tokens = [
        token
        for number in range(count)
        for piece in order.pieces(number)
        for token in range(piece.start, piece.stop)
    ]
    assert sorted(tokens) == list(range(order.length))
    assert 101 <= order.length < 101 + 2 * count


@pytest.mark.parametrize("count", [2, 3, 8])
def test_parts_of_a_folded_causal_row_see_as_many_pairs(count: int) -> None:
    """Token t sees t + 1 tokens."""
    order = RowOrder(count, part_tokens(101, count), folded=True)
    pairs = {
        sum(token + 1 for piece in order.pieces(number) for token in range(piece.start, piece.stop))
        for number in range(count)
    }
    assert pairs == {order.length * (order.length + 1) // 2 // count}
