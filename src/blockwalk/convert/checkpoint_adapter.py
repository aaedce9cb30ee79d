"""The adapter of a checkpoint in PEFT's format: a first-order run saves its trained values there
beside the optimizer's."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from blockwalk.checkpoints import pieces, run_checkpoint
from blockwalk.checkpoints.ledger import NAME as LEDGER
from blockwalk.cutting.adapters import adapt
from blockwalk.cutting.anatomy import canonical_name
from blockwalk.cutting.saved_adapters import save_adapter
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.models.model_source import model_source
from blockwalk.models.stops import GENERATION, with_stops
from blockwalk.plan.choices import Adapters
from blockwalk.plan.parsing import adapter_settings
from blockwalk.system import atomic_files
from blockwalk.system.paths import StrPath

_MASTER = "/master"
"""The end of the name that a checkpoint gives the values of a trained parameter."""


def is_checkpoint(folder: StrPath) -> bool:
    """Whether a folder is a run's checkpoint."""
    return (Path(folder) / run_checkpoint.SCALARS).is_file()


def write_adapter(model: StrPath, checkpoint: StrPath, out: Path) -> None:
    """Write the adapter that a checkpoint holds to the folder ``out``; no weight of the model is
    read.

    Raises:
        Damaged: a file of the checkpoint is missing or changed.
        ValueError: it holds no adapter, with what gives its weights; or one of another model.
    """
    folder = Path(checkpoint)
    state = run_checkpoint.load(folder, weights=False)
    adapters = _adapters_of(state, folder)
    wrapped = adapt(build_skeleton(model), adapters)
    names = tuple(wrapped.peft_config)
    shapes = {
        canonical_name(n, names): p.shape
        for n, p in wrapped.named_parameters(remove_duplicate=False)
    }
    values: dict[str, Tensor] = {}
    with pieces.Saved(folder) as saved:
        for key, numel in saved.numel.items():
            name = key.removesuffix(_MASTER)
            if name == key:
                continue
            shape = shapes.get(name, torch.Size())
            if shape.numel() != numel or name not in shapes:
                raise ValueError(
                    f"{folder} holds no adapter of {os.fspath(model)}: {name} has {numel} values"
                    " there, and"
                    f" {shape.numel() if name in shapes else 'none'} in this model"
                )
            values[name] = torch.empty(numel)
            saved.read_into(key, 0, values[name])
            values[name] = values[name].view(shape)
    save_adapter(wrapped, values, out)
    if stops := state.data.get("stops"):  # none in a checkpoint of an older version
        atomic_files.write_bytes(out / GENERATION, with_stops(model_source(model).folder, stops))


def _adapters_of(state: run_checkpoint.Checkpoint, folder: Path) -> Adapters:
    """Return the settings of the adapters that a checkpoint's run trains.

    Raises:
        ValueError: it trains all parameters, or is zeroth-order; the message says what gives its
            weights.
    """
    run = state.config
    lora = run.get("lora")
    prefix = run.get("prefix") or {}
    if state.ledger is not None:
        ledger = folder.parent / LEDGER
        raise ValueError(
            f"{folder} is of a zeroth-order run ({run['method']}), whose weights are its base and"
            " its ledger: blockwalk replay"
            f" {run['model']} {ledger} OUT --until {state.step} writes them"
        )
    if not lora and not prefix.get("num_virtual_tokens"):
        raise ValueError(
            f"{folder} is of a run that trains all parameters, and holds no adapter. To write its"
            " model, end a run at it:"
            f" blockwalk train {folder.parent / 'config.yaml'} --resume_from_checkpoint {folder}"
            f" --max_steps {state.step}"
            " --output_dir OUT"
        )
    return adapter_settings(lora or prefix)
