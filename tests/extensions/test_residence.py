"""Oracle: the host tier, bit for bit, for residences that live in this file alone: parameters that
are streamed through zlib on the host by a mover of their own, and optimizer states of which some
units' lie on the device and the others' on the host.

Both are whole between the imports and the first test: rows, and a memory."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Hashable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockwalk import LoraSettings
from blockwalk.engine import movers
from blockwalk.engine.home import Job
from blockwalk.plan.methods import method
from blockwalk.plan.placement import StateKind, Tier
from blockwalk.plan.tiers import TIERS, TierFacts
from blockwalk.program.compile import compile
from blockwalk.program.placements import Placements
from blockwalk.program.program import Bytes, Op, OpKind, Pool, Shape, StepKind
from blockwalk.program.residence import RESIDENCES, STREAMED
from blockwalk.program.resident_bytes import resident_bytes
from blockwalk.program.unit_sizes import UnitSizes
from blockwalk.report.state_rows import state_rows
from blockwalk.simulate.hardware import load
from blockwalk.simulate.seconds import CostModel
from blockwalk.tiers.memory import Shapes
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.rows import registered
from tests.support.visits import visited_host

RATIO = 4


class Packed:
    """Buckets in memory, compressed (a Memory of what is streamed)."""

    def __init__(self) -> None:
        self.buckets: dict[Hashable, bytes] = {}

    def zeros(self, shapes: Shapes, group: Hashable) -> dict[str, Tensor]:
        raise AssertionError(f"nothing is worked on in place here: {group}")

    def write(self, group: Hashable, data_P: Tensor) -> None:
        self.buckets[group] = zlib.compress(data_P.cpu().numpy().data, 1)

    def read(self, group: Hashable, out_P: Tensor) -> None:
        unpacked = bytearray(zlib.decompress(self.buckets[group]))
        out_P.copy_(torch.frombuffer(unpacked, dtype=torch.uint8))

    def bytes(self, group: Hashable) -> Tensor | None:
        return None

    def will_need(self, group: Hashable) -> None:
        """Do nothing: a bucket is unpacked when it is read."""

    def dont_need(self, group: Hashable) -> None:
        """Do nothing: it is packed already."""

    def forget(self, group: Hashable) -> None:
        self.buckets.pop(group, None)

    def close(self) -> None:
        self.buckets.clear()


def held_packed(sizes: UnitSizes, unit: int, kind: StateKind, tier: Tier) -> Bytes:
    return ((Pool.HOST, sizes.part_bytes(sizes.model.units[unit], kind) // RATIO),)


MOVED: list[tuple[OpKind, int]] = []
"""The ops that the mover answered: kind and unit."""


def moved(home: Any, op: Op) -> Job:
    MOVED.append((op.kind, op.unit))
    return movers.streamed(home, op)


COMPRESSED = replace(STREAMED, held=held_packed, mover=moved, over_ranks="", as_copies="")
SPLIT = TierFacts(pool="host", shares=(("device", 0.4), ("host", 0.6)))


@pytest.fixture
def memories() -> Iterator[list[Packed]]:
    """The memories that runs make while the rows are registered."""
    made: list[Packed] = []

    def make(device: torch.device, scratch: object) -> Packed:
        made.append(Packed())
        return made[-1]

    packed = TierFacts(pool="host", residence="compressed", implementation=make)
    with ExitStack() as rows:
        rows.enter_context(registered(RESIDENCES, "compressed", COMPRESSED))
        rows.enter_context(registered(TIERS, "compressed", packed))
        rows.enter_context(registered(TIERS, "split", SPLIT))
        yield made


RUNS: dict[str, tuple[str, bool, dict[str, Any], str]] = {
    "mebp": ("mebp", True, {"frozen": "{tier} × raw"}, "compressed"),
    "zo2": ("zo2", False, {"trainable": "{tier}"}, "compressed"),
    "mebp, states split": (
        "mebp",
        False,
        {"frozen": "disk × raw", "trainable": "device", "optimizer_state": "{tier}"},
        "split",
    ),
}
"""Method, whether adapters are trained, settings, and the tier from here, by run."""


def run(name: str, tier: str, folder: Path, device: str = "cpu") -> dict[str, Any]:
    """What a run leaves: losses, an evaluation, every weight and optimizer state, and what its
    program counts."""
    method_name, adapters, settings, _ = RUNS[name]
    placed = {key: value.format(tier=tier) for key, value in settings.items()}
    plan = method(method_name, seed=1, **placed)
    model: Any = copy.deepcopy(tiny_model("llama", tied=True))
    lora = LoraSettings(rank=2, target_modules=("q_proj", "down_proj")) if adapters else None
    with Walker(model, plan, lora=lora, workdir=folder, device=device) as walker:
        losses = [walker.step(random_batch(seed=step)).loss for step in range(3)]
        walker.flush()
        places = Placements(plan, walker.spec, walker.device.type)
        state = walker.state_dict()
        return {
            "numbers": [*losses, walker.evaluate(random_batch(seed=9)).loss],
            "state": {name: t.cpu().clone() for name, t in state.items() if torch.is_tensor(t)},
            "places": places,
            "held": resident_bytes(places),
        }


@pytest.mark.parametrize("name", RUNS)
@visited_host()
def test_a_run_trains_on_a_residence_from_outside(
    name: str, memories: list[Packed], tmp_path: Path
) -> None:
    host = run(name, "host", tmp_path / "host")
    other = run(name, RUNS[name][3], tmp_path / "other")
    assert other["numbers"] == host["numbers"]
    assert other["state"].keys() == host["state"].keys()
    assert all(torch.equal(t, other["state"][key]) for key, t in host["state"].items())
    assert bool(memories) == (RUNS[name][3] == "compressed")


@visited_host()
def test_a_row_names_what_moves_it(memories: list[Packed], tmp_path: Path) -> None:
    """Every block of a step is fetched, stored and evicted by the row's mover, in this order of its
    own; a tied embedding that stays is not."""
    MOVED.clear()
    blocks = range(1, run("zo2", "compressed", tmp_path)["places"].last)
    of_block = [[kind for kind, unit in MOVED if unit == block] for block in blocks]
    moves = [OpKind.FETCH, OpKind.STORE, OpKind.EVICT]
    assert all(set(kinds) == set(moves) for kinds in of_block)
    first_step = [kind for kind in of_block[0] if kind is not OpKind.STORE][:2]
    assert first_step == [OpKind.FETCH, OpKind.EVICT]
    assert not [unit for kind, unit in MOVED if kind is OpKind.FETCH and unit not in blocks]


@visited_host()
def test_a_row_says_what_it_holds(memories: list[Packed], tmp_path: Path) -> None:
    """Every streamed block counts a fourth of its bytes, as the row says."""
    host = run("zo2", "host", tmp_path / "host")
    packed = run("zo2", "compressed", tmp_path / "packed")
    assert packed["held"][Pool.HOST] * RATIO == host["held"][Pool.HOST] > 0
    assert packed["held"][Pool.DEVICE] == host["held"][Pool.DEVICE]
    assert memories


def test_states_are_split_by_units(memories: list[Packed], tmp_path: Path) -> None:
    """Two of five units' moments are on the device, and each is counted where it lies."""
    places = run("mebp, states split", "split", tmp_path)["places"]
    residences = places.residences
    tiers = [str(residences[unit, StateKind.OPTIMIZER].tier) for unit in range(places.last + 1)]
    share = round(0.4 * len(tiers))
    assert sorted(tiers) == ["device"] * share + ["host"] * (len(tiers) - share)
    of_units = dict.fromkeys(tiers, 0)
    for unit, tier in enumerate(tiers):
        of_units[tier] += 8 * places.model.units[unit].numel(trainable=True)
    assert resident_bytes(places)[Pool.HOST] == of_units["host"]


