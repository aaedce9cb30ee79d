"""Oracle: the whole-model loops of :mod:`blockwalk.reference` on noise that is made whole; bit for
bit where nothing is added up in another order, within rounding where W + εz is never made."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk import method
from blockwalk.estimators.zeroth_order.draws import LowRank, add_low_rank_
from blockwalk.estimators.zeroth_order.estimator import ZerothOrder
from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.numerics.noise.noise import fill_
from blockwalk.plan import plan as plans
from blockwalk.plan.choices import LoraSettings
from blockwalk.program.compile import compile
from blockwalk.reference.mezo import mezo_step
from blockwalk.reference.zeroth_order import masters_of, spsa_step
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.tier_runs import assert_equal, run
from tests.support.zeroth_order_runs import assert_same, names_of, trained

RANK = 2
SEED = 7
RATE = 3e-2


def low_rank(shapes: dict[str, torch.Size], step: int, interval: int) -> Any:
    """z of matrices as the product of its factors, in float64; of vectors Gaussian."""

    def draw(query: int, name: str) -> torch.Tensor:
        shape = shapes[name]
        if len(shape) < 2:
            return fill_(torch.empty(shape), NoiseKey(SEED, step, query, name))
        a_NR = fill_(
            torch.empty(shape[0], RANK), NoiseKey(SEED, step, query, name, "left")
        ).double()
        since = (step - 1) // interval
        b_DR = fill_(
            torch.empty(shape[1], RANK), NoiseKey(SEED, since, query, name, "right")
        ).double()
        return (a_NR @ b_DR.t() / RANK**0.5).float()

    return draw


@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", True), ("opt", False), ("gpt2", True), ("phi", False)]
)
@pytest.mark.parametrize(("loss", "tier"), [("model", "device"), ("chunked", "disk")])
def test_low_rank_noise_is_the_dense_reference(
    kind: str, tied: bool, loss: str, tier: str, tmp_path: Path
) -> None:
    """Losses and weights within rounding; gpt2 has its matrices the other way round, a tied head
    reads the embedding's, phi's has a bias."""
    model = tiny_model(kind, tied=tied)
    control = copy.deepcopy(model)
    masters = masters_of(model)
    before = masters_of(model)
    shapes = {name: master.shape for name, master in masters.items()}
    zo = {
        "noise": "lowrank",
        "noise_rank": RANK,
        "noise_interval": 2,
        "queries": 2,
        "epsilon": 1e-2,
    }
    places = {"trainable": tier} if tier == "disk" else {}
    plan = method(
        "zo2" if places else "mezo",
        loss=loss,
        zo=zo,
        optimizer={"learning_rate": RATE},
        seed=SEED,
        **places,
    )
    with Walker(
        model, plan, workdir=tmp_path, device="cpu", ledger=tmp_path / "ledger.jsonl"
    ) as walker:
        for step in range(1, 4):
            walker.step(random_batch(seed=step))
            assert walker.ledger is not None
            found = walker.ledger.entries[-1]
            expected = spsa_step(
                control, masters, random_batch(seed=step), step=step, seed=SEED, learning_rate=RATE,
                epsilon=1e-2, queries=2, kind=low_rank(shapes, step, 2),
            )  # fmt: skip
            assert found.losses == pytest.approx(expected.losses, rel=2e-6)
            assert found.projected_grads == pytest.approx(expected.projected_grads, abs=5e-4)
        weights = trained(walker)
    assert weights.keys() == masters.keys()
    moved = max(float((masters[name] - tensor).abs().max()) for name, tensor in before.items())
    for name, master in masters.items():
        torch.testing.assert_close(weights[name], master, rtol=0, atol=3e-4 * moved, msg=name)


@pytest.mark.parametrize(
    ("start", "count"), [(0, 60), (5, 60), (12, 24), (31, 20), (17, 3), (95, 1)]
)
def test_a_flat_range_of_low_rank_noise_is_that_of_the_whole(start: int, count: int) -> None:
    """A slice of a rank begins and ends within a row. Oracle: the product of the whole factors."""
    noise = LowRank(
        NoiseKey(SEED, 1, 0, "matrix", "left"), NoiseKey(SEED, 0, 0, "matrix", "right"), RANK, 12
    )
    whole = noise.fill_(torch.empty(8, 12)).view(-1)
    assert torch.equal(noise.fill_(torch.empty(count), start), whole[start : start + count])
    added = add_low_rank_(torch.ones(count), [noise], [1.0], start)
    torch.testing.assert_close(added, whole[start : start + count] + 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "lora", "rows", "settings", "together"),
    [
        ("llama", None, 4, {}, True),
        ("opt", None, 4, {"gradient_accumulation_steps": 4}, True),
        ("gpt2", None, 1, {}, True),
        ("phi", LoraSettings(rank=4), 1, {}, True),
        ("gemma2", LoraSettings(rank=4), 4, {"frozen": "disk × int4"}, True),
        ("mixtral", LoraSettings(rank=4), 3, {}, True),
        ("llama", {"num_virtual_tokens": 3}, 4, {}, True),
        ("llama", None, 4, {"zo": {"kind": "hizoo"}}, True),
        ("llama", None, 4, {"zo": {"kind": "fzoo"}}, True),
        (
            "llama",
            None,
            12,
            {},
            False,
        ),  # as many rows as tokens: nobody can tell which dimension is which
        ("llama", None, 2, {}, False),  # six forwards of them as many
        ("bloom", None, 4, {}, False),  # a bias for each head of each row
        ("mixtral", None, 4, {}, False),  # experts in one parameter
    ],
)
def test_forwards_together_are_the_forwards_alone(
    kind: str,
    lora: Any,
    rows: int,
    settings: dict[str, Any],
    together: bool,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    """Oracle: the same steps with one forward at a time."""
    sizes: dict[str, Any] = (
        {"hidden_size": 32, "n_layer": 2, "n_head": 4} if kind == "bloom" else {}
    )
    tiny_model(kind, **sizes).save_pretrained(tmp_path / "model")
    forward_together = ZerothOrder._forward_together
    went = []

    def noted(self: ZerothOrder, *given: Any) -> bool:
        went.append(forward_together(self, *given))
        return went[-1]

    monkeypatch.setattr(ZerothOrder, "_forward_together", noted)
    zo = {
        "noise": "lowrank",
        "noise_rank": RANK,
        "queries": 3,
        "epsilon": 1e-2,
        **settings.get("zo", {}),
    }

    def losses(folder: Path) -> list[float]:
        compile.cache_clear()
        found: list[float] = []
        plan = method("zo2", **{**settings, "zo": zo})
        with Walker(tmp_path / "model", plan, lora=lora, workdir=folder, device="cpu") as walker:
            for step in range(3):
                walker.step(random_batch(rows, seed=step))
                found += walker.estimator.entries[-1].losses
        return found

    found = losses(tmp_path / "together")
    assert (all(went) and bool(went), any(went)) == (together, together)
    went.clear()
    monkeypatch.setattr(plans, "TOGETHER", 1)
    alone = losses(tmp_path / "alone")
    compile.cache_clear()
    assert not went
    assert found == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_low_rank_noise_on_every_tier(lora: Any, tmp_path: Path) -> None:
    model = tiny_model("llama", tied=True)
    zo = {"noise": "lowrank", "noise_rank": RANK}
    expected = run("mezo", model, tmp_path / "mezo", zo=zo, lora=lora)
    for tier, flush_every in (("host", 1), ("disk", 4)):
        settings: dict[str, Any] = {
            "trainable": tier,
            "frozen": tier,
            "update": {"flush_every": flush_every},
        }
        assert_equal(run("zo2", model, tmp_path / tier, zo=zo, lora=lora, **settings), expected)


@pytest.mark.parametrize(
    ("kind", "tied", "tier", "flush_every", "steps"),
    [
        ("llama", True, "host", 1, 100),
        ("llama", False, "host", 3, 100),
        ("opt", True, "disk", 2, 5),
    ],
)
def test_torch_noise_streamed_is_resident(
    kind: str, tied: bool, tier: str, flush_every: int, steps: int, tmp_path: Path
) -> None:
    """A hundred steps of ZO2's claim. OPT's final norm is drawn before its layers and used after
    them."""
    model = tiny_model(kind, tied=tied, num_hidden_layers=2)
    settings: dict[str, Any] = {
        "zo": {"noise": "torch"},
        "optimizer": {"learning_rate": 1e-3},
        "steps": steps,
    }
    expected = run("mezo", model, tmp_path / "mezo", **settings)
    settings |= {"trainable": tier, "update": {"flush_every": flush_every}}
    assert_equal(run("zo2", model, tmp_path / "zo2", **settings), expected)


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("opt", False)])
def test_torch_noise_is_the_original_draws(kind: str, tied: bool, tmp_path: Path) -> None:
    """A step with z as torch gives it is the reference's bit for bit; its first loss is the
    original's bit for bit, which perturbs in place, and the rest is within that drift."""
    model = tiny_model(kind, tied=tied)
    control = copy.deepcopy(model)
    original = copy.deepcopy(model)
    masters = masters_of(model)
    plan = method("zo2", loss="model", zo={"noise": "torch"}, optimizer={"learning_rate": RATE})
    with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
        for step in range(1, 4):
            batch = random_batch(seed=step)
            z = {}
            found = walker.step(batch, seed=40 + step)
            torch.manual_seed(40 + step)
            for name, master in masters.items():
                z[name] = torch.normal(0.0, 1.0, size=master.shape)
            expected = spsa_step(
                control,
                masters,
                batch,
                step=step,
                seed=0,
                learning_rate=RATE,
                kind=lambda _, name, z=z: z[name],
            )
            assert (found.loss, found.projected_grad) == (
                expected.losses[0],
                expected.projected_grads[0],
            )
            drifted = mezo_step(original, batch, learning_rate=RATE, seed=40 + step)
            assert step > 1 or found.loss == drifted.losses[0]
            assert found.loss == pytest.approx(drifted.losses[0], rel=1e-5)
        weights = trained(walker)
    assert_same(weights, masters)
    for name, tensor in names_of(original).items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-2 * RATE)


