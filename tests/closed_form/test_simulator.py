"""Oracle: the lifetime analysis, closed forms of α–β links and lanes, and what must hold of any
honest forecast."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockwalk.plan.methods import method
from blockwalk.plan.placement import StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.compile import compile, compile_ranks
from blockwalk.program.costs import Pending
from blockwalk.program.program import Draft, Lane, Op, OpKind, Pool, Program, Shape, StepKind
from blockwalk.simulate import hardware, process_memory, simulator, timeline
from blockwalk.simulate.hardware import Hardware, Link
from blockwalk.simulate.seconds import CostModel
from tests.given import costs as costs_of
from tests.given import decoder
from tests.support.messages import refused

pytestmark = pytest.mark.fast

MODEL = decoder(layers=5, hidden=256, wide=704, keys=128, vocab=4000)
COSTS = costs_of(MODEL)
SHAPE = Shape(2, 64)
MESH = {"mesh": {"world": 16, "ranks_per_node": 8}}
PLANS = {
    "plain": method("plain"),
    "recomputed": method("plain", recompute="all", gradient_accumulation_steps=2),
    "host": method(
        "plain",
        recompute="all",
        frozen="host × raw",
        trainable="host × fp32",
        optimizer_state="host × fp32",
        activation="host",
        prefetch=2,
    ),
    "mezo": method("mezo"),
    "zo2": method("zo2"),
    "zero3": method("zero3", **MESH),
    "fcdp": method("fcdp", **MESH),
}


def program_of(plan: Plan) -> tuple[Program, object, object]:
    costs = COSTS(plan, SHAPE)
    model = MODEL
    return compile(plan, model, StepKind.TRAIN, SHAPE, costs=costs, device="cuda"), model, costs


def run(plan: Plan, machine: Hardware) -> simulator.Simulation:
    program, model, costs = program_of(plan)
    return simulator.simulate((program,), plan, model, machine, costs)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PLANS)
def test_ops_that_cost_nothing_peak_as_the_lifetime_analysis_says(name: str) -> None:
    program, _, _ = program_of(PLANS[name])
    assert (
        simulator.peaks(program, simulator.schedule((program,), lambda _: 0.0)[0])
        == program.peaks()
    )


@pytest.mark.parametrize("name", PLANS)
def test_simulated_peaks_never_exceed_the_programs_order_by_more_than_what_is_in_flight(
    name: str,
) -> None:
    """Lanes that run ahead hold what they carry: no more than every op's own claim at once."""
    machine = hardware.load("a40-48gb-x8-eth1")
    found, (program, _, _) = run(PLANS[name], machine), program_of(PLANS[name])
    claims = sum(
        n
        for op in program.ops
        if op.lane is not Lane.COMPUTE
        for pool, n in op.takes
        if pool is Pool.DEVICE
    )
    assert found.peaks[Pool.DEVICE] <= program.peaks()[Pool.DEVICE] + claims
    assert found.bytes_by_lane == program.bytes_by_lane()


PARTS = (
    "host_to_device",
    "device_to_host",
    "disk_read",
    "disk_write",
    "intra",
    "inter",
    "memory_bandwidth",
    "flops",
    "attention",
)


def improved(machine: Hardware, part: str, by: float) -> Hardware:
    """The machine with one part ``by`` times as fast."""
    was = getattr(machine, part)
    if isinstance(was, Link):
        change: object = Link(was.bandwidth * by, was.latency / by)
    elif isinstance(was, dict):
        change = {name: rate * by for name, rate in was.items()}
    else:
        change = was * by
    return dataclasses.replace(machine, **{part: change})  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(PLANS)),
    faster=st.sampled_from(PARTS),
    by=st.floats(1.0, 50.0),
)
def test_a_faster_part_never_makes_a_step_slower(name: str, faster: str, by: float) -> None:
    """Where two lanes take turns on a link another op may come first: there by a hundredth or
    two."""
    machine = dataclasses.replace(hardware.load("a40-48gb-x8-eth10"), attention={"bfloat16": 1e13})
    better = improved(machine, faster, by)
    slack = 0.02 if PLANS[name].sums_apart else 1e-12
    assert run(PLANS[name], better).seconds <= run(PLANS[name], machine).seconds * (1 + slack)


