"""The identity of a run's training data: content, not names. A resumed run may have moved its
files, and is told what changed where their content did."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blockwalk.checkpoints.changed_settings import ONLY_EVALUATION
from blockwalk.models.saved_template import FILE as TEMPLATE
from blockwalk.plan.data_source import names_of
from blockwalk.plan.run_config import RunConfig
from blockwalk.system.remembered_digests import file_digest
from blockwalk.train.prepared_run import PreparedRun


def identity(run: RunConfig, prepared: PreparedRun) -> dict[str, Any]:
    """Return the parts that the examples are made of, as JSON values: digests of the text, the
    tokenizer's files and the chat template, and counts of records and tokens. A text that is no
    file here (a hub data set) has no digest."""
    files = {str(path): _digest(data) for path, data in prepared.tokenizer_files.items()}
    template = files.pop(TEMPLATE, "")
    texts = names_of(run.data.train)
    return {
        "text": [_file_digest(Path(os.path.expanduser(source))) for source in texts],
        "records": prepared.rows.report.records,
        "sequences": len(prepared.rows),
        "tokens": len(prepared.rows.token_ids),
        "template": template,
        "tokenizer": dict(sorted(files.items())),
    }


def _digest(data: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(data).data, digest_size=8).hexdigest()


def _file_digest(path: Path) -> list[Any]:
    """Return bytes and digest of a file; none where the name is not a file's."""
    if not path.is_file():
        return []
    return [path.stat().st_size, file_digest(path)]


def differences(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    saved_settings: Mapping[str, Any],
    settings: Mapping[str, Any],
    sources: Sequence[str],
) -> list[str]:
    """Return the reasons why a resumed run's examples are not a checkpoint's, a phrase each, by the
    :func:`identity` of both, their settings of ``data`` and the names of the sources now. An older
    checkpoint that has fewer parts differs in none of the others."""
    earlier = {**now, **saved}
    earlier_settings = {**settings, **saved_settings}
    phrases = []
    if earlier["text"] != now["text"]:
        phrases.append(_changed_text(earlier["text"], now["text"], sources))
    for counted in ("records", "sequences", "tokens"):
        if earlier[counted] != now[counted]:
            phrases.append(f"the number of {counted} ({earlier[counted]:,}, now {now[counted]:,})")
    if earlier["template"] != now["template"]:
        phrases.append("the chat template")
    if earlier["tokenizer"] != now["tokenizer"]:
        files = dict(earlier["tokenizer"].items() ^ now["tokenizer"].items())
        phrases.append(f"the tokenizer ({', '.join(sorted(files))})")
    for name, value in settings.items():
        trains = name == "eval_share" or not f"data.{name}".startswith(ONLY_EVALUATION)
        if trains and earlier_settings[name] != value:
            phrases.append(f"data.{name} ({earlier_settings[name]}, now {value})")
    if not phrases and saved and all(earlier["text"]):
        return [
            "the versions of the libraries that make them (the same text, template, tokenizer and"
            " settings)"
        ]
    return phrases or ["their tokens (what made them is not known of the checkpoint)"]


def _changed_text(saved: list[list[Any]], now: list[list[Any]], names: Sequence[str]) -> str:
    """Return what changed in the files of ``data.train``, named one by one where there are as many
    as there were."""
    if len(saved) == len(now):
        changed = [texts for texts in zip(names, saved, now, strict=True) if texts[1] != texts[2]]
    else:
        changed = [(" + ".join(names), _total(saved), _total(now))]
    told = []
    for name, old, new in changed:
        size = "other ones" if old[:1] == new[:1] else _bytes(new)
        told.append(f"{name}: {_bytes(old)}, now {size}")
    return f"the text of data.train ({'; '.join(told)})"


def _total(texts: list[list[Any]]) -> list[Any]:
    """Return the bytes of several files."""
    return [sum(text[0] for text in texts if text)]


def _bytes(text: list[Any]) -> str:
    return f"{text[0]:,} bytes" if text else "no file"
