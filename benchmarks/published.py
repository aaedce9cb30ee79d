"""What would have to be true of published programs: what they do and hold beside what ours does,
term by term.

Every term is arithmetic on shapes, stated here and printed by ``paper_tables.py``; what is fitted
is said where it is. S tokens of a sequence, V vocabulary, D hidden."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import DTYPE_BYTES
from blockwalk.plan.work import Work
from blockwalk.program.costs import Costs
from blockwalk.program.program import Shape

DATA = Path(__file__).parent / "data"

CONTEXT_MB = 450.0
"""What a CUDA context and its libraries hold, which published memory figures count and programs do
not."""

EAGER_HELD = {"float32": 12, "float16": 10}
"""Bytes for each of heads × S × S scores at the peak of attention that is not fused: the product,
its masked copy and the softmax; in 16 bits the softmax is made in float32 and copied back."""

EAGER_TOUCHED = {"float32": 32, "float16": 24}
"""Bytes that such attention reads and writes for each score: product, mask, clamp, softmax, second
product."""

LOGITS_HELD = 5
"""Tensors of the logits' size that a loss in float32 holds at its peak."""

SCORES_HELD = {"resident": 3, "streams": 2}
"""Tensors of heads × S × S scores that attention in float32 holds at its peak: the product, its
masked copy and the softmax; ZO2's own attention has one less."""

DRAWS_HELD = 3
"""Tensors beside a parameter that is perturbed in float32: the draw and its two products."""

ENDS = ("prologue", "epilogue")
"""Kinds of units that have no attention."""

Config = Mapping[str, Any]


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a published table, by the names of their columns."""
    with (DATA / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def number(row: Mapping[str, str], column: str) -> float | None:
    """Return a published number; None of a row that is not at hand, or of a dash."""
    text = row.get(column, "-")
    return None if text == "-" else float(text)


def line(what: str, predicted: float, published: float | None, unit: str) -> dict[str, Any]:
    """Print a predicted figure beside the published one, if there is one, and return it."""
    error = None if not published else predicted / published - 1
    shown = "" if error is None else f"{published:>12,.4g} published  {100 * error:+6.1f}%"
    print(f"  {what:<44} {predicted:>12,.4g} {unit:<6}{shown}")
    return {
        "what": what,
        "predicted": predicted,
        "published": published,
        "unit": unit,
        "error": error,
    }


def scores(config: Config, shape: Shape) -> int:
    """Elements of a block's attention scores."""
    return shape.batch * int(config["num_attention_heads"]) * shape.sequence**2


def with_eager_attention(costs: Costs, config: Config, shape: Shape) -> Costs:
    """The same costs with the passes of attention that is not fused."""
    passes = Work(touched=scores(config, shape) * EAGER_TOUCHED[config["dtype"]])
    units = tuple(
        (
            kind,
            cost if kind in ENDS else dataclasses.replace(cost, forward=cost.forward + passes),
        )
        for kind, cost in costs.units
    )
    return Costs(units, costs.scratch)


def terms(
    config: Config, shape: Shape, *, streams: bool, fused: bool, both: bool = True
) -> dict[str, float]:
    """MB that MeZO (resident) or ZO2 (``streams``) holds, if its allocator keeps the peak of each
    phase beside the others' (a caching allocator that is full of one phase's sizes does).

    Args:
        config: of an OPT model.
        shape: of the rank's batch.
        streams: blocks pass through three buffers (one computing, one coming, one going) instead of
            being resident.
        fused: whether attention is.
        both: whether the rank runs both perturbed forwards side by side: then one's logits wait for
            the other's loss.
    """
    if config["dtype"] == "float32" and not fused:
        return float32_terms(config, shape, streams=streams)
    size = DTYPE_BYTES[config["dtype"]]
    dim = int(config["hidden_size"])
    layers = int(config["num_hidden_layers"])
    block = 12 * dim * dim * size
    embedding = int(config["vocab_size"]) * dim * size
    logits = shape.tokens * int(config["vocab_size"]) * size
    positions = (int(config["max_position_embeddings"]) + 2) * dim * size
    held = {
        "context": CONTEXT_MB * 1e6,
        "embeddings": embedding + positions,
        "blocks": block * (3 if streams else layers),
        "logits, shifted, log-softmax": 3 * logits,
        "draw and its product with the scale, of the embedding": 2 * embedding,
    }
    if streams and both:
        held["the other forward's logits"] = logits
    if not fused:
        held["attention scores"] = scores(config, shape) * EAGER_HELD[config["dtype"]]
    return {name: nbytes / 1e6 for name, nbytes in held.items()}


