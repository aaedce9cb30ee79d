"""The choice of the C kernels, or of the paths of machines without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def by(native: bool, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The answer of a function by the C kernels, or by torch and numpy alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKWALK_NATIVE", str(int(native)))
        return function(*args, **kwargs)
