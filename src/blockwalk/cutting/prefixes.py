"""The keys and values that a prefix begins with: those of real tokens, drawn from the vocabulary,
as in MeZO (Malladi et al. 2023; ``init_by_real_act`` in ``large_models/prefix.py`` of the published
code).

T virtual tokens, L layers, N heads of keys, H their width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blockwalk.cutting.verify import certified
from blockwalk.numerics.codecs.weights import DenseWeight, Value


def keys_and_values(model: Any, tokens: int, seed: int, read: Callable[[str], Value]) -> Tensor:
    """Return keys and values of one sequence of random tokens, float32 [T, 2·L·N·H], laid out as in
    PEFT's files; without the layers that keep none, or none of some of the tokens.

    They are computed a unit at a time, on the processor and in float32, from weights that ``read``
    gives by canonical name: whatever a plan packs or computes in, they are the same. ``model`` may
    be a skeleton."""
    from transformers import DynamicCache

    cut = certified(model.eval()).to("cpu")
    cache = DynamicCache(config=model.config)
    ids_BS = torch.randint(
        cut.spec().vocab_size, (1, tokens), generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        for index, unit in enumerate(cut.spec().units[:-1]):
            cut.bind(
                index,
                {p.name: _in_float32(read(p.name), lazily=p.quantizable) for p in unit.params},
            )
            if index == 0:
                prologue = cut.prologue(
                    {"input_ids": ids_BS, "past_key_values": cache, "use_cache": True}
                )
                hidden_BSD = prologue.hidden_BSD
            else:
                hidden_BSD = cut.forward(prologue.calls[index - 1], hidden_BSD)
            cut.unbind(index)
    states = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    columns = [torch.empty(tokens, 0)]
    for state_BNTH in states:
        if isinstance(state_BNTH, Tensor) and state_BNTH.shape[2] == tokens:
            columns.append(state_BNTH[0].transpose(0, 1).flatten(1))
    return torch.cat(columns, dim=1)


def _in_float32(value: Any, *, lazily: bool) -> Value:
    """Return a parameter, a tensor or in codes, as products in float32 read it: a matrix a range at
    a time."""
    if lazily and isinstance(value, Tensor) and value.dim() == 2:
        return DenseWeight(value, torch.float32)
    return value.to(torch.float32)  # type: ignore[no-any-return]
