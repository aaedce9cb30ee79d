"""The tokenizer of a model as a run uses it: loaded, with its template, and checked."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from blockwalk.data.given_template import set_template
from blockwalk.data.normalizer_growth import require_bounded_file
from blockwalk.data.rendered import Tokenizer
from blockwalk.models.model_source import model_source
from blockwalk.models.saved_template import saved_with
from blockwalk.plan.run_config import DataSettings
from blockwalk.system.lfs import refuse_pointers
from blockwalk.system.paths import StrPath

# each of its threads would keep some 7 MB for the whole run
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "tokenizer.model", "vocab.json")
"""The files that a tokenizer's vocabulary may lie in."""


def tokenizer_of(
    model: str | Path, settings: DataSettings, adapter: StrPath | None = None
) -> Tokenizer:
    """Return the tokenizer of a model as a run uses it: with the chat template that was saved with
    the adapter, else the one that the settings name, and with the settings' arguments.

    Raises:
        ValueError: there is no tokenizer, or no such template.
    """
    tokenizer = load_tokenizer(model)
    saved = saved_with(adapter)
    set_template(
        tokenizer, "" if saved else settings.chat_template, settings.chat_template_arguments
    )
    if saved:
        tokenizer.chat_template = saved
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer saved in a model's folder.

    Raises:
        ValueError: there is none, or none that transformers reads.
    """
    from transformers import AutoTokenizer

    folder = model_source(path).require_config()
    if (file := folder / TOKENIZER_FILES[0]).is_file():
        require_bounded_file(file)
    try:
        with _without_vocabulary():
            return AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, fix_mistral_regex=True
            )
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # tokenizers raises no class of its own, and a file that is cut may lack any key
        refuse_pointers(folder)
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{path}: the tokenizer needs code of its own (auto_map in tokenizer_config.json),"
                " which is never run here: save it as a tokenizer.json"
            ) from None
        readable_files = (
            "read are tokenizer.json and what else transformers saves of one, and a GGUF file's own"
        )
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        cause = kind + " ".join(str(error).split())
        files = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
        source = f" from {' or '.join(files)}, which may be cut off" if files else ""
        raise ValueError(
            f"{path}: no tokenizer could be loaded{source} ({readable_files}): {cause}"
        ) from error


@contextmanager
def _without_vocabulary() -> Iterator[None]:
    """Let transformers read the added tokens of a tokenizer.json without keeping the vocabulary of
    that file: as Python objects it would stay while the file is read once more for the tokenizer
    itself. At 150,000 entries these objects are 55 MB."""
    base: Any = import_module("transformers.tokenization_utils_base")
    reader = base.json

    def load(file: Any, **options: Any) -> Any:
        content = reader.load(file, **options)
        if isinstance(content, dict) and "added_tokens" in content:
            content.pop("model", None)
        return content

    base.json = SimpleNamespace(**{**vars(reader), "load": load})
    try:
        yield
    finally:
        base.json = reader


def tokenizer_files(tokenizer: Tokenizer) -> dict[Path, np.ndarray]:
    """Return the bytes of the files that a tokenizer is saved in, by their paths below its
    folder."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = (path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder): np.fromfile(path, np.uint8) for path in files}


def require_rows(largest: tuple[int, str], tokenizer: Tokenizer, rows: int, setting: str) -> None:
    """Check that a model has a row for the largest token of a data set, which comes with the place
    of its record.

    Raises:
        ValueError: it has not; the token, the record and the number of rows are named.
    """
    token, place = largest
    if token >= rows:
        raise ValueError(
            f"{place}: the token {tokenizer.convert_ids_to_tokens(token)!r} has the id {token}, and"
            f" the model has {rows} rows of embeddings ({setting}): save the model with"
            f" resize_token_embeddings({len(tokenizer)}), or take the token out of the tokenizer or"
            " the data"
        )
