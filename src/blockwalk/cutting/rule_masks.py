"""Masks of long rows as their rules: transformers describes a mask by a function of two positions,
and makes a tensor of S × S of it, which no long row has to have."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import Tensor

from blockwalk.numerics.rule_mask import RuleMask

LARGEST_WHOLE_MASK = 1 << 20
"""Elements, and bytes, of the largest mask that is made: that of one row of 1,024 tokens."""
_ARGUMENTS = {"batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function"}
"""The arguments of transformers' ``sdpa_mask`` that a rule is made of."""
_HELPERS = ("and_masks", "padding_mask_function", "prepare_padding_mask")


@contextmanager
def long_masks_as_rules() -> Iterator[None]:
    """Give models that attend by ``scaled_dot_product_attention`` a
    :class:`~blockwalk.numerics.rule_mask.RuleMask` in place of every mask of more than
    :data:`LARGEST_WHOLE_MASK` elements. An older or newer transformers, whose masks have other
    arguments, makes them as ever."""
    masks: Any = import_module("transformers.masking_utils")
    makers = masks.ALL_MASK_ATTENTION_FUNCTIONS
    whole_mask = makers["sdpa"]
    arguments = inspect.signature(whole_mask).parameters
    if not arguments.keys() >= _ARGUMENTS or not all(hasattr(masks, name) for name in _HELPERS):
        yield
        return

    def rule_or_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: Any = masks.causal_mask_function,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        use_vmap: bool = False,
        **other: Any,
    ) -> Tensor | None:
        sizes = (q_length, kv_length, q_offset, kv_offset)
        numbers = all(isinstance(size, int) for size in sizes)
        large = numbers and batch_size * q_length * kv_length > LARGEST_WHOLE_MASK
        if not large or use_vmap or allow_is_bidirectional_skip:
            made: Tensor | None = whole_mask(
                batch_size,
                q_length,
                kv_length,
                q_offset,
                kv_offset,
                mask_function=mask_function,
                attention_mask=attention_mask,
                local_size=local_size,
                allow_is_causal_skip=allow_is_causal_skip,
                allow_is_bidirectional_skip=allow_is_bidirectional_skip,
                use_vmap=use_vmap,
                **other,
            )
            return made
        padding = masks.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if allow_is_causal_skip and masks._ignore_causal_mask_sdpa(padding, *sizes, local_size):
            return None
        rule = mask_function
        if padding is not None:
            rule = masks.and_masks(rule, masks.padding_mask_function(padding))
        device = other.get("device", "cpu")
        queries = [slice(q_offset, q_offset + q_length)]
        return RuleMask([(rule, batch_size)], queries, (kv_offset, kv_length), device)

    makers["sdpa"] = rule_or_mask
    try:
        yield
    finally:
        makers["sdpa"] = whole_mask
