"""The form of a model's head, found by trying: the soft cap and the scale that turn W·h + b into
its own logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockwalk.cutting.anatomy import Anatomy
from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.small_instance import TOLERANCE, difference


def with_head_form(cut: CutModel, batch: Mapping[str, Tensor]) -> Anatomy:
    """Return the soft cap and the scale, out of the configuration's numbers, that turn W·h + b into
    the model's own logits and loss.

    The head's weight is enlarged for the time of the test: only large logits show a cap.
    """
    anatomy = cut.anatomy
    head = cut.base.get_output_embeddings()
    if anatomy.head is None or not isinstance(head, nn.Linear):
        return anatomy
    caps, scales = _head_numbers(cut.base.config)
    with torch.no_grad():
        prologue = cut.prologue(batch)
        hidden = prologue.hidden_BSD
        for call in prologue.calls:
            hidden = cut.forward(call, hidden)
        weight = head.weight.detach().clone()
        head.weight.mul_(100.0)
        own_logits = cut.logits(prologue, hidden, batch)
        own_loss = cut.own_loss(prologue, hidden, batch)
        raw = F.linear(cut.head_input(prologue, hidden, batch), head.weight, head.bias)
        head.weight.copy_(weight)
        for cap, scale in product(caps, scales):
            logits = raw * scale
            logits = torch.tanh(logits / cap) * cap if cap else logits
            if logits.shape != own_logits.shape or difference(logits, own_logits) > TOLERANCE:
                continue
            loss = F.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()
            )
            if difference(loss, own_loss) <= TOLERANCE:
                return replace(anatomy, head_custom=False, soft_cap=cap, scale=scale)
    return anatomy


def _head_numbers(config: Any) -> tuple[list[float | None], list[float]]:
    """Return candidates for the soft cap and the scale (or its inverse): the configuration's
    numbers that are named like them."""
    caps: list[float | None] = [None]
    scales = [1.0]
    for key, value in config.get_text_config().to_dict().items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value:
            continue
        if "softcap" in key or "soft_cap" in key:
            caps.append(float(value))
        elif ("logit" in key or "head" in key) and ("scal" in key or "multiplier" in key):
            scales += [float(value), 1.0 / value]
    return caps, scales
