"""The check that a configuration passes before stages of a pipeline hold its blocks.

Every stage but the first makes its blocks' arguments (positions, masks) by a prologue whose
parameters read as zeros. On a small random instance they must be those of the model's own prologue,
no gradient may reach the prologue through them, and no block may hand tensors to a later one beside
the hidden state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from blockwalk.cutting import verify
from blockwalk.cutting.calls import tensors_of
from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.cutting.small_instance import small_batch, small_instance
from blockwalk.data.batch import Batch
from blockwalk.numerics.drawing import own_draws
from blockwalk.plan.plan import Plan
from blockwalk.system.deferred_imports import deferred_imports
from blockwalk.system.paths import StrPath


@deferred_imports()  # a small instance's shapes are plain
def require_stages(model: StrPath | nn.Module, plan: Plan) -> None:
    """Check that stages may hold a model's blocks.

    Args:
        model: a model's name or folder, or a (Peft)model in memory.
        plan: its mesh.

    Raises:
        ValueError: a block needs more than the hidden state and what the batch alone decides; the
            message names it.
    """
    stages = plan.mesh.pipeline
    if stages == 1:
        return
    outer: Any = model if isinstance(model, nn.Module) else build_skeleton(model)
    base = outer.get_base_model() if hasattr(outer, "peft_config") else outer
    reason = ""
    if any(config.is_prompt_learning for config in getattr(outer, "peft_config", {}).values()):
        reason = "it has a prefix, which every layer reads"
    else:
        reason = against_stages(type(base), base.config, verify.certified_anatomy(base))
    if reason:
        raise ValueError(
            f"{type(base).__name__} cannot have its blocks over stages (mesh.pipeline: {stages}):"
            f" {reason}; set mesh.pipeline: 1"
        )


def require_all_blocks(plan: Plan, needs: str = "generation") -> None:
    """Raise ValueError where a rank holds the blocks of its stage alone, and something ``needs``
    all of them for every token."""
    if plan.mesh.pipeline > 1:
        raise ValueError(
            f"mesh.pipeline is {plan.mesh.pipeline}, and {needs} would wait for every token to"
            " pass all stages: generate from the saved model (save_pretrained, or the run's"
            " folder) on one process, with mesh.pipeline: 1"
        )


def against_stages(cls: Any, config: Any, anatomy: Any) -> str:
    """Return the reason why a configuration's blocks cannot be over stages; empty where none
    is."""
    if anatomy.hands_on:
        return "its layers hand tensors to later ones, beside the hidden state"
    with torch.enable_grad(), own_draws():
        cut = CutModel(small_instance(cls, config), anatomy)
        parameters = cut.take_parameters()
        for batch in _batches(cut):
            made = cut.prologue_of_zeros(batch)
            cut.bind(0, {p.name: parameters[p.name] for p in cut.spec().prologue.params})
            own = cut.prologue(batch)
            cut.unbind(0)
            shape = (*batch["input_ids"].shape, cut.spec().hidden_size)
            if tuple(own.hidden_BSD.shape) != shape:
                return f"its hidden state is {tuple(own.hidden_BSD.shape)}, not {shape}"
            for zero, call in zip(made.calls, own.calls, strict=True):
                name = cut.layer_name(call.unit)
                if call.differentiable:
                    return f"layer {name} takes arguments that have gradients of the prologue"
                pairs = [tensors_of(zero.arguments), tensors_of(call.arguments)]
                alike = len(pairs[0]) == len(pairs[1]) and all(
                    torch.equal(one, other) for one, other in zip(*pairs, strict=True)
                )
                if not alike:
                    return f"layer {name} takes arguments that depend on the embeddings"
    return ""


def _batches(cut: CutModel) -> Iterator[Batch]:
    """Yield rows of which one is padded, and rows of two documents where the model keeps these
    apart."""
    padded = small_batch(cut.base.config)
    yield padded
    if cut.anatomy.borders:
        ids_BS = padded["input_ids"]
        places = [*range(5), *range(ids_BS.shape[1] - 5)]
        yield {"input_ids": ids_BS, "position_ids": torch.tensor([places] * len(ids_BS))}
