"""``blockwalk plan --hardware``: every method on one machine, ranked; nothing here imports torch."""

from __future__ import annotations

import argparse

from blockwalk import planner
from blockwalk.config import RunConfig
from blockwalk.report.forecast import DoesNotFit
from blockwalk.simulate import analytic, hardware, trace


def plan_for(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Print the ranking.

    Raises:
        DoesNotFit: no plan fits.
    """
    task = task_of(run, arguments.hardware)
    machine = task.hardware
    trained = "every parameter" if task.lora_rank is None else f"adapters of rank {task.lora_rank}"
    nodes = f"{machine.nodes} × {machine.devices_per_node} devices" if machine.world > 1 else "one device"
    print(f"{run.model} on {machine.name} ({nodes}): {trained}, {task.batch} × {task.sequence} tokens a rank")
    ranking = planner.rank(task)
    print("\n".join(ranking.lines()))
    if arguments.largest_batch:
        print("-- most sequences of a micro-batch that fit")
        for label, plan in planner.candidates(task):
            print(f"{label:<34} {planner.largest_batch(task, plan):>8}")
    best = ranking.best
    if best is None or best.simulation is None:
        raise DoesNotFit(f"no plan of this model fits {machine.name}; the reasons stand beside each")
    if arguments.trace:
        timed = [(span.op, span.began, span.ended) for span in best.simulation.spans]
        trace.write(arguments.trace, trace.events(best.simulation.program, [timed], process=f"simulated: {best.label}"))
        print(f"timeline of {best.label}: {arguments.trace}")
    return 0


def task_of(run: RunConfig, machine: str) -> planner.Task:
    """What a run's settings ask for, on a machine by name or file."""
    found = hardware.load(machine)
    return planner.Task(
        config=analytic.read_config(run.model),
        hardware=found,
        batch=run.micro_batch_rows,
        sequence=run.data.max_length,
        lora_rank=None if run.lora is None else run.lora.rank,
        budget=run.plan.budget,
    )
