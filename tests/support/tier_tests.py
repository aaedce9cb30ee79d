"""Contracts of the tiers, for each to inherit: :class:`MemoryTests` for a memory that state is kept
in, :class:`WeightSourceTests` for what parameters are read from by name, :class:`UnitTierTests` for
what buckets are read from and written to. Not a test by itself: it has no tier.

    class TestHostMemory(MemoryTests):
        def open(self, folder):
            return host_memory(torch.device("cpu"))
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from blockwalk.tiers.memory import Memory, Shapes
from blockwalk.tiers.protocols import UnitTier, WeightSource

SIZES = (64, 4096, 4032, (1 << 20) + 8192 + 64)
"""Bytes of buckets: below a page, a page, not quite one, and what a disk may copy past the page
cache."""


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


class MemoryTests:
    def open(self, folder: Path) -> Memory:
        """An empty memory."""
        raise NotImplementedError

    @pytest.fixture
    def memory(self, tmp_path: Path) -> Memory:
        return self.open(tmp_path)

    @staticmethod
    def shapes() -> Shapes:
        return {
            "weight": ((5, 3), torch.float32),
            "bias": ((3,), torch.bfloat16),
            "empty": ((0, 7), torch.float32),
            "scalar": ((), torch.float64),
        }

    def test_tensors_of_a_group_are_worked_on_in_place(self, memory: Memory) -> None:
        """Oracle: the values that were written, after the group's turn and its next one."""
        shapes = self.shapes()
        tensors = memory.zeros(shapes, ("kind", 1))
        neighbours = memory.zeros(shapes, ("kind", 2))
        assert {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()} == shapes
        assert not any(t.any() for t in (*tensors.values(), *neighbours.values()))
        for number, tensor in enumerate(tensors.values(), 1):
            memory.will_need(("kind", 1))
            tensor.fill_(number)
            memory.dont_need(("kind", 1))
        for number, tensor in enumerate(tensors.values(), 1):
            assert torch.equal(tensor, torch.full_like(tensor, number))
        assert not any(t.any() for t in neighbours.values())
        memory.forget(("kind", 1))
        again = memory.zeros(shapes, ("kind", 1))
        assert not any(t.any() for t in again.values())

    def test_what_was_written_last_is_read(self, memory: Memory) -> None:
        """Oracle: the bytes that were handed over; the buffers stay the caller's."""
        for seed in range(3):
            for unit, nbytes in enumerate(SIZES):
                data_P = random_bytes(nbytes, 10 * seed + unit)
                memory.write(("kind", unit), data_P)
                data_P.zero_()
            for unit, nbytes in enumerate(SIZES):
                wanted_P = random_bytes(nbytes, 10 * seed + unit)
                out_P = torch.full((nbytes,), 77, dtype=torch.uint8)
                memory.read(("kind", unit), out_P)
                assert torch.equal(out_P, wanted_P)
                in_memory_P = memory.bytes(("kind", unit))
                assert in_memory_P is None or torch.equal(in_memory_P, wanted_P)

    def test_a_group_s_tensors_are_its_bytes(self, memory: Memory) -> None:
        """Oracle: one tensor, read as a bucket after it was changed in place."""
        (tensor,) = memory.zeros({"only": ((16,), torch.float32)}, ("kind", 0)).values()
        tensor.copy_(torch.arange(16))
        out_P = torch.empty(64, dtype=torch.uint8)
        memory.read(("kind", 0), out_P)
        assert torch.equal(out_P.view(torch.float32), torch.arange(16.0))

    def test_a_group_that_is_not_there_has_no_turn(self, memory: Memory) -> None:
        """Oracle: the contract."""
        memory.will_need(("kind", 5))
        memory.dont_need(("kind", 5))
        memory.forget(("kind", 5))

    def test_tensors_outlive_the_memory(self, memory: Memory) -> None:
        """Oracle: the values before it was closed."""
        tensors = memory.zeros(self.shapes(), ("kind", 0))
        for tensor in tensors.values():
            tensor.fill_(3)
        memory.close()
        assert all(torch.equal(t, torch.full_like(t, 3)) for t in tensors.values())


