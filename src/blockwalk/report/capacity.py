"""Whether a run has room on this machine, before its first step: the device, memory under every
limit, and the disks that it writes to.

The figures compared are lower bounds: a run is refused where it cannot fit, and warned of where it
is close. Importing this imports no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from blockwalk.checkpoints import run_checkpoint, sweeping
from blockwalk.models.model_source import model_source
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.words import counted
from blockwalk.program.placements import Placements
from blockwalk.program.program import OpKind, Pool, human_bytes
from blockwalk.program.resident_bytes import bytes_in_maps
from blockwalk.program.state_sizes import maps_graphs
from blockwalk.report.advice import next_plan
from blockwalk.report.forecast import DoesNotFit, Forecast
from blockwalk.system.atomic_files import nearest
from blockwalk.system.file_maps import has_shared_maps
from blockwalk.system.process_memory import memory_limits

CLOSE = 0.9
"""The fraction of a limit from which on a run is warned."""


def check_budget(run: RunConfig, forecast: Forecast) -> None:
    """Refuse a plan that is above its own budget or above what is free on an accelerator, and name
    one that is not.

    Raises:
        DoesNotFit: see :meth:`blockwalk.report.forecast.Forecast.check`.
    """
    shape = forecast.program.shape
    device = forecast.device
    forecast.check(lambda room: next_plan(run, room, shape, device=device))


def check_memory(run: RunConfig, forecast: Forecast, held: int) -> None:
    """Refuse a run that no limit of memory has room for.

    Args:
        held: bytes that this process holds before the model is opened.

    Raises:
        DoesNotFit: the bytes that this process holds already and the tensors of a step are more
            than a limit of this process, of its control group, of one around it, or of the machine.
    """
    tensors = forecast.host_bytes()
    for limit in memory_limits():
        ranks = 1 if limit.of_process else run.plan.mesh.ranks_per_node
        if ranks * (held + tensors) > limit.nbytes + limit.swap:
            each = f" for each of {ranks} ranks" if ranks > 1 else ""
            raise DoesNotFit(
                f"the run needs more than {human_bytes(held + tensors)} of memory{each}"
                f" ({human_bytes(held)} that the process holds already, {human_bytes(tensors)} of"
                f" tensors at the peak), and {limit.source} allows {human_bytes(limit.nbytes)}:"
                " raise that limit, lower batch_size or data.max_length, or move state to another"
                " tier (frozen: disk × int4a)"
                + _next_plan_of(run, forecast, max(limit.nbytes // ranks - held, 1))
            )


def _next_plan_of(run: RunConfig, forecast: Forecast, left: int) -> str:
    """Return the next plan that needs no more than ``left`` bytes of the host's memory, which on a
    processor is the device's."""
    shape = forecast.program.shape
    device = forecast.device
    if device == "cpu":
        return next_plan(run, left, shape, device=device)
    return next_plan(run, run.plan.budget, shape, device=device, host=left)


