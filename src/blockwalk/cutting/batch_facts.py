"""Facts of a batch that models ask of its mask and positions while they build the masks of
attention.

On an accelerator each question would wait for the device; the batch comes from the processor, where
the answers are found. And padding from which nothing is learnt needs no mask, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from blockwalk.numerics.device import is_cpu
from blockwalk.plan.losses import IGNORE

_NOTED = "_blockwalk_facts"
"""The attribute of a batch's token ids that holds its facts."""


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """Facts of one batch, tensors [B, S]."""

    hides_nothing: bool
    """True where there is no attention mask, or one without a zero."""
    hides_unseen: bool
    """True where the mask hides the right end of its rows alone, from which nothing is learnt. In a
    causal model no token to the left of it attends to it, so that attention needs no mask for
    it."""
    documents: bool
    """True where positions begin anew inside a row."""

    @classmethod
    def of(cls, batch: Mapping[str, Tensor], *, hides_unseen: bool = True) -> BatchFacts | None:
        """Find the facts of a batch on the processor; None where a tensor that they rest on is
        elsewhere. With ``hides_unseen`` False somebody may read the logits of padding."""
        mask = batch.get("attention_mask")
        positions = batch.get("position_ids")
        labels = batch.get("labels")
        tensors = (mask, positions, labels)
        if any(tensor is not None and not is_cpu(tensor.device) for tensor in tensors):
            return None
        documents = positions is not None and bool((torch.diff(positions, dim=-1) != 1).any())
        if mask is None:
            return cls(hides_nothing=True, hides_unseen=False, documents=documents)
        seen_BS = mask != 0
        learnt = labels is not None and bool(((labels[:, 1:] != IGNORE) & ~seen_BS[:, :-1]).any())
        at_the_end = not bool((seen_BS[:, 1:] & ~seen_BS[:, :-1]).any())
        unseen = hides_unseen and at_the_end and not learnt
        return cls(bool(seen_BS.all()), hides_unseen=unseen, documents=documents)


def note(ids_BS: Tensor, facts: BatchFacts | None) -> None:
    """Keep a batch's facts with its token ids on the device."""
    if facts is not None:
        setattr(ids_BS, _NOTED, facts)


@contextmanager
def answered(batch: Mapping[str, Any]) -> Iterator[None]:
    """Give transformers the facts that were noted of a batch in place of the device's answers, so
    that it waits for none and builds no causal mask that hides the unseen alone."""
    facts: BatchFacts | None = getattr(batch.get("input_ids"), _NOTED, None)
    masks: Any = import_module("transformers.masking_utils")
    if facts is None or not all(hasattr(masks, name) for name in _QUESTIONS):
        yield
        return
    batch_facts = facts
    originals: dict[str, Any] = {name: getattr(masks, name) for name in _QUESTIONS}
    needs_none = originals["_ignore_causal_mask_sdpa"]

    def ignores(padding_mask: Tensor | None, *sizes: Any, **named: Any) -> bool:
        return bool(needs_none(None if batch_facts.hides_unseen else padding_mask, *sizes, **named))

    def documents_of(position_ids: Tensor) -> Tensor | None:
        """Number each token's document, from 0."""
        if not batch_facts.documents:
            return None
        begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
        return begins.cumsum(-1)

    try:
        masks.fast_all = lambda _: batch_facts.hides_nothing
        masks._ignore_causal_mask_sdpa = ignores
        masks.find_packed_sequence_indices = documents_of
        yield
    finally:
        for name, function in originals.items():
            setattr(masks, name, function)


_QUESTIONS = ("fast_all", "_ignore_causal_mask_sdpa", "find_packed_sequence_indices")
"""The functions of transformers that ask a device."""
