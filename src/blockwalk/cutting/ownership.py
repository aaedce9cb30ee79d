"""The unit that owns each parameter, and the places in the modules where the parameter sits.

Both are resolved once, when a model is cut, so that binding is a look-up.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from blockwalk.cutting.anatomy import Anatomy, pieces
from blockwalk.cutting.skeleton import stays_float32
from blockwalk.numerics.codecs.layout import name_of
from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec

_IDS_OF_PLACE = ("layer_idx", "layer_id", "layer_index", "layer_number")
"""Whole-number settings that tell a layer's place, not what it does."""


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """One attribute of a module (``leaf``) where a parameter sits."""

    module: nn.Module
    leaf: str


@dataclass(frozen=True, slots=True)
class Part:
    """A module of a unit: its name in the model at hand, its canonical name, and its unit's
    index."""

    name: str
    canonical: str
    unit: int
    module: nn.Module


@dataclass
class Units:
    """The parts of a model and the places of its parameters. Unit 0 is the prologue, 1..L the
    blocks, L+1 the epilogue."""

    layers: list[Part]
    pieces: list[Part]
    """Outermost modules outside the layers."""
    idle: tuple[str, ...]
    """Modules outside the layers that a pass over text never calls, such as a vision tower, by
    name. Their parameters belong to no unit: they are neither read nor held."""
    places: list[dict[str, list[ParameterPlace]]]
    """Each unit's parameters: canonical name → places. A tied parameter is the prologue's and has a
    place in the epilogue too."""
    placeholders: dict[str, nn.Parameter] = field(default_factory=dict)
    """Parameters by canonical name that stand in the modules where nothing is bound."""
    trainable: set[str] = field(default_factory=set)

    @property
    def epilogue(self) -> int:
        return len(self.layers) + 1

    def owner(self, name: str) -> int:
        """Return the unit of a parameter of the model at hand; those of the model itself, in no
        part, are the prologue's."""
        for part in (*self.layers, *self.pieces):
            if name.startswith(f"{part.name}."):
                return part.unit
        return 0

    def reaches(self, name: str) -> bool:
        """Whether a pass over text may read a parameter. Adapters count: they are saved with the
        others."""
        return ".lora_" in name or not name.startswith(tuple(f"{piece}." for piece in self.idle))


def find_parts(model: nn.Module, anatomy: Anatomy, canonical: Callable[[str], str]) -> Units:
    """Return the layers and pieces of a model that has this anatomy."""
    layers: list[Part] = []
    for name, module in model.named_modules():
        if canonical(name).rpartition(".")[0] in anatomy.layer_parents:
            layers.append(Part(name, canonical(name), len(layers) + 1, module))
    outside = []
    for name, module in pieces(model, {part.name: part.module for part in layers}):
        unit = len(layers) + 1 if canonical(name) in anatomy.epilogue else 0
        outside.append(Part(name, canonical(name), unit, module))
    idle = [name for name, _ in model.named_modules() if canonical(name) in anatomy.idle]
    if hasattr(model, "peft_config"):
        idle.append("word_embeddings")  # its second name of the embedding
    return Units(layers, outside, tuple(idle), [{} for _ in range(len(layers) + 2)])


