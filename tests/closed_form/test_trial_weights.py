"""Oracle: torch's own conversion of a tensor to another dtype, and the addresses of the copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blockwalk.cutting.trial_weights import TrialWeights


def trial() -> TrialWeights:
    return TrialWeights(torch.float32, torch.zeros((), requires_grad=True))


def sources(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 8, generator=generator).bfloat16() for _ in range(count)]


def test_copies_of_many_layers_lie_in_the_memory_of_one() -> None:
    weights = trial()
    addresses = set()
    for source in sources(9):
        of_layer = [weights.copy(source), weights.copy(source.t()), weights.copy(source)]
        for copy, expected in zip(of_layer, (source, source.t(), source), strict=True):
            assert torch.equal(copy, expected.float())
        addresses |= {of_layer[0].data_ptr(), of_layer[2].data_ptr()}
        weights.forget({"a": of_layer[0], "b": of_layer[2]})
        del of_layer, copy
    assert len(addresses) == 2


REFERENCES: dict[str, Callable[[Tensor], Any]] = {
    "a view": lambda copy: copy[2:],
    "an array": lambda copy: copy.numpy()[2:],
    "a parameter": lambda copy: torch.nn.Parameter(copy).detach()[2:],
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_memory_that_something_refers_to_is_not_lent_again(kind: str) -> None:
    weights = trial()
    first, second = sources(2)
    reference = REFERENCES[kind](weights.copy(first))
    other = weights.copy(second)
    assert torch.equal(torch.as_tensor(reference), first.float()[2:])
    assert torch.equal(other, second.float())


def test_gradients_of_layers_whose_copies_share_memory_are_autograd_s() -> None:
    """Two layers' copies, the second made after the first was forgotten, and one backward pass."""
    weights = trial()
    hidden_BD = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    noted: list[Tensor] = []
    matrices = sources(4)
    with weights.remade():
        out_BD = hidden_BD
        for source in matrices:
            copy = weights.trained(source, noted.append)
            out_BD = torch.tanh(out_BD @ copy.t() @ copy)
            weights.forget({"w": copy})
            del copy
        out_BD.square().sum().backward()
    leaves = [source.float().requires_grad_() for source in matrices]
    expected_BD = hidden_BD.detach().requires_grad_()
    out_BD = expected_BD
    for leaf in leaves:
        out_BD = torch.tanh(out_BD @ leaf.t() @ leaf)
    out_BD.square().sum().backward()
    assert torch.equal(hidden_BD.grad, expected_BD.grad)  # type: ignore[arg-type]
    for gradient, leaf in zip(noted, reversed(leaves), strict=True):
        assert torch.equal(gradient, leaf.grad)  # type: ignore[arg-type]