def test_shares_are_priced_and_counted_where_each_lies() -> None:
    """By hand: of the moments on shares of disk and host those on the disk wear it, and cross its
    link; the others are worked on where they lie."""
    model = specification()
    shares = TierFacts(pool="host", shares=(("disk", 0.4), ("host", 0.6)))
    with registered(TIERS, "shares", shares):
        plan = method("mebp", optimizer_state="shares", trainable="disk", recompute="all")
        tiers = [
            str(Placements(plan, model, "cpu").residences[unit, StateKind.OPTIMIZER].tier)
            for unit in range(len(model.units))
        ]
        assert {*tiers} == {"disk", "host"}
        program = compile(plan, model, StepKind.TRAIN, Shape(1, 8))
        (moments,) = (
            row for row in state_rows(plan, model, program, "cpu") if row.kind == "optimizer"
        )
        costs = CostModel(plan, model, replace(load("h200"), device="cpu"))
        links = [costs.link_of(op) for op in program.ops if op.part is StateKind.OPTIMIZER]
        numels = [unit.numel(trainable=True) for unit in model.units]
        on_disk = [numel for numel, tier in zip(numels, tiers, strict=True) if tier == "disk"]
        assert moments.nbytes == 8 * sum(numels)
        assert moments.in_files == 8 * sum(on_disk)
        assert {*links} == {"disk"}


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"trainable": "split"}, "trainable.tier split optimizer_state"),
        ({"frozen": "split"}, "frozen.tier split optimizer_state"),
    ],
)
def test_shares_are_of_optimizer_states(
    settings: dict[str, str], facts: str, memories: list[Packed]
) -> None:
    with refused(ValueError, facts):
        Placements(method("mebp", **settings), specification(), "cpu")


def test_a_row_that_knows_no_ranks_is_refused_over_ranks(memories: list[Packed]) -> None:
    mesh = {"world": 4, "ranks_per_node": 2, "data": 2, "perturb": 2}
    plan = method("distzo2", mesh=mesh, trainable="compressed × raw × node")
    with refused(ValueError, "trainable compressed 2 trainable.group"):
        Placements(plan, specification(), "cpu")


def test_a_row_that_knows_no_copies_is_refused_behind_an_accelerator(
    memories: list[Packed],
) -> None:
    """The processor there would update masters that nothing but a slot can read."""
    plan = method("plain", trainable="compressed", optimizer_state="host")
    Placements(plan, specification(), "cpu")
    with refused(ValueError, "trainable compressed trainable.tier"):
        Placements(plan, specification(), "cuda")


def specification() -> Any:
    from tests.golden.specs import MODELS

    return MODELS["opt"]
