"""A prepared run: its data as tokens, and its step foreseen, before its model is opened. Nothing is
written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from blockwalk.cutting.skeleton import require_positions, vocabulary_rows
from blockwalk.cutting.verify import require_borders
from blockwalk.data.batch import Batch, require_tokens
from blockwalk.data.batching import Batches
from blockwalk.data.corpus import training_set
from blockwalk.data.dataset import Choices, Encoded, mapped
from blockwalk.data.encode import first_example
from blockwalk.data.encode_report import EncodeReport
from blockwalk.data.given_template import missing_marks
from blockwalk.data.label_words import LabelWordBatch, label_word_batch
from blockwalk.data.rendered import Tokenizer
from blockwalk.data.tokenizer import require_rows, tokenizer_files, tokenizer_of
from blockwalk.engine.frozen_codec import with_stored_codec
from blockwalk.engine.model_weights import require_fitting_weights
from blockwalk.models.model_source import model_source
from blockwalk.models.stops import GENERATION, with_stops
from blockwalk.numerics.device import chosen, is_cpu
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.schedules import schedule_of
from blockwalk.plan.settings import override
from blockwalk.plan.words import is_or_are
from blockwalk.program.program import Shape
from blockwalk.program.settling import settled_before
from blockwalk.report.forecast import Forecast
from blockwalk.report.foresee import foresee
from blockwalk.simulate.simulator import Simulation
from blockwalk.system.heap import give_back, large_returned
from blockwalk.system.process_memory import process_bytes
from blockwalk.tiers.page_faults import name_faults
from blockwalk.train.best import require_evaluations
from blockwalk.train.evaluation import HeldOut
from blockwalk.train.frozen_codec import settled
from blockwalk.walk.context_check import require_parts
from blockwalk.walk.stages_check import require_all_blocks, require_stages
from blockwalk.walk.unit_costs import of_run

LOOKED_AT = 100_000
"""The examples that are looked at, of a longer run's, for what a step holds at most and on
average."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that has been read and not begun: its data as tokens, and the forecast of its longest
    step."""

    tokenizer_files: Mapping[Path, np.ndarray]
    """The bytes of the files that the tokenizer is saved in, by their paths below a model's folder.
    The tokenizer itself is gone: a step does not ask it, and 150,000 entries take a hundred
    megabytes."""
    shown: list[tuple[str, bool]]
    """The first example: runs of text, each with whether it is learnt."""
    rows: Encoded
    choices: Choices | None
    batches: Batches
    held_out: HeldOut | None
    total: int
    """The run's last step."""
    plan: Plan
    longest: int
    """Tokens that the longest batch is padded to."""
    held_bytes: int
    """Bytes that the process holds before the model is opened."""
    foreseen: Forecast
    usual: Simulation | None
    """The simulation of a step with as many tokens as a step has on average; None before doctor has
    measured the machine."""
    anatomy: Mapping[str, str]
    """The identity of the model's anatomy: see :func:`blockwalk.cutting.verify.identity_of`."""
    notes: tuple[str, ...] = ()
    """Sentences about the data and the tokenizer that the user should know of."""

    def next_batch(self, label_scores: str) -> tuple[Batch | LabelWordBatch, Batch]:
        """Return the batch that the walker takes next, and the number of its tokens."""
        if self.choices is None:
            batch = next(self.batches)
            return batch, batch
        rows = self.batches.next_rows()
        multiple = self.batches.padding_multiple
        words = label_word_batch(self.choices, rows, multiple, scores=label_scores)
        return words, words.batch

    def batch_at(self, epoch: int, position: int, label_scores: str) -> Batch | LabelWordBatch:
        """Return the batch at a place in the data: an epoch, and the examples of it that were given
        out before."""
        batches = self.batches
        if (epoch, position) != (batches.epoch, batches.position):
            place = {"epoch": epoch, "position": position}
            batches.load_state_dict({**batches.state_dict(), **place})
        return self.next_batch(label_scores)[0]

    @property
    def map_bytes(self) -> int:
        """Bytes of the files that :meth:`put_away` makes."""
        files = sum(file.nbytes for file in self.tokenizer_files.values())
        return files + (0 if self.rows.in_maps else self.rows.nbytes)

    def put_away(self, folder: Path) -> PreparedRun:
        """Return the run with its training data and the tokenizer's files in maps of nameless files
        in ``folder``."""
        rows = self.batches.dataset = self.rows.mapped(folder)
        files = {name: mapped(file, folder) for name, file in self.tokenizer_files.items()}
        return replace(self, rows=rows, tokenizer_files=files)


