"""The effects of a walk, recorded where they happen: which units compute on what, what moves, what
is updated. Not a test.

Each op's work runs inside a note-taker: whatever the model, the tiers, the collectives, the update
rules and the noise do on its behalf is noted under the op's place in the program, from the
arguments that they are really called with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from blockwalk.contrib.mezo_original import in_place
from blockwalk.cutting.cut_model import CutModel
from blockwalk.engine import sharded_part
from blockwalk.engine.buckets import Buckets
from blockwalk.engine.gradients import FlatGradients, NamedGradients
from blockwalk.engine.master_updates import MasterUpdates
from blockwalk.estimators.backprop import Backprop
from blockwalk.estimators.zeroth_order import arithmetic
from blockwalk.estimators.zeroth_order.perturbed_weight import Perturbation
from blockwalk.plan.mesh import gather_bytes, names_of
from blockwalk.program.program import Lane
from blockwalk.ranks.forward_sharing import MeshSharing
from blockwalk.ranks.groups import Completion, Groups
from blockwalk.tiers.activations import Activations
from blockwalk.tiers.memory import BufferMemory
from blockwalk.tiers.scratch_maps import ScratchMaps
from blockwalk.walk.lanes import Lanes, Work
from blockwalk.walk.walker import Walker

Effect = tuple[Any, ...]


class Effects:
    """The effects of every op that a walker runs, in the order of its programs."""

    def __init__(self, walker: Walker, patch: pytest.MonkeyPatch) -> None:
        self.walker = walker
        self.patch = patch
        self.of_ops: list[set[Effect]] = []
        self.bytes_of_ops: list[int] = []
        """Bytes that collectives and copies of slices move."""
        self._at = threading.local()
        submit = Lanes.submit

        def submitted(lanes: Lanes, lane: Lane, work: Work, after: Any) -> Any:
            place = len(self.of_ops)
            self.of_ops.append(set())
            self.bytes_of_ops.append(0)

            def noted(job: Work) -> Completion | None:
                self._at.place = place
                try:
                    completion = job()
                finally:
                    self._at.place = None
                return None if completion is None else partial(noted, completion)  # type: ignore[return-value]

            return submit(lanes, lane, partial(noted, work), after)

        patch.setattr(Lanes, "submit", submitted)
        self._watch()

    def _note(self, effect: Effect | None, nbytes: int = 0) -> None:
        place = getattr(self._at, "place", None)
        if place is not None and effect is not None:
            self.of_ops[place].add(effect)
            self.bytes_of_ops[place] += nbytes

    def _tap(
        self,
        owner: Any,
        name: str,
        effect: Callable[..., Effect | None],
        nbytes: Any = lambda *_, **__: 0,
    ) -> None:
        """Note ``effect`` of the arguments whenever ``owner.name`` is called."""
        original = getattr(owner, name)

        def tapped(*args: Any, **kwargs: Any) -> Any:
            self._note(effect(*args, **kwargs), nbytes(*args, **kwargs))
            return original(*args, **kwargs)

        self.patch.setattr(owner, name, tapped)

    def _watch(self) -> None:
        self._computing()
        self._moving()
        self._updating()

    def _computing(self) -> None:
        def walks() -> list[Any]:
            """What computes now: a step, or an evaluation."""
            estimator: Any = self.walker.estimator
            return [walk for walk in (estimator.state, self.walker._forward) if walk is not None]

        def micro_batch(batch: Any) -> int:
            """The place of a batch among the step's; the head is given one without labels."""
            return next(
                m
                for walk in walks()
                for m, part in enumerate(walk.batches)
                if part["input_ids"] is batch["input_ids"]
            )

        def micro_batch_of(call: Any) -> int:
            keys: list[Any] = [
                key
                for walk in walks()
                for key, prologue in walk.prologues.items()
                if any(known is call for known in prologue.calls)
            ]
            return int(keys[0][0] if isinstance(keys[0], tuple) else keys[0])

        self._tap(CutModel, "prologue", lambda cut, batch, **_: ("forward", 0, micro_batch(batch)))
        self._tap(
            CutModel,
            "run",
            lambda cut, call, *_, **__: ("forward", _unit(cut, call), micro_batch_of(call)),
        )
        self._tap(
            CutModel,
            "_epilogue_pass",
            lambda cut, _prologue, _hidden, batch, *_, **__: (
                "forward",
                cut.epilogue_index,
                micro_batch(batch),
            ),
        )
        self._tap(torch.autograd, "grad", lambda *_, **__: ("differentiate",))
        self._tap(
            Perturbation,
            "noise",
            lambda z, *_: ("perturbed", z.step, z.query, z.scale) if z.scale else None,
        )
        self._tap(
            in_place,
            "perturb_",
            lambda every, seed, sign, epsilon: ("perturb all", sign * epsilon),
        )
        self._tap(Activations, "save", lambda _, key, *__: ("save", key[0]))
        self._tap(Activations, "load", lambda _, key, *__: ("load", key[0]))

    def _moving(self) -> None:
        engine = self.walker.engine
        if engine.source is not None:
            units = {p.name: n for n, unit in enumerate(engine.spec.units) for p in unit.params}
            for name in ("prefetch", "release"):
                self._tap(
                    type(engine.source),
                    name,
                    lambda _, names, what=name: _of_unit(what, names, units),
                )
        # over ranks no op brings states: where they are in memory, nothing moves
        memories = (ScratchMaps,) if self.walker.plan.home.gathered else (ScratchMaps, BufferMemory)
        for memory in memories:
            self._tap(memory, "will_need", lambda _, group: ("will need", group))
            self._tap(
                memory,
                "dont_need",
                lambda _, group: None if "before" in group else ("done with", group),
            )
        self._tap(Buckets, "fetch", lambda _, unit, slot: ("fetch", unit, slot))
        self._tap(Buckets, "store", lambda buckets, unit: ("store", unit, buckets.step(unit)))
        self._tap(Buckets, "vacate", lambda _, slot: ("vacate", slot))
        self._tap(
            Groups,
            "begin_gather_",
            lambda _, full, axes, lane, **__: _collective("gather", axes, lane),
            lambda _, full, axes, lane, **__: gather_bytes(axes, full.nbytes),
        )
        self._tap(
            Groups,
            "begin_reduce",
            lambda _, full, axes, lane: _collective("reduce", axes, lane),
            lambda _, full, axes, lane: gather_bytes(axes, full.nbytes),
        )
        self._tap(sharded_part, "_copy", lambda out, from_: ("copy", out.nbytes))

    def _updating(self) -> None:
        self._tap(MasterUpdates, "apply", lambda _, unit, *, step, **__: ("update", unit, step))
        for gradients in (NamedGradients, FlatGradients):
            self._tap(gradients, "norm", lambda _: ("norm",))
            self._tap(gradients, "squares", lambda _: ("check",))
        self._tap(Backprop, "_of_ranks", lambda _, values: ("total",))
        self._tap(Buckets, "advance", lambda _, unit, step: ("update", unit, step))
        self._tap(
            arithmetic,
            "apply_all_",
            lambda rule, entries, *_: ("apply", *(e.step for e in entries)),
        )
        self._tap(in_place, "update_", lambda every, entry, rule: ("update all", entry.step))
        self._tap(in_place, "replay_", lambda every, entry, rule: ("replay", entry.step))
        self._tap(MeshSharing, "confirm", lambda _, step, entry, **__: ("entry", step))


def _unit(cut: CutModel, call: Any) -> int:
    """The unit whose module is called."""
    return next(
        u for u in range(1, cut.epilogue_index) if any(call.module is m for m in cut.modules(u))
    )


def _of_unit(what: str, names: Any, units: dict[str, int]) -> Effect | None:
    found = {units[name] for name in names}
    return (what, *sorted(found)) if found else None


def _collective(what: str, axes: Any, lane: Any) -> Effect | None:
    return (what, lane, *names_of(axes)) if axes else None
