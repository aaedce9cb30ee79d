"""Oracle: one process that cuts the batch the same way: the same ledger bytes and the same bits of
every weight."""

from __future__ import annotations

import gc
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from blockwalk import method
from blockwalk.data.label_words import LabelWordBatch
from blockwalk.engine.model_handle import ModelHandle
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.plan.choices import MeshSettings
from blockwalk.plan.plan import Plan
from blockwalk.ranks.forward_sharing import MeshSharing
from blockwalk.ranks.ranks import Ranks
from blockwalk.system.heap import give_back
from blockwalk.walk.walker import Walker
from tests.conftest import TinyRun
from tests.models import random_batch, tiny_model
from tests.support.messages import says
from tests.support.processes import private_bytes, run_ranks
from tests.support.rank_runs import dies, result
from tests.support.zeroth_order_runs import assert_same, trained

STEPS = 4
OPTIMIZER = {
    "name": "sgd",
    "learning_rate": 3e-2,
    "schedule": "linear",
    "total_steps": 12,
    "weight_decay": 0.1,
}

Case = tuple[str, str, dict[str, Any]]
"""Method, kind of model, settings."""


def walk(case: Case, mesh: dict[str, Any], folder: Path, **changes: Any) -> dict[str, Any]:
    """Losses, ledger without the run's name, and weights of a run."""
    name, kind, settings = case
    mesh = dict(mesh)
    if (over := mesh.pop("over", "")) and name == "distzo2":
        settings = {**settings, "trainable": f"{settings.get('trainable', 'host × raw')} × {over}"}
    settings = {"optimizer": OPTIMIZER, **settings, **changes}
    lora = settings.pop("lora", None)
    plan = method(name, mesh=mesh, **settings)
    model = tiny_model(kind, tied=kind == "opt")
    ledger = folder / "ledger.jsonl"
    with Walker(
        model, plan, lora=lora, workdir=folder / "work", ledger=ledger, device="cpu"
    ) as walker:
        results = [walker.step(random_batch(8, seed=step)) for step in range(STEPS)]
        evaluated = walker.evaluate(random_batch(3, seed=99)).loss
        weights = trained(walker)
        entries = list(walker.ledger.entries) if walker.ledger else []
    lines = ledger.read_bytes().split(b"\n")[1:]
    return {"losses": [(r.loss, r.projected_grad) for r in results], "evaluated": evaluated,
            "weights": weights, "entries": entries, "lines": lines}  # fmt: skip


def _all(
    rank: int,
    cases: list[Case],
    meshes: list[dict[str, Any]],
    folder: Path,
    changes: dict[str, Any],
) -> list[dict[str, Any]]:
    out = []
    for number, (case, mesh) in enumerate(itertools.product(cases, meshes)):
        there = folder / f"{dist.get_world_size()}-{number}"
        out.append(walk(case, {"world": dist.get_world_size(), **mesh}, there, **changes))
    return out


def check(
    world: int, cases: list[Case], meshes: list[dict[str, Any]], tmp_path: Path, **changes: Any
) -> None:
    answers = run_ranks(world, _all, cases, meshes, tmp_path, changes, timeout=240)
    alone: dict[tuple[int, int], dict[str, Any]] = {}
    for number, ((c, case), mesh) in enumerate(itertools.product(enumerate(cases), meshes)):
        data = mesh.get("data", 1)
        if (c, data) not in alone:
            micro_batches = case[2].get("gradient_accumulation_steps", 1) * data
            own = {**changes, "gradient_accumulation_steps": micro_batches}
            alone[c, data] = walk(case, {}, tmp_path / f"alone-{c}-{data}", **own)
        expected = alone[c, data]
        for rank, answer in enumerate(answers):
            found = answer[number]
            where = f"{case} {mesh} rank {rank}"
            assert found["losses"] == expected["losses"], where
            assert found["entries"] == expected["entries"], where
            assert found["lines"] == expected["lines"], where
            # each rank evaluates its share of the rows, and float32 products of fewer rows round
            # differently on some processors
            assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-7), where
            assert found["evaluated"] == answers[0][number]["evaluated"], where
            assert_same(found["weights"], expected["weights"])


