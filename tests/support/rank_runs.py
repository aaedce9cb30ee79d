"""Runs of the trainer in the processes of ranks, one of which may be killed, and what they left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from blockwalk.plan import run_config as config_run_config
from blockwalk.ranks.place import Place
from blockwalk.train import config, loop
from blockwalk.walk.walker import Walker


def run_config(arguments: list[str], rank: int, world: int) -> config_run_config.RunConfig:
    names = [argument.removeprefix("--") for argument in arguments[::2]]
    settings = dict(zip(names, arguments[1::2], strict=True))  # as of flags, the last counts
    return config.load(None, [*settings.items(), *Place(rank, world, rank, world).settings()])


def _trained(rank: int, world: int, arguments: list[str], killed_at: int) -> None:
    """Train; where ``killed_at`` is above 0, the last rank dies before that step."""
    if rank == world - 1 and killed_at:
        step = Walker.step

        def dies(self: Walker, *args: Any, **options: Any) -> Any:
            if self.steps_done == killed_at:
                self.wait_saved()
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, *args, **options)

        Walker.step = dies  # type: ignore[method-assign]
    loop.train(run_config(arguments, rank, world))


def result(folder: Path, name: str = "model") -> tuple[dict[str, torch.Tensor], list[float]]:
    """What was saved, and every step's loss."""
    from safetensors.torch import load_file

    file = folder / name / ("model.safetensors" if name == "model" else "adapter_model.safetensors")
    return load_file(file), [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def dies(rank: int, world: int, arguments: list[str], killed_at: int) -> str:
    try:
        _trained(rank, world, arguments, killed_at)
    except Exception:
        os._exit(3)  # the other rank is gone: its own end is not what is tested here
    return "trained"
