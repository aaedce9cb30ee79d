"""Costs of each kind of unit while it computes: transient bytes, FLOPs and seconds for one shape,
without any weight of the model.

One block of each kind is run on fake tensors (:mod:`blockwalk.walk.fake_units`), once for every
shape and every distinct set of traits of a plan, and on this machine's clock
(:mod:`blockwalk.walk.timed_units`); the answers are kept in the cache folder."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass, replace
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from blockwalk.cutting import block_tiles
from blockwalk.cutting.adapters import adapt
from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.peft_models import add_adapter
from blockwalk.cutting.skeleton import build_skeleton, load_config, model_class, model_config
from blockwalk.cutting.verify import certified, identity_of
from blockwalk.models.model_source import model_source
from blockwalk.numerics import (
    attention_pieces,
    causal_attention,
    chains,
    documents,
    lazy_linear,
    native_products,
    row_tiles,
    rule_mask,
    sequence_part,
    sequence_tiles,
    wide_attention,
)
from blockwalk.numerics.codecs.layout import dtype_of, name_of
from blockwalk.numerics.device import chosen, standing_for
from blockwalk.numerics.native import processor
from blockwalk.plan import row_order, work
from blockwalk.plan import sizes as chunks
from blockwalk.plan.choices import Adapters, OptimizerSettings
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.parsing import from_plain
from blockwalk.plan.placement import Codec
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.sizes import LONG_ROW
from blockwalk.program import costs as unit_costs
from blockwalk.program.costs import Costs
from blockwalk.program.program import Shape
from blockwalk.program.state_sizes import computes_in
from blockwalk.ranks import exchange
from blockwalk.system import cache, row_modules
from blockwalk.system.cores import usable_cores
from blockwalk.system.deferred_imports import deferred_imports
from blockwalk.system.paths import StrPath
from blockwalk.walk import attention_flops, fake_units, timed_units
from blockwalk.walk import meter as metering
from blockwalk.walk.fake_units import Traits, measure, stand_ins

log = logging.getLogger(__name__)


class UnitCosts:
    """Costs of a model's units under any plan at the shape of any micro-batch (:meth:`__call__`),
    and its description.

    Args:
        model: a checkpoint folder or a ``transformers`` configuration; weights are neither needed
            nor read.
        lora: the adapters that the run trains, the folder of saved ones, or a PEFT configuration;
            None: none.
        device: ``cpu`` or ``cuda``: the kind of attention, and the sizes of chunks. The latter
            needs no GPU.
        padded: whether batches hold padding on the right, so that a processor makes a mask [B, 1,
            S, S] of short rows.
        cut: whether long rows are rid of it (:func:`blockwalk.data.packing.cut_padding`).

    Raises:
        ValueError: there is no such model, or it cannot be cut; at the first question for what is
            kept in no file.
    """

    def __init__(
        self,
        model: StrPath | Any,
        *,
        lora: Adapters | StrPath | Any = None,
        device: str = "cpu",
        padded: bool = False,
        cut: bool = False,
    ) -> None:
        config = load_config(model)
        self._class = model_class(config)
        self.config = model_config(config, self._class)
        self.device = device
        self._lora = lora
        self._padded = padded
        self._cut_padding = cut
        is_name = isinstance(model, str | PathLike)
        self._stored_codec = model_source(model).codec if is_name else None
        self._digest = _digest(self.config, lora, device, padded, cut)
        self._cuts: dict[torch.dtype, CutModel] = {}
        self._known: dict[str, Costs] = {}
        self._untimed = ""

    @property
    def stored(self) -> torch.dtype:
        """The dtype that the configuration names for the weights."""
        named = self.config.dtype or torch.float32
        return named if isinstance(named, torch.dtype) else dtype_of(str(named))

    def spec(self) -> ModelSpec:
        """Return the model as the walk sees it, adapters included."""
        return self._cut(self.stored).spec()

    def anatomy(self) -> dict[str, str]:
        """Return the identity of the model's anatomy: see
        :func:`blockwalk.cutting.verify.identity_of`."""
        return identity_of(self._cut(self.stored).base)

    def walks_documents(self, plan: Plan) -> bool:
        """Return whether the walk leaves padding out
        (:meth:`blockwalk.cutting.cut_model.CutModel.walks_documents`)."""
        return self.device == "cpu" and self._cut(self.stored).walks_documents(plan)

    def __call__(self, plan: Plan, shape: Shape) -> Costs:
        """Return the cost of each kind of unit; none, with a warning, where they cannot be had:
        a model's code does not run on fake tensors, or this version of torch lacks something for
        them. A run needs none of it but to foresee."""
        traits = _traits(plan, name_of(self.stored), self._stored_codec, shape, self.device)
        loss = f"{plan.loss} {_source(traits.loss.cost)}"
        rows = "".join(row_modules.stamps())
        key = cache.key(f"{self._digest} {loss} {traits} {shape}{rows}".encode())
        if key not in self._known:
            kept = cache.read_sealed(f"costs-{key}", partial(from_plain, Costs))
            self._known[key] = kept or self._measured(key, traits, shape)
        return self._known[key]

    def timed(
        self, plan: Plan, shape: Shape, machine: str, learnt: float = 1.0
    ) -> timed_units.Timed:
        """Return the seconds of each kind of op on this machine's processor, measured once and
        kept until doctor measures the machine again; none where they are not timed at all.

        Args:
            plan: for ranks it is timed without the others, each rank by itself.
            shape: of one micro-batch.
            machine: words of doctor's description: seconds are measured anew where they differ.
            learnt: the part of the tokens that have a label.

        Raises:
            ValueError: they cannot be had now, which is not kept, and is not tried again by this
                object.
        """
        of_file = self._stored_codec is not None  # its codes are of no rows that we can write
        if self.device != "cpu" or plan.mesh.context > 1 or of_file:
            return ()
        plan = replace(plan, seed=0, optimizer=OptimizerSettings(plan.optimizer.name))
        learnt = round(learnt, 1)
        threads = torch.get_num_threads()
        facts = (self._digest, plan, shape, learnt, machine, threads, *_speeds())
        facts += tuple(row_modules.stamps())  # what modules compute is in no source of ours
        key = cache.key(repr(facts).encode())
        kept = cache.read_sealed(f"seconds-{key}", _seconds)
        if kept is not None:
            return kept
        if self._untimed:
            raise ValueError(self._untimed)
        kinds = frozenset(unit.kind for unit in self.spec().units)
        request = timed_units.Request(
            config=self.config,
            stored=name_of(self.stored),
            kinds=kinds,
            adapters=self._lora,
            plan=plan,
            shape=shape,
            learnt=learnt,
            threads=threads,
        )
        try:
            timed = timed_units.measure(request)
        except ValueError as error:
            self._untimed = str(error)
            raise
        cache.write_sealed(f"seconds-{key}", {"seconds": timed})
        return timed

    @deferred_imports()  # fake tensors ask symbolic shapes about plain ones
    def _measured(self, key: str, traits: Traits, shape: Shape) -> Costs:
        dtype = dtype_of(traits.dtype) if traits.backprop else self.stored
        cut_padding = (
            self._cut_padding
            and shape.sequence > LONG_ROW
            and (shape.batch == 1 or traits.loss.by_chunks)
        )
        padded = self._padded and not cut_padding
        reason = ""
        for stand_in in stand_ins(self.device):
            cut = self._cut(dtype)  # a model that is no sequence of blocks is refused
            work = partial(measure, cut, traits, shape, self.device, padded, stand_in)
            try:
                costs: Costs = self._as_stored(standing_for(self.device, work), dtype)
            except Exception as error:
                del self._cuts[dtype]  # what was bound is still there
                if _is_refusal(error):
                    raise
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                continue
            cache.write_sealed(f"costs-{key}", asdict(costs))
            return costs
        text = "what a block needs while it computes is not foreseen: %s on fake tensors (%s)"
        log.warning(text, self.config.model_type, reason)
        return Costs()

    def _as_stored(self, costs: Costs, dtype: torch.dtype) -> Costs:
        """Return the costs of a model that was measured in a dtype, by the kinds of the stored
        model's blocks as well: a kind tells the dtype of its parameters, which may be another."""
        measured = self._cut(dtype).spec().blocks
        stored = self.spec().blocks
        kinds = {
            block.kind: costs.of(twin.kind) for block, twin in zip(stored, measured, strict=True)
        }
        return replace(costs, units=tuple((dict(costs.units) | kinds).items()))

    def _cut(self, dtype: torch.dtype) -> CutModel:
        """Return the model with no weights, parameters in this dtype, cut."""
        if dtype not in self._cuts:
            model = build_skeleton(self.config, dtype, self._class)
            lora = self._lora
            if lora is not None:
                model = (
                    add_adapter(model, lora) if hasattr(lora, "peft_type") else adapt(model, lora)
                )
            self._cuts[dtype] = certified(model)
            self._cuts[dtype].take_parameters()
        return self._cuts[dtype]


