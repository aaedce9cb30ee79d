"""``blockwalk pack``, ``merge``, ``replay`` and ``export``: the subcommands that write a model, or what it is made from."""

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
from blockwalk.models.run_folder import adapter_of
from blockwalk.plan.placement import Codec
from blockwalk.plan.words import counted
from blockwalk.program.program import human_bytes
from blockwalk.system.terminal import is_terminal, say

CALIBRATION = 128, 512
"""Records that ``pack --calibrate`` draws, and the most tokens of each."""


def pack(arguments: argparse.Namespace) -> None:
    """Write a block store."""
    from blockwalk.engine import pack as packing

    codec, sequences = Codec(arguments.codec), []
    if arguments.calibrate:
        from blockwalk.data.corpus import sample
        from blockwalk.data.encode import load_tokenizer

        sequences = sample(arguments.calibrate, load_tokenizer(arguments.model), *CALIBRATION)
    with _bar("packing") as progress:
        packing.pack(arguments.model, arguments.out, codec, arguments.group_size, sequences, progress=progress)
    say(f"packed {arguments.model} in {codec} to {arguments.out}")


def merge(arguments: argparse.Namespace) -> None:
    """Write merged safetensors."""
    from blockwalk.convert import merge as packing

    with _bar("merging") as progress, opened_adapter(arguments.adapter, arguments.model) as adapter:
        if adapter is None:
            raise ValueError("merge needs an adapter: its folder, a run's, or one of its checkpoints")
        packing.merge(arguments.model, adapter, arguments.out, dtype=arguments.dtype, progress=progress)
    say(f"merged {arguments.adapter} into {arguments.model}: {arguments.out}")


def gguf(arguments: argparse.Namespace) -> None:
    """Write a GGUF file, and a Modelfile beside it."""
    from blockwalk.convert import to_gguf
    from blockwalk.system import own_text

    out = Path(arguments.out)
    adapter = adapter_of(arguments.adapter) if arguments.adapter else None
    own_text.refuse_foreign(out.with_name("Modelfile"))
    with _bar("writing") as progress, opened_adapter(arguments.adapter, arguments.model) as opened:
        to_gguf.convert(arguments.model, out, adapter=opened, dtype=arguments.dtype, progress=progress)
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


def replay(arguments: argparse.Namespace) -> None:
    """Rebuild what a zeroth-order run trained."""
    from blockwalk.convert import replay as replaying

    with _bar("replaying") as progress:
        given = (arguments.base, arguments.ledger, arguments.out)
        steps = replaying.replay(*given, until=arguments.until, progress=progress)
    say(f"replayed {counted(steps, 'step')} of {arguments.ledger} on {arguments.base}: {arguments.out}")


def export(arguments: argparse.Namespace) -> None:
    """Write a zeroth-order fine-tune as one small file."""
    from blockwalk.convert import replay as replaying

    with _bar("checking") as progress:
        given, rebuild = (arguments.base, arguments.ledger, arguments.out), not arguments.no_rebuild
        steps, nbytes = replaying.export(*given, until=arguments.until, rebuild=rebuild, progress=progress)
    say(f"exported {counted(steps, 'step')} of {arguments.ledger} in {human_bytes(nbytes)}: {arguments.out}")
    say(f"rebuild the model with: blockwalk replay {arguments.base} {arguments.out} FOLDER")


@contextmanager
def _bar(title: str) -> Iterator[Any]:
    """A function of (bytes done, bytes in all) that shows a bar on a terminal; None elsewhere."""
    if not is_terminal(sys.stdout):
        yield None
        return
    from rich import progress

    columns = (progress.TextColumn(title), progress.BarColumn(), progress.TextColumn("{task.description}"))
    with progress.Progress(*columns) as bar:
        task = bar.add_task("")

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=f"{human_bytes(done)} of {human_bytes(total)}")

        yield show
