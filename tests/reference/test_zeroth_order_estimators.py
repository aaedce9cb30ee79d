"""Oracle: the reference loops of FZOO and HiZOO, and of every trap that implementations of MeZO
fell into."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk import method
from blockwalk.data.label_words import LabelWordBatch
from blockwalk.reference.zeroth_order import fzoo_step, hizoo_step, masters_of, spsa_step
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.zeroth_order_runs import RATE, assert_same, trained


@pytest.mark.parametrize("name", ["mezo", "zo2"])
def test_fzoo_is_the_reference(name: str, tmp_path: Path) -> None:
    """One-sided losses over signs, their standard deviation in the place of ε."""
    model = tiny_model("opt", tied=True)
    control = copy.deepcopy(model)
    masters = masters_of(model)
    zo = {"kind": "fzoo", "queries": 4, "noise": "rademacher"}
    plan = method(name, loss="model", zo=zo, optimizer={"learning_rate": 1e-3})
    with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
        for step in range(1, 4):
            found = walker.step(random_batch(seed=step))
            expected = fzoo_step(
                control,
                masters,
                random_batch(seed=step),
                step=step,
                seed=0,
                learning_rate=1e-3,
                queries=4,
            )
            assert walker.estimator.entries[-1].losses == expected.losses  # type: ignore[union-attr]
            assert found.loss == expected.losses[0]
        weights = trained(walker)
    assert_same(weights, masters)


@pytest.mark.parametrize("name", ["mezo", "zo2"])
def test_hizoo_is_the_reference(name: str, tmp_path: Path) -> None:
    """The curvature travels beside its weight, and later perturbations see it."""
    model = tiny_model("opt", tied=True)
    control = copy.deepcopy(model)
    masters = masters_of(model)
    hessians = {key: torch.ones_like(master) for key, master in masters.items()}
    zo = {"kind": "hizoo", "hessian_alpha": 1e-3}
    plan = method(
        name, loss="model", zo=zo, optimizer={"learning_rate": RATE}, update={"flush_every": 1}
    )
    with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
        for step in range(1, 5):
            batch = random_batch(seed=step)
            found = walker.step(batch)
            expected = hizoo_step(
                control, masters, hessians, batch, step=step, seed=0, learning_rate=RATE, alpha=1e-3
            )
            assert (found.loss, found.projected_grad) == (
                expected.losses[0],
                expected.projected_grads[0],
            )
        weights = trained(walker)
    assert_same(weights, masters)
    assert all(not torch.equal(hessian, torch.ones_like(hessian)) for hessian in hessians.values())


@pytest.mark.parametrize("kind", ["fzoo", "hizoo"])
def test_estimators_keep_their_bits_in_16_bits_and_unflushed(kind: str, tmp_path: Path) -> None:
    """Oracle: the same run written back in every step."""
    model = tiny_model("llama", tied=True)
    found = []
    for flush_every in (1, 5):
        zo = {"kind": kind, "queries": 2, "hessian_alpha": 1e-3, "hessian_codec": "bf16"}
        settings: dict[str, Any] = {
            "zo": zo,
            "optimizer": {"learning_rate": 1e-3},
            "trainable": "disk × bf16",
        }
        plan = method("zo2", update={"flush_every": flush_every}, **settings)
        with Walker(
            copy.deepcopy(model), plan, workdir=tmp_path / str(flush_every), device="cpu"
        ) as walker:
            results = [walker.step(random_batch(seed=step)).projected_grad for step in range(7)]
            found.append((results, trained(walker)))
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])


def test_seed_zero_is_a_seed(tmp_path: Path) -> None:
    """Oracle: the reference with seed 0, and a run whose plan says 0."""
    model = tiny_model("llama")
    control = copy.deepcopy(model)
    masters = masters_of(model)
    plan = method("mezo", loss="model", seed=5, optimizer={"learning_rate": RATE})
    with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
        found = walker.step(random_batch(), seed=0)
        expected = spsa_step(control, masters, random_batch(), step=1, seed=0, learning_rate=RATE)
        assert found.projected_grad == expected.projected_grads[0]
        assert_same(trained(walker), masters)


@pytest.mark.parametrize("name", ["mezo", "zo2"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_changes_nothing(name: str, bad: float, tmp_path: Path) -> None:
    """Oracle: a run that never saw that batch. The step's data are in the message; weights and
    ledger are as they were."""
    model = tiny_model("llama")
    seen: list[int] = []

    def objective(logits_BSV: torch.Tensor, batch: Any) -> torch.Tensor:
        seen.append(1)
        return logits_BSV.float().mean() if batch["input_ids"][0, 0] != 7 else torch.tensor(bad)

    poisoned = random_batch(seed=8)
    poisoned["input_ids"][0, 0] = 7
    weights = []
    for folder, batches in (("a", [1, None, 2, 3]), ("b", [1, 2, 3])):
        plan = method(name, optimizer={"learning_rate": RATE})
        path = tmp_path / folder / "ledger.jsonl"
        with Walker(
            copy.deepcopy(model),
            plan,
            workdir=tmp_path / folder,
            device="cpu",
            ledger=path,
            objective=objective,
        ) as walker:
            for seed in batches:
                if seed is not None:
                    walker.step(random_batch(seed=seed))
                    continue
                before = path.read_bytes()
                with refused(FloatingPointError, "2 seed 0 0.03 0.001"):
                    walker.step(poisoned)
                assert path.read_bytes() == before
                assert walker.steps_done == 1
            weights.append(trained(walker))
    assert_same(weights[0], weights[1])


def test_the_last_update_is_there_before_anyone_looks(tmp_path: Path) -> None:
    """Oracle: the resident run. Evaluation, the state, and the saved model see every step's
    update."""
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama", tied=True)
    looks = []
    for name, settings in (
        ("mezo", {}),
        ("zo2", {"update": {"flush_every": 50}, "trainable": "disk"}),
    ):
        folder = tmp_path / name
        plan = method(name, optimizer={"learning_rate": RATE}, **settings)
        with Walker(copy.deepcopy(model), plan, workdir=folder, device="cpu") as walker:
            for step in range(3):
                walker.step(random_batch(seed=step))
            loss = walker.evaluate(random_batch(seed=9)).loss
            walker.step(random_batch(seed=3))
            tokens = walker.generate(random_batch(seed=9)["input_ids"], 4)
            walker.step(random_batch(seed=4))
            walker.save_pretrained(folder / "saved")
        saved = AutoModelForCausalLM.from_pretrained(folder / "saved")
        looks.append((loss, {key: p.detach() for key, p in saved.named_parameters()}, tokens))
    assert looks[0][0] == looks[1][0]
    assert torch.equal(looks[0][2], looks[1][2])
    assert_same(looks[1][1], looks[0][1])
    own = dict(model.named_parameters())
    assert not any(torch.equal(tensor, own[key]) for key, tensor in looks[0][1].items())


@pytest.mark.parametrize(("name", "tier"), [("mezo", "device"), ("zo2", "host")])
def test_the_state_holds_the_pending_update_and_the_moments(
    name: str, tier: str, tmp_path: Path
) -> None:
    """Oracle: a run that was never stopped."""
    model = tiny_model("opt", tied=True)
    plan = method(
        name,
        trainable=tier,
        optimizer={"name": "adamw", "learning_rate": 1e-3, "schedule": "linear", "total_steps": 9},
    )
    with Walker(copy.deepcopy(model), plan, workdir=tmp_path / "a", device="cpu") as walker:
        for step in range(3):
            walker.step(random_batch(seed=step))
        state = copy.deepcopy(walker.state_dict())
        rest = [walker.step(random_batch(seed=step)).projected_grad for step in range(3, 6)]
        expected = trained(walker)
    with Walker(copy.deepcopy(model), plan, workdir=tmp_path / "b", device="cpu") as walker:
        walker.load_state_dict(state)
        assert walker.steps_done == 3
        assert [walker.step(random_batch(seed=step)).projected_grad for step in range(3, 6)] == rest
        assert_same(trained(walker), expected)


def words(seed: int) -> LabelWordBatch:
    """Five examples with three label words of one token each, at the end of the row."""
    batch = random_batch(15, 8, seed=seed)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    batch["labels"][:, -1] = batch["input_ids"][:, -1]
    return LabelWordBatch(batch, torch.tensor([0, 2, 1, 1, 0]), 3)


@pytest.mark.parametrize("objective", ["label_words", "accuracy", "f1"])
@pytest.mark.parametrize(
    ("loss", "noise"), [("chunked", "gaussian"), ("chunked", "lowrank"), ("model", "gaussian")]
)
def test_objectives_that_rank_label_words(
    objective: str, loss: str, noise: str, tmp_path: Path
) -> None:
    """Oracle: the same number from the model's own logits, in closed form."""
    model = tiny_model("llama").eval()
    examples = words(4)
    zo = {"objective": objective, "epsilon": 1e-9, "noise": noise}
    plan = method("zo2", zo=zo, loss=loss, optimizer={"learning_rate": 0.0})
    with Walker(copy.deepcopy(model), plan, workdir=tmp_path, device="cpu") as walker:
        found = walker.step(examples).loss
        with refused(ValueError, "LabelWordBatch"):
            walker.step(random_batch())
    with torch.no_grad():
        logits = (
            model(**{k: v for k, v in examples.batch.items() if k != "labels"})
            .logits[:, -2]
            .double()
        )
    scores = logits.log_softmax(-1).gather(1, examples.batch["labels"][:, -1:]).view(5, 3)
    chosen = scores.argmax(1)
    right = examples.targets_B
    hits = [
        [
            int(((chosen == c) & (right == c)).sum()),
            int((chosen == c).sum()),
            int((right == c).sum()),
        ]
        for c in range(3)
    ]
    expected = {
        "label_words": float(torch.nn.functional.cross_entropy(scores, right)),
        "accuracy": 1 - float((chosen == right).double().mean()),
        "f1": 1 - sum(2 * tp / (p + n) if tp else 0.0 for tp, p, n in hits) / 3,
    }
    assert found == pytest.approx(expected[objective], rel=1e-5)


