"""From what a user names as the model to modules and a source of their weights: a block store or a checkpoint folder as it
is, one that is packed first, or a model in memory."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from blockwalk.plan import Estimator, Plan
from blockwalk.state import CODEC_DTYPE, Codec, Tier
from blockwalk.tiers.disk import CheckpointFolder
from blockwalk.tiers.store import BlockStore, is_store

if TYPE_CHECKING:
    from blockwalk.tiers import WeightSource

log = logging.getLogger(__name__)


def open_source(path: Path, codec: Codec, model: Any, workdir: Path) -> WeightSource:
    """The weights of the model at ``path`` in the codec that a plan asks for.

    A checkpoint folder is read as it is where the codec is a plain dtype (they are cast when used); for int4, int8 and
    fp8 it is packed once into ``workdir`` and found there again. ``model`` is its skeleton.

    Raises:
        ValueError: the folder holds no weights that fit, or a store in another codec.
    """
    if is_store(path):
        store = BlockStore(path)
        if codec not in (Codec.RAW, store.index.codec):
            raise ValueError(
                f"{path} is packed in {store.index.codec}, and the plan asks for {codec}; set frozen to"
                f" 'disk × {store.index.codec}', or pack the original checkpoint again with --codec {codec}"
            )
        return store
    folder = CheckpointFolder(path, model)
    if codec is Codec.RAW or codec in CODEC_DTYPE:
        return folder
    folder.close()
    from blockwalk.pack import pack

    packed = workdir / f"{path.resolve().name}-{codec}"
    if not is_store(packed):
        log.info("packing %s to %s, once, into %s", path, codec, packed)
        workdir.mkdir(parents=True, exist_ok=True)
        pack(path, packed, codec)
    return BlockStore(packed)


def open_model(
    model: str | os.PathLike[str] | nn.Module, plan: Plan, workdir: Path
) -> tuple[nn.Module, WeightSource | None, torch.dtype]:
    """The model (with or without weights), the source of its weights (None: they are in the model), the compute dtype.

    Raises:
        ValueError: the folder holds no weights that fit the plan.
    """
    adapted: nn.Module | None = None
    if isinstance(model, nn.Module):
        dtype = _compute_dtype(plan, next(p.dtype for p in model.parameters() if p.is_floating_point()))
        if plan.frozen.tier is Tier.DEVICE:
            # A zeroth-order or sharded master keeps its dtype: forwards alone are in the compute dtype.
            if plan.estimator is Estimator.BACKPROP and not plan.sharded:
                for param in model.parameters():  # not the buffers: tables of rotary frequencies stay in float32
                    if param.is_floating_point():
                        param.data = param.data.to(dtype)
            return model, None, dtype
        folder = workdir / "model"
        from blockwalk.adapters import base_weights
        from blockwalk.safetensors_file import save_model

        adapted = model if hasattr(model, "peft_config") else None
        weights = dict(model.named_parameters()) if adapted is None else base_weights(adapted)
        # transformers' own writes on rank 0 alone
        save_model(folder, model if adapted is None else model.get_base_model(), weights)  # type: ignore[operator]
        model = folder
    from blockwalk.skeleton import build_skeleton, load_config

    config = load_config(model)
    stored = config.dtype or torch.float32
    dtype = _compute_dtype(plan, stored if isinstance(stored, torch.dtype) else getattr(torch, str(stored)))
    skeleton = build_skeleton(config, dtype)
    source = open_source(Path(model), plan.frozen.codec, skeleton.model, workdir)
    if adapted is None:
        return skeleton.model, source, dtype
    from blockwalk.adapters import adapt_alike

    return adapt_alike(skeleton.model, adapted), source, dtype


def _compute_dtype(plan: Plan, stored: torch.dtype) -> torch.dtype:
    if plan.compute_dtype == "auto":
        return stored
    dtype: torch.dtype = getattr(torch, plan.compute_dtype)
    return dtype
