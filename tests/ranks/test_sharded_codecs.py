"""Oracle: one process that trains adapters on the dense model that the codes stand for; bytes in
closed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockwalk.cutting.verify import certified
from blockwalk.engine.pack import pack
from blockwalk.numerics.codecs import codecs
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.plan.model_spec import encoded_nbytes
from blockwalk.plan.placement import Codec, StateKind
from blockwalk.program.flat_layout import part_layout
from blockwalk.walk.walker import Walker
from tests.models import random_batch
from tests.support.processes import run_ranks
from tests.support.sharded_runs import compare, make, plain_run, walked

CASES: list[tuple[str, str, Codec, dict[str, Any]]] = [
    ("llama", "fcdp", Codec.INT4, {"gradient_accumulation_steps": 2}),
    ("llama", "zero3", Codec.INT8, {"recompute": "none"}),
    ("opt", "hzp", Codec.INT4, {}),
    ("mixtral", "fcdp", Codec.INT4, {}),
]


def decoded(kind: str, codec: Codec) -> nn.Module:
    """The model with every frozen matrix as its codes stand for it."""
    model = make(kind, lora=True)
    frozen = {
        p.name
        for p in certified(make(kind, lora=True)).spec().params()
        if not p.trainable and p.quantizable
    }
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if plain in frozen and parameter.dim() == 2:
            layout = Layout(tuple(parameter.shape), codec)
            bytes_P = codecs.encode_rows(
                parameter.data, torch.empty(layout.nbytes, dtype=torch.uint8), layout, 0
            )
            codecs.decode_rows(bytes_P, layout, 0, layout.rows, parameter.data)
    return model


def frozen_bytes(walker: Walker) -> tuple[int, int]:
    """Of the frozen slices that a rank keeps: held, and by the layouts."""
    engine: Any = walker.engine
    units = [unit for unit in engine.homes[StateKind.FROZEN].units if unit.numel]
    kept = sum((unit.node if unit.node is not None else unit.source).nbytes for unit in units)
    layouts = [
        part_layout(walker.plan, walker.spec, unit, StateKind.FROZEN) for unit in walker.spec.units
    ]
    return kept, sum(layout.nbytes for layout in layouts) // walker.plan.parameter_ranks


def _walked(rank: int) -> list[dict[str, Any]]:
    mesh = {"world": 4, "ranks_per_node": 2}
    found = []
    for kind, name, codec, changes in CASES:
        frozen = f"device × {codec} × {method(name).frozen.group}"
        found.append(walked(kind, True, name, mesh, 2, look=frozen_bytes, frozen=frozen, **changes))
    return found


def test_frozen_matrices_travel_and_rest_in_eight_and_four_bits() -> None:
    for kind in {case[0] for case in CASES}:
        certified(make(kind, True))
    answers = run_ranks(4, _walked)[0]
    for (kind, name, codec, _), found in zip(CASES, answers, strict=True):
        batches = [random_batch(8, 10, seed=step) for step in range(2)]
        compare(found, plain_run(decoded(kind, codec), batches), (kind, name, codec))
        kept, expected = found["looked"]
        assert kept == expected


def test_a_flat_buffer_of_codes_takes_their_bytes() -> None:
    """Closed form: codes and scales of each matrix, the compute dtype's bytes of the rest, padded
    to 64 bytes a rank."""
    spec = certified(make("llama", True)).spec()
    plan = method("fcdp", mesh={"world": 4, "ranks_per_node": 2}, frozen="device × int4 × node")
    for unit in spec.units:
        layout = part_layout(plan, spec, unit, StateKind.FROZEN)
        sizes = [
            encoded_nbytes(p.shape, "float32", Codec.INT4)
            if p.quantizable and len(p.shape) == 2
            else 4 * p.numel
            for p in unit.params
            if not p.trainable
        ]
        least = sum(-(-size // 64) * 64 for size in sizes)
        assert least <= layout.nbytes < least + 4 * 64


def _from_store(rank: int, folder: Path) -> list[float]:
    mesh = {"world": 2, "ranks_per_node": 1}
    losses = []
    for source, frozen in (
        (folder / "model", "device × int8 × node"),
        (folder / "store", "device × int8 × node"),
    ):
        plan = method("fcdp", mesh=mesh, frozen=frozen)
        with Walker(
            source,
            plan,
            lora=LoraSettings(rank=2),
            device="cpu",
            workdir=folder / f"work-{source.name}",
        ) as walker:
            losses += [walker.step(random_batch(4, 10, seed=step)).loss for step in range(2)]
    return losses


def test_slices_are_read_from_a_store_as_they_lie_there(tmp_path: Path) -> None:
    """Oracle: the checkpoint folder that the store was packed from, bit for bit."""
    model = make("llama", False)
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    pack(tmp_path / "model", tmp_path / "store", Codec.INT8)
    first, second, *from_store = run_ranks(2, _from_store, tmp_path)[0]
    assert from_store == [first, second]
    assert first != second
