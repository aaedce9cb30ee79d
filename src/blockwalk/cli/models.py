"""``blockwalk pack``, ``merge``, ``convert``, ``replay`` and ``export``: the subcommands that write
a model, or what it is made from."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockwalk.cli.adapters import opened_adapter
from blockwalk.models import saved_template
from blockwalk.models.run_folder import ADAPTER_CONFIG, SETTINGS, adapter_of, is_model
from blockwalk.plan.parsing import Loader
from blockwalk.plan.placement import Codec
from blockwalk.plan.words import counted
from blockwalk.program.program import human_bytes
from blockwalk.system import row_modules
from blockwalk.system.atomic_files import read_yaml
from blockwalk.system.terminal import is_terminal, say

CALIBRATION = 128, 512
"""Records that ``pack --calibrate`` draws, and the most tokens of each."""


def pack(arguments: argparse.Namespace) -> None:
    """Write a block store."""
    from blockwalk.engine import pack as packing

    codec = Codec(arguments.codec)
    sequences = []
    if arguments.calibrate:
        from blockwalk.data.corpus import sample
        from blockwalk.data.tokenizer import load_tokenizer

        sequences = sample(arguments.calibrate, load_tokenizer(arguments.model), *CALIBRATION)
    with _bar("packing") as progress:
        packing.pack(
            arguments.model,
            arguments.out,
            codec,
            arguments.group_size,
            sequences,
            progress=progress,
        )
    say(f"packed {arguments.model} in {codec} to {arguments.out}")


def merge(arguments: argparse.Namespace) -> None:
    """Write merged safetensors."""
    from blockwalk.convert import merge as packing

    if arguments.out is None:
        _refuse_trained_whole(Path(arguments.model))
        if arguments.adapter and (base := _base_of(Path(arguments.model))):  # merge RUN OUT
            names = {"model": base, "adapter": arguments.model, "out": arguments.adapter}
            merge(argparse.Namespace(**vars(arguments) | names))
            return
        raise ValueError(
            "merge takes a base, what was trained, and the folder to write:"
            f" {_merge_command(arguments)}"
        )
    with _bar("merging") as progress, opened_adapter(arguments.adapter, arguments.model) as adapter:
        if adapter is None:
            raise ValueError(
                "merge needs an adapter: its folder, a run's, or one of its checkpoints"
            )
        packing.merge(
            arguments.model, adapter, arguments.out, dtype=arguments.dtype, progress=progress
        )
    say(f"merged {arguments.adapter} into {arguments.model}: {arguments.out}")


def _refuse_trained_whole(run: Path) -> None:
    """Raise ValueError where a folder is of a run that trained all parameters, with the model that
    it wrote."""
    if _base_of(run) and is_model(run / "model"):
        raise ValueError(
            f"{run} is a run that has no adapter: its model, {run / 'model'}, is what was"
            " trained, and needs no merge"
        )


def _merge_command(arguments: argparse.Namespace) -> str:
    """Return the command that was meant by one of ``merge`` without all of its arguments: the base
    of a run is known."""
    if base := _base_of(Path(arguments.model)):
        return _merge(base, arguments.model, arguments.adapter or "OUT")
    if arguments.adapter and _base_of(Path(arguments.adapter)):
        return _merge(arguments.model, arguments.adapter, "OUT")
    return _merge("MODEL", "RUN", "OUT")


def _merge(*arguments: str) -> str:
    return shlex.join(["blockwalk", "merge", *arguments])


def _base_of(folder: Path) -> str:
    """Return the base of the run in a folder, or of the run whose adapter it is; empty where it is
    neither."""
    run = folder.parent if (folder / ADAPTER_CONFIG).is_file() else folder
    if is_model(folder) or not (run / SETTINGS).is_file():
        return ""
    return str(read_yaml(run / SETTINGS, Loader).get("model", ""))


def gguf(arguments: argparse.Namespace) -> None:
    """Write a GGUF file, and a Modelfile beside it."""
    from blockwalk.convert import to_gguf
    from blockwalk.system import own_text

    out = Path(arguments.out)
    if trained_from := _base_of(Path(arguments.model)):
        _refuse_trained_whole(Path(arguments.model))
        raise ValueError(
            f"{arguments.model} is a run, and no model: merge it first:"
            f" {_merge(trained_from, arguments.model, 'merged')};"
            f" then {shlex.join(['blockwalk', 'gguf', 'merged', arguments.out])}"
        )
    adapter = adapter_of(arguments.adapter) if arguments.adapter else None
    own_text.refuse_foreign(out.with_name("Modelfile"))
    with _bar("writing") as progress, opened_adapter(arguments.adapter, arguments.model) as opened:
        to_gguf.convert(
            arguments.model, out, adapter=opened, dtype=arguments.dtype, progress=progress
        )
    base = None if adapter is None else arguments.base or f"./{Path(arguments.model).name}.gguf"
    own_text.write(out.with_name("Modelfile"), to_gguf.modelfile(out, base), "# {}")
    files = ["-m", str(out)] if base is None else ["-m", base, "--lora", str(out)]
    template = Path(adapter or "") / saved_template.FILE
    if adapter is not None and template.is_file():  # a file of an adapter has no place for it
        files += ["--jinja", "--chat-template-file", str(template)]
    run = shlex.join(["llama-cli", *files])
    create = shlex.join(["ollama", "create", out.stem, "-f", str(out.with_name("Modelfile"))])
    say(f"written to {out}; run it with: {run}")
    say(f"or with Ollama:  {create} && {shlex.join(['ollama', 'run', out.stem])}")


def convert(arguments: argparse.Namespace) -> None:
    """Write a checkpoint for torch, or one of torch's as a checkpoint or a model."""
    from blockwalk.convert import dcp

    source = arguments.source
    out = arguments.out
    model = arguments.model
    if arguments.to == "model" and not model:
        raise ValueError(
            "--to model needs --model: a model of the same architecture, whose configuration and"
            " tokenizer go beside the weights"
        )
    if arguments.to == "checkpoint" and model:
        raise ValueError("--model has no use with --to checkpoint; leave it out")
    if arguments.to == "dcp":
        written = counted(dcp.to_dcp(source, out, model=model), "tensor")
    elif arguments.to == "checkpoint":
        written = counted(dcp.to_checkpoint(source, out), "parameter")
    else:
        written = counted(dcp.to_model(source, out, model=model), "tensor")
    say(f"wrote {written} of {source} to {out}")


