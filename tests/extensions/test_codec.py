"""Oracle: the run on weights that a few lines of torch have rounded. The codec is registered from
here: three values a group of 32, −s, 0 and s, of s the mean magnitude (Ma et al. 2024)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockwalk import LoraSettings, method
from blockwalk.cli.schema import schema
from blockwalk.cli.settings_help import described
from blockwalk.numerics.codecs.matrix_codec import Grid, grid_codec
from blockwalk.plan.codecs import CODECS, CodecFacts
from blockwalk.train.config import from_mapping
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.rows import registered

LORA = LoraSettings(rank=4, alpha=8)


def fit(groups_RGK: Tensor) -> Tensor:
    return groups_RGK.abs().mean(2)


def nearest(groups_RGK: Tensor, scales_RG: Tensor) -> Tensor:
    return (groups_RGK / scales_RG.float()[..., None]).round_().clamp_(-1, 1).add_(1).byte()


def values(codes_RGK: Tensor, scales_RG: Tensor) -> Tensor:
    return (codes_RGK.float() - 1) * scales_RG.float()[..., None]


@pytest.fixture(autouse=True)
def codec() -> Iterator[None]:
    row = CodecFacts(
        bits=4,
        scales=("float16",),
        group_sizes=(32,),
        tried_for=("frozen",),
        implementation=grid_codec(Grid(fit, nearest, values), limit=65504.0),
    )
    with registered(CODECS, "ternary", row):
        yield


def rounded(weight_RD: Tensor) -> Tensor:
    """The oracle: the matrix in groups of 32 columns, the last one filled up with zeros."""
    rows, columns = weight_RD.shape
    padded = torch.zeros(rows, -(-columns // 32) * 32)
    padded[:, :columns] = weight_RD
    groups = padded.view(rows, -1, 32)
    scale = groups.abs().mean(2, keepdim=True).half()
    codes = (groups / scale.float()).round().clamp(-1, 1)
    return (codes * scale.float()).view(rows, -1)[:, :columns]


def test_a_codec_from_outside_is_packed_and_trained_on(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            module.weight.data = rounded(module.weight.data)
    model.save_pretrained(tmp_path / "rounded")
    ends = []
    for folder, codec in (("model", "ternary"), ("rounded", "raw")):
        plan = method("mebp", frozen=f"disk × {codec}", optimizer={"learning_rate": 1e-2})
        work = tmp_path / "work" / folder
        with Walker(tmp_path / folder, plan, lora=LORA, workdir=work, device="cpu") as walker:
            losses = [walker.step(random_batch(seed=step)).loss for step in range(4)]
            ends.append((losses, {k: m.clone() for k, m in walker.engine.trained.masters.items()}))
    (coded, adapters), (whole, expected) = ends
    assert coded == pytest.approx(whole, rel=1e-6)
    for name, master in expected.items():
        torch.testing.assert_close(adapters[name], master, rtol=1e-4, atol=1e-5)


def test_help_schema_parsing_and_messages_know_it() -> None:
    _, sentence = described("frozen")
    assert re.search(r"\bternary, or what a file has", sentence)
    assert "int8, int4a and ternary" in sentence, "auto tries it too"
    assert "ternary" in str(schema()["properties"]["frozen"])
    assert from_mapping({"frozen": "host × ternary"}).plan.frozen.codec == "ternary"
    with refused(ValueError, "frozen ternary"):
        method("mebp", frozen="host × ternery")