def _is_refusal(error: Exception) -> bool:
    """Return whether this package raised a ValueError for its user: no failure of a library, nor of
    a model's code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = Path(frames[-1].f_code.co_filename)
    return isinstance(error, ValueError) and raised_in.is_relative_to(Path(__file__).parents[1])


def of_run(run: RunConfig) -> UnitCosts:
    """Return the costs of a run's model here; its batches hold padding, and packed rows are not
    rid of it."""
    return UnitCosts(
        run.model, lora=run.adapters, device=chosen().type, padded=True, cut=not run.data.packing
    )


def _traits(
    plan: Plan, stored: str, stored_codec: Codec | None, shape: Shape, device: str
) -> Traits:
    """Return the traits of a plan for a model whose weights are stored in this dtype, or lie in a
    codec that they are read in."""
    codec = plan.frozen.codec
    backprop = plan.estimator.facts.walks_back
    tiling = plan.tiling(device) if plan.is_long(shape.sequence, device) else None
    if stored_codec is not None and codec.facts.as_it_came:
        codec = stored_codec
    return Traits(
        backprop,
        computes_in(plan, stored),
        plan.loss,
        plan.loss_facts,
        codec,
        plan.frozen.tier.facts.resident and not codec.encoded,
        plan.trainable.codec,
        tiling=tiling,
        **({} if backprop else _perturbed_traits(plan)),
        context=plan.mesh.context,
        way=plan.context.way if plan.mesh.context > 1 else "auto",
        weighed=plan.objective_facts.of_log_probabilities,
    )


def _perturbed_traits(plan: Plan) -> dict[str, Any]:
    """Return the traits that perturbed forwards depend on."""
    return {
        "noise": plan.zo.noise,
        "shaped": bool(plan.kind.states),
        "linear": plan.update_rule.linear,
        "copied": plan.compile or plan.copies_blocks,
        "scales": plan.zo.target == "scales",
    }


def _seconds(entry: Mapping[str, Any]) -> timed_units.Timed:
    timed: timed_units.Timed = from_plain(timed_units.Timed, entry["seconds"])
    return timed


# ---- what was measured once is kept --------------------------------------------------------------


def _digest(config: Any, lora: Any, device: str, padded: bool, cut: bool) -> str:
    """Return everything that the figures depend on beside traits and shape."""
    import transformers

    dropped = ("_name_or_path", "transformers_version", "architectures", "use_cache")
    settings = {
        name: value
        for name, value in copy.deepcopy(config).to_dict().items()
        if name not in dropped
    }
    settings["dtype"] = str(config.dtype)
    adapter = asdict(lora) if is_dataclass(lora) else _folder_digest(lora)  # type: ignore[arg-type]
    roundings = [
        str(row_tiles.multiplied_in(dtype))
        for dtype in (torch.bfloat16, torch.float16)
        if device == "cpu"
    ]
    facts = [
        _SOURCES,
        settings,
        adapter,
        device,
        roundings,
        causal_attention.is_there(),
        native_products.is_there(),
        chains.is_there(),
        padded,
        cut,
        torch.__version__,
        transformers.__version__,
    ]
    return cache.key(json.dumps(facts, sort_keys=True, default=str).encode())


@lru_cache
def _source(function: Callable[..., Any]) -> str:
    """Return a loss's cost by name, and the key of the file that it is written in: anybody's. A row
    with settings may bind them, and its name says them."""
    while isinstance(function, partial):
        function = function.func
    return f"{function.__qualname__} {cache.source_key(inspect.getfile(function))}"


_ROOMS = (
    attention_flops,
    attention_pieces,
    block_tiles,
    causal_attention,
    chains,
    chunks,
    documents,
    exchange,
    fake_units,
    lazy_linear,
    native_products,
    row_order,
    row_tiles,
    rule_mask,
    sequence_part,
    sequence_tiles,
    wide_attention,
    metering,
    work,
    unit_costs,
)
_SOURCES = cache.source_key(*(room.__file__ for room in _ROOMS), __file__)


_OF_LIBRARIES = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "TORCH_")
"""Beginnings of the names of variables that libraries choose their code by."""


@lru_cache
def _speeds() -> tuple[str, ...]:
    """Return what seconds depend on beside a machine's description, whose cache folder others may
    share: processor, cores, what is said to libraries, and all of this package."""
    package = Path(__file__).parents[1]
    sources = sorted(path for end in ("py", "c") for path in package.rglob(f"*.{end}"))
    said = sorted(item for item in os.environ.items() if item[0].startswith(_OF_LIBRARIES))
    return processor(), str(usable_cores()), str(said), cache.source_key(*map(str, sources))


def _folder_digest(folder: Any) -> str:
    return (
        "" if folder is None else (Path(folder) / "adapter_config.json").read_text(encoding="utf-8")
    )
