"""A model's anatomy, read off one real run: where its prologue ends, which layers follow, and what
comes after them.

The run is that of a small instance (:func:`blockwalk.cutting.shrink.shrink`); the anatomy holds for
every size of the same configuration and is a plain value that can be kept in a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model, by canonical module names."""

    layer_parents: tuple[str, ...]
    """Containers whose children are the decoder layers."""
    returns: Mapping[str, int]
    """Layer class → length of the tuple that it returns, 0 where it returns the hidden state
    itself."""
    epilogue: tuple[str, ...]
    """Modules outside the layers that are called after the last layer only."""
    head: str | None
    """The output embedding, or None."""
    idle: tuple[str, ...]
    """Modules of several parts outside the layers of which nothing is called, such as a vision
    tower; outermost only."""
    head_custom: bool = True
    """False where logits = cap·tanh(scale·(W·h + b)/cap) and the loss is the shifted cross-entropy
    of these."""
    soft_cap: float | None = None
    scale: float = 1.0
    unread: tuple[str, ...] = ()
    """Linear layers, by their paths inside a block, whose outputs no gradient reads
    (:mod:`blockwalk.cutting.unread_outputs`)."""
    borders: str = ""
    """The way in which documents of one row are kept apart: by their positions alone (positions),
    by these and a mask made of them (mask), or in none."""
    joint_forwards: bool = False
    """Whether a block answers several batches at once, of which each has weights of its own, as one
    after the other."""
    hands_on: bool = False
    """Whether blocks hand tensors to later ones in a dictionary among their arguments, as shared
    keys and values."""
    drops_entries: bool = False
    """Whether blocks add entries to such a dictionary that no block reads: they go with the
    call."""
    against_tiles: str = "it was not tried"
    """The reason for which something is not computed by tiles of the sequence: the first that was
    found; empty: all of it is."""
    by_tiles: tuple[str, ...] = ()
    """Kinds of blocks that are computed by tiles where others are not, and
    :data:`blockwalk.cutting.block_tiles.EPILOGUE`."""
    attended: tuple[str, ...] = ()
    """Linear layers, by their paths inside a block, whose outputs attention alone reads
    (:mod:`blockwalk.cutting.tile_trial`)."""
    own_cache: str = ""
    """The class of the model's own key-value cache, by its name in the model's module; empty: it
    takes the general one of transformers."""
    against_cache: str = "it was not tried"
    """The reason for which a text is not continued from a key-value cache
    (:mod:`blockwalk.cutting.cached_walk`); empty: it is."""
    against_padding: str = "it was not tried"
    """The reason for which prompts of unequal length are not continued together; empty: they
    are."""
    side_by_side: bool = True
    """False where a row must be computed as the row that it is: its owner's code may look at its
    shape."""
    loss_type: str = ""
    """The name of the loss that transformers takes for the model."""
    head_class: str = ""
    """The name of the output embedding's class."""
    notes: Mapping[str, float] = field(default_factory=dict)
    """Relative differences found when the walk was compared with the model's own run."""


def canonical_name(
    name: str, adapters: tuple[str, ...] = (), prefix: str = "base_model.model."
) -> str:
    """Return a parameter's or module's name in the plain model: without the parts that PEFT puts
    around and between.

    ``adapters`` are the names of the model's adapters ("default"), ``prefix`` is where the plain
    model sits in it. An adapter's own parameters keep ``base_layer``, which tells apart the
    adapters of several fused expert weights of one module; so their names are those of PEFT's
    files."""
    parts = name.removeprefix(prefix).split(".")
    dropped = set(adapters) if ".lora_" in name else {*adapters, "base_layer"}
    return ".".join(part for part in parts if part not in dropped)


def layer_candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Return members of module lists whose class ``_no_split_modules`` names, outermost only, in
    the order of ``named_modules``.

    Where it names none of them, the members of the outermost lists take their place.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ())
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    members = {
        name: module for name, module in model.named_modules() if name.rpartition(".")[0] in lists
    }
    chosen = {name: m for name, m in members.items() if type(m).__name__ in classes} or members
    outermost: dict[str, nn.Module] = {}
    for name, module in chosen.items():
        if not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost[name] = module
    return outermost


