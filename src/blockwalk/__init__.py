"""Blockwalk: fine-tune and train language models that do not fit in memory, one block at a time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from blockwalk.system import row_modules as _row_modules

if TYPE_CHECKING:
    from blockwalk.plan.choices import LoraSettings as LoraSettings
    from blockwalk.plan.choices import PrefixSettings as PrefixSettings
    from blockwalk.plan.methods import method as method
    from blockwalk.plan.plan import Plan as Plan
    from blockwalk.train import train as train
    from blockwalk.train.callbacks import Event as Event
    from blockwalk.walk.walker import StepResult as StepResult
    from blockwalk.walk.walker import Walker as Walker

__version__ = "0.1.0"

_HOME = {
    "method": "plan.methods",
    "Plan": "plan.plan",
    "LoraSettings": "plan.choices",
    "PrefixSettings": "plan.choices",
    "Walker": "walk.walker",
    "StepResult": "walk.walker",
    "Event": "train.callbacks",
}

__all__ = [
    "Event",
    "LoraSettings",
    "Plan",
    "PrefixSettings",
    "StepResult",
    "Walker",
    "__version__",
    "method",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``blockwalk --help`` never waits for
    torch."""
    if name == "train":  # a folder that can be called
        return importlib.import_module("blockwalk.train")
    if name in _HOME:
        return getattr(importlib.import_module(f"blockwalk.{_HOME[name]}"), name)
    raise AttributeError(f"module 'blockwalk' has no attribute {name!r}")


_row_modules.load_installed()  # rows of installed packages are there wherever a plan is
