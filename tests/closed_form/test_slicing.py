"""Oracle: every element counted: each is in one slice, at one place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from blockwalk.program.slicing import share, slice_size, sliced


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 300), max_size=6),
    st.integers(1, 6),
    st.sampled_from([1, 16, 64]),
)
def test_each_element_of_a_part_is_in_one_slice(sizes: list[int], ranks: int, grain: int) -> None:
    slicing = sliced([(str(i), size) for i, size in enumerate(sizes)], ranks, grain)
    length = slicing.size // ranks
    assert length == slice_size(slicing.size, ranks, grain)
    assert length % grain == 0
    offsets = {name: offset for name, offset, _ in slicing.parts}
    assert all(offset % grain == 0 for offset in offsets.values())
    elements = []
    for rank in range(ranks):
        for run in slicing.runs(rank * length, (rank + 1) * length):
            assert 0 <= run.place < run.end <= length
            assert rank * length + run.place == offsets[run.name] + run.start
            elements += [(run.name, element) for element in range(run.start, run.stop)]
    assert elements == [
        (str(i), element) for i, size in enumerate(sizes) for element in range(size)
    ]


@given(st.integers(0, 50), st.integers(1, 9))
def test_each_row_is_taken_once(rows: int, ranks: int) -> None:
    shares = [share(rows, ranks, rank) for rank in range(ranks)]
    assert [row for start, stop in shares for row in range(start, stop)] == list(range(rows))
    assert max(stop - start for start, stop in shares) - min(b - a for a, b in shares) <= 1
