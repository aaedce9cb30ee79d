"""The trained weights that a run leaves, and the command that shows what was trained."""

from __future__ import annotations

import os
import shlex
from contextlib import nullcontext
from pathlib import Path

from blockwalk.checkpoints import marks
from blockwalk.data import prompt_layout
from blockwalk.system import atomic_files
from blockwalk.train.beginning import Beginning
from blockwalk.train.run_evaluations import RunEvaluations
from blockwalk.walk.walker import Walker


def save(beginning: Beginning, walker: Walker) -> Path:
    """Write the trained weights, with the files of the tokenizer, and return their folder. Rank 0
    writes what the others bring."""
    name = "model" if beginning.config.adapters is None else "adapter"
    saved_to = beginning.output_dir / name
    writes = walker.ranks.rank == 0
    replaces = beginning.start.may_replace(saved_to)
    with (
        atomic_files.atomic_folder(saved_to, replace=replaces) if writes else nullcontext(saved_to)
    ) as folder:
        if writes:
            marks.write(folder, beginning.start.run, _learnt(beginning))
        walker.save_pretrained(folder)
        if writes:
            for path, file in beginning.prepared.tokenizer_files.items():
                (folder / path).parent.mkdir(exist_ok=True)
                (folder / path).write_bytes(file.data)
    return saved_to


def _learnt(beginning: Beginning) -> marks.Learnt:
    """Return the kind of texts that a run has learnt."""
    if beginning.prepared.rows.report.turn_ends:
        return marks.Learnt.CHATS
    data = beginning.config.data
    return marks.Learnt.WORDS if data.template or data.task else marks.Learnt.TEXTS


def next_command(beginning: Beginning, walker: Walker, evaluations: RunEvaluations) -> str:
    """Return the command line that shows what was trained: a chat where conversations were learnt;
    empty where no short prompt fits."""
    config = beginning.config
    folder = shlex.quote(os.fspath(beginning.output_dir))
    weights = ""
    best_is_earlier = evaluations.kept and not evaluations.is_best(walker.steps_done)
    if best_is_earlier and config.adapters is not None and walker.ledger is None:
        checkpoint = os.fspath(beginning.output_dir / evaluations.kept)
        weights = f" --adapter {shlex.quote(checkpoint)}"
    if _learnt(beginning) is marks.Learnt.CHATS:
        return f"blockwalk chat {folder}{weights}"
    prompt = prompt_layout.example(config.data, "Hello")
    if prompt is None:
        return ""
    return f"blockwalk generate {folder}{weights} --prompt {shlex.quote(prompt)}"
