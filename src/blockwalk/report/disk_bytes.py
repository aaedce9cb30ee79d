"""Bytes that a run keeps on its disk and writes to it, foreseen: upper bounds of each.

Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from blockwalk.models.model_source import model_source
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import RunConfig
from blockwalk.program.placements import Placements
from blockwalk.program.program import OpKind, Pool
from blockwalk.program.residence import of_graphs
from blockwalk.program.resident_bytes import bytes_in_maps
from blockwalk.report.forecast import Forecast
from blockwalk.report.state_rows import StateRow


def states_of(forecast: Forecast) -> dict[str, StateRow]:
    """Return the kinds of state by name."""
    return {row.kind: row for row in forecast.rows()}


def weights_are_checkpoint(plan: Plan, states: Mapping[str, StateRow]) -> bool:
    """Return whether weights are changed where they outlive the process: no checkpoint copies them,
    and two versions of them lie there."""
    return plan.home.outlives(plan) and states["trainable"].placement == plan.trainable


def trained_bytes(states: Mapping[str, StateRow]) -> int:
    """Return bytes of trainables and of their optimizer states."""
    return states["trainable"].nbytes + states["optimizer"].nbytes


def pack_bytes(run: RunConfig, states: Mapping[str, StateRow]) -> int:
    """Return bytes of the pack that a run makes of its frozen weights; 0 where it makes none."""
    packs = run.plan.frozen.codec.encoded and not model_source(run.model).packed
    return states["frozen"].nbytes if packs else 0


def result_bytes(run: RunConfig, forecast: Forecast) -> int:
    """Return bytes of what a run saves at its end: the adapter, or the whole model."""
    if run.adapters is not None:
        return states_of(forecast)["trainable"].nbytes
    return sum(unit.nbytes() for unit in forecast.model.units)


def checkpoint_bytes(run: RunConfig, forecast: Forecast) -> int:
    """Return the bytes of one saved checkpoint."""
    states = states_of(forecast)
    return 0 if weights_are_checkpoint(run.plan, states) else trained_bytes(states)


def step_bytes(forecast: Forecast) -> int:
    """Return the most bytes that one optimizer step writes to the disk: trained parameters and
    optimizer states that lie there, what an update at the block's turn keeps to go back to, float32
    masters of slices, and activation checkpoints."""
    plan = forecast.plan
    states = states_of(forecast)
    kinds = ("trainable", "optimizer", "activation")
    nbytes = sum(states[kind].in_files for kind in kinds if kind in states)
    undo = trained_bytes(states) if plan.update.at_turn and forecast.device == "cpu" else 0
    return nbytes + undo


def written_bytes(run: RunConfig, forecast: Forecast, steps: int) -> int:
    """Return the most bytes that a run of ``steps`` optimizer steps writes to the disk: its pack of
    the frozen weights, its steps, its checkpoints, and what it saves at the end."""
    states = states_of(forecast)
    once = pack_bytes(run, states) + result_bytes(run, forecast)
    if weights_are_checkpoint(run.plan, states):
        once += trained_bytes(states)
    saves = -(-steps // run.save_every) if run.save_every else 1
    return once + steps * step_bytes(forecast) + saves * checkpoint_bytes(run, forecast)


def scratch_bytes(run: RunConfig, forecast: Forecast) -> int:
    """Return bytes of the files that a run makes in its scratch folder for its own time: state on
    the disk tier, that which a step may go back to, graphs, and a pack of the model; its data are
    not among them."""
    plan = run.plan
    states = states_of(forecast)
    pack = pack_bytes(run, states)
    if weights_are_checkpoint(plan, states):
        return pack + 2 * trained_bytes(states)
    kinds = states.keys() - {"frozen"}
    nbytes = pack
    if forecast.device != "cpu":
        places = Placements(plan, forecast.model, forecast.device)
        nbytes += bytes_in_maps(places)
        if not places.pools.slots:
            # of one process, gradients lie on the device there, and adapters in host memory
            kinds = {"activation"} & kinds
    else:
        nbytes += trained_bytes(states) if plan.update.at_turn else 0
        nbytes += _graph_bytes(forecast)
    return nbytes + sum(states[kind].in_files for kind in kinds)


def _graph_bytes(forecast: Forecast) -> int:
    """Return bytes of the file maps that graphs are written to: of those that are kept, and of one
    that is made again."""
    if of_graphs(forecast.plan, forecast.device).pool is not Pool.MAPPED:
        return 0
    forwards = [op for op in forecast.program.ops if op.kind is OpKind.FORWARD]
    kept = sum(nbytes for op in forwards for pool, nbytes in op.takes if pool is Pool.MAPPED)
    again = max((forecast.costs.of(block.kind).saved for block in forecast.model.blocks), default=0)
    return kept + again
