"""Oracle: the same run with everything resident (method ``mezo``), which is the reference loop's:
bit for bit, wherever weights live, in whatever codec, however rarely they are written back."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blockwalk import method
from blockwalk.engine.bucket_tensors import BucketTensors, tensors_in
from blockwalk.estimators.zeroth_order.arithmetic import PerturbedCopies
from blockwalk.estimators.zeroth_order.draws import Elementwise, LowRank
from blockwalk.estimators.zeroth_order.estimator import ZerothOrder
from blockwalk.estimators.zeroth_order.perturbed_weight import PerturbedWeight
from blockwalk.estimators.zeroth_order.step_state import StepState
from blockwalk.numerics.row_tiles import NarrowProducts
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.plan import Plan
from blockwalk.program.program import Lane, Op, OpKind, Pool, Shape, StepKind
from blockwalk.reference.zeroth_order import masters_of, spsa_step
from blockwalk.tiers.block_store.store import StoredUnit
from blockwalk.tiers.unit_buckets import Staged, UnitBuckets
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.tier_runs import Run, assert_equal, run
from tests.support.visits import visited_host
from tests.support.zeroth_order_runs import assert_same, trained


@pytest.fixture
def visits() -> Iterator[None]:
    with visited_host():
        yield


VOCABULARY = 101


@pytest.mark.usefixtures("visits")
@pytest.mark.parametrize("kind", ["opt", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("flush_every", [1, 4])
def test_streamed_weights_train_as_resident_ones(
    kind: str, tied: bool, tier: str, flush_every: int, tmp_path: Path
) -> None:
    """A deferred update with the next step's learning rate, or one that is missing at evaluation,
    would show here."""
    model = tiny_model(kind, tied=tied)
    expected = run("mezo", model, tmp_path / "mezo")
    found = run(
        "zo2",
        model,
        tmp_path / "zo2",
        trainable=tier,
        frozen=tier,
        update={"flush_every": flush_every},
    )
    assert_equal(found, expected)


@pytest.mark.usefixtures("visits")
@pytest.mark.parametrize(
    ("resident", "settings"),
    [
        (1, {"trainable": "host", "frozen": "host"}),
        (2, {"trainable": "disk", "frozen": "disk", "update": {"flush_every": 3}, "prefetch": 2}),
        (9, {"trainable": "host", "frozen": "host"}),
    ],
)
def test_blocks_that_stay_train_as_those_that_stream(
    resident: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """One block, two of them beside slots for others, all of them: then no block travels."""
    model = tiny_model("opt", tied=True, num_hidden_layers=4)
    expected = run("mezo", model, tmp_path / "mezo")
    assert_equal(run("zo2", model, tmp_path / "zo2", resident=resident, **settings), expected)
    with Walker(
        model, method("zo2", resident=resident, **settings), workdir=tmp_path / "w", device="cpu"
    ) as walker:
        program = walker.program(StepKind.TRAIN, Shape(2, 8))
        assert len(walker.engine.trained.streamed) == max(4 - resident, 0)
        assert program.slots == min(method("zo2", **settings).prefetch + 1, max(4 - resident, 0))


@pytest.mark.usefixtures("visits")
def test_adapters_train_alike_over_frozen_blocks_that_stay(tmp_path: Path) -> None:
    """Also with gradients, and with weights of 8 bits that are decoded where they lie."""
    model = tiny_model("llama", num_hidden_layers=3)
    lora = LoraSettings(rank=2)
    model.save_pretrained(tmp_path / "model")
    for name, codec in (("zo2", "raw"), ("mebp", "int8")):
        found = [
            run_from(tmp_path, name, lora, resident, frozen=f"host × {codec}", recompute="all")
            for resident in (0, 2, 3)
        ]
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("flush_every", [1, 4])
@pytest.mark.parametrize(
    "settings", [{}, {"frozen": "host"}, {"trainable": "host × bf16"}], ids=str
)
def test_a_processor_reads_the_host_tier_where_it_lies(
    settings: dict[str, Any], flush_every: int, tmp_path: Path
) -> None:
    """Oracle: the resident run, of which the programs differ in nothing that is done: no copy, no
    slot."""
    model = tiny_model("opt", tied=True)
    codec = settings.get("trainable", "host").replace("host", "device")
    expected = run("mezo", model, tmp_path / "mezo", trainable=codec)
    changes = {**settings, "update": {"flush_every": flush_every}}
    assert_equal(run("zo2", model, tmp_path / "zo2", **changes), expected)
    with Walker(model, method("zo2", **changes), workdir=tmp_path / "w", device="cpu") as walker:
        program = walker.program(StepKind.TRAIN, Shape(2, 8))
        assert not {OpKind.FETCH, OpKind.STORE} & {op.kind for op in program.ops}
        assert program.slots == len(walker.engine.trained.streamed) == 0


def run_from(
    folder: Path, name: str, lora: LoraSettings, resident: int, **settings: Any
) -> list[float]:
    """Losses of three steps and of an evaluation, of a model from its files."""
    plan = method(name, resident=resident, **settings)
    with Walker(
        folder / "model", plan, lora=lora, workdir=folder / f"{name}{resident}", device="cpu"
    ) as walker:
        losses = [walker.step(random_batch(seed=step)).loss for step in range(3)]
        return [*losses, walker.evaluate(random_batch(seed=9)).loss]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_every_codec_trains_alike_on_every_tier(codec: str, rounding: str, tmp_path: Path) -> None:
    """Entries that wait are applied singly and rounded each, as if every step had been stored."""
    model = tiny_model("llama", tied=True)
    update = {"rounding": rounding}
    expected = run("mezo", model, tmp_path / "mezo", trainable=f"device × {codec}", update=update)
    for tier, flush_every in (("host", 1), ("disk", 3), ("disk", 100)):
        settings = {
            "trainable": f"{tier} × {codec}",
            "update": {**update, "flush_every": flush_every},
        }
        assert_equal(run("zo2", model, tmp_path / f"{tier}{flush_every}", **settings), expected)


def test_forwards_in_bfloat16_from_float32_masters(tmp_path: Path) -> None:
    """The compute dtype is the forward's alone: g is not lost to 16 bits, and masters keep 32."""
    model = tiny_model("opt", tied=True)
    settings = {"compute_dtype": "bfloat16", "loss": "model", "seed": 3}
    control = copy.deepcopy(model).to(torch.bfloat16)
    masters = masters_of(model)
    grads = []
    with Walker(model, method("mezo", **settings), workdir=tmp_path, device="cpu") as walker:
        for step in range(1, 4):
            found = walker.step(random_batch(seed=step))
            expected = spsa_step(
                control,
                masters,
                random_batch(seed=step),
                step=step,
                seed=3,
                learning_rate=1e-6,
                loss=_float_loss,
            )
            assert found.projected_grad == expected.projected_grads[0]
            grads.append(found.projected_grad)
        assert_same(trained(walker), masters)
    assert all(grads)


