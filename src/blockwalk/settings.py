"""Settings as text: dotted names and values from YAML or flags, sizes in bytes, and what was probably meant."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, get_type_hints

from blockwalk.plan import Plan
from blockwalk.state import Codec, Group, Placement, Tier


def override(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """``plan`` with dotted settings changed: ``{"optimizer.learning_rate": 1e-4, "prefetch": 2}``; nested mappings work too. A
    placement whose group is left out keeps that of the plan.

    Raises:
        ValueError: an unknown key (with the nearest known one) or a value of the wrong type.
    """
    changes: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    known = {f.name for f in dataclasses.fields(plan)}
    for key, value in settings.items():
        head, _, rest = key.partition(".")
        if head not in known:
            raise ValueError(f"unknown setting {key!r}{did_you_mean(key, setting_names(plan))}")
        if rest:
            nested.setdefault(head, {})[rest] = value
        elif isinstance(value, Mapping):
            nested.setdefault(head, {}).update(value)
        else:
            found = coerce(key, value, get_type_hints(type(plan))[head])
            if isinstance(found, Placement) and not isinstance(value, Placement) and len(_parts(value)) < 3:
                found = dataclasses.replace(found, group=getattr(plan, head).group)
            changes[head] = found
    for head, inner in nested.items():
        current = changes.get(head, getattr(plan, head))
        if not dataclasses.is_dataclass(current):
            raise ValueError(f"setting {head!r} has no parts; it was given {', '.join(inner)}")
        hints = get_type_hints(type(current))
        for key in inner:
            if key not in hints:
                raise ValueError(f"unknown setting '{head}.{key}'{did_you_mean(f'{head}.{key}', setting_names(plan))}")
        typed = {k: coerce(f"{head}.{k}", v, hints[k]) for k, v in inner.items()}
        changes[head] = dataclasses.replace(current, **typed)  # type: ignore[type-var]
    return dataclasses.replace(plan, **changes)


def setting_names(plan: Plan | None = None) -> list[str]:
    """Every dotted name that :func:`override` takes, in the order of the dataclass."""
    names: list[str] = []
    for f in dataclasses.fields(Plan):
        current = getattr(plan or Plan(), f.name)
        if dataclasses.is_dataclass(current):
            names += [f"{f.name}.{inner.name}" for inner in dataclasses.fields(current)]
        else:
            names.append(f.name)
    return names


def did_you_mean(key: str, known: list[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest known name, or nothing."""
    aliases = {
        "lr": "learning_rate",
        "eps": "epsilon",
        "rank": "lora.rank",
        "accumulation": "gradient_accumulation_steps",
    }
    last = key.rpartition(".")[2]
    if last in aliases:
        return next((f"; did you mean {name!r}?" for name in known if name.endswith(aliases[last])), "")
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6) or [
        name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]
    ]
    return f"; did you mean {near[0]!r}?" if near else ""


def parse_bytes(text: str | int) -> int:
    """``"18GB"``, ``"512MiB"`` or a number, in bytes (GB = 10⁹, GiB = 2³⁰)."""
    if isinstance(text, int):
        return text
    units = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "": 1}
    stripped = text.strip().lower()
    number = stripped.rstrip("bikmgt ")
    unit = stripped[len(number) :].strip()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is no size; write it like 18GB, 512MiB or a number of bytes") from None


def coerce(key: str, value: Any, hint: Any) -> Any:
    """``value`` as the type of the setting ``key``: flags give text; YAML numbers, words, lists and mappings.

    Raises:
        ValueError: it is none; the message says what the setting takes.
    """
    read: Callable[[Any], Any]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        wanted, read = f"one of {', '.join(hint)}", hint
    elif hint not in _READERS:
        raise ValueError(f"{key} takes a group of settings, such as {key}.name, not {value!r}")
    else:
        wanted, read = _READERS[hint]
    try:
        return read(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{key} is {value!r}; it takes {wanted}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _boolean(value: Any) -> bool:
    word = str(value).lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError
    return word in _TRUE


def _integer(value: Any) -> int:
    """A whole number; ``1e3`` is one too."""
    with contextlib.suppress(ValueError):
        return int(_text(value))
    if not _number(value).is_integer():
        raise ValueError
    return int(value) if isinstance(value, int) else int(float(value))


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(each.strip() for each in value.split(",")) if isinstance(value, str) else tuple(map(_text, value))


def _pattern_or_texts(value: Any) -> str | tuple[str, ...]:
    """Names with commas between them are a list, as in every other setting; a pattern stays one text."""
    several = not isinstance(value, str) or re.fullmatch(r"[\w.-]+(\s*,\s*[\w.-]+)+", value)
    return _texts(value) if several else str(value)


def _pair(value: Any) -> tuple[float, float]:
    first, second = map(_number, value.split(",") if isinstance(value, str) else value)
    return first, second


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError
    return dict(value)


def _placement(value: Any) -> Placement:
    if isinstance(value, Placement):
        return value
    parts = _parts(value)
    return Placement(
        Tier(parts[0]),
        Codec(parts[1]) if len(parts) > 1 else Codec.RAW,
        Group(parts[2]) if len(parts) > 2 else Group.NOBODY,
    )


def _parts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [p.strip() for p in str(value).replace("x", "×").split("×")]


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_READERS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    str: ("text (put quotes around it)", _text),
    bool: ("true or false", _boolean),
    int: ("a whole number", _integer),
    float: ("a number", _number),
    int | None: ("a size, such as 18GB, 512MiB or a number of bytes", lambda v: None if v in (None, "") else parse_bytes(v)),
    tuple[float, float]: ("two numbers, such as [0.9, 0.95]", _pair),
    tuple[str, ...]: ("a list of texts, such as [yes, no]", _texts),
    str | tuple[str, ...]: ("a text, or a list of texts", _pattern_or_texts),
    Mapping[str, Any]: ("a mapping", _mapping),
    Placement: (f"tier × codec × group: {', '.join(Tier)}; {', '.join(Codec)}; {', '.join(Group)}", _placement),
}
"""For each type of a setting what it takes, in words, and the function that reads it."""