CASES: list[Case] = [
    ("mezo", "llama", {}),
    ("distzo2", "opt", {"update": {"flush_every": 3}}),
    ("distzo2", "opt", {"zo.noise": "lowrank", "zo.queries": 2}),
    ("distzo2", "llama", {"trainable": "host × bf16", "gradient_accumulation_steps": 2}),
]


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    """Two signs on two ranks; two halves of the batch; with a copy of the blocks each, and with
    half a copy each."""
    meshes = [{"perturb": 2, "over": "nobody"}, {"data": 2, "over": "nobody"}]
    check(2, CASES, meshes, tmp_path / "a")
    check(
        2, CASES[1:], [{"perturb": 2, "over": "node"}, {"data": 2, "over": "node"}], tmp_path / "b"
    )


SLICED: list[Case] = [
    ("distzo2", "opt", {"trainable": "host × int4", "zo.target": "scales", "zo.epsilon": 1e-4}),
    ("distzo2", "opt", {"trainable": "host × fp8", "update": {"flush_every": 2}}),
    ("distzo2", "llama", {"trainable": "host × int8", "optimizer": {**OPTIMIZER, "name": "adamw"}}),
    (
        "distzo2",
        "opt",
        {"trainable": "disk × bf16", "optimizer": {**OPTIMIZER, "name": "momentum"}},
    ),
]


def test_slices_on_disk_with_scales_and_with_states_beside_them(tmp_path: Path) -> None:
    check(3, SLICED, [{"data": 1, "perturb": 3, "over": "node"}], tmp_path, **{"zo.queries": 2})


def test_four_ranks_are_one_process(tmp_path: Path) -> None:
    """2 × 2; slices of a quarter; slices of a half on nodes of two ranks; slices gathered over two
    axes."""
    meshes = [
        {"data": 2, "perturb": 2, "over": "nobody"},
        {"data": 2, "perturb": 2, "over": "node"},
        {"data": 2, "perturb": 2, "over": "node", "ranks_per_node": 2},
        {"data": 2, "perturb": 2, "over": "node", "groups": ("half=2",)},
    ]
    check(4, CASES[1:], meshes, tmp_path)


OWN: list[dict[str, Any]] = [
    {"trainable": "host × bf16", "frozen": "host"},
    {"trainable": "disk × bf16", "frozen": "disk", "prefetch": 3, "resident": 1},
]
"""Places that two ranks choose, each for itself."""


def _own_places(rank: int, folder: Path) -> dict[str, Any]:
    return walk(
        ("zo2", "llama", {**OWN[rank], "update.flush_every": 3}),
        {"world": 2, "data": 2, "check_every": 2},
        folder,
    )


