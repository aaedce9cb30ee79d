"""A run's settings from a file of another tool, by the table that parsing asks
(:mod:`blockwalk.plan.foreign_rows`): what has a counterpart is written under our names, what has
none is told, and what would train something else is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockwalk.plan import foreign_values as to
from blockwalk.plan.foreign_names import BY_NAME, VALUES
from blockwalk.plan.foreign_rows import (
    AXOLOTL,
    DEFAULTS,
    FACTORY,
    MLX,
    OTHERS,
    TRANSFORMERS,
    TRL,
    Foreign,
)
from blockwalk.plan.foreign_values import Pair
from blockwalk.plan.parsing import Loader, flat
from blockwalk.plan.words import counted
from blockwalk.system.atomic_files import read_yaml
from blockwalk.train import config
from blockwalk.train.foreign_settings import Reader, grouped, pair_of, row_of

REGISTER = "dataset_info.json"
"""The file of LLaMA-Factory that says which file or hub name a data set's name stands for."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """The settings that a file of another tool stands for."""

    tool: str
    """The tool, as the page *Coming from* heads it."""
    settings: Mapping[str, Any]
    """Settings of ours by their dotted names."""
    origins: Mapping[str, str]
    """The lines of theirs that a setting stands for, by its name."""
    differences: tuple[str, ...]
    """Lines of theirs that are not followed, each with the reason."""
    left_out: tuple[str, ...]
    """Names of theirs that change nothing here."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A value for a setting of ours, from a line of theirs."""

    key: str
    value: Any
    """Their value."""
    result: Any
    """The value of the setting."""
    rank: int
    """0 for a name of ours, 1 for one that qualifies others (``save_strategy``), 2 for one that
    means the same (``save_steps``): the least wins."""


