"""The table of subcommands, and the parser that is made of it.

Nothing here imports torch: a subcommand's module is imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

from blockwalk import __version__
from blockwalk.plan.codecs import CODECS
from blockwalk.plan.row_settings import bare

Option = tuple[str, dict[str, Any]]
"""An argument of a subcommand, as ``ArgumentParser.add_argument`` takes it."""


@dataclass(frozen=True, slots=True)
class WrittenCodecs:
    """The codecs that Blockwalk writes, those of imported modules too; a text may have a row's
    settings: ``mine(bits=3)``."""

    def __iter__(self) -> Iterator[str]:
        return iter(CODECS.written)

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and bare(text) in CODECS.written


def _value(name: str, metavar: str, help: str, **more: Any) -> Option:
    return name, {"metavar": metavar, "help": help, **more}


def _switch(name: str, help: str) -> Option:
    return name, {"action": "store_true", "help": help}


def _choice(name: str, choices: Container[Any], help: str, **more: Any) -> Option:
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
_LENGTHS = tuple(
    (name, "the length of an answer is --max_new_tokens N") for name in ("max_length", "max_tokens")
)
"""Names that other tools have for the length of an answer; here the first is one of data's."""
_JSON = _switch("--json", "print JSON")
_AS_TRAINED = _switch("--as-trained", "evaluate only on the quantised weights (halves the time)")


_SHORT = {"--verbose": ("-v",)}
"""Other names of flags."""


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

    @property
    def flags(self) -> list[str]:
        """The names of its flags and arguments, without dashes."""
        imports = [] if self.takes_settings else ["import"]  # with settings, it is one of them
        return ["device", *imports, *(name.removeprefix("--") for name, _ in self.options)]

    def function(self) -> Callable[..., int | None]:
        """Import and return the function that runs the subcommand."""
        module, _, name = self.target.partition(":")
        function: Callable[..., int | None] = getattr(importlib.import_module(module), name)
        return function


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
            _value("--method", "NAME", "plans of this method alone; default: exact gradients"),
            _switch(
                "--chat", "the data are conversations: a model without a chat template gets one"
            ),
            _value("--out", "FILE", "default: run.yaml", default="run.yaml"),
            _switch("--examples", "copy the examples here instead: a small model, data, runs"),
        ),
    ),
    Command(
        "convert-config",
        "write a run's YAML file from a file of axolotl, LLaMA-Factory, TRL, mlx-lm or Unsloth",
        "blockwalk.cli.convert_config:convert_config",
        (
            _value("file", "FILE", "a YAML or JSON file with another tool's settings"),
            _value("--out", "FILE", "default: run.yaml", default="run.yaml"),
        ),
    ),
    Command(
        "pack",
        "write a model as a block store: a folder that is read a block at a time",
        "blockwalk.cli.models:pack",
        (
            _value("model", "MODEL", "a hub name, a folder or a GGUF file"),
            _value("out", "OUT", "the folder to write"),
            _choice("--codec", WrittenCodecs(), "default: int4a", default="int4a"),
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
            _switch("--explain", "with --hardware: the best of each axis, and why others fell out"),
            _value(
                "--tokens",
                "N",
                "with --hardware: tokens of a step over all ranks, which micro-batches make up",
                type=int,
                default=0,
            ),
            _switch(
                "--largest_batch",
                "with --hardware: the most sequences that fit each ranked or refused plan",
            ),
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
            _switch("--verbose", "print the kinds of state and the whole first record, too"),
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
        "predict",
        "print the label word of each text with its probability, as JSON lines",
        "blockwalk.cli.predict:predict",
        (
            _value("config", "RUN", "a run's folder or YAML file"),
            _value("file", "FILE", "texts: JSON, CSV, Parquet or text; no label needed", nargs="?"),
            _value("--text", "TEXT", "one text in place of a file"),
            _OWN_ADAPTER,
        ),
        takes_settings=True,
        answers=True,
    ),
    Command(
        "generate",
        "continue a prompt",
        "blockwalk.cli.generate:generate",
        (
            _RUN,
            _OWN_ADAPTER,
            _value("--prompt", "TEXT", "text to continue; - reads standard input"),
            _switch(
                "--chat",
                "the prompt is a user's turn in the model's chat template, as it is without a word"
                " where the run learnt conversations",
            ),
            _switch("--raw", "the prompt is continued as it stands, whatever the run learnt"),
            _SYSTEM,
            _value(
                "--messages",
                "FILE",
                "a conversation to answer: a JSON list of turns with role and content",
            ),
            _value("--max_new_tokens", "N", "default: 64", type=int, default=64),
            _TEMPERATURE,
        ),
        elsewhere=_LENGTHS,
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
            *_LENGTHS,
        ),
        takes_settings=True,
        answers=True,
    ),
    Command(
        "merge",
        "write a model with its adapter merged in, as safetensors",
        "blockwalk.cli.models:merge",
        (
            _value(
                "model",
                "MODEL",
                "the base: a hub name, a folder or a GGUF file; left out where a run is named",
            ),
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
        "convert",
        "write a first-order checkpoint as torch.distributed.checkpoint reads it, or what that"
        " wrote (FSDP, torchtitan) as a checkpoint or a model",
        "blockwalk.cli.models:convert",
        (
            _value("source", "FOLDER", "a run's checkpoint, or a folder that torch wrote"),
            _value("out", "OUT", "the folder to write"),
            _choice(
                "--to",
                ["dcp", "checkpoint", "model"],
                "dcp: for torch, safetensors alone; checkpoint: with the optimizer's states; model:"
                " weights",
                required=True,
            ),
            _value(
                "--model",
                "MODEL",
                "dcp: what gives the shapes, default: the run's; model: what configuration and"
                " tokenizer come from",
                default="",
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


def parser(explained: Command | None) -> argparse.ArgumentParser:
    """Return the parser of every subcommand; parsed arguments have it as ``parser``.

    Args:
        explained: the subcommand whose help is asked for: its help ends with its settings.
    """
    top = argparse.ArgumentParser(
        prog="blockwalk",
        description="Fine-tune and train language models that do not fit in memory, one block at a"
        " time.",
        epilog="Exit codes: 0 done, 1 failed while running, 2 usage, configuration or data, 3 the"
        " plan does not fit.",
        allow_abbrev=False,
    )
    top.set_defaults(parser=top)
    top.add_argument("--version", action="version", version=f"blockwalk {__version__}")
    subparsers = top.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        epilog = None
        if command is explained and command.takes_settings:
            from blockwalk.cli import settings_help

            epilog = "\n".join(settings_help.lines(command.name))
        subparser = subparsers.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        subparser.add_argument(
            "--device",
            metavar="NAME",
            help="cpu, cuda, cuda:1, xpu; BLOCKWALK_DEVICE, or what is there",
        )
        if not command.takes_settings:
            subparser.add_argument(
                "--import",
                metavar="MODULE,...",
                help="modules with rows of your own, whose code runs: files, or modules in the"
                " working folder or installed",
            )
        for name, details in command.options:
            subparser.add_argument(name, *_SHORT.get(name, ()), **details)
    return top
