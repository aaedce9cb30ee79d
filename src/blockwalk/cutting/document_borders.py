"""The way in which a model keeps the documents of a packed row apart, found by trying."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from blockwalk.cutting.anatomy import Anatomy
from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.small_instance import TOLERANCE, difference, small_batch


def find_borders(model: Any, anatomy: Anatomy) -> str:
    """Return the first of the ways in which two documents in one row have the logits that each has
    by itself; empty: none does."""
    ids = small_batch(model.config)["input_ids"][:1]
    positions = torch.tensor([[*range(5), *range(ids.shape[1] - 5)]])
    with torch.no_grad():
        separate = torch.cat(
            [model(input_ids=part, use_cache=False).logits for part in (ids[:, :5], ids[:, 5:])], 1
        )
        for borders in ("positions", "mask"):
            cut = CutModel(model, replace(anatomy, borders=borders))
            with suppress(Exception):  # a model that takes no positions, or no such mask
                packed = model(
                    **cut.inputs({"input_ids": ids, "position_ids": positions}, labels=False)
                ).logits
                if difference(packed, separate) <= TOLERANCE:
                    return borders
    return ""
