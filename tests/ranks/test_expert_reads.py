"""Closed form: of experts that are stored one by one, a rank reads the bytes of its slices, counted
where they are read; and every rank's slices together are the model's own weights. Of stacks in
codes what torch's operators are given."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockwalk.cutting.verify import certified
from blockwalk.engine.pack import pack
from blockwalk.numerics.codecs.weights import EncodedWeight
from blockwalk.plan.methods import method
from blockwalk.plan.placement import Codec, StateKind
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.held import masters
from tests.support.processes import run_ranks
from tests.support.quantised_files import tiny, write
from tests.support.sharded_runs import _loss


def _opened(
    rank: int, folder: Path, lora: bool
) -> tuple[Counter[str], int, dict[str, torch.Tensor], float]:
    """Return the bytes read of each stored expert, the bytes of the slices that this rank keeps of
    all experts, the masters, and the loss of a step."""
    read: Counter[str] = Counter()
    whole = CheckpointFolder._view
    rows = CheckpointFolder._rows

    def viewed(self, stored):  # type: ignore[no-untyped-def]
        read[stored.key] += stored.nbytes
        return whole(self, stored)

    def some_rows(self, stored, start, stop):  # type: ignore[no-untyped-def]
        part = rows(self, stored, start, stop)
        read[stored.key] += part.nbytes
        return part

    plan = method("zero3", mesh={"world": 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "_view", viewed)
        patch.setattr(CheckpointFolder, "_rows", some_rows)
        walker = Walker(folder, plan, lora={"rank": 2} if lora else None, workdir=folder / "work")
    with walker:
        home: Any = walker.engine.homes[StateKind.FROZEN if lora else StateKind.TRAINABLE]
        slices = 0
        for unit in home.units:
            for run in home.runs(unit, 2) if unit.numel else ():
                if ".experts." in run.name:
                    slices += run.size * unit.dtype.itemsize
        weights = masters(walker)
        return read, slices, weights, walker.step(random_batch(4, 8)).loss


@pytest.mark.parametrize("lora", [False, True])
def test_a_rank_reads_of_experts_what_its_slices_hold(lora: bool, tmp_path: Path) -> None:
    model = tiny_model("mixtral", num_local_experts=6)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    experts = {name: tensor for name, tensor in stored.items() if ".experts." in name}
    assert len(experts) == 2 * 6 * 3  # one by one
    certified(tiny_model("mixtral", num_local_experts=6))
    answers = run_ranks(2, _opened, tmp_path, lora, timeout=400)
    for read, slices, weights, loss in answers:
        in_experts = sum(nbytes for name, nbytes in read.items() if name in experts)
        assert slices <= in_experts <= 1.1 * slices
        assert loss == pytest.approx(float(_loss(model, random_batch(4, 8)).detach()), rel=1e-6)
        for name, parameter in model.named_parameters() if not lora else ():
            assert torch.equal(weights[name], parameter), name
    assert sum(slices for _, slices, *_ in answers) == sum(t.nbytes for t in experts.values())


def _sliced_stacks(walker: Walker) -> int:
    """The elements of stacked experts in the slices that this rank keeps."""
    home: Any = walker.engine.homes[StateKind.FROZEN]
    runs = ((unit, run) for unit in home.units if unit.numel for run in home.runs(unit, 2))
    return sum(run.size for unit, run in runs if len(unit.params[run.name].shape) == 3)


def _opened_in_codes(rank: int, folder: Path) -> tuple[int, int, float]:
    """Return the elements of stacked experts that this rank decodes as it opens the model, those of
    the slices that it keeps, and the loss of a step."""
    decoded = 0
    stacks = 0
    read_range = EncodedWeight.read_range_into
    rows = EncodedWeight.rows

    def ranges(self, start, out_P):  # type: ignore[no-untyped-def]
        nonlocal stacks
        stacks += len(self.shape) == 3
        read_range(self, start, out_P)
        stacks -= len(self.shape) == 3

    def some_rows(self, start, stop):  # type: ignore[no-untyped-def]
        nonlocal decoded
        decoded += (stop - start) * self.shape[-1] if stacks else 0
        return rows(self, start, stop)

    plan = method("zero3", mesh={"world": 2}, compute_dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EncodedWeight, "read_range_into", ranges)
        patch.setattr(EncodedWeight, "rows", some_rows)
        walker = Walker(folder, plan, lora={"rank": 2}, workdir=folder.parent / "work")
    with walker:
        return decoded, _sliced_stacks(walker), walker.step(random_batch(4, 8)).loss


@pytest.mark.parametrize("stored", ["packed to int4", "mxfp4"])
def test_a_rank_decodes_of_a_stack_in_codes_what_its_slices_hold(
    stored: str, tmp_path: Path
) -> None:
    """Closed form: half of the elements, and the rows at the ends of slices; the loss is one
    process's, which decodes each expert whole."""
    folder = tmp_path / "model"
    if stored == "mxfp4":
        write(folder, "mxfp4")
        certified(tiny("mxfp4"))
    else:
        model = tiny_model("mixtral", num_local_experts=6)
        model.save_pretrained(tmp_path / "whole")
        pack(tmp_path / "whole", folder, Codec.INT4)
        certified(tiny_model("mixtral", num_local_experts=6))
    answers = run_ranks(2, _opened_in_codes, folder, timeout=400)
    alone = method("plain", compute_dtype="float32")
    with Walker(folder, alone, lora={"rank": 2}, workdir=tmp_path / "alone") as walker:
        expected = walker.step(random_batch(4, 8)).loss
    for decoded, slices, loss in answers:
        assert 0 < slices <= decoded <= 1.1 * slices
        assert loss == pytest.approx(expected, rel=1e-6)


