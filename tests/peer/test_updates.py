"""Oracle: peer libraries. Update rules against torch.optim, clipping against torch.nn.utils,
schedules against transformers."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockwalk.numerics.updates import (
    EXACT_PARTS,
    NORM_CHUNK,
    UPDATE_CHUNK,
    Rule,
    clip_coefficient,
    exact_parts,
    global_norm,
    norm_of_sums,
    square_sums,
)
from blockwalk.plan.choices import OptimizerSettings
from blockwalk.plan.schedules import SCHEDULES, make_schedule
from blockwalk.plan.update_rules import RULES
from tests.support.messages import refused


def peer_optimizer(options: OptimizerSettings, params: list[torch.Tensor]) -> torch.optim.Optimizer:
    common = {
        "lr": options.learning_rate,
        "weight_decay": options.weight_decay,
        "foreach": False,
        "fused": False,
    }
    if options.name == "adamw":
        return torch.optim.AdamW(params, betas=options.betas, eps=options.eps, **common)
    return torch.optim.SGD(
        params, momentum=options.momentum if options.name == "momentum" else 0.0, **common
    )


def zero_state(options: OptimizerSettings, param: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(param) for name in RULES[options.name].states}


CASES = [
    OptimizerSettings("sgd"),
    OptimizerSettings("sgd", weight_decay=0.1),
    OptimizerSettings("momentum"),
    OptimizerSettings("momentum", momentum=0.5, weight_decay=0.02),
    OptimizerSettings("adamw"),
    OptimizerSettings("adamw", betas=(0.85, 0.98), eps=1e-6, weight_decay=0.3),
]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("options", CASES, ids=lambda o: f"{o.name}-{o.weight_decay}")
def test_fifty_steps_are_those_of_torch_optim_to_the_last_bit(
    options: OptimizerSettings, together: bool
) -> None:
    """Oracle: torch.optim (foreach=False, fused=False), parameters and states, under a schedule
    that moves the rate."""
    torch.manual_seed(1)
    rule = Rule(options)
    rate = make_schedule("cosine", 3e-2, 5, 50)
    shapes = [(), (1,), (7, 3), (2, 65, 31), (UPDATE_CHUNK + 13,)]
    ours = [torch.randn(shape) for shape in shapes]
    theirs = [param.clone().requires_grad_() for param in ours]
    states = [zero_state(options, param) for param in ours]
    optimizer = peer_optimizer(options, theirs)
    for step in range(50):
        optimizer.param_groups[0]["lr"] = rate(step)
        for param, peer, state in zip(ours, theirs, states, strict=True):
            peer.grad = torch.randn_like(param) * 10.0 ** float(torch.randint(-6, 3, ()))
            if not together:
                rule.apply_(param, peer.grad.clone(), state, step=step + 1, lr=rate(step))
        if together:
            grads = [peer.grad.clone() for peer in theirs if peer.grad is not None]
            rule.apply_together_(ours, grads, states, step=step + 1, lr=rate(step))
        optimizer.step()
    for param, peer, state in zip(ours, theirs, states, strict=True):
        assert torch.equal(param, peer.detach())
        for name, tensor in state.items():
            assert torch.equal(tensor, optimizer.state[peer][name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", CASES, ids=lambda o: f"{o.name}-{o.weight_decay}")
def test_a_parameter_in_16_bits_is_updated_in_float32_and_rounded_once(
    options: OptimizerSettings, dtype: torch.dtype
) -> None:
    """Oracle: torch.optim on a float32 copy of the whole, rounded after every step."""
    torch.manual_seed(2)
    rule = Rule(options)
    ours = torch.randn(UPDATE_CHUNK + 13).to(dtype)
    peer = ours.float().requires_grad_()
    state = zero_state(options, peer.detach())
    optimizer = peer_optimizer(options, [peer])
    for step in range(5):
        peer.grad = torch.randn_like(peer)
        rule.apply_(ours, peer.grad.clone(), state, step=step + 1, lr=options.learning_rate)
        optimizer.param_groups[0]["lr"] = options.learning_rate
        optimizer.step()
        with torch.no_grad():
            peer.copy_(peer.to(dtype))
        assert torch.equal(ours, peer.detach().to(dtype)), step


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_slices_updated_alone_are_the_whole(data: st.DataObject) -> None:
    """Oracle: torch.optim on the whole parameter, against ours on slices of it, cut anywhere and
    taken in any order."""
    options = data.draw(st.sampled_from(CASES))
    numel = data.draw(st.integers(1, 300))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, numel), max_size=5)) - {numel}), numel]
    slices = data.draw(st.permutations(list(pairwise(cuts))))
    torch.manual_seed(numel)
    rule = Rule(options)
    param = torch.randn(numel)
    peer = param.clone().requires_grad_()
    state = zero_state(options, param)
    optimizer = peer_optimizer(options, [peer])
    for step in range(1, 4):
        peer.grad = torch.randn(numel)
        optimizer.step()
        for a, b in slices:
            part = {name: tensor[a:b] for name, tensor in state.items()}
            rule.apply_(param[a:b], peer.grad[a:b], part, step=step, lr=options.learning_rate)
    assert torch.equal(param, peer.detach())


def test_a_gradient_that_is_not_contiguous() -> None:
    """Oracle: torch.optim on the same transposed gradient, which must also be left as it was."""
    torch.manual_seed(0)
    param = torch.randn(5, 9)
    grad = torch.randn(9, 5).t()
    options = OptimizerSettings("adamw")
    peer = param.clone().requires_grad_()
    before = grad.clone()
    peer.grad = grad
    peer_optimizer(options, [peer]).step()
    rule = Rule(options)
    rule.apply_(param, grad, zero_state(options, param), step=1, lr=options.learning_rate)
    assert torch.equal(param, peer.detach())
    assert torch.equal(grad, before)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3 * NORM_CHUNK), min_size=1, max_size=4), st.integers(-12, 12))
def test_global_norm_and_clipping(sizes: list[int], magnitude: int) -> None:
    """Oracle: torch.linalg.vector_norm in float64, and the gradients that
    torch.nn.utils.clip_grad_norm_ leaves."""
    torch.manual_seed(sum(sizes))
    grads = [torch.randn(size) * 2.0**magnitude for size in sizes]
    norm = global_norm(grads)
    assert norm == pytest.approx(
        float(torch.linalg.vector_norm(torch.cat(grads).double())), rel=1e-13
    )
    params = [torch.zeros_like(grad) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(params, 2.5, foreach=False)
    for param, grad in zip(params, grads, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(
            grad * clip_coefficient(norm, 2.5), param.grad, rtol=1e-6, atol=0
        )


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_norm_does_not_know_how_it_was_sliced(data: st.DataObject) -> None:
    """Oracle: math.fsum over the chunks' own float64 sums, in one thread and unsliced; compared bit
    for bit."""
    sizes = data.draw(st.lists(st.integers(1, 4 * NORM_CHUNK), min_size=1, max_size=3))
    torch.manual_seed(sizes[0])
    grads = [torch.randn(size) for size in sizes]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = math.sqrt(
            math.fsum(
                float(chunk.double().pow(2).sum())
                for grad in grads
                for chunk in grad.split(NORM_CHUNK)
            )
        )
        torch.set_num_threads(data.draw(st.integers(1, 4)))
        assert global_norm(grads) == expected
        shards = []
        for grad in grads:
            cut = data.draw(st.integers(0, len(grad) // NORM_CHUNK)) * NORM_CHUNK
            shards += [square_sums(grad[:cut]), square_sums(grad[cut:])]
        assert norm_of_sums(data.draw(st.permutations(shards))) == expected
    finally:
        torch.set_num_threads(threads)


_TINY = 2.0**-298
"""The square of the least float32."""


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.builds(
            lambda mantissa, exponent: mantissa * _TINY * 2.0**exponent,
            st.integers(0, 2**53 - 1),
            st.integers(0, 540),
        ),
        max_size=60,
    ),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_a_ranks_sums_go_in_a_few_numbers(sums: list[float], ranks: int, order: Random) -> None:
    """Oracle: the sum as fractions, exact; and math.fsum over all sums of all ranks."""
    order.shuffle(sums)
    own = [sums[rank::ranks] for rank in range(ranks)]
    parts = [exact_parts(of_rank) for of_rank in own]
    for of_rank, numbers in zip(own, parts, strict=True):
        assert len(numbers) == EXACT_PARTS <= 64
        assert sum(map(Fraction, numbers)) == sum(map(Fraction, of_rank))
    everything = [number for numbers in parts for number in numbers]
    assert math.fsum(everything) == math.fsum(sums)
    told = norm_of_sums(torch.tensor(numbers, dtype=torch.float64) for numbers in parts)
    assert told == norm_of_sums([torch.tensor(sums, dtype=torch.float64)])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite(bad: float) -> None:
    """Oracle: torch.nn.utils.get_total_norm and the clamped coefficient of clip_grad_norm_: inf
    clips to 0, NaN stays."""
    grads = [torch.randn(5), torch.tensor([1.0, bad])]
    theirs = torch.nn.utils.get_total_norm(grads, foreach=False)
    coefficient = torch.clamp(1.0 / (theirs + 1e-6), max=1.0)
    norm = global_norm(grads)
    assert norm == pytest.approx(float(theirs), nan_ok=True)
    assert clip_coefficient(norm, 1.0) == pytest.approx(float(coefficient), nan_ok=True)


@pytest.mark.parametrize(
    ("name", "peer", "specific", "min_ratio"),
    [
        ("constant", "constant_with_warmup", {}, 0.0),
        ("linear", "linear", {}, 0.0),
        ("linear", "polynomial", {"lr_end": 3e-3 * 0.25, "power": 1.0}, 0.25),
        ("cosine", "cosine", {}, 0.0),
        ("cosine", "cosine_with_min_lr", {"min_lr_rate": 0.1}, 0.1),
    ],
)
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedules_are_those_of_transformers(
    name: str, peer: str, specific: dict[str, float], min_ratio: float, warmup: int
) -> None:
    """Oracle: transformers.get_scheduler, every step of a run."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-3)
    scheduler = get_scheduler(peer, optimizer, warmup, 40, scheduler_specific_kwargs=specific)
    ours = make_schedule(name, 3e-3, warmup, 40, min_ratio)
    theirs = []
    for _ in range(41):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    # transformers writes the polynomial's line otherwise: the last digits differ there
    assert [ours(step) for step in range(41)] == (
        pytest.approx(theirs, rel=1e-12) if min_ratio else theirs
    )


