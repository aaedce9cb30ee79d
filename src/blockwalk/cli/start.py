"""``blockwalk init``: a run's YAML file from a few answers, the plan chosen for this machine; ``blockwalk complete``."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from blockwalk.cli import settings_help
from blockwalk.program.program import Pool, Shape, human_bytes
from blockwalk.report import advice
from blockwalk.report.machine import this_machine
from blockwalk.simulate import planner
from blockwalk.system import atomic_files
from blockwalk.system.terminal import is_terminal, say
from blockwalk.train import config

INSTALL = "pip install 'blockwalk[shell]'"


def init(arguments: argparse.Namespace) -> None:
    """Write a run's file; what was not given is asked, where there is somebody to ask."""
    from blockwalk.numerics.device import chosen

    if arguments.examples:
        _examples()
        return
    out = Path(arguments.out)
    atomic_files.refuse_existing(out)
    given = {
        "model": arguments.model or _ask("model", "the model: a folder, or a name of the hub"),
        "data.train": arguments.train or _ask("--train", "the training data: a JSON, CSV, Parquet or text file"),
        "data.eval": arguments.eval or "",
        "lora": not arguments.full,
        **({"budget": arguments.budget} if arguments.budget else {}),
    }
    run = config.from_mapping({**given, "output_dir": f"runs/{Path(given['model']).name}"})
    machine = this_machine(chosen().type)
    shape = Shape(run.micro_batch_rows, run.data.max_length)
    found = planner.rank(advice.task(run.model, run.adapters, machine, shape, budget=run.plan.budget))
    best = next(iter(found.first_order), None)
    if best is None:
        raise ValueError(f"no method with exact gradients fits {machine.name}: give --budget, or a smaller model")
    held = best.peaks[Pool.DEVICE] + best.peaks[Pool.HOST]
    facts = [
        f"The fastest of {len(found.first_order)} plans that fit {machine.name}: {human_bytes(held)} of tensors in a step.",
        f"Look at it: blockwalk plan {out}. Train: blockwalk train {out}. Every setting: blockwalk train --help.",
    ]
    atomic_files.write_bytes(out, "\n".join(_file(facts, advice.recommended(run, best.plan))).encode())
    say(f"written to {out} ({best.label}); next: blockwalk train {out} --dry-run")


def _examples() -> None:
    """Copy the examples, which a wheel brings along, into the working folder."""
    import shutil

    package = Path(__file__).parents[1]
    there = next(path for path in (package / "examples", package.parents[1] / "examples") if path.is_dir())
    atomic_files.refuse_existing("examples")
    shutil.copytree(there, "examples", ignore=shutil.ignore_patterns("__pycache__"))
    say("written to examples; next: blockwalk train examples/quickstart.yaml")


def _ask(name: str, what: str) -> str:
    """The answer to a question, or an error where nobody can be asked."""
    if not is_terminal(sys.stdin) or not (answer := input(f"{what}: ").strip()):
        raise ValueError(f"{name} is missing: {what}")
    return answer


def _file(facts: list[str], settings: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a YAML file, with the sentence of each setting above it."""
    yield from (f"# {fact}" for fact in facts)
    for name, value in settings.items():
        if not isinstance(value, Mapping):
            sentence = settings_help.described(name)[1]
            yield from ["", *textwrap.wrap(sentence, 110, initial_indent="# ", subsequent_indent="# ")]
        yield config.as_yaml({name: value}).rstrip()
    yield ""


def complete(arguments: argparse.Namespace) -> None:
    """Print a script that completes commands, flags and settings in a shell."""
    from blockwalk.cli import main

    try:
        import shtab
    except ImportError:
        raise ValueError(f"completion is written by shtab: {INSTALL}") from None
    parser = main.parser(None)
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in main.COMMANDS:
        for group, names, commands in settings_help.GROUPS if command.takes_settings else ():
            for name in settings_help.settings_of(names) if command.name in commands else ():
                values = settings_help.described(name)[0]
                choices = values.split("|") if "|" in values else None
                subparsers.choices[command.name].add_argument(f"--{name}", choices=choices, help=group)
    say(shtab.complete(parser, arguments.shell))