def float32_terms(config: Config, shape: Shape, *, streams: bool) -> dict[str, float]:
    """Return MB that MeZO or ZO2 (``streams``) holds in float32, attention not fused, if freed
    memory of scores serves logits: as many of them in each as it has room for.

    The counts of tensors are what tables 1, 6 and 7 ask for together, over batches and lengths.
    """
    dim = int(config["hidden_size"])
    vocab = int(config["vocab_size"])
    block = 12 * dim * dim * 4
    embedding = vocab * dim * 4
    positions = (int(config["max_position_embeddings"]) + 2) * dim * 4
    one_score = scores(config, shape) * 4
    one_logits = shape.tokens * vocab * 4
    scores_held = SCORES_HELD["streams" if streams else "resident"]
    in_freed_memory = scores_held * (one_score // one_logits)
    held = {
        "context": CONTEXT_MB * 1e6,
        "embeddings": embedding + positions,
        "blocks": block * (3 if streams else int(config["num_hidden_layers"])),
        "draw and its products, of the embedding": DRAWS_HELD * embedding,
        "attention scores": scores_held * one_score,
        "logits beside them": max(LOGITS_HELD - in_freed_memory, 0) * one_logits,
    }
    return {name: nbytes / 1e6 for name, nbytes in held.items()}


def megabytes(
    config: Config, shape: Shape, *, streams: bool, fused: bool, both: bool = True
) -> float:
    """Their sum."""
    return sum(terms(config, shape, streams=streams, fused=fused, both=both).values())


def megabytes_of_float32_loss(model: ModelSpec, shape: Shape, *, streams: bool) -> float:
    """Return MB that MeZO or ZO2 (``streams``) holds of a 16-bit model whose own loss is in
    float32, attention fused: the sum of :func:`terms`, with logits of four bytes beside their
    16-bit ones.

    Embedding and head stay; three blocks pass through the device, or all are resident.
    """
    size = DTYPE_BYTES[model.dtype]
    ends = model.prologue.numel() + model.epilogue.numel()
    block = max(unit.numel() for unit in model.blocks)
    matrix = max(math.prod(param.shape) for param in (model.prologue.params))
    logits = shape.tokens * model.vocab_size
    held = CONTEXT_MB * 1e6 + size * (ends + block * (3 if streams else len(model.blocks)))
    held += logits * (size + 3 * 4)  # as they are, in float32, shifted, log-softmax
    held += 2 * matrix * size  # the draw and its product with the scale
    held += logits * size * streams  # the other forward's
    return held / 1e6


def phone_terms(config: Config, sequence: int, *, checkpoints: bool) -> dict[str, float]:
    """MB of the published MeBP and MeZO on a phone, if they hold whole logits in float32, the head
    in 4 bits, one block decoded to float32, and (MeBP) every activation checkpoint in memory."""
    dim, forward, vocab = (
        int(config[key]) for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads = int(config["num_attention_heads"])
    keys = int(config["num_key_value_heads"])
    width = int(config.get("head_dim") or dim // heads)
    block = dim * width * (2 * heads + 2 * keys) + 3 * dim * forward
    held = {
        "logits": 4 * sequence * vocab,
        "the head": vocab * dim / 2,
        "a block": 4 * block,
        "checkpoints": 2 * sequence * dim * int(config["num_hidden_layers"]) * checkpoints,
    }
    return {name: nbytes / 1e6 for name, nbytes in held.items()}


def balanced(costs: Costs, parts: int) -> Costs:
    """The same costs with attention as training frameworks have it: kernels skip what a causal mask
    hides, ranks that share a row share that work evenly (ours measure the last part, which sees all
    keys), a backward does 2.5 times a forward's, once, and adds up nothing in memory: a block's
    backward passes over twice what its forward does."""
    share = parts / (2 * parts - 1) if parts > 1 else 0.5
    units = []
    for kind, cost in costs.units:
        if kind not in ENDS:
            attention = int(cost.forward.attention * share)
            forward = dataclasses.replace(cost.forward, attention=attention)
            backward = dataclasses.replace(
                forward * 2,
                products=cost.backward.products,
                attention=attention * 5 // 2,
            )
            changed = {"forward_flops": forward.flops, "backward_flops": backward.flops}
            cost = dataclasses.replace(cost, forward=forward, backward=backward, **changed)
        units.append((kind, cost))
    return Costs(tuple(units), costs.scratch)


def useful_flops(costs: Costs, kinds: Iterable[str]) -> float:
    """FLOPs of a forward and a backward through units of these kinds, three forwards' worth: what
    papers' MFU counts, recomputation left out. The epilogue's forward is that of its head."""
    return sum(3.0 * costs.of(kind).forward_flops for kind in kinds)
