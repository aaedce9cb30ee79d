"""The command line: one subcommand is run, and an error is one line with an exit code.

Exit codes: 0 done; 1 a failure while running; 2 usage, configuration or data; 3 the plan does not
fit the budget given, or the memory that there is; 143, 130, 129 or 138 a run that SIGTERM, SIGINT,
SIGHUP or SIGUSR1 ended early, its checkpoint saved. ``BLOCKWALK_DEBUG=1`` shows tracebacks.

Nothing here imports torch: a subcommand's module is imported when it runs.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from blockwalk.cli import imports
from blockwalk.cli.commands import COMMANDS, Command, parser
from blockwalk.cli.configuration import Settings, configuration
from blockwalk.plan.parsing import did_you_mean
from blockwalk.ranks import launch, place
from blockwalk.report.forecast import DoesNotFit
from blockwalk.system import kernel_notes, open_files
from blockwalk.system.temporary import require_temporary
from blockwalk.system.terminal import PATIENCE, one_line, say, steady
from blockwalk.train import config
from blockwalk.train.foreign_settings import ForeignSettings

FAILED = 1
BAD_INPUT = 2
TOO_LARGE = 3
INTERRUPTED = 130

ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables that set torch's allocator of device memory; a user who has set one of them has
chosen."""


def main(argv: list[str] | None = None) -> int:
    """Run ``blockwalk`` with these arguments (``sys.argv`` unless given) and answer its exit
    code."""
    words = list(sys.argv[1:] if argv is None else argv)
    by_name = {command.name: command for command in COMMANDS}
    command = next((by_name[word] for word in words if word in by_name), None)
    answers = command is None or command.answers
    with steady(math.inf if answers else PATIENCE) as streams:
        code = _run(command, words)
        failures = [stream.failure for stream in streams if stream.failure is not None]
        # A broken pipe is a reader such as head that has read enough.
        if answers and code == 0 and failures and not isinstance(failures[0], BrokenPipeError):
            say(f"blockwalk: error: standard output: {failures[0].strerror}", file=sys.stderr)
            return FAILED
        return code


def _run(command: Command | None, words: list[str]) -> int:
    """Run a subcommand with the words of the command line, and answer its exit code."""
    _prepare_process()
    rank_place = place.Place()
    helps = "-h" in words or "--help" in words
    try:
        _require_command(words)
        imports.load_named(words)
        arguments, settings = _parsed(command, words, parser(command if helps else None))
        if command is None:
            arguments.parser.print_help()
            return 0
        if arguments.device:
            # The ranks that this process starts inherit it.
            os.environ["BLOCKWALK_DEVICE"] = arguments.device
        if not command.takes_settings:
            require_temporary()
            return command.function()(arguments) or 0
        rank_place = place.place()
        if rank_place.world == 1 and getattr(arguments, "nproc_per_node", None):
            return _start_ranks(command, arguments, settings, words)
        run = configuration(command, arguments, [*settings, *rank_place.settings()])
        return command.function()(run, arguments) or 0
    except Exception as error:
        code = _explain(error)
        if rank_place.world > 1:
            os._exit(code)  # a thread may wait for other ranks for ever
        return code
    except KeyboardInterrupt:
        say("blockwalk: interrupted", file=sys.stderr)
        return INTERRUPTED


def _prepare_process() -> None:
    """Set what a process must have before torch is imported."""
    if not _debugging():
        # Libraries' notes to their callers are not for our users.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", module="peft")  # that a base model was moved
        kernel_notes.silence()
    # libgomp's threads wait 14 ms for one another before they sleep, and where another program has
    # a core, every operator does; half a millisecond bridges the pauses between operators as well.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Batches of many lengths leave holes among a GPU's blocks of fixed sizes, which segments that
    # grow do not have.
    if not any(name in os.environ for name in ALLOCATORS):
        os.environ[ALLOCATORS[0]] = "expandable_segments:True"
    open_files.raise_limit()


def _require_command(words: Sequence[str]) -> None:
    """Raise ValueError where the first word of a command line is no subcommand."""
    names = [command.name for command in COMMANDS]
    if words and not words[0].startswith("-") and words[0] not in names:
        similar = difflib.get_close_matches(words[0], names, n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else f"; known: {', '.join(names)}"
        raise ValueError(f"unknown command {words[0]!r}{hint}")


def _parsed(
    command: Command | None, words: list[str], commands: argparse.ArgumentParser
) -> tuple[argparse.Namespace, Settings]:
    """Return the arguments of a command line, and the settings among its flags.

    Raises:
        ValueError: a flag is unknown.
    """
    settings: Settings = []
    if command is not None and command.takes_settings:
        flags = {"help", "version", *command.flags, *dict(command.elsewhere)}
        settings, words = config.split_flags(words, flags)
    arguments, unknown = commands.parse_known_args(words)
    if command is not None:
        unknown = _placed(command, arguments, unknown)
    if command is not None and unknown:
        names = [*command.flags, *(config.setting_names() if command.takes_settings else [])]
        name = unknown[0].removeprefix("--").partition("=")[0]
        instead = dict(command.elsewhere).get(name.replace("-", "_"))
        hint = did_you_mean(name, names) if instead is None else f": {instead}"
        raise ValueError(f"unknown argument {unknown[0]!r}{hint}")
    return arguments, settings


def _placed(command: Command, arguments: argparse.Namespace, words: list[str]) -> list[str]:
    """Fill arguments that may be left out with words that argparse did not place, since a flag
    stands before them, and return the other words."""
    free = [name for name, _ in command.options if name[0] != "-" and not vars(arguments)[name]]
    remaining = []
    for word in words:
        if free and not word.startswith("-"):
            setattr(arguments, free.pop(0), word)
        else:
            remaining.append(word)
    return remaining


def _start_ranks(
    command: Command, arguments: argparse.Namespace, settings: Settings, words: Sequence[str]
) -> int:
    """Check the configuration, then start the ranks of this machine, and answer their exit code."""
    ranks = arguments.nproc_per_node
    mesh = place.Place(world=ranks * arguments.nnodes, ranks_per_node=ranks).settings()
    runs_here = arguments.nnodes == 1
    configuration(command, arguments, [*settings, *mesh], runs_here=runs_here, starts=True)
    return launch.start(_without(words, launch.LAUNCH_FLAGS), ranks, arguments.nnodes)


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the words of a command line without some flags, each with its value."""
    remaining: list[str] = []
    words_ahead = iter(words)
    for word in words_ahead:
        if word in flags:
            next(words_ahead, None)
        elif word.partition("=")[0] not in flags:
            remaining.append(word)
    return remaining


def _explain(error: Exception) -> int:
    """Print an error as one line and answer the exit code that it means."""
    if _debugging():
        traceback.print_exception(error)
    if isinstance(error, ForeignSettings):
        texts = map(one_line, str(error).splitlines())
        say(*(f"blockwalk: error: {text}" for text in texts), file=sys.stderr)
        return BAD_INPUT
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
