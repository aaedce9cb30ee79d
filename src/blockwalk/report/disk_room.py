"""Room for a run on the disks that it writes to, before its first step."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from blockwalk.checkpoints import run_checkpoint, sweeping
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.words import counted
from blockwalk.program.program import Pool, human_bytes
from blockwalk.program.residence import of_graphs
from blockwalk.report.disk_bytes import (
    result_bytes,
    scratch_bytes,
    states_of,
    trained_bytes,
    weights_are_checkpoint,
)
from blockwalk.report.forecast import Forecast
from blockwalk.system.atomic_files import nearest
from blockwalk.system.file_maps import has_shared_maps


def check_disks(run: RunConfig, forecast: Forecast, steps: int, data_maps: int = 0) -> None:
    """Refuse a run whose files the disks have no room for.

    Args:
        steps: optimizer steps that the run has before it.
        data_maps: bytes of its data in maps of nameless files.

    Raises:
        ValueError: checkpoints, the final model and scratch need more bytes than are free on their
            disk, those of the earlier files that they replace included; or scratch is on a file
            system without shared file maps.
    """
    folder = Path(run.output_dir)
    scratch_folder = folder / run_checkpoint.SCRATCH
    state_files = scratch_bytes(run, forecast)
    maps_files = state_files > 0 or of_graphs(run.plan, forecast.device).pool is Pool.MAPPED
    if maps_files and not has_shared_maps(scratch_folder):
        raise ValueError(
            f"{scratch_folder} is on a file system without shared file maps, which activations and"
            " packed or trained weights on the disk tier are kept in: choose an output_dir on"
            " another disk"
        )
    states = states_of(forecast)
    checkpoint = trained_bytes(states)
    kept = 0
    if not weights_are_checkpoint(run.plan, states):
        kept = _kept_checkpoints(run, steps)
    result = result_bytes(run, forecast)
    scratch = data_maps + state_files
    needs = [(folder, kept * checkpoint + result), (scratch_folder, scratch)]
    leftovers = (path for path in sweeping.leftovers(folder) if path.parent == folder)
    replaced = [*run_checkpoint.whole(folder), *leftovers, *sweeping.working_files(folder)]
    for disk in dict.fromkeys(_disk(place) for place, _ in needs):
        on_disk = [(place, nbytes) for place, nbytes in needs if _disk(place) == disk]
        place = on_disk[0][0]
        needed = sum(nbytes for _, nbytes in on_disk)
        free = shutil.disk_usage(nearest(place)).free
        if needed > free + sum(_size(path) for path in replaced if _disk(path) == disk):
            raise ValueError(
                f"the run writes {human_bytes(needed)} to the disk of {place}, which has"
                f" {human_bytes(free)} free: {counted(kept, 'checkpoint')} at a time of"
                f" {human_bytes(checkpoint)} (keep_checkpoints: {run.keep_checkpoints}, and the one"
                f" that is being written), {human_bytes(result)} at the end, {human_bytes(scratch)}"
                " of scratch; free some space, choose another output_dir, or lower keep_checkpoints"
            )


def _kept_checkpoints(run: RunConfig, steps: int) -> int:
    """Return the most checkpoints that lie there at a time, one that is being written included."""
    saves = max(1, -(-steps // run.save_every)) if run.save_every else 1
    if run.keep_best and run.eval_every:
        saves += -(-steps // run.eval_every)
    return min(run.keep_checkpoints + 1 + bool(run.keep_best), saves)


def _disk(path: Path) -> int:
    return os.stat(nearest(path)).st_dev


def _size(path: Path) -> int:
    """Return bytes of a file, or of those below a folder; 0 where there is nothing."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