def close_memory(run: RunConfig, forecast: Forecast, held: int, foreseen: int) -> Iterator[str]:
    """Yield a warning where the bytes that are ``foreseen`` for the process are near the tightest
    limit. Where 0 are foreseen (the machine was not measured), they are the tensors and the bytes
    that the process ``held`` before the model was opened."""
    foreseen = foreseen or held + forecast.host_bytes()
    ranks = run.plan.mesh.ranks_per_node
    limits = [(each.nbytes // (1 if each.of_process else ranks), each) for each in memory_limits()]
    room, limit = min(limits, key=lambda pair: pair[0])
    if foreseen > CLOSE * room:
        yield (
            f"note: {human_bytes(foreseen)} of memory are foreseen for the process, and"
            f" {limit.source} leaves {human_bytes(room)}: the kernel may end the run; lower"
            " batch_size or data.max_length, or raise the limit"
        )


def scratch_bytes(run: RunConfig, forecast: Forecast) -> int:
    """Return bytes of the files that a run makes in its scratch folder for its own time: state on
    the disk tier, that which a step may go back to, graphs, and a pack of the model; its data are
    not among them."""
    plan = run.plan
    rows = {row.kind: row for row in forecast.rows()}
    packs = plan.frozen.codec.encoded and not model_source(run.model).packed
    pack = rows["frozen"].nbytes if packs else 0
    state = rows["trainable"].nbytes + rows["optimizer"].nbytes
    if plan.zeroth_order:
        return pack + (2 * state if rows["trainable"].placement.on_disk else 0)
    on_disk = [row for row in rows.values() if row.placement.on_disk and row.kind != "frozen"]
    masters = 0
    if plan.sharded and plan.optimizer_state.on_disk:  # float32 masters lie beside the states
        masters = 4 * forecast.model.numel(trainable=True)
    if (
        forecast.device != "cpu"
    ):  # of one process, gradients lie on the device there, and adapters in host memory
        on_disk = [row for row in on_disk if row.kind == "activation" or plan.sharded]
        in_maps = bytes_in_maps(Placements(plan, forecast.model, forecast.device))
        return pack + masters + in_maps + sum(row.nbytes for row in on_disk)
    undo = state if plan.update.at_turn else 0
    return pack + masters + sum(row.nbytes for row in on_disk) + undo + _graph_bytes(forecast)


def _graph_bytes(forecast: Forecast) -> int:
    """Return bytes of the file maps that graphs are written to: of those that are kept, and of one
    that is made again."""
    if not maps_graphs(forecast.plan, forecast.device):
        return 0
    forwards = [op for op in forecast.program.ops if op.kind is OpKind.FORWARD]
    kept = sum(nbytes for op in forwards for pool, nbytes in op.takes if pool is Pool.MAPPED)
    again = max((forecast.costs.of(block.kind).saved for block in forecast.model.blocks), default=0)
    return kept + again


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
    rows = {row.kind: row for row in forecast.rows()}
    trained = rows["trainable"].nbytes
    state = rows["optimizer"].nbytes
    zeroth_order = run.plan.zeroth_order
    streamed = zeroth_order and rows["trainable"].placement.on_disk
    saves = max(1, -(-steps // run.save_every)) if run.save_every else 1
    if run.keep_best:
        saves += -(-steps // run.eval_every) if run.eval_every else 0
    kept = 0 if streamed else min(run.keep_checkpoints + 1 + bool(run.keep_best), saves)
    final = (
        trained if run.adapters is not None else sum(unit.nbytes() for unit in forecast.model.units)
    )
    written = scratch_bytes(run, forecast)
    scratch = data_maps + written
    if (written or maps_graphs(run.plan, forecast.device)) and not has_shared_maps(
        folder / run_checkpoint.SCRATCH
    ):
        raise ValueError(
            f"{folder / run_checkpoint.SCRATCH} is on a file system without shared file maps, which"
            " activations and packed or trained weights on the disk tier are kept in: choose an"
            " output_dir on another disk"
        )
    needs = [(folder, kept * (trained + state) + final), (folder / run_checkpoint.SCRATCH, scratch)]
    half_written = (path for path in sweeping.leftovers(folder) if path.parent == folder)
    goes = [(path, _size(path)) for path in (*run_checkpoint.whole(folder), *half_written)]
    goes += [(path, _size(path)) for path in sweeping.working_files(folder)]
    for disk in dict.fromkeys(_disk(place) for place, _ in needs):
        needed = sum(nbytes for place, nbytes in needs if _disk(place) == disk)
        place = next(place for place, _ in needs if _disk(place) == disk)
        free = shutil.disk_usage(nearest(place)).free
        if needed > free + sum(nbytes for path, nbytes in goes if _disk(path) == disk):
            raise ValueError(
                f"the run writes {human_bytes(needed)} to the disk of {place}, which has"
                f" {human_bytes(free)} free: {counted(kept, 'checkpoint')} at a time of"
                f" {human_bytes(trained + state)} (keep_checkpoints: {run.keep_checkpoints}, and"
                f" the one that is being written), {human_bytes(final)} at the end,"
                f" {human_bytes(scratch)} of scratch; free some space, choose another output_dir,"
                " or lower keep_checkpoints"
            )


def _disk(path: Path) -> int:
    return os.stat(nearest(path)).st_dev


def _size(path: Path) -> int:
    """Return bytes of a file, or of those below a folder; 0 where there is nothing."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
