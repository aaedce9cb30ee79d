"""The rows of a product up to which a card decodes a weight inside it, as ``benchmarks/gpu.sh``
measured them on this one."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from blockwalk.numerics.device import is_cpu, model_of
from blockwalk.plan.placement import Codec
from blockwalk.system.card import facts_of


def fused_rows(codec: Codec, device: torch.device, unmeasured: int) -> int:
    """Return the most rows of a product whose weight, in ``codec``, is decoded inside it;
    ``unmeasured`` where the file of figures does not tell."""
    return int(_measured(device).get(codec, unmeasured))


@functools.cache
def _measured(device: torch.device) -> Mapping[str, float]:
    """Return the figure by codec, from the file in the working folder."""
    facts = None if is_cpu(device) else facts_of(model_of(device))
    return {} if facts is None else facts.fused_crossing_rows
