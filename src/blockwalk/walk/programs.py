"""The programs of a run: compiled for the walker as it stands, with what is known of its costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockwalk.engine.engine import Engine
from blockwalk.plan.mesh import Piece
from blockwalk.program.compile import compile
from blockwalk.program.costs import Costs, Pending
from blockwalk.program.program import Pool, Program, Shape, StepKind
from blockwalk.program.residence import of_graphs
from blockwalk.ranks.ranks import Ranks
from blockwalk.system.process_memory import page_cache

if TYPE_CHECKING:
    from blockwalk.walk.unit_costs import UnitCosts


class Programs:
    """The programs of one engine.

    Args:
        engine: the cut model and its state.
        ranks: this process among the others.
        lora: the adapters that are trained, for costs.
        folder: where file maps lie, whose page cache graphs may use.
    """

    def __init__(self, engine: Engine, ranks: Ranks, lora: Any, folder: Path) -> None:
        self.engine = engine
        self.plan = engine.plan
        self.device = engine.device.type
        self.coordinates = ranks.coordinates(ranks.rank)
        self._lora = lora
        self._costs: UnitCosts | None = None
        self._page_cache = page_cache(folder) if self.plan.recompute == "auto" else 0
        self._last: Program | None = None
        """The program that was asked for last."""
        self._last_facts: tuple[Any, ...] = ()

    def costs(self, shape: Shape) -> Costs:
        """Return costs of each kind of unit while it computes, see
        :mod:`blockwalk.walk.unit_costs`: measured once, on no weights."""
        from blockwalk.walk.unit_costs import UnitCosts

        if self._costs is None:
            self._costs = UnitCosts(
                self.engine.cut.base.config,
                lora=self._lora,
                device=self.device,
                padded=True,
                cut=True,
            )
        return self._costs(self.plan, shape)

    def of(
        self,
        step_kind: StepKind,
        shape: Shape,
        waiting: int,
        *,
        foresee: bool = False,
        batches: int = 1,
        pieces: tuple[Piece, ...] = (),
    ) -> Program:
        """Return the program of one kind of step; cached.

        A plan that spends its budget on kept graphs (``recompute: auto``) or on kept node slices
        (``cache.threshold``) always has costs, for its ops depend on them.

        Args:
            step_kind: what the step does.
            shape: of one micro-batch.
            waiting: steps whose updates wait.
            foresee: asks for the blocks' transients and FLOPs as well.
            batches: micro-batches of an evaluation.
            pieces: as :func:`blockwalk.program.compile.compile` takes them.
        """
        on_device = of_graphs(self.plan, self.device).pool is Pool.DEVICE
        graphs = self.plan.recompute == "auto" and on_device
        spends = self.plan.budget is not None and (graphs or self.plan.cache.threshold > 0)
        costs = self.costs(shape) if step_kind.trains and (foresee or spends) else Costs()
        pending = self._pending(step_kind, waiting)
        facts = (step_kind, shape, costs, pending, batches, pieces)
        if facts != self._last_facts:
            # to look a model's hundreds of parameters up in a cache takes as long as a block's turn
            self._last = compile(
                self.plan,
                self.engine.model.full_spec,
                step_kind,
                shape,
                costs=costs,
                pending=pending,
                batches=batches,
                pieces=pieces,
                coordinates=self.coordinates,
                page_cache=self._page_cache,
                device=self.device,
            )
            self._last_facts = facts
        assert self._last is not None
        return self._last

    def _pending(self, step_kind: StepKind, waiting: int) -> Pending:
        """Return what a step finds undone."""
        if self.plan.update.deferred:
            return Pending(waiting, flush=waiting >= self.plan.update.flush_every)
        if step_kind is StepKind.FLUSH:
            return Pending(1, flush=True)
        return Pending(dirty=self.engine.dirty)
