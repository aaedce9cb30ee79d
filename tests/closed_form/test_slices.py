"""Oracle: the bytes of the unit that was cut, and every element's place in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockwalk import method
from blockwalk.engine.bucket_tensors import STATE, Initial, fill, tensors_in, trainable_spec
from blockwalk.engine.slices import BucketSlices
from blockwalk.plan.model_spec import ParamSpec, UnitSpec
from blockwalk.plan.placement import Codec
from blockwalk.program.state_sizes import slice_bytes
from blockwalk.tiers.block_store.store import StoredUnit
from blockwalk.tiers.block_store.writer import plan_units
from tests.support.toy_model import toy


def random_unit(
    spec: UnitSpec, codec: Codec, states: tuple[str, ...], seed: int
) -> tuple[StoredUnit, torch.Tensor]:
    """A unit encoded as one process holds it, with random weights, its states' bytes random too."""
    generator = torch.Generator().manual_seed(seed)
    model = replace(toy(1, lora=False, tied=True), blocks=(spec,))
    kept, written_as = trainable_spec(model, codec, dict.fromkeys(states, Codec.FP32))
    held = {
        p.name: torch.randn(p.shape, generator=generator)
        for p in kept.params()
        if STATE not in p.name
    }
    source = Initial(kept, None, held, dict.fromkeys(states, 0.0))
    unit = plan_units(source, kept, written_as, group_size=32)[1]
    whole_P = torch.zeros(unit.nbytes, dtype=torch.uint8)
    fill(unit, source, whole_P)
    for param in unit.params:
        if STATE in param.name:
            state_N = whole_P[param.offset : param.offset + param.nbytes].view(torch.float32)
            state_N.copy_(torch.randn(state_N.shape, generator=generator))
    return unit, whole_P


vectors = st.tuples(st.integers(1, 70))
matrices = st.tuples(st.integers(1, 9), st.integers(1, 40))
shapes = st.lists(st.one_of(vectors, matrices), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([Codec.RAW, Codec.BF16, Codec.FP8, Codec.INT8]),
       st.sampled_from([(), ("a",), ("a", "b")]), st.integers(2, 5),
       st.integers(0, 99))  # fmt: skip
def test_slices_are_the_unit_cut_and_come_together_as_it_was(
    shapes: list[tuple[int, ...]], codec: Codec, states: tuple[str, ...], count: int, seed: int
) -> None:
    params = tuple(
        ParamSpec(f"p{i}", shape, "float32", True, len(shape) == 2)
        for i, shape in enumerate(shapes)
    )
    unit, whole_P = random_unit(UnitSpec("block", "block", params), codec, states, seed)
    slices = BucketSlices(unit, count)
    cut = [slices.cut(whole_P, place) for place in range(count)]
    assert torch.equal(slices.join(torch.cat(cut)), whole_P)
    whole = tensors_in(unit, whole_P)
    seen = {(name, state): torch.zeros(cell.layout.rows * cell.layout.columns)
            for name, cells in whole.items() for state, cell in cells.items()}  # fmt: skip
    for place in range(count):
        slot_P = torch.zeros(slices.room, dtype=torch.uint8)
        slices.in_slot(slot_P, place).copy_(cut[place])
        slices_P = slices.to_gather(slot_P, place)
        assert torch.equal(slices_P.chunk(count)[place], cut[place][: slices.gathered])
        slices_P.copy_(torch.cat([each[: slices.gathered] for each in cut]))
        slices.assemble(slot_P)
        for name, cells in tensors_in(slices.bucket, slot_P).items():
            assert torch.equal(cells[""].bytes_P, whole[name][""].bytes_P)
        for name, of_states in slices.updates(cut[place], place, largest=16):
            assert of_states.keys() == whole[name].keys()
            for state, piece in of_states.items():
                numel = piece.layout.rows * piece.layout.columns
                codes = whole[name][state].layout.codes(whole[name][state].bytes_P).reshape(-1)
                assert torch.equal(
                    piece.layout.codes(piece.bytes_P).reshape(-1).view(torch.uint8),
                    codes[piece.origin : piece.origin + numel].view(torch.uint8),
                )
                seen[name, state][piece.origin : piece.origin + numel] += 1
    assert all(bool((times == 1).all()) for times in seen.values())


@pytest.mark.parametrize(
    ("codec", "optimizer"), [("bf16", "sgd"), ("raw", "momentum"), ("fp8", "adamw")]
)
def test_a_program_knows_what_a_slice_has(codec: str, optimizer: str) -> None:
    """Within the padding of each tensor: a slice's bytes, and those that are gathered of it."""
    plan = method(
        "distzo2", mesh={"world": 4}, trainable=f"host × {codec}", **{"optimizer.name": optimizer}
    )
    params = (
        ParamSpec("w", (512, 96), "float32", True, True),
        ParamSpec("b", (96,), "float32", True, False),
    )
    spec = UnitSpec("block", "block", params)
    states = {"momentum": ("m",), "adamw": ("m", "v")}.get(optimizer, ())
    slices = BucketSlices(random_unit(spec, Codec(codec), states, 0)[0], 4)
    nbytes, gathered = slice_bytes(plan, spec)
    assert slices.gathered == pytest.approx(gathered, abs=64 * 2 + 96 * 4)
    assert slices.nbytes == pytest.approx(
        nbytes, abs=64 * 2 * (1 + len(states)) + 96 * 4 * (1 + len(states))
    )
