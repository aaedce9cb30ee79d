"""Oracle: torch.distributed.pipelining's own tables of its schedules, closed forms, and for whole
programs the simulator's clock: lanes are queues, and what is sent meets what is received."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from blockwalk.plan.mesh import PIPELINE
from blockwalk.plan.methods import method
from blockwalk.plan.model_spec import ModelSpec, UnitSpec
from blockwalk.plan.plan import Plan
from blockwalk.plan.work import Work
from blockwalk.program.compile import compile_ranks
from blockwalk.program.costs import Costs, UnitCost
from blockwalk.program.program import Lane, OpKind, Pool, Program, Shape, StepKind
from blockwalk.program.settling import Room, settle
from blockwalk.program.stages import Visit, chunk_sizes, evenest, idle, stage_at, visits
from blockwalk.simulate.simulator import peaks, schedule
from tests.golden.specs import MODELS

KINDS = {
    schedules._ComputationType.FORWARD: False,
    schedules._ComputationType.FULL_BACKWARD: True,
}


def of_torch(stages: int, chunks: int, groups: int) -> dict[int, list[Visit]]:
    """Torch's order of compute ops on every stage. Forwards are numbered as they come: its table of
    1F1B calls the first one of the last stage the second."""
    if chunks == 1:
        facts: Any = SimpleNamespace(_num_stages=stages, _n_microbatches=groups)
        table = schedules.Schedule1F1B._get_pipeline_order(facts) or {}
    else:
        rounds = max(1, groups // stages)
        facts = SimpleNamespace(
            n_local_stages=chunks,
            pp_group_size=stages,
            _n_microbatches=groups,
            number_of_rounds=rounds,
            microbatches_per_round=groups // rounds,
        )
        interleaved = schedules.ScheduleInterleaved1F1B
        table = {
            stage: interleaved._calculate_single_rank_operations(facts, stage)
            for stage in range(stages)
        }
    order = {}
    for stage, actions in table.items():
        counts: dict[tuple[bool, int], int] = {}
        order[stage] = []
        for action in actions:
            if action is None or action.computation_type not in KINDS:
                continue
            backwards = KINDS[action.computation_type]
            chunk = action.stage_index // stages
            number = counts.get((backwards, chunk), 0)
            counts[backwards, chunk] = number + 1
            assert backwards is False or action.microbatch_index == number
            order[stage].append(Visit(backwards, chunk, number))
    return order


def test_orders_are_those_of_torch() -> None:
    """1F1B and interleaved 1F1B, for every stage of up to six."""
    compared = 0
    for stages, chunks, groups in product(range(2, 7), (1, 2, 3), range(1, 17)):
        if chunks == 1 and groups < stages:
            continue  # torch takes no fewer
        if groups % max(1, groups // stages):
            continue  # nor does it take these in rounds
        for stage, order in of_torch(stages, chunks, groups).items():
            assert visits(stage, stages, chunks, groups) == order, (stages, chunks, groups, stage)
            compared += 1
    assert compared > 500


def test_one_process_is_one_stage() -> None:
    """Closed form: forwards and backwards of each group in turn."""
    assert " ".join(map(str, visits(0, 1, 1, 3))) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"


def finished(stages: int, chunks: int, groups: int, forward: int, backward: int) -> int:
    """The time at which the last visit ends, where transfers take none: a visit waits for the one
    before it on its stage, and for its neighbour's."""
    ends: dict[tuple[bool, int, int], int] = {}
    queues = {stage: visits(stage, stages, chunks, groups) for stage in range(stages)}
    free = dict.fromkeys(range(stages), 0)
    last = stages * chunks - 1
    while any(queues.values()):
        progressed = False
        for stage, queue in queues.items():
            while queue:
                visit = queue[0]
                place = visit.chunk * stages + stage
                if visit.backwards:
                    waits = [(False, place, visit.group)]
                    waits += [(True, place + 1, visit.group)] * (place < last)
                else:
                    waits = [(False, place - 1, visit.group)] * (place > 0)
                if not all(wait in ends for wait in waits):
                    break
                queue.pop(0)
                begins = max([free[stage], *(ends[wait] for wait in waits)])
                free[stage] = begins + (backward if visit.backwards else forward)
                ends[visit.backwards, place, visit.group] = free[stage]
                progressed = True
        assert progressed, "stages wait for each other"
    return max(ends.values())


