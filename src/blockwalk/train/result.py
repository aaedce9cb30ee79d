"""The trained weights that a run leaves, and the command that shows what was trained."""

from __future__ import annotations

import os
import shlex
from contextlib import nullcontext
from pathlib import Path

from blockwalk.checkpoints import marks
from blockwalk.data import prompt_layout
from blockwalk.data.sources import read_records
from blockwalk.plan.data_source import Source, listed
from blockwalk.plan.run_config import DataSettings
from blockwalk.system import atomic_files
from blockwalk.train.beginning import Beginning
from blockwalk.train.run_evaluations import RunEvaluations
from blockwalk.walk.walker import Walker

BEGINNING = 6
"""Words of a learnt text that are proposed as a prompt."""
LONGEST = 120
"""Characters of a proposed text at most."""


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
    """Return the command line that shows what was trained, on a held-out text: a chat where
    conversations were learnt, a label where label words were; empty where no short prompt fits."""
    config = beginning.config
    folder = shlex.quote(os.fspath(beginning.output_dir))
    weights = ""
    best_is_earlier = evaluations.kept and not evaluations.is_best(walker.steps_done)
    if best_is_earlier and config.adapters is not None and walker.ledger is None:
        checkpoint = os.fspath(beginning.output_dir / evaluations.kept)
        weights = f" --adapter {shlex.quote(checkpoint)}"
    if _learnt(beginning) is marks.Learnt.CHATS:
        return f"blockwalk chat {folder}{weights}"
    sources = _here(config.data)
    text = _held_out_text(config.data, sources)
    if config.data.template:
        words = ["--text", text] if text else [source.path for source in sources[:1]]
        return f"blockwalk predict {folder}{weights} {shlex.join(words)}" if words else ""
    prompt = prompt_layout.example(config.data, text or "Hello")
    if prompt is None:
        return ""
    return f"blockwalk generate {folder}{weights} --prompt {shlex.quote(prompt)}"


def _here(data: DataSettings) -> list[Source]:
    """Return the held-out sources, then those of training, that are on this machine."""
    sources = (*listed(data.eval), *listed(data.train))
    return [source for source in sources if Path(source.path).exists()]


def _held_out_text(data: DataSettings, sources: list[Source]) -> str:
    """Return the text of a held-out record, or of a training record, in the one field that a prompt
    is made of; a few words where all of it is learnt. Empty: there are several fields, lines or
    many words."""
    field = prompt_layout.field_of(data)
    if not sources or field is None:
        return ""
    try:
        records = read_records(sources[0].path, columns=sources[0].columns or data.columns)
        text = str(next(iter(records)).fields.get(field, "")).strip()
    except (ValueError, OSError, StopIteration):
        return ""
    is_learnt = field == "text" and not data.template
    words = " ".join(text.split(" ")[:BEGINNING]) if is_learnt else text
    return words if len(words) <= LONGEST and "\n" not in words else ""