def test_a_process_holds_its_tensors_and_what_doctor_found_beside_them() -> None:
    """Closed form: a base, what steps add whatever the model, and a multiple of what comes and
    goes, by kind of walk."""
    program, _, _ = program_of(PLANS["plain"])
    machine = dataclasses.replace(
        hardware.load("laptop"),
        process_bytes={"graphs": 10**8, "forwards": 10**8},
        buffers={"graphs": 7},
        slack={"graphs": 0.5, "forwards": 2.0},
    )
    held = process_memory.tensors(program)
    moving = process_memory.transients(program)
    assert 0 < moving < held
    assert (
        process_memory.process_peak(program, PLANS["plain"], machine, MODEL)
        == held + 10**8 + 7 + moving // 2
    )
    forwards, _, _ = program_of(PLANS["mezo"])
    found = process_memory.process_peak(forwards, PLANS["mezo"], machine, MODEL)
    assert found == process_memory.tensors(forwards) + 10**8 + 2 * process_memory.transients(
        forwards
    )
    bare = dataclasses.replace(machine, process_bytes={}, buffers={}, slack={})
    most = process_memory.process_peak(forwards, PLANS["mezo"], bare, MODEL, process=5)
    assert most == process_memory.tensors(forwards) + 5, (
        "what the process holds by now stands for what doctor found"
    )


def test_streamed_walks_in_16_bits_have_figures_of_their_own_unless_the_description_is_older() -> (
    None
):
    """Closed form, at a program's own bytes."""
    plan = method("mebp")
    wide = dataclasses.replace(MODEL, dtype="float32")
    program = compile(plan, MODEL, StepKind.TRAIN, SHAPE, costs=COSTS(plan, SHAPE), device="cpu")
    moving = process_memory.transients(program)
    older = Hardware("older", "cpu", 1, flops={"float32": 1.0}, slack={"streamed": 2.0})
    newer = dataclasses.replace(
        older, buffers={"streamed": 3, "streamed, 16 bits": 80}, slack={"streamed, 16 bits": 1.0}
    )
    for machine, model, beside in (
        (older, wide, 2 * moving),
        (older, MODEL, 2 * moving),
        (newer, wide, 3),
        (newer, MODEL, 80 + moving),
    ):
        assert process_memory.step_growth(program, plan, machine, model) == moving + beside


def test_a_step_of_long_sequences_leaves_little_free_heap() -> None:
    """Closed form: 80 bytes of buffers, and what comes and goes once, in one process; 16 MB of the
    heap stay free whatever comes and goes."""
    plan = method("mebp")
    program = compile(plan, MODEL, StepKind.TRAIN, SHAPE, costs=COSTS(plan, SHAPE), device="cpu")
    moving = process_memory.transients(program)
    machine = Hardware(
        "one", "cpu", 1, flops={"float32": 1.0}, buffers={"streamed": 80}, slack={"streamed": 2.0}
    )
    for tokens, freed in ((2048, 2 * moving), (2049, 16_000_000)):
        row = dataclasses.replace(program, shape=Shape(1, tokens))
        assert process_memory.step_growth(row, plan, machine, MODEL) == moving + 80 + freed


def test_on_a_processor_compute_loses_what_its_lanes_copy() -> None:
    """Closed form: every byte of a bucket's FETCH and STORE, at one thread's rate, once; mapped
    weights are not copied."""
    machine = dataclasses.replace(
        hardware.load("laptop"), host_to_device=Link(4e9), device_to_host=Link(4e9)
    )
    for plan, copied in ((method("zo2", trainable="disk × raw"), True), (method("mebp"), False)):
        costs = COSTS(plan, SHAPE)
        model = MODEL
        program = compile(plan, model, StepKind.TRAIN, SHAPE, costs=costs, device="cpu")
        free = dataclasses.replace(machine, host_to_device=Link(1e30))
        slow, fast = (CostModel(plan, model, each, costs, program) for each in (machine, free))
        computes = [op for op in program.ops if op.lane is Lane.COMPUTE]
        lost = sum(slow.seconds(op) - fast.seconds(op) for op in computes)
        moved = sum(op.nbytes for op in program.ops if op.kind in (OpKind.FETCH, OpKind.STORE))
        assert moved > 0
        assert lost == pytest.approx(moved / 4e9 if copied else 0.0, abs=1e-12), plan


