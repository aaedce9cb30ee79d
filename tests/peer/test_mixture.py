"""Oracle: datasets.interleave_datasets, which drew the mixtures of earlier versions."""

from __future__ import annotations

import itertools

import pytest

from blockwalk.data.corpus import mixture

datasets = pytest.importorskip("datasets")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("lengths", "weights"),
    [
        ([300, 100], [3.0, 1.0]),
        ([5, 7, 9], [1.0, 2.0, 0.5]),
        ([1, 1], [1.0, 1.0]),
        ([2000, 10, 1500], [1.0, 1.0, 1.0]),
    ],
)
def test_a_mixture_is_that_of_datasets(lengths: list[int], weights: list[float], seed: int) -> None:
    ends = [0, *itertools.accumulate(lengths)]
    sources = [
        datasets.Dataset.from_dict({"row": range(begin, end)})
        for begin, end in itertools.pairwise(ends)
    ]
    mixed = datasets.interleave_datasets(
        sources,
        [weight / sum(weights) for weight in weights],
        seed=seed,
        stopping_strategy="all_exhausted",
    )
    assert list(mixture(lengths, weights, seed)) == list(mixed["row"])
