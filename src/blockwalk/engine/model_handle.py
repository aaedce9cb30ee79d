"""The model that a walk works on, open: its modules cut into units, where its weights come from,
and what they are computed in. Every home is filled from it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.cutting.adapters import adapt, refuse_tied_lora
from blockwalk.cutting.live_comparison import Observed, observed, require_same
from blockwalk.cutting.peft_models import adapter_parameters
from blockwalk.cutting.skeleton import build_skeleton, persistent_buffers
from blockwalk.cutting.verify import OPENING, certified
from blockwalk.engine.frozen_codec import refuse_rounded
from blockwalk.engine.model_weights import files_of, open_model, open_source
from blockwalk.models.model_source import ModelSource, model_source
from blockwalk.numerics.codecs import codecs
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.weights import EncodedWeight, Value
from blockwalk.plan.choices import Adapters
from blockwalk.plan.mesh import PIPELINE, Coordinates
from blockwalk.plan.model_spec import ModelSpec, ParamSpec
from blockwalk.plan.plan import Plan
from blockwalk.program.stages import part_of, stage_at
from blockwalk.program.state_sizes import epilogue_reads
from blockwalk.system.deferred_imports import deferred_imports
from blockwalk.system.paths import StrPath
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from blockwalk.tiers.model_folder.rewritten import Rewritten, rewritten
from blockwalk.tiers.model_folder.safetensors import Entry
from blockwalk.tiers.protocols import WeightSource, as_stored

log = logging.getLogger(__name__)


class ModelHandle:
    """A cut model and the source of its weights.

    Args:
        model: a checkpoint folder, a block store, or a ``transformers`` model in memory.
        plan: where each kind of state lives.
        lora: adapters to add, or the folder of a saved one; None trains what requires a gradient
            (everything, for a path).
        device: where blocks compute.
        workdir: a folder for scratch maps.
        packs: a folder for packed stores, which ranks may share.
        training: False freezes everything: no masters, no optimizer states.
        coordinates: this rank's places on the axes of the mesh: its stage holds some units alone.

    Raises:
        ValueError: the model cannot be cut, or its weights do not fit the plan; the message says
            why.
    """

    @deferred_imports()
    def __init__(
        self,
        model: StrPath | nn.Module,
        plan: Plan,
        *,
        lora: Adapters | StrPath | None,
        device: torch.device,
        workdir: Path,
        packs: Path,
        training: bool,
        coordinates: Coordinates = (),
    ) -> None:
        if training:
            refuse_rounded(model, plan, lora)
        self.plan = plan
        self.device = device
        self.workdir = workdir
        self.base: ModelSource | None = None
        """The folder that the model's weights were read from, as it was downloaded and not in
        codes; None of another one, and of a model in memory."""
        if not isinstance(model, nn.Module) and model_source(model).codec is None:
            self.base = model_source(model)
        self.source: WeightSource | None
        module, self.source, self.compute_dtype = open_model(model, plan, workdir, packs)
        if lora is not None:
            revision = None if isinstance(model, nn.Module) else model_source(model).revision
            module = self._adapted(module, files_of(model, workdir), lora, revision)
        if training:
            refuse_tied_lora(module)
            dropouts = [
                getattr(config, "lora_dropout", 0.0)
                for config in getattr(module, "peft_config", {}).values()
            ]
            if any(dropouts) and not plan.estimator.facts.walks_back:
                log.warning(
                    "the adapter's lora_dropout is %s; method %s drops nothing, so that losses"
                    " differ by the noise alone",
                    max(dropouts),
                    plan.method,
                )
        else:
            module.requires_grad_(False)
        self.module = module
        control = None
        if isinstance(model, nn.Module) and plan.compare == "auto":
            control = _observed(model, module, plan, adds=lora is not None, training=training)
        self.cut = certified(module).to(device)
        refuse_gradient_hooks(self.cut.gradient_hooks, plan)
        self.in_memory = self.cut.take_parameters()
        """Parameters by canonical name that came in the modules' own memory, as long as no home has
        taken them."""
        if control is not None:
            require_same(control, self.cut)
        self.cut.tiling = plan.tiling(device.type)
        if training and plan.neftune_noise_alpha:
            self.cut.add_noise(plan.neftune_noise_alpha)
        self.full_spec: ModelSpec = self.cut.spec().as_stored(self._as_stored)
        """The model as all stages hold it together; one process holds it all."""
        self.stage = stage_at(plan, self.full_spec, coordinates)
        self.spec = part_of(self.stage, self.full_spec)
        """The model as this rank's stage holds it: units of other stages have no parameters."""
        self._stage_of_unit = {
            unit: number
            for number in reversed(range(plan.mesh.pipeline))
            for unit in stage_at(plan, self.full_spec, ((PIPELINE, number),)).units
        }
        reads = [*self.spec.units[:-1], epilogue_reads(self.spec)]
        self.reads = {
            trainable: [unit.part(trainable) for unit in reads] for trainable in (False, True)
        }
        """The frozen and the trainable parameters that each unit's turn reads: a tied head's are
        the prologue's own too."""
        self._exact = frozenset(p.name for p in self.spec.params() if p.exact)

    def _adapted(
        self, module: nn.Module, files: ModelSource, lora: Adapters | StrPath, revision: str | None
    ) -> nn.Module:
        """Return the model with adapters. Its own parameters that are trained come as ``files``
        has them where the plan rounds it."""
        unrounded = self.source
        if unrounded is not None and self.plan.frozen.codec.encoded:
            unrounded = open_source(files, module)

        def original(name: str) -> Value:
            if unrounded is None:
                return module.get_parameter(name).detach().cpu()
            return unrounded.weights([name])[name]

        as_walked = None if self.source is None else self._source_value
        adapted: nn.Module = adapt(
            module,
            lora,
            seed=self.plan.seed,
            revision=revision,
            read=as_walked,
            read_original=original,
        )
        if unrounded is not None and unrounded is not self.source:
            for name, param in adapter_parameters(adapted).items():
                if param.is_meta:  # the first name of a tied weight
                    value = torch.empty(param.shape, dtype=param.dtype)
                    unrounded.read_into(name, value)
                    swap: Any = torch.utils.swap_tensors
                    swap(param, nn.Parameter(value))
            unrounded.close()
        return adapted

    def _as_stored(self, param: ParamSpec) -> ParamSpec:
        if param.name in self.in_memory or self.source is None:
            return replace(param, assembled=False)
        return as_stored(param, self.source)

    def stage_of(self, unit: int) -> int:
        """Return the first stage that holds a unit."""
        return self._stage_of_unit[unit]

    def compute_dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype that a parameter is computed with, by its canonical name."""
        if name not in self._exact:
            return self.compute_dtype
        return torch.promote_types(self.compute_dtype, torch.float32)

    def stored(self, name: str) -> Value | None:
        """Return a parameter as it came, where it is there in one piece."""
        if name in self.in_memory:
            return self.in_memory[name]
        return self._source_value(name) if self._source_of(name).in_place(name) else None

    def pop(self, name: str) -> Value:
        """Return a parameter as it came; where the modules held it, it is now its home's alone."""
        return self.in_memory.pop(name) if name in self.in_memory else self._source_value(name)

    def read_into(self, name: str, out: Tensor) -> None:
        """Copy a whole parameter into ``out``: a CPU tensor of its shape and any floating dtype."""
        if name in self.in_memory:
            out.copy_(self.in_memory[name])
        else:
            self._source_of(name).read_into(name, out)

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a whole parameter; mapped where it lies in one piece."""
        stored = self.stored(name)
        if isinstance(stored, Tensor):
            return stored
        tensor = torch.empty(shape, dtype=self.compute_dtype_of(name))
        self.read_into(name, tensor)
        return tensor

    def part(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Return elements ``start:stop`` of a flat parameter; mapped where it lies in one piece. Of
        one in codes the rows that the range meets are decoded; of one that is made of several
        tensors, those that it does not meet are not read. On torch's meta device nothing is."""
        if self.device.type == "meta":
            dtype = self.compute_dtype_of(name)
            return torch.empty(stop - start, dtype=dtype, device=self.device)
        stored = self.stored(name)
        part_P = torch.empty(stop - start, dtype=self.compute_dtype_of(name))
        if isinstance(stored, EncodedWeight):
            stored.to(part_P.dtype).read_range_into(start, part_P)
        elif stored is None:
            self._source_of(name).read_range_into(name, start, part_P)
        else:
            return self.whole(name, shape).reshape(-1)[start:stop]
        return part_P

    def fill(self, name: str, layout: Layout, out_P: Tensor) -> None:
        """Write a parameter's bytes (CPU uint8) in a layout: copied where it is stored so,
        otherwise encoded.

        Raises:
            ValueError: it is stored in groups of another size.
        """
        if not layout.codec.encoded:
            self.read_into(name, layout.codes(out_P).view(layout.shape))
            return
        stored = self.stored(name)
        if isinstance(stored, EncodedWeight) and stored.layout.codec is layout.codec:
            if stored.layout.nbytes != layout.nbytes:
                raise ValueError(
                    f"{name} is packed in groups of {stored.layout.group_size}, and state over"
                    f" ranks has groups of {layout.group_size}; pack the checkpoint again with"
                    f" --group_size {layout.group_size}"
                )
            stored.together(out_P)
            return
        rows_RD = self.whole(name, layout.shape).reshape(layout.rows, layout.columns)
        codecs.encode_rows(rows_RD, out_P, layout, 0, name=name)

    def _source_value(self, name: str) -> Value:
        return self._source_of(name).weights([name])[name]

    def _source_of(self, name: str) -> WeightSource:
        assert self.source is not None, f"{name} has no source"
        return self.source

    def untouched(self) -> dict[str, Value]:
        """Return the persistent buffers, which the walk may hold in another dtype, and the
        parameters of no unit, as the model came with them, by name."""
        module = self.module
        spec = self.full_spec
        walked = {p.name for p in spec.params()} | {alias for alias, _ in spec.tied}
        state = {name: module.get_buffer(name) for name in persistent_buffers(module)}
        state |= {
            name: param.detach() for name, param in module.named_parameters() if name not in walked
        }
        if self.source is None:
            return {**state}
        return {**state, **self.source.weights(state.keys() & self.source.names())}

    def rewritten(
        self, changed: Mapping[str, Entry], read: Callable[[str], Iterable[Tensor]]
    ) -> Rewritten | None:
        """Return the tensors of the folder that the model came from, with these parameters changed;
        None where it came from none, or where that is not to be read any more."""
        if self.base is None:
            return None
        skeleton = build_skeleton(self.base)
        try:
            with warnings.catch_warnings():  # they are copied
                warnings.filterwarnings("ignore", ".*does not use")
                folder = CheckpointFolder(self.base, skeleton)
        except (OSError, ValueError) as error:
            log.warning("%s: its other tensors are not copied: %s", self.base, error)
            return None
        return rewritten(folder, skeleton, changed, read)

    def close(self) -> None:
        if self.source is not None:
            self.source.close()


