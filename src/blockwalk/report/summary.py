"""A run's model, memory and time in one line each, in the words that ``init``, ``plan`` and
``train`` share.

*Memory* is always that of the whole process, as :func:`blockwalk.system.process_memory` counts it.
Importing this imports no torch."""

from __future__ import annotations

from pathlib import Path

from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.words import counted, duration, short_count
from blockwalk.program.program import Pool, human_bytes
from blockwalk.report.forecast import Forecast
from blockwalk.simulate.simulator import Simulation

WIDTH = 9
"""Columns of a line's title."""

COLUMNS = 100
"""Columns of a line at most."""

GUESSED = "guess before doctor"
"""The mark of seconds that nothing was measured for."""


def titled(title: str, text: str) -> str:
    """Return a line of a summary."""
    return f"{title:<{WIDTH}}{text}"


def model_text(run: RunConfig, forecast: Forecast) -> str:
    """Return the model, what is trained of it, and the method, in one sentence."""
    plan = forecast.plan
    adapters = run.adapters
    frozen = forecast.model.numel(trainable=False)
    trained = forecast.model.numel(trainable=True)
    name = Path(run.model).name if Path(run.model).exists() else str(run.model)
    trained_text = f"all {short_count(trained)} parameters"
    if adapters is not None:
        kind_of_adapters = str(adapters).replace(" adapters", "")
        base = f"{short_count(frozen)} parameters {_placed(forecast)}"
        trained_text = f"{kind_of_adapters}, {short_count(trained)} over {base}"
    kind = plan.estimator.facts.help or str(plan.estimator)
    ranks = f", {counted(plan.mesh.world, 'rank')}" if plan.mesh.world > 1 else ""
    return f"{name}: {trained_text}; {kind} ({plan.method}){ranks}"


def _placed(forecast: Forecast) -> str:
    """Return where frozen parameters lie, and how they are rounded."""
    placement = forecast.plan.frozen
    tier = placement.tier
    place = f"on {tier}"
    if tier.facts.resident or (tier.facts.host and forecast.device == "cpu"):
        place = "in memory" if forecast.device == "cpu" else "on the device"
    elif tier.facts.host:
        place = "in host memory"
    codec = placement.codec
    return f"{place} in {codec}" if codec.encoded else place


def process_text(nbytes: int) -> str:
    """Return bytes of memory in words: interpreter, libraries and data are among them, pages of
    mapped files are not."""
    return f"{human_bytes(nbytes)} (whole process)"


def memory_text(forecast: Forecast, process: int) -> str:
    """Return the memory that a run takes.

    Args:
        process: bytes of the whole process at its peak; 0 on an accelerator, of which the tensors
            are told.
    """
    if process:
        return process_text(process)
    peaks = forecast.fullest.peaks()
    device = f"{human_bytes(peaks[Pool.DEVICE])} on the device"
    host = peaks[Pool.HOST]
    return f"{device}, {human_bytes(host)} of the host's" if host else device


def time_text(forecast: Forecast, steps: int, usual: Simulation | None = None) -> str:
    """Return the time of a step, and of all ``steps`` (0: not known). It is a range, and marked as
    a guess, before doctor has measured the machine.

    Args:
        usual: the simulation of a step of average length; None: as the longest.
    """
    longest = forecast.simulated()
    if longest is None:
        try:
            least, most = forecast.guessed_seconds()
        except Exception as error:  # nothing that is only foreseen ends a run
            return f"not foreseen ({str(error) or type(error).__name__})"
        run = f", {_range(steps * least, steps * most)} in all" if steps else ""
        return f"{_range(least, most)} a step{run} ({GUESSED})"
    # the simulation of a shorter row may take longer than that of the longest
    most = max(longest.seconds, usual.seconds if usual else 0.0)
    step = f"{duration(most)} a step"
    if usual is not None:
        step = f"{duration(usual.seconds)} a step, {duration(most)} at most"
    if not steps:
        return step
    return f"{step}; {duration(steps * (usual or longest).seconds)} in all"


def _range(least: float, most: float) -> str:
    """Return a guess at seconds, from the least to the most, in one digit each: ``5–40 s``, ``20
    s–3 min``."""
    fewest, largest = (_short(float(f"{seconds:.1g}")) for seconds in (least, most))
    if fewest == largest:
        return fewest
    number, _, unit = fewest.partition(" ")
    return f"{number if largest.endswith(f' {unit}') else fewest}–{largest}"


def _short(seconds: float) -> str:
    return duration(seconds).replace("minutes", "min").replace("hours", "h")


def memory_and_time(
    forecast: Forecast, process: int, steps: int, usual: Simulation | None = None
) -> str:
    """Return the line of the two figures that decide about a run."""
    memory = memory_text(forecast, process)
    return titled("memory", f"{memory}; time {time_text(forecast, steps, usual)}")