def prepare(run: RunConfig) -> PreparedRun:
    """Read what a run trains on, and foresee its step at the longest sequences.

    Raises:
        ValueError: data that cannot be trained on, or weights that do not fit their configuration's
            model.
    """
    name_faults()
    run = replace(run, model=model_source(run.model))
    run, _ = settled(run)
    run = replace(run, plan=with_stored_codec(run.plan, run.model))
    with large_returned():
        tokenizer = tokenizer_of(run.model, run.data)
    rows, choices = read_training_rows(run, tokenizer)
    _require_whole(rows.report, run)
    multiple = run.data.padding_multiple
    batches = Batches(
        rows,
        run.batch_size,
        run.plan.seed,
        shuffle=run.data.shuffle,
        padding_multiple=multiple,
        numbered=run.plan.objective_facts.reference,
    )
    held_out = None
    if run.data.evaluates:
        held_out = HeldOut.of_run(run, tokenizer, limit=run.data.eval_limit)
    require_evaluations(run, held_out)
    vocabulary = vocabulary_rows(run.model)
    require_rows(rows.report.largest, tokenizer, vocabulary, "data.train")
    if held_out is not None:
        require_rows(held_out.encoded.report.largest, tokenizer, vocabulary, "data.eval")
    marks = missing_marks(run.data.chat_template, tokenizer)
    notes = tuple(filter(None, [marks, _repeats(run.batch_size, rows)]))
    shown = first_example(rows, tokenizer)
    files = tokenizer_files(tokenizer)
    if rows.report.stops:
        stopping = with_stops(model_source(run.model).folder, rows.report.stops)
        files[Path(GENERATION)] = np.frombuffer(stopping, np.uint8)
    del tokenizer
    # before the model's own code brings the libraries that it needs, whose objects would lie among
    # the tokenizer's
    give_back()
    require_fitting_weights(run.model)
    if run.data.packing:
        require_borders(run.model)
    total = run.max_steps or batches.steps(run.epochs)
    plan = run.plan
    if not plan.optimizer.total_steps:
        plan = override(plan, {"optimizer.total_steps": total})
    # A warm-up that the steps have no room for is refused here, by a dry run as well.
    schedule_of(plan.optimizer)
    sequences = rows if choices is None else choices.rows
    longest = -(-sequences.summary.longest // multiple) * multiple
    # A task's records alone tell how many candidates there are.
    candidates = choices.classes if choices is not None and run.data.task else 1
    _require_positions(run, sequences, held_out)
    held_bytes = process_bytes()
    costs = of_run(run)
    micro_batch = run.micro_batch_rows * candidates
    documents_walk_apart = (
        rows.positions is None and costs.walks_documents(plan) and run.batch_size % plan.cuts == 0
    )
    steps = min(total, -(-LOOKED_AT // run.batch_size))
    lengths_TC = batches.row_lengths(steps, plan.cuts, apart=documents_walk_apart)
    fullest = Shape(micro_batch, int(lengths_TC.max()) if documents_walk_apart else longest)
    require_parts(run.model, plan)
    require_stages(run.model, plan)
    require_tokens(int(lengths_TC.min()), plan.mesh.context)
    if held_out is not None:
        require_tokens(held_out.shortest, plan.mesh.context)
        if held_out.tokenizer is not None:
            require_all_blocks(plan, "data.eval, whose answers are generated,")
    visit = held_out.visit(plan.mesh.stage_ranks // plan.mesh.context) if held_out else None
    learnt = rows.summary.learnt / len(rows.token_ids)
    foreseen = foresee(run, fullest, costs, visit, total, learnt=learnt)
    counts = {name: getattr(foreseen.plan, name) for name in ("resident", "together")}
    stages = {"pipeline.blocks": list(foreseen.plan.pipeline.blocks)}
    plan = override(plan, {**counts, **stages, **foreseen.choices()})
    usual = foreseen.simulated()
    if usual is not None:
        # ranks wait for the one with the longest rows of a micro-batch
        walked_TA = lengths_TC.reshape(steps, plan.gradient_accumulation_steps, -1).max(axis=2)
        average = Shape(micro_batch, math.ceil(walked_TA.mean()))
        usual_run = replace(run, plan=plan, named=None)
        usual_forecast = foresee(usual_run, average, costs, learnt=learnt)
        usual = usual_forecast.simulated()
        notes_of_both = dict.fromkeys((*foreseen.notes, *usual_forecast.notes))
        foreseen = replace(foreseen, notes=tuple(notes_of_both))
    return PreparedRun(
        tokenizer_files=files,
        shown=shown,
        rows=rows,
        choices=choices,
        batches=batches,
        held_out=held_out,
        total=total,
        plan=plan,
        longest=longest,
        held_bytes=held_bytes,
        foreseen=foreseen,
        usual=usual,
        anatomy=costs.anatomy(),
        notes=notes,
    )


def _repeats(batch_size: int, rows: Encoded) -> str:
    """Return a sentence on a batch that has more places than there are examples; empty where it
    has not."""
    if batch_size <= rows.examples:
        return ""
    return (
        f"batch_size is {batch_size}, and there {is_or_are(rows.examples)}"
        f" {rows.counted_examples}: a step sees the same one more than once; lower"
        f" batch_size to {rows.examples}"
    )


def _require_whole(report: EncodeReport, run: RunConfig) -> None:
    """Raise ValueError where more than half of the records would be cut, and the settings do not
    allow it."""
    if 2 * report.truncated > report.records and not run.data.allow_truncation:
        raise ValueError(
            f"{report.truncated} of {report.records} records, more than half, are longer than"
            f" data.max_length: {run.data.max_length} tokens, and would be cut: set"
            f" data.max_length to {report.longest}, the longest, or data.packing: true, which"
            " cuts nothing, or data.allow_truncation: true"
        )


def taken_up(run: RunConfig, settled: Mapping[str, Any]) -> RunConfig:
    """Return the run with the settings that an earlier part of it let its machine decide
    (``settled``, by name), where nobody has given them since. A processor decides none."""
    if is_cpu(chosen()):
        return run
    values = settled_before(run.plan, run.named, settled)
    named = None if run.named is None else run.named | values.keys()
    return replace(run, plan=override(run.plan, values), named=named)


def _require_positions(run: RunConfig, rows: Encoded, held_out: HeldOut | None) -> None:
    """Raise ValueError where a sequence, with its prefix, is longer than the positions that the
    model has learnt."""
    data_sets = (rows, *([held_out.encoded] if held_out is not None else []))
    # positions begin anew in a packed row
    longest = max(encoded.summary.furthest for encoded in data_sets)
    require_positions(run.model, longest + run.prefix.num_virtual_tokens)


def read_training_rows(run: RunConfig, tokenizer: Tokenizer) -> tuple[Encoded, Choices | None]:
    """Return ``data.train`` as tokens; and with every label word, for an objective that ranks
    them."""
    plan = run.plan
    rows = training_set(
        run.data,
        tokenizer,
        seed=plan.seed,
        every_word=plan.ranks_words,
        objective=plan.objective_facts,
    )
    return (rows.answered(), rows) if isinstance(rows, Choices) else (rows, None)
