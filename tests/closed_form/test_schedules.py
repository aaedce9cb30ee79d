"""Oracle: closed forms of three schedules; ``tests/peer/test_updates.py`` holds them against
transformers, step by step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockwalk.plan.choices import OptimizerSettings
from blockwalk.plan.schedules import make_schedule, schedule_of
from blockwalk.train.config import from_mapping
from tests.support.messages import refused

pytestmark = pytest.mark.fast


@given(
    name=st.sampled_from(["constant", "linear", "cosine"]),
    rate=st.floats(1e-8, 10.0), warmup=st.integers(0, 20), after=st.integers(1, 50),
    floor=st.floats(0.0, 1.0), share=st.floats(0.0, 1.0),
)  # fmt: skip
def test_the_three_curves(
    name: str, rate: float, warmup: int, after: int, floor: float, share: float
) -> None:
    """Closed form: a line from 0 to the rate; then the rate, a line or half a cosine down to its
    floor at the last step."""
    schedule = make_schedule(name, rate, warmup, warmup + after, floor)
    step = int(share * after)
    assert [schedule(i) for i in range(warmup)] == pytest.approx(
        [rate * i / warmup for i in range(warmup)]
    )
    assert schedule(warmup) == pytest.approx(rate)
    fall = {
        "constant": 1.0,
        "linear": 1 - step / after,
        "cosine": (1 + math.cos(math.pi * step / after)) / 2,
    }[name]
    wanted = rate if name == "constant" else rate * (floor + (1 - floor) * fall)
    assert schedule(warmup + step) == pytest.approx(wanted, abs=1e-12 * rate)


@given(total=st.integers(1, 1000), ratio=st.floats(0.0, 1.0, exclude_max=True))
def test_a_ratio_of_warmup_is_rounded_up(total: int, ratio: float) -> None:
    by_ratio, by_steps = (
        make_schedule("linear", 1.0, w, total) for w in (ratio, math.ceil(total * ratio))
    )
    assert [by_ratio(step) for step in range(total)] == [by_steps(step) for step in range(total)]


def test_the_last_rate_stays() -> None:
    """Oracle: closed form. After total_steps the rate is min_ratio of the highest (a cosine would
    climb again)."""
    for name in ("linear", "cosine", "cosine_with_restarts", "polynomial", "warmup_stable_decay"):
        rate = make_schedule(name, 2.0, 2, 10, 0.25)
        assert [rate(step) for step in (10, 11, 25, 1000)] == [0.5] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cosin", 1.0), "cosin constant linear cosine"),
        (("linear", 1.0), "total_steps 0"),
        (("constant", 1.0, 0.1), "total_steps 0"),
        (("linear", 1.0, 11, 10), "warmup_steps 11 10"),
        (("linear", 1.0, 2.5, 10), "warmup_steps 2.5"),
        (("linear", math.nan, 0, 10), "learning_rate nan"),
        (("linear", 1.0, 0, 10, 1.5), "min_ratio 1.5"),
    ],
)
def test_schedules_that_cannot_be(arguments: tuple[str, float], message: str) -> None:
    """Oracle: closed form. Each call breaks the one rule that the message names."""
    with refused(ValueError, message):
        make_schedule(*arguments)


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("cosine_with_restarts", {"cycles": 0}, "optimizer.cycles 0"),
        ("polynomial", {"power": 0.0}, "optimizer.power 0.0"),
        ("warmup_stable_decay", {"cooldown_steps": 2.5}, "optimizer.cooldown_steps 2.5"),
        (
            "warmup_stable_decay",
            {"warmup_steps": 4, "cooldown_steps": 7},
            "optimizer.warmup_steps cooldown_steps 4 7 10",
        ),
    ],
)
def test_numbers_of_a_fall_that_cannot_be(
    name: str, numbers: dict[str, float], message: str
) -> None:
    """Oracle: closed form. Each call breaks the one rule that the message names."""
    with refused(ValueError, message):
        make_schedule(name, 1.0, total_steps=10, **numbers)  # type: ignore[arg-type]


def test_a_share_of_warmup_is_a_setting() -> None:
    """Closed form: 3% of 100 steps are 3; a whole number stays one, in whatever form it comes."""
    rate = schedule_of(
        OptimizerSettings(
            schedule="constant", learning_rate=3.0, warmup_steps=0.03, total_steps=100
        )
    )
    assert [rate(step) for step in range(5)] == [0.0, 1.0, 2.0, 3.0, 3.0]
    for text in ("10", 10, 10.0, "1e1"):
        steps = from_mapping({"optimizer.warmup_steps": text}).plan.optimizer.warmup_steps
        assert (steps, type(steps)) == (10, int)
    assert from_mapping({"optimizer.warmup_steps": "0.03"}).plan.optimizer.warmup_steps == 0.03
