"""The limit of open files of this process (``ulimit -n``): raised where that is allowed, and named
where it is too low."""

from __future__ import annotations

import errno
from contextlib import suppress

from blockwalk.system.process_limits import UNLIMITED, limit, set_limit


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard one, as far as the kernel allows: logins have
    1,024, which is meant for ``select()``, and may have far more."""
    soft, hard = limit("RLIMIT_NOFILE")
    if soft != hard:
        # macOS allows less than the "unlimited" that it answers
        with suppress(ValueError, OSError):
            set_limit("RLIMIT_NOFILE", hard, hard)


def way_out(error: BaseException) -> str:
    """Return the sentence for a user whose limit of open files was reached; empty for any other
    error. Libraries in C++ and Rust have errors of their own for it, which say so in words."""
    if getattr(error, "errno", None) != errno.EMFILE and "Too many open files" not in str(error):
        return ""
    soft, hard = limit("RLIMIT_NOFILE")
    hard_limit = "unlimited" if hard == UNLIMITED else hard
    return (
        f": this process may have {soft}; raise that limit with ulimit -n (the hard one, ulimit"
        f" -Hn, is {hard_limit})"
    )
