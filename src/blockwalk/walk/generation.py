"""Generation: each token is one evaluation walk whose blocks write into a key-value cache.

A prefix is a cache itself, which PEFT hands to the layers in place of any other: with one, every
walk sees the whole text, and prompts of unequal length are continued one by one. So does a model
whose cache fails its trial (:mod:`blockwalk.cutting.cached_walk`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from blockwalk.cutting.cached_walk import continued, new_cache
from blockwalk.engine.engine import Engine
from blockwalk.models.stops import stop_ids as stop_ids
from blockwalk.ranks.ranks import Ranks

log = logging.getLogger(__name__)


class Speaks(Protocol):
    """A walker, as far as generation asks it."""

    device: torch.device
    engine: Engine
    ranks: Ranks

    def next_logits(self, batch: Mapping[str, Any]) -> Tensor: ...


def generate(
    self: Speaks,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    stop_ids: Iterable[int] = (),
    seed: int = 0,
    attention_mask: Tensor | None = None,
    shared: bool = False,
    watch: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Continue prompts, a token a walk, with a key-value cache on the device: a method of the
    walker.

    Args:
        self: the walker.
        input_ids: int64 [B, S]; prompts of unequal length end together, with padding on the left.
        max_new_tokens: at most so many are added.
        temperature: 0 takes the likeliest token; above it tokens are drawn.
        stop_ids: tokens that end a sequence; one that has ended repeats the first of them.
        seed: of the draws.
        attention_mask: int64 [B, S], 0 where a prompt is padding; none is unless given.
        shared: ranks continue prompts of their own, as many each, and walk together until the last
            of all has ended.
        watch: told each new token of every sequence, int64 [B], as it comes; where it answers True,
            that token is the last.

    Returns:
        Prompts and continuations, int64 [B, S + new].

    Raises:
        ValueError: no token to start from, or settings out of range.
    """
    _require_settings(input_ids, max_new_tokens, temperature)
    padded = attention_mask is not None and not bool(attention_mask.all())
    text = _Text.of(self, input_ids, attention_mask if padded else None)
    apart = text.uncached or bool(self.engine.cut.anatomy.against_padding)
    # ranks walk together, whichever of them has prompts of unequal length
    if apart and (padded or (shared and len(input_ids) > 1)):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        settings: dict[str, Any] = {
            "temperature": temperature,
            "stop_ids": sorted(stop_ids),
            "shared": shared,
        }
        return _one_by_one(self, input_ids, attention_mask, max_new_tokens, seed, settings)
    generator = torch.Generator(device=self.device).manual_seed(seed)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=self.device)
    stopped_B = torch.zeros(len(text.written_BS), dtype=torch.bool, device=self.device)
    for _ in range(max_new_tokens):
        token_B1 = _drawn(self.next_logits(text.batch()), temperature, generator)
        if len(stops):  # a sequence that has stopped repeats its stop token
            token_B1 = torch.where(stopped_B.unsqueeze(1), stops[:1], token_B1)
            stopped_B |= torch.isin(token_B1.squeeze(1), stops)
        text.append(token_B1)
        ended = len(stops) > 0 and bool(stopped_B.all())
        if watch is not None and watch(token_B1.squeeze(1)) is True:
            ended = True
        if all(rank for (rank,) in self.ranks.exchange([ended])) if shared else ended:
            break
    return text.written_BS


def _require_settings(input_ids: Any, max_new_tokens: int, temperature: float) -> None:
    """Raise ValueError for no token to start from, or settings out of range."""
    if max_new_tokens < 1 or temperature < 0:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens} and temperature {temperature}; give at least 1"
            " and 0"
        )
    shape = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
    if isinstance(shape, str) or len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"input_ids must be a tensor [batch, sequence] with at least one token, not {shape}"
        )


def _drawn(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Return the next token of each sequence [B, 1]: the likeliest, or one that is drawn."""
    if temperature == 0.0:
        return logits_BV.argmax(1, keepdim=True)
    return torch.multinomial((logits_BV / temperature).softmax(1), 1, generator=generator)


@dataclass(slots=True)
class _Text:
    """Sequences that grow by a token each, and what the next walk is given of them."""

    written_BS: Tensor
    fed_BS: Tensor
    """The tokens that the cache does not hold yet."""
    cache: Mapping[str, Any]
    base: Any
    """The plain model."""
    uncached: bool
    """True where every walk sees the whole text."""
    mask_BS: Tensor | None = None
    """1 for a token, 0 where a prompt is padding; None where nothing is."""

    @classmethod
    def of(cls, walker: Speaks, input_ids: Tensor, mask: Tensor | None) -> _Text:
        """Return prompts on the walker's device, with an empty cache."""
        cut = walker.engine.cut
        configs = getattr(walker.engine.module, "peft_config", {}).values()
        prefixed = any(config.is_prompt_learning for config in configs)
        reason = "" if prefixed else cut.anatomy.against_cache
        if reason:
            log.warning(
                "every new token is computed from the whole text, without a key-value cache: %s",
                reason,
            )
        uncached = prefixed or bool(reason)
        cache: dict[str, Any] = {}
        if not uncached:
            cache = {"past_key_values": new_cache(cut.base, cut.anatomy), "use_cache": True}
        ids_BS = input_ids.to(walker.device)
        mask_BS = None if mask is None else mask.to(walker.device)
        return cls(ids_BS, ids_BS, cache, cut.base, uncached, mask_BS)

    def batch(self) -> dict[str, Any]:
        """Return the model inputs of the next walk."""
        if self.uncached:
            return {"input_ids": self.written_BS}
        past = self.written_BS.shape[1] - self.fed_BS.shape[1]
        return continued(self.base, self.cache, self.fed_BS, past, self.mask_BS)

    def append(self, token_B1: Tensor) -> None:
        """Add a token to every sequence."""
        self.fed_BS = token_B1
        self.written_BS = torch.cat([self.written_BS, token_B1], dim=1)
        if self.mask_BS is not None:
            self.mask_BS = torch.nn.functional.pad(self.mask_BS, (0, 1), value=1)


def _one_by_one(
    walker: Speaks,
    input_ids: Tensor,
    mask: Tensor,
    max_new_tokens: int,
    seed: int,
    settings: Mapping[str, Any],
) -> Tensor:
    """Continue prompts of unequal length one by one: after a prefix PEFT takes no positions, and
    padding would move the text away from it; and some models see padding on the left."""
    continuations = []
    for number, (ids, kept) in enumerate(zip(input_ids, mask.bool(), strict=True)):
        prompt = ids[kept][None]
        text = generate(walker, prompt, max_new_tokens, seed=seed + number, **settings)
        continuations.append(text[0, prompt.shape[1] :])
    stop = min(settings["stop_ids"], default=0)
    new = torch.nn.utils.rnn.pad_sequence(continuations, batch_first=True, padding_value=stop)
    return torch.cat([input_ids.to(walker.device), new], dim=1)
