"""The training loop: steps, evaluations and checkpoints, until a run ends. A step is the walker's
work; this decides when.

output_dir/
    config.yaml            the resolved configuration
    metrics.jsonl          one line a step
    evaluations.jsonl      one line an evaluation
    skipped.jsonl          with skip_nonfinite: one line a batch that was left out
    reference.jsonl        an objective's reference: see blockwalk.train.reference
    changed.jsonl          one line a resumed run that changed settings
    ledger.jsonl           zeroth order: every scalar that a step's update reads
    checkpoint-000123/     see blockwalk.checkpoints.run_checkpoint
    adapter/ or model/     the trained weights, at the end
    .blockwalk             the run's name: the mark of a folder that a run made
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockwalk.checkpoints import run_checkpoint, sweeping
from blockwalk.checkpoints.ledger import NAME as LEDGER
from blockwalk.engine.frozen_codec import already_said, refuse_rounded
from blockwalk.models.model_source import model_source
from blockwalk.numerics.device import is_cpu, peak_on
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.words import counted
from blockwalk.program.program import human_bytes
from blockwalk.ranks.ranks import first
from blockwalk.report.advice import next_plan
from blockwalk.report.html import loss_ends
from blockwalk.report.step_forecast import StepForecast
from blockwalk.system import atomic_files, row_modules
from blockwalk.system.atomic_files import whole_lines
from blockwalk.system.heap import give_back
from blockwalk.system.out_of_memory import OutOfMemory, is_out_of_memory
from blockwalk.system.process_memory import PeakMemory, peak_resident_bytes, process_bytes
from blockwalk.system.terminal import steady
from blockwalk.train import config, elastic, reference, result
from blockwalk.train.baseline import with_baseline
from blockwalk.train.beginning import Beginning, begin
from blockwalk.train.callbacks import Callback, EventName, Listeners, pushes, trackers
from blockwalk.train.ending import Ending
from blockwalk.train.evaluation import Evaluation
from blockwalk.train.frozen_codec import settled
from blockwalk.train.logs import Logs, catch_up, metrics_line, notes_on_lost_lines, open_logs
from blockwalk.train.opening import opening_lines
from blockwalk.train.outcome import Outcome
from blockwalk.train.progress import Progress
from blockwalk.train.run_checkpoints import RunCheckpoints
from blockwalk.train.run_evaluations import RunEvaluations
from blockwalk.train.stop_signals import Stop, stop_signals
from blockwalk.walk.walker import Walker


def train(
    run: RunConfig,
    *,
    callbacks: Iterable[Callback] = (),
    trace: str | Path | None = None,
    verbose: bool = False,
) -> Outcome:
    """Train a configuration that has been read: see :func:`blockwalk.train.train`."""
    listeners = (*callbacks, *trackers(run.report_to), *pushes(run.push_to_hub))
    if not run.model or not (run.data.train or run.data.task):
        missing = "data.train" if run.model else "model"
        raise ValueError(f"{missing} is missing; nothing can be trained without it")
    run = dataclasses.replace(run, model=model_source(run.model))
    run, codec_lines = settled(run)
    refuse_rounded(run.model, run.plan, run.adapters)
    output_dir = Path(run.output_dir)
    with steady(), PeakMemory() as memory, stop_signals() as stop, ExitStack() as folder:
        first(lambda: folder.enter_context(sweeping.one_run(output_dir)))
        beginning = begin(run, trace)
        reference.require(beginning)
        scratch = output_dir / run_checkpoint.SCRATCH
        atomic_files.make_folder(scratch)
        prepared = beginning.prepared.put_away(scratch)
        beginning = dataclasses.replace(beginning, prepared=prepared)
        give_back()
        opened_at = process_bytes()
        with _open_walker(beginning, scratch) as walker, _step_named(walker):
            forecast = prepared.foreseen
            walker.reserve(forecast.program.shape)
            step_forecast = StepForecast.of(forecast, prepared.usual, before=opened_at)
            stop.noted = True
            beginning = _take_folder(beginning, walker)
            beginning = _with_reference(beginning, walker, stop)
            prepared = beginning.prepared
            logs = open_logs(beginning, walker)
            evaluations = RunEvaluations.begin(beginning, logs.evaluations)
            catch_up(beginning, walker, logs)
            if walker.ranks.rank == 0:
                settings = config.dump(beginning.config).encode()
                atomic_files.write_bytes(output_dir / "config.yaml", settings)
                row_modules.remember(output_dir)
                step_forecast.write(output_dir, trace)
            if beginning.host is not None:
                elastic.let_ranks_join(beginning, walker)
            with Progress(
                prepared.total,
                done=walker.steps_done,
                log_every=run.log_every,
                foreseen=step_forecast.process_bytes,
                beyond=step_forecast.beyond,
            ) as progress:
                if beginning.host is not None:
                    beginning.host.say = progress.say
                facts = (beginning, step_forecast, opened_at, codec_lines)
                for line in opening_lines(*facts, verbose=verbose):
                    progress.say(line)
                resumed = beginning.resumed
                if verbose and run.data.show_first and resumed is None:
                    progress.show_learnt("first record", prepared.shown)
                saved_at = -1 if resumed is None else resumed.checkpoint.step
                with _failures_explained(beginning, walker, step_forecast, memory, opened_at):
                    return Run(
                        beginning,
                        walker,
                        memory,
                        step_forecast,
                        logs,
                        evaluations,
                        RunCheckpoints(beginning, walker, logs, evaluations, saved_at),
                        Ending(walker, stop, prepared.total),
                        Listeners.of(listeners, walker, beginning.config),
                        progress,
                    ).to_its_end()


def _with_reference(beginning: Beginning, walker: Walker, stop: Stop) -> Beginning:
    """Return the run with the numbers of its objective's reference, where it has one; without them
    where a signal ends the run before all are known."""

    def heard() -> bool:
        return any(any(answer) for answer in walker.ranks.exchange([float(stop.signal)]))

    return reference.attached(beginning, walker, heard)


def _open_walker(beginning: Beginning, scratch: Path) -> Walker:
    plan = beginning.prepared.plan
    with already_said():
        return Walker(
            beginning.config.model,
            plan,
            lora=beginning.config.adapters_at_start,
            workdir=scratch,
            ledger=beginning.start.ledger if plan.estimator.facts.ledger else None,
            sharing=beginning.host,
        )


def _take_folder(beginning: Beginning, walker: Walker) -> Beginning:
    """Load the checkpoint's weights, then make the folder this run's: nothing refuses the run from
    here on. Return the beginning without these weights."""
    if beginning.resumed is not None:
        checkpoint = beginning.resumed.checkpoint
        if checkpoint.slices is not None:
            walker.load_state(checkpoint.slices)
        elif checkpoint.walker and not walker.plan.home.outlives(walker.plan):
            walker.load_state_dict(checkpoint.walker)
        # Its tensors are maps of a checkpoint that this run removes in its time.
        checkpoint = dataclasses.replace(checkpoint, walker={})
        resumed = dataclasses.replace(beginning.resumed, checkpoint=checkpoint)
        beginning = dataclasses.replace(beginning, resumed=resumed)
        if walker.ranks.world > 1:
            # Ranks may stand at different steps; from here on they have the same.
            walker.flush()
    if walker.ranks.rank == 0:
        beginning.start.clear()
    if walker.ledger is not None:
        walker.ledger.rename(beginning.output_dir / LEDGER)
    first(lambda: sweeping.sweep(beginning.output_dir))  # the other ranks write nothing meanwhile
    return beginning


@contextmanager
def _step_named(walker: Walker) -> Iterator[None]:
    """Say of a disk that is full, or fails, and of a file that was cut, at which step it was."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*atomic_files.OF_DISK, errno.EFAULT):
            raise
        cure = "look at the disk"
        if error.errno in atomic_files.NO_ROOM:
            cure = "free some"
        if error.errno == errno.EFAULT:
            cure = "put the whole file back"
        text = (
            f"{error.strerror}, at step {walker.steps_done}; {cure}, and go on with"
            " --resume_from_checkpoint latest"
        )
        raise OSError(error.errno, text, error.filename) from error