def _float_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    with NarrowProducts():  # as the walk multiplies
        loss: torch.Tensor = model(**batch, use_cache=False).loss
    assert loss.dtype == torch.float32
    return loss


def buffers(walker: Walker) -> dict[str, tuple[int, int]]:
    """Address and bytes of every slot, host buffer and scratch buffer that a zeroth-order walk
    holds."""
    buckets = walker.engine.trained
    estimator = walker.estimator
    assert isinstance(estimator, ZerothOrder)
    held = {f"slot {i}": buffer for i, buffer in enumerate(buckets.slots._buffers)}
    if isinstance(buckets.tier, UnitBuckets):
        held |= {
            f"host {i}": buckets.tier.bucket(unit)
            for i, unit in enumerate(sorted(buckets.streamed))
        }
    if isinstance(buckets.tier, Staged):
        held |= {
            f"staging {i}": buffer
            for i, buffer in enumerate([*buckets.tier._inward, buckets.tier._outward])
        }
    copies = estimator.arithmetic
    assert isinstance(copies, PerturbedCopies)
    arenas = {
        "scratch": copies.units.scratch,
        "slice_scratch": copies.slice_scratch,
        "loss_scratch": estimator.loss_scratch,
    }
    for name, arena in arenas.items():
        held |= {f"{name} {key}": buffer for key, buffer in arena._buffers.items()}
    return {name: (buffer.data_ptr(), buffer.nbytes) for name, buffer in held.items()}


