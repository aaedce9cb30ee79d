"""From a path to a source of weights: a block store as it is, a checkpoint folder as it is, or packed first."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockwalk.state import CODEC_DTYPE, Codec
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
