"""Oracle: closed forms. On a toy machine with round figures an op takes its bytes, elements and
FLOPs over their rates."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from blockwalk.plan.mesh import between, make_axes, names_of
from blockwalk.plan.methods import method
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import StateKind
from blockwalk.plan.plan import Plan
from blockwalk.plan.work import Work
from blockwalk.program.compile import compile
from blockwalk.program.costs import Costs, UnitCost
from blockwalk.program.program import Lane, Op, OpKind, Pool, Shape, StepKind
from blockwalk.simulate.hardware import Hardware, Link
from blockwalk.simulate.seconds import CostModel
from tests.support.toy_model import toy

pytestmark = pytest.mark.fast

MODEL = toy(2, lora=False, tied=False)
BLOCK = 64 * 64 + 64
"""Elements of one of its blocks."""
GPU = Hardware(
    "toy", device_bytes=10**9, host_bytes=10**9, flops={"float32": 1e6}, memory_bandwidth=1e5,
    op_seconds=1.0, noise_rate=1e4, decode_rate=2e4, host_to_device=Link(100.0, 0.5),
    device_to_host=Link(50.0, 0.25), disk_read=Link(10.0, 2.0), disk_write=Link(5.0, 4.0),
    intra=Link(1000.0, 0.01), inter=Link(20.0, 0.1), devices_per_node=4, nodes=4,
)  # fmt: skip
CPU = dataclasses.replace(GPU, device="cpu", devices_per_node=1, nodes=1)


def seconds(
    plan: Plan,
    machine: Hardware,
    kind: OpKind,
    lane: Lane,
    *,
    model: ModelSpec = MODEL,
    **of_op: Any,
) -> float:
    costs = of_op.pop("costs", Costs())
    return CostModel(plan, model, machine, costs).seconds(Op(0, kind, 1, lane, **of_op))


@pytest.mark.parametrize(
    ("machine", "placed", "fetched", "stored"),
    [
        (GPU, "device × raw", 0.0, 0.0),
        (GPU, "host × raw", 0.5 + 1.0, 0.25 + 2.0),
        (GPU, "disk × raw", 0.5 + 1.0 + 2.0 + 10.0, 0.25 + 2.0 + 4.0 + 20.0),
        (CPU, "host × raw", 0.5 + 1.0, 0.25 + 2.0),
        (CPU, "disk × raw", 0.5 + 1.0, 0.25 + 2.0),  # the page cache holds it
        (dataclasses.replace(CPU, host_bytes=10**5), "disk × raw", 2.0 + 10.0, 4.0 + 20.0),
    ],
)
def test_bytes_take_every_link_on_their_way(
    machine: Hardware, placed: str, fetched: float, stored: float
) -> None:
    """100 bytes of a parameter; a processor's page cache stands in for the disk as far as the model
    fits half of memory."""
    plan = method("plain", recompute="all", trainable=placed, frozen=placed)
    for part in (StateKind.FROZEN, StateKind.TRAINABLE):
        found = seconds(plan, machine, OpKind.FETCH, Lane.FETCH, part=part, nbytes=100)
        assert found == pytest.approx(fetched)
        assert seconds(
            plan, machine, OpKind.STORE, Lane.STORE, part=part, nbytes=100
        ) == pytest.approx(stored)
        assert seconds(plan, machine, OpKind.FETCH, Lane.FETCH, part=part) == 0.0, (
            "no bytes, no time"
        )
        assert seconds(plan, machine, OpKind.STORE, Lane.STORE, part=part) == 0.0


def test_activations_go_to_their_own_tier_and_buckets_past_the_page_cache() -> None:
    plan = method("plain", recompute="all", activation="disk")
    bucket = {"part": StateKind.TRAINABLE, "nbytes": 100}
    saved = seconds(plan, GPU, OpKind.SAVE, Lane.STORE, part=StateKind.ACTIVATION, nbytes=100)
    assert saved == pytest.approx(0.25 + 2.0 + 4.0 + 20.0)
    zo2 = method("zo2", trainable="disk × raw")
    assert seconds(zo2, CPU, OpKind.FETCH, Lane.FETCH, **bucket) == pytest.approx(2.0 + 10.0)
    assert seconds(zo2, CPU, OpKind.STORE, Lane.STORE, **bucket) == pytest.approx(4.0 + 20.0)
    cached = method("fcdp", mesh={"world": 16, "ranks_per_node": 4})
    assert seconds(cached, GPU, OpKind.FETCH, Lane.FETCH, **bucket) == pytest.approx(0.5 + 1.0), (
        "kept on the host"
    )


@pytest.mark.parametrize(("size", "rounds"), [(1, 0), (2, 0), (4, 1), (8, 2), (16, 3)])
def test_a_collective_is_a_tree(size: int, rounds: int) -> None:
    """α once for each round, β for the bytes that one rank sends; between nodes the four ranks of a
    node share its link."""
    plan = method("zero3", mesh={"world": 16, "ranks_per_node": 4, "groups": f"these={size}"})
    axes = names_of(between(make_axes(plan.mesh), 1, size))
    moved = {"part": StateKind.TRAINABLE, "nbytes": 100, "axes": axes}
    inside = seconds(plan, GPU, OpKind.GATHER, Lane.INTRA, **moved)
    assert inside == pytest.approx(0.1 + 0.01 * (1 + rounds))
    across = seconds(plan, GPU, OpKind.REDUCE, Lane.INTER, **moved)
    assert across == pytest.approx(4 * 100 / 20.0 + 0.1 * (1 + rounds))
    assert seconds(plan, GPU, OpKind.GATHER, Lane.INTER, **{**moved, "nbytes": 0}) == 0.0


@pytest.mark.parametrize(("rule", "touched"), [("sgd", 12), ("momentum", 20), ("adamw", 28)])
def test_an_update_touches_parameter_gradient_and_states(rule: str, touched: int) -> None:
    """Bytes an element: three of four bytes, and every state read and written. Ranks update the
    slices that they own."""
    plan = method("plain", optimizer={"name": rule})
    update = (OpKind.UPDATE, Lane.COMPUTE)
    assert seconds(plan, GPU, *update) == pytest.approx(1.0 + touched * BLOCK / 1e5)
    ranks = method("zero3", optimizer={"name": rule}, mesh={"world": 16, "ranks_per_node": 4})
    assert seconds(ranks, GPU, *update) == pytest.approx(1.0 + touched * BLOCK / 16 / 1e5)
    at_once = method("plain", recompute="all", optimizer={"name": rule}, update={"timing": "block"})
    copied = touched - 4  # parameter and states, read and written once more before they change
    assert seconds(at_once, GPU, *update) == pytest.approx(1.0 + (touched + copied) * BLOCK / 1e5)


def test_zeroth_order_updates_draw_their_noise_again() -> None:
    """Closed form: for each query and each entry that waited, every element's noise; then its rule,
    unless that is SGD."""
    update = (OpKind.UPDATE, Lane.STORE)
    sgd = method("zo2", **{"zo.queries": 3})
    assert seconds(sgd, GPU, *update, entries=2) == pytest.approx(1.0 + 2 * 3 * BLOCK / 1e4)
    adamw = method("zo2", optimizer={"name": "adamw"})
    assert seconds(adamw, GPU, *update) == pytest.approx(1.0 + BLOCK / 1e4 + 28 * BLOCK / 1e5)
    narrow = method("zo2", trainable="host × bf16")
    assert seconds(narrow, GPU, *update) == pytest.approx(
        1.0 + BLOCK / 1e4 + BLOCK * 2 * (2 + 4) / 1e5
    )


def test_a_norm_and_a_perturbation_in_place_read_every_trainable() -> None:
    every = MODEL.numel(trainable=True)
    plan = method("plain")
    assert seconds(plan, GPU, OpKind.NORM, Lane.COMPUTE) == pytest.approx(4 * every / 1e5)
    original = method("mezo", **{"zo.noise": "mezo"})
    assert seconds(original, GPU, OpKind.PERTURB, Lane.COMPUTE) == pytest.approx(every / 1e4)
    assert seconds(original, GPU, OpKind.EXCHANGE, Lane.COMPUTE) == 0.0


WORK = Work(products=2 * 10**6, attention=5 * 10**5, touched=3000)


def test_a_forward_takes_its_products_its_passes_and_its_weights() -> None:
    """FLOPs and bytes over the machine's rates, and the weights read once; where only FLOPs and the
    bytes that it holds are known, four times these are touched."""
    plan = method("plain")
    forward = (OpKind.FORWARD, Lane.COMPUTE)
    costs = Costs((("block", UnitCost(forward=WORK, backward=WORK, again=WORK)),))
    weights = 4 * BLOCK / 1e5
    assert seconds(plan, GPU, *forward, costs=costs) == pytest.approx(1.0 + 2.5 + 0.03 + weights)
    again = seconds(plan, GPU, OpKind.BACKWARD, Lane.COMPUTE, costs=costs)
    assert again == pytest.approx(1.0 + 2 * (2.5 + 0.03) + weights), (
        "computed again, and differentiated"
    )
    graph = seconds(plan, GPU, OpKind.BACKWARD, Lane.COMPUTE, costs=costs, keep_graph=True)
    assert graph == pytest.approx(1.0 + 2.5 + 0.03 + weights)
    fused = dataclasses.replace(GPU, attention={"float32": 1e5})
    apart = seconds(plan, fused, *forward, costs=costs)
    assert apart == pytest.approx(1.0 + 2.0 + 5.0 + 0.03 + weights), "attention has its own rate"
    unknown = seconds(plan, GPU, *forward, flops=3 * 10**6, transient=10**4)
    assert unknown == pytest.approx(1.0 + 3.0 + 4 * 10**4 / 1e5 + weights)


def test_what_was_timed_here_goes_before_rates() -> None:
    """Closed form: an op takes what its like took, of its kind of op and of unit; where graphs were
    kept alone, or made again alone, a backward has a forward more or less."""
    plan = method("plain")
    kind = MODEL.blocks[0].kind
    forward = (OpKind.FORWARD, Lane.COMPUTE)
    backward = (OpKind.BACKWARD, Lane.COMPUTE)
    kept = Costs(timed=(((OpKind.FORWARD, kind, True), 3.0), ((OpKind.BACKWARD, kind, True), 5.0)))
    assert seconds(plan, CPU, *forward, costs=kept, flops=10**9) == 3.0
    assert seconds(plan, CPU, *backward, costs=kept, keep_graph=True) == 5.0
    assert seconds(plan, CPU, *backward, costs=kept) == 5.0 + 3.0
    again = Costs(
        timed=(((OpKind.FORWARD, kind, False), 2.0), ((OpKind.BACKWARD, kind, False), 7.0))
    )
    assert seconds(plan, CPU, *backward, costs=again) == 7.0
    assert seconds(plan, CPU, *backward, costs=again, keep_graph=True) == 7.0 - 2.0
    of_head = Costs(timed=(((OpKind.FORWARD, "epilogue", True), 3.0),))
    rates = seconds(plan, CPU, *forward, flops=10**6)
    assert seconds(plan, CPU, *forward, costs=of_head, flops=10**6) == rates, "another unit"


def test_coded_weights_are_decoded_as_often_as_they_are_read() -> None:
    """Frozen elements over the decoder's rate: once forwards, twice where a block is computed again
    for its backward."""
    model = toy(2, lora=True, tied=False)
    raw, coded = (method("mebp", frozen=f"disk × {codec}") for codec in ("raw", "int4"))
    for kind, kept, times in (
        (OpKind.FORWARD, False, 1),
        (OpKind.BACKWARD, True, 1),
        (OpKind.BACKWARD, False, 2),
    ):
        of = {"model": model, "keep_graph": kept}
        more = seconds(coded, GPU, kind, Lane.COMPUTE, **of) - seconds(
            raw, GPU, kind, Lane.COMPUTE, **of
        )
        assert more == pytest.approx(times * model.blocks[0].numel(trainable=False) / 2e4)


@pytest.mark.parametrize("loss", ["chunked", "model"])
def test_a_chunked_loss_decodes_the_head_for_every_chunk(loss: str) -> None:
    """Closed form: chunks of tokens as the budget of logits cuts them; the model's own loss takes
    the head once."""
    model = toy(1, lora=True, tied=False, vocab=40_000)
    shape = Shape(8, 513)
    found = {}
    for codec in ("raw", "int4"):
        plan = method("mebp", frozen=f"disk × {codec}", loss=loss)
        program = compile(plan, model, StepKind.TRAIN, shape, device="cuda")
        op = next(op for op in program.ops if op.kind is OpKind.LOSS)
        costs = CostModel(plan, model, GPU, program=program)
        found[codec], chunks = costs.seconds(op), costs.head_reads()
    assert found["int4"] - found["raw"] == pytest.approx(
        chunks * model.epilogue.numel(trainable=False) / 2e4
    )
    assert (chunks > 1) == (loss == "chunked")


def test_graphs_in_file_maps_are_copied_there() -> None:
    """Closed form: saved bytes are written twice over memory."""
    plan = method("plain", activation="disk", recompute="none")
    takes = ((Pool.MAPPED, 1000),)
    weights = 4 * BLOCK / 1e5
    mapped = seconds(plan, CPU, OpKind.FORWARD, Lane.COMPUTE, takes=takes)
    assert mapped == pytest.approx(1.0 + weights + 2 * 1000 / 1e5)


def test_an_update_of_slices_in_host_memory_crosses_the_link() -> None:
    """By hand: a rank's quarter of the gradients goes there and its parameters come back, by rates
    of 50 and 100 bytes a second; on the device and on a processor neither moves."""
    mesh = {"world": 4, "ranks_per_node": 4}
    hosted = method("zero3", mesh=mesh, optimizer_state="host × fp32 × world")
    update = (OpKind.UPDATE, Lane.COMPUTE)
    elements = BLOCK / 4
    links = 0.25 + 4 * elements / 50 + 0.5 + 4 * elements / 100
    part = StateKind.TRAINABLE
    by_host = seconds(hosted, GPU, *update, part=part)
    assert by_host == pytest.approx(GPU.idle_seconds + links, rel=1e-6)
    on_device = seconds(method("zero3", mesh=mesh), GPU, *update, part=part)
    assert on_device < links
    on_cpu = seconds(hosted, CPU, *update, part=part)
    assert on_cpu == seconds(method("zero3", mesh=mesh), CPU, *update, part=part)
