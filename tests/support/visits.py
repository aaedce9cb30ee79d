"""A host tier whose blocks visit slots on a processor too, as they do where an accelerator
computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from blockwalk.program import residence
from blockwalk.program.compile import compile


@contextmanager
def visited_host() -> Iterator[None]:
    """Programs are kept by what they are compiled of, which this is no part of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residence, "host_is_device", lambda sizes: False)
        compile.cache_clear()
        yield
    compile.cache_clear()
