"""The adapter that ``--adapter`` names: a folder of PEFT's, a run's, or a checkpoint, whose adapter is written for the time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blockwalk.models.run_folder import ADAPTER_CONFIG, adapter_of
from blockwalk.models.saved_template import FILE as TEMPLATE
from blockwalk.plan.run_config import DataSettings

NONE = "none"
"""The word by which ``--adapter`` leaves a run's adapter out."""


@contextmanager
def opened_adapter(adapter: str | None, model: str) -> Iterator[Path | None]:
    """Yield the folder of an adapter of a model; None where none is named.

    Raises:
        ValueError: a checkpoint that holds no adapter, with what gives its weights.
    """
    if not adapter or adapter == NONE:
        yield None
        return
    from blockwalk.convert.checkpoint_adapter import is_checkpoint, write_adapter

    folder = adapter_of(adapter)
    if not (folder / ADAPTER_CONFIG).is_file():
        refuse_unfinished(folder)
    if not is_checkpoint(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="blockwalk-adapter-") as temporary:
        out = Path(temporary)
        write_adapter(model, folder, out)
        _write_template(folder, model, out)
        yield out


def refuse_unfinished(folder: Path) -> None:
    """Raise ValueError for the folder of a run that has checkpoints and has not ended, with what can be used of it."""
    from blockwalk.checkpoints import run_checkpoint

    newest = run_checkpoint.latest(folder)
    if newest is not None:
        raise ValueError(
            f"{folder} holds no trained adapter or model, since its run has not ended: --adapter {newest} takes its newest"
            f" checkpoint, --adapter {NONE} the model before it"
        )


def _write_template(checkpoint: Path, model: str, out: Path) -> None:
    """Write the chat template that a checkpoint's run gave its model, where it gave one."""
    from blockwalk.checkpoints import run_checkpoint
    from blockwalk.data.encode import tokenizer_of

    data = run_checkpoint.load(checkpoint, weights=False).config["data"]
    if template := data.get("chat_template"):
        tokenizer = tokenizer_of(model, DataSettings(chat_template=template))
        (out / TEMPLATE).write_text(tokenizer.chat_template, encoding="utf-8")
