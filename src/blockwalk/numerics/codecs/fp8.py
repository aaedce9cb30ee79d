"""fp8: e4m3 numbers (three bits after the first one, largest 448) with one float32 scale a row."""

from __future__ import annotations

import torch

from blockwalk.numerics.codecs.scaled_rows import scaled_rows


def _grid(magnitude_RD: torch.Tensor) -> torch.Tensor:
    """Return the float32 exponent, not below e4m3's least one (−6), less the three bits: a power of
    two, so that the divisions and products by it are exact."""
    exponent_RD = (magnitude_RD.view(torch.int32) >> 23).clamp_(min=127 - 6)
    return ((exponent_RD - 3) << 23).view(torch.float32)


CODEC = scaled_rows(448.0, _grid, native=0)