SLOT_RUNS: dict[str, dict[str, Any]] = {
    "host": {"trainable": "host"},
    "disk": {"trainable": "disk", "frozen": "disk", "update": {"flush_every": 3}},
    "bf16": {"trainable": "host × bf16"},
    "fp8": {"trainable": "disk × fp8", "prefetch": 2},
    "adamw": {"trainable": "host", "optimizer": {"name": "adamw", "learning_rate": 1e-3}},
    "hizoo": {
        "trainable": "host × bf16",
        "zo": {"kind": "hizoo", "hessian_alpha": 1e-3, "hessian_codec": "bf16"},
    },
    "fzoo": {"trainable": "host", "zo": {"kind": "fzoo", "queries": 3, "noise": "rademacher"}},
}


@pytest.mark.usefixtures("visits")
@pytest.mark.parametrize("settings", SLOT_RUNS.values(), ids=SLOT_RUNS)
def test_no_buffer_appears_after_the_first_step(settings: dict[str, Any], tmp_path: Path) -> None:
    """Oracle: the addresses after the first step, which has no update to apply yet; steps that
    apply and write back follow."""
    with Walker(
        tiny_model("llama", tied=True), method("zo2", **settings), workdir=tmp_path, device="cpu"
    ) as walker:
        walker.step(random_batch(seed=0))
        first = buffers(walker)
        assert len(first) > 4
        for step in range(1, 6):
            walker.step(random_batch(seed=step))
            assert buffers(walker) == first


