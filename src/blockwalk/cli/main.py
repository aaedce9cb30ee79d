"""The command line: a table of subcommands, flags, and errors as one line with an exit code.

Exit codes: 0 done; 1 a failure while running; 2 usage, configuration or data; 3 the plan does not
fit the budget given, or the memory that there is; 143, 130, 129 or 138 a run that SIGTERM, SIGINT,
SIGHUP or SIGUSR1 ended early, its checkpoint saved. ``BLOCKWALK_DEBUG=1`` shows tracebacks.

Nothing here imports torch: a subcommand's module is imported when it runs.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import math
import operator
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from blockwalk import __version__
from blockwalk.models import folder, run_folder
from blockwalk.plan import run_config
from blockwalk.plan.codecs import CODECS
from blockwalk.plan.parsing import did_you_mean
from blockwalk.ranks import launch, place
from blockwalk.report.forecast import DoesNotFit
from blockwalk.system import kernel_notes, open_files
from blockwalk.system.temporary import require_temporary
from blockwalk.system.terminal import PATIENCE, one_line, say, steady
from blockwalk.train import config
from blockwalk.train.foreign_settings import Note

FAILED = 1
BAD_INPUT = 2
TOO_LARGE = 3

ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables that set torch's allocator of device memory; a user who has set one of them has
chosen."""

Option = tuple[str, dict[str, Any]]
"""An argument of a subcommand, as ``ArgumentParser.add_argument`` takes it."""


def _value(name: str, metavar: str, help: str, **more: Any) -> Option:
    return name, {"metavar": metavar, "help": help, **more}


def _switch(name: str, help: str) -> Option:
    return name, {"action": "store_true", "help": help}


def _choice(name: str, choices: Sequence[Any], help: str, **more: Any) -> Option:
    return name, {"choices": choices, "help": help, **more}


_CONFIG = _value("config", "RUN.yaml", "settings; see the list of flags", nargs="?")
_RUN = _value(
    "config", "RUN", "a run's folder or YAML file, a model's folder or a GGUF file", nargs="?"
)
_OWN_ADAPTER = _value(
    "--adapter", "DIR", "an adapter, a run or a checkpoint; none; default: what RUN has trained"
)
_SYSTEM = _value("--system", "TEXT", "a system prompt before the conversation")
_TEMPERATURE = _value("--temperature", "T", "0, the default: greedy", type=float, default=0.0)
_UNTIL = _value("--until", "STEP", "the last step to apply; default: all", type=int)
_JSON = _switch("--json", "print JSON")
_AS_TRAINED = _switch("--as-trained", "evaluate only on the quantised weights (halves the time)")


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: what it says of itself, its arguments, and the function that runs it
    (``module:function``)."""

    name: str
    help: str
    target: str
    options: tuple[Option, ...] = ()
    takes_settings: bool = False
    """Whether the subcommand takes every setting of :mod:`blockwalk.train.config` as a flag, and is
    called with the resolved configuration."""
    answers: bool = False
    """Whether the result is what the subcommand prints: a reader is waited for, and output that is
    lost is a failure."""
    elsewhere: tuple[tuple[str, str], ...] = ()
    """Flags that another subcommand has and this one lacks, each with what to do instead."""
    needs: tuple[str, ...] = ("model",)
    """Names of the settings that must be given."""
    reads_weights: bool = True
    """Whether the model's weights must be there, or its configuration alone."""

    def function(self) -> Callable[..., int | None]:
        module, _, name = self.target.partition(":")
        found: Callable[..., int | None] = getattr(importlib.import_module(module), name)
        return found