def replay(arguments: argparse.Namespace) -> None:
    """Rebuild what a zeroth-order run trained."""
    from blockwalk.convert import replay as replaying

    _note_modules(arguments.ledger)
    with _bar("replaying") as progress:
        paths = (arguments.base, arguments.ledger, arguments.out)
        steps = replaying.replay(*paths, until=arguments.until, progress=progress)
    say(
        f"replayed {counted(steps, 'step')} of {arguments.ledger} on {arguments.base}:"
        f" {arguments.out}"
    )


def export(arguments: argparse.Namespace) -> None:
    """Write a zeroth-order fine-tune as one small file."""
    from blockwalk.convert import replay as replaying

    _note_modules(arguments.ledger)
    with _bar("checking") as progress:
        paths = (arguments.base, arguments.ledger, arguments.out)
        rebuild = not arguments.no_rebuild
        steps, nbytes = replaying.export(
            *paths, until=arguments.until, rebuild=rebuild, progress=progress
        )
    say(
        f"exported {counted(steps, 'step')} of {arguments.ledger} in {human_bytes(nbytes)}:"
        f" {arguments.out}"
    )
    say(f"rebuild the model with: blockwalk replay {arguments.base} {arguments.out} FOLDER")


def _note_modules(ledger: str) -> None:
    """Print a note for each module that brought rows to a ledger's run and is not here as it was:
    a replay needs those of its rule and noise alone, so nothing is refused for it."""
    from blockwalk.checkpoints.ledger import MODULES, NAME, read_ledger
    from blockwalk.models.hub import file_of

    loaded = row_modules.stamps()
    names = {row_modules.name_of(stamp): stamp for stamp in loaded}
    for stamp in read_ledger(file_of(ledger, NAME))[0].get(MODULES, ()):
        if stamp in loaded:
            continue
        name = row_modules.name_of(str(stamp))
        state = f"here it is {names[name]}" if name in names else f"--import {name} brings them"
        say(f"note: {ledger} was written with rows of {stamp}; {state}", file=sys.stderr)


@contextmanager
def _bar(title: str) -> Iterator[Any]:
    """A function of (bytes done, bytes in all) that shows a bar on a terminal; None elsewhere."""
    if not is_terminal(sys.stdout):
        yield None
        return
    from rich import progress

    columns = (
        progress.TextColumn(title),
        progress.BarColumn(),
        progress.TextColumn("{task.description}"),
    )
    with progress.Progress(*columns) as bar:
        task = bar.add_task("")

        def show(done: int, total: int) -> None:
            bar.update(
                task,
                completed=done,
                total=total,
                description=f"{human_bytes(done)} of {human_bytes(total)}",
            )

        yield show