def _observed(
    model: nn.Module, module: nn.Module, plan: Plan, *, adds: bool, training: bool
) -> Observed | None:
    """Return what a model in memory answers, before its walk takes it apart.

    Args:
        model: the object that was handed over.
        module: the one that is walked: the object itself, adapters around it, or a copy of it.
        adds: True where the walk adds adapters.
    """
    members = set(module.modules())
    around = adds and model in members
    return observed(
        module if around else model,
        trains=training,
        differentiates=plan.estimator.facts.walks_back,
        adapted=around or not adds,
    )


def refuse_gradient_hooks(hooks: Collection[str], plan: Plan) -> None:
    """Raise ValueError for hooks to gradients of these parameters under a plan that never has them
    whole."""
    reason = plan.home.withholds_gradients
    if not plan.estimator.facts.walks_back:
        reason = "has no gradients"
    if not (hooks and reason):
        return
    raise ValueError(
        f"{min(hooks)} has a hook to its gradient (register_hook), and method {plan.method!r}"
        f" {reason}: take plain or mebp, which give a hook the whole gradient, or remove it"
    )


def opened(model: StrPath | nn.Module, plan: Plan, **settings: Any) -> ModelHandle:
    """Return an open model, as :class:`ModelHandle` says; one thread opens one at a time."""
    with OPENING:
        return ModelHandle(model, plan, **settings)
