"""A model and its costs from a ``config.json`` alone, by formula: no torch, no transformers, milliseconds at any size.

For the families whose block is attention (fused, or gemma2's capped scores) and a gated or plain MLP: llama, mistral, qwen2,
qwen3, seed_oss, gemma2, gemma3_text, opt, mixtral and qwen3_moe.
The figures that :mod:`blockwalk.walk.unit_costs` measures on such a model are the oracle.

T tokens of a micro-batch, B batch, S sequence, D hidden, F feed-forward, Q = heads × head size, K = key heads × head size,
E experts of which k are chosen, V vocabulary, R LoRA rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockwalk.plan.model_folder import require_config
from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "seed_oss", "gemma2", "gemma3_text", "opt", "mixtral", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Dimensions that a decoder's shapes follow from."""

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
        ValueError: a family that no formula here describes; ``blockwalk.walk.unit_costs`` measures any model that can be
        walked.
    """
    family = config["model_type"]
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} has no formula; known: {', '.join(FAMILIES)}")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    opt, moe = family == "opt", family in ("mixtral", "qwen3_moe")
    forward = (
        config["ffn_dim"] if opt else config["moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"]
    )
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
        params = [
            param(f"{prefix}.{leaf}", *shape, matrix=len(shape) > 1 and leaf != ROUTER) for leaf, shape in _block(d)
        ]
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
    epilogue = [
        param(f"{decoder}.{norm}.{leaf}", d.hidden) for leaf in (("weight", "bias") if d.plain_mlp else ("weight",))
    ]
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
"""The name of the router of a mixture of experts, which is kept as it came."""


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
