"""``pack``: a checkpoint folder as a block store, its matrices encoded, one parameter at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.cutting.verify import certified
from blockwalk.engine.calibrate import Calibrated
from blockwalk.engine.second_order import has_grid
from blockwalk.models.places import model_paths, refuse_output
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.plan.placement import Codec
from blockwalk.system.paths import StrPath
from blockwalk.tiers.block_store.writer import write_store
from blockwalk.tiers.model_folder.folder import CheckpointFolder

Progress = Callable[[int, int], None]

CHUNK_ELEMENTS = 1 << 20
"""Elements of a parameter that are merged at a time."""


def pack(
    model_dir: StrPath,
    out_dir: StrPath,
    codec: Codec,
    group_size: int = 32,
    sequences: Sequence[torch.Tensor] = (),
    *,
    progress: Progress | None = None,
) -> None:
    """Write a Hugging Face checkpoint folder as a block store (docs/block-store.md), streaming and
    atomically.

    Args:
        model_dir: config.json, safetensors, tokenizer files.
        out_dir: the store; it must not exist.
        codec: for the quantizable parameters (bf16, fp16 and fp32: for all); ``raw`` copies.
        group_size: elements to a scale, for int4: 32 or 64.
        sequences: token ids, int64 [S] each, of text that the model will meet. With them the linear
            layers of blocks are rounded with their inputs in view
            (:mod:`blockwalk.engine.calibrate`), in one block's memory; int4 and int4a.
        progress: called with (bytes written, bytes in all) now and then.

    Raises:
        ValueError: no such model, one that cannot be cut into blocks, tensors that do not fit it,
            an output that exists, a disk that is too full, or a value that the codec cannot hold.
    """
    refuse_output(out_dir, model=model_paths(model_dir))
    if sequences and not has_grid(Layout((1, 1), codec, group_size=group_size)):
        raise ValueError(
            f"--calibrate rounds to int4 and int4a, not to {codec}: choose one of them, or leave"
            " it out"
        )
    model = build_skeleton(model_dir, torch.float32 if sequences else None)
    source = CheckpointFolder(model_dir, model)
    write = partial(
        write_store,
        out_dir,
        codec=codec,
        group_size=group_size,
        copy_from=model_dir,
        progress=progress,
    )
    try:
        cut = certified(model.eval())
        if not sequences:
            write(source, cut.spec())
            return
        out = Path(out_dir).absolute()
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            calibrated = Calibrated(source, cut, sequences, codec, group_size, Path(folder))
            spec = cut.spec()
            makers = {param.name: partial(calibrated.weight, param.name) for param in spec.params()}
            write(source, spec, made=makers)
            calibrated.close()
    finally:
        source.close()
