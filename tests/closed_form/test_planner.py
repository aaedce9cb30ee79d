"""Oracle: what must hold of any ranking, whatever the model: order, budgets, the interpreter's
count of calls, its modules."""

from __future__ import annotations

import cProfile
import dataclasses
import pstats
import re
import subprocess
import sys
from typing import Any

import pytest

from blockwalk.plan.choices import AUTO
from blockwalk.plan.methods import method
from blockwalk.program.program import Lane, Pool, Shape
from blockwalk.simulate import hardware
from blockwalk.simulate.axes import label_of, plan_of
from blockwalk.simulate.bounds import Bounds
from blockwalk.simulate.hardware import Link
from blockwalk.simulate.planner import (
    Candidate,
    Task,
    candidates,
    choose,
    hides_link,
    largest_batch,
    look_at,
    programs_of,
    rank,
)
from blockwalk.simulate.search import whole_choices
from tests.given import costs, decoder
from tests.support.messages import refused

pytestmark = pytest.mark.fast

CALLS = 19_200_000
"""Function calls that the ranking may take: 18.6 million today, most of them to compile the plans
over ranks that are looked at."""

LLAMA_405B = decoder(layers=126, hidden=16384, wide=53248, keys=1024, vocab=128256, tied=False)
QWEN_3B = {
    lora_rank: decoder(
        layers=36, hidden=2048, wide=11008, keys=256, vocab=151936, lora_rank=lora_rank
    )
    for lora_rank in (None, 8)
}


def qwen_task(lora_rank: int | None, budget: int | None = None) -> Task:
    model = QWEN_3B[lora_rank]
    return Task(model, costs(model), hardware.load("rtx-4090"), Shape(1, 512), budget)


@pytest.mark.parametrize("rank_", [None, 8])
def test_a_larger_budget_is_never_worse(rank_: int | None) -> None:
    """The plans that fit a budget fit a larger one, so its best is at least as fast."""
    last = 0.0
    for budget in (1 * 10**9, 4 * 10**9, 10 * 10**9, 22 * 10**9):
        found = rank(qwen_task(rank_, budget))
        fits = [c for c in (*found.first_order, *found.forwards_alone) if c.simulation]
        assert all(c.peaks[Pool.DEVICE] <= min(budget, 0.92 * 23e9) for c in fits)
        best = max((c.simulation.tokens_per_second for c in fits if c.simulation), default=0.0)
        assert best >= last
        last = best


