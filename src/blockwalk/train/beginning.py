"""The beginning of a run: everything that is read, compared and refused before its model is opened.
Nothing is written."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockwalk.checkpoints import run_checkpoint, run_start
from blockwalk.checkpoints.changed_settings import by_cause, changed_settings
from blockwalk.checkpoints.ledger import NAME as LEDGER
from blockwalk.checkpoints.run_checkpoint import Checkpoint
from blockwalk.checkpoints.run_start import Start
from blockwalk.cutting import verify
from blockwalk.models.places import adapter_paths, data_paths, model_paths, refuse_overlap
from blockwalk.plan.data_source import joined, names_of
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.settings import override
from blockwalk.plan.words import counted, is_or_are
from blockwalk.ranks.agreement import facts_of, require_agreement
from blockwalk.ranks.forward_sharing import ChangingRanks, changing_ranks
from blockwalk.ranks.ranks import first
from blockwalk.report.capacity import check_budget, check_memory
from blockwalk.report.disk_room import check_disks
from blockwalk.system.paths import StrPath
from blockwalk.tiers.model_folder.identity import WeightsInUse, same_weights, weights_digest
from blockwalk.train.data_identity import differences, identity
from blockwalk.train.prepared_run import PreparedRun, prepare, taken_up


@dataclass(frozen=True, slots=True)
class Beginning:
    """A run that nothing refuses any more, before its model is opened."""

    config: RunConfig
    """Its configuration, with the settings that the machine decided."""
    prepared: PreparedRun
    start: Start
    decided: Mapping[str, Any]
    """The settings that the machine decided, by name; a resumed run keeps them."""
    files: WeightsInUse
    """The files of the model, on this rank's machine."""
    weights: str
    """The digest of the weights that the run begins from: see
    :func:`blockwalk.tiers.model_folder.identity.weights_digest`."""
    identity: Mapping[str, Any]
    """The parts that the examples are made of: see :mod:`blockwalk.train.data_identity`."""
    records: str
    """The digest of the held-out records; empty where there are none."""
    resumed: Resumed | None
    """The checkpoint that is gone on with; None: a fresh run."""
    host: ChangingRanks | None
    """The run's host among ranks that come and go."""
    reference: str = ""
    """The digest of the reference's log-probabilities, where the objective has one."""

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint that a run goes on with, and what differs from the run that wrote it."""

    checkpoint: Checkpoint
    changes: Sequence[str]
    """The settings that differ, as ``name: old → new``."""
    notes: Sequence[str]
    """Sentences about all that differs."""


def begin(run: RunConfig, trace: StrPath | None) -> Beginning:
    """Read and check everything that a run needs before its model is opened.

    Args:
        run: with its frozen codec chosen.
        trace: the file that the run will write its timeline to.

    Raises:
        ValueError: settings or data that cannot be trained with, or that do not go on with the
            checkpoint.
        DoesNotFit: the plan needs more than its budget, or than this machine has.
    """
    start = _start(run, trace)
    host = None
    if run.elastic:
        host = changing_ranks(run.elastic, run.start_timeout, joins=False)
    decided: dict[str, Any] = {}
    if start.checkpoint is not None:
        checkpoint = Path(start.checkpoint)
        decided = first(lambda: _decided(checkpoint))
    run = taken_up(run, decided)
    prepared = prepare(run)
    forecast = prepared.foreseen
    _require_agreement(run, prepared)
    prepared = _with_stages_of_rank_0(prepared)
    check_budget(run, forecast)
    weights = first(lambda: weights_digest(run.model))
    choices = forecast.choices()
    run = dataclasses.replace(run, plan=override(run.plan, choices))
    beginning = Beginning(
        run,
        prepared,
        start,
        decided={**decided, **choices},
        files=WeightsInUse.of(run.model, weights),
        weights=weights,
        identity=identity(run, prepared),
        records="" if prepared.held_out is None else prepared.held_out.fingerprint(),
        resumed=None,
        host=host,
    )
    if start.checkpoint is not None:
        resumed = _resume(beginning, _saved(Path(start.checkpoint)))
        beginning = dataclasses.replace(beginning, resumed=resumed)
    first(lambda: check_memory(run, forecast, prepared.held_bytes))
    steps_done = 0 if beginning.resumed is None else beginning.resumed.checkpoint.step
    steps = prepared.total - steps_done
    first(lambda: check_disks(run, forecast, steps, prepared.map_bytes))
    return beginning


def _start(run: RunConfig, trace: StrPath | None) -> Start:
    """Return where the run starts, as rank 0 sees the folder.

    Raises:
        ValueError: files stand in the run's way.
    """
    folder = (run.output_dir, run.resume_from_checkpoint, run.overwrite_output_dir)
    start = Start(**first(lambda: dataclasses.asdict(run_start.prepare(*folder))))
    first(lambda: _refuse_places(run, start, trace))
    return start


def _refuse_places(run: RunConfig, start: Start, trace: StrPath | None) -> None:
    """Refuse a run that would write over what it reads, or over trained weights that it did not
    make.

    Raises:
        ValueError: it would; the message names the path, and the setting to change.
    """
    output_dir = Path(run.output_dir)
    result = "model" if run.adapters is None else "adapter"
    sources = (*names_of(run.data.train), *names_of(run.data.eval))
    data = [path for source in sources for path in data_paths(source)]
    inputs = {"the model": model_paths(run.model), "a data file": data}
    if run.lora is not None and run.lora.from_:
        inputs["the adapter of lora.from"] = adapter_paths(run.lora.from_)
    refuse_overlap(output_dir / result, inputs, "output_dir")
    names = (*run_checkpoint.LOGS, LEDGER, run_checkpoint.REPLACED)
    for path in (*(output_dir / name for name in names), *map(Path, start.in_the_way)):
        refuse_overlap(path, inputs, "output_dir", inside=False)
    if trace:
        refuse_overlap(trace, inputs, "--trace", inside=False)
    folders = [folder for source in sources if (folder := Path(source).expanduser()).is_dir()]
    if output_dir.is_dir() and any(os.path.samefile(folder, output_dir) for folder in folders):
        raise ValueError(
            f"{output_dir} is a folder of records, and the run's logs would be read as some:"
            " choose another output_dir"
        )
    run_start.refuse_result(start, result)


def _require_agreement(run: RunConfig, prepared: PreparedRun) -> None:
    """Raise ValueError where ranks have other settings or data than the others."""
    facts = {
        **facts_of(run.shared()),
        "data.train": prepared.rows.fingerprint(),
        "the model's anatomy": prepared.anatomy["digest"],
    }
    if prepared.held_out is not None:
        facts["data.eval"] = prepared.held_out.encoded.fingerprint()
    require_agreement(facts)


def _with_stages_of_rank_0(prepared: PreparedRun) -> PreparedRun:
    """Return the run with the stages that rank 0 has settled: another machine foresees other
    seconds."""
    if prepared.plan.mesh.pipeline == 1:
        return prepared
    blocks = first(lambda: list(prepared.plan.pipeline.blocks))
    plan = override(prepared.plan, {"pipeline.blocks": blocks})
    return dataclasses.replace(prepared, plan=plan)


def _decided(checkpoint: Path) -> dict[str, Any]:
    """Return the settings that the machine decided for the run of a checkpoint, by name."""
    decided: dict[str, Any] = run_checkpoint.load(checkpoint, weights=False).data.get("decided", {})
    return decided


def _saved(path: Path) -> Checkpoint:
    """Return a checkpoint; where a node has not got it, what rank 0 read of it, without weights:
    the ledger has them."""

    def scalars() -> dict[str, Any]:
        saved = run_checkpoint.load(path, weights=False)
        slices = None if saved.slices is None else str(saved.slices)
        return {"step": saved.step, "data": saved.data, "config": saved.config, "slices": slices}

    shared = first(scalars)
    if path.is_dir():
        return run_checkpoint.load(path)
    slices = None if shared["slices"] is None else Path(shared["slices"])
    return Checkpoint(**{**shared, "walker": {}, "slices": slices})


def _resume(beginning: Beginning, saved: Checkpoint) -> Resumed:
    """Put the data where a checkpoint left them, and return what differs from the run that wrote
    it.

    Raises:
        ValueError: settings, data or the model's weights differ from those that the saved state
            builds on.
    """
    config = beginning.config
    prepared = beginning.prepared
    _require_same_weights(beginning, saved)
    _require_same_anatomy(beginning, saved)
    _require_same_data(beginning, saved)
    changes = changed_settings(
        saved.config,
        config.to_mapping(),
        any_method=saved.slices is not None and not config.plan.estimator.facts.ledger,
        same_model="weights" in saved.data,
        same_data=True,
    )
    causes = by_cause(changes, config.to_mapping())
    notes = [f"changed since the checkpoint: {cause}" for cause in causes]
    place = saved.data["batches"]
    follow = config.data.appended == "follow"
    if follow and (more := prepared.batches.appended(place)):
        notes.append(
            f"{counted(more, prepared.rows.noun)} {is_or_are(more)} new in data.train since step"
            f" {saved.step}: they come behind the others of epoch {place['epoch'] + 1}"
            " (data.appended: follow)"
        )
    elif place["data"] != prepared.rows.fingerprint():
        notes.append(
            "the chat template writes the date of the day: the same records have other tokens"
            f" than up to step {saved.step}"
        )
    records = beginning.records
    saved_records = saved.data.get("held_out", "")
    if saved_records and records and saved_records != records:
        data = config.data
        name = joined(data.eval) or data.task or f"share of {joined(data.train)}"
        notes.append(
            f"data.eval ({name}) holds other records, or other tokens of them, than up to step"
            f" {saved.step} (content {saved_records}, now {records}): losses on them are not"
            " compared with those before"
        )
    prepared.batches.load_state_dict(place, follow=follow)
    return Resumed(saved, changes, notes)


def _require_same_weights(beginning: Beginning, saved: Checkpoint) -> None:
    """Raise ValueError where the model is not the one that the saved run began from."""
    model = beginning.config.model
    weights = beginning.weights
    saved_weights = saved.data.get("weights", weights)
    if weights != saved_weights and not first(lambda: same_weights(model, saved_weights)):
        raise ValueError(
            f"{model} holds other weights, or another configuration, than when this run began"
            f" (content {saved_weights}, now {weights}): put those back, or begin a new run in"
            " another output_dir"
        )


def _require_same_anatomy(beginning: Beginning, saved: Checkpoint) -> None:
    """Raise ValueError where another way to walk the model is known now than when the saved run
    began, by the same code from the same configuration."""
    anatomy = beginning.prepared.anatomy
    saved_anatomy = saved.data.get("anatomy", anatomy)
    if saved_anatomy["key"] == anatomy["key"] and saved_anatomy != anatomy:
        raise ValueError(
            f"{verify.file_of(anatomy['key'])} says how {beginning.config.model} is walked, and it"
            f" says something else than when this run began (content {saved_anatomy['digest']}, now"
            f" {anatomy['digest']}): remove that file, which is then made again"
        )


def _require_same_data(beginning: Beginning, saved: Checkpoint) -> None:
    """Raise ValueError where the batches to come are not those of the saved run."""
    batches = beginning.prepared.batches
    place = saved.data["batches"]
    if batches.continues(place):
        return
    more = batches.appended(place)
    if more and beginning.config.data.appended == "follow":
        return
    follow = ""
    if more:
        noun = beginning.prepared.rows.noun
        follow = f"set data.appended: follow, which learns the {counted(more, f'new {noun}')}, or "
    changed = differences(
        saved.data.get("identity", {}),
        beginning.identity,
        saved.config["data"],
        beginning.config.to_mapping()["data"],
        names_of(beginning.config.data.train),
    )
    raise ValueError(
        "cannot resume: the training data are not those that the run began with:"
        f" {'; '.join(changed)}. Put those back, or {follow}begin a new run in another output_dir"
    )
