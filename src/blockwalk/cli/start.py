"""``blockwalk init``: a run's YAML file from a few answers, the plan chosen for this machine;
``blockwalk settings``; ``blockwalk complete``."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from blockwalk.cli import schema, settings_help
from blockwalk.plan.methods import METHODS
from blockwalk.plan.parsing import flat
from blockwalk.plan.placement import Codec
from blockwalk.plan.run_config import RunConfig
from blockwalk.program.program import Pool, Shape, human_bytes
from blockwalk.report import advice
from blockwalk.report.machine import this_machine
from blockwalk.report.summary import process_text
from blockwalk.simulate import planner, process_memory
from blockwalk.system import atomic_files
from blockwalk.system.process_memory import process_bytes
from blockwalk.system.terminal import is_terminal, say
from blockwalk.train import config

INSTALL = "pip install 'blockwalk[shell]'"

HELD_OUT = 0.02
"""The share of the training data that a new file holds out where no held-out data are named: the
loss on it is what a first run is judged by."""


def init(arguments: argparse.Namespace) -> None:
    """Write a run's file; what was not given is asked, where there is somebody to ask."""
    from blockwalk.numerics.device import chosen
    from blockwalk.train.frozen_codec import settled

    if arguments.examples:
        _examples()
        return
    out = Path(arguments.out)
    atomic_files.refuse_existing(out)
    run = config.from_mapping(_answers(arguments))
    machine = this_machine(chosen().type)
    shape = Shape(run.micro_batch_rows, run.data.max_length)
    task = advice.task(run.model, run.adapters, machine, shape, budget=run.plan.budget)
    codec = settled(run)[0].plan.frozen.codec
    ranking = _of_codec(planner.rank(task), codec)
    fitting = _of_method(ranking, arguments.method)
    best = next(iter(fitting), None)
    if best is None:
        raise ValueError(_misfit(ranking, arguments.method, machine.name))
    nbytes = partial(_memory_bytes, task=task, held=process_bytes())
    memory = process_text(nbytes(best))
    if machine.device != "cpu":
        memory = f"{human_bytes(nbytes(best))} of tensors"
    little_memory = list(_of_little_memory(ranking, best, nbytes))
    comments = [
        f"The fastest of {len(fitting)} plans that fit {machine.name}: {memory}.",
        *little_memory,
        f"Look at it: blockwalk plan {out}. Train: blockwalk train {out}. Every setting:"
        " blockwalk train --help.",
    ]
    if out.with_name(schema.FILE).is_file():
        comments.insert(0, f"yaml-language-server: $schema={schema.FILE}")
    settings = advice.recommended(run, best.plan)
    by_itself = replace(run.plan.frozen, codec=codec)
    if best.plan.method == run.plan.method and best.plan.frozen == by_itself:
        settings.pop("frozen", None)
    atomic_files.write_bytes(out, "\n".join(_file(comments, settings, run)).encode())
    say(f"written to {out} ({best.label}); next: blockwalk train {out} --dry-run")
    say(*little_memory)


