"""The check that a model's logits do not depend on later tokens: it would learn from the very
tokens that it is to predict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockwalk.cutting.small_instance import SEED, difference

CAUSAL_TOLERANCE = 1e-5
"""Largest change of the logits up to a token, relative to their norm, that other tokens after it
may make, in float32. It is rounding alone: an expert's product has other rows, which moves a
mixture's logits by about 1e-7."""
_TOKENS = 24
"""Tokens of the rows that causality is tried on: several windows, chunks and blocks of a small
instance."""
_SETTINGS: Mapping[str, Any] = {
    "is_decoder": True,
    "is_causal": True,
    "causal": True,
    "use_bidirectional_attention": False,
}
"""Settings of ``transformers`` configurations that let a model see later tokens, with the value
that forbids it."""


def require_causal(model: Any) -> None:
    """Raise ValueError for a model whose logits up to a token change with the tokens after it, with
    the figures."""
    changes_T = later_changes(model)
    worst = int(changes_T.argmax())
    if bool(changes_T[worst] <= CAUSAL_TOLERANCE):
        return
    config = model.config.get_text_config()
    settings = [
        f"; its configuration has {name} = {json.dumps(getattr(config, name))}, and a decoder's"
        f" has {json.dumps(causal)}"
        for name, causal in _SETTINGS.items()
        if getattr(config, name, causal) not in (causal, None)
    ]
    raise ValueError(
        "it attends to later tokens, as an encoder does, and would read what it is to"
        f" predict{''.join(settings)}. On a small"
        f" instance, other tokens after token {worst + 1} change its logits up to there by"
        f" {float(changes_T[worst]):.1e} of"
        f" their norm (at most {CAUSAL_TOLERANCE} is allowed)"
    )


def later_changes(model: Any) -> Tensor:
    """Return the relative change of the logits up to each token, in float64 [S - 1], when every
    later token becomes another: the larger of those without a mask and under one that hides the
    right end of the rows."""
    generator = torch.Generator().manual_seed(SEED)
    count = _TOKENS
    vocab = model.config.get_text_config().vocab_size
    ids_S = torch.randint(3, vocab, (count,), generator=generator)
    shift_S = torch.randint(1, vocab - 3, (count,), generator=generator)
    others_S = (ids_S - 3 + shift_S) % (vocab - 3) + 3
    seen_SS = torch.ones(count, count, dtype=torch.bool).tril()
    ids_SS = torch.where(
        seen_SS, ids_S, others_S
    )  # row t: the tokens up to t, then others; the last row: all of them
    mask_SS = torch.ones_like(ids_SS)
    mask_SS[:, -2:] = 0
    changes = []
    for masks in ({}, {"attention_mask": mask_SS}):
        with torch.no_grad():
            logits_SSV = model(input_ids=ids_SS, **masks, use_cache=False).logits
        changes.append(
            torch.tensor(
                [
                    difference(row[:t], logits_SSV[-1, :t])
                    for t, row in enumerate(logits_SSV[:-1], 1)
                ]
            )
        )
    return torch.stack(changes).amax(0)
