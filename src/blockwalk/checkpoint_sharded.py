"""Checkpoints that every rank writes its own part of, and that any mesh reads: torch.distributed.checkpoint on slices.

What is saved does not know how it was spread: each trainable's float32 master and optimizer states are one-dimensional
tensors by canonical name, and a rank brings the pieces of them that lie in its slices. So a run saved under one method on four
ranks goes on under another on two, or under ``plain`` on one; at the same world size with the same bits.

The folder is whole or not there: it is written beside its place and renamed when all ranks have written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from blockwalk import files
from blockwalk.engine import Engine
from blockwalk.files import PARTIAL, fsync_folder
from blockwalk.groups import gather_json
from blockwalk.state import StateKind

STEPS = "steps_done"

_AS_IS = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
"""A planner that flattens would replace what it does not know."""


@dataclass(frozen=True)
class Pieces:
    """What this rank holds of a tensor of ``numel`` elements: one-dimensional pieces by their first element."""

    numel: int
    held: dict[int, torch.Tensor]

    def size(self) -> torch.Size:
        return torch.Size([self.numel])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size([start]), sizes=torch.Size([len(piece)]))
            for start, piece in self.held.items()
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.held[chunk.offsets[0]]),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return _piece(value, index) if isinstance(value, Pieces) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner({}, metadata, is_coordinator)  # it drops what it does not know
        self.state_dict = self.original_state_dict = state_dict

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return _piece(self.state_dict[index.fqn], index)


def _piece(value: Pieces, index: MetadataIndex) -> torch.Tensor:
    assert index.offset is not None
    return value.held[index.offset[0]]


def pieces_of(engine: Engine) -> dict[str, Pieces]:
    """Every master and optimizer state, ``name/kind``, as far as this rank holds it; views, not copies."""
    found: dict[str, Pieces] = {}
    if not engine.plan.sharded:
        for name, master in engine.masters.items():
            for kind, tensor in (("master", master), *engine.moments.get(name, {}).items()):
                found[f"{name}/{kind}"] = Pieces(tensor.numel(), {0: tensor.view(-1)})
        return found
    from blockwalk.sharded import ShardedEngine

    assert isinstance(engine, ShardedEngine)
    for (_, part), shard in engine.shards.items():
        if part is not StateKind.TRAINABLE or not shard.numel:
            continue
        own = engine.groups.slice(shard.numel, engine.plan.mesh.z1)
        for name, first in shard.layout.offsets:
            numel = shard.params[name].numel
            low, high = max(first, own.start), min(first + numel, own.stop)
            for kind, tensor in shard.held().items():
                held = {low - first: tensor[low - own.start : high - own.start]} if low < high else {}
                found[f"{name}/{kind}"] = Pieces(numel, held)
    return found


class Saver:
    """Writes checkpoints of one engine, in the background if asked. Every rank makes one and calls it together."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="blockwalk save")
        self._pending: Future[None] | None = None

    def save(
        self,
        folder: str | os.PathLike[str],
        steps_done: int,
        *,
        wait: bool = True,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        """Write a checkpoint to ``folder``, which must not be there yet.

        Args:
            wait: False copies what is to be saved to host memory, returns, and writes in the background; the next call,
                :meth:`wait` and :meth:`close` wait for it.
            beside: text files that belong to it, by name; rank 0's are written.

        Raises:
            FileExistsError: the folder is there.
            ValueError: it is on a file system that not every rank sees.
        """
        self.wait()
        state = pieces_of(self.engine)
        if not wait:
            state = {
                key: replace(
                    value, held={start: piece.detach().to("cpu", copy=True) for start, piece in value.held.items()}
                )
                for key, value in state.items()
            }
        self._pending = self._thread.submit(self._write, Path(folder), {**state, STEPS: steps_done}, beside or {})
        if wait:
            self.wait()

    def load(self, folder: str | os.PathLike[str]) -> int:
        """Copy a checkpoint's masters and optimizer states in, whatever mesh and method saved it: the steps it had done.

        Raises:
            ValueError: it holds another model's tensors, or none that this run trains, or a rank does not see it.
        """
        self.wait()
        self._require(Path(folder))
        state: dict[str, Any] = {**pieces_of(self.engine), STEPS: 0}
        reader = FileSystemReader(os.fspath(folder))
        saved = reader.read_metadata().state_dict_metadata
        if missing := sorted(saved.keys() ^ state.keys()):
            raise ValueError(f"{os.fspath(folder)} is not of this model and optimizer; it differs in {missing[:5]}")
        load(
            state, storage_reader=reader, planner=_LoadPlanner(**_AS_IS), process_group=self._group, no_dist=self._alone
        )
        self.engine.masters_changed()
        return int(state[STEPS])

    def wait(self) -> None:
        """Until what was begun is written. Raises what went wrong."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    @property
    def _alone(self) -> bool:
        return self._group is None

    def _require(self, folder: Path) -> None:
        """Every rank must see a folder."""
        seen = [folder.is_dir()] if self._group is None else gather_json(folder.is_dir(), self._group)
        if not all(seen):
            blind = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
            raise ValueError(
                f"rank {blind} does not see {folder}: every rank reads and writes its part of a checkpoint there; put"
                " output_dir on a file system that all nodes share"
            )

    def _write(self, folder: Path, state: dict[str, Any], beside: Mapping[str, str]) -> None:
        partial = folder.with_name(f".{folder.name}{PARTIAL}")
        first = self._alone or dist.get_rank() == 0
        if folder.exists():
            raise FileExistsError(f"{folder} is there already; save to another folder")
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for name, text in beside.items():
                files.write_bytes(partial / name, text.encode())
        self._barrier()
        self._require(partial)
        writer = FileSystemWriter(os.fspath(partial))
        save(
            state, storage_writer=writer, planner=_SavePlanner(**_AS_IS), process_group=self._group, no_dist=self._alone
        )
        self._barrier()
        if first:
            os.rename(partial, folder)
            fsync_folder(folder.parent)
        self._barrier()

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)