def _answers(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the command line has; what it lacks is asked."""
    model = arguments.model or _ask("model", "the model: a folder, or a name of the hub")
    data = arguments.train or _ask(
        "--train", "the training data: a JSON, CSV, Parquet or text file"
    )
    if arguments.method and arguments.method not in METHODS:
        hint = METHODS.nearest(arguments.method)
        raise ValueError(f"--method is {arguments.method!r}{hint}; known: {METHODS.choices}")
    answers = {
        "model": model,
        "data.train": data,
        "data.eval": arguments.eval or "",
        "data.eval_share": 0.0 if arguments.eval else HELD_OUT,
        "lora": not arguments.full,
        "output_dir": f"runs/{Path(model).name}",
    }
    if arguments.chat and (template := _template_for(model, data)):
        answers["data.chat_template"] = template
    return {**answers, "budget": arguments.budget} if arguments.budget else answers


def _of_method(ranking: planner.Ranking, name: str | None) -> list[planner.Candidate]:
    """Return the plans of a method that fit, best first; those with exact gradients where none is
    named."""
    if name is None:
        return list(ranking.first_order)
    return [candidate for candidate in ranking.ranked if candidate.plan.method == name]


def _misfit(ranking: planner.Ranking, name: str | None, machine: str) -> str:
    """Return the reason for which no plan of a method, or of exact gradients, fits a machine."""
    if name is None:
        return f"no method with exact gradients fits {machine}: give --budget, or a smaller model"
    refused = (plan.refused for plan in ranking.refused if plan.plan.method == name)
    reason = next(refused, "it is for several ranks; blockwalk plan --hardware NAME ranks those")
    return f"--method {name} has no plan for {machine}: {reason}"


def _template_for(model: str, data: str) -> str:
    """Return the chat template that a model without one is given for conversations.

    Raises:
        ValueError: the data are no conversations.
    """
    from blockwalk.data.formats import detect_format, learns_chats
    from blockwalk.data.sources import read_records
    from blockwalk.data.tokenizer import load_tokenizer

    record = next(iter(read_records(data)))
    if not learns_chats(record, ""):
        raise ValueError(
            f"--chat: {record.place} is of format {detect_format(record)}, which is no conversation"
        )
    return "" if load_tokenizer(model).chat_template else "chatml"


def _of_codec(ranking: planner.Ranking, codec: Codec) -> planner.Ranking:
    """Return a ranking without the plans of method mebp in other codecs than the one that a run
    would choose, where one in that codec fits."""
    mebp = [candidate for candidate in ranking.first_order if candidate.plan.method == "mebp"]
    excluded = [candidate for candidate in mebp if candidate.plan.frozen.codec is not codec]
    if len(excluded) == len(mebp):
        return ranking
    candidates = (c for c in ranking.first_order if c not in excluded)
    return replace(ranking, first_order=tuple(candidates))


def _peak_bytes(candidate: planner.Candidate) -> int:
    """Return bytes of tensors that a plan holds at a step's peak."""
    return candidate.peaks[Pool.DEVICE] + candidate.peaks[Pool.HOST]


def _memory_bytes(candidate: planner.Candidate, task: planner.Task, held: int) -> int:
    """Return bytes of memory of a plan's steps: of the whole process on a processor, where it holds
    ``held`` bytes without the model; else of tensors."""
    if task.hardware.device != "cpu" or candidate.simulation is None:
        return _peak_bytes(candidate)
    program = candidate.simulation.program
    facts = (program, candidate.plan, task.hardware, task.model)
    return process_memory.process_peak(*facts, process=held)


def _of_little_memory(
    ranking: planner.Ranking, best: planner.Candidate, nbytes: Callable[[planner.Candidate], int]
) -> Iterator[str]:
    """Yield a line on the memory that method mebp would take, where it was not chosen.

    Args:
        nbytes: a function of a plan: the bytes that it takes.
    """
    mebp = [candidate for candidate in ranking.first_order if candidate.plan.method == "mebp"]
    if mebp and best.plan.method != "mebp":
        smallest = min(mebp, key=_peak_bytes)
        memory = f"{human_bytes(nbytes(smallest))} instead of {human_bytes(nbytes(best))}"
        yield f"method: mebp would take {memory}, and more time: weights come from disk."


def _examples() -> None:
    """Copy the examples, which a wheel brings along, into the working folder."""
    import shutil

    package = Path(__file__).parents[1]
    folders = (package / "examples", package.parents[1] / "examples")
    source = next(folder for folder in folders if folder.is_dir())
    atomic_files.refuse_existing("examples")
    shutil.copytree(source, "examples", ignore=shutil.ignore_patterns("__pycache__"))
    say("written to examples; next: blockwalk train examples/quickstart.yaml")


def _ask(name: str, what: str) -> str:
    """Return the answer to a question, or an error where nobody can be asked."""
    if not is_terminal(sys.stdin) or not (answer := input(f"{what}: ").strip()):
        raise ValueError(f"{name} is missing: {what}")
    return answer


EDITED = {
    "data.max_length": "tokens of a record; longer ones are cut",
    "data.eval_share": "share of the records that is held out; 0: none",
    "lora.rank": "size of the adapters",
    "batch_size": "sequences of a step",
    "epochs": "times that every record is seen; parts too",
    "eval_every": "steps between evaluations; 0: before and after alone",
    "save_every": "steps between checkpoints; 0: at the end alone",
    "optimizer.learning_rate": "the highest",
    "optimizer.schedule": "or linear, cosine: how the rate falls",
    "optimizer.warmup_steps": "steps in which the rate rises",
}
"""The settings that people edit, each with a few words; a run's file has them all, with its values
or the defaults."""


def _file(comments: list[str], settings: Mapping[str, Any], run: RunConfig) -> Iterator[str]:
    """Yield lines of a YAML file: what was chosen, with the sentence of each setting above it, then
    those that people edit."""
    values = flat(run.to_mapping())
    left_out = {"data.eval_share"} if run.data.eval else set()
    if run.lora is None:
        left_out.add("lora.rank")
    edited = {name: values[name] for name in EDITED if name not in left_out}
    yield from (f"# {comment}" for comment in comments)
    sections: dict[str, dict[str, Any]] = {}
    for name, value in {**flat(settings), **edited}.items():
        head, _, inner = name.partition(".")
        if inner:
            sections.setdefault(head, {})[inner] = value
        elif name not in edited:
            sentence = settings_help.described(name)[1]
            yield ""
            yield from textwrap.wrap(sentence, 110, initial_indent="# ", subsequent_indent="# ")
            yield config.as_yaml({name: value}).rstrip()
    yield ""
    yield from (_commented(name, value) for name, value in edited.items() if "." not in name)
    for head, section in sections.items():
        yield f"{head}:"
        yield from ("  " + _commented(f"{head}.{inner}", value) for inner, value in section.items())
    yield ""


def _commented(name: str, value: Any) -> str:
    """Return a setting's line of YAML, with its few words behind it where it has some."""
    line = config.as_yaml({name.rpartition(".")[2]: value}).rstrip()
    return f"{line:<28}# {EDITED[name]}" if name in EDITED else line.replace("\n", "\n  ")


def settings(arguments: argparse.Namespace) -> None:
    """Print every setting, those whose names begin with a word, or the schema of a run's file."""
    if arguments.schema and arguments.name:
        raise ValueError(f"--schema is of every setting: leave {arguments.name} out")
    if arguments.schema:
        say(json.dumps(schema.schema(), indent=1, ensure_ascii=False))
    else:
        say(*settings_help.lines("train", arguments.name or ""))


def complete(arguments: argparse.Namespace) -> None:
    """Print a script that completes commands, flags and settings in a shell."""
    try:
        import shtab
    except ImportError:
        raise ValueError(f"completion is written by shtab: {INSTALL}") from None
    parser = arguments.parser
    (subparsers,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    for title, names, commands in settings_help.GROUPS:
        for name in settings_help.settings_of(names):
            values = settings_help.described(name)[0]
            choices = values.split("|") if "|" in values else None
            for command in commands:
                subparsers.choices[command].add_argument(f"--{name}", choices=choices, help=title)
    say(shtab.complete(parser, arguments.shell))