class UnitTierTests:
    def open(self, buckets: Sequence[torch.Tensor], folder: Path) -> UnitTier:
        """A tier that holds ``buckets`` (uint8 [nbytes]), one a unit, as nothing has trained them
        yet."""
        raise NotImplementedError

    @pytest.fixture
    def buckets(self) -> list[torch.Tensor]:
        return [random_bytes(nbytes, seed) for seed, nbytes in enumerate(SIZES)]

    @pytest.fixture
    def tier(self, buckets: list[torch.Tensor], tmp_path: Path) -> UnitTier:
        return self.open([bytes_P.clone() for bytes_P in buckets], tmp_path)

    @staticmethod
    def read(tier: UnitTier, unit: int) -> tuple[torch.Tensor, int]:
        out_P = torch.full((SIZES[unit],), 77, dtype=torch.uint8)
        return out_P, tier.read_unit(unit, out_P)

    def test_what_came_is_there_after_step_0(
        self, tier: UnitTier, buckets: list[torch.Tensor]
    ) -> None:
        """Oracle: the buckets that were given."""
        for unit, wanted_P in enumerate(buckets):
            got_P, step = self.read(tier, unit)
            assert torch.equal(got_P, wanted_P)
            assert tier.step(unit) == step == 0

    def test_what_was_written_last_is_read(
        self, tier: UnitTier, buckets: list[torch.Tensor]
    ) -> None:
        """Oracle: a dictionary, over sixty turns of writes and reads of any unit in any order."""
        draw = random.Random(0)
        steps = [0] * len(SIZES)
        for number in range(1, 61):
            unit = draw.randrange(len(SIZES))
            if draw.random() < 0.5:
                buckets[unit] = random_bytes(SIZES[unit], 1000 + number)
                steps[unit] = number
                tier.write_unit(unit, buckets[unit], number)
            got_P, step = self.read(tier, unit)
            assert torch.equal(got_P, buckets[unit])
            assert [tier.step(n) for n in range(len(SIZES))] == steps
            assert step == steps[unit]

    def test_buffers_stay_the_caller_s(self, tier: UnitTier) -> None:
        """Oracle: the bytes when they were handed over: a slot is used again by the next unit at
        once."""
        for unit, nbytes in enumerate(SIZES):
            data_P = random_bytes(nbytes, 50 + unit)
            written_P = data_P.clone()
            tier.write_unit(unit, data_P, 3)
            data_P.zero_()
            out_P, _ = self.read(tier, unit)
            assert torch.equal(out_P, written_P)
            out_P.zero_()
            assert torch.equal(self.read(tier, unit)[0], written_P)

    def test_lanes_work_on_different_units_at_once(self, tier: UnitTier) -> None:
        """Oracle: the bytes that each thread wrote to its own unit."""

        def turns(unit: int) -> bool:
            same = True
            for step in range(1, 8):
                data_P = random_bytes(SIZES[unit], 100 * unit + step)
                tier.write_unit(unit, data_P, step)
                got_P, written_at = self.read(tier, unit)
                same &= torch.equal(got_P, data_P) and written_at == step
            return same

        with ThreadPoolExecutor(len(SIZES)) as threads:
            assert all(threads.map(turns, range(len(SIZES))))

    def test_closing_ends_it(self, tier: UnitTier) -> None:
        """Oracle: the contract: a tier is closed once, whatever was done with it."""
        tier.write_unit(0, random_bytes(SIZES[0], 9), 1)
        tier.close()


class WeightSourceTests:
    def open(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> WeightSource:
        """A source of ``tensors`` by these names: 2-D, 1-D and 0-D, of one floating dtype."""
        raise NotImplementedError

    @pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def tensors(self, request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        shapes = {
            "embed.weight": (300, 40),
            "layer.0.weight": (9, 40),
            "layer.0.norm": (40,),
            "scale": (),
        }
        return {name: torch.randn(shape).to(request.param) for name, shape in shapes.items()}

    @pytest.fixture
    def source(self, tensors: dict[str, torch.Tensor], tmp_path: Path) -> WeightSource:
        return self.open(tensors, tmp_path)

    def test_names_shapes_and_dtypes(
        self, source: WeightSource, tensors: dict[str, torch.Tensor]
    ) -> None:
        """Oracle: the tensors that were given; a plan counts bytes from this alone."""
        assert sorted(source.names()) == sorted(tensors)
        for name, tensor in tensors.items():
            assert (source.shape(name), source.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
            assert source.prefetch([name]) > 0

    def test_weights_and_read_into_give_the_values(
        self, source: WeightSource, tensors: dict[str, torch.Tensor]
    ) -> None:
        """Oracle: the tensors that were given, as they are, and in another dtype as ``copy_``
        converts."""
        weights = source.weights(list(tensors))
        assert weights.keys() == tensors.keys()
        for name, tensor in tensors.items():
            weight = weights[name]
            assert torch.equal(
                weight if isinstance(weight, torch.Tensor) else weight.rows(0, tensor.shape[0]),
                tensor,
            )
            for dtype in (tensor.dtype, torch.float32, torch.float16):
                out = torch.empty(tensor.shape, dtype=dtype)
                source.read_into(name, out)
                assert torch.equal(out, tensor.to(dtype))

    def test_what_was_taken_outlives_release_and_close(
        self, source: WeightSource, tensors: dict[str, torch.Tensor]
    ) -> None:
        """Oracle: the values, after their pages were given back and after the files were."""
        weights = {
            name: weight
            for name, weight in source.weights(list(tensors)).items()
            if len(source.shape(name)) < 2
        }
        source.prefetch(list(tensors))
        source.release(list(tensors))
        assert all(torch.equal(weight, tensors[name]) for name, weight in weights.items())  # type: ignore[arg-type]
        source.close()
        assert all(torch.equal(weight, tensors[name]) for name, weight in weights.items())  # type: ignore[arg-type]

    def test_every_lane_may_read(
        self, source: WeightSource, tensors: dict[str, torch.Tensor]
    ) -> None:
        """Oracle: the tensors, read by four threads that prefetch and release what the others
        read."""

        def turns(seed: int) -> bool:
            draw = random.Random(seed)
            same = True
            for _ in range(50):
                name = draw.choice(list(tensors))
                source.prefetch([name])
                out = torch.empty_like(tensors[name])
                source.read_into(name, out)
                same &= torch.equal(out, tensors[name])
                source.release([name])
            return same

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(turns, range(4)))

    @pytest.mark.parametrize(
        "call",
        [
            lambda source: source.shape("no"),
            lambda source: source.dtype("no"),
            lambda source: source.prefetch(["no"]),
            lambda source: source.in_place("no"),
            lambda source: source.weights(["no"]),
            lambda source: source.read_into("no", torch.empty(1)),
        ],
        ids=["shape", "dtype", "prefetch", "in_place", "weights", "read_into"],
    )
    def test_an_unknown_name_is_a_key_error(
        self, source: WeightSource, call: Callable[[WeightSource], object]
    ) -> None:
        """Oracle: the contract of :class:`WeightSource`."""
        with pytest.raises(KeyError):
            call(source)
