"""Oracle: the bytes that were put there; and for a tier that lives in this file alone, the run with
everything resident."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.plan.methods import method
from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec
from blockwalk.plan.placement import Codec
from blockwalk.tiers.block_store.store import BlockStore
from blockwalk.tiers.block_store.writer import write_store
from blockwalk.tiers.host import HostTier
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from blockwalk.tiers.protocols import UnitTier, WeightSource
from blockwalk.walk.walker import Walker
from tests.closed_form.test_store import Dictionary
from tests.models import random_batch, tiny_model
from tests.support.tier_tests import UnitTierTests, WeightSourceTests
from tests.support.visits import visited_host
from tests.support.writable import writable_store


class CompressedTier:
    """Buckets in host memory, each compressed on its way out of a slot and decompressed on its way
    in (a UnitTier).

    All that a tier for buckets takes: it knows bytes and steps, and neither names nor codecs.
    """

    def __init__(self, buckets: Sequence[torch.Tensor]) -> None:
        self._packed = [zlib.compress(bytes_P.numpy().data, 1) for bytes_P in buckets]
        self._steps = [0] * len(buckets)

    def step(self, unit: int) -> int:
        return self._steps[unit]

    def read_unit(self, unit: int, out_P: torch.Tensor) -> int:
        out_P.copy_(
            torch.frombuffer(bytearray(zlib.decompress(self._packed[unit])), dtype=torch.uint8)
        )
        return self._steps[unit]

    def write_unit(self, unit: int, data_P: torch.Tensor, step: int) -> None:
        self._packed[unit], self._steps[unit] = zlib.compress(data_P.numpy().data, 1), step

    def bucket(self, unit: int) -> torch.Tensor | None:
        return None

    def close(self) -> None:
        self._packed.clear()


class TestCompressed(UnitTierTests):
    def open(self, buckets: Sequence[torch.Tensor], folder: Path) -> UnitTier:
        return CompressedTier(buckets)


class TestHost(UnitTierTests):
    def open(self, buckets: Sequence[torch.Tensor], folder: Path) -> UnitTier:
        tier = HostTier([len(bytes_P) for bytes_P in buckets], torch.device("cpu"))
        for unit, bytes_P in enumerate(buckets):
            tier.bucket(unit).copy_(bytes_P)
        return tier


class TestDisk(UnitTierTests):
    def open(self, buckets: Sequence[torch.Tensor], folder: Path) -> UnitTier:
        """Units of one parameter each, whose elements are the bucket's bytes."""
        tensors = {
            f"unit.{number}": bytes_P.view(torch.float32) for number, bytes_P in enumerate(buckets)
        }
        return writable_store(
            folder / "store", Dictionary(tensors), spec_of(tensors), Codec.RAW, sync=False
        )


class TestBlockStore(WeightSourceTests):
    def open(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> WeightSource:
        write_store(folder / "store", Dictionary(dict(tensors)), spec_of(tensors), Codec.RAW)
        return BlockStore(folder / "store")


class TestModelFolder(WeightSourceTests):
    @pytest.fixture
    def tensors(self) -> dict[str, torch.Tensor]:
        model: Any = tiny_model("llama")
        return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    def open(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> WeightSource:
        model: Any = tiny_model("llama")
        model.save_pretrained(folder)
        return CheckpointFolder(folder, build_skeleton(folder))


def spec_of(tensors: Mapping[str, torch.Tensor]) -> ModelSpec:
    """A prologue, blocks of one parameter each, and an epilogue."""
    first, *blocks, last = (
        UnitSpec(
            f"unit {number}",
            "block",
            (ParamSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")),),
        )
        for number, (n, t) in enumerate(tensors.items())
    )
    return ModelSpec("toy", first, tuple(blocks), last, 8, 8)


@visited_host()
def test_a_run_trains_on_a_tier_that_it_has_never_seen(tmp_path: Path) -> None:
    """Oracle: ``mezo``, whose weights never leave the device, bit for bit; what moved counts the
    tier's own steps."""
    found = []
    for name in ("mezo", "zo2"):
        plan = method(name, optimizer={"name": "sgd", "learning_rate": 3e-2})
        with Walker(
            copy.deepcopy(tiny_model("llama", tied=True)),
            plan,
            workdir=tmp_path / name,
            device="cpu",
        ) as walker:
            buckets = walker.engine.buckets
            if isinstance(host := buckets.tier, HostTier):
                buckets.tier = CompressedTier(
                    [host.bucket(unit).clone() for unit in range(len(buckets.units))]
                )
                del host
            results = [walker.step(random_batch(seed=step)) for step in range(4)]
            walker.flush()
            weights = {
                n: w.clone() for n, w in buckets.weights().items() if isinstance(w, torch.Tensor)
            }
            found.append(
                (
                    [(r.loss, r.projected_grad) for r in results],
                    walker.evaluate(random_batch(seed=9)).loss,
                    weights,
                )
            )
            tier = buckets.tier
            assert name == "mezo" or buckets.streamed
            assert name == "mezo" or all(tier.step(unit) == 4 for unit in buckets.streamed)
    (losses, evaluated, weights), (other_losses, other_evaluated, other_weights) = found
    assert (losses, evaluated) == (other_losses, other_evaluated)
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(tensor, other_weights[n]) for n, tensor in weights.items())
