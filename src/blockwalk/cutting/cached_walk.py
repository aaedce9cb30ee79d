"""Whether a model continues a text from a key-value cache, found by trying: several calls with one
must answer what one call without answers.

Some models count positions from 0 in every call that names none, some have a cache of their own,
and some forget what a cache held. A model that fails the trial is walked over the whole text for
every token, and prompts of unequal length one by one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blockwalk.cutting.anatomy import Anatomy
from blockwalk.cutting.calls import is_cache
from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.small_instance import SEED, TOLERANCE, difference
from blockwalk.system.out_of_memory import is_out_of_memory

_TOKENS = 12
"""Tokens of the text that is continued: several windows, chunks and blocks of a small instance."""
_PROMPTS = (3, 7)
"""Tokens of the first call: fewer than a window, and more. Each further call has one."""
_FURTHER = 4
"""Calls after the first one."""
_PADDING = 3
"""Tokens on the left of the second prompt that are padding, where prompts are of unequal length."""


def takes_positions(base: Any) -> bool:
    """Return whether a (plain) model's forward takes the positions of its tokens."""
    return "position_ids" in inspect.signature(base.forward).parameters


def new_cache(base: Any, anatomy: Anatomy) -> Any:
    """Return an empty key-value cache of the kind that a (plain) model makes for itself."""
    from transformers import DynamicCache

    if not anatomy.own_cache:
        return DynamicCache(config=base.config)
    return getattr(sys.modules[type(base).__module__], anatomy.own_cache)()


def continued(
    base: Any, cache: Mapping[str, Any], fed_BS: Tensor, past: int, mask_BS: Tensor | None
) -> dict[str, Any]:
    """Return the inputs of a walk that continues what a cache holds.

    Args:
        base: the plain model.
        cache: ``past_key_values`` and ``use_cache``.
        fed_BS: the tokens that the cache does not hold yet.
        past: the tokens that it holds.
        mask_BS: 1 for a token, 0 where a prompt is padding on its left, as long as the text with
            ``fed_BS``; None where nothing is.
    """
    inputs: dict[str, Any] = {"input_ids": fed_BS, **cache}
    if mask_BS is not None:
        inputs["attention_mask"] = mask_BS
    if takes_positions(base):
        rows, count = fed_BS.shape
        positions_BS = torch.arange(past, past + count, device=fed_BS.device).expand(rows, -1)
        if mask_BS is not None:
            positions_BS = (mask_BS.cumsum(1) - 1).clamp(min=0)[:, -count:]
        inputs["position_ids"] = positions_BS
    return inputs


def with_cache_form(cut: CutModel) -> Anatomy:
    """Return the anatomy with what a small instance's model allows of a key-value cache: the class
    of its own one, and the reasons against a cache and against padding."""
    generator = torch.Generator().manual_seed(SEED)
    vocab = cut.base.config.get_text_config().vocab_size
    ids_BS = torch.randint(3, vocab, (2, _TOKENS), generator=generator)
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[1, :_PADDING] = 0
    try:
        anatomy = replace(cut.anatomy, own_cache=_own_cache(cut.base, ids_BS))
        against_cache = _reason(cut, anatomy, ids_BS, None)
    except Exception as error:  # whatever a model raises over a cache is the reason against one
        if is_out_of_memory(error):
            raise
        return replace(cut.anatomy, against_cache=_line(error))
    try:
        against_padding = _reason(cut, anatomy, ids_BS, mask_BS)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        against_padding = _line(error)
    return replace(anatomy, against_cache=against_cache, against_padding=against_padding)


def _own_cache(base: Any, ids_BS: Tensor) -> str:
    """Return the name of the class of the cache that a model makes for itself, which its own module
    has; empty where it is transformers' general one."""
    from transformers import DynamicCache

    with torch.no_grad():
        answer = base(input_ids=ids_BS, use_cache=True)
    caches = [value for value in vars(answer).values() if is_cache(value)]
    cls = type(caches[0]) if caches else DynamicCache
    return "" if cls is DynamicCache else cls.__name__


@torch.no_grad()
def _reason(cut: CutModel, anatomy: Anatomy, ids_BS: Tensor, mask_BS: Tensor | None) -> str:
    """Return why calls with a cache are not one call without; empty where they are."""
    whole_BSV = _logits(cut, {"input_ids": ids_BS})
    if mask_BS is not None:  # the model is causal: a text's logits are those of its beginning
        alone_BSV = _logits(cut, {"input_ids": ids_BS[1:, _PADDING:]})
        whole_BSV[1:, _PADDING:] = alone_BSV
    for start, stop in _calls(_PROMPTS if mask_BS is None else _PROMPTS[-1:]):
        if not start:
            cache = {"past_key_values": new_cache(cut.base, anatomy), "use_cache": True}
        mask = None if mask_BS is None else mask_BS[:, :stop]
        inputs = continued(cut.base, cache, ids_BS[:, start:stop], start, mask)
        cached_BV = _logits(cut, inputs)[:, -1]
        change = max(map(difference, cached_BV, whole_BSV[:, stop - 1]))
        if not change <= TOLERANCE:
            return (
                f"logits after token {stop} of a small instance differ by {change:.1e} of their"
                f" norm from those of a call without one (at most {TOLERANCE} is allowed)"
            )
    return ""


def _calls(prompts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the tokens of each call, prompt after prompt."""
    for prompt in prompts:
        yield 0, prompt
        yield from ((stop - 1, stop) for stop in range(prompt + 1, prompt + 1 + _FURTHER))


def _logits(cut: CutModel, inputs: Mapping[str, Any]) -> Tensor:
    """Return the logits after each token, [B, S, V], by a walk."""
    prologue = cut.prologue(inputs)
    hidden_BSD = prologue.hidden_BSD
    for call in prologue.calls:
        hidden_BSD = cut.forward(call, hidden_BSD)
    return cut.logits(prologue, hidden_BSD, inputs)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"
