"""Oracle: torch's own generator under the same seed, and the run where no other thread runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from blockwalk import Walker, method
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.numerics.drawing import DrawingFrom, _lent
from tests.models import random_batch, tiny_model
from tests.support.messages import refused

SEED = 31


def _x() -> torch.Tensor:
    return torch.linspace(-1, 1, 48).view(2, 3, 8)


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "dropout": lambda: F.dropout(_x(), 0.3),
    "dropout of features": lambda: F.dropout1d(_x(), 0.5),
    "alpha dropout": lambda: F.alpha_dropout(_x(), 0.3, training=True),
    "native dropout": lambda: torch.native_dropout(_x(), 0.3, True)[0],
    "attention": lambda: F.scaled_dot_product_attention(_x(), _x(), _x(), dropout_p=0.4),
    "attention without dropout": lambda: F.scaled_dot_product_attention(_x(), _x(), _x()),
    "rand": lambda: torch.rand(7),
    "rand_like": lambda: torch.rand_like(_x()),
    "randn_like": lambda: torch.randn_like(_x()),
    "randperm": lambda: torch.randperm(9),
    "uniform_": lambda: torch.empty(5).uniform_(0.9, 1.1),
    "normal": lambda: torch.normal(0.0, 1.0, (4,)),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 4),
    "gumbel": lambda: F.gumbel_softmax(_x()),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_an_operator_draws_what_it_draws_from_torchs_own_generator(
    draw: Callable[[], torch.Tensor],
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        expected = [draw(), draw()]
    before = torch.get_rng_state()
    with DrawingFrom(torch.Generator().manual_seed(SEED)):
        drawn = [draw(), draw()]
    assert torch.equal(torch.get_rng_state(), before)
    for tensor, other in zip(drawn, expected, strict=True):
        assert torch.equal(tensor, other)


def test_a_draw_of_another_thread_inside_an_operators_is_an_error() -> None:
    calls = []

    def draw() -> torch.Tensor:
        calls.append(0)
        if len(calls) == 2:
            other = threading.Thread(target=torch.rand, args=(3,))
            other.start()
            other.join()
        return torch.rand(4)

    with refused(RuntimeError, "thread native_dropout Generator dropout"):
        _lent(torch.Generator(), draw, "native_dropout")


@contextmanager
def _beside_a_thread_that_draws() -> Iterator[None]:
    ended = threading.Event()

    def draw() -> None:
        while not ended.wait(1e-5):
            torch.rand(3)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _losses(model: Any) -> list[float]:
    plan = method("mebp", frozen="disk × raw", compute_dtype="float32", recompute="all")
    lora = {"rank": 4, "dropout": 0.5, "target_modules": ["q_proj"]}
    with Walker(model, plan, lora=lora) as walker:
        return [walker.step(random_batch()).loss for _ in range(4)]


def test_a_run_beside_a_thread_that_draws_is_the_run_alone() -> None:
    expected = _losses(tiny_model("llama"))
    model = tiny_model("llama")
    with _beside_a_thread_that_draws():
        losses = _losses(model)
    assert losses == expected


def test_runs_in_threads_are_the_run_alone() -> None:
    expected = _losses(tiny_model("llama"))
    models = [tiny_model("llama") for _ in range(3)]
    answers: dict[int, list[float]] = {}

    def run(number: int) -> None:
        answers[number] = _losses(models[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers.get(number) for number in range(3)] == [expected] * 3
    assert tiny_model("llama").get_parameter("lm_head.weight").device.type == "cpu"


def test_a_skeleton_in_one_thread_leaves_the_models_of_another_their_weights() -> None:
    devices = []

    class Slow(torch.nn.Linear):
        def reset_parameters(self) -> None:
            other = threading.Thread(
                target=lambda: devices.append(torch.nn.Linear(3, 3).weight.device.type)
            )
            other.start()
            other.join()

    from blockwalk.cutting.skeleton import _parameters_on_meta

    with _parameters_on_meta():
        weight = Slow(3, 3).weight
    assert devices == ["cpu"]
    assert weight.device.type == "meta"
    assert build_skeleton(tiny_model("llama").config).get_parameter("lm_head.weight").is_meta


@pytest.mark.parametrize("column", ["shift_labels", "loss_mask", "loss_weights", "anything"])
def test_a_column_that_the_walk_does_not_follow_is_named(column: str) -> None:
    batch = {**random_batch(), column: torch.ones(4, 12)}
    with Walker(tiny_model("llama"), method("plain", compute_dtype="float32")) as walker:
        for call in (walker.step, walker.evaluate, walker.label_losses, walker.gradients):
            with refused(ValueError, column, "input_ids attention_mask position_ids labels"):
                call(batch)


def test_an_objective_is_given_every_column() -> None:
    batch = {**random_batch(), "weights": torch.ones(4, 12)}
    seen = []

    def objective(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        seen.append(batch["weights"].sum().item())
        return logits.square().mean()

    plan = method("plain", compute_dtype="float32")
    with Walker(tiny_model("llama"), plan, objective=objective) as walker:
        walker.step(batch)
    assert seen == [48.0]


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("mode", "facts"),
    [
        (torch.inference_mode, "inference_mode"),
        (_default_dtype, "bfloat16 set_default_dtype"),
        (lambda: torch.device("meta"), "meta set_default_device"),
    ],
)
def test_a_state_of_torch_that_no_walk_can_work_in_is_named(mode: Any, facts: str) -> None:
    model = tiny_model("llama")
    plan = method("plain", compute_dtype="float32")
    with mode(), refused(ValueError, facts):
        Walker(model, plan)
    with Walker(model, plan) as walker:
        before = walker.evaluate(random_batch()).loss
        with mode(), refused(ValueError, facts):
            walker.step(random_batch())
        assert walker.step(random_batch()).loss == pytest.approx(before, abs=1e-6)