def test_an_update_of_slices_takes_a_slice_of_the_time() -> None:
    """Closed form: noise for 1/n of a block's parameters, where zo2's update makes it for all of
    them."""
    machine = dataclasses.replace(hardware.load("rtx-4090"), op_seconds=0.0, devices_per_node=4)
    model = MODEL
    for plan, share in (
        (method("zo2"), 1),
        (method("distzo2", mesh={"world": 4, "ranks_per_node": 4}), 4),
    ):
        program = compile(
            plan, model, StepKind.TRAIN, SHAPE, pending=Pending(1, flush=True), device="cuda"
        )
        update = next(op for op in program.ops if op.kind is OpKind.UPDATE and op.unit == 1)
        sgd = CostModel(plan, model, machine)
        expected = model.blocks[0].numel() / share * (1 / machine.noise_rate + sgd._narrowed(1.0))
        assert sgd.seconds(update) == pytest.approx(expected)


def test_a_description_of_another_make_says_what_to_do(tmp_path: Path) -> None:
    """The contract of load: a figure where rates by name belong, and one that doctor no longer
    measures."""
    hardware.save(hardware.load("laptop"), tmp_path / "old.yaml")
    text = (tmp_path / "old.yaml").read_text()
    (tmp_path / "old.yaml").write_text(text.replace("attention: {}", "attention: 3.5e+11"))
    with refused(ValueError, "attention mapping doctor"):
        hardware.load(tmp_path / "old.yaml")
    (tmp_path / "old.yaml").write_text(f"{text}start_seconds: {{graphs: 1.0e-6}}\n")
    with refused(ValueError, "start_seconds doctor"):
        hardware.load(tmp_path / "old.yaml")


def test_a_sharded_process_holds_gloos_copy_of_its_largest_gather() -> None:
    """Closed form: the largest unit whole, twice, whatever a rank sends of it."""
    machine = dataclasses.replace(hardware.load("laptop"), buffers={}, slack={})
    model = MODEL
    plan = method("zero3", mesh={"world": 4, "ranks_per_node": 4})
    costs = COSTS(plan, SHAPE)
    program = compile(plan, model, StepKind.TRAIN, SHAPE, costs=costs, device="cpu")
    largest = max(unit.nbytes() for unit in model.units)
    found = process_memory.process_peak(program, plan, machine, model) - process_memory.tensors(
        program
    )
    assert 2 * largest <= found <= 2.01 * largest  # a slice is padded


def _op(index: int, lane: Lane, deps: tuple[int, ...] = ()) -> Op:
    return Op(index, OpKind.FORWARD, 1, lane, deps)


def test_lanes_overlap_as_far_as_dependencies_allow() -> None:
    """Closed form: fetches of 3 s and computations of 2 s in turn end after 3 + 3 + 3 + 2 s."""
    ops = tuple(
        op
        for i in range(3)
        for op in (_op(2 * i, Lane.FETCH), _op(2 * i + 1, Lane.COMPUTE, (2 * i,)))
    )
    program = Program("toy", StepKind.TRAIN, SHAPE, ("a", "b"), frozenset(), frozenset(), ops)
    spans = simulator.schedule((program,), lambda op: 3.0 if op.lane is Lane.FETCH else 2.0)
    assert [span.ended for span in spans[0]] == [3, 5, 6, 8, 9, 11]
    path = simulator.critical_path((program,), spans, lambda op: str(op.lane))
    assert path == {"fetch": 9.0, "compute": 2.0}


def test_lanes_that_share_a_link_take_turns_as_they_come() -> None:
    """Closed form: the sum comes at 1 s and has the link of both gathers' lane for 4; the gather
    that was written first and comes at 2 begins at 5, and the sum that it finds in front of it is
    in its path. Ops without bytes do not wait."""
    draft = Draft()
    for lane, seconds in ((Lane.FETCH, 2), (Lane.COMPUTE, 1)):
        draft.op(OpKind.FETCH, 1, lane, flops=seconds)
    draft.op(OpKind.GATHER, 1, Lane.INTER, [0], nbytes=1, flops=3)
    draft.op(OpKind.REDUCE, 1, Lane.INTER_SUMS, [1], nbytes=1, flops=4)
    draft.op(OpKind.REDUCE, 1, Lane.INTER_SUMS, flops=1)
    draft.op(OpKind.GATHER, 1, Lane.INTRA, [0], nbytes=1, flops=3)
    program = Program(
        "toy", StepKind.TRAIN, SHAPE, ("a", "b"), frozenset(), frozenset(), tuple(draft.ops)
    )
    spans = simulator.schedule((program,), lambda op: float(op.flops))
    assert [(span.began, span.ended) for span in spans[0]] == [
        (0, 2),
        (0, 1),
        (5, 8),
        (1, 5),
        (5, 6),
        (2, 5),
    ]
    path = simulator.critical_path((program,), spans, lambda op: str(op.lane))
    assert path == {"inter-sums": 4.0, "inter-node": 3.0, "compute": 1.0}
    assert program.bytes_by_lane() == {Lane.INTER: 2, Lane.INTRA: 1}


