"""Learning rates as pure functions of the step.

A schedule answers the learning rate of the update that follows ``step`` finished ones: ``schedule(0)`` is the first update's,
0 where there is a warm-up, as in ``transformers.get_scheduler``, whose values these are. Nothing is kept between calls: a
resumed run and a replayed ledger ask for the same steps and get the same rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable

SCHEDULES = ("constant", "linear", "cosine")

Schedule = Callable[[int], float]


def make_schedule(
    name: str, learning_rate: float, warmup_steps: float = 0, total_steps: int = 0, min_ratio: float = 0.0
) -> Schedule:
    """The schedule ``name``: it climbs linearly from 0 to ``learning_rate`` during the warm-up, then stays (constant) or falls
    to ``min_ratio``·``learning_rate`` at ``total_steps`` along a line (linear) or half a cosine (cosine), and stays there.

    Args:
        warmup_steps: a number of updates, or a ratio of ``total_steps`` where it is below 1 (rounded up).
        total_steps: updates of the whole run; a constant rate does without, unless its warm-up is a ratio.

    Raises:
        ValueError: an unknown name, or numbers out of range.
    """
    if name not in SCHEDULES:
        raise ValueError(f"optimizer.schedule is {name!r}; there are {', '.join(SCHEDULES)}")
    if not 0 <= learning_rate < math.inf:
        raise ValueError(f"optimizer.learning_rate is {learning_rate}; it must be a finite number, 0 or above")
    if not 0 <= min_ratio <= 1:
        raise ValueError(
            f"optimizer.min_ratio is {min_ratio}, the last learning rate over the highest; it must be 0 to 1"
        )
    if not (0 <= warmup_steps < 1 or warmup_steps == int(warmup_steps) > 0):
        raise ValueError(f"optimizer.warmup_steps is {warmup_steps}; it must be a number of steps, or a ratio below 1")
    if total_steps < 1 and (name != "constant" or 0 < warmup_steps < 1):
        raise ValueError(
            f"optimizer.total_steps is {total_steps}; schedule {name} with this warm-up must know the steps"
        )
    warmup = math.ceil(total_steps * warmup_steps) if warmup_steps < 1 else int(warmup_steps)
    if name != "constant" and warmup > total_steps:
        raise ValueError(f"optimizer.warmup_steps is {warmup}, more than the {total_steps} steps of the run; lower it")
    span = max(1, total_steps - warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        progress = min(1.0, (step - warmup) / span)
        match name:
            case "linear":
                fall = max(0.0, (span - (step - warmup)) / span)
            case "cosine":
                fall = max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
            case _:
                return 1.0
        return fall * (1.0 - min_ratio) + min_ratio

    def schedule(step: int) -> float:
        return learning_rate * factor(step)

    return schedule