COMMANDS = (
    Command(
        "init",
        "write a run's YAML file: the fastest plan that fits this machine, with a sentence on"
        " each setting",
        "blockwalk.cli.start:init",
        (
            _value("model", "MODEL", "a model's folder, or its name on the hub", nargs="?"),
            _value("--train", "DATA", "training data: a JSON, CSV, Parquet or text file"),
            _value("--eval", "DATA", "held-out data"),
            _value("--budget", "SIZE", "device memory that a step may use, such as 8GB"),
            _switch("--full", "train all parameters instead of adapters"),
            _value("--out", "FILE", "default: run.yaml", default="run.yaml"),
            _switch("--examples", "copy the examples here instead: a small model, data, runs"),
        ),
    ),
    Command(
        "pack",
        "write a model as a block store: a folder that is read a block at a time",
        "blockwalk.cli.models:pack",
        (
            _value("model", "MODEL", "a hub name, a folder or a GGUF file"),
            _value("out", "OUT", "the folder to write"),
            _choice(
                "--codec",
                CODECS.written,
                "default: int4a",
                default="int4a",
            ),
            _choice("--group_size", [32, 64], "int4: elements a scale", type=int, default=32),
            _value(
                "--calibrate",
                "DATA",
                "records that the model is for: int4 and int4a are rounded with them in view",
            ),
        ),
    ),
    Command(
        "plan",
        "print what a run will take: bytes on every tier, the predicted peak, the schedule",
        "blockwalk.cli.run:plan",
        (
            _CONFIG,
            _switch("--program", "print the schedule of a training step, op by op"),
            _value(
                "--hardware",
                "NAME|FILE",
                "rank every method on this machine (here: the one that doctor measured)",
            ),
            _switch("--largest_batch", "with --hardware: the most sequences that fit, by method"),
            _value("--trace", "FILE", "with --hardware: the best plan's timeline, for Perfetto"),
        ),
        takes_settings=True,
        answers=True,
        reads_weights=False,
    ),
    Command(
        "train",
        "fine-tune a model",
        "blockwalk.cli.run:train",
        (
            _CONFIG,
            _value("--nproc-per-node", "N", "start N ranks on this machine", type=int),
            _value(
                "--nnodes",
                "N",
                "print the command for each of N nodes instead",
                type=int,
                default=1,
            ),
            _value(
                "--trace", "FILE", "a step's timeline, for Perfetto (also in output_dir/trace.json)"
            ),
            _switch("--dry-run", "read and check everything, say what will happen, and stop"),
            _switch(
                "--join", "join a running zeroth-order job (address: elastic) as an extra worker"
            ),
        ),
        takes_settings=True,
        needs=("model", "data.train"),
    ),
    Command(
        "eval",
        "print the loss (and accuracy) of a model, or of what a run has trained, on held-out"
        " records",
        "blockwalk.cli.run:evaluate",
        (_RUN, _OWN_ADAPTER, _JSON, _AS_TRAINED),
        takes_settings=True,
        answers=True,
        needs=("model", "data.eval"),
    ),
    Command(
        "generate",
        "continue a prompt",
        "blockwalk.cli.generate:generate",
        (
            _RUN,
            _OWN_ADAPTER,
            _value("--prompt", "TEXT", "text to continue; - reads standard input"),
            _switch("--chat", "the prompt is a user's turn in the model's chat template"),
            _SYSTEM,
            _value(
                "--messages",
                "FILE",
                "a conversation to answer: a JSON list of turns with role and content",
            ),
            _value("--max_new_tokens", "N", "default: 64", type=int, default=64),
            _TEMPERATURE,
        ),
        takes_settings=True,
        answers=True,
    ),
    Command(
        "chat",
        "talk with a model, or with what a run has trained",
        "blockwalk.cli.chat:chat",
        (
            _RUN,
            _OWN_ADAPTER,
            _SYSTEM,
            _value(
                "--max_new_tokens",
                "N",
                "most tokens of an answer; default: 512",
                type=int,
                default=512,
            ),
            _TEMPERATURE,
        ),
        elsewhere=(
            (
                "prompt",
                "chat reads turns from standard input; one prompt is answered by blockwalk"
                " generate RUN --chat --prompt TEXT",
            ),
        ),
        takes_settings=True,
        answers=True,
    ),
    Command(
        "merge",
        "write a model with its adapter merged in, as safetensors",
        "blockwalk.cli.models:merge",
        (
            _value("model", "MODEL", "the base: a hub name, a folder or a GGUF file"),
            _value("adapter", "ADAPTER", "the adapter's folder, or a run's", nargs="?"),
            _value("out", "OUT", "the folder to write", nargs="?"),
            _choice(
                "--dtype", ["bfloat16", "float16", "float32"], "default: the base's", default=""
            ),
        ),
    ),
    Command(
        "gguf",
        "write a model, or an adapter, as a GGUF file for llama.cpp and Ollama",
        "blockwalk.cli.models:gguf",
        (
            _value(
                "model", "MODEL", "a model's folder, such as merge wrote; of an adapter, its base"
            ),
            _value(
                "out", "OUT.gguf", "the file to write; a Modelfile for Ollama is written beside it"
            ),
            _value("--adapter", "DIR", "write this adapter alone, to be put on the model's GGUF"),
            _value("--base", "FILE", "the GGUF file of the base, for the Modelfile of an adapter"),
            _choice(
                "--dtype",
                ["bf16", "f16", "f32", "q8_0"],
                "of matrices; default: bf16",
                default="bf16",
            ),
        ),
    ),
    Command(
        "replay",
        "rebuild what a zeroth-order run trained, from its base and its ledger",
        "blockwalk.cli.models:replay",
        (
            _value("base", "BASE", "the model that the run began from"),
            _value("ledger", "LEDGER", "ledger.jsonl, what export made of it, or a hub name"),
            _value("out", "OUT", "the folder to write"),
            _UNTIL,
        ),
    ),
    Command(
        "export",
        "write a zeroth-order fine-tune as one file of kilobytes, which replay turns into weights",
        "blockwalk.cli.models:export",
        (
            _value("base", "BASE", "the model that the run began from"),
            _value("out", "OUT", "the file to write"),
            _value("--ledger", "LEDGER", "the run's ledger.jsonl", required=True),
            _UNTIL,
            _switch("--no_rebuild", "leave out the checksum of the weights, which takes a replay"),
        ),
    ),
    Command(
        "report",
        "write a run's curves, timeline and configuration as one self-contained page",
        "blockwalk.cli.run:report",
        (
            _value("run", "RUN", "the run's output_dir"),
            _switch("--card", "write a model card for the hub beside what was trained, as well"),
        ),
    ),
    Command(
        "push",
        "upload what a run trained to the hub, with a model card",
        "blockwalk.cli.run:push",
        (
            _value("run", "RUN", "the run's output_dir"),
            _value("repo", "OWNER/NAME", "the repository; made, private, if there is none"),
            _switch("--ledger", "zeroth order: the ledger instead of the weights"),
        ),
    ),
    Command(
        "doctor",
        "measure this machine (under torchrun: this cluster), write hardware.yaml, and say what"
        " will hurt",
        "blockwalk.cli.machine:doctor",
        (_value("--out", "FILE", "default: hardware.yaml", default="hardware.yaml"),),
    ),
    Command(
        "settings",
        "print every setting with its sentence and default",
        "blockwalk.cli.start:settings",
        (
            _value("name", "NAME", "those whose names begin so, such as lora", nargs="?"),
            _switch("--schema", "print a JSON Schema of a run's file instead, for editors"),
        ),
        answers=True,
    ),
    Command(
        "complete",
        "print a script that completes commands and settings: source it, or put it where your"
        " shell looks",
        "blockwalk.cli.start:complete",
        (_choice("shell", ["bash", "zsh", "tcsh", "fish"], "the shell"),),
        answers=True,
    ),
    Command(
        "env",
        "print versions and hardware, for bug reports",
        "blockwalk.cli.machine:environment",
        (_JSON,),
        answers=True,
    ),
)
"""Every subcommand, in the order of ``blockwalk --help``."""


