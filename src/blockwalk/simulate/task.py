"""The task of a planner: a model, its costs, a machine, and the tokens of a step. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.plan import Plan
from blockwalk.program.costs import Costs
from blockwalk.program.program import Shape
from blockwalk.simulate.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Task:
    """A model to be trained, and the machine to train it on."""

    model: ModelSpec
    """Its parameters say which of them are trained."""
    costs: Callable[[Plan, Shape], Costs]
    """The cost of each kind of the model's units under a plan at the shape of a micro-batch; the
    same answer each time."""
    hardware: Hardware
    shape: Shape
    """One rank's micro-batch."""
    budget: int | None = None
    """Device bytes that a step may use, where that is less than the device has."""
    micro_batches: int = 1
    """The number of them in a step, of every plan that is looked at."""
    in_parts: bool = False
    """Whether ranks may hold parts of its sequences: the model's trial says so."""
    tokens: int = 0
    """Tokens of a step over all ranks: plans over ranks have as many micro-batches as make them, in
    place of ``micro_batches``. 0: they are not given."""

    @property
    def room(self) -> int:
        """Device bytes that a step may use."""
        return min(self.hardware.usable_bytes, self.budget or self.hardware.usable_bytes)

    @property
    def adapters(self) -> bool:
        """Whether the model's own weights are frozen."""
        return self.model.numel(trainable=False) > 0

    def steps(self, stages: int, parts: int) -> int:
        """Return the micro-batches of a step whose blocks lie over so many stages and whose
        sequences in so many parts; 0 where the tokens of a step do not divide into them."""
        if not self.tokens:
            return self.micro_batches
        shares, uneven = divmod(self.hardware.world, stages * parts)
        if uneven or not shares:
            return 0
        steps, remainder = divmod(self.tokens, self.shape.tokens * shares)
        return 0 if remainder else steps
