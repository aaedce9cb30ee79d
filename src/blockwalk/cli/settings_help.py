"""The settings as ``--help`` lists them: in groups, each with its type, its default and the
sentence that belongs to its field.

The sentences are the fields' own docstrings, which are read from the source when help is asked for.
Nothing here imports torch."""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import inspect
import keyword
import re
import shutil
import textwrap
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any

from blockwalk.plan import choices, ranges, row_settings, run_config
from blockwalk.plan.codecs import CODECS
from blockwalk.plan.methods import METHODS
from blockwalk.plan.parsing import (
    READERS,
    did_you_mean,
    filled,
    flat,
    hints_of,
    names_words,
    plain_values,
    words_in,
)
from blockwalk.plan.plan import Plan
from blockwalk.plan.table import LOOSE, spoken
from blockwalk.plan.tiers import TIERS
from blockwalk.train import config

_ALL = ("train", "plan", "eval", "generate", "chat")
_EVAL = ("train", "plan", "eval")
_TRAIN = ("train", "plan")
GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "model and method",
        "model import method frozen trainable compute_dtype prefetch resident compile loss seed",
        _ALL,
    ),
    (
        "training data",
        "data.train data.weights data.max_samples data.train_split data.shuffle data.appended"
        " data.show_first",
        _TRAIN,
    ),
    ("chats", "data.chat_template data.chat_template_arguments", _ALL),
    (
        "held-out data, and how records become tokens",
        "data.eval data.eval_split data.eval_share data.subset data.format data.columns"
        " data.prompt data.task* data.shots data.template data.label_words data.label_field"
        " data.label_scores data.max_length data.allow_truncation data.packing"
        " data.padding_multiple eval_batch_size eval_batches",
        _EVAL,
    ),
    ("adapters", "lora lora.* prefix.*", _TRAIN),
    (
        "steps",
        "objective reference batch_size gradient_accumulation_steps together epochs max_steps",
        _TRAIN,
    ),
    ("optimizer", "optimizer.* update.* neftune_noise_alpha", _TRAIN),
    (
        "where the rest lives",
        "estimator gradient optimizer_state activation recompute sequence_tile budget cache.*",
        _TRAIN,
    ),
    ("zeroth order", "zo.*", _TRAIN),
    ("ranks", "mesh.* context.* pipeline.* start_timeout interface elastic", _TRAIN),
    (
        "run",
        "compare output_dir overwrite_output_dir resume_from_checkpoint save_every keep_checkpoints"
        " keep_best early_stopping skip_nonfinite log_every report_to run_name push_to_hub"
        " eval_every eval_first data.eval_limit",
        _TRAIN,
    ),
)
"""Each group's title, its settings by name or pattern, and the commands that read them."""

_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")
"""A reference in a docstring; its group is the last part of the name."""

_CLASSES: dict[str, tuple[type, ...]] = {
    "": (run_config.RunConfig, Plan),
    "lora": (choices.LoraSettings,),
    "prefix": (choices.PrefixSettings,),
    "data": (run_config.DataSettings,),
    **{
        name: (type(value),)
        for name in hints_of(Plan)
        if hasattr(value := getattr(Plan(), name), "__slots__")
    },
}


def lines(command: str, begins: str = "") -> Iterator[str]:
    """Yield lines of ``blockwalk COMMAND --help`` on the settings that the command reads, and whose
    names begin so.

    Raises:
        ValueError: no name begins so.
    """
    all_names = config.setting_names()
    if not any(name.startswith(begins) for name in all_names):
        hint = did_you_mean(begins, all_names, LOOSE)
        raise ValueError(f"no setting's name begins with {begins!r}{hint}")
    width = min(shutil.get_terminal_size().columns, 120)
    default_of = defaults()
    yield (
        "Settings, named as in the YAML file, which a flag overrides. Defaults are those of"
        " method mebp."
    )
    if command not in _TRAIN:
        yield (
            f"A training run's other settings may stand in the file as well; {command} does not"
            " read them."
        )
    for title, names, commands in GROUPS:
        listed = [name for name in settings_of(names) if name.startswith(begins)]
        if command in commands and listed:
            yield f"\n{title}:"
            for name in listed:
                form, sentence = described(name)
                default = default_of.get(name)
                if name != "lora" and default not in ("", None, [], {}):
                    sentence += f" (default: {shown(default)})"
                indent = " " * 8
                yield f"  --{name} {form}"
                yield textwrap.fill(
                    sentence, width, initial_indent=indent, subsequent_indent=indent
                )