class _Reads(TorchDispatchMode):
    """Bytes that torch's operators read where the stacks of a folder's files are mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.folders: list[CheckpointFolder] = []
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not func.is_view:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor) and self._in_stacks(value):
                    self.nbytes += value.numel() * value.itemsize
        return func(*args, **kwargs or {})

    def _in_stacks(self, value: torch.Tensor) -> bool:
        return value.device.type == "cpu" and any(
            begin <= value.data_ptr() - file.bytes_P.data_ptr() < stop
            for folder in self.folders
            for file in folder._files.values()
            for begin, stop in _stacks_in(file.path)
        )


@functools.cache
def _stacks_in(file: Path) -> list[tuple[int, int]]:
    """Return where codes and scales lie in a safetensors file, by its header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return [
        (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
        for name, entry in header.items()
        if name.endswith(("_blocks", "_scales"))
    ]


def _bytes_of_stacks(rank: int, folder: Path) -> tuple[int, int]:
    """Return the bytes of stacks in MXFP4 that this rank reads as it opens the model, and those of
    codes and scales of the slices that it keeps."""
    reads = _Reads()
    begin = CheckpointFolder.__init__

    def noted(self, *args):  # type: ignore[no-untyped-def]
        begin(self, *args)
        reads.folders.append(self)

    plan = method("zero3", mesh={"world": 2}, compute_dtype="float32")
    with pytest.MonkeyPatch.context() as patch, reads:
        patch.setattr(CheckpointFolder, "__init__", noted)
        walker = Walker(folder, plan, lora={"rank": 2}, workdir=folder.parent / "work")
    with walker:
        slices = _sliced_stacks(walker)
    return reads.nbytes, slices // 2 + slices // 32


def test_a_rank_reads_of_a_stack_in_codes_the_bytes_of_its_slices(tmp_path: Path) -> None:
    """Oracle: the tensors that torch hands to its operators, where they lie in the files; by hand
    half a byte and a 32nd of one for each element."""
    write(tmp_path / "model", "mxfp4")
    certified(tiny("mxfp4"))
    for read, slices in run_ranks(2, _bytes_of_stacks, tmp_path / "model", timeout=400):
        assert 0 < slices <= read <= 1.1 * slices