def test_the_largest_batch_fits_and_one_more_step_of_search_does_not() -> None:
    task = qwen_task(8)
    plan = method("plain", recompute="all")
    most = largest_batch(task, plan)
    assert most > 1
    for batch, fits in ((most, True), (most + most // 32 + 1, False)):
        (program, *_), _ = programs_of(task, plan, Shape(batch, task.shape.sequence))
        assert (program.peaks()[Pool.DEVICE] <= task.room) == fits


@pytest.mark.parametrize("resident", [0, AUTO])
def test_the_fewest_micro_batches_that_hide_the_link_are_found(resident: int) -> None:
    """Oracle: the simulated lanes of the answer, and of the same plan with one micro-batch less."""
    machine = dataclasses.replace(hardware.load("h200"), host_to_device=Link(5e9), noise_rate=5e11)
    task = dataclasses.replace(
        qwen_task(None), hardware=machine, budget=4 * 10**9, shape=Shape(1, 512)
    )

    def exposed(candidate: Candidate) -> float:
        assert candidate.simulation is not None
        lanes = {
            lane: sum(span.seconds for span in candidate.simulation.spans if span.op.lane is lane)
            for lane in (Lane.FETCH, Lane.COMPUTE)
        }
        return lanes[Lane.FETCH] - lanes[Lane.COMPUTE]

    streamed = look_at(task, "zo2", method("zo2", resident=resident))
    assert exposed(streamed) > 0
    larger = hides_link(task, streamed, most=64)
    assert larger is not None
    assert exposed(larger) <= 0
    steps = larger.plan.gradient_accumulation_steps
    assert larger.label.startswith(f"zo2, {steps} micro-batches")
    fewer = dataclasses.replace(
        larger.plan, gradient_accumulation_steps=steps - 1, resident=resident
    )
    assert exposed(look_at(task, "", fewer)) > 0
    assert hides_link(task, larger) is None
    assert hides_link(task, streamed, most=steps - 1) is None


def test_what_does_not_fit_is_left_out_with_figures() -> None:
    task = qwen_task(None)
    found = look_at(task, "plain", method("plain"))
    assert found.simulation is None
    assert "on the device, which has 23.0 GB, 0.92 of it for a plan" in found.refused


def test_405b_on_1024_devices_is_answered_in_few_calls_and_without_torch() -> None:
    """Oracle: the interpreter's count of function calls, which is the same on any machine."""
    cluster = dataclasses.replace(hardware.load("a100-80gb"), devices_per_node=8, nodes=128)
    profile = cProfile.Profile()
    found = profile.runcall(rank, Task(LLAMA_405B, costs(LLAMA_405B), cluster, Shape(1, 4096)))
    assert pstats.Stats(profile).total_calls < CALLS
    assert found.best is not None
    code = "import sys, blockwalk.simulate.planner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def small_task(
    machine: hardware.Hardware,
    lora_rank: int | None = None,
    *,
    rows: int = 1,
    budget: int | None = None,
) -> Task:
    model = decoder(layers=3, hidden=256, wide=704, keys=32, vocab=4000, lora_rank=lora_rank)
    return Task(model, costs(model), machine, Shape(rows, 128), budget)


@pytest.mark.parametrize("lora_rank", [None, 8])
def test_a_ranking_over_ranks_prints_every_plan_once_in_its_order(lora_rank: int | None) -> None:
    """Oracle: the rows that the ranking holds, and those that it left for their bounds; a
    zeroth-order step counts as its measured share of an exact one."""
    machine = dataclasses.replace(hardware.load("a40-48gb-x8-eth10"), nodes=2)
    task = small_task(machine, lora_rank, budget=3 * 10**8)
    found = rank(task)
    looked_at = [label for label, _ in candidates(task)]
    assert len(set(looked_at)) == len(looked_at)
    every = [*found.first_order, *found.forwards_alone, *found.refused]
    chosen = {True: r", prefetch \d", False: r", \d+ blocks stay"}
    left = [label_of(choice) for _, choice in found.found.waiting]
    labels = [*(re.sub(chosen[c.plan.home.gathered], "", c.label) for c in every), *left]
    assert sorted(labels) == sorted(looked_at)
    methods = {label.partition(",")[0] for label in labels}
    assert methods >= {"zero3", "zeropp", "mics", "fcdp", "hzp", "distzo2"}
    assert {c.plan.mesh.world for c in every} == {1, 16}
    printed = [line.split("  ")[0] for line in found.lines(most=100)]
    order = [c.label for c in every]
    assert [label for label in printed if label in order] == order
    speeds = [c.progress for c in found.ranked]
    assert speeds == sorted(speeds, reverse=True)
    for c in found.forwards_alone:
        assert c.simulation is not None
        assert c.progress == pytest.approx(c.simulation.tokens_per_second / 44)
    assert all(c.progress == 0.0 and c.refused for c in found.refused)
    for world in (1, 16):
        best = next(c for c in found.ranked if c.plan.mesh.world == world)
        assert choose(task, world=world) == best.plan


@pytest.mark.parametrize(
    ("room", "said"),
    [
        ({"device": "cpu", "device_bytes": 10**6}, "on the device, which has 1.0 MB"),
        ({"host_bytes": 10**6}, "of host memory, which has 1.0 MB"),
        ({"disk_bytes": 10**6}, "of disk, which has 1.0 MB"),
    ],
)
def test_the_memory_that_is_short_is_named(room: dict[str, Any], said: str) -> None:
    """A megabyte of one kind; the plan streams from that one, and on a processor device and host
    are one memory."""
    machine = dataclasses.replace(hardware.load("rtx-4090"), **room)
    tier = "disk" if "disk_bytes" in room else "host"
    plan = method("zo2", trainable=f"{tier} × raw", frozen=f"{tier} × raw", resident=0)
    found = look_at(small_task(machine), "zo2", plan)
    assert found.simulation is None
    assert said in found.refused
    assert largest_batch(small_task(machine), plan) == 0


def test_a_step_that_does_not_fit_beside_weights_that_do_says_what_would_help() -> None:
    machine = dataclasses.replace(hardware.load("rtx-4090"), device_bytes=10**8)
    found = look_at(small_task(machine, 8, rows=256), "plain", method("plain", recompute="none"))
    assert "fewer tokens a micro-batch would fit, or recompute: all" in found.refused
    with refused(ValueError, "method 1.0"):
        choose(small_task(dataclasses.replace(machine, device_bytes=10**6, host_bytes=10**6)))


def test_weights_that_stream_are_looked_at_on_both_tiers_of_an_accelerator() -> None:
    """Of a model that fits neither card nor host in 16 bits the host's is the faster; a processor's
    host is its device."""
    machine = dataclasses.replace(
        hardware.load("rtx-4090").without_host(), device_bytes=2 * 10**9, host_bytes=4 * 10**9
    )
    task = dataclasses.replace(qwen_task(8), hardware=machine)
    looked_at = {label for label, _ in candidates(task)}
    assert {"mebp, int4a", "mebp, host × int4a", "mebp, int8", "mebp, host × int8"} <= looked_at
    found = {re.sub(r", \d+ blocks stay", "", c.label): c for c in rank(task).first_order}
    host = found["mebp, host × int4a"]
    disk = found["mebp, int4a"]
    assert host.peaks[Pool.HOST] <= 0.8 * machine.host_bytes
    assert host.progress > disk.progress > 0
    assert choose(task).frozen.tier == "host"
    narrow = dataclasses.replace(task, hardware=dataclasses.replace(machine, host_bytes=5 * 10**8))
    assert choose(narrow).frozen.tier == "disk"
    laptop = dataclasses.replace(task, hardware=hardware.load("laptop"))
    assert not [label for label, _ in candidates(laptop) if label.startswith("mebp, host")]


def test_stages_are_proposed_where_the_network_is_slow() -> None:
    """Oracle: the ranking without them. Eight micro-batches fill stages, which send hidden states
    over 1 Gbit/s where others send parameters and gradients; a single one fills none."""
    model = decoder(layers=8, hidden=1024, wide=2816, keys=256, vocab=4000)
    machine = dataclasses.replace(
        hardware.load("a40-48gb-x8-eth10"), nodes=2, devices_per_node=2, inter=Link(1.25e8, 1e-4)
    )
    task = Task(model, costs(model), machine, Shape(1, 512), micro_batches=8)
    found = rank(task)
    without = [c for c in found.first_order if c.plan.mesh.pipeline == 1]
    assert found.best is not None
    assert found.best.plan.mesh.pipeline > 1
    assert found.best.progress > 1.2 * max(c.progress for c in without)
    alone = dataclasses.replace(task, micro_batches=1)
    assert all(plan.mesh.pipeline == 1 for _, plan in candidates(alone))


def test_stages_share_sums_where_their_gradients_have_room() -> None:
    """Oracle: the other of each two plans, which differ in ``pipeline.shared_sums`` alone: fewer
    reductions are faster, and cost device memory. A budget between the two leaves the leaner."""
    model = decoder(layers=8, hidden=1024, wide=2816, keys=256, vocab=4000)
    machine = dataclasses.replace(
        hardware.load("a40-48gb-x8-eth10"), nodes=4, devices_per_node=1, inter=Link(1.25e8, 1e-4)
    )
    task = Task(model, costs(model), machine, Shape(1, 512), micro_batches=8)
    two = "zero3, 2 stages"
    plans = dict(candidates(task))
    each, once = (
        look_at(task, label, dataclasses.replace(plans[label], recompute="all"))
        for label in (two, f"{two}, shared sums")
    )
    assert once.progress > 1.05 * each.progress
    assert once.peaks[Pool.DEVICE] > each.peaks[Pool.DEVICE]
    between = (once.peaks[Pool.DEVICE] + each.peaks[Pool.DEVICE]) // 2
    narrow = dataclasses.replace(task, budget=between)
    assert look_at(narrow, two, each.plan).simulation is not None
    assert look_at(narrow, two, once.plan).simulation is None
    a_rank_each = dataclasses.replace(task, hardware=dataclasses.replace(machine, nodes=2))
    assert not [label for label, _ in candidates(a_rank_each) if "shared sums" in label]


def test_long_sequences_are_put_in_parts_where_nothing_else_fits() -> None:
    """Oracle: the peaks of the programs themselves, on a machine between the leanest plans of whole
    sequences and of their parts."""
    model = decoder(layers=4, hidden=2048, wide=11008, keys=256, vocab=1000, lora_rank=8)
    machine = dataclasses.replace(hardware.load("h200"), devices_per_node=4, nodes=1)
    task = Task(model, costs(model), machine, Shape(1, 65_536), in_parts=True)

    def leanest(parts: bool) -> int:
        looked_at = [look_at(task, label, plan) for label, plan in candidates(task)]
        return min(
            c.peaks[Pool.DEVICE]
            for c in looked_at
            if c.plan.estimator.facts.walks_back and (c.plan.mesh.context > 1) == parts
        )

    between = (leanest(True) + leanest(False)) // 2
    assert leanest(True) < between < leanest(False)
    small = dataclasses.replace(task, budget=between)
    ranked = rank(small).first_order
    assert ranked
    for candidate in ranked:
        context = candidate.plan.mesh.context
        assert context > 1
        assert candidate.simulation is not None
        assert candidate.simulation.tokens == 65_536 * 4 // context
    whole = dataclasses.replace(small, in_parts=False)
    assert rank(whole).first_order == ()
    short = dataclasses.replace(task, shape=Shape(1, 512))
    assert all(plan.mesh.context == 1 for _, plan in candidates(short))


@pytest.mark.parametrize("lora_rank", [None, 8])
def test_no_bound_of_stages_is_above_what_their_programs_take(lora_rank: int | None) -> None:
    """Oracle: peaks and simulated seconds of the compiled programs. A bound above either would
    leave out a plan that fits, or that is the fastest."""
    model = decoder(layers=10, hidden=1024, wide=2816, keys=256, vocab=32_000, lora_rank=lora_rank)
    machine = dataclasses.replace(hardware.load("a40-48gb-x8-eth10"), nodes=2, devices_per_node=4)
    task = Task(model, costs(model), machine, Shape(1, 512), micro_batches=8)
    choices = whole_choices(task, Bounds(task), {})
    staged = [(least, choice) for least, choice in choices if int(choice["stages"]) > 1]
    assert len(staged) > 100
    nearest: list[float] = []
    for least, choice in staged[:: len(staged) // 12]:
        looked = look_at(task, label_of(choice), plan_of(task, choice))
        assert looked.simulation is not None
        assert least.device <= looked.peaks[Pool.DEVICE], looked.label
        assert least.seconds <= looked.simulation.seconds, looked.label
        nearest.append(least.seconds / looked.simulation.seconds)
    assert max(nearest) > 0.7