def pieces(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that neither hold a layer nor are one: embeddings, rotary tables,
    final norm, head."""
    containers = {
        name.rsplit(".", depth)[0] for name in layers for depth in range(1, name.count(".") + 1)
    } | {""}
    waiting = [("", model)]
    while waiting:
        prefix, module = waiting.pop(0)
        for child_name, child in module.named_children():
            name = f"{prefix}.{child_name}" if prefix else child_name
            if name in layers:
                continue
            if name in containers or isinstance(child, nn.ModuleList | nn.ModuleDict):
                waiting.append((name, child))
            else:
                yield name, child


@dataclass
class CallTrace:
    """The module calls that hooks recorded during one real run."""

    calls: list[str] = field(default_factory=list)
    """Names of the layers, in the order of their calls."""
    returns: dict[str, int] = field(default_factory=dict)
    late: dict[str, bool] = field(default_factory=dict)
    """Name of each module that is called → whether its first call came after a layer's."""


def watch(
    model: nn.Module, layers: Mapping[str, nn.Module], trace: CallTrace
) -> list[torch.utils.hooks.RemovableHandle]:
    """Hook every module so that the next run fills ``trace``; the caller removes the handles."""

    def called(name: str, _module: nn.Module, _args: Any) -> None:
        trace.late.setdefault(name, bool(trace.calls))
        if name in layers:
            trace.calls.append(name)

    def layer_answered(module: nn.Module, _args: Any, output: Any) -> None:
        trace.returns[type(module).__name__] = (
            len(output) if isinstance(output, tuple | list) else 0
        )

    handles = [
        module.register_forward_pre_hook(partial(called, name))
        for name, module in model.named_modules()
    ]
    return handles + [module.register_forward_hook(layer_answered) for module in layers.values()]


def dissect(model: nn.Module, layers: Mapping[str, nn.Module], trace: CallTrace) -> Anatomy:
    """Return the anatomy that a trace shows.

    Raises:
        ValueError: the model is no sequence of layers, with the reason.
    """
    if not trace.calls:
        raise ValueError("no layer of it is called: it has no list of decoder layers")
    if len(set(trace.calls)) < len(trace.calls):
        times = max(trace.calls.count(name) for name in trace.calls)
        raise ValueError(
            f"a layer is called {times} times in one forward pass: a looped model is no sequence"
            " of layers"
        )
    parents = tuple(dict.fromkeys(name.rsplit(".", 1)[0] for name in trace.calls))
    idle = [
        name for name in layers if name.rsplit(".", 1)[0] in parents and name not in trace.calls
    ]
    if idle:
        raise ValueError(f"layers {idle} were not called in a forward pass")
    head_module = model.get_output_embeddings()  # type: ignore[operator]
    names = {module: name for name, module in model.named_modules()}
    alive = {
        name.rsplit(".", depth)[0] for name in trace.late for depth in range(name.count(".") + 1)
    }
    inside = tuple(f"{name}." for name in trace.calls)
    idle_names = (
        name
        for module, name in names.items()
        if name not in alive and name.rpartition(".")[0] in alive and any(module.children())
    )
    return Anatomy(
        layer_parents=parents,
        returns=trace.returns,
        epilogue=tuple(name for name, _ in pieces(model, layers) if trace.late.get(name)),
        head=names.get(head_module) if head_module is not None else None,
        idle=tuple(name for name in idle_names if not name.startswith(inside)),
    )


@dataclass(frozen=True)
class HeadSpec:
    """The output embedding: logits = soft_cap·tanh(scale·(W·h + b)/soft_cap), or without a cap
    scale·(W·h + b)."""

    weight: str
    """Canonical name of W [V, D]; the embedding's where the two are tied."""
    bias: str | None
    soft_cap: float | None
    scale: float
    tied: bool
    custom: bool
    """True where logits or loss are not of this form (verified with numbers): use ``own_loss`` and
    ``logits``."""
    lora: tuple[str, str, float] | None = None
    """Canonical names of A [R, D] and B [V, R] and the factor of B·A where the head carries a plain
    LoRA."""


def head_spec(
    model: Any, base: Any, anatomy: Anatomy, names: Mapping[int, str], tied_names: set[str]
) -> HeadSpec:
    """Describe the head of ``base``, the plain model in ``model``.

    ``names`` are the canonical names by the ``id`` of the parameters that stand in the modules,
    ``tied_names`` those of parameters with two turns."""
    module = base.get_output_embeddings()
    if module is None:
        return HeadSpec("", None, None, 1.0, False, True)
    custom = anatomy.head_custom
    lora = None
    if hasattr(module, "base_layer"):
        lora = _plain_lora(module, next(iter(model.peft_config)), names)
        custom = custom or lora is None
        module = module.base_layer
    for config in getattr(model, "peft_config", {}).values():
        if config.is_prompt_learning and config.peft_type.value != "PREFIX_TUNING":
            # virtual tokens lengthen the sequence: only the wrapper knows how to pad the labels
            custom = True
    leaves = {
        leaf: names[id(param)] for leaf, param in module._parameters.items() if param is not None
    }
    weight = leaves.get("weight", "")
    custom = custom or not weight
    return HeadSpec(
        weight,
        leaves.get("bias"),
        anatomy.soft_cap,
        anatomy.scale,
        weight in tied_names,
        custom,
        lora,
    )


def _plain_lora(
    module: Any, adapter: str, names: Mapping[int, str]
) -> tuple[str, str, float] | None:
    """Return names and factor of a plain LoRA on a linear head (no dropout, no bias, no variant),
    or None."""
    plain = (
        adapter in getattr(module, "lora_A", {})
        and isinstance(module.lora_dropout[adapter], nn.Identity)
        and not getattr(module, "lora_variant", {})
        and module.lora_B[adapter].bias is None
    )
    if not plain:
        return None
    a = module.lora_A[adapter].weight
    b = module.lora_B[adapter].weight
    return names[id(a)], names[id(b)], float(module.scaling[adapter])
