"""Block stores that a run packs for itself: written once into a work folder, and found there again
as long as the model's weights are the same."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

from blockwalk.cutting.verify import certified
from blockwalk.models.model_source import model_source
from blockwalk.plan.placement import Codec
from blockwalk.system.atomic_files import discard
from blockwalk.system.locks import lock
from blockwalk.tiers.block_store.store import BlockStore, is_store
from blockwalk.tiers.block_store.writer import restore_model_files, write_store
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from blockwalk.tiers.model_folder.identity import WeightsInUse, weights_digest

log = logging.getLogger(__name__)


def packed(path: Path, codec: Codec, model: Any, *workdirs: Path) -> Path:
    """Return the block store of a checkpoint folder in one of ``workdirs``, made in the last where
    none has it.

    Raises:
        ValueError: the folder holds no weights that fit ``model``, its skeleton; or the disk is too
            full.
    """
    files = model_source(path)
    if files.codec is not None:
        raise ValueError(
            f"{path} is in {files.form} already, and the plan asks for {codec}, which would round"
            " it again; set frozen to 'disk × raw', which reads it as it lies"
        )
    name = f"{path.resolve().name}-{codec}"
    in_use = WeightsInUse.of(path, weights_digest(path))
    stores = [folder / f"{name}-{in_use.digest}" for folder in workdirs]
    with closing(CheckpointFolder(path, model)) as source, _alone(workdirs[-1]):
        if (store := next(filter(_is_undamaged, stores), None)) is not None:
            restore_model_files(path, store)
            return store
        log.info("packing %s to %s, once, into %s", path, codec, stores[-1])
        for other in workdirs[-1].glob(f"{escape(name)}-{'[0-9a-f]' * 32}"):
            # a node that shares the folder may have packed this one, and read it, by now
            if other != stores[-1]:
                discard(other)
        _pack(
            stores[-1],
            lambda made: write_store(made, source, certified(model).spec(), codec, copy_from=path),
        )
        try:
            in_use.require_unchanged()
        except ValueError:  # its name would tell of another model
            discard(stores[-1])
            raise
        return stores[-1]


def _pack(store: Path, write: Callable[[Path], None]) -> None:
    """Write a store, or take the one that is there when it is written: nodes that share a folder
    over a file system without locks pack at once, and the first to end has packed for all. A
    damaged one is put aside first."""
    with suppress(FileNotFoundError):
        inode = store.stat().st_ino
        if not _is_undamaged(store) and store.stat().st_ino == inode:
            discard(store)
    try:
        write(store)
    # its name is taken, or its folder was filled between two looks at it
    except (ValueError, OSError):
        if not _is_undamaged(store):
            raise
        log.info("another node has packed %s meanwhile: taking its pack", store)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from packing into a folder meanwhile.

    The first of the ranks that share it packs, and the others wait for as long as that one lives;
    where it dies, the kernel lets the next one go on. A folder that stays empty goes again."""
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