@dataclass(slots=True)
class _Reading:
    """Lines of a file, sorted by what becomes of them."""

    candidates: dict[str, list[_Candidate]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    refusals: dict[str, list[str]] = field(default_factory=dict)
    """Lines of theirs that cannot be followed, by the reason."""

    def refuse(self, line: str, reason: str) -> None:
        """Note a line that cannot be followed."""
        self.refusals.setdefault(reason.removesuffix("."), []).append(line)


def convert(path: Path) -> Conversion:
    """Return the settings that a file of another tool stands for.

    Args:
        path: a YAML or JSON file of axolotl, LLaMA-Factory, TRL, transformers, mlx-lm, or of
            Unsloth's arguments.

    Raises:
        ValueError: the file cannot be read, or asks for what cannot be followed: another
            objective, other adapters, names that nobody knows.
    """
    raw = read_yaml(path, Loader)
    if not isinstance(raw, Mapping) or not raw:
        raise ValueError(f"{path} holds no settings: a mapping of names to values is converted")
    names = frozenset(config.setting_names())
    pairs = [(key, value) for key, value in flat(raw).items() if not _says_nothing(value)]
    lines = grouped(pairs, names)
    tool = tool_of([key for key, _ in lines])
    reader = Reader(dict(pairs), names, config.reads)
    reading = _Reading()
    for key, value in lines:
        _read(key, value, reader, reading)
    settings, origins = _resolved(reading)
    if reading.refusals:
        count = sum(map(len, reading.refusals.values()))
        reasons = (f"{reason} ({', '.join(of)})" for reason, of in reading.refusals.items())
        raise ValueError(
            f"{path} has {counted(count, 'setting')} that cannot be followed. {'. '.join(reasons)}"
        )
    _with_defaults(tool, settings, origins, reader)
    _without_adapters(settings, origins, reading)
    if tool == FACTORY:
        _from_register(path, raw, settings, reading)
    if tool == MLX:
        _from_folder(settings)
    _require_readable(path, settings)
    return Conversion(tool, settings, origins, tuple(reading.differences), tuple(reading.left_out))


def _says_nothing(value: Any) -> bool:
    """Return whether a value is absent, or was taken out of a dump of transformers for secrecy."""
    return value is None or (
        isinstance(value, str) and value.startswith("<") and value.endswith("_TOKEN>")
    )


def tool_of(keys: list[str]) -> str:
    """Return the tool whose names a file has. A name that several tools have counts for each in
    part; transformers' count for none, since others have them too."""
    scores = dict.fromkeys((AXOLOTL, FACTORY, TRL, MLX, OTHERS), 0.0)
    for key in keys:
        name = key.rpartition(".")[2] if key not in BY_NAME else key
        row = BY_NAME.get(name)
        tools = [tool for tool, names in row.names.items() if name in names] if row else []
        for tool in tools:
            if TRANSFORMERS not in tools:
                scores[tool] += 1 / len(tools)
    best = max(scores, key=lambda tool: scores[tool])
    return best if scores[best] > 0 else TRANSFORMERS


def _read(key: str, value: Any, reader: Reader, reading: _Reading) -> None:
    """Read one line of theirs."""
    name, row, _ = row_of(key, reader.names)
    rank = 2 if row is not None and row.same is not None else 1
    if row is None and name in reader.names:
        row, is_theirs = VALUES.get(name, (None, to.is_off))
        if row is None or isinstance(value, Mapping | list) or not is_theirs(value):
            reading.candidates.setdefault(name, []).append(_Candidate(key, value, value, 0))
            return
        rank = 0
    line = config.as_yaml_line(key, value)
    if row is None:
        reading.refuse(line, "No tool's settings have such a name: leave it out")
    elif row.idle is not None and row.idle(value):
        reading.left_out.append(key)
    elif row.refused:
        reading.refuse(line, row.sentence)
    elif not row.ours or row.ours not in reader.names:
        reading.differences.append(f"{line}. {row.sentence}")
    else:
        _read_counterpart(key, value, row, rank, reader, reading)


def _read_counterpart(
    key: str, value: Any, row: Foreign, rank: int, reader: Reader, reading: _Reading
) -> None:
    """Read a line of theirs that a setting of ours stands for."""
    line = config.as_yaml_line(key, value)
    pair = pair_of(row, value, reader)
    if pair is None or not reader.tries(*pair):
        reading.refuse(line, row.sentence)
        return
    name, result = pair
    reading.candidates.setdefault(name, []).append(_Candidate(key, value, result, rank))
    if to.is_by_epoch(key, value):
        reading.differences.append(f"{line}. Steps are counted here, not epochs: see {name} above.")
    for source in value if isinstance(value, list) else [value]:
        unread = to.unread_of_source(source) if name.startswith("data.") else {}
        reading.differences += [
            f"{key}: {config.as_yaml_line(part, inner)}. Records are known by their columns here."
            for part, inner in unread.items()
        ]


def _resolved(reading: _Reading) -> tuple[dict[str, Any], dict[str, str]]:
    """Return one value for each setting, and the lines that it comes from. Lines that contradict
    one another are refused."""
    settings: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, candidates in reading.candidates.items():
        least = min(candidate.rank for candidate in candidates)
        winners = [candidate for candidate in candidates if candidate.rank == least]
        settings[name] = winners[0].result
        agreeing = [c for c in candidates if str(c.result) == str(settings[name])]
        lines = [config.as_yaml_line(c.key, c.value) for c in agreeing]
        origins[name] = ", ".join(_origin(c, name) for c in agreeing if c.key != name)
        for candidate in candidates:
            if candidate in agreeing:
                continue
            line = config.as_yaml_line(candidate.key, candidate.value)
            if candidate in winners:
                reading.refuse(line, f"{lines[0]} leads to another value of {name}")
            else:
                reading.differences.append(f"{line}. It gives way to {lines[0]}.")
    return settings, origins


def _origin(candidate: _Candidate, name: str) -> str:
    """Return what a setting comes from: their name alone where the value is the same."""
    if str(candidate.value) == str(candidate.result):
        return "" if candidate.key == name.rpartition(".")[2] else candidate.key
    line = config.as_yaml_line(candidate.key, candidate.value)
    return f"{line}, times the accumulation" if name == "batch_size" else line


def _with_defaults(
    tool: str, settings: dict[str, Any], origins: dict[str, str], reader: Reader
) -> None:
    """Add what the tool takes where its file says nothing."""
    for key, value in DEFAULTS[tool].items():
        name, row, _ = row_of(key, reader.names)
        name, result = pair_of(row, value, reader) or (name, value)
        has_adapters = any(other.startswith("lora") for other in settings)
        # a dump of arguments says neither which model is trained, nor how
        is_unsaid = name.startswith("lora") and "model" not in settings
        is_rounded = settings.get("frozen.codec", "raw") != "raw"  # which means adapters
        is_decided = name == "lora" and (has_adapters or is_rounded)
        has_none = name.startswith("lora.") and settings.get("lora") is False
        is_counted = name == "epochs" and settings.get("max_steps", 0)
        if name in settings or is_unsaid or is_decided or has_none or is_counted:
            continue
        settings[name] = result
        origins[name] = f"{tool}'s default"


def _without_adapters(settings: dict[str, Any], origins: dict[str, str], reading: _Reading) -> None:
    """Take out settings of adapters where all parameters are trained."""
    if settings.get("lora") is not False:
        return
    for name in [name for name in settings if name.startswith("lora.")]:
        del settings[name]
        reading.differences.append(f"{origins[name]}. All parameters are trained (lora: false).")
    if settings.get("frozen.codec") == "raw":
        del settings["frozen.codec"]


def _from_folder(settings: dict[str, Any]) -> None:
    """Put the files of mlx-lm's folder of data in the place of the folder."""
    folder = Path(str(settings.get("data.train", "")))
    for name, file in (("data.train", "train.jsonl"), ("data.eval", "valid.jsonl")):
        if folder.is_dir() and (folder / file).is_file():
            settings[name] = str(folder / file)


def _from_register(
    path: Path, raw: Mapping[str, Any], settings: dict[str, Any], reading: _Reading
) -> None:
    """Put files and hub names in the place of names in LLaMA-Factory's register of data sets, where
    it is there."""
    folder_name = str(raw.get("dataset_dir") or "data")
    folders = [Path(folder_name), path.parent / folder_name]
    folder = next((folder for folder in folders if (folder / REGISTER).is_file()), None)
    for setting in ("data.train", "data.eval"):
        value = settings.get(setting, "")
        names = [name for name in (value if isinstance(value, list) else [value]) if name]
        if folder is None:
            reading.differences += [
                f"{setting}: {name}. There is no {REGISTER} in {folder_name} that says which file"
                " it is: write its path or its name on the hub."
                for name in names
                if "/" not in name and not Path(name).exists()
            ]
            continue
        register = json.loads((folder / REGISTER).read_text(encoding="utf-8"))
        sources = [_registered(name, register, folder) for name in names]
        if sources:
            settings[setting] = sources[0] if len(sources) == 1 else sources


def _registered(name: str, register: Mapping[str, Any], folder: Path) -> str | dict[str, Any]:
    """Return the source that a name of the register stands for.

    Raises:
        ValueError: it has no such name.
    """
    if name not in register:
        raise ValueError(f"{folder / REGISTER} has no data set {name!r}")
    entry = register[name]
    path = str(folder / entry["file_name"]) if "file_name" in entry else entry.get("hf_hub_url")
    if not path:
        raise ValueError(f"{folder / REGISTER}: {name!r} names no file and no name on the hub")
    fields = {name: entry[key] for key, name in to.SOURCE_FIELDS.items() if entry.get(key)}
    columns = to.registered_columns(entry)
    if columns:
        fields["columns"] = columns
    return {"path": path, **fields} if fields else path


def _require_readable(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ValueError where the settings cannot be read together."""
    # the adapter's folder may not be there yet
    readable = {name: value for name, value in settings.items() if name != "lora.from"}
    try:
        config.from_mapping(readable)
    except ValueError as error:
        raise ValueError(f"{path}, under the names here: {error}") from None


def pairs_of(conversion: Conversion) -> list[Pair]:
    """Return the settings in the order of the list of all settings."""
    order = {name: place for place, name in enumerate(config.setting_names())}
    return sorted(conversion.settings.items(), key=lambda pair: order.get(pair[0], len(order)))
