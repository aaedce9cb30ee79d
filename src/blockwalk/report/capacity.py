"""Room for a run on this machine, before its first step: the device, and memory under every limit.

The figures compared are lower bounds: a run is refused where it cannot fit, and warned of where it
is close. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from blockwalk.plan.run_config import RunConfig
from blockwalk.program.program import human_bytes
from blockwalk.report.advice import next_plan
from blockwalk.report.forecast import DoesNotFit, Forecast
from blockwalk.system.process_memory import Limit, memory_limits

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
            share = f" for each of {ranks} ranks" if ranks > 1 else ""
            raise DoesNotFit(
                f"the run needs more than {human_bytes(held + tensors)} of memory{share}"
                f" ({human_bytes(held)} that the process holds already, {human_bytes(tensors)} of"
                f" tensors at the peak), and {limit.source} allows {human_bytes(limit.nbytes)}:"
                " raise that limit, lower batch_size or data.max_length, or move state to another"
                " tier (frozen: disk × int4a)"
                + _next_plan_of(run, forecast, max(limit.nbytes // ranks - held, 1))
            )


def _next_plan_of(run: RunConfig, forecast: Forecast, room: int) -> str:
    """Return the next plan that needs no more than ``room`` bytes of the host's memory, which on a
    processor is the device's."""
    shape = forecast.program.shape
    device = forecast.device
    if device == "cpu":
        return next_plan(run, room, shape, device=device)
    return next_plan(run, run.plan.budget, shape, device=device, host=room)


def close_memory(run: RunConfig, forecast: Forecast, held: int, foreseen: int) -> Iterator[str]:
    """Yield a warning where the bytes that are ``foreseen`` for the process are near the tightest
    limit. Where 0 are foreseen (the machine was not measured), they are the tensors and the bytes
    that the process ``held`` before the model was opened."""
    foreseen = foreseen or held + forecast.host_bytes()
    ranks = run.plan.mesh.ranks_per_node

    def share(limit: Limit) -> int:
        return limit.nbytes // (1 if limit.of_process else ranks)

    limit = min(memory_limits(), key=share)
    room = share(limit)
    if foreseen > CLOSE * room:
        yield (
            f"note: {human_bytes(foreseen)} of memory are foreseen for the process, and"
            f" {limit.source} leaves {human_bytes(room)}: the kernel may end the run; lower"
            " batch_size or data.max_length, or raise the limit"
        )
