"""Modules, and a source of their weights, for the model that a user names: a block store or a
checkpoint folder as it is, a folder that is packed first, or a model in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockwalk.checkpoints import marks
from blockwalk.cutting.adapters import (
    adapt,
    adapt_alike,
    adapter_parameters,
    base_tensors,
    refuse_copies,
)
from blockwalk.cutting.skeleton import (
    build_skeleton,
    load_config,
    persistent_buffers,
    stays_float32,
)
from blockwalk.cutting.verify import certified
from blockwalk.models.folder import form_of, lies_in
from blockwalk.numerics.codecs.layout import dtype_of, name_of
from blockwalk.plan.methods import METHODS
from blockwalk.plan.placement import Codec
from blockwalk.plan.plan import Plan
from blockwalk.plan.settings import override
from blockwalk.program.state_sizes import computes_in
from blockwalk.system import links
from blockwalk.system.atomic_files import discard
from blockwalk.system.locks import lock
from blockwalk.system.paths import StrPath
from blockwalk.tiers.block_store.store import BlockStore, is_store, read_index
from blockwalk.tiers.block_store.writer import write_store
from blockwalk.tiers.model_folder.conversion import optional
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from blockwalk.tiers.model_folder.identity import weights_digest
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
    if is_store(path):
        store = BlockStore(path)
        if codec not in (Codec.RAW, store.index.codec):
            raise ValueError(
                f"{path} is packed in {store.index.codec}, and the plan asks for {codec}; set"
                " frozen to"
                f" 'disk × {store.index.codec}', or pack the original checkpoint again with"
                f" --codec {codec}"
            )
        return store
    if not codec.encoded:
        return CheckpointFolder(path, model)
    return BlockStore(packed(Path(path), codec, model, workdir))


def comes_in(model: StrPath | Any) -> Codec | None:
    """Return the codec that most weights of a named model come in, packed or as downloaded, where
    it is one of codes; else None."""
    if not isinstance(model, str | os.PathLike):
        return None
    if is_store(model):
        codec = read_index(model).codec
        return codec if codec.encoded else None
    return lies_in(model)


def as_it_comes(plan: Plan, model: StrPath | Any) -> Plan:
    """Return the plan for a model: where it is packed, or comes in codes, its weights are read as
    they lie if ``frozen`` leaves the codec open or is the row's. One in memory that stays on the
    device whole stays as it is."""
    stays = isinstance(model, nn.Module) and plan.frozen.on_device and not plan.sharded
    unnamed = plan.frozen.codec.facts.chosen_later or plan.frozen == METHODS["mebp"]().frozen
    if not unnamed and not (plan.frozen.codec.encoded and stays):
        return plan
    packed_before = isinstance(model, str | os.PathLike) and is_store(model)
    if stays or packed_before or comes_in(model) is not None:
        return override(plan, {"frozen.codec": str(Codec.RAW)})
    return plan


def refuse_rounded(model: StrPath | nn.Module, plan: Plan, lora: Any) -> None:
    """Raise ValueError where parameters of the model itself are trained, and would start from
    rounded values: all of them for want of adapters, or ``modules_to_save`` of a model that comes
    in codes; or where a replay would start from others than rounded ones."""
    where = f"frozen: {plan.frozen}"
    codec = plan.frozen.codec
    found = comes_in(model)
    form = str(codec)
    if isinstance(model, nn.Module):
        codec = Codec.RAW if plan.frozen.on_device else codec  # they stay as they are in memory
    elif found is not None:
        where = os.fspath(model)
        codec = found
        form = str(found) if is_store(model) else form_of(model)
    if lora is None and not hasattr(model, "peft_config") and codec.encoded:
        raise ValueError(
            f"{where} keeps weights in {form}, and without adapters every weight is trained: it"
            " would start from rounded"
            " values; set lora.rank, or the original checkpoint and frozen: disk × raw"
        )
    options = getattr(lora, "options", {})
    if codec.encoded and plan.zeroth_order and options.get("use_dora"):
        raise ValueError(
            f"{where} keeps weights in {form}, and DoRA's magnitudes begin as their norms: the"
            " ledger of method"
            f" {plan.method!r} would be replayed from those of the original weights; set frozen:"
            " disk × raw, or leave"
            " use_dora out"
        )
    if codec.encoded and options.get("modules_to_save"):
        skeleton = adapt(
            build_skeleton(model.config if isinstance(model, nn.Module) else model), lora
        )
        trained = adapter_parameters(skeleton).items()
        rounded = [name for name, param in trained if ".lora_" not in name and param.ndim > 1]
        if rounded and found is not None:
            raise ValueError(
                f"{where} keeps weights in {form}, and lora.options.modules_to_save trains"
                f" {rounded[0]}: it would start from"
                " rounded values; set model to the original checkpoint, or leave it out"
            )


def require_weights(path: StrPath) -> None:
    """Raise ValueError where a folder's weights do not fit its configuration's model: by names,
    shapes and dtypes alone."""
    open_source(path, build_skeleton(path)).close()


def packed(path: Path, codec: Codec, model: Any, *workdirs: Path) -> Path:
    """Return the block store of a checkpoint folder in one of ``workdirs``, made in the last where
    none has it.

    Raises:
        ValueError: the folder holds no weights that fit ``model``, its skeleton; or the disk is too
            full.
    """
    if lies_in(path) is not None:
        raise ValueError(
            f"{path} is in {form_of(path)} already, and the plan asks for {codec}, which would"
            " round it again; set frozen to"
            " 'disk × raw', which reads it as it lies"
        )
    name = f"{path.resolve().name}-{codec}"
    stores = [folder / f"{name}-{weights_digest(path)}" for folder in workdirs]
    with closing(CheckpointFolder(path, model)) as source, _alone(workdirs[-1]):
        if (there := next(filter(_is_undamaged, stores), None)) is not None:
            return there
        log.info("packing %s to %s, once, into %s", path, codec, stores[-1])
        for other in workdirs[-1].glob(f"{escape(name)}-{'[0-9a-f]' * 32}"):
            if (
                other != stores[-1]
            ):  # a node that shares the folder may have packed this one, and read it, by now
                discard(other)
        _pack(
            stores[-1],
            lambda made: write_store(made, source, certified(model).spec(), codec, copy_from=path),
        )
        return stores[-1]


def _pack(store: Path, write: Callable[[Path], None]) -> None:
    """Write a store, or take the one that is there when it is written: nodes that share a folder
    over a file system without locks pack at once, and the first to end has packed for all. A
    damaged one is put aside first."""
    with suppress(FileNotFoundError):
        before = store.stat().st_ino
        if not _is_undamaged(store) and store.stat().st_ino == before:
            discard(store)
    try:
        write(store)
    except (
        ValueError,
        OSError,
    ):  # its name is taken, or its folder was filled between two looks at it
        if not _is_undamaged(store):
            raise
        log.info("another node has packed %s meanwhile: taking its pack", store)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The time in which no other process packs into a folder. The first of the ranks that share it
    packs, and the others wait for as long as that one lives; where it dies, the kernel lets the
    next one go on. A folder that stays empty goes again."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY)
    try:
        if not lock(fd, folder):
            log.info("another process packs into %s: waiting for it", folder)
            lock(fd, folder, wait=True)
        yield
    finally:
        os.close(fd)
        with suppress(OSError):  # a pack is there
            folder.rmdir()


def _is_undamaged(packed: Path) -> bool:
    """Whether a store is there with the bytes that were packed, all of which are read."""
    if not is_store(packed):
        return False
    try:
        with closing(BlockStore(packed)) as store:
            store.verify()
    except ValueError as error:
        log.warning("%s", error)
        return False
    return True


def folder_of(model: StrPath | nn.Module, workdir: Path) -> Path:
    """Return the folder, or the name, that a model's weights are read from; one in memory is
    written there."""
    return workdir / "in-memory" if isinstance(model, nn.Module) else Path(model)


def open_model(
    model: StrPath | nn.Module, plan: Plan, workdir: Path, packs: Path
) -> tuple[nn.Module, WeightSource | None, torch.dtype]:
    """Return the model (with or without weights), the source of its weights (None: they are in the
    model), the compute dtype.

    Raises:
        ValueError: the folder holds no weights that fit the plan.
    """
    refuse_copies(model)
    path = folder_of(model, workdir)
    cls = None
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(model, nn.Module):
        dtype = _compute_dtype(
            plan, next(p.dtype for p in model.parameters() if p.is_floating_point())
        )
        if plan.frozen.on_device:
            # A zeroth-order or sharded master keeps its dtype: forwards alone are in the compute
            # dtype.
            if not plan.zeroth_order and not plan.sharded:
                base: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
                for (
                    name,
                    param,
                ) in (
                    model.named_parameters()
                ):  # not the buffers: rotary frequencies stay in float32
                    if param.is_floating_point():
                        exact = "lora_" not in name and stays_float32(base, dtype, name)
                        param.data = param.data.to(torch.float32 if exact else dtype)
            return model, None, dtype
        base, tensors = base_tensors(model)
        config = base.config
        cls = type(base)
        if path.is_dir() and not (path.is_symlink() or marks.is_ours(path)):
            raise ValueError(
                f"{path} is there already, and not Blockwalk's: move it away, or choose another"
                " output_dir"
            )
        links.remove(path)  # another model's: whoever has its files mapped keeps them
        path.mkdir(parents=True)
        marks.write(path, "in memory")
        save_model(path, base, tensors)  # transformers' own writes on rank 0 alone
    else:
        config = load_config(path)
        stored = config.dtype or torch.float32
        dtype = _compute_dtype(
            plan, stored if isinstance(stored, torch.dtype) else dtype_of(str(stored))
        )
    skeleton = build_skeleton(config, dtype, cls)
    source = open_source(path, skeleton, plan.frozen.codec, packs)
    _fill_buffers(skeleton, source)
    trained = {
        name: tensor.requires_grad
        for name, tensor in tensors.items()
        if isinstance(tensor, nn.Parameter)
    }
    if lost := sorted(trained.keys() - source.names()):
        raise ValueError(
            f"{type(skeleton).__name__} makes no {lost[0]} from its configuration, which the"
            " model in memory has; set"
            " frozen: device, which walks the model itself"
        )
    for name, requires_grad in trained.items():
        skeleton.get_parameter(name).requires_grad_(requires_grad)
    if not hasattr(model, "peft_config"):
        return skeleton, source, dtype
    return adapt_alike(skeleton, model), source, dtype


def _fill_buffers(model: Any, source: WeightSource) -> None:
    """Give a skeleton's persistent buffers the values of ``source``, in the dtype that
    ``from_pretrained`` loads each in.

    Raises:
        ValueError: the source lacks a buffer, or has it in another shape. One that transformers
            lets a checkpoint leave out keeps the value that the constructor gave it.
    """
    known = set(source.names())
    done = set()
    for name in persistent_buffers(model):
        buffer = model.get_buffer(name)
        if id(buffer) in done or (name not in known and optional(model, name)):
            continue
        found = source.shape(name) if name in known else "absent"
        if found != tuple(buffer.shape):
            raise ValueError(
                f"the buffer {name} is {tuple(buffer.shape)} in {type(model).__name__} and"
                f" {found} in its files"
            )
        done.add(id(buffer))  # two modules may share one
        dtype = torch.float32 if stays_float32(model, model.dtype, name) else buffer.dtype
        value = source.weights([name])[name]
        assert isinstance(value, torch.Tensor), f"{name} is encoded"
        buffer.data = value.to(dtype if buffer.is_floating_point() else buffer.dtype, copy=True)


def _compute_dtype(plan: Plan, stored: torch.dtype) -> torch.dtype:
    dtype = dtype_of(computes_in(plan, name_of(stored)))
    if dtype != stored and plan.compute_dtype == "auto":
        log.warning(
            "the model is stored in float16, where gradients vanish, and computes in bfloat16"
            " (compute_dtype: float32 is"
            " exact, and takes twice the memory)"
        )
    return dtype
