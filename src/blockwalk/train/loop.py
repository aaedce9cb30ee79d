"""The training loop: data, steps, evaluation, checkpoints, signals. A step is the walker's work;
this decides when.

output_dir/
    config.yaml            the resolved configuration
    metrics.jsonl          one line a step
    evaluations.jsonl      one line an evaluation
    skipped.jsonl          with skip_nonfinite: one line a batch that was left out
    changed.jsonl          one line a resumed run that changed settings
    ledger.jsonl           zeroth order: every scalar that a step's update reads
    checkpoint-000123/     see blockwalk.checkpoints.run_checkpoint
    adapter/ or model/     the trained weights, at the end
    .blockwalk             the run's name: the mark of a folder that a run made
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from blockwalk.checkpoints import marks, run_checkpoint, run_start, sweeping
from blockwalk.checkpoints.changed_settings import changed_settings
from blockwalk.checkpoints.ledger import NAME as LEDGER
from blockwalk.checkpoints.ledger import LedgerEntry
from blockwalk.data import prompt_layout
from blockwalk.data.batch import Batch, loss_tokens, tokens_read
from blockwalk.engine.frozen_codec import already_said, refuse_rounded
from blockwalk.models.model_source import model_source
from blockwalk.models.places import adapter_paths, data_paths, model_paths, refuse_overlap
from blockwalk.numerics.device import chosen, described, is_cpu
from blockwalk.plan.data_source import joined, names_of
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.settings import override
from blockwalk.plan.words import counted
from blockwalk.program.program import human_bytes
from blockwalk.ranks.agreement import facts_of, require_agreement
from blockwalk.ranks.elastic import Elastic, elastic
from blockwalk.ranks.shared_forwards import first
from blockwalk.report.advice import next_plan
from blockwalk.report.capacity import check_budget, check_disks, check_memory, close_memory
from blockwalk.report.forecast import zeroth_order_advice
from blockwalk.report.html import loss_ends
from blockwalk.report.step_forecast import StepForecast
from blockwalk.system import atomic_files
from blockwalk.system.atomic_files import whole_lines
from blockwalk.system.heap import give_back
from blockwalk.system.out_of_memory import OutOfMemory, is_out_of_memory
from blockwalk.system.process_memory import PeakMemory, peak_resident_bytes, process_bytes
from blockwalk.system.terminal import steady
from blockwalk.tiers.model_folder.identity import same_weights, weights_digest
from blockwalk.train import config, preflight
from blockwalk.train.best import Best
from blockwalk.train.callbacks import Callback, Event, pushes, trackers
from blockwalk.train.data_identity import differences, identity
from blockwalk.train.elastic import compare
from blockwalk.train.elastic import facts as facts_to_join
from blockwalk.train.evaluation import Evaluation
from blockwalk.train.frozen_codec import settled
from blockwalk.train.metrics_log import MetricsLog
from blockwalk.train.outcome import Outcome
from blockwalk.train.prepared_run import PreparedRun, prepare, taken_up
from blockwalk.train.progress import Progress
from blockwalk.train.stop_signals import Stop, stop_signals
from blockwalk.walk.walker import StepResult, Walker


def train(
    run: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    callbacks: Iterable[Callback] = (),
    trace: str | Path | None = None,
    **settings: Any,
) -> Outcome:
    """Train as configured, to the end or until SIGTERM, SIGINT, SIGHUP or SIGUSR1, on which a
    checkpoint is saved.

    Args:
        run: the configuration: the path of a YAML file, a mapping of settings, or a value; None:
            the settings alone.
        callbacks: functions that are told of every event; see
            :class:`blockwalk.train.callbacks.Event`.
        trace: where the timeline of one step goes, beside ``output_dir/trace.json``.
        settings: settings by name, which win over those of ``run``: ``output_dir="runs/second"``,
            ``optimizer={"learning_rate": 1e-4}``.

    Raises:
        ValueError: settings or data that cannot be trained with; nothing was written.
        DoesNotFit: the plan needs more than its budget.
        OutOfMemory: memory was refused while the run went on.
    """
    if settings or not isinstance(run, RunConfig):
        run = config.of(run, settings)
    return _train(run, (*callbacks, *trackers(run.report_to), *pushes(run.push_to_hub)), trace)


def _train(run: RunConfig, callbacks: Sequence[Callback], trace: str | Path | None) -> Outcome:
    """Train as :func:`train` says, a configuration that has been read."""
    if not run.model or not (run.data.train or run.data.task):
        raise ValueError(
            f"{'data.train' if run.model else 'model'} is missing; nothing can be trained without"
            " it"
        )
    run = dataclasses.replace(run, model=model_source(run.model))
    run, codec_lines = settled(run)
    refuse_rounded(run.model, run.plan, run.adapters)
    output_dir = Path(run.output_dir)
    with steady(), PeakMemory() as memory, stop_signals() as stop, ExitStack() as folder:
        first(lambda: folder.enter_context(sweeping.one_run(output_dir)))
        begin = (run.output_dir, run.resume_from_checkpoint, run.overwrite_output_dir)
        start = run_start.Start(**first(lambda: dataclasses.asdict(run_start.prepare(*begin))))
        first(lambda: _refuse_places(run, start, trace))
        shared = (
            elastic(run.plan.mesh, run.elastic, run.start_timeout, joins=False)
            if run.elastic
            else None
        )
        decided = (
            {} if start.checkpoint is None else first(lambda: _decided(Path(str(start.checkpoint))))
        )
        run = taken_up(run, decided)
        prepared = prepare(run)
        plan = prepared.plan
        held_out = prepared.held_out
        foreseen = prepared.foreseen
        facts = {**facts_of(run.shared()), "data.train": prepared.rows.fingerprint()}
        require_agreement(
            facts if held_out is None else {**facts, "data.eval": held_out.encoded.fingerprint()}
        )
        check_budget(run, foreseen)
        weights = first(lambda: weights_digest(run.model))
        choices = foreseen.choices()
        run = dataclasses.replace(run, plan=override(run.plan, choices))
        loop = _Loop(run, prepared, memory, stop, weights, start, callbacks)
        loop.elastic = shared
        loop.decided = {**decided, **choices}
        if start.checkpoint is not None:
            loop.read(_saved(Path(start.checkpoint)))
        first(lambda: check_memory(run, foreseen, prepared.held_bytes))
        steps_left = prepared.total - (loop.saved.step if loop.saved else 0)
        first(lambda: check_disks(run, foreseen, steps_left, prepared.map_bytes))
        ledger = start.ledger if plan.zeroth_order else None
        scratch = output_dir / run_checkpoint.SCRATCH
        atomic_files.make_folder(scratch)
        loop.prepared = prepared = prepared.put_away(scratch)
        give_back()
        opened_at = process_bytes()
        with already_said():
            walker = Walker(
                run.model,
                plan,
                lora=run.adapters_at_start,
                workdir=scratch,
                ledger=ledger,
                ranks=shared,
            )
        with walker:
            walker.reserve(foreseen.program.shape)
            step_forecast = StepForecast.of(foreseen, prepared.usual, before=opened_at)
            stop.noted = True
            loop.begin(walker, step_forecast)
            if walker.ranks.rank == 0:
                atomic_files.write_bytes(output_dir / "config.yaml", config.dump(run).encode())
                step_forecast.write(output_dir, trace)
            if shared is not None and walker.ledger is not None:
                told = {"facts": facts_to_join(run, prepared), "ledger": walker.ledger.header}
                shared.open(told, walker.ledger.entries)
            known = {"done": walker.steps_done, "foreseen": step_forecast.process_bytes}
            with Progress(prepared.total, log_every=run.log_every, **known) as progress:
                if shared is not None:
                    shared.say = progress.say
                for line in (
                    *_opening(run, prepared, step_forecast, opened_at, start.damaged),
                    *codec_lines,
                ):
                    progress.say(line)
                if run.data.show_first and loop.saved is None:
                    progress.show_learnt("first record", prepared.shown)
                try:
                    return loop.run(progress)
                except OSError as error:
                    if error.errno not in atomic_files.NO_ROOM:
                        raise
                    where = (
                        f"at step {walker.steps_done}; free some, and go on with"
                        " --resume_from_checkpoint latest"
                    )
                    raise OSError(
                        error.errno, f"{error.strerror}, {where}", error.filename
                    ) from error
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    needed = step_forecast.tensor_bytes
                    held = _grown(walker, memory.highest - opened_at)
                    raise OutOfMemory(
                        f"out of memory after {counted(walker.steps_done, 'step')}:"
                        f" {human_bytes(needed)} of tensors were"
                        f" foreseen at a step's peak, {human_bytes(held)} were held when more was"
                        " refused"
                        + next_plan(
                            run,
                            min(needed, held),
                            foreseen.program.shape,
                            device=walker.device.type,
                        )
                    ) from error


def _refuse_places(run: RunConfig, start: run_start.Start, trace: str | Path | None) -> None:
    """Refuse a run that would write over what it reads, or over trained weights that it did not
    make.

    Raises:
        ValueError: it would; the message names the path, and the setting to change.
    """
    output_dir = Path(run.output_dir)
    result = "model" if run.adapters is None else "adapter"
    named = (*names_of(run.data.train), *names_of(run.data.eval))
    data = [path for name in named for path in data_paths(name)]
    read = {"the model": model_paths(run.model), "a data file": data}
    if run.lora is not None and run.lora.from_:
        read["the adapter of lora.from"] = adapter_paths(run.lora.from_)
    refuse_overlap(output_dir / result, read, "output_dir")
    written = [
        output_dir / name for name in (*run_checkpoint.LOGS, LEDGER, run_checkpoint.REPLACED)
    ]
    for path in (*written, *map(Path, start.in_the_way)):
        refuse_overlap(path, read, "output_dir", inside=False)
    if trace:
        refuse_overlap(trace, read, "--trace", inside=False)
    folders = [folder for name in named if (folder := Path(name).expanduser()).is_dir()]
    if output_dir.is_dir() and any(os.path.samefile(folder, output_dir) for folder in folders):
        raise ValueError(
            f"{output_dir} is a folder of records, and the run's logs would be read as some:"
            " choose another output_dir"
        )
    run_start.refuse_result(start, result)


def _opening(
    run: RunConfig,
    prepared: PreparedRun,
    foreseen: StepForecast,
    opened_at: int,
    damaged: Sequence[str],
) -> Iterator[str]:
    """Yield the lines that a run begins with: what is foreseen of it, and what its user should know
    of."""
    yield f"device: {described(chosen())}"
    yield from foreseen.lines()
    yield from foreseen.forecast.lines()
    yield from zeroth_order_advice(prepared.plan, run.adapters)
    yield from close_memory(run, foreseen.forecast, opened_at, foreseen.process_bytes)
    held_out_notes = [] if prepared.held_out is None else prepared.held_out.notes()
    yield from (
        f"note: {warning}"
        for warning in (
            *prepared.notes,
            *prepared.rows.report.warnings(),
            *held_out_notes,
            *damaged,
        )
    )
    yield from preflight.notes(run, prepared.longest)
    yield from preflight.usual_elsewhere(run)
    if prepared.held_out is not None and 0 < run.data.eval_limit < prepared.held_out.records:
        yield (
            f"evaluates {run.data.eval_limit} of {prepared.held_out.records} records (data.eval_limit)"
        )


def _grown(walker: Walker, process: int) -> int:
    """Return bytes that training took: on a GPU the allocator's own peak, else these of the
    process."""
    if is_cpu(walker.device):
        return max(process, 0)
    return int(torch.accelerator.max_memory_allocated(walker.device))


def _decided(start: Path) -> dict[str, Any]:
    """Return the settings that the machine decided for the run of a checkpoint, by name."""
    found: dict[str, Any] = run_checkpoint.load(start, weights=False).data.get("decided", {})
    return found


def _saved(start: Path) -> run_checkpoint.Checkpoint:
    """Return a checkpoint; where a node has not got it, what rank 0 read of it, without weights:
    the ledger has them."""

    def ask() -> dict[str, Any]:
        found = run_checkpoint.load(start, weights=False)
        slices = None if found.slices is None else str(found.slices)
        return {"step": found.step, "data": found.data, "config": found.config, "slices": slices}

    told = first(ask)
    slices = None if told["slices"] is None else Path(told["slices"])
    small = run_checkpoint.Checkpoint(**{**told, "walker": {}, "slices": slices})
    return run_checkpoint.load(start) if start.is_dir() else small


class _Loop:
    """A run in progress."""

    walker: Walker
    step_forecast: StepForecast
    progress: Progress
    metrics: MetricsLog
    evaluations: MetricsLog
    skipped: MetricsLog
    elastic: Elastic | None = None
    """The run's host among ranks that come and go."""
    decided: Mapping[str, Any] = {}
    """The settings that the machine decided, by name; a resumed run keeps them."""
    skips: list[int]
    """The steps before which a batch was left out, as often as one was; on every rank as in rank
    0's log."""

    def __init__(
        self,
        run: RunConfig,
        prepared: PreparedRun,
        memory: PeakMemory,
        stop: Stop,
        weights: str,
        start: run_start.Start,
        callbacks: Sequence[Callback],
    ) -> None:
        self.config = run
        self.prepared = prepared
        self.memory = memory
        self.stop = stop
        self.callbacks = callbacks
        self.weights = weights
        """The digest of the weights that the run begins from: see
        :func:`blockwalk.tiers.model_folder.identity.weights_digest`."""
        self.identity = identity(run, prepared)
        """The parts that the examples are made of: see :mod:`blockwalk.train.data_identity`."""
        self.total = prepared.total
        self.output_dir = Path(run.output_dir)
        self.start = start
        self.saved: run_checkpoint.Checkpoint | None = None
        self.changes: list[str] = []
        """The settings that differ from those of the run that is gone on with, as ``name: old →
        new``."""
        self.notes: list[str] = []
        """Sentences about what differs from the run that is gone on with."""
        self.held_out = "" if prepared.held_out is None else prepared.held_out.fingerprint()
        """The digest of the held-out records; empty where there are none."""
        self.evaluated = -1
        """The step of the last evaluation, on every rank as in rank 0's log."""
        self.stopped_by: signal.Signals | None = None
        self.answers_count = False
        """True where several ranks tell one another what their callbacks answered: one of them has
        some."""

    def read(self, saved: run_checkpoint.Checkpoint) -> None:
        """Take over what a checkpoint has beside weights.

        Raises:
            ValueError: settings, data or the model's weights differ from those that the saved state
                builds on.
        """
        settings = self.config.to_mapping()
        began = saved.data.get("weights", self.weights)
        if self.weights != began and not first(lambda: same_weights(self.config.model, began)):
            raise ValueError(
                f"{self.config.model} holds other weights, or another configuration, than when"
                " this run began (content"
                f" {began}, now {self.weights}): put those back, or begin a new run in another"
                " output_dir"
            )
        if not self.prepared.batches.continues(saved.data["batches"]):
            changed = differences(
                saved.data.get("identity", {}),
                self.identity,
                saved.config["data"],
                settings["data"],
            )
            raise ValueError(
                "cannot resume: the training data are not those that the run began with:"
                f" {'; '.join(changed)}. Put those back,"
                " or begin a new run in another output_dir"
            )
        self.changes = changed_settings(
            saved.config,
            settings,
            any_method=saved.slices is not None and not self.config.plan.zeroth_order,
            same_model="weights" in saved.data,
            same_data=True,
        )
        self.notes = [f"changed since the checkpoint: {change}" for change in self.changes]
        if saved.data["batches"]["data"] != self.prepared.rows.fingerprint():
            self.notes.append(
                "the chat template writes the date of the day: the same records have other tokens"
                " than up to step"
                f" {saved.step}"
            )
        before = saved.data.get("held_out", "")
        if before and self.held_out and before != self.held_out:
            name = (
                joined(self.config.data.eval)
                or self.config.data.task
                or f"share of {joined(self.config.data.train)}"
            )
            self.notes.append(
                f"data.eval ({name}) holds other records, or other tokens of them, than up to"
                f" step {saved.step} (content"
                f" {before}, now {self.held_out}): losses on them are not compared with those"
                " before"
            )
        self.prepared.batches.load_state_dict(saved.data["batches"])
        self.saved = saved

    def begin(self, walker: Walker, step_forecast: StepForecast) -> None:
        """Load the checkpoint's weights, then make the folder this run's: nothing refuses the run
        from here on."""
        self.walker = walker
        self.step_forecast = step_forecast
        start = self.start
        if self.saved is not None:
            self._load(self.saved)
        rank = walker.ranks.rank
        if rank == 0:
            start.clear()
        if walker.ledger is not None:
            walker.ledger.rename(self.output_dir / LEDGER)
        first(lambda: sweeping.sweep(self.output_dir))  # the other ranks write nothing meanwhile
        own = Path() if rank == 0 else Path("logs") / f"rank-{rank:04d}"
        before = Path(start.checkpoint).parent / own if start.checkpoint else None
        atomic_files.make_folder(self.output_dir / own)

        def log(name: str) -> MetricsLog:
            path = self.output_dir / own / name
            return MetricsLog(path, source=before and before / name, keep_until=walker.steps_done)

        self.metrics = log("metrics.jsonl")
        self.evaluations = log("evaluations.jsonl")
        if rank == 0:
            self._note_changes(before)
        self.evaluated = first(self._evaluated)
        self.best = Best(**first(lambda: dataclasses.asdict(self._best_before())))
        name = "skipped.jsonl"
        left_out = before / "skipped.jsonl" if before else Path()
        lines = first(lambda: [line["step"] for line in whole_lines(left_out)])
        self.skips = [step for step in lines if step <= walker.steps_done]
        if self.config.skip_nonfinite or lines:
            self.skipped = log(name)
        if self.saved is not None and walker.ledger is not None:
            # Steps that the ledger has and the checkpoint not yet; a kill may have come before
            # their lines.
            for entry in walker.ledger.entries[self.saved.step :]:
                for _ in range(self.skips.count(entry.step)):
                    self.prepared.next_batch(self.config.data.label_scores)
                _, tokens = self.prepared.next_batch(self.config.data.label_scores)
                if entry.step > self.metrics.last_step:
                    self.metrics.write(_line(entry, tokens))
        self.notes += self._lost_lines()

    def _lost_lines(self) -> list[str]:
        """Return a sentence for each log that lacks lines from before the checkpoint."""
        if self.saved is None or self.walker.ranks.rank:  # rank 0 alone logs evaluations
            return []
        notes = []
        expected = {
            "metrics.jsonl": self.saved.step,
            "evaluations.jsonl": self.saved.data.get("evaluated", -1),
        }
        for log in (self.metrics, self.evaluations):
            last = expected[log.path.name]
            name = log.path.name
            if log.last_step < last:
                notes.append(
                    f"{name} lacks lines up to step {last}, which the checkpoint was saved after:"
                    " they were lost"
                )
            elif (
                name == "metrics.jsonl"
                and last > 0
                and log.first_line is not None
                and log.first_line["step"] > 1
            ):
                notes.append(
                    f"{name} begins with step {log.first_line['step']}: the lines before were lost"
                )
        return notes

    def _note_changes(self, before: Path | None) -> None:
        """Keep what resumed runs changed, by step, where the model card finds it."""
        changed = MetricsLog(
            self.output_dir / run_checkpoint.CHANGED,
            source=before and before / run_checkpoint.CHANGED,
            keep_until=self.walker.steps_done,
        )
        if self.changes:
            changed.write({"step": self.walker.steps_done, "changes": self.changes})
        changed.close()
        if changed.last_line is None:
            changed.path.unlink()

    def _evaluated(self) -> int:
        """Return the step of the last evaluation, −1 where there is none. Raises Damaged where the
        outcome could not tell of it."""
        with atomic_files.reading(self.output_dir / "evaluations.jsonl"):
            for line in (self.evaluations.first_line, self.evaluations.last_line):
                if line is not None:
                    Evaluation.of(line)
        return self.evaluations.last_step

    def _best_before(self) -> Best:
        """Return the best evaluation that the log has, of this run up to now. Raises Damaged where
        the log does not tell."""
        path = self.evaluations.path
        with atomic_files.reading(path):
            return Best.of(whole_lines(path), self.config.keep_best or "loss", self.held_out)

    def _load(self, saved: run_checkpoint.Checkpoint) -> None:
        """Go on from a checkpoint's weights."""
        if saved.slices is not None:
            self.walker.load_state(saved.slices)
        elif (
            saved.walker and not self.config.plan.trainable.on_disk
        ):  # else it has a store of its own
            self.walker.load_state_dict(saved.walker)
        # its tensors are maps of a checkpoint that this run removes in its time
        self.saved = dataclasses.replace(saved, walker={})
        if self.walker.ranks.world > 1:
            # ranks may stand at different steps; from here on they have the same
            self.walker.flush()

    def run(self, progress: Progress) -> Outcome:
        """Step until the last step or a signal; save at the end either way."""
        self.progress = progress
        done = self.walker.steps_done
        self.walker.ranks.own_stop_signal = lambda: self.stop.asked
        if self.saved is not None:
            progress.say(f"resumed at step {done}")
        for note in [*self.notes, *self.walker.notes()]:
            progress.say(f"note: {note}")
        saved_at = -1 if self.saved is None else self.saved.step
        ranks = self.walker.ranks
        if ranks.world > 1:
            self.answers_count = any(
                count for (count,) in ranks.exchange([float(len(self.callbacks))])
            )
        self._tell("begin", self.step_forecast.values())
        self._stop_early(again=True)
        if not self._agreed():
            self._evaluate()
            due = self.saved is None or (
                saved_at != done and (self._is_best or self._due(self.config.save_every))
            )
            if due and self.walker.ledger is not None:
                self._save()  # without weights at first: from here on the ledger has every step
                saved_at = done
        while self.walker.steps_done < self.total and not self._agreed():
            if not self._step():
                continue
            done = self.walker.steps_done
            if done < self.total:
                self._evaluate()
            if self._is_best or self._due(self.config.save_every):
                self._save()
                saved_at = done
        if self.elastic is not None:
            self.elastic.announce(ended=True)
        if saved_at != done:
            self._save()
        self.walker.wait_saved()
        self._prune()  # also what a kill right after the last checkpoint left
        first(
            lambda: sweeping.sweep(self.output_dir)
        )  # weights of a run that this one has replaced
        if self.stopped_by is None:
            self._evaluate()
            self._prune()  # the best checkpoint may be the last one now
        self.metrics.close()
        self.evaluations.close()
        outcome = self._outcome()
        self._tell("end", {"saved_to": str(outcome.saved_to)})
        return outcome

    def _tell(self, name: Any, values: Mapping[str, Any]) -> None:
        """Tell the callbacks of an event; one that answers True, on any rank, makes this step the
        last of all."""
        event = Event(name, self.walker.steps_done, values, self.walker, self.config)
        answers = [callback(event) for callback in self.callbacks]
        ends = any(answer is True for answer in answers)
        if self.answers_count:
            ends = any(told for (told,) in self.walker.ranks.exchange([float(ends)]))
        if ends:
            self.total = self.walker.steps_done

    def _agreed(self, *, heard: bool = True) -> bool:
        """Whether a signal ends the run: one that all ranks know of: over ranks it is told within a
        step (``heard``)."""
        ranks = self.walker.ranks
        if ranks.world == 1:
            asked = self.stop.asked
        elif heard:
            asked = ranks.stop_signal_of_any_rank
        else:
            asked = int(max(values[0] for values in ranks.exchange([self.stop.asked])))
        if asked:
            self.stopped_by = signal.Signals(asked)
        return self.stopped_by is not None

    def _due(self, every: int) -> bool:
        return every > 0 and self.walker.steps_done % every == 0

    def _step(self) -> bool:
        """Return whether the next batch made a step; it was left out where it did not."""
        if self.elastic is not None:
            self.elastic.position = (self.prepared.batches.epoch, self.prepared.batches.position)
        batch, tokens = self.prepared.next_batch(self.config.data.label_scores)
        self.step_forecast.before_step(self.walker, self.walker.steps_done + 1, self.total)
        try:
            result = self.walker.step(batch)
        except FloatingPointError as error:
            self.walker.wait_saved()  # the last checkpoint may be under way
            if len(self.skips) >= self.config.skip_nonfinite:
                raise
            self._skip(error)
            return False
        self.step_forecast.after_step(self.walker, result.seconds)
        if self.elastic is not None:
            compare(self.walker, self.elastic)
        peak = self.memory.take()
        line = _line(result, tokens)
        line["tokens_per_second"] = line["tokens"] / result.seconds
        line |= {"seconds": result.seconds, "peak_bytes": peak}
        line["bytes_moved"] = {str(lane): nbytes for lane, nbytes in result.bytes.items()}
        self.metrics.write(line)
        figures = {
            name: line[name] for name in ("loss", "seconds", "tokens_per_second", "peak_bytes")
        }
        self.progress.step(result.step, **figures)
        self._tell("step", line)
        return True

    def _skip(self, error: FloatingPointError) -> None:
        """Note that the batch just tried is left out, where a resumed run finds it: before a ledger
        can have the step."""
        step = self.walker.steps_done + 1
        self.skips.append(step)
        self.skipped.write({"step": step, "reason": str(error)})
        self.skipped.sync()
        many = f"{len(self.skips)} of skip_nonfinite: {self.config.skip_nonfinite}"
        self.progress.say(f"note: a batch is left out ({many}): {error}")

    def _evaluate(self) -> None:
        """Evaluate where it is due and not in the log yet: before the first step, every
        ``eval_every``, after the last. A signal ends it between two batches, and the resumed run
        makes it."""
        step = self.walker.steps_done
        every = self.config.eval_every
        due = (
            step == self.total or (every > 0 and step % every == 0)
            if step
            else self.config.eval_first
        )
        if self.prepared.held_out is None or not due or self.evaluated == step:
            return

        def watch(done: int) -> None:
            show(done)
            if self._agreed(heard=False):
                raise _Interrupted

        began = time.perf_counter()
        try:
            with self.progress.evaluating(len(self.prepared.held_out.rows)) as show:
                found = self.prepared.held_out.evaluate(self.walker, watch)
        except _Interrupted:
            return
        seconds = time.perf_counter() - began
        line = {
            "step": step,
            **dataclasses.asdict(found),
            "seconds": seconds,
            "records": self.held_out,
        }
        if self.walker.ranks.rank == 0:
            self.evaluations.write(line)
            self.evaluations.sync()  # it cannot be made any more once the ledger has gone on
        self.evaluated = step
        self.best = Best(**first(lambda: dataclasses.asdict(self.best.after(line))))
        self.progress.say(f"evaluation at step {step}: {found}")
        self._tell("evaluation", line)
        self._stop_early()

    def _stop_early(self, *, again: bool = False) -> None:
        """Make this step the last where the evaluations since the best one are as many as
        ``early_stopping`` says. ``again``: the run may have ended so before."""
        done = self.walker.steps_done
        if 0 < self.config.early_stopping <= self.best.without and done < self.total:
            self.total = done
            since = f"{counted(self.best.without, 'evaluation')} since the best one ({self.best})"
            way_on = (
                f"; to go on, set early_stopping above {self.best.without}, or to 0"
                if again
                else ""
            )
            self.progress.say(f"early stopping after step {done}: {since}{way_on}")

    def _save(self) -> None:
        self._write_checkpoint()
        self._tell(
            "checkpoint",
            {"saved_to": str(run_checkpoint.path_of(self.output_dir, self.walker.steps_done))},
        )

    def _write_checkpoint(self) -> None:
        """A checkpoint, with every line about the steps before it on the disk.

        Weights that a zeroth-order run keeps on disk are not written again: with the ledger they
        are saved in every step."""
        on_disk = self.walker.ledger is not None and self.walker.plan.trainable.on_disk
        self.metrics.sync()
        data = {
            "batches": self.prepared.batches.state_dict(),
            "weights": self.weights,
            "identity": self.identity,
            "run": self.start.run,
            "held_out": self.held_out,
            "stops": list(self.prepared.rows.report.stops),
            "evaluated": self.evaluated,
            **({"decided": dict(self.decided)} if self.decided else {}),
        }
        settings = self.config.to_mapping()
        step = self.walker.steps_done
        if self.walker.ledger is None:
            path = run_checkpoint.path_of(self.output_dir, step)
            made = run_checkpoint.Checkpoint(step, {"steps_done": step}, data, settings)
            beside = {run_checkpoint.SCALARS: run_checkpoint.scalars_text(made)}
            self.walker.save_state(path, wait=not self.walker.plan.sharded, beside=beside)
            self._prune()
            return
        weights = self.walker.steps_done > 0 and not on_disk
        state = self.walker.live_state() if weights else {}
        if self.walker.ranks.rank:
            if weights:
                self.walker.join_gathers()
            return
        made = run_checkpoint.Checkpoint(
            step, state, data, settings, ledger=self.walker.ledger.position
        )
        run_checkpoint.save(
            self.output_dir, made, keep=self.config.keep_checkpoints, best=self._kept
        )

    def _prune(self) -> None:
        """Remove old checkpoints; the one that is being written counts once it is whole."""
        if self.walker.ranks.rank == 0:
            run_checkpoint.prune(self.output_dir, self.config.keep_checkpoints, self._kept)

    @property
    def _is_best(self) -> bool:
        """Whether the evaluation at this step is the best one, and its checkpoint is to be kept."""
        return bool(self.config.keep_best) and self.best.step == self.walker.steps_done

    @property
    def _kept(self) -> str:
        """The name of the checkpoint that stays although newer ones follow; empty: none."""
        return self.best.name if self.config.keep_best else ""

    def _next_command(self) -> str:
        """Return the command line that shows what was trained: a chat where conversations were
        learnt; empty where no short prompt fits."""
        folder = shlex.quote(os.fspath(self.output_dir))
        weights = ""
        if (
            self._kept
            and not self._is_best
            and self.config.adapters is not None
            and self.walker.ledger is None
        ):
            weights = f" --adapter {shlex.quote(os.fspath(self.output_dir / self._kept))}"
        if self.prepared.rows.report.turn_ends:
            return f"blockwalk chat {folder}{weights}"
        prompt = prompt_layout.example(self.config.data, "Hello")
        return (
            ""
            if prompt is None
            else f"blockwalk generate {folder}{weights} --prompt {shlex.quote(prompt)}"
        )

    def _outcome(self) -> Outcome:
        saved_to = self.output_dir / ("model" if self.config.adapters is None else "adapter")
        if self.stopped_by is not None:
            saved_to = self.output_dir / f"checkpoint-{self.walker.steps_done:06d}"
        else:
            first_rank = self.walker.ranks.rank == 0  # the others bring what it writes
            replaces = self.start.may_replace(saved_to)
            with (
                atomic_files.atomic_folder(saved_to, replace=replaces)
                if first_rank
                else nullcontext(saved_to) as folder
            ):
                if first_rank:
                    marks.write(folder, self.start.run)
                self.walker.save_pretrained(folder)
                if first_rank:
                    for name, file in self.prepared.tokenizer_files.items():
                        (folder / name).parent.mkdir(exist_ok=True)
                        (folder / name).write_bytes(file.data)
        losses = [line["loss"] for line in whole_lines(self.metrics.path)]
        ends = loss_ends(losses) if losses else (None, None)
        before = self.evaluations.first_line
        after = self.evaluations.last_line
        if before and after and before.get("records") != after.get("records"):
            before = None  # of other records
        best = f"{self.output_dir / self._kept} ({self.best})" if self._kept else ""
        if best:
            best += self.best.beside(before, self.walker.steps_done)
        return Outcome(
            steps=self.walker.steps_done,
            first_loss=ends[0],
            last_loss=ends[1],
            before=Evaluation.of(before) if before and before["step"] == 0 else None,
            after=Evaluation.of(after) if after and after["step"] == self.total else None,
            peak_bytes=self.memory.highest,
            saved_to=saved_to,
            stopped_by=self.stopped_by,
            resident_bytes=peak_resident_bytes(),
            next_command="" if self.stopped_by is not None else self._next_command(),
            best=best,
            compared=tuple(self.step_forecast.compared(_grown(self.walker, self.memory.highest))),
        )


def _line(result: StepResult | LedgerEntry, batch: Batch) -> dict[str, Any]:
    """Return the line of ``metrics.jsonl`` about a step, whoever took it: one just done, or one
    that a ledger has.

    ``tokens`` are those read, padding left out; ``loss_tokens`` those that the loss is a mean over;
    values that an estimator does not have are left out."""
    line = {
        "step": result.step,
        "loss": result.loss,
        "learning_rate": result.learning_rate,
        "tokens": tokens_read(batch),
        "loss_tokens": loss_tokens(batch),
        "grad_norm": None if isinstance(result, LedgerEntry) else result.grad_norm,
        "projected_grad": result.projected_grad,
    }
    return {name: value for name, value in line.items() if value is not None}


class _Interrupted(Exception):
    """A signal came while held-out records were evaluated."""