def main(argv: list[str] | None = None) -> int:
    """Run ``blockwalk`` with these arguments (``sys.argv`` unless given) and answer its exit
    code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    by_name = {command.name: command for command in COMMANDS}
    command = next((by_name[word] for word in arguments if word in by_name), None)
    answers = command is None or command.answers
    with steady(math.inf if answers else PATIENCE) as streams:
        code = _run(command, arguments)
        lost = [stream.failure for stream in streams if stream.failure is not None]
        if (
            answers and code == 0 and lost and not isinstance(lost[0], BrokenPipeError)
        ):  # head has read enough
            say(f"blockwalk: error: standard output: {lost[0].strerror}", file=sys.stderr)
            return FAILED
        return code


def _run(command: Command | None, all_arguments: list[str]) -> int:
    """Run a subcommand with all of the command line's arguments, and answer its exit code."""
    if not _debugging():
        warnings.filterwarnings(
            "ignore", category=FutureWarning
        )  # libraries' notes to their callers, not to our users
        warnings.filterwarnings("ignore", module="peft")  # that a base model was moved
        kernel_notes.silence()
    # Before torch is imported: libgomp's threads wait 14 ms for one another before they sleep, and
    # where another program has a core, every operator does; half a millisecond bridges the pauses
    # between operators as well.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Likewise: batches of many lengths leave holes among a GPU's blocks of fixed sizes, which
    # segments that grow do not have.
    if not any(name in os.environ for name in ALLOCATORS):
        os.environ[ALLOCATORS[0]] = "expandable_segments:True"
    arguments = all_arguments
    open_files.raise_limit()
    here = place.Place()
    commands = parser(command if "-h" in arguments or "--help" in arguments else None)
    try:
        _require_command(all_arguments)
        given: list[tuple[str, Any]] = []
        if command is not None and command.takes_settings:
            flags = (name.removeprefix("--") for name, _ in command.options)
            taken = {"device", "help", "version", *flags, *dict(command.elsewhere)}
            given, arguments = config.split_flags(arguments, taken)
        values, unknown = commands.parse_known_args(arguments)
        if command is None:
            commands.print_help()
            return 0
        if values.device:
            os.environ["BLOCKWALK_DEVICE"] = (
                values.device
            )  # which the ranks that this starts inherit
        if unknown:
            options = ["device", *(name.removeprefix("--") for name, _ in command.options)]
            known = [*options, *(config.setting_names() if command.takes_settings else [])]
            name = unknown[0].removeprefix("--").partition("=")[0]
            instead = dict(command.elsewhere).get(name)
            hint = did_you_mean(name, known) if instead is None else f": {instead}"
            raise ValueError(f"unknown argument {unknown[0]!r}{hint}")
        if command.takes_settings:
            here = place.place()
            starts = getattr(values, "nproc_per_node", None)
            if starts and here.world == 1:
                there = place.Place(world=starts * values.nnodes, ranks_per_node=starts)
                _configured(
                    command,
                    values,
                    [*given, *there.settings()],
                    runs_here=values.nnodes == 1,
                    starts=True,
                )
                return launch.start(
                    _without(all_arguments, launch.LAUNCH_FLAGS), starts, values.nnodes
                )
            run = _configured(command, values, [*given, *here.settings()])
            return command.function()(run, values) or 0
        return command.function()(values) or 0
    except Exception as error:
        code = _explain(error)
        if here.world > 1:
            os._exit(code)  # a thread may wait for other ranks for ever
        return code
    except KeyboardInterrupt:
        say("blockwalk: interrupted", file=sys.stderr)
        return 130


