"""Oracle: the kernel's list of a process's maps: bytes of unlinked scratch files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from blockwalk.estimators import backprop
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.program.program import Pool, Shape, StepKind
from blockwalk.tiers import reused_maps
from blockwalk.tiers.activations import SavedTensors
from blockwalk.tiers.scratch_maps import ScratchMaps
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model


def mapped(folder: Path) -> int:
    """Bytes of this process's maps of files that were in a folder."""
    spans = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(folder) in line
    ]
    return sum(int(stop, 16) - int(start, 16) for start, stop in spans)


def taken(folder: Path, micro_batches: int, **settings: Any) -> int:
    """Bytes of scratch files after two steps of micro-batches of one size."""
    changes = {
        "gradient_accumulation_steps": micro_batches,
        "frozen": "disk × raw",
        "update.timing": "step",
        **settings,
    }
    with Walker(
        tiny_model("llama"), method("mebp", **changes), lora=LoraSettings(rank=2), workdir=folder
    ) as walker:
        for seed in range(2):
            walker.step(random_batch(2 * micro_batches, 32, seed=seed))
        return mapped(folder)


@pytest.mark.parametrize("recompute", ["all", "none"])
def test_activations_of_micro_batches_that_follow_each_other_take_the_room_of_one(
    tmp_path: Path, recompute: str
) -> None:
    """A walk for each micro-batch has the activations of one alive; a walk block by block has those
    of all."""
    folders = [tmp_path / name for name in "abc"]
    one, four = (
        taken(folder, count, recompute=recompute)
        for folder, count in zip(folders, (1, 4), strict=False)
    )
    assert one == four
    assert taken(folders[2], 4, recompute=recompute, together=4) > four


def test_a_map_that_is_closed_holds_nothing(tmp_path: Path) -> None:
    """Oracle: the kernel, which gives one of the next maps of the same size the address of the one
    that was closed."""
    first = ScratchMaps(tmp_path / "a")
    second = ScratchMaps(tmp_path / "b")
    held = first.buffer(8 << 20)
    assert first.holds(held[5:])
    address = held.data_ptr()
    del held
    others = [second.buffer(8 << 20) for _ in range(64)]
    assert address in [other.data_ptr() for other in others]
    assert all(map(second.holds, others))
    assert not any(map(first.holds, others))


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_gradients_that_wait_on_disk_are_those_in_memory(architecture: str, tmp_path: Path) -> None:
    """Oracle: the same steps with gradients in memory, bit for bit, and the kernel: four bytes more
    of maps for each parameter, as foreseen. One step has micro-batches, whose gradients are added
    up in the map; opt's head is its embedding."""

    def trained(gradient: str) -> tuple[dict[str, Any], int, int]:
        folder = tmp_path / gradient
        settings = {"gradient_accumulation_steps": 2, "optimizer_state": "disk × fp32"}
        plan = method("plain", gradient=f"{gradient} × fp32", recompute="all", **settings)
        with Walker(tiny_model(architecture), plan, workdir=folder) as walker:
            for seed in range(3):
                walker.step(random_batch(4, 16, seed=seed))
            made = walker.gradients(random_batch(4, 16, seed=9))
            foreseen = walker.program(StepKind.TRAIN, Shape(2, 16)).peaks()[Pool.MAPPED]
            return {**walker.state_dict(), **made}, mapped(folder), foreseen

    (held, less, foresaw), (in_maps, more, foresees) = trained("device"), trained("disk")
    for name, value in held.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(in_maps[name])), name
    numel = sum(p.numel() for p in tiny_model(architecture).parameters())
    assert foresees - foresaw == 4 * numel
    assert abs(more - less - 4 * numel) < 4096 * 10


@pytest.mark.parametrize("repeats", [512, 1])
def test_a_small_view_that_a_graph_saves_does_not_keep_what_it_is_a_view_of(
    tmp_path: Path, repeats: int
) -> None:
    """Oracle: the storage's own count of references. A part of 1 kB, of 1 MB or of 2 kB (as a
    norm's statistics have), is copied to the map as a large tensor is: what stays in memory takes
    the place of a block's temporaries."""
    saved = SavedTensors(ScratchMaps(tmp_path))
    leaf = torch.ones(512, requires_grad=True)
    with saved.saving([leaf]):
        large = leaf.repeat(repeats) * 2
        kept = StorageWeakRef(large.untyped_storage())
        loss = large[:256].square().sum()
        del large
    assert kept.expired()
    loss.backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.cat([torch.full((256,), 8.0), torch.zeros(256)]))


