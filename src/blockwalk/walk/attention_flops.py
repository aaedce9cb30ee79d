"""FLOPs of fused attention: one rule for every kernel that torch has, read off the names of a
kernel's arguments. PyTorch's own counter leaves several kernels out, and in some versions it
refuses queries with more heads than the keys have.

R queries of all sequences and heads, K keys, W width of a query, V width of a value. A forward
takes 2·R·K·(W + V) FLOPs, a backward 2·R·K·(3W + 2V): five products, for scores are made again.
What a causal mask hides is counted as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch._ops import OpOverload

_LENGTHS_OF_KEYS = ("cum_seq_k", "cu_seqlens_k", "block_table")
"""Arguments with which keys are no longer rows of a batch: the longest row is then told apart."""
_LONGEST_KEYS = ("max_k", "max_seqlen_k")


@dataclass(frozen=True, slots=True)
class _Kernel:
    """An attention kernel."""

    arguments: tuple[str, ...]
    is_backward: bool
    heads_first: bool
    """Whether tensors are [B, H, S, W]; else [B, S, H, W], or [S, H, W] of all rows together."""


def attention_flops(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the FLOPs of an attention kernel of torch's; None for any other operation."""
    kernel = _kernel(func)
    if kernel is None:
        return None
    named = {**dict(zip(kernel.arguments, args, strict=False)), **kwargs}
    query = named["query"]
    key = named["key"]
    width = query.shape[-1]
    value_width = named["value"].shape[-1]
    keys = key.shape[-2] if kernel.heads_first else key.shape[-3]
    if any(named.get(name) is not None for name in _LENGTHS_OF_KEYS):
        keys = next(named[name] for name in _LONGEST_KEYS if named.get(name) is not None)
    widths = 3 * width + 2 * value_width if kernel.is_backward else width + value_width
    return int(2 * (query.numel() // width) * keys * widths)


@cache
def _kernel(func: OpOverload) -> _Kernel | None:
    """Return the facts of an operation, if it is an attention kernel."""
    if func.namespace != "aten" or "attention" not in func._opname:
        return None
    names = tuple(argument.name for argument in func._schema.arguments)
    # one with ``embed_dim`` takes what layers hand on, before the products of each head
    if not {"query", "key", "value"} <= set(names) or "embed_dim" in names:
        return None
    return _Kernel(
        arguments=names,
        is_backward=any(name.startswith("grad_out") for name in names),
        heads_first=func._opname.lstrip("_").startswith("scaled_dot_product"),
    )
