"""Modules, and a source of their weights, for the model that a user names: a block store or a
checkpoint folder as it is, a folder that is packed first, or a model in memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockwalk.checkpoints import marks
from blockwalk.cutting.adapters import base_tensors, refuse_copies
from blockwalk.cutting.live_adapters import refuse_adapter_state
from blockwalk.cutting.live_copy import plain_base, with_one_adapter, without_weights
from blockwalk.cutting.lora_forward import fuse
from blockwalk.cutting.skeleton import (
    build_skeleton,
    persistent_buffers,
    stays_float32,
)
from blockwalk.engine.pack_cache import packed
from blockwalk.models.model_source import ModelSource, model_source
from blockwalk.numerics.codecs.layout import dtype_of, name_of
from blockwalk.plan.placement import Codec
from blockwalk.plan.plan import Plan
from blockwalk.program.state_sizes import computes_in
from blockwalk.system import links
from blockwalk.system.paths import StrPath
from blockwalk.tiers.block_store.store import BlockStore
from blockwalk.tiers.model_folder.conversion import optional
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from blockwalk.tiers.model_folder.safetensors import save_model
from blockwalk.tiers.protocols import WeightSource

log = logging.getLogger(__name__)


def open_source(
    path: StrPath, model: Any, codec: Codec = Codec.RAW, workdir: Path = Path()
) -> WeightSource:
    """Return the weights of the model at ``path`` in the codec that a plan asks for.

    A checkpoint folder is read as it is where the codec is a plain dtype (they are cast when used);
    for a codec of codes it is packed once into ``workdir``, under a name that has the digest of its
    content, and found there again. A pack there of a model of the same name is removed when its
    weights are other ones. ``model`` is the skeleton.

    Raises:
        ValueError: the folder holds no weights that fit, or a store in another codec.
    """
    if model_source(path).packed:
        store = BlockStore(path)
        if codec not in (Codec.RAW, store.index.codec):
            raise ValueError(
                f"{path} is packed in {store.index.codec}, and the plan asks for {codec}; set"
                f" frozen to 'disk × {store.index.codec}', or pack the original checkpoint again"
                f" with --codec {codec}"
            )
        return store
    if not codec.encoded:
        return CheckpointFolder(path, model)
    return BlockStore(packed(Path(path), codec, model, workdir))


def require_fitting_weights(path: StrPath) -> None:
    """Raise ValueError where a folder's weights do not fit its configuration's model: by names,
    shapes and dtypes alone."""
    open_source(path, build_skeleton(path)).close()


def files_of(model: StrPath | nn.Module, workdir: Path) -> ModelSource:
    """Return the files that a model's weights are read from; one in memory is written there."""
    return model_source(workdir / "in-memory" if isinstance(model, nn.Module) else model)


def open_model(
    model: StrPath | nn.Module, plan: Plan, workdir: Path, packs: Path
) -> tuple[nn.Module, WeightSource | None, torch.dtype]:
    """Open a model for a plan.

    Returns:
        The model, with or without weights; the source of its weights, None where they are in the
        model; and the compute dtype.

    Raises:
        ValueError: the folder holds no weights that fit the plan.
    """
    refuse_copies(model)
    files = files_of(model, workdir)
    if not isinstance(model, nn.Module):
        config = files.configuration()
        named = config.dtype or torch.float32
        stored = named if isinstance(named, torch.dtype) else dtype_of(str(named))
        dtype = _compute_dtype(plan, stored)
        skeleton = build_skeleton(config, dtype)
        source = open_source(files, skeleton, plan.frozen.codec, packs)
        _fill_buffers(skeleton, source)
        return skeleton, source, dtype
    refuse_adapter_state(model)
    model = with_one_adapter(model)
    stored = next(p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = _compute_dtype(plan, stored)
    if not plan.frozen.tier.facts.resident:
        return *_written_out(model, plan, dtype, files, packs), dtype
    # A zeroth-order or sharded master keeps its dtype: forwards alone are in the compute dtype.
    if plan.home.kinds_apart:
        _cast_parameters(model, dtype)
    return model, None, dtype


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model's parameters to a dtype, but for those that transformers keeps in float32; not
    its buffers, for rotary frequencies stay in float32."""
    outer: Any = model
    base = outer.get_base_model() if hasattr(model, "peft_config") else outer
    for name, param in model.named_parameters():
        if param.is_floating_point():
            exact = "lora_" not in name and stays_float32(base, dtype, name)
            param.data = param.data.to(torch.float32 if exact else dtype)


def _written_out(
    model: nn.Module, plan: Plan, dtype: torch.dtype, files: ModelSource, packs: Path
) -> tuple[nn.Module, WeightSource]:
    """Write a model in memory to its files, and return its skeleton and the source of its weights
    there."""
    folder = Path(files)
    base, tensors = base_tensors(model)
    if folder.is_dir() and not (folder.is_symlink() or marks.is_ours(folder)):
        raise ValueError(
            f"{folder} is there already, and not Blockwalk's: move it away, or choose another"
            " output_dir"
        )
    links.remove(folder)  # another model's: whoever has its files mapped keeps them
    folder.mkdir(parents=True)
    marks.write(folder, "in memory")
    save_model(folder, base, tensors)  # transformers' own writes on rank 0 alone
    source = open_source(files, plain_base(model), plan.frozen.codec, packs)
    live = without_weights(model, dtype)
    if hasattr(model, "peft_config"):
        fuse(live)
    return live, source


def _fill_buffers(model: Any, source: WeightSource) -> None:
    """Give a skeleton's persistent buffers the values of ``source``, in the dtype that
    ``from_pretrained`` loads each in.

    Raises:
        ValueError: the source lacks a buffer, or has it in another shape. One that transformers
            lets a checkpoint leave out keeps the value that the constructor gave it.
    """
    stored = set(source.names())
    filled = set()
    for name in persistent_buffers(model):
        buffer = model.get_buffer(name)
        if id(buffer) in filled or (name not in stored and optional(model, name)):
            continue
        shape = source.shape(name) if name in stored else "absent"
        if shape != tuple(buffer.shape):
            raise ValueError(
                f"the buffer {name} is {tuple(buffer.shape)} in {type(model).__name__} and"
                f" {shape} in its files"
            )
        filled.add(id(buffer))  # two modules may share one
        dtype = torch.float32 if stays_float32(model, model.dtype, name) else buffer.dtype
        value = source.weights([name])[name]
        assert isinstance(value, torch.Tensor), f"{name} is encoded"
        buffer.data = value.to(dtype if buffer.is_floating_point() else buffer.dtype, copy=True)


def _compute_dtype(plan: Plan, stored: torch.dtype) -> torch.dtype:
    dtype = dtype_of(computes_in(plan, name_of(stored)))
    if dtype != stored and plan.compute_dtype == "auto":
        log.warning(
            "the model is stored in float16, where gradients vanish, and computes in bfloat16"
            " (compute_dtype: float32 is exact, and takes twice the memory)"
        )
    return dtype
