"""The events of a run, as a callback is told of them; trackers (``accelerate.tracking``) and the
hub as callbacks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from blockwalk.models import hub
from blockwalk.plan.parsing import did_you_mean, flat
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.table import LOOSE
from blockwalk.ranks.ranks import first
from blockwalk.report import card
from blockwalk.system.terminal import say
from blockwalk.walk.walker import Walker

INSTALL = "pip install 'blockwalk[track]'"


EventName = Literal["begin", "step", "evaluation", "checkpoint", "end"]


@dataclass(frozen=True, slots=True)
class Event:
    """A moment of a run."""

    name: EventName
    step: int
    """Optimizer steps done."""
    values: Mapping[str, Any]
    """begin: the forecast (``forecast.json``); step: its line of ``metrics.jsonl``; evaluation: its
    line of ``evaluations.jsonl``; checkpoint and end: ``saved_to``."""
    walker: Walker
    run: RunConfig


Callback = Callable[[Event], object]
"""A function that is called at each event, on every rank that has it. Where it answers True, on any
rank, the run ends on all of them after this step as if it were the last."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """The callbacks of a run on one rank."""

    callbacks: Sequence[Callback]
    walker: Walker
    run: RunConfig
    on_any_rank: bool
    """Whether ranks tell one another what their callbacks answered: one of them has some."""

    @classmethod
    def of(cls, callbacks: Sequence[Callback], walker: Walker, run: RunConfig) -> Listeners:
        """Return the callbacks of a run; every rank calls this together."""
        counts = walker.ranks.exchange([float(len(callbacks))])
        return cls(callbacks, walker, run, any(count for (count,) in counts))

    def tell(self, name: EventName, values: Mapping[str, Any]) -> bool:
        """Tell the callbacks of an event, and return whether one of them, on any rank, ends the
        run."""
        event = Event(name, self.walker.steps_done, values, self.walker, self.run)
        answers = [callback(event) for callback in self.callbacks]
        ends = any(answer is True for answer in answers)
        if self.on_any_rank:
            ends = any(flag for (flag,) in self.walker.ranks.exchange([float(ends)]))
        return ends


def trackers(names: Sequence[str]) -> list[Callback]:
    """Return the trackers of ``report_to``, made when the run begins: none, all that are installed,
    or those of these names.

    Raises:
        ValueError: an unknown name, one beside *none* or *all*, or a package that is not installed.
    """
    names = tuple(names)
    if names in ((), ("none",)):
        return []
    if len(names) > 1 and not {"none", "all"}.isdisjoint(names):
        raise ValueError(f"report_to is {', '.join(names)}; none and all stand alone")
    from accelerate import tracking

    classes = {str(name): cls for name, cls in tracking.LOGGER_TYPE_TO_CLASS.items()}
    installed = {str(name) for name in tracking.get_available_trackers()}
    if names == ("all",):
        names = tuple(name for name in classes if name in installed)
    for name in names:
        if name not in classes:
            raise ValueError(
                f"report_to: unknown tracker {name!r}{did_you_mean(name, list(classes), LOOSE)};"
                f" known: {', '.join(classes)}"
            )
        if name not in installed:
            raise ValueError(
                f"report_to: {name} is not installed: pip install {name} (tensorboard: {INSTALL})"
            )
    return [_tracker(name, classes[name]) for name in names]


PROJECT = "blockwalk"
"""The project of trackers whose environment names none."""

_NAMED = {
    "wandb": ("WANDB_PROJECT", "name"),
    "trackio": ("TRACKIO_PROJECT", "name"),
    "mlflow": ("MLFLOW_EXPERIMENT_NAME", "run_name"),
    "swanlab": ("SWANLAB_PROJECT", "experiment_name"),
    "comet_ml": ("COMET_PROJECT_NAME", ""),
    "clearml": ("CLEARML_PROJECT", "task_name"),
}
"""Trackers that have projects: the environment's name of the project, and the tracker's argument
for the name of a run, empty where it takes none."""


def tracker_names(
    tracker: str, run_name: str, environment: Mapping[str, str] = os.environ
) -> tuple[str, dict[str, str]]:
    """Return the first argument of one of accelerate's trackers, a project where it has such, and
    the arguments that name the run."""
    if tracker not in _NAMED:
        return run_name, {}
    variable, argument = _NAMED[tracker]
    return environment.get(variable) or PROJECT, {argument: run_name} if argument else {}


def _tracker(name: str, cls: Any) -> Callback:
    """Return a callback that hands each event's figures to one of accelerate's trackers, on rank
    0."""
    opened: list[Any] = []

    def tell(event: Event) -> None:
        if event.walker.ranks.rank:
            return
        if event.name == "begin":
            from accelerate import PartialState

            PartialState(cpu=True)  # accelerate's loggers want to know whose process this is
            folder = Path(event.run.output_dir)
            place = [folder / "trackers"] if cls.requires_logging_directory else []
            project, arguments = tracker_names(name, event.run.run_name or folder.absolute().name)
            tracker = cls(project, *place, **arguments)
            tracker.start()
            settings = flat(event.run.to_mapping()).items()
            tracker.store_init_configuration(
                {k: v if isinstance(v, int | float) else str(v) for k, v in settings}
            )
            opened.append(tracker)
        group = _GROUP.get(event.name, event.name)
        values = flat({group: {**event.values, "step": None}}, "/")
        if figures := {k: v for k, v in values.items() if isinstance(v, int | float)}:
            opened[0].log(figures, step=event.step)
        if event.name == "end":
            opened[0].finish()

    return tell


def pushes(repo: str) -> list[Callback]:
    """Return the upload of a run's end to a repository of the hub, which is made first; none
    without a name.

    Raises:
        ValueError: on every rank: it cannot be written to.
    """
    if not repo:
        return []
    first(lambda: hub.create(repo))

    def push(event: Event) -> None:
        if event.name != "end" or event.walker.ranks.rank:
            return
        if not Path(event.values["saved_to"]).name.startswith("checkpoint"):
            say(f"uploaded to {card.push(event.run.output_dir, repo)}")

    return [push]


_GROUP = {"begin": "forecast", "step": "train", "evaluation": "eval"}
