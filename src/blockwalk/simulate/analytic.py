"""A model and its costs from a ``config.json`` alone, by formula: no torch, no transformers, milliseconds at any size.

For the families whose block is attention (fused, or gemma2's capped scores) and a gated or plain MLP: llama, mistral, qwen2,
qwen3, seed_oss, gemma2, gemma3_text, opt, mixtral and qwen3_moe.
What :mod:`blockwalk.costs` measures on such a model is the oracle.

T tokens of a micro-batch, B batch, S sequence, D hidden, F feed-forward, Q = heads × head size, K = key heads × head size,
E experts of which k are chosen, V vocabulary, R LoRA rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockwalk.compile import Costs, UnitCost
from blockwalk.compile.placement import computes_in, epilogue_reads
from blockwalk.estimators.chunks import DECODE_BYTES, UPDATE_ELEMENTS, loss_memory, loss_work, own_loss_work
from blockwalk.model_folder import require_config
from blockwalk.plan import Estimator, Plan
from blockwalk.program import Shape
from blockwalk.simulate.analytic_work import block_work
from blockwalk.state import DTYPE_BYTES, ModelSpec, ParamSpec, Tier, UnitSpec
from blockwalk.work import Work, elementwise, sizes

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "seed_oss", "gemma2", "gemma3_text", "opt", "mixtral", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What a decoder's shapes follow from."""

    family: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    key_heads: int
    head_size: int
    vocab: int
    dtype: str
    tied: bool
    experts: int = 0
    chosen: int = 0
    positions: int = 0
    """Rows of a learned position embedding."""
    soft_cap: bool = False

    @property
    def queries(self) -> int:
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        return self.key_heads * self.head_size

    @property
    def plain_mlp(self) -> bool:
        """Two matrices with biases and layer norms with biases, instead of three and RMS norms."""
        return self.family == "opt"

    @property
    def eager(self) -> bool:
        """Attention whose scores stand in memory: they are capped."""
        return self.family == "gemma2"

    @property
    def norms(self) -> int:
        """Norms of a block over D."""
        return 4 if self.family.startswith("gemma") else 2


@dataclass(frozen=True, slots=True)
class _Dtype:
    itemsize: int