def find_parameters(
    model: nn.Module, base: Any, units: Units, canonical: Callable[[str], str]
) -> ModelSpec:
    """Fill in the places of every parameter of ``model`` (``base`` is the plain model in it) and
    describe the units.

    Raises:
        ValueError: two blocks share a parameter.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    first_names: dict[int, str] = {}
    places: dict[str, list[tuple[str, int, ParameterPlace]]] = {}
    tied: list[tuple[str, str]] = []
    for name, param in model.named_parameters(remove_duplicate=False):
        if not units.reaches(name):
            continue
        prefix, _, leaf = name.rpartition(".")
        alias = canonical(name)
        plain = first_names.setdefault(id(param), alias)
        assert units.placeholders.setdefault(plain, param) is param, (
            f"two parameters are named {plain}"
        )
        places.setdefault(plain, []).append(
            (name, units.owner(name), ParameterPlace(modules[prefix], leaf))
        )
        if alias != plain:
            tied.append((alias, plain))
    dtypes = {
        name: param.dtype for name, param in units.placeholders.items() if "lora_" not in name
    }
    main_dtype = Counter(dtypes.values()).most_common(1)[0][0]
    exact = {
        name
        for name, dtype in dtypes.items()
        if dtype == torch.float32 != main_dtype or stays_float32(base, torch.bfloat16, name)
    }
    specs: list[list[tuple[str, ParamSpec]]] = [[] for _ in units.places]
    for plain, uses in places.items():
        param = units.placeholders[plain]
        home = min(unit for _, unit, _ in uses)
        last_unit = max(unit for _, unit, _ in uses)
        if home != last_unit and (home, last_unit) != (0, units.epilogue):
            raise ValueError(
                f"{plain} is one parameter in two blocks: the model is no sequence of layers"
            )
        for _, unit, place in uses:
            units.places[unit].setdefault(plain, []).append(place)
        name, place = next((name, place) for name, unit, place in uses if unit == home)
        specs[home].append((name, _param_spec(plain, param, place, plain in exact)))
        if param.requires_grad:
            units.trainable.add(plain)
    config = base.config.get_text_config()
    return ModelSpec(
        name=type(base).__name__,
        prologue=UnitSpec("prologue", "prologue", tuple(spec for _, spec in specs[0])),
        blocks=tuple(_block_spec(part, specs[part.unit]) for part in units.layers),
        epilogue=UnitSpec("epilogue", "epilogue", tuple(spec for _, spec in specs[-1])),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        dtype=name_of(main_dtype),
        tied=tuple(tied),
    )


def _param_spec(name: str, param: torch.Tensor, place: ParameterPlace, exact: bool) -> ParamSpec:
    quantizable = _quantizable(place, param, name)
    fused = quantizable and param.ndim == 3
    shape = tuple(param.shape)
    dtype = name_of(param.dtype)
    return ParamSpec(
        name, shape, dtype, param.requires_grad, quantizable, assembled=fused, exact=exact
    )


def _quantizable(place: ParameterPlace, param: torch.Tensor, name: str) -> bool:
    """Whether a codec may encode the parameter: weights of linear and embedding layers of the base
    model, and fused experts [E, N, D]."""
    if ".lora_" in name or not param.is_floating_point():
        return False
    if param.ndim == 3:
        return "expert" in name and "bias" not in place.leaf
    matrix = (
        isinstance(place.module, nn.Linear | nn.Embedding)
        or type(place.module).__name__ == "Conv1D"
    )
    return matrix and place.leaf == "weight" and param.ndim == 2


def _block_spec(part: Part, specs: Sequence[tuple[str, ParamSpec]]) -> UnitSpec:
    local = [(name.removeprefix(part.name), spec) for name, spec in specs]
    return UnitSpec(part.canonical, _kind(part.module, local), tuple(spec for _, spec in specs))


def _kind(module: nn.Module, params: Sequence[tuple[str, ParamSpec]]) -> str:
    """Return a name that is equal for blocks that run the same code on the same shapes: class,
    parameters and every whole-number setting."""
    facts = [(local, spec.shape, spec.dtype, spec.trainable) for local, spec in params]
    settings = [
        (type(child).__name__, key, str(value))
        for child in module.modules()
        for key, value in sorted(vars(child).items())
        if isinstance(value, bool | int | str) and key not in _IDS_OF_PLACE and key != "training"
    ]
    digest = hashlib.blake2s(repr((facts, settings)).encode(), digest_size=3).hexdigest()
    attention = getattr(module, "attention_type", None) or getattr(module, "layer_type", None)
    parts = [type(module).__name__, attention if isinstance(attention, str) else None, digest]
    return "-".join(part for part in parts if part)