def test_a_gather_takes_alpha_and_beta() -> None:
    """Closed form: 8 ranks share the node's link; a tree over 2 nodes has one round."""
    machine = hardware.load("a40-48gb-x8-eth1")
    plan = method("zero3", mesh={"world": 16, "ranks_per_node": 8})
    model = CostModel(plan, MODEL, machine)
    op = Op(
        0, OpKind.GATHER, 1, Lane.INTER, part=StateKind.TRAINABLE, nbytes=10**6, axes=("world",)
    )
    assert model.seconds(op) == pytest.approx(1e-4 + 8 * 10**6 / 1.18e8)


def test_every_description_that_ships_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    assert len(hardware.names()) >= 9
    for name in hardware.names():
        machine = hardware.load(name)
        hardware.save(machine, tmp_path / "hardware.yaml")
        assert hardware.load(tmp_path / "hardware.yaml") == machine
    with refused(ValueError, "laptop"):
        hardware.load("labtop")


def test_a_trace_holds_every_op_that_took_time(tmp_path: Path) -> None:
    """Oracle: the spans; a lane's events do not overlap."""
    found = run(PLANS["zo2"], hardware.load("a100-80gb"))
    timed = [(span.op, span.began, span.ended) for span in found.spans]
    timeline.write(
        tmp_path / "trace.json", timeline.events(found.program, [timed], process="simulated")
    )
    events = [
        e
        for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if e["ph"] == "X"
    ]
    assert sum(e["dur"] for e in events) == pytest.approx(
        1e6 * sum(span.seconds for span in found.spans), rel=1e-3
    )
    for lane in {e["tid"] for e in events}:
        mine = sorted((e["ts"], e["dur"]) for e in events if e["tid"] == lane)
        assert all(a + d <= b + 0.01 for (a, d), (b, _) in itertools.pairwise(mine))


@pytest.mark.parametrize(
    ("name", "slow", "words"),
    [
        ("plain", {"flops": {"float32": 1.0}}, "computing backwards"),
        ("mezo", {"flops": {"float32": 1.0}}, "computing forwards"),
        ("plain", {"memory_bandwidth": 1e3}, "updating"),
        ("zero3", {"inter": Link(1.0)}, "waiting for the network: gather of trainable parameters"),
        (
            "zero3",
            {"intra": Link(1.0)},
            "waiting for the node's own link: gather of trainable parameters",
        ),
        (
            "host",
            {"host_to_device": Link(1.0)},
            "waiting for the host's link: fetch of trainable parameters",
        ),
        ("disk", {"disk_write": Link(1.0)}, "waiting for the disk: save of activation checkpoints"),
    ],
)
def test_the_critical_path_names_the_part_that_is_slow(
    name: str, slow: dict[str, object], words: str
) -> None:
    """Oracle: the one part of the machine that was made a billion times slower takes all of the
    time."""
    plan = {**PLANS, "disk": method("plain", recompute="all", activation="disk")}[name]
    machine = dataclasses.replace(hardware.load("a100-80gb"), **slow)  # type: ignore[arg-type]
    found = run(plan, machine)
    assert found.bottleneck().endswith(words)
    assert sum(found.critical.values()) == pytest.approx(found.seconds)


