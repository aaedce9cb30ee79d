"""A run from its YAML file to its saved model. ``blockwalk.train`` is a function as well:

    blockwalk.train(run=None, *, callbacks=(), trace=None, **settings)

It trains as configured, to the end or until SIGTERM, SIGINT, SIGHUP or SIGUSR1, on which a
checkpoint is saved.

Args:
    run: the configuration: the path of a YAML file, a mapping of settings, or a value; None: the
        settings alone.
    callbacks: functions that are told of every event; see :class:`blockwalk.train.callbacks.Event`.
    trace: where the timeline of one step goes, beside ``output_dir/trace.json``.
    settings: settings by name, which win over those of ``run``: ``output_dir="runs/second"``,
        ``optimizer={"learning_rate": 1e-4}``.

Examples:
    blockwalk.train("run.yaml", output_dir="runs/second", max_steps=100)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockwalk.plan.run_config import RunConfig
    from blockwalk.train.callbacks import Callback
    from blockwalk.train.outcome import Outcome


class _Callable(ModuleType):
    """A folder that is a function as well: ``blockwalk.train(config)`` is
    :func:`blockwalk.train.loop.train`, imported when it is called."""

    def __call__(
        self,
        run: RunConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        callbacks: Iterable[Callback] = (),
        trace: str | Path | None = None,
        **settings: Any,
    ) -> Outcome:
        from blockwalk.train.loop import train

        return train(run, callbacks=callbacks, trace=trace, **settings)


sys.modules[__name__].__class__ = _Callable
