"""Oracle: the bytes that were put there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec
from blockwalk.plan.placement import Codec, StateKind
from blockwalk.tiers.block_store.store import BlockStore
from blockwalk.tiers.block_store.writer import write_store
from blockwalk.tiers.memory import Memory, device_memory, host_memory
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from blockwalk.tiers.protocols import UnitTier, WeightSource
from blockwalk.tiers.scratch_maps import ScratchMaps
from blockwalk.tiers.unit_buckets import UnitBuckets
from tests.models import tiny_model
from tests.support.dictionary import Dictionary
from tests.support.tier_tests import MemoryTests, UnitTierTests, WeightSourceTests
from tests.support.writable import writable_store


class TestHost(UnitTierTests):
    def open(self, buckets: Sequence[torch.Tensor], folder: Path) -> UnitTier:
        return filled(host_memory(torch.device("cpu")), buckets)


class TestFileMaps(UnitTierTests):
    def open(self, buckets: Sequence[torch.Tensor], folder: Path) -> UnitTier:
        return filled(ScratchMaps(folder), buckets)


class TestHostMemory(MemoryTests):
    def open(self, folder: Path) -> Memory:
        return host_memory(torch.device("cpu"))


class TestDeviceMemory(MemoryTests):
    def open(self, folder: Path) -> Memory:
        return device_memory(torch.device("cpu"))


class TestScratchMaps(MemoryTests):
    def open(self, folder: Path) -> Memory:
        return ScratchMaps(folder)


def filled(memory: Memory, buckets: Sequence[torch.Tensor]) -> UnitTier:
    """A memory's buckets, as a run begins with them."""
    tier = UnitBuckets(memory, StateKind.TRAINABLE)
    for unit, bytes_P in enumerate(buckets):
        tier.write_unit(unit, bytes_P, 0)
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
