"""Oracle: `F.grouped_mm` and autograd on experts that are decoded whole. A mixture's experts in
codes are read one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from blockwalk import Walker, method
from blockwalk.engine.pack import pack
from blockwalk.numerics.codecs.codecs import encode_rows
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.weights import EncodedWeight
from blockwalk.numerics.lazy_parameter import LazyParameter
from blockwalk.plan.placement import Codec
from tests.models import random_batch, tiny_model


class Recorded(EncodedWeight):
    """Experts that remember which of them were asked for."""

    def __init__(self, weight: EncodedWeight) -> None:
        super().__init__(weight.buffer, weight.layout, weight.dtype)
        self.asked: set[int] = set()

    def expert(self, index: int) -> EncodedWeight:
        self.asked.add(index)
        return super().expert(index)


def experts(codec: Codec, shape: tuple[int, int, int] = (4, 24, 32)) -> Recorded:
    layout = Layout(shape, codec, "float32")
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    torch.manual_seed(0)
    encode_rows(torch.randn(layout.rows, layout.columns), buffer, layout, 0, name="experts")
    return Recorded(EncodedWeight(buffer, layout, torch.float32))


@pytest.mark.parametrize("codec", [Codec.INT4, Codec.INT4A, Codec.INT8, Codec.NF4])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_are_multiplied_with_their_experts_alone(codec: Codec, transposed: bool) -> None:
    """The second expert has no row, and the last row has no expert."""
    encoded = experts(codec)
    dense = torch.empty(encoded.shape)
    encoded.read_into(dense)
    lazy = LazyParameter(encoded, torch.device("cpu"))
    offs = torch.tensor([3, 3, 10, 11], dtype=torch.int32)
    x = torch.randn(12, encoded.shape[1 if transposed else 2])
    found = []
    for weight in (lazy, dense):
        weight = weight if transposed else weight.transpose(-2, -1)
        leaf = x.clone().requires_grad_(True)
        out = F.grouped_mm(leaf, weight, offs=offs)[:11]
        out.square().sum().backward()
        found.append((out, leaf.grad[:11]))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert encoded.asked == {0, 2, 3}
    for index in (1, torch.tensor(1)):
        assert torch.equal(lazy[index].decoded(), dense[1])
    assert torch.equal(lazy.transpose(-2, -1)[2].decoded(), dense[2].t())
    assert torch.equal(lazy + 0, dense)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_mixture_in_codes_learns_without_its_experts_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the walk of the model whose weights are those that the codes stand for, decoded into
    a checkpoint."""
    model = _tiny(kind)
    batch = random_batch()
    model.save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "store", Codec.INT4)
    whole = LazyParameter.decoded

    def decoded(lazy: LazyParameter) -> torch.Tensor:
        assert lazy.ndim == 2, "a layer's experts were decoded whole"
        return whole(lazy)

    monkeypatch.setattr(LazyParameter, "decoded", decoded)
    with Walker(tmp_path / "store", method("mebp"), lora={"rank": 2}, device="cpu") as walker:
        loss = walker.step(batch).loss
        gradients = walker.gradients(batch)
        source = walker.engine.model.source
        values = {name: torch.empty(source.shape(name)) for name in source.names()}
        for name, value in values.items():
            source.read_into(name, value)
    model.load_state_dict(values, strict=False)
    model.save_pretrained(tmp_path / "decoded")
    plan = method("mebp", frozen="disk × raw")
    with Walker(
        tmp_path / "decoded", plan, lora={"rank": 2}, workdir=tmp_path, device="cpu"
    ) as walker:
        assert walker.step(batch).loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in walker.gradients(batch).items():
            assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def _tiny(kind: str) -> torch.nn.Module:
    if kind == "mixtral":
        return tiny_model(kind)
    from tests.support.control import tiny_config
    from tests.support.control import tiny_model as from_config

    return from_config(tiny_config(kind))
