"""A run from its settings to its saved model. The folder is a function as well:
``blockwalk.train(...)`` is :func:`train`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockwalk.plan.run_config import RunConfig
    from blockwalk.train.callbacks import Callback
    from blockwalk.train.outcome import Outcome


def train(
    run: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    callbacks: Iterable[Callback] = (),
    trace: str | Path | None = None,
    verbose: bool = False,
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
        verbose: whether the run also prints its kinds of state and its whole first record.
        settings: settings by name, which win over those of ``run``: ``output_dir="runs/second"``,
            ``optimizer={"learning_rate": 1e-4}``.

    Raises:
        ValueError: settings or data that cannot be trained with; nothing was written.
        DoesNotFit: the plan needs more than its budget.
        OutOfMemory: memory was refused while the run went on.

    Examples:
        blockwalk.train("run.yaml", output_dir="runs/second", max_steps=100)
    """
    from blockwalk.plan.run_config import RunConfig
    from blockwalk.system.temporary import require_temporary
    from blockwalk.train import config

    if settings or not isinstance(run, RunConfig):
        run = config.of(run, settings)
    require_temporary(run.output_dir)
    from blockwalk.train import loop  # it imports torch

    return loop.train(run, callbacks=callbacks, trace=trace, verbose=verbose)


class _CallableModule(ModuleType):
    """A module that is a function as well."""

    __call__ = staticmethod(train)
    __signature__ = inspect.signature(train)


__doc__ = inspect.getdoc(train) or ""
sys.modules[__name__].__class__ = _CallableModule