def test_a_pool_of_seeds_has_so_many_directions(tmp_path: Path) -> None:
    """The run's whole change lies in the span of K directions: those of the reference's keys, by
    least squares."""
    model = tiny_model("llama")
    pool = 3
    before = masters_of(model)
    plan = method(
        "mezo", zo={"seed_pool": pool, "queries": 2}, optimizer={"learning_rate": 1e-2}, seed=SEED
    )
    with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
        for step in range(8):
            walker.step(random_batch(seed=step))
        after = trained(walker)
    name = "model.layers.1.mlp.up_proj.weight"
    change_P = (after[name] - before[name]).flatten().double()
    z_PK = torch.stack(
        [fill_(torch.empty(len(change_P)), NoiseKey(SEED, 0, j, name)) for j in range(pool)], 1
    ).double()
    rest = change_P - z_PK @ torch.linalg.lstsq(z_PK, change_P[:, None]).solution[:, 0]
    assert change_P.norm() > 1e-4
    assert rest.norm() < 1e-5 * change_P.norm()


@pytest.mark.parametrize(("zo", "told"), [
    ({"noise_rank": 4}, "zo.noise_rank"), ({"noise": "torch", "seed_pool": 9}, "zo.seed_pool"),
    ({"noise": "lowrank", "noise_interval": 0}, "1"),
])  # fmt: skip
def test_settings_of_another_noise_are_refused(zo: dict[str, Any], told: str) -> None:
    with refused(ValueError, told):
        method("mezo", zo=zo)
