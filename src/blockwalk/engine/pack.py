"""``pack``: a checkpoint folder as a block store, its matrices encoded, one parameter at a time."""

from __future__ import annotations

import os
from collections.abc import Callable

from blockwalk.plan.placement import Codec
from blockwalk.system import atomic_files

Progress = Callable[[int, int], None]

CHUNK_ELEMENTS = 1 << 20
"""Elements of a parameter that are merged at a time."""


def pack(
    model_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    codec: Codec,
    group_size: int = 32,
    *,
    progress: Progress | None = None,
) -> None:
    """Write a Hugging Face checkpoint folder as a block store (docs/block-store.md), streaming and atomically.

    Args:
        model_dir: config.json, safetensors, tokenizer files.
        out_dir: the store; it must not exist.
        codec: for the quantizable parameters (bf16, fp16 and fp32: for all); ``raw`` copies.
        group_size: elements to a scale, for int4: 32 or 64.
        progress: called with (bytes written, bytes in all) now and then.

    Raises:
        ValueError: no such model, one that cannot be cut into blocks, tensors that do not fit it, an output that exists,
            a disk that is too full, or a value that the codec cannot hold.
    """
    from blockwalk.cutting.skeleton import build_skeleton
    from blockwalk.cutting.verify import certified
    from blockwalk.tiers.block_store.writer import write_store
    from blockwalk.tiers.model_folder.folder import CheckpointFolder

    atomic_files.refuse_existing(out_dir)
    model = build_skeleton(model_dir).model
    source = CheckpointFolder(model_dir, model)
    try:
        spec = certified(model).spec()
        write_store(out_dir, source, spec, codec, group_size=group_size, copy_from=model_dir, progress=progress)
    finally:
        source.close()