def read_config(path: str | Path) -> dict[str, Any]:
    """A ``config.json``, or that of a folder. Raises ValueError where there is none, or no JSON object in it."""
    file = Path(path)
    if not file.is_file():
        file = require_config(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{file} is no model configuration: it names no model_type")
    return config


def dimensions(config: Mapping[str, Any]) -> Dimensions:
    """The dimensions in a configuration.

    Raises:
        ValueError: a family that no formula here describes; ``blockwalk.costs`` measures any model that can be walked.
    """
    family = config["model_type"]
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} has no formula; known: {', '.join(FAMILIES)}")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    opt, moe = family == "opt", family in ("mixtral", "qwen3_moe")
    forward = config["ffn_dim"] if opt else config["moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"]
    tied_unless_said = opt or family.startswith("gemma")
    return Dimensions(
        family=family,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        feed_forward=forward,
        heads=heads,
        key_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or hidden // heads,
        vocab=config["vocab_size"],
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        tied=config.get("tie_word_embeddings", tied_unless_said),
        experts=(config.get("num_local_experts") or config.get("num_experts") or 8) if moe else 0,
        chosen=config.get("num_experts_per_tok", 2) if moe else 0,
        positions=config.get("max_position_embeddings", 2048) + 2 if opt else 0,
        soft_cap=bool(config.get("final_logit_softcapping")),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Parameters
# ---------------------------------------------------------------------------------------------------------------------


def model_spec(config: Mapping[str, Any], name: str = "", *, lora_rank: int | None = None) -> ModelSpec:
    """The model as the walk sees it. ``lora_rank`` adds adapters to every linear layer of the blocks and freezes the rest.

    Raises:
        ValueError: an unknown family, or adapters on fused experts.
    """
    d = dimensions(config)
    if d.experts and lora_rank is not None:
        raise ValueError(f"adapters of {d.family}'s fused experts have no formula; the model has to be built for them")
    trained = lora_rank is None
    decoder = "model.decoder" if d.family == "opt" else "model"

    def param(name: str, *shape: int, matrix: bool = False) -> ParamSpec:
        return ParamSpec(name, shape, d.dtype, trained, matrix, assembled=matrix and len(shape) == 3)

    def block(i: int) -> UnitSpec:
        prefix = f"{decoder}.layers.{i}"
        params = [param(f"{prefix}.{leaf}", *shape, matrix=len(shape) > 1 and leaf != ROUTER) for leaf, shape in _block(d)]
        if lora_rank is not None:
            for leaf, (rows, columns) in _linears(d):
                params.append(ParamSpec(f"{prefix}.{leaf}.lora_A.weight", (lora_rank, columns), "float32", True))
                params.append(ParamSpec(f"{prefix}.{leaf}.lora_B.weight", (rows, lora_rank), "float32", True))
        return UnitSpec(prefix, "block", tuple(params))

    embedding = param(f"{decoder}.embed_tokens.weight", d.vocab, d.hidden, matrix=True)
    prologue = [embedding]
    if d.positions:
        prologue.append(param(f"{decoder}.embed_positions.weight", d.positions, d.hidden, matrix=True))
    norm = "final_layer_norm" if d.plain_mlp else "norm"
    epilogue = [param(f"{decoder}.{norm}.{leaf}", d.hidden) for leaf in (("weight", "bias") if d.plain_mlp else ("weight",))]
    if not d.tied:
        epilogue.append(param("lm_head.weight", d.vocab, d.hidden, matrix=True))
    return ModelSpec(
        name or config.get("_name_or_path") or d.family,
        UnitSpec("prologue", "prologue", tuple(prologue)),
        tuple(block(i) for i in range(d.layers)),
        UnitSpec("epilogue", "epilogue", tuple(epilogue)),
        d.hidden,
        d.vocab,
        d.dtype,
        (("lm_head.weight", embedding.name),) if d.tied else (),
    )


ROUTER = "mlp.gate.weight"
"""Of a mixture of experts: kept as it came."""


def _linears(d: Dimensions) -> list[tuple[str, tuple[int, int]]]:
    """The linear layers of a block, [out, in]; experts are fused and no linear layers."""
    names = ["q_proj", "k_proj", "v_proj", "out_proj" if d.plain_mlp else "o_proj"]
    shapes = [(d.queries, d.hidden), (d.keys, d.hidden), (d.keys, d.hidden), (d.hidden, d.queries)]
    found = [(f"self_attn.{name}", shape) for name, shape in zip(names, shapes, strict=True)]
    if d.plain_mlp:
        found += [("fc1", (d.feed_forward, d.hidden)), ("fc2", (d.hidden, d.feed_forward))]
    elif not d.experts:
        found += [(f"mlp.{name}", (d.feed_forward, d.hidden)) for name in ("gate_proj", "up_proj")]
        found.append(("mlp.down_proj", (d.hidden, d.feed_forward)))
    return found


def _block(d: Dimensions) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every parameter of a block: leaf name and shape."""
    for name, shape in _linears(d):
        yield f"{name}.weight", shape
        biased = d.plain_mlp or (d.family in ("qwen2", "seed_oss") and name[-6:] in ("q_proj", "k_proj", "v_proj"))
        if biased:
            yield f"{name}.bias", shape[:1]
    if d.experts:
        yield ROUTER, (d.experts, d.hidden)
        yield "mlp.experts.gate_up_proj", (d.experts, 2 * d.feed_forward, d.hidden)
        yield "mlp.experts.down_proj", (d.experts, d.hidden, d.feed_forward)
    if d.family in ("qwen3", "gemma3_text", "qwen3_moe"):
        yield "self_attn.q_norm.weight", (d.head_size,)
        yield "self_attn.k_norm.weight", (d.head_size,)
    if d.plain_mlp:
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            yield f"{norm}.weight", (d.hidden,)
            yield f"{norm}.bias", (d.hidden,)
        return
    outer = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if d.norms == 4 else ()
    for norm in ("input_layernorm", "post_attention_layernorm", *outer):
        yield f"{norm}.weight", (d.hidden,)


# ---------------------------------------------------------------------------------------------------------------------
# Costs
# ---------------------------------------------------------------------------------------------------------------------


def costs(config: Mapping[str, Any], plan: Plan, shape: Shape, *, lora_rank: int | None = None, device: str = "cpu") -> Costs:
    """The cost of each kind of unit at the shape of one micro-batch, without padding."""
    d, model = dimensions(config), model_spec(config, lora_rank=lora_rank)
    dtype = computes_in(plan, d.dtype)
    size, backprop = DTYPE_BYTES[dtype], plan.estimator is Estimator.BACKPROP
    hidden_bytes = shape.tokens * d.hidden * size
    positions = 0 if d.plain_mlp else 2 * shape.sequence * d.head_size * size
    if d.eager:  # masks of the two kinds of layer, added to scores
        positions += 2 * shape.batch * shape.sequence**2 * size
    prologue = UnitCost(
        forward_transient=hidden_bytes * (3 if d.plain_mlp else 1) + positions,
        backward_transient=model.prologue.numel(trainable=True) * size if backprop else 0,
        saved=hidden_bytes + positions + shape.batch * shape.sequence * 8,
        forward=elementwise(sizes([(2 * hidden_bytes, 1), (2 * positions, 2)]), size),
        backward=elementwise(sizes([(3 * model.prologue.numel(trainable=True) * size * backprop, 1)]), size),
    )
    units = (("prologue", prologue), ("epilogue", _epilogue(d, model, plan, shape, size, device)))
    fused = plan.frozen.tier is not Tier.DEVICE and plan.frozen.codec.encoded
    block = _block_cost(d, model.blocks[0], shape, size, lora_rank=lora_rank, backprop=backprop, fused=fused)
    return Costs((*units, ("block", block)), _scratch(d, model, plan, shape, dtype, device))


def _block_cost(
    d: Dimensions, unit: UnitSpec, shape: Shape, size: int, *, lora_rank: int | None, backprop: bool, fused: bool
) -> UnitCost:
    """``fused``: adapters are added in place to the products of decoded weights."""
    tokens, wide = shape.tokens, max(size, 4)
    full, width = lora_rank is None, d.feed_forward * max(d.chosen, 1)
    linear = 2 * tokens * sum(rows * columns for _, (rows, columns) in _linears(d))
    if d.experts:
        linear += 2 * tokens * (3 * width * d.hidden + d.experts * d.hidden)
    attention = 4 * shape.batch * d.heads * shape.sequence**2 * d.head_size
    rank = lora_rank or 0
    adapters = 2 * tokens * rank * sum(rows + columns for _, (rows, columns) in _linears(d))
    forward_flops = linear + attention + adapters
    backward_flops = (2 if full else 1) * linear + (2 * attention if d.eager else 5 * attention // 2) + 2 * adapters
    if fused and d.norms == 2 and not d.experts:  # its recomputation leaves the last product out: no gradient reads it
        backward_flops -= 2 * tokens * d.hidden * (width + rank)
    in_mlp = 2 * width + d.hidden if d.plain_mlp else 3 * width + 2 * d.hidden
    if d.experts:
        in_mlp = 4 * width + (2 + d.chosen) * d.hidden
    scores = shape.batch * d.heads * shape.sequence**2 * size if d.eager else 0
    narrow = size < 4  # scores pass through float32
    in_attention = 2 * d.hidden + 3 * d.queries if d.eager else 2 * d.queries + 2 * d.keys + 3 * d.hidden
    forward = max(tokens * size * in_mlp, tokens * size * in_attention + scores * (5 if narrow else 2))
    shapes = [each for _, each in _linears(d)]
    works = block_work(d, shapes, shape, size, rank=rank, full=full, fused=fused)
    if not backprop:
        return UnitCost(forward, 0, 0, forward_flops, 0, works[0])
    master_copies = 0 if full else unit.numel(trainable=True) * (size if size < 4 else 0)
    gradients = unit.numel(trainable=True) * size
    if d.plain_mlp:  # inputs of the linears, norms and products
        kept = 4 * d.hidden + 4 * d.queries + width
    else:
        kept = 4 * width + _norm_elements(d, wide // size, full) + 2 * d.queries + 2 * d.keys + d.hidden
    saved = tokens * size * kept
    saved += tokens * rank * size * len(_linears(d)) + master_copies
    if d.eager:
        saved += 2 * tokens * size * (d.queries - d.keys) + scores * (4 if narrow else 2)
    else:
        saved += 4 * shape.batch * d.heads * shape.sequence
    down = d.hidden * width * size if full else 0
    at_start = saved + tokens * size * (2 * width + d.hidden) + down
    at_end = gradients + master_copies + tokens * (7 * d.hidden * size + (7 * d.hidden * wide if size < 4 else 0)) // 2
    at_scores = 7 * tokens * d.hidden * size + scores * (7 if narrow else 4)
    return UnitCost(forward, max(at_start, at_end, at_scores), saved, forward_flops, backward_flops, *works)


def _norm_elements(d: Dimensions, wide: int, full: bool) -> int:
    """Elements a token that a block's RMS norms keep: their float32 input (where it is not the hidden state itself), the
    normed value where the norm's weight is trained, and the two outputs that linears read. ``wide``: float32 elements are
    so many of the compute dtype's."""
    gemma = d.family.startswith("gemma")
    normed = (wide if gemma else 1) * full
    elements = (d.norms * (wide + normed) + 2 - (wide == 1)) * d.hidden
    if d.family in ("qwen3", "gemma3_text", "qwen3_moe"):
        elements += (d.queries + d.keys) * (wide + normed)
    return elements


def _trains_head(d: Dimensions, model: ModelSpec, plan: Plan) -> bool:
    return plan.estimator is Estimator.BACKPROP and any(
        p.trainable and p.shape == (d.vocab, d.hidden) for p in epilogue_reads(model).params
    )


def _epilogue(d: Dimensions, model: ModelSpec, plan: Plan, shape: Shape, size: int, device: str) -> UnitCost:
    tokens, trains = shape.batch * (shape.sequence - 1), _trains_head(d, model, plan)
    taken = loss_memory(tokens, d.hidden, d.vocab, _Dtype(size), soft_cap=d.soft_cap, device=device, trains_head=trains)
    hidden_bytes, wide = shape.tokens * d.hidden * size, max(size, 4)
    shifted = taken.gradient if shape.batch > 1 else 0
    product = 2 * tokens * d.hidden * d.vocab
    if plan.loss != "chunked":  # as blockwalk.costs: logits, their float32 copy, log-probabilities, and their gradients
        logits, backprop = shape.tokens * d.vocab, plan.estimator is Estimator.BACKPROP
        again = (2 if trains else 1) * product if backprop else 0
        works = own_loss_work(shape.tokens, d.hidden, d.vocab, _Dtype(size), trains_head=trains)
        held = logits * (2 * size + 3 * wide) if backprop else 0
        return UnitCost(logits * (size + 2 * wide), held, 0, product, again, works[0], works[1] if backprop else Work())
    work = loss_work(
        tokens,
        d.hidden,
        d.vocab,
        _Dtype(size),
        soft_cap=d.soft_cap,
        device=device,
        gradient=plan.estimator is Estimator.BACKPROP,
        trains_head=trains,
    )
    if plan.estimator is not Estimator.BACKPROP:
        in_norm = 5 if size < 4 and not d.plain_mlp else 3
        masks = 2 * shape.batch * shape.sequence**2 * size if d.eager else 0  # the pass up to the head makes them again
        return UnitCost(max(hidden_bytes + shifted, in_norm * hidden_bytes + masks), 0, 0, product, 0, work)
    full = model.epilogue.params[0].trainable
    kept = 0 if size == 4 else wide // size
    norm = hidden_bytes * (1 if d.plain_mlp else 1 + kept + full * (kept or 1 if d.family.startswith("gemma") else 1))
    forward = norm + shifted + taken.buffers
    at_loss = forward + taken.gradient_buffers + taken.gradient
    return UnitCost(forward, at_loss, 0, product, (3 if trains else 1) * product, work)


def _scratch(d: Dimensions, model: ModelSpec, plan: Plan, shape: Shape, dtype: str, device: str) -> int:
    size, backprop = DTYPE_BYTES[dtype], plan.estimator is Estimator.BACKPROP
    tokens = shape.batch * (shape.sequence - 1)
    head = loss_memory(
        tokens, d.hidden, d.vocab, _Dtype(size), soft_cap=d.soft_cap, device=device, trains_head=False
    )

    def lazily(p: ParamSpec) -> bool:
        if not p.quantizable or len(p.shape) != 2:
            return False
        if p.trainable:
            return not backprop and (plan.zo.noise != "mezo" or plan.trainable.codec.encoded)
        codec = plan.frozen.codec
        if codec.encoded:
            return True
        return plan.frozen.tier is not Tier.DEVICE and codec.dtype_of(p.dtype) != dtype

    largest = max((min(DECODE_BYTES[device], p.numel * size) for p in model.blocks[0].params if lazily(p)), default=0)
    if plan.loss == "chunked" and any(lazily(p) and p.shape == (d.vocab, d.hidden) for p in epilogue_reads(model).params):
        largest = max(largest, head.head_rows)
    if backprop:
        return largest
    if plan.zo.kind == "hizoo":
        largest += 2 * largest * 4 // size
    narrow = any(p.trainable and plan.trainable.codec.dtype_of(p.dtype) != "float32" for p in model.params())
    pieces = narrow + (plan.optimizer.name != "sgd" or plan.zo.kind == "hizoo") * 2
    return largest + 4 * UPDATE_ELEMENTS[device] * pieces + (head.buffers if plan.loss == "chunked" else 0)
