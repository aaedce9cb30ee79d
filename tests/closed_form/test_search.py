"""Oracle: whole steps, compiled and simulated with every micro-batch; peaks and seconds of the
programs themselves, beside the bounds that leave plans out."""

from __future__ import annotations

import dataclasses
import math

import pytest

from blockwalk.program.program import Pool, Shape
from blockwalk.simulate import hardware
from blockwalk.simulate.axes import AXES, label_of, layout_of, plan_of
from blockwalk.simulate.bounds import Bounds
from blockwalk.simulate.planner import Task, candidates, look_at, programs_of
from blockwalk.simulate.search import KEPT, explained, search, whole_choices
from blockwalk.simulate.simulator import simulate
from tests.given import costs, decoder

pytestmark = pytest.mark.fast

MODEL = decoder(layers=8, hidden=1024, wide=2816, keys=256, vocab=4000)
MACHINE = dataclasses.replace(hardware.load("asynchzp-64gb"), devices_per_node=4, nodes=4)
TASK = Task(MODEL, costs(MODEL), MACHINE, Shape(1, 4096), in_parts=True, tokens=1 << 20)
CHOICES = [choice for _, choice in whole_choices(TASK, Bounds(TASK), {})]


def chosen(*facts: tuple[str, object]) -> dict[str, int | str]:
    """The first choice of hzp with these values."""
    wanted = dict(facts)
    return dict(
        next(
            choice
            for choice in CHOICES
            if choice["method"] == "hzp" and wanted.items() <= choice.items()
        )
    )


def test_axes_are_combined() -> None:
    """Stages with parts, both with groups of their own, gradients over other ranks than
    parameters: as AsyncHZP's published configurations are."""
    found = [plan for _, plan in candidates(TASK) if plan.estimator.facts.walks_back]
    assert any(plan.mesh.pipeline > 1 and plan.mesh.context > 1 for plan in found)
    assert any(
        plan.mesh.pipeline > 1 and plan.mesh.context > 1 and plan.mesh.groups for plan in found
    )
    assert any(
        plan.method == "hzp" and plan.trainable.group != plan.gradient.group for plan in found
    )
    for plan in found:
        if plan.mesh.world > 1:
            rows = plan.row_shares * plan.gradient_accumulation_steps
            assert rows * TASK.shape.tokens == TASK.tokens


@pytest.mark.parametrize(
    "facts",
    [
        {"stages": 1, "parts": 1},
        {"stages": 1, "parts": 4, "together": 2},
        {"stages": 2, "parts": 2, "chunks": 2},
        {"stages": 4, "parts": 1, "chunks": 1, "sums": "shared"},
    ],
)
def test_a_long_step_is_what_two_short_ones_say(facts: dict[str, object]) -> None:
    """Oracle: the whole step; and its bounds are below what it takes."""
    choice = chosen(*facts.items())
    plan = plan_of(TASK, choice)
    assert plan.gradient_accumulation_steps >= 16
    candidate = look_at(TASK, label_of(choice), plan)
    programs, known = programs_of(TASK, dataclasses.replace(plan, budget=TASK.room))
    whole = simulate(programs, plan, MODEL, MACHINE, known)
    assert candidate.simulation is not None
    assert candidate.simulation.seconds == pytest.approx(whole.seconds, rel=1e-2)
    assert candidate.simulation.tokens == whole.tokens == TASK.tokens
    assert candidate.simulation.mfu == pytest.approx(whole.mfu, rel=1e-2)
    for lane, nbytes in whole.bytes_by_lane.items():
        assert candidate.simulation.bytes_by_lane[lane] == pytest.approx(nbytes, rel=1e-3)
    assert candidate.peaks[Pool.DEVICE] == max(p.peaks()[Pool.DEVICE] for p in programs)
    least = Bounds(TASK).least(choice)
    assert least.tokens == TASK.tokens
    assert 0.5 * whole.seconds < least.seconds <= whole.seconds * 1.001
    assert least.device <= candidate.peaks[Pool.DEVICE]


def test_no_other_choice_of_the_best_configuration_is_much_faster() -> None:
    """Oracle: choices that the search left for their bounds, looked at."""
    found = search(TASK, lambda label, plan: look_at(TASK, label, plan))
    assert found.best
    layouts = {(c.plan.mesh.pipeline, c.plan.mesh.context) for c in found.best}
    assert len(layouts) == len(found.best) <= len({layout_of(choice) for choice in CHOICES})
    best = found.best[0].a_token
    for _, choice in found.waiting[:: max(len(found.waiting) // 8, 1)]:
        left = look_at(TASK, label_of(choice), plan_of(TASK, choice))
        assert left.a_token >= best * 0.98
    text = "\n".join(explained(found))
    assert all(axis.name in text for axis in AXES if len(found.values[axis.name]) > 1)
    assert math.isfinite(found.best[min(KEPT, len(found.best)) - 1].a_token)
