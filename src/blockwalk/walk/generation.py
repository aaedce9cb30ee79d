"""Generation: each token is one evaluation walk whose blocks write into a key-value cache.

A prefix is a cache itself, which PEFT hands to the layers in place of any other: with one, every
walk sees the whole text, and prompts of unequal length are continued one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from blockwalk.engine.engine import Engine
from blockwalk.models.stops import stop_ids as stop_ids
from blockwalk.ranks.ranks import Ranks


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
    from transformers import DynamicCache

    module: Any = self.engine.module
    device = self.device
    shape = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
    if len(shape) != 2 or 0 in shape or isinstance(shape, str):
        raise ValueError(
            f"input_ids must be a tensor [batch, sequence] with at least one token, not {shape}"
        )
    if max_new_tokens < 1 or temperature < 0:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens} and temperature {temperature}; give at least 1"
            " and 0"
        )
    prefixed = any(
        config.is_prompt_learning for config in getattr(module, "peft_config", {}).values()
    )
    cache = (
        {}
        if prefixed
        else {"past_key_values": DynamicCache(config=module.config), "use_cache": True}
    )
    if padded := attention_mask is not None and not bool(attention_mask.all()):
        # one by one: PEFT takes no positions, and padding would move the text away from the prefix
        if prefixed:
            settings: dict[str, Any] = {
                "temperature": temperature,
                "stop_ids": sorted(stop_ids),
                "shared": shared,
            }
            written = [
                generate(self, ids[mask.bool()][None], max_new_tokens, seed=seed + i, **settings)[
                    0, int(mask.sum()) :
                ]
                for i, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True))
            ]
            first = min(settings["stop_ids"], default=0)
            new = torch.nn.utils.rnn.pad_sequence(written, batch_first=True, padding_value=first)
            return torch.cat([input_ids.to(device), new], dim=1)
        mask_BS = attention_mask.to(device)
        base = module.get_base_model() if hasattr(module, "peft_config") else module
        placed = "position_ids" in inspect.signature(base.forward).parameters
    draw = torch.Generator(device=device).manual_seed(seed)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
    written_BS = fed_BS = input_ids.to(device)
    stopped_B = torch.zeros(len(fed_BS), dtype=torch.bool, device=device)
    for _ in range(max_new_tokens):
        batch = {"input_ids": written_BS if prefixed else fed_BS, **cache}
        if padded:
            positions_BS = (mask_BS.cumsum(1) - 1).clamp(min=0)[:, -fed_BS.shape[1] :]
            batch |= {
                "attention_mask": mask_BS,
                **({"position_ids": positions_BS} if placed else {}),
            }
            mask_BS = torch.nn.functional.pad(mask_BS, (0, 1), value=1)
        logits_BV = self.next_logits(batch)
        if temperature == 0.0:
            fed_BS = logits_BV.argmax(1, keepdim=True)
        else:
            fed_BS = torch.multinomial((logits_BV / temperature).softmax(1), 1, generator=draw)
        if len(
            stops
        ):  # a sequence that has stopped repeats its stop token until the longest is done
            fed_BS = torch.where(stopped_B.unsqueeze(1), stops[:1], fed_BS)
            stopped_B |= torch.isin(fed_BS.squeeze(1), stops)
        written_BS = torch.cat([written_BS, fed_BS], dim=1)
        ended = len(stops) > 0 and bool(stopped_B.all())
        if watch is not None and watch(fed_BS.squeeze(1)) is True:
            ended = True
        if all(each for (each,) in self.ranks.exchange([ended])) if shared else ended:
            break
    return written_BS