def _require_command(arguments: Sequence[str]) -> None:
    """Raise ValueError where the first word of a command line is no subcommand."""
    names = [command.name for command in COMMANDS]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in names:
        near = difflib.get_close_matches(arguments[0], names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"
        raise ValueError(f"unknown command {arguments[0]!r}{hint}")


def _configured(
    command: Command,
    values: argparse.Namespace,
    overrides: list[tuple[str, Any]],
    *,
    runs_here: bool = True,
    starts: bool = False,
) -> run_config.RunConfig:
    """Return the run's configuration; what the command needs of it is given, and the model's folder
    is there if the run is."""
    values.config, model = _file_of(values.config)
    overrides = [*model, *overrides]
    with _notes_printed(starts=starts):
        run = config.load(values.config, overrides, as_flags=True)
    values.named = {name for name, _ in overrides}
    require_temporary(run.output_dir)
    for name in command.needs:
        instead = name.startswith("data.") and (
            run.data.task or (name == "data.eval" and run.data.evaluates)
        )
        if not operator.attrgetter(name)(run) and not instead:
            raise ValueError(f"{name} is missing; give it in the YAML file or as --{name}")
    if not runs_here:
        return run
    if command.reads_weights:
        folder.require_weights(run.model)
    elif not os.path.isfile(run.model):  # a config.json is enough
        folder.require_config(run.model)
    return run


@contextmanager
def _notes_printed(*, starts: bool) -> Iterator[None]:
    """Print the notes on settings that are read meanwhile to standard error, each once, on the
    first rank; where this process starts the ranks, only if the settings are refused."""
    failed = True
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", Note)
            yield
        failed = False
    finally:
        notes = dict.fromkeys(
            str(each.message) for each in caught if issubclass(each.category, Note)
        )
        if failed or (not starts and place.place().rank == 0):
            for note in notes:
                say(f"note: {one_line(note)}", file=sys.stderr)
        for each in caught:
            if not issubclass(each.category, Note):
                warnings.showwarning(each.message, each.category, each.filename, each.lineno)


def _file_of(given: str | None) -> tuple[str | None, list[tuple[str, Any]]]:
    """Return the YAML file that a positional argument means, and the settings: a run's folder has
    one, and a model is one.

    Raises:
        ValueError: a folder that is neither.
    """
    if given is None or (not os.path.isdir(given) and not given.endswith(".gguf")):
        return given, []
    settings = os.path.join(given, run_folder.SETTINGS)
    if os.path.isfile(settings) and not run_folder.is_model(given):
        return settings, [("output_dir", given)]  # it may have been moved
    if given.endswith(".gguf") or run_folder.is_model(given):
        return None, [("model", given)]
    raise ValueError(
        f"{given} is a folder with neither a run ({run_folder.SETTINGS}) nor a model"
        " (config.json): give a YAML file, or"
        " --model with the folder of a model"
    )


def _without(arguments: list[str], flags: Sequence[str]) -> list[str]:
    """Return the arguments without some flags, each with its value."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in flags:
            next(rest, None)
        elif argument.partition("=")[0] not in flags:
            kept.append(argument)
    return kept


def _explain(error: Exception) -> int:
    """Print an error as one line and answer the exit code that it means."""
    if _debugging():
        traceback.print_exception(error)
    text = one_line(str(error)) + open_files.way_out(error)
    code = FAILED
    if isinstance(error, DoesNotFit):
        code = TOO_LARGE
    elif isinstance(error, ValueError):
        code = BAD_INPUT
    elif isinstance(error, place.LostRank):
        code = place.LOST
    elif isinstance(
        error, FileNotFoundError | NotADirectoryError | IsADirectoryError | PermissionError
    ):
        code = BAD_INPUT
        text = text if error.filename is None else f"{error.filename}: {error.strerror}"
    else:
        text = f"{type(error).__name__}: {text} (BLOCKWALK_DEBUG=1 shows where)"
    say(f"blockwalk: error: {one_line(text)}", file=sys.stderr)
    return code


def _debugging() -> bool:
    return os.environ.get("BLOCKWALK_DEBUG", "") not in ("", "0")


def parser(explained: Command | None) -> argparse.ArgumentParser:
    """Return the parser, with what help says of the settings of the one command that is asked for
    it."""
    found = argparse.ArgumentParser(
        prog="blockwalk",
        description="Fine-tune and train language models that do not fit in memory, one block at a time.",
        epilog="Exit codes: 0 done, 1 failed while running, 2 usage, configuration or data, 3 the plan does not fit.",
        allow_abbrev=False,
    )
    found.add_argument("--version", action="version", version=f"blockwalk {__version__}")
    subparsers = found.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        epilog = None
        if command is explained and command.takes_settings:
            from blockwalk.cli import settings_help

            epilog = "\n".join(settings_help.lines(command.name))
        sub = subparsers.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.add_argument(
            "--device",
            metavar="NAME",
            help="cpu, cuda, cuda:1, xpu; BLOCKWALK_DEVICE, or what is there",
        )
        for name, details in command.options:
            sub.add_argument(name, **details)
    return found
