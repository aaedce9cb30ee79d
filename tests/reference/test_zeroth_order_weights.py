"""Oracle: the whole parameter, decoded, with the whole noise added. Ranges of rows, columns and
gathered rows are its own."""

from __future__ import annotations

import pytest
import torch

from blockwalk.engine.bucket_tensors import BucketTensor
from blockwalk.estimators.zeroth_order.draws import Draws
from blockwalk.estimators.zeroth_order.kind import kind_of
from blockwalk.estimators.zeroth_order.perturbed_weight import PerturbedWeight
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.numerics.noise.noise import fill_
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.choices import ZerothOrderSettings
from blockwalk.plan.model_spec import ParamSpec
from blockwalk.plan.placement import Codec
from tests.support.codecs import decode, encode

N = 37
D = 50


def draws(kind: str) -> Draws:
    params = (ParamSpec("first", (7, 3), "float32"), ParamSpec("layer.weight", (N, D), "float32"))
    zo = ZerothOrderSettings(noise=kind, noise_rank=3 if kind == "lowrank" else 1)
    return Draws(zo, {p.name: p for p in params})


def dense(kind: str) -> torch.Tensor:
    """The whole noise of seed 5, step 9, query 0, as each kind defines it."""
    if kind == "torch":
        torch.manual_seed(5)
        return [torch.normal(0.0, 1.0, size=size) for size in ((7, 3), (N, D))][1]
    if kind == "lowrank":
        left, right = (
            NoiseKey(5, step, 0, "layer.weight", side) for step, side in ((9, "left"), (8, "right"))
        )
        a_NR = fill_(torch.empty(N, 3), left) * 3**-0.5
        b_DR = fill_(torch.empty(D, 3), right)
        return a_NR[:, :1] * b_DR[:, 0] + a_NR[:, 1:2] * b_DR[:, 1] + a_NR[:, 2:] * b_DR[:, 2]
    key = NoiseKey(5, 9, 0, "layer.weight")
    return fill_(torch.empty(N, D), key, kind="gaussian" if kind == "gaussian" else "rademacher")


def cell(codec: Codec, values_ND: torch.Tensor) -> BucketTensor:
    layout = Layout((N, D), codec)
    bytes_P = torch.empty(layout.nbytes, dtype=torch.uint8)
    return BucketTensor(layout, encode(values_ND, codec, bytes_P))


@pytest.mark.parametrize("codec", [Codec.FP32, Codec.BF16, Codec.FP16, Codec.FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gaussian", "rademacher", "lowrank", "torch"])
@pytest.mark.parametrize("hessian", [None, Codec.FP32, Codec.BF16])
@pytest.mark.parametrize("scale", [1e-3, -1e-3, 0.0])
def test_ranges_are_those_of_the_whole(
    codec: Codec, dtype: torch.dtype, kind: str, hessian: Codec | None, scale: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    master = cell(codec, torch.randn(N, D, generator=generator) / 50)
    curved = None if hessian is None else cell(hessian, 1 + torch.rand(N, D, generator=generator))
    beside = ({}, None) if curved is None else ({"hessian": curved}, kind_of("hizoo").direction_)
    noise = draws(kind)(5, 9, 0, "layer.weight")
    weight = PerturbedWeight(master, noise, scale, dtype, ScratchArena(), *beside)
    values = [
        decode(each.bytes_P, (N, D), each.layout.codec, torch.empty(N, D))
        for each in (master, curved)
        if each
    ]
    z = dense(kind)
    if curved is not None:
        z = z / values[1].sqrt()
    expected = (values[0] + torch.tensor(scale) * z).to(dtype)

    assert (weight.shape, weight.dtype) == ((N, D), dtype)
    for start, stop in ((0, N), (3, 4), (17, 36)):
        assert torch.equal(weight.rows(start, stop), expected[start:stop])
    for start, stop in ((0, D), (7, 8), (16, 49)):
        assert torch.equal(weight.columns(start, stop), expected[:, start:stop])
    index = torch.tensor([[4, 4], [36, 0]])
    assert torch.equal(weight.gather(index), expected[index])
    assert torch.equal(weight.whole(), expected)
