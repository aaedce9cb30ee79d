"""Limits that the system sets to this process (``ulimit``), on systems that have them; Windows has
none.

The module ``resource`` is imported where a limit is asked for, so that the package can be imported
without it."""

from __future__ import annotations

from typing import Literal

Kind = Literal["RLIMIT_AS", "RLIMIT_NOFILE"]
"""A limit by the name of ``resource``: bytes of the address space, or open files."""

UNLIMITED = -1
"""The value of a limit that is none; ``resource.RLIM_INFINITY`` on Linux."""


def limit(kind: Kind) -> tuple[int, int]:
    """Return the soft and the hard limit; :data:`UNLIMITED` for one that the system does not
    set."""
    try:
        import resource
    except ImportError:
        return UNLIMITED, UNLIMITED
    soft, hard = resource.getrlimit(getattr(resource, kind))
    infinity = resource.RLIM_INFINITY
    return UNLIMITED if soft == infinity else soft, UNLIMITED if hard == infinity else hard


def set_limit(kind: Kind, soft: int, hard: int) -> None:
    """Set the soft and the hard limit, each a number or :data:`UNLIMITED`; do nothing on a system
    without limits.

    Raises:
        ValueError, OSError: the system allows no such limit.
    """
    try:
        import resource
    except ImportError:
        return
    infinity = resource.RLIM_INFINITY
    values = (infinity if soft == UNLIMITED else soft, infinity if hard == UNLIMITED else hard)
    resource.setrlimit(getattr(resource, kind), values)