def test_bubbles() -> None:
    """Closed form: (p − 1) / (v · A + p − 1) of a step is idle; no order waits for ever."""
    for stages, chunks, groups in product(range(1, 7), (1, 2, 3), range(1, 13)):
        if chunks > 1 and (stages == 1 or groups % max(1, groups // stages)):
            continue
        seconds = finished(stages, chunks, groups, 100, 217)
        if chunks == 1 or groups % stages == 0:
            busy = groups * chunks * 317
            bubble = (stages - 1) / (chunks * groups + stages - 1)
            assert 1 - busy / seconds == pytest.approx(bubble, abs=1e-12), (stages, chunks, groups)


def test_cuts_are_the_best() -> None:
    """Brute force: no other cut leaves the costliest run less."""
    costs = [3, 1, 4, 1, 5, 9, 2]
    for count, first, last in product((1, 2, 3, 4), (0, 5), (0, 6)):
        sizes = evenest(costs, count, first, last)
        assert min(sizes) >= 1
        assert costliest(sizes, [first, *costs, last]) == least_costly(count, [first, *costs, last])


def costliest(sizes: tuple[int, ...], costs: list[int]) -> int:
    """What the costliest run of blocks costs, prologue and epilogue at the ends."""
    first, *blocks, last = costs
    starts = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    assert starts[-1] == len(blocks)
    runs = [sum(blocks[start:stop]) for start, stop in pairwise(starts)]
    runs[0] += first
    runs[-1] += last
    return max(runs)


def least_costly(count: int, costs: list[int]) -> int:
    """The least of it over every cut into so many runs."""
    blocks = len(costs) - 2
    every = product(range(1, blocks + 1), repeat=count)
    return min(costliest(sizes, costs) for sizes in every if sum(sizes) == blocks)


def priced(flops: int, unread: int = 0) -> UnitCost:
    """The cost of a unit whose forward has so many FLOPs, and its backward twice as many; a
    recomputation leaves out some."""
    works = {"forward": flops, "backward": 2 * flops, "again": flops - unread}
    return UnitCost(**{name: Work(products=size) for name, size in works.items()})


def test_blocks_are_cut_by_what_they_compute() -> None:
    """Brute force over blocks of uneven kinds: the most loaded chunk has the least, counted apart
    from their parameters, which say otherwise. A kept graph is not computed again, and a head with
    many words is worth several blocks."""
    narrow = deep(MODELS["llama"], 9)
    kinds = ["linear", "linear", "attention"] * 3
    blocks = [replace(block, kind=kind) for block, kind in zip(narrow.blocks, kinds, strict=True)]
    model = narrow.with_units([narrow.prologue, *blocks, narrow.epilogue])
    forwards = {"prologue": 1, "linear": 100, "attention": 450, "epilogue": 1100}
    costs = Costs(tuple((name, priced(flops, flops // 10)) for name, flops in forwards.items()))
    unlike_parameters = 0
    for stages, chunks, recompute in ((2, 1, "all"), (3, 1, "none"), (2, 2, "all"), (4, 1, "all")):
        plan = method(
            "zero3",
            recompute=recompute,
            pipeline={"chunks": chunks},
            mesh={"world": stages, "pipeline": stages},
            gradient_accumulation_steps=4,
        )
        again = 0.9 if recompute == "all" else 0.0
        of_kind = {kind: flops * (3 + again) for kind, flops in forwards.items()}
        ends = {name: forwards[name] * 2.9 for name in ("prologue", "epilogue")}
        load = [round({**of_kind, **ends}[unit.kind]) for unit in model.units]
        inputs: Any = {"device": "cpu", "room": Room()}
        if stages == 4:  # where a thousand FLOPs at once take half as long
            load = [flops - flops // 1000 * 500 for flops in load]
            inputs["price"] = lambda work: work.flops - work.flops // 1000 * 500
        settled = settle(plan, model, Shape(2, 8), costs, **inputs).plan
        assert settled == replace(plan, pipeline=settled.pipeline)
        sizes = settled.pipeline.blocks
        assert costliest(sizes, load) == least_costly(stages * chunks, load)
        stage = stage_at(settled, model, ((PIPELINE, stages - 1),))
        assert len(stage.chunks[-1]) == sizes[-1] + 1
        unlike_parameters += sizes != chunk_sizes(plan, model)
    assert unlike_parameters >= 3
    given = method("zero3", **{"mesh.world": 2, "mesh.pipeline": 2, "pipeline.blocks": [2, 7]})
    assert settle(given, model, Shape(2, 8), costs, device="cpu", room=Room()).plan == given


def deep(model: ModelSpec, blocks: int) -> ModelSpec:
    """A model with so many of the same block."""
    first = model.blocks[0]

    def block(number: int) -> UnitSpec:
        params = (replace(p, name=p.name.replace(".0.", f".{number}.")) for p in first.params)
        return replace(first, name=f"block {number}", params=tuple(params))

    return replace(model, blocks=tuple(map(block, range(blocks))))


def random_plan(rng: random.Random) -> tuple[Plan, int]:
    """A plan over stages of chunks of as many blocks, and the blocks of a chunk."""
    while True:
        stages = rng.choice((2, 2, 3, 4, 6))
        chunks = rng.choice((1, 1, 2, 3))
        steps = rng.randint(1, 10)
        together = rng.choice((1, 1, 1, 2, 3))
        walks = -(-steps // together)
        if together <= steps and (chunks == 1 or walks % max(1, walks // stages) == 0):
            break
    inner = rng.choice((1, 2, 4))
    world = stages * inner
    nodes = [n for n in (1, 2, 4, world) if world % n == 0 and max(n, inner) % min(n, inner) == 0]
    blocks = rng.randint(1, 3)
    settings = {
        "mesh": {"world": world, "ranks_per_node": rng.choice(nodes), "pipeline": stages},
        "pipeline": {
            "chunks": chunks,
            "blocks": [blocks] * (stages * chunks),
            "reuse": rng.choice((True, False)),
            "shared_sums": (steps + blocks) % 2 == 1,  # not drawn: the seeds below stay as they are
        },
        "gradient_accumulation_steps": steps,
        "together": together,
        "prefetch": rng.choice((0, 1, 2, 3)),
        "activation": rng.choice(("device", "host")),
        "optimizer_state": rng.choice(("device", "host")) + " × fp32",
        "recompute": rng.choice(("all", "none")),
        "optimizer.max_grad_norm": rng.choice((0, 1)),
    }
    row = rng.choice(("zero3", "zeropp", "mics", "fcdp", "hzp"))
    return method(row, **settings), blocks


def walk_on_paper(seed: int) -> None:
    """Compile every stage of a random plan, which checks what must hold of programs; run them
    together, with no seconds for transfers and with random ones."""
    rng = random.Random(seed)
    plan, blocks = random_plan(rng)
    stages = plan.mesh.pipeline
    chunks = plan.pipeline.chunks
    steps = plan.gradient_accumulation_steps
    model = deep(MODELS[rng.choice(("llama", "opt", "mixtral"))], stages * chunks * blocks)
    device = rng.choice(("cpu", "cuda"))
    seconds = {OpKind.FORWARD: 1.0, OpKind.BACKWARD: 2.17}
    for kind in (StepKind.TRAIN, StepKind.EVALUATE):
        programs = compile_ranks(plan, model, kind, Shape(2, 16), device=device, batches=steps)
        assert len(programs) == stages
        spans = schedule(programs, lambda op: seconds.get(op.kind, 0.0))
        noisy = schedule(programs, lambda op: rng.random())
        for program, times in zip(programs, noisy, strict=True):
            foreseen = program.peaks()
            for pool, nbytes in peaks(program, times).items():
                assert nbytes <= foreseen[pool], (seed, program.title, pool)
        equal = steps % plan.visit == 0 and (chunks == 1 or len(plan.walks) % stages == 0)
        if kind is StepKind.TRAIN and equal:
            total = max(span.ended for times in spans for span in times)
            idle_share = 1 - steps * chunks * blocks * 3.17 / total
            if plan.visit == 1:
                assert idle_share == pytest.approx(idle(plan), abs=1e-9), seed
            else:  # the next stage begins with the first of a visit
                assert idle_share <= idle(plan) + 1e-9, seed


def test_random_programs_end_as_foreseen() -> None:
    """No stages wait for each other; no peak is above the foreseen one; the bubble is the closed
    form's. ``benchmarks/pipeline.py`` runs 2,000."""
    for seed in (*range(20), 1084, 1881):  # the last two waited, in evaluations of odd numbers
        walk_on_paper(seed)


def moves(
    kind: OpKind, stages: int, chunks: int, **pipeline: bool
) -> tuple[int, list[tuple[Program, int]]]:
    """The gathers, or reductions, of a step of eight micro-batches on all stages, and the programs,
    each with the blocks of its largest chunk."""
    plan = method(
        "zero3",
        mesh={"world": 2 * stages, "ranks_per_node": 2 * stages, "pipeline": stages},
        gradient_accumulation_steps=8,
        pipeline={"chunks": chunks, **pipeline},
    )
    model = deep(MODELS["llama"], 3 * stages * chunks)
    programs = compile_ranks(plan, model, StepKind.TRAIN, Shape(2, 16))
    count = sum(op.kind is kind for program in programs for op in program.ops)
    stages_of = [stage_at(plan, model, ((PIPELINE, program.stage),)) for program in programs]
    longest = [max(map(len, stage.chunks)) for stage in stages_of]
    return count, list(zip(programs, longest, strict=True))


def computed(program: Program) -> list[tuple[OpKind, int, int]]:
    """The compute ops of a program, in order."""
    ops = (op for op in program.ops if op.lane is Lane.COMPUTE)
    return [(op.kind, op.unit, op.micro_batch) for op in ops]


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_chunk_stays_for_the_next_micro_batch(chunks: int) -> None:
    """Counted: at most 0.55 of the gathers, for the slots of at most one chunk; the order of
    compute ops is the same."""
    count, programs = moves(OpKind.GATHER, 2, chunks)
    without, plain = moves(OpKind.GATHER, 2, chunks, reuse=False)
    assert count <= 0.55 * without
    for (program, largest), (other, _) in zip(programs, plain, strict=True):
        more = program.peaks()[Pool.DEVICE] - other.peaks()[Pool.DEVICE]
        assert more <= largest * program.slot_bytes
        assert computed(program) == computed(other)


@pytest.mark.parametrize(("stages", "chunks", "share"), [(2, 1, 8), (2, 2, 2), (4, 2, 4)])
def test_neighbouring_backwards_share_their_sums(stages: int, chunks: int, share: int) -> None:
    """Closed form: all micro-batches of a step with one chunk a stage, those of a round with
    several; for the gradients of one chunk. The order of compute ops is the same."""
    count, programs = moves(OpKind.REDUCE, stages, chunks, shared_sums=True)
    without, plain = moves(OpKind.REDUCE, stages, chunks)
    assert without == share * count
    for (program, largest), (other, _) in zip(programs, plain, strict=True):
        block = max(op.nbytes for op in program.ops if op.kind is OpKind.REDUCE) * 2
        more = program.peaks()[Pool.DEVICE] - other.peaks()[Pool.DEVICE]
        assert more <= largest * block
        assert computed(program) == computed(other)
