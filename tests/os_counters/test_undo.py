"""Oracles: the values before a step; the kernel's list of this process's maps."""

from pathlib import Path

import pytest
import torch

from blockwalk.engine import undo
from blockwalk.engine.undo import Undo
from blockwalk.tiers.scratch_maps import ScratchMaps

CPU = torch.device("cpu")


def maps_in(folder: Path) -> list[str]:
    """The addresses of the maps of a folder's files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[0] for line in lines if str(folder) in line]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_step_changed_twice_has_its_first_value_after_it_was_refused(
    tmp_path: Path, device: str
) -> None:
    """No program updates a unit twice in a step. An accelerator's copies lie beside the values,
    here in host memory."""
    values = [torch.arange(6.0).view(2, 3), torch.tensor([7, 8], dtype=torch.bfloat16)]
    before = [tensor.clone() for tensor in values]
    copies = Undo(ScratchMaps(tmp_path), torch.device(device))
    for _ in range(2):
        copies.remember(1, values)
        for tensor in values:
            tensor.add_(1)
    assert copies.put_back()
    assert all(torch.equal(a, b) for a, b in zip(values, before, strict=True))
    assert not copies.put_back()


@pytest.mark.parametrize("kept", [1 << 20, 0])
def test_copies_lie_in_the_maps_of_the_step_before_unless_they_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Dirty pages of a file that stays open are written to the disk in the end."""
    monkeypatch.setattr(undo, "_KEPT", kept)
    copies = Undo(ScratchMaps(tmp_path), CPU)
    value = torch.zeros(1000)
    seen = []
    for _ in range(3):
        copies.remember(1, [value])
        seen.append(maps_in(tmp_path))
        assert len(seen[-1]) == 1
        copies.commit()
    if kept:
        assert seen[0] == seen[1] == seen[2]
        assert maps_in(tmp_path) == seen[2]
    else:
        assert not maps_in(tmp_path)