@pytest.mark.parametrize(
    ("name", "specific", "ours"),
    [
        ("constant_with_warmup", {}, {}),
        ("cosine_with_restarts", {}, {}),
        ("cosine_with_restarts", {"num_cycles": 3}, {"cycles": 3}),
        ("polynomial", {"lr_end": 0.0}, {}),
        ("polynomial", {"lr_end": 3e-3 * 0.1, "power": 2.5}, {"min_ratio": 0.1, "power": 2.5}),
        ("inverse_sqrt", {}, {}),
        ("warmup_stable_decay", {"num_decay_steps": 11}, {"cooldown_steps": 11}),
        ("warmup_stable_decay", {"num_decay_steps": 4, "min_lr_ratio": 0.2}, {"min_ratio": 0.2}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedules_by_the_names_of_transformers(
    name: str, specific: dict[str, float], ours: dict[str, Any], warmup: int
) -> None:
    """Oracle: transformers.get_scheduler, every step of a run and some beyond its end, to a part in
    10¹²."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-3)
    scheduler = get_scheduler(name, optimizer, warmup, 40, scheduler_specific_kwargs=specific)
    rate = make_schedule(name, 3e-3, warmup, 40, **ours)
    for step in range(45):
        assert rate(step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12, abs=1e-18), step
        optimizer.step()
        scheduler.step()


def test_every_schedule_of_transformers_has_a_row_or_an_answer() -> None:
    """Oracle: transformers.SchedulerType. Two follow evaluation losses; two are a cosine with a
    floor."""
    from transformers import SchedulerType

    others = {"reduce_lr_on_plateau", "greedy", "cosine_with_min_lr", "cosine_warmup_with_min_lr"}
    assert {str(kind.value) for kind in SchedulerType} - others == set(SCHEDULES)


@pytest.mark.parametrize(("warmup", "total"), [(0.1, 40), (0.033, 40), (0.5, 7), (3, 40)])
def test_a_warmup_below_one_is_a_ratio(warmup: float, total: int) -> None:
    """Oracle: transformers.TrainingArguments.get_warmup_steps."""
    from transformers import TrainingArguments

    steps = TrainingArguments(
        output_dir="unused", warmup_steps=warmup, report_to=[]
    ).get_warmup_steps(total)
    ratio = make_schedule("linear", 1.0, warmup, total)
    counted = make_schedule("linear", 1.0, steps, total)
    assert [ratio(step) for step in range(total)] == [counted(step) for step in range(total)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (OptimizerSettings("adam"), "adam adamw sgd momentum sign"),
        (OptimizerSettings("adamw", betas=(0.9, 1.0)), "betas"),
        (OptimizerSettings("momentum", momentum=0.0), "sgd"),
        (OptimizerSettings("sgd", weight_decay=-1.0), "weight_decay -1.0"),
    ],
)
def test_rules_that_cannot_be(options: OptimizerSettings, message: str) -> None:
    """Oracle: torch.optim refuses the same numbers (momentum 0 and the name apart); the message
    names the setting."""
    with refused(ValueError, message):
        Rule(options)