def test_a_rank_with_whole_weights_keeps_them_where_it_likes(tmp_path: Path) -> None:
    """And their copies are compared at one step, whatever updates wait for a block that is
    fetched."""
    alone = walk(
        ("zo2", "llama", {**OWN[0], "gradient_accumulation_steps": 2}), {}, tmp_path / "alone"
    )
    for found in run_ranks(2, _own_places, tmp_path / "ranks"):
        assert found["lines"] == alone["lines"]
        assert found["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-7)
        assert_same(found["weights"], alone["weights"])


def _killed(rank: int, arguments: list[str], places: list[int], killed_at: int) -> str:
    own = [text for name, value in OWN[places[rank]].items() for text in (f"--{name}", str(value))]
    return dies(rank, 2, [*arguments, *own], killed_at)


@pytest.mark.parametrize("places", [[0, 1], [1, 0]])
def test_ranks_with_places_of_their_own_go_on_after_a_kill(
    places: list[int], tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Oracle: the run that nobody killed, on the host alone."""
    common = [
        "--method",
        "zo2",
        "--mesh.data",
        "2",
        "--lora",
        "false",
        "--max_steps",
        "6",
        "--save_every",
        "2",
    ]
    common += ["--optimizer.learning_rate", "1e-3"]
    assert (
        run_ranks(2, _killed, [*tiny_run.arguments(tmp_path / "whole"), *common], [0, 0], 0)
        == ["trained"] * 2
    )
    again = [*tiny_run.arguments(tmp_path / "killed"), *common]
    run_ranks(2, _killed, again, places, 3, may_die=True)
    run_ranks(2, _killed, [*again, "--resume_from_checkpoint", "latest"], places, 0)
    (expected, losses), (found, seen) = result(tmp_path / "whole"), result(tmp_path / "killed")
    assert len(losses) == 6
    assert seen == losses
    assert_same(found, expected)


LORA: list[Case] = [
    ("distzo2", "llama", {"lora": {"rank": 2}, "frozen": "host × int4"}),
    ("distzo2", "mixtral", {"lora": {"rank": 2}, "gradient_accumulation_steps": 2}),
]


def test_ranks_hold_slices_of_frozen_blocks(tmp_path: Path) -> None:
    """In codes, whose bytes are cut anywhere; of experts that are stored one by one; over two
    axes."""
    check(2, LORA, [{"perturb": 2}, {"data": 2}], tmp_path / "a")
    check(4, LORA[:1], [{"data": 2, "perturb": 2, "groups": ("half=2",)}], tmp_path / "b")


def _held(rank: int, folder: Path, group: str) -> tuple[int, int]:
    """Private bytes that a walker with adapters took, and bytes of parameters that it read."""
    plan = method("distzo2", mesh={"world": 2}, frozen=f"host × raw × {group}", prefetch=0)
    return [_taken(folder, plan) for _ in range(2)][
        1
    ]  # the first time also pays for what is imported and stays


def _taken(folder: Path, plan: Plan) -> tuple[int, int]:
    gc.collect()
    give_back()
    before = private_bytes()
    read = 0

    def counted(model: ModelHandle, name: str, layout: Layout, out_P: torch.Tensor) -> None:
        nonlocal read
        read += layout.nbytes
        fill(model, name, layout, out_P)

    fill = ModelHandle.fill
    ModelHandle.fill = counted  # type: ignore[method-assign]
    with Walker(folder, plan, lora={"rank": 2}, device="cpu") as walker:
        walker.step(random_batch(2, seed=0))
        give_back()
        ModelHandle.fill = fill  # type: ignore[method-assign]
        return private_bytes() - before, read


def test_a_node_holds_one_copy_of_frozen_blocks(tmp_path: Path) -> None:
    """Oracle: the kernel's count of anonymous memory: two ranks that hold the blocks together have
    one copy less than two that hold them each. Together they read one, and the matrix that a border
    goes through twice."""
    model = tiny_model(
        "llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=12, vocab_size=256
    )
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    blocks = 4 * sum(p.numel() for name, p in model.named_parameters() if ".layers." in name)
    found = [
        zip(*run_ranks(2, _held, tmp_path, group, fresh=True), strict=True)
        for group in ("nobody", "node")
    ]
    (each, read_each), (together, read) = (map(sum, of_ranks) for of_ranks in found)
    assert blocks > 40e6
    assert each - together == pytest.approx(blocks, rel=0.1)
    assert read_each == 2 * blocks
    assert read <= blocks + 12 * 4 * 256 * 1024


@pytest.mark.parametrize("seed", range(20))
def test_every_forward_of_every_part_is_one_ranks(seed: int) -> None:
    """Closed form: the ranks' shares of (forwards × parts of the batch) are disjoint and cover
    everything."""
    draw = random.Random(seed)
    mesh = MeshSettings(data=draw.randint(1, 4), perturb=draw.randint(1, 5))
    passes = draw.randint(mesh.perturb, 12)
    cuts = mesh.data * draw.randint(1, 3)
    ranks = MeshSharing(Ranks(mesh))
    shares = [
        (p, cut)
        for rank in range(mesh.data * mesh.perturb)
        for p in ranks.forwards_of(rank, passes)
        for cut in ranks.micro_batches_of(rank, cuts)
    ]
    assert sorted(shares) == list(itertools.product(range(passes), range(cuts)))
    sizes = [len(ranks.forwards_of(rank, passes)) for rank in range(mesh.perturb)]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == -(-passes // mesh.perturb)


def _words(step: int) -> LabelWordBatch:
    return LabelWordBatch(random_batch(8, seed=step), torch.tensor([0, 1, 1, 0]), 2)


def _special(rank: int, mesh: dict[str, Any]) -> Any:
    """One run each of an uneven split of forwards, an objective that is no sum, and torch's noise
    with a seed a step: in place, and on slices of blocks."""
    out = []
    for name, settings, batch in SPECIAL:
        own = {
            key: value for key, value in mesh.items() if not (name == "mezo" and key == "perturb")
        }
        plan = (
            method(name, mesh=own, **settings)
            if own.get("world")
            else method(name, **settings, **own)
        )
        with Walker(tiny_model("llama"), plan, device="cpu") as walker:
            results = [
                walker.step(_words(step) if batch == "words" else random_batch(8, seed=step))
                for step in range(3)
            ]
            out.append(([(r.loss, r.projected_grad) for r in results], trained(walker)))
    return out


SPECIAL: list[tuple[str, dict[str, Any], str]] = [
    ("distzo2", {"zo.kind": "fzoo", "zo.queries": 2, "zo.noise": "rademacher"}, "loss"),
    ("distzo2", {"zo.objective": "f1"}, "words"),
    ("mezo", {"zo.noise": "mezo", "loss": "model"}, "loss"),
    ("distzo2", {"zo.noise": "torch", "zo.queries": 2, "update.flush_every": 2}, "loss"),
]


def test_uneven_forwards_objectives_that_are_no_sums_and_seeds_of_steps() -> None:
    """Three forwards on two ranks; F1 over the whole batch; seeds of steps, which every rank
    knows."""
    expected = _special(0, {"gradient_accumulation_steps": 1})
    halves = _special(0, {"gradient_accumulation_steps": 2})
    answers = run_ranks(2, _special, {"world": 2, "perturb": 2}, timeout=120)
    for answer in answers:
        for found, wanted in zip(answer, [*expected[:2], halves[2], expected[3]], strict=True):
            assert found[0] == wanted[0]
            assert_same(found[1], wanted[1])


def _spoilt(rank: int, mesh: dict[str, Any], unit: int) -> str:
    trainable = f"host × raw × {mesh.pop('over')}"
    plan = method("distzo2", mesh={"world": 2, "check_every": 2, **mesh}, trainable=trainable)
    walker = Walker(tiny_model("llama"), plan, device="cpu")
    walker.step(random_batch(8))
    buckets = walker.engine.trained
    held_P = buckets._resident[unit] if unit in buckets._resident else buckets.tier.bucket(unit)  # type: ignore[union-attr]
    if rank == 1:
        held_P[5] ^= 1
    try:
        walker.step(random_batch(8))
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
    return "nothing noticed"


@pytest.mark.parametrize(
    ("unit", "over", "name"),
    [(2, "nobody", "model.layers.1"), (0, "nobody", "prologue"), (0, "node", "prologue")],
)
def test_a_flipped_bit_stops_the_run_and_is_named(unit: int, over: str, name: str) -> None:
    """Oracle: the bit that was flipped on rank 1, in a block on the host or in the resident
    embedding."""
    for message in run_ranks(2, _spoilt, {"perturb": 2, "over": over}, unit, timeout=60):
        says(message, f"step 2 {name} rank 1")


def _joins(rank: int, folder: Path, mesh: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Go on with a run whose ledger rank 0 alone has."""
    ledger = folder / ("ledger.jsonl" if rank == 0 else "not on this node.jsonl")
    with Walker(
        tiny_model("llama"),
        method("distzo2", mesh=mesh, optimizer=OPTIMIZER),
        ledger=ledger,
        device="cpu",
    ) as walker:
        assert walker.steps_done == 3
        for step in range(3, 6):
            walker.step(random_batch(8, seed=step))
        assert walker.ledger is not None
        assert walker.ledger.steps == 6
        return trained(walker)


def test_a_new_node_joins_by_replaying_the_ledger(tmp_path: Path) -> None:
    """Oracle: one process all the way. Two ranks take up its ledger, which one of them has never
    seen."""
    plan = method("distzo2", optimizer=OPTIMIZER)
    with Walker(
        tiny_model("llama"), plan, ledger=tmp_path / "ledger.jsonl", device="cpu"
    ) as walker:
        for step in range(3):
            walker.step(random_batch(8, seed=step))
    with Walker(tiny_model("llama"), plan, device="cpu") as walker:
        for step in range(6):
            walker.step(random_batch(8, seed=step))
        expected = trained(walker)
    for weights in run_ranks(2, _joins, tmp_path, {"world": 2, "perturb": 2}, timeout=60):
        assert_same(weights, expected)


def _signalled(rank: int) -> list[int]:
    with Walker(tiny_model("llama"), method("distzo2", mesh={"world": 2}), device="cpu") as walker:
        walker.step(random_batch(8))
        before = walker.ranks.stop_signal_of_any_rank
        walker.ranks.own_stop_signal = lambda: 15 if rank == 1 else 0
        walker.step(random_batch(8))
        return [before, walker.ranks.stop_signal_of_any_rank]


def test_a_signal_to_one_rank_is_heard_by_all_with_the_steps_losses() -> None:
    """Oracle: the number that one rank was given."""
    assert run_ranks(2, _signalled, timeout=60) == [[0, 15], [0, 15]]


def _evaluated(rank: int, world: int, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    out = []
    for name, settings in cases:
        plan = (
            method(name, **settings)
            if world == 1
            else method(name, mesh={"world": world}, **settings)
        )
        with Walker(tiny_model("llama"), plan, device="cpu") as walker:
            walker.timeline = []
            found = walker.evaluate(random_batch(5))
            by_row = walker.label_losses(random_batch(3, seed=1)).tolist()
            walked = [program.shape.batch for program, _ in walker.timeline]
            parts = walker.label_losses(random_batch(10, seed=2), batches=3).tolist()
            assert walker.timeline[-1][0].shape.batch == -(-10 // (3 * world))
            out.append((found, by_row, parts, walked))
    return out


def test_ranks_share_an_evaluation() -> None:
    """Whether they share a step's forwards or the parameters, each of two ranks walks half of an
    evaluation's rows, rounded up, and has one process's bits; to rounding where the model's own
    loss is a mean over each rank's rows. Ten rows in three parts come back in their order."""
    alone = _evaluated(0, 1, [("mezo", {}), ("plain", {}), ("mezo", {"loss": "model"})])
    assert [walked for *_, walked in alone] == [[5, 3]] * 3
    expected = [alone[0], alone[1], alone[2], alone[2]]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("distzo2", {}),
        ("zero3", {}),
        ("mezo", {"loss": "model"}),
    ]
    for answer in run_ranks(2, _evaluated, 2, [*cases, ("zero3", {"loss": "model"})]):
        for number, ((found, by_row, parts, walked), wanted) in enumerate(
            zip(answer, expected, strict=True)
        ):
            assert walked == [3, 2]
            assert by_row == wanted[1]
            assert parts == pytest.approx(wanted[2], rel=1e-6)
            assert (
                found == wanted[0]
                if number < 2
                else found.loss == pytest.approx(wanted[0].loss, rel=1e-6)
            )
