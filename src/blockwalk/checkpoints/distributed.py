"""Checkpoints that every rank writes its own part of, and those of first-order runs, which any mesh
and method reads.

A checkpoint does not record how state was spread: each trainable's master and optimizer states are
one-dimensional tensors by canonical name, and a rank brings the pieces of them that lie in its
slices (see :mod:`blockwalk.checkpoints.pieces`). So a run saved under one method on four ranks goes
on under another on two, or under ``plain`` on one; at the same world size with the same bits. Which
rank writes what follows from the layout: nothing is planned together, and ranks tell one another
texts alone.

The folder is whole or not there: it is written beside its place and renamed when all ranks have
written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from blockwalk.checkpoints import pieces
from blockwalk.checkpoints.pieces import Pieces
from blockwalk.ranks.agreement import gather_json
from blockwalk.ranks.place import TIMEOUT
from blockwalk.system import atomic_files, links
from blockwalk.system.atomic_files import PARTIAL, Damaged, fsync
from blockwalk.system.paths import StrPath


class HasPieces(Protocol):
    """The interface of an engine that a checkpoint uses."""

    def pieces(self, *, to_write: bool = False) -> dict[str, Pieces]:
        """Return every tensor that a resumed run needs, as far as this rank holds it, by name and
        kind."""
        ...

    def facts(self) -> Mapping[str, str]:
        """Return facts that the tensors were made by, which a resumed run must know."""
        ...

    def resume_facts(self, facts: Mapping[str, str]) -> None:
        """Take over what :meth:`facts` of the engine that saved said."""
        ...

    def masters_changed(self) -> None:
        """Tell the engine that its masters were written to, so that bytes derived from them are
        made again."""
        ...


class Saver:
    """A writer and reader of one engine's checkpoints, in the background if asked. Every rank makes
    one and calls it together."""

    def __init__(self, engine: HasPieces) -> None:
        self.engine = engine
        self._group = (
            dist.new_group(timeout=TIMEOUT, backend="gloo") if dist.is_initialized() else None
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="blockwalk save")
        self._pending: Future[None] | None = None

    def save(
        self,
        folder: StrPath,
        steps_done: int,
        *,
        wait: bool = True,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        """Write a checkpoint to ``folder``, which must not be there yet.

        Args:
            wait: False copies what is to be saved to host memory, returns, and writes in the
                background; the next call, :meth:`wait` and :meth:`close` wait for it.
            beside: text files that belong to it, by name; rank 0's are written.

        Raises:
            FileExistsError: the folder is there.
            ValueError: it is on a file system that not every rank sees.
        """
        self.wait()
        state = self.engine.pieces(to_write=True)
        if not wait:
            state = {key: value.copied() for key, value in state.items()}
        facts = self.engine.facts()
        self._pending = self._thread.submit(
            write_folder, Path(folder), state, steps_done, beside or {}, self._group, facts
        )
        if wait:
            self.wait()

    def load(self, folder: StrPath) -> int:
        """Copy a checkpoint's masters and optimizer states into the engine, whatever mesh and
        method saved it; returns the number of steps that the run had done.

        Raises:
            Damaged: on every rank, what one of them found missing or changed.
            ValueError: it holds another model's tensors, or none that this run trains, or a rank
                does not see it.
        """
        self.wait()
        folder = Path(folder)
        _require(folder, self._group)
        damage = ""
        try:
            steps_done = self._read(folder)
        except Damaged as error:
            damage = str(error)
        if problems := _told(damage, self._group):
            raise Damaged("; ".join(problems.values()))
        self.engine.masters_changed()
        return steps_done

    def _read(self, folder: Path) -> int:
        """Copy this rank's pieces into the engine; returns the number of steps that had been
        done."""
        local_pieces = self.engine.pieces()
        with pieces.Saved(folder) as saved:
            numel = {name: piece.numel for name, piece in local_pieces.items()}
            if different := sorted(dict(saved.numel.items() ^ numel.items())):
                raise ValueError(
                    f"{folder} is not of this model and optimizer; it differs in {different[:5]}"
                )
            for name, piece in local_pieces.items():
                for start, elements in piece.ranges.items():
                    saved.read_into(name, start, elements)
        self.engine.resume_facts(saved.facts)
        return saved.steps_done

    def wait(self) -> None:
        """Wait until the save that is under way is written, and raise its error if it failed."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def write_folder(
    folder: Path,
    state: Mapping[str, Pieces],
    steps_done: int,
    beside: Mapping[str, str],
    group: dist.ProcessGroup | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write a checkpoint, every rank of a group its pieces, this process alone without one;
    arguments as :meth:`Saver.save`, ``facts`` as :meth:`HasPieces.facts`."""
    partial = folder.with_name(f".{folder.name}{PARTIAL}")
    rank, ranks = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size(group))
    if folder.exists():
        raise FileExistsError(f"{folder} is there already; save to another folder")

    def make() -> None:
        if rank == 0:
            links.remove(partial)
            partial.mkdir(parents=True)
            for name, text in beside.items():
                atomic_files.write_bytes(partial / name, text.encode())

    def write() -> None:
        pieces.write(partial, state, steps_done=steps_done, rank=rank, ranks=ranks, facts=facts)

    try:
        _together(make, folder, group)
        _require(partial, group)
        _together(write, folder, group)
    except OSError:
        if rank == 0:
            atomic_files.discard(partial)
        raise
    if rank == 0:
        fsync(partial)
        os.rename(partial, folder)
        fsync(folder.parent)
    _told("", group)


def _together(work: Callable[[], None], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Do this rank's part of the work on a folder.

    Raises:
        OSError: on every rank, what failed on any of them; of one process its own.
    """
    failure = ""
    try:
        work()
    except OSError as error:
        if group is None:
            raise
        failure = f"{error.strerror or error}"
    if problems := _told(failure, group):
        ranks = "; ".join(f"rank {rank}: {text}" for rank, text in problems.items())
        raise OSError(f"{folder} could not be written: {ranks}")


def _require(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError on every rank where one of them does not see a folder."""
    if group is None and not folder.is_dir():
        raise ValueError(
            f"{folder} is not there: a checkpoint of a first-order run keeps masters and moments in"
            " it"
        )
    if blind := _told("" if folder.is_dir() else "blind", group):
        raise ValueError(
            f"rank {', '.join(map(str, blind))} does not see {folder}: every rank reads and writes"
            " its part of a checkpoint there; put output_dir on a file system that all nodes share"
        )


def _told(text: str, group: dist.ProcessGroup | None) -> dict[int, str]:
    """Return every rank's text that is not empty, by rank and on every rank; all ranks wait for one
    another."""
    texts = [text] if group is None else gather_json(text, group)
    return {rank: said for rank, said in enumerate(texts) if said}
