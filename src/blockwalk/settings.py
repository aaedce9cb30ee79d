"""A plan's settings as text: dotted names and values from YAML or flags, sizes in bytes, and what was probably meant."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, get_type_hints

from blockwalk.plan import Plan
from blockwalk.state import Codec, Group, Placement, Tier


def override(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """``plan`` with dotted settings changed: ``{"optimizer.learning_rate": 1e-4, "prefetch": 2}``; nested mappings work too.

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
            changes[head] = _coerce(key, value, _hints(type(plan))[head])
    for head, inner in nested.items():
        current = changes.get(head, getattr(plan, head))
        if not dataclasses.is_dataclass(current):
            raise ValueError(f"setting {head!r} has no parts; it was given {', '.join(inner)}")
        hints = _hints(type(current))
        for key in inner:
            if key not in hints:
                raise ValueError(f"unknown setting '{head}.{key}'{did_you_mean(f'{head}.{key}', setting_names(plan))}")
        typed = {k: _coerce(f"{head}.{k}", v, hints[k]) for k, v in inner.items()}
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


def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _coerce(key: str, value: Any, hint: Any) -> Any:
    """``value`` as the field's type; YAML and flags give strings, ints and lists."""
    if hint == int | None:
        return None if value is None or value == "" else parse_bytes(value)
    casts: dict[Any, Callable[[Any], Any]] = {
        int: _integer,
        float: float,
        bool: _boolean,
        str: str,
        tuple[float, float]: lambda v: tuple(float(x) for x in (v.split(",") if isinstance(v, str) else v)),
        Placement: _placement,
    }
    cast = casts.get(hint) or (hint if isinstance(hint, type) and issubclass(hint, StrEnum) else None)
    if cast is None:
        raise ValueError(f"{key} takes a group of settings, such as {key}.name, not {value!r}")
    try:
        return cast(value)
    except (TypeError, ValueError) as error:
        names = (
            ", ".join(hint) if isinstance(hint, type) and issubclass(hint, StrEnum) else getattr(hint, "__name__", hint)
        )
        raise ValueError(f"{key} is {value!r}, which is no {names}: {error}") from None


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
        raise ValueError("a whole number is needed")
    return int(float(value)) if isinstance(value, str) and "e" in value.lower() else int(value)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "yes", "on", "1"):
        return True
    if str(value).lower() in ("false", "no", "off", "0"):
        return False
    raise ValueError("write true or false")


def _placement(value: Any) -> Placement:
    if isinstance(value, Placement):
        return value
    parts = [p.strip() for p in str(value).replace("x", "×").split("×")] if not isinstance(value, list) else value
    return Placement(
        Tier(parts[0]),
        Codec(parts[1]) if len(parts) > 1 else Codec.RAW,
        Group(parts[2]) if len(parts) > 2 else Group.NOBODY,
    )
