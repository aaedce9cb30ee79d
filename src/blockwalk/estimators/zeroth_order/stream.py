"""Torch's own generator as the original MeZO uses it, by parameter: one stream over all of them, of
which any can be had alone.

``torch.manual_seed(seed)`` and then one ``torch.normal`` for each parameter, in its dtype and in
the order of ``named_parameters()``: a draw depends on all before it. So the generator's state is
kept as each parameter's turn comes (Wang et al., "ZO2", 2025, section 5.1), and a walk that goes in
that order draws nothing twice but what it needs twice; elsewhere the stream is gone through from
the last state that is known. Draws are those of the device that they are made on."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from blockwalk.numerics.noise.noise import Where
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.model_spec import ParamSpec

KEPT = 64
"""States of a stream that are kept beside its first: those of the parameters of a few units, 5 KB
each on a CPU."""


class Streams:
    """The streams of a few steps, the most recent ones, over ``parameters`` in their order."""

    def __init__(self, parameters: Iterable[ParamSpec], steps: int) -> None:
        self.parameters = tuple(parameters)
        self.place = {p.name: number for number, p in enumerate(self.parameters)}
        self.lock = threading.RLock()
        self.scratch = ScratchArena()
        self.drawn: tuple[int, int] | None = None
        """Seed and place of the parameter that lies whole in ``scratch``."""
        self._steps = steps
        self._states: OrderedDict[tuple[int, torch.device], dict[int, Tensor]] = OrderedDict()

    def of(self, seed: int, name: str) -> StreamNoise:
        return StreamNoise(self, seed, self.place[name])

    def whole(self, seed: int, place: int, device: torch.device) -> Tensor:
        """Return one parameter's draws, 1-D, in scratch; the caller has the lock."""
        if self.drawn != (seed, place):
            generator = torch.Generator(device)
            states = self._of_step(seed, generator)
            nearest = max(number for number in states if number <= place)
            generator.set_state(states[nearest])
            for number in range(nearest, place + 1):
                self._buffer(number, device).normal_(generator=generator)
                states[number + 1] = generator.get_state()
                if len(states) > KEPT + 1:  # the lowest goes, and not the first of all
                    del states[sorted(states)[1]]
            self.drawn = (seed, place)
        return self._buffer(place, device)

    def _of_step(self, seed: int, generator: torch.Generator) -> dict[int, Tensor]:
        key = (seed, generator.device)
        if key not in self._states:
            self._states[key] = {0: generator.manual_seed(seed).get_state()}
            if len(self._states) > self._steps:
                self._states.popitem(last=False)
        self._states.move_to_end(key)
        return self._states[key]

    def _buffer(self, place: int, device: torch.device) -> Tensor:
        param = self.parameters[place]
        like = torch.empty(0, device=device)
        return self.scratch.take("drawn", param.numel, like=like, dtype=getattr(torch, param.dtype))


@dataclass(frozen=True, slots=True)
class StreamNoise:
    """The noise of one parameter in a stream."""

    streams: Streams
    seed: int
    place: int

    def fill_(self, out: Tensor, start: int = 0, **where: Unpack[Where]) -> Tensor:
        with self.streams.lock:  # slices are updated in a thread of their own
            whole_P = self.streams.whole(self.seed, self.place, out.device)
            pitch = where.get("pitch")
            rows = where.get("rows")
            if pitch is None:
                return out.copy_(whole_P[start : start + out.numel()].view(out.shape))
            if rows is None:
                return out.copy_(whole_P.as_strided(out.shape, (pitch, 1), start))
            return out.copy_(whole_P.view(-1, pitch)[rows, start : start + out.shape[1]])
