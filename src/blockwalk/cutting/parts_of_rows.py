"""Attention of parts of rows, through transformers' own tables: its masks are made for whole rows,
and its attention of whole rows is given what other parts hold.

Every attention that a model calls by transformers' interface is reached so. One that it computes
by itself would see its own part alone, in silence: it is found when the model is tried
(:mod:`blockwalk.walk.context_check`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from blockwalk.numerics.sequence_part import PartMask, SequencePart, refuse_options

_ARGUMENTS = "_preprocess_mask_arguments"
"""The function that makes the arguments of a mask's rule."""
_PIECES = (
    _ARGUMENTS,
    "find_packed_sequence_indices",
    "and_masks",
    "padding_mask_function",
)
_POSITIONS = "remap_positions_for_packed_sequence"
"""The function by which rules of packed rows read positions within documents; transformers 5.17 has
none, for its rules read positions within rows."""


@contextmanager
def masks_of_rows(part: SequencePart) -> Iterator[None]:
    """Give a model that is run on a part of its rows a :class:`PartMask` in place of every mask,
    with transformers' own rules at the positions of whole rows.

    Raises:
        ValueError: a version of transformers makes its masks otherwise.
    """
    masks: Any = import_module("transformers.masking_utils")
    if not all(hasattr(masks, name) for name in _PIECES):
        version = import_module("transformers").__version__
        raise ValueError(f"transformers {version} makes masks in which no parts of rows are known")
    replaced = [name for name in (_ARGUMENTS, _POSITIONS) if hasattr(masks, name)]
    originals = {name: getattr(masks, name) for name in replaced}
    makers = masks.ALL_MASK_ATTENTION_FUNCTIONS
    whole_mask = makers["sdpa"]

    def of_rows(
        config: Any,
        inputs_embeds: Tensor,
        attention_mask: Any,
        past_key_values: Any,
        position_ids: Tensor | None,
        *others: Any,
        **named: Any,
    ) -> tuple[Any, ...]:
        sizes = (config, inputs_embeds, attention_mask, past_key_values, position_ids)
        done, *answers = originals[_ARGUMENTS](*sizes, *others, **named)
        if done:
            return (done, *answers)
        documents = None
        padding_BS = part.attention_mask_BS
        if padding_BS is not None:
            padding_BS = padding_BS.bool()
        elif part.position_ids_BS is not None and position_ids is not None:
            documents = masks.find_packed_sequence_indices(part.position_ids_BS)
        return False, padding_BS, documents, part.order.tokens, part.order.length, 0, 0

    def in_documents(rule: Any, _positions_Bs: Tensor) -> Any:
        return originals[_POSITIONS](rule, part.position_ids_BS)

    def part_mask(
        batch_size: int,
        *_sizes: Any,
        mask_function: Any = masks.causal_mask_function,
        attention_mask: Tensor | None = None,
        use_vmap: bool = False,
        allow_is_bidirectional_skip: bool = False,
        device: Any = "cpu",
        **_other: Any,
    ) -> PartMask:
        if use_vmap or allow_is_bidirectional_skip:
            raise ValueError("its mask has a rule of its own, which need not hold for parts")
        rule = mask_function
        if attention_mask is not None:
            rule = masks.and_masks(rule, masks.padding_mask_function(attention_mask))
        return part.mask(rule, batch_size, device)

    replacements = {_ARGUMENTS: of_rows, _POSITIONS: in_documents}
    for name in replaced:
        setattr(masks, name, replacements[name])
    makers["sdpa"] = part_mask
    try:
        yield
    finally:
        makers["sdpa"] = whole_mask
        for name, original in originals.items():
            setattr(masks, name, original)


class _AttentionOfParts(AbstractContextManager[None]):
    """The context in which attention under a :class:`PartMask` reads the tokens of all parts. It
    may be entered again inside itself, by other threads as well."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._original: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._original = _attentions()["sdpa"]
                _attentions()["sdpa"] = self._attend
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                _attentions()["sdpa"] = self._original

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        if not isinstance(attention_mask, PartMask):
            raise ValueError("its attention is not under the mask of the batch's rows")
        refuse_options(options)
        return attention_mask.part.attend(
            self._original, module, query, key, value, attention_mask, **options
        )


def _attentions() -> Any:
    return import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS


attention_of_parts = _AttentionOfParts()
