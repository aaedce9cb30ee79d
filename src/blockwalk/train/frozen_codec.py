"""The frozen codec of a run: chosen once, before anything is written, and kept with the run from
then on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockwalk.checkpoints import run_checkpoint
from blockwalk.engine import frozen_codec
from blockwalk.plan.parsing import Loader, coerce
from blockwalk.plan.placement import Codec, Placement
from blockwalk.plan.run_config import RunConfig
from blockwalk.system.atomic_files import read_yaml
from blockwalk.system.paths import StrPath


def settled(run: RunConfig, *, adapter: StrPath | None = None) -> tuple[RunConfig, list[str]]:
    """Choose a run's frozen codec: answer the run with it, and the line that says so; no line where
    the settings name it.

    A run that is resumed keeps the codec of its checkpoint, and ``adapter``, the folder of one that
    is read, that of the run that trained it.

    Raises:
        ValueError: there is no such model, or the plan does not go with the codec that fits.
    """
    if not frozen_codec.is_open(run.plan):
        return run, []
    kept = next(_codecs(_earlier(run, adapter)), None)
    adapters = run.adapters is not None or adapter is not None
    plan, reason = frozen_codec.chosen(run.plan, run.model, adapters=adapters, kept=kept)
    lines = [f"frozen weights are {plan.frozen.codec} (auto: {reason})"] if reason else []
    return replace(run, plan=plan), lines


def _earlier(run: RunConfig, adapter: StrPath | None) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of the runs that this one goes on with, the likeliest first; files that
    cannot be read are passed over, for whoever needs them says so."""
    output_dir = Path(run.output_dir)
    if adapter is not None:
        for folder in (Path(adapter), Path(adapter).parent, output_dir):
            yield from _settings_in(folder / "config.yaml")
    elif run.resume_from_checkpoint:
        latest = run.resume_from_checkpoint == "latest"
        paths = (
            reversed(run_checkpoint.whole(output_dir))
            if latest
            else [Path(run.resume_from_checkpoint)]
        )
        for path in paths:
            try:
                yield run_checkpoint.load(path, weights=False).config
            except (ValueError, OSError):
                continue


def _settings_in(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        settings = read_yaml(file, Loader)
    except (ValueError, OSError):
        return
    if isinstance(settings, Mapping):
        yield settings


def _codecs(runs: Iterator[Mapping[str, Any]]) -> Iterator[Codec]:
    """Yield the codecs that runs' settings name."""
    for settings in runs:
        try:
            placement: Placement = coerce("frozen", settings["frozen"], Placement)
        except (LookupError, ValueError, TypeError):
            continue
        if not placement.codec.facts.chosen_later:
            yield placement.codec