def test_a_graph_that_nothing_differentiates_is_let_go_of(tmp_path: Path) -> None:
    """Oracle: the storage's own count of references. A reciprocal root saves its answer: held with
    its graph it would hold itself, as a tile's norm that leads nowhere does."""
    saved = SavedTensors(ScratchMaps(tmp_path))
    leaf = torch.ones(8, requires_grad=True)
    with saved.saving([leaf]):
        root = (leaf * 2).rsqrt()
    kept = StorageWeakRef(root.untyped_storage())
    del root
    assert kept.expired()


def test_views_of_one_tensor_are_read_back_as_they_were_and_written_once(tmp_path: Path) -> None:
    """Oracle: autograd without maps; the bytes in closed form. The whole, flat and turned about,
    and rows of it are one copy. Columns of it have gaps: those of two shapes are two."""
    saved = SavedTensors(ScratchMaps(tmp_path))
    leaf_NM = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def loss() -> torch.Tensor:
        whole_NM = leaf_NM * 3
        narrow_NK = whole_NM[:, 8:24]
        wide_HL = whole_NM.view(32, 64)[:, 8:40]  # as many from the same place on
        cubes = (narrow_NK**3).sum() + (wide_HL**3).sum()
        squares = whole_NM.square().sum() + whole_NM.view(-1).sin().sum()
        rows_KM = whole_NM[8:24]
        return cubes + squares + whole_NM.t().cos().sum() + rows_KM.t().sin().sum()

    (expected_NM,) = torch.autograd.grad(loss(), leaf_NM)
    with saved.saving([leaf_NM]):
        in_maps = loss()
    (found_NM,) = torch.autograd.grad(in_maps, leaf_NM)
    assert torch.equal(found_NM, expected_NM)
    assert saved.nbytes == 4 * (64 * 32 + 64 * 16 + 32 * 32)


def never_written() -> int:
    """Bytes of dirty pages of files that this process had dropped before the kernel wrote them."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["cancelled_write_bytes"])


def test_what_graphs_saved_goes_before_the_kernel_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: /proc/self/io. Maps are used again while they are fresh; older ones are dropped with
    what is dirty in them, when they would be written again or none of a step was in them."""
    saved = SavedTensors(ScratchMaps(tmp_path))
    numbers = torch.arange(4 << 20, dtype=torch.int32)
    saved.rewind()
    place = saved.write(numbers).data_ptr()
    saved.rewind()
    assert saved.write(numbers).data_ptr() == place
    before = never_written()
    monkeypatch.setattr(reused_maps, "FRESH", 0.0)
    saved.rewind()
    assert saved.write(numbers).equal(numbers)
    if never_written() == before:
        pytest.skip(
            "the folder for temporary files is on a file system without dirty pages of files"
        )
    assert never_written() - before >= numbers.nbytes
    saved.write(numbers)  # into a second map
    saved.rewind()
    saved.write(numbers[:1])
    before = never_written()
    saved.rewind()
    assert never_written() - before >= numbers.nbytes


def test_maps_of_graphs_close_in_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the kernel's list of maps. What graphs saved goes without a step that asks for it;
    the next step computes what it would have."""
    losses = []
    for seconds in (0.2, 20.0):
        monkeypatch.setattr(backprop, "FRESH", seconds)
        walker = Walker(
            tiny_model("llama"),
            method("mebp", frozen="disk × raw", recompute="none"),
            lora=LoraSettings(rank=2),
            workdir=tmp_path,
        )
        with walker:
            walker.step(random_batch(2, 32, seed=0))
            of_a_step = mapped(tmp_path)
            time.sleep(0.6)
            closed = of_a_step - mapped(tmp_path)
            assert (closed > 0) == (seconds < 1)
            losses.append([walker.step(random_batch(2, 32, seed=n)).loss for n in (1, 2)])
    assert losses[0] == losses[1]