def defaults() -> dict[str, Any]:
    """Return the values that settings have unless given, by dotted name, under method mebp."""
    return flat(config.from_mapping({}).to_mapping())


def settings_of(names: str) -> Iterator[str]:
    """Yield the settings that a group's names and patterns stand for; a placement is one, not its
    parts."""
    parts = tuple(f"{placement}." for placement in config.PLACEMENTS)
    all_names = config.setting_names()
    of_rows = [name for name in all_names if config.owners_of(name)]
    listed = [name for name in all_names if not name.startswith(parts) and name not in of_rows]
    for pattern in names.split():
        matches = fnmatch.filter(listed, pattern)
        yield from matches
        sections = {f"{name.partition('.')[0]}." for name in matches if "." in pattern}
        yield from (
            name
            for name in of_rows
            if name.startswith(tuple(sections))
            or any(name.startswith(f"{match}.") for match in matches)
        )


def described(name: str) -> tuple[str, str]:
    """Return one word for the values that a setting takes, and the sentence of its field."""
    if owners := config.owners_of(name):
        return _of_rows(name, owners)
    cls, field = _field(name)
    hint = bool if name == "lora" else hint_of(name)
    sentence = _ROLE.sub(r"\1", _sentences(cls)[field]).replace("``", "")
    words: Any = words_in(hint) if names_words(hint) else choices_of(name)
    table = getattr(hint, "table", words)
    texts = {
        "tiers": TIERS.help,
        "codecs": CODECS.help,
        "automatic": spoken(CODECS.tried("frozen"), "and"),
        "choices": getattr(table, "help", ""),
    }
    form = "|".join(words) if words else READERS[hint][0]
    return form, filled(sentence, texts)


def _of_rows(name: str, owners: Mapping[str, type]) -> tuple[str, str]:
    """Return the same of a setting that rows have of their own: what it is to each of them."""
    field = name.rpartition(".")[2]
    sentences = []
    for row, cls in owners.items():
        text = row_settings.help_of(cls, field) or _docstrings(cls).get(field, "")
        fact = next(fact for fact in dataclasses.fields(cls) if fact.name == field)
        needed = fact.metadata.get(row_settings.REQUIRED)
        default = "required" if needed else f"default: {shown(plain_values(fact.default))}"
        ends = text.rstrip(".") + ". " if text else ""
        values = row_settings.described(cls, field)
        sentences.append(f"{row}: {ends}{values[0].upper()}{values[1:]} ({default})")
    cls = next(iter(owners.values()))
    words = row_settings.words_of(cls, field)
    form = "|".join(words) or READERS[hints_of(cls)[field]][0]
    return form, f"{'. '.join(sentences)}."


def _docstrings(cls: type) -> Mapping[str, str]:
    """Return the docstrings below a class's fields; none where its source is not to be had."""
    try:
        return _sentences(cls)
    except (OSError, TypeError, SyntaxError):
        return {}


def choices_of(name: str) -> Collection[str]:
    """Return the words that a setting takes; none where it takes others than a few."""
    if owners := config.owners_of(name):
        return row_settings.words_of(next(iter(owners.values())), name.rpartition(".")[2])
    return ("auto", *METHODS) if name == "method" else ranges.CHOICES.get(name, ())


def hint_of(name: str) -> Any:
    """Return the type of a setting's field."""
    if owners := config.owners_of(name):
        return hints_of(next(iter(owners.values())))[name.rpartition(".")[2]]
    cls, field = _field(name)
    return hints_of(cls)[field]


def _field(name: str) -> tuple[type, str]:
    """Return the class that a setting is a field of, and the field's name."""
    section, _, setting = name.rpartition(".")
    field = f"{setting}_" if keyword.iskeyword(setting) else setting
    (cls,) = [cls for cls in _CLASSES[section] if field in hints_of(cls)]
    return cls, field


@functools.cache
def _sentences(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, on one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def shown(value: Any) -> str:
    """Return a default as it would be written."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