@contextmanager
def _failures_explained(
    beginning: Beginning,
    walker: Walker,
    step_forecast: StepForecast,
    memory: PeakMemory,
    opened_at: int,
) -> Iterator[None]:
    """Say of refused memory what was foreseen, what was held, and which plan needs less."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        foreseen = step_forecast.tensor_bytes
        measured = _grown(walker, memory.highest - opened_at)
        shape = step_forecast.forecast.program.shape
        run = beginning.config
        advice = next_plan(run, min(foreseen, measured), shape, device=walker.device.type)
        raise OutOfMemory(
            f"out of memory after {counted(walker.steps_done, 'step')}:"
            f" {human_bytes(foreseen)} of tensors were foreseen at a step's peak,"
            f" {human_bytes(measured)} were held when more was refused{advice}"
        ) from error


def _grown(walker: Walker, process: int) -> int:
    """Return bytes that training took: on a GPU the allocator's own peak, else these of the
    process."""
    if is_cpu(walker.device):
        return max(process, 0)
    return peak_on(walker.device)


@dataclass(frozen=True, slots=True)
class Run:
    """A run in progress."""

    beginning: Beginning
    walker: Walker
    memory: PeakMemory
    step_forecast: StepForecast
    logs: Logs
    evaluations: RunEvaluations
    checkpoints: RunCheckpoints
    ending: Ending
    listeners: Listeners
    progress: Progress

    def to_its_end(self) -> Outcome:
        """Step until the last step or a signal; save at the end either way."""
        self._begin()
        walker = self.walker
        ending = self.ending
        while not ending.reached and not ending.signalled():
            if not self._step():
                continue
            if not ending.reached:
                self._evaluate()
            if self.checkpoints.due():
                self._save()
        if self.beginning.host is not None:
            self.beginning.host.announce(ended=True)
        if self.checkpoints.step != walker.steps_done:
            self._save()
        walker.wait_saved()
        self.checkpoints.prune()  # also what a kill right after the last checkpoint left
        # Weights of a run that this one has replaced go, too.
        first(lambda: sweeping.sweep(self.beginning.output_dir))
        if ending.stopped_by is None:
            self._evaluate()
            self.checkpoints.prune()  # the best checkpoint may be the last one now
        self.logs.metrics.close()
        self.logs.evaluations.close()
        outcome = self._outcome()
        self._tell("end", {"saved_to": str(outcome.saved_to)})
        return outcome

    def _begin(self) -> None:
        """Say what the run goes on with, and do what is due before the first step."""
        walker = self.walker
        resumed = self.beginning.resumed
        walker.ranks.own_stop_signal = lambda: self.ending.stop.signal
        notes: Sequence[str] = ()
        if resumed is not None:
            self.progress.say(f"resumed at step {walker.steps_done}")
            notes = resumed.notes
        lost = notes_on_lost_lines(self.beginning, walker, self.logs)
        for note in (*notes, *lost, *walker.notes()):
            self.progress.say(f"note: {note}")
        self._tell("begin", self.step_forecast.values())
        self._stop_early(resumed=True)
        if self.ending.signalled():
            return
        self._evaluate()
        changed = self.checkpoints.step != walker.steps_done
        due = resumed is None or (changed and self.checkpoints.due())
        if due and walker.ledger is not None:
            # Without weights at first: from here on the ledger has every step.
            self._save()

    def _tell(self, name: EventName, values: Mapping[str, Any]) -> None:
        """Tell the callbacks of an event; where one ends the run, this step is its last."""
        if self.listeners.tell(name, values):
            self.ending.end_here()

    def _step(self) -> bool:
        """Return whether the next batch made a step; it was left out where it did not."""
        walker = self.walker
        prepared = self.beginning.prepared
        host = self.beginning.host
        skipped = self.logs.skipped
        if host is not None:
            host.position = (prepared.batches.epoch, prepared.batches.position)
        batch, tokens = prepared.next_batch(self.beginning.config.data.label_scores)
        self.step_forecast.before_step(walker, walker.steps_done + 1, self.ending.total)
        multiple = prepared.batches.padding_multiple
        try:
            step = walker.step(with_baseline(walker, batch, multiple))
        except FloatingPointError as error:
            walker.wait_saved()  # the last checkpoint may be under way
            if len(skipped.steps) >= skipped.limit:
                raise
            self.progress.say(skipped.add(walker.steps_done + 1, error))
            return False
        self.step_forecast.after_step(walker, step.seconds)
        if host is not None:
            elastic.compare(walker, host)
        line = metrics_line(step, tokens)
        figures = {
            "tokens_per_second": line["tokens"] / step.seconds,
            "seconds": step.seconds,
            "peak_bytes": self.memory.take(),
        }
        line |= figures
        line["bytes_moved"] = {str(lane): nbytes for lane, nbytes in step.bytes.items()}
        if step.bytes_by_axis:
            line["bytes_by_axis"] = step.bytes_by_axis
        self.logs.metrics.write(line)
        self.progress.step(step.step, loss=line["loss"], metrics=step.metrics, **figures)
        self._tell("step", line)
        return True

    def _evaluate(self) -> None:
        """Evaluate where it is due. A signal ends it between two batches, and the resumed run makes
        it."""
        if not self.evaluations.due(self.walker.steps_done, self.ending.total):
            return
        line = self.evaluations.make(
            self.walker, self.progress, lambda: self.ending.signalled(heard=False)
        )
        if line is not None:
            self._tell("evaluation", line)
            self._stop_early(resumed=False)

    def _stop_early(self, *, resumed: bool) -> None:
        """Make this step the last where evaluations have not improved for long."""
        reason = self.evaluations.stop_early(self.walker.steps_done, resumed=resumed)
        if reason and not self.ending.reached:
            self.ending.end_here()
            self.progress.say(reason)

    def _save(self) -> None:
        """Save a checkpoint; the last one is not copied first, for no step comes after it."""
        saved_to = self.checkpoints.save(wait=self.ending.over)
        self._tell("checkpoint", {"saved_to": str(saved_to)})

    def _outcome(self) -> Outcome:
        """Save what was trained, and return the results of the run."""
        walker = self.walker
        ending = self.ending
        evaluations = self.evaluations
        output_dir = self.beginning.output_dir
        next_command = ""
        if ending.stopped_by is not None:
            saved_to = run_checkpoint.path_of(output_dir, walker.steps_done)
        else:
            self.checkpoints.require_same_model()
            saved_to = result.save(self.beginning, walker)
            next_command = result.next_command(self.beginning, walker, evaluations)
        losses = [line["loss"] for line in whole_lines(self.logs.metrics.path)]
        first_loss, last_loss = loss_ends(losses) if losses else (None, None)
        initial, final = evaluations.ends()
        best = ""
        if evaluations.kept:
            note = evaluations.best.beside(initial, walker.steps_done)
            best = f"{output_dir / evaluations.kept} ({evaluations.best}){note}"
        measured = _grown(walker, self.memory.highest)
        return Outcome(
            steps=walker.steps_done,
            first_loss=first_loss,
            last_loss=last_loss,
            before=Evaluation.of(initial) if initial and initial["step"] == 0 else None,
            after=Evaluation.of(final) if final and final["step"] == ending.total else None,
            peak_bytes=self.memory.highest,
            saved_to=saved_to,
            stopped_by=ending.stopped_by,
            resident_bytes=peak_resident_bytes(),
            next_command=next_command,
            best=best,
            compared=tuple(self.step_forecast.compared(measured)),
        )
