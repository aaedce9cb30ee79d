"""Learning rates as pure functions of the step.

A schedule answers the learning rate of the update that follows ``step`` finished ones:
``schedule(0)`` is the first update's, 0 where there is a warm-up, as in
``transformers.get_scheduler``, whose names and values these are. Nothing is kept between calls: a
resumed run and a replayed ledger ask for the same steps and get the same rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from blockwalk.plan.choices import OptimizerSettings
from blockwalk.plan.table import Table
from blockwalk.plan.words import counted

Schedule = Callable[[int], float]
"""The learning rate by the number of updates that are done."""


@dataclass(frozen=True, slots=True)
class Course:
    """The numbers that a schedule's fall after the warm-up is made of."""

    warmup: int
    """Updates of the warm-up."""
    span: int
    """Updates after the warm-up, at least 1."""
    cooldown: int
    """Updates at the run's end in which ``warmup_stable_decay`` falls."""
    cycles: int
    power: float

    def progress(self, done: int) -> float:
        """Return the share of the updates after the warm-up that are done, at most 1."""
        return min(1.0, done / self.span)


def _constant(done: int, course: Course) -> float:
    return 1.0


def _linear(done: int, course: Course) -> float:
    return max(0.0, (course.span - done) / course.span)


def _cosine(done: int, course: Course) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * course.progress(done))))


def _cosine_with_restarts(done: int, course: Course) -> float:
    progress = course.progress(done)
    if progress >= 1.0:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((course.cycles * progress) % 1.0))))


def _polynomial(done: int, course: Course) -> float:
    return float((1.0 - course.progress(done)) ** course.power)


def _inverse_sqrt(done: int, course: Course) -> float:
    timescale = course.warmup or 10_000
    return 1.0 / math.sqrt((done + timescale) / timescale)


def _warmup_stable_decay(done: int, course: Course) -> float:
    falling = done - (course.span - course.cooldown)
    if falling <= 0:
        return 1.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * min(1.0, falling / max(1, course.cooldown)))))


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """One schedule: its fall after the warm-up, from 1 to 0, and what it must know."""

    fall: Callable[[int, Course], float]
    """The share of the way down that is left after so many updates since the warm-up."""
    endless: bool = False
    """True where the rate does not depend on the run's length."""
    floors_warmup: bool = False
    """True where the warm-up begins at ``min_ratio`` instead of 0."""
    cools_down: bool = False
    """True where it falls in the last ``cooldown_steps`` alone."""
    help: str = ""


SCHEDULES = Table(
    "optimizer.schedule",
    {
        "constant": ScheduleFacts(_constant, endless=True, help="it stays"),
        "constant_with_warmup": ScheduleFacts(_constant, endless=True),
        "linear": ScheduleFacts(_linear),
        "cosine": ScheduleFacts(_cosine),
        "cosine_with_restarts": ScheduleFacts(_cosine_with_restarts),
        "polynomial": ScheduleFacts(_polynomial),
        "inverse_sqrt": ScheduleFacts(_inverse_sqrt, endless=True),
        "warmup_stable_decay": ScheduleFacts(
            _warmup_stable_decay, floors_warmup=True, cools_down=True
        ),
    },
)
"""Schedules by ``optimizer.schedule``."""


def make_schedule(
    name: str,
    learning_rate: float,
    warmup_steps: float = 0,
    total_steps: int = 0,
    min_ratio: float = 0.0,
    *,
    cycles: int = 1,
    power: float = 1.0,
    cooldown_steps: float = 0.1,
) -> Schedule:
    """Return the schedule ``name``: it climbs linearly from 0 to ``learning_rate`` during the
    warm-up, then stays (constant) or falls towards ``min_ratio``·``learning_rate``, which it
    reaches at ``total_steps`` and keeps: along a line (linear), half a cosine (cosine), ``cycles``
    of them (cosine_with_restarts), a power of the line (polynomial), or half a cosine over the last
    ``cooldown_steps`` alone (warmup_stable_decay); inverse_sqrt falls with the root of the steps
    and has no end.

    Args:
        warmup_steps: a number of updates, or a ratio of ``total_steps`` where it is below 1
            (rounded up).
        total_steps: updates of the whole run; a rate that does not end does without, unless its
            warm-up is a ratio.
        cooldown_steps: a number of updates, or a ratio of ``total_steps`` where it is below 1
            (rounded up).

    Raises:
        ValueError: an unknown name, or numbers out of range.
    """
    facts = SCHEDULES[name]
    if not 0 <= learning_rate < math.inf:
        raise ValueError(
            f"optimizer.learning_rate is {learning_rate}; it must be a finite number, 0 or above"
        )
    if not 0 <= min_ratio <= 1:
        raise ValueError(
            f"optimizer.min_ratio is {min_ratio}, the last learning rate over the highest; it"
            " must be 0 to 1"
        )
    if cycles < 1:
        raise ValueError(f"optimizer.cycles is {cycles}; it must be at least 1")
    if not 0 < power < math.inf:
        raise ValueError(f"optimizer.power is {power}; it must be a finite number above 0")
    for setting, steps in (("warmup_steps", warmup_steps), ("cooldown_steps", cooldown_steps)):
        if not (0 <= steps < 1 or steps == int(steps) > 0):
            raise ValueError(
                f"optimizer.{setting} is {steps}; it must be a number of steps, or a ratio below 1"
            )
    if total_steps < 1 and (not facts.endless or 0 < warmup_steps < 1):
        raise ValueError(
            f"optimizer.total_steps is {total_steps}; schedule {name} with this warm-up must know"
            " the steps"
        )
    warmup = _steps(warmup_steps, total_steps)
    if not facts.endless and warmup > total_steps:
        steps_of_run = counted(total_steps, "step")
        raise ValueError(
            f"optimizer.warmup_steps is {warmup}, more than the {steps_of_run} of the run; lower it"
        )
    cooldown = _steps(cooldown_steps, total_steps)
    if facts.cools_down and warmup + cooldown > total_steps:
        raise ValueError(
            f"optimizer.warmup_steps and cooldown_steps are {warmup} and {cooldown}, together"
            f" more than the {total_steps} steps of the run; lower one"
        )
    course = Course(warmup, max(1, total_steps - warmup), cooldown, cycles, power)
    floor = min_ratio if facts.floors_warmup else 0.0

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup * (1.0 - floor) + floor
        fall = facts.fall(step - warmup, course)
        return fall if facts.fall is _constant else fall * (1.0 - min_ratio) + min_ratio

    def schedule(step: int) -> float:
        return learning_rate * factor(step)

    return schedule


def schedule_of(rate: OptimizerSettings) -> Schedule:
    """Return the schedule that settings describe; see :func:`make_schedule`.

    Raises:
        ValueError: they describe none.
    """
    return make_schedule(
        rate.schedule,
        rate.learning_rate,
        rate.warmup_steps,
        rate.total_steps,
        rate.min_ratio,
        cycles=rate.cycles,
        power=rate.power,
        cooldown_steps=rate.cooldown_steps,
    )


def _steps(steps: float, total_steps: int) -> int:
    """Return steps, given as a number or as a ratio of all below 1."""
    return math.ceil(total_steps * steps) if steps < 1 else int(steps)