@pytest.mark.cuda
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_no_segment_and_no_pinned_memory_appear_after_the_first_step(
    tier: str, tmp_path: Path
) -> None:
    """Oracle: the counters of the CUDA and of the pinned host allocator."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    def counters() -> tuple[int, int]:
        pinned = torch.cuda.host_memory_stats()["allocations.allocated"]  # type: ignore[no-untyped-call]
        return torch.cuda.memory_stats()["segment.all.allocated"], pinned

    model = tiny_model("llama", tied=True)
    with Walker(
        model, method("zo2", trainable=tier, frozen=tier), workdir=tmp_path, device="cuda"
    ) as walker:
        walker.step(random_batch(seed=0))
        torch.cuda.synchronize()
        first = counters()
        held = buffers(walker)
        for step in range(1, 6):
            walker.step(random_batch(seed=step))
        torch.cuda.synchronize()
        assert counters() == first
        assert buffers(walker) == held


@pytest.mark.parametrize("codec", ["bf16", "fp16", "fp8"])
def test_a_step_of_rate_zero_changes_no_bit(codec: str, tmp_path: Path) -> None:
    """Oracle: the weights before. In-place +ε, −2ε, +ε would have moved them."""
    model = tiny_model("llama")
    with Walker(
        model,
        method("zo2", trainable=f"host × {codec}", optimizer={"learning_rate": 0.0}),
        workdir=tmp_path,
        device="cpu",
    ) as walker:
        before = trained(walker)
        for step in range(3):
            assert walker.step(random_batch(seed=step)).projected_grad
        after = trained(walker)
    if codec == "fp8":  # scales are computed anew from what was decoded: to one rounding of float32
        assert all(torch.allclose(after[name], before[name], rtol=1e-6, atol=0) for name in before)
    else:
        assert_same(after, before)


def test_stochastic_rounding_keeps_small_updates_that_nearest_loses(tmp_path: Path) -> None:
    """Oracle: the float32 run. Updates far below half a step of bfloat16 vanish when rounded to
    nearest."""
    model = tiny_model("llama").to(torch.bfloat16).float()
    settings: dict[str, Any] = {
        "optimizer": {"name": "sgd", "learning_rate": 1e-6},
        "steps": 30,
        "seed": 1,
    }
    exact = run("mezo", model, tmp_path / "a", **settings)[2]
    start = masters_of(model)
    moved = {}
    for rounding in ("nearest", "stochastic"):
        weights = run(
            "mezo",
            model,
            tmp_path / rounding,
            trainable="device × bf16",
            update={"rounding": rounding},
            **settings,
        )[2]
        along = sum(
            float(((weights[n].float() - start[n]) * (exact[n] - start[n])).sum()) for n in start
        )
        moved[rounding] = along / sum(float((exact[n] - start[n]).square().sum()) for n in start)
    assert moved["nearest"] < 0.2
    assert moved["stochastic"] == pytest.approx(1.0, abs=0.35)


@pytest.mark.parametrize("optimizer", ["sgd", "sign", "momentum", "adamw"])
def test_lora_on_mapped_4_bit_weights(optimizer: str, tmp_path: Path) -> None:
    """Oracle: the same run deferred and not; the base is only read, and its adapters stay where
    they are."""
    model = tiny_model("llama", tied=True, hidden_size=64, intermediate_size=256)
    model.save_pretrained(tmp_path / "m")
    settings = {"optimizer": {"name": optimizer, "learning_rate": 1e-2}, "frozen": "disk × int4"}
    lora = LoraSettings(rank=2)
    expected = run("mezo", tmp_path / "m", tmp_path / "a", lora=lora, **settings)
    found = run("zo2", tmp_path / "m", tmp_path / "b", lora=lora, trainable="host", **settings)
    assert_equal(found, expected)
    moved = [tensor for name, tensor in found[2].items() if "lora_B" in name]
    assert moved
    assert all(tensor.any() for tensor in moved)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_moments_travel_with_their_bucket(optimizer: str, tmp_path: Path) -> None:
    model = tiny_model("opt", tied=True)
    settings = {"optimizer": {"name": optimizer, "learning_rate": 1e-3}}
    expected = run("mezo", model, tmp_path / "a", **settings)
    assert_equal(run("zo2", model, tmp_path / "b", update={"flush_every": 3}, **settings), expected)


def test_accumulated_micro_batches_are_one_batch(tmp_path: Path) -> None:
    """Oracle: the undivided batch; the mean is over tokens, not the mean of means."""
    model = tiny_model("llama")
    one = run("zo2", model, tmp_path / "a", steps=2)
    four = run("zo2", model, tmp_path / "b", steps=2, gradient_accumulation_steps=4)
    for (loss, g), (other, other_g) in zip(one[0], four[0], strict=True):
        assert other == pytest.approx(loss, rel=1e-6)
        assert other_g == pytest.approx(g, rel=2e-2, abs=2e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"trainable": "host", "zo.queries": 2},
        {"trainable": "disk × fp8"},
        {"trainable": "host × bf16", "zo.kind": "hizoo"},
        {"trainable": "host", "zo.noise": "torch"},
        {"trainable": "host", "zo.noise": "lowrank", "zo.noise_rank": 2},
    ],
)
def test_a_block_perturbed_once_for_all_micro_batches(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the walk in which every micro-batch's forward draws for itself, bit for bit. Each
    matrix of a block is copied once a pass, but for noise of low rank, which is never made
    whole."""
    copied: list[int] = []
    into = PerturbedWeight.into

    def counted(weight: PerturbedWeight, out_RD: torch.Tensor) -> torch.Tensor:
        copied.append(len(out_RD.shape))
        return into(weight, out_RD)

    def walk(folder: Path) -> Run:
        plan = {"gradient_accumulation_steps": 2, "seed": 1, **settings}
        return run("zo2", tiny_model("opt", num_hidden_layers=3), folder, steps=2, **plan)

    monkeypatch.setattr(PerturbedWeight, "into", counted)
    found = walk(tmp_path / "once")
    passes = {"zo.queries": 4, "zo.kind": 3}.get(
        next(key for key in ("zo.queries", "zo.kind", "trainable") if key in settings), 2
    )
    # of noise that is drawn by element, a block's ten vectors are written in one call
    tensors = 6 if settings.keys() <= {"zo.queries", "trainable"} else 16
    assert len(copied) == (0 if "lowrank" in settings.values() else 2 * passes * 3 * tensors)
    copied.clear()
    monkeypatch.setattr(Plan, "copies_blocks", False)
    monkeypatch.setattr(ZerothOrder, "_bind", bind_anew)
    assert_equal(found, walk(tmp_path / "each"))
    assert not copied