def test_useful_work_over_promised_speed() -> None:
    """Closed form: twice the ranks, twice the tokens; recomputing costs time and is no useful work;
    without time no rate."""
    machine = hardware.load("a100-80gb").without_host()
    plain = run(PLANS["plain"], machine)
    again = run(method("plain", recompute="all"), machine)
    assert plain.tokens == again.tokens == SHAPE.tokens
    assert run(PLANS["zero3"], machine).tokens == 16 * SHAPE.tokens
    assert again.seconds > plain.seconds
    assert again.useful_flops == pytest.approx(plain.useful_flops)
    assert plain.mfu == pytest.approx(
        plain.useful_flops / plain.seconds / machine.peak_of("bfloat16")
    )
    empty = Program("toy", StepKind.TRAIN, SHAPE, ("a",), frozenset(), frozenset(), ())
    model = MODEL
    nothing = simulator.simulate((empty,), PLANS["plain"], model, machine)
    assert (nothing.seconds, nothing.mfu, nothing.tokens_per_second) == (0.0, 0.0, float("inf"))
    assert nothing.bottleneck() == "nothing takes time"


def ranks_of(*counts: int) -> list[Program]:
    """A program for each rank: so many forwards of a second, then a sum over all ranks, then one
    forward more."""
    programs = []
    for count in counts:
        draft = Draft()
        for _ in range(count):
            draft.op(OpKind.FORWARD, 1, Lane.COMPUTE)
        met = draft.op(OpKind.REDUCE, 1, Lane.INTRA, [count - 1], axes=("node",))
        draft.op(OpKind.FORWARD, 1, Lane.COMPUTE, [met])
        names = ("prologue", "block 0", "epilogue")
        written = Program(
            "ranks", StepKind.TRAIN, SHAPE, names, frozenset(), frozenset(), tuple(draft.ops)
        )
        programs.append(written)
    return programs


def test_a_collective_begins_when_the_slowest_rank_has_come() -> None:
    """Closed form: ranks of one, three and two forwards meet after three; the critical path is the
    slowest rank's."""
    programs = ranks_of(1, 3, 2)
    spans = simulator.schedule(programs, lambda op: 1.0)
    for its in spans:
        assert [(span.began, span.ended) for span in its[-2:]] == [(3.0, 4.0), (4.0, 5.0)]
    path = simulator.critical_path(programs, spans, lambda op: op.kind.lower())
    assert path == {"forward": 4.0, "reduce": 1.0}
    alone = simulator.schedule(programs[:1], lambda op: 1.0)
    assert alone[0][-1].ended == 3.0


def test_ranks_that_wait_for_each_other_are_a_defect_of_the_compiler() -> None:
    """Two collectives, in the other order on the other rank."""
    programs = []
    for units in ((1, 2), (2, 1)):
        draft = Draft()
        for unit in units:
            draft.op(OpKind.REDUCE, unit, Lane.INTRA, axes=("node",))
        programs.append(dataclasses.replace(ranks_of(1)[0], ops=tuple(draft.ops)))
    with refused(AssertionError, "0 1"):
        simulator.schedule(programs, lambda op: 1.0)


def test_a_plan_has_as_many_programs_as_ranks_that_differ() -> None:
    """Closed form: three forwards over two places are two and one, four are two and two; over the
    axes of state all are alike. Each meets the others in the same collectives, and a step takes the
    time of the place with the most."""
    mesh = {"world": 4, "perturb": 2, "data": 2}
    uneven = method("distzo2", mesh=mesh, **{"zo.kind": "fzoo", "zo.queries": 2})
    step = (StepKind.TRAIN, SHAPE)
    programs = compile_ranks(uneven, MODEL, *step, device="cuda", pending=Pending(1, flush=True))
    assert [
        len({op.forward_pass for op in program.ops if op.kind is OpKind.LOSS})
        for program in programs
    ] == [2, 1]
    assert len(compile_ranks(method("distzo2", mesh=mesh, **{"zo.queries": 2}), MODEL, *step)) == 1
    assert (
        len(compile_ranks(method("zero3", mesh={"world": 16, "ranks_per_node": 4}), MODEL, *step))
        == 1
    )
    met = [[(op.kind, op.unit, op.axes) for op in program.ops if op.axes] for program in programs]
    assert met[0] == met[1]
    machine = hardware.load("a40-48gb-x8-eth10")
    found = [
        simulator.simulate(some, uneven, MODEL, machine).seconds
        for some in (programs, programs[:1], programs[1:])
    ]
    assert found[0] == pytest.approx(found[1])
    assert found[2] < found[0]