def test_a_function_that_has_no_gradient_is_optimised(tmp_path: Path) -> None:
    """Oracle: the function itself, before and after. It counts tokens that are not ranked first."""
    model = tiny_model("llama")
    batch = random_batch(8, 12)

    def misses(logits_BSV: torch.Tensor, batch: Any) -> float:
        ranked = logits_BSV[:, :-1].argmax(-1)
        return float((ranked != batch["labels"][:, 1:]).float().mean()) + float(
            logits_BSV.std() > 9
        )

    plan = method("mezo", zo={"queries": 4, "epsilon": 3e-2}, optimizer={"learning_rate": 3e-3})
    with Walker(model, plan, workdir=tmp_path, device="cpu", objective=misses) as walker:
        losses = [walker.step(batch).loss for _ in range(30)]
    assert min(losses[-5:]) < losses[0]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"zo": {"kind": "fzoo", "queries": 1}}, "standard deviation"),
        ({"zo": {"noise": "mezo"}, "trainable": "host"}, "noise|weights"),
        (
            {"zo": {"noise": "mezo"}, "optimizer": {"name": "adamw"}},
            "original's|mezo_original update",
        ),
        ({"zo": {"kind": "hizoo", "hessian_codec": "fp8"}}, "hessian_codec"),
        ({"zo": {"kind": "hizoo", "hessian_alpha": 1.0}}, "hessian_alpha"),
    ],
)
def test_plans_that_make_no_sense_are_refused(settings: dict[str, Any], reason: str) -> None:
    """Oracle: the rule that each breaks."""
    with refused(ValueError, reason):
        method("mezo", **settings)