def bind_anew(estimator: ZerothOrder, op: Op, state: StepState) -> None:
    estimator.arithmetic.units.forget()
    (values,) = estimator._values(op, state)
    estimator.engine.cut.bind(op.unit, values)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"zo.noise": "gaussian"},
        {"zo.noise": "torch"},
        {"zo.noise": "lowrank"},
        {"zo.target": "scales", "trainable": "device × int4"},
    ],
)
def test_a_head_perturbed_once_for_all_micro_batches(
    settings: dict[str, Any], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: steps on each micro-batch alone, whose losses add up, and the ranges, factors and
    scales of the head that a step on one draws. Before, each micro-batch drew them anew."""
    drawn: list[int] = []
    perturb = PerturbedWeight._perturb
    run_of = PerturbedWeight._run
    factors_of = LowRank.factors

    def counted(
        weight: PerturbedWeight, read: Any, shape: tuple[int, ...], *rest: Any, **where: Any
    ) -> torch.Tensor:
        if shape[0] == VOCABULARY and weight.scale:
            drawn.append(shape[0])
        return perturb(weight, read, shape, *rest, **where)

    def counted_factors(noise: LowRank, rows: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if len(rows) == VOCABULARY:
            drawn.append(len(rows))
        return factors_of(noise, rows, *rest)

    def losses(cuts: int, of: Any) -> Sequence[float]:
        optimizer = {"name": "sgd", "learning_rate": 0.0}
        plan = method(
            "mezo", gradient_accumulation_steps=cuts, seed=1, optimizer=optimizer, **settings
        )
        with Walker(copy.deepcopy(model), plan, device="cpu") as walker:
            drawn.clear()
            walker.step(of)
            return walker.estimator.entries[-1].losses

    def counted_run(weight: PerturbedWeight, noise: Elementwise, start: int, stop: int) -> Any:
        if stop - start == VOCABULARY:
            drawn.append(stop - start)
        return run_of(weight, noise, start, stop)

    monkeypatch.setattr(PerturbedWeight, "_perturb", counted)
    monkeypatch.setattr(PerturbedWeight, "_run", counted_run)
    monkeypatch.setattr(LowRank, "factors", counted_factors)
    model = tiny_model("llama", tied=tied)
    batch = random_batch(8)
    parts = [{name: tensor[at : at + 2] for name, tensor in batch.items()} for at in range(0, 8, 2)]
    counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    alone = [losses(1, part) for part in parts]
    once = list(drawn)
    together = losses(4, batch)
    assert drawn == once != []
    for at, loss in enumerate(together):
        mean = math.fsum(count * each[at] for count, each in zip(counts, alone, strict=True)) / sum(
            counts
        )
        assert loss == pytest.approx(mean, rel=1e-15)


def test_a_unit_is_laid_out_once_in_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the program's fetches. Each perturbed parameter is looked up several times a forward;
    when each look made all of its unit's tensors anew, OPT-125M lost 26 ms of a step of 1.4 s."""
    laid_out: list[str] = []

    def counted(unit: StoredUnit, bytes_P: torch.Tensor) -> BucketTensors:
        laid_out.append(unit.name)
        return tensors_in(unit, bytes_P)

    monkeypatch.setattr("blockwalk.engine.buckets.tensors_in", counted)
    with Walker(
        tiny_model("opt"), method("zo2", trainable="disk"), workdir=tmp_path, device="cpu"
    ) as walker:
        laid_out.clear()  # of units that stay on the device
        for step in range(3):
            walker.step(random_batch(seed=step))
        ops = walker.program(StepKind.TRAIN, Shape(2, 16)).ops
        visits = {(op.unit, op.slot) for op in ops if op.kind is OpKind.FETCH}
        assert len(laid_out) == len(visits) > 0


@pytest.mark.usefixtures("visits")
def test_program_bytes_are_the_buckets(tmp_path: Path) -> None:
    """Oracle: the buffers that exist. Slots, and what crosses a lane, are what the program says."""
    settings: dict[str, Any] = {
        "zo": {"kind": "hizoo", "hessian_codec": "bf16"},
        "trainable": "host × fp8",
    }
    with Walker(
        tiny_model("llama"), method("zo2", **settings), workdir=tmp_path, device="cpu"
    ) as walker:
        program = walker.program(StepKind.TRAIN, Shape(4, 12))
        buckets = walker.engine.trained
        assert [len(buffer) for buffer in buckets.slots._buffers] == [
            program.slot_bytes
        ] * program.slots
        moved = sum(buckets.units[unit].nbytes for unit in buckets.streamed)
        assert program.bytes_by_lane()[Lane.FETCH] == moved
        resident = sum(
            unit.nbytes
            for number, unit in enumerate(buckets.units)
            if number not in buckets.streamed
        )
        assert dict(program.static)[Pool.DEVICE] == resident + program.slots * program.slot_bytes
