"""Ranks that hold parts of the rows of a batch, beside every document by itself in one process: no
padding, no neighbours, no parts. Not a test: no oracle."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.plan.methods import method
from blockwalk.walk.context_check import require_parts
from blockwalk.walk.walker import Walker
from tests.models import tiny_model
from tests.support.processes import run_ranks
from tests.support.sharded_runs import canonical

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {**_SIZES, "num_key_value_heads": 1, "sliding_window": 5},
    "gemma3_text": {
        **_SIZES,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama4_text": {
        **_SIZES,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "moe_layers": [1],
        "attention_chunk_size": 4,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
    "deepseek_v3": {
        **_SIZES,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "mixtral": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"tied": True, "dropout": 0.0},
}
"""Causal, sliding, mixed and chunked attention; latent keys whose heads are wider than values';
mixtures of experts; learnt positions; tied heads."""
_TARGETS = {"gpt2": ["c_attn"], "deepseek_v3": ["q_b_proj", "kv_b_proj"]}
"""Layers with adapters, where a model has no others for queries and values."""

TOLERANCE = 1e-6
"""The largest difference that is rounding."""

Case = tuple[str, bool, str, str, int]
"""A kind of model, whether it has adapters, the method, the way, and the parts of a row."""


def make(kind: str, lora: bool) -> nn.Module:
    model = tiny_model(kind, **{"max_position_embeddings": 512, **KINDS[kind]})
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        targets = _TARGETS.get(kind, ["q_proj", "v_proj"])
        config = LoraConfig(
            r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out=kind == "gpt2"
        )
        model = get_peft_model(model, config)
    return model


def documents(seed: int, lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 101, (length,), generator=generator) for length in lengths]


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """One document a row, padded on the right."""
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed(rows: list[Tensor]) -> dict[str, Tensor]:
    """All documents in one row; nothing predicts a first token."""
    ids = torch.cat(rows)[None]
    places = torch.cat([torch.arange(len(row)) for row in rows])[None]
    labels = ids.masked_fill(places == 0, -100)
    return {"input_ids": ids, "position_ids": places, "labels": labels}


Batches = Mapping[str, tuple[Callable[[list[Tensor]], dict[str, Tensor]], list[Tensor]]]
BATCHES: Batches = {
    "padded": (padded, documents(1, [13, 9])),
    "packed": (packed, documents(2, [4, 12])),
}
"""Rows of 13 or 16 tokens; the last batch is the one that a step takes."""
LONG_BATCHES: Batches = {"padded": (padded, documents(3, [290, 211]))}


def alone(model: nn.Module, rows: list[Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """Loss, its gradients, and the loss summed over each document."""
    model = copy.deepcopy(model).to(dtype).train()
    if dtype is torch.float64:
        model.set_experts_implementation("eager")  # type: ignore[operator]  # grouped have none
    losses = [
        nn.functional.cross_entropy(
            model(row[None], use_cache=False).logits[0, :-1], row[1:], reduction="sum"
        )
        for row in rows
    ]
    loss = torch.stack(losses).sum() / sum(len(row) - 1 for row in rows)
    loss.backward()  # type: ignore[no-untyped-call]
    return {
        "loss": loss.item(),
        "rows": [each.item() for each in losses],
        "gradients": {
            canonical(name): p.grad for name, p in model.named_parameters() if p.grad is not None
        },
    }


def in_one_batch(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of the same rows by the model's own forward, in float32."""
    model = copy.deepcopy(model).train()
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits_BSV = model(**inputs, use_cache=False).logits
    loss = nn.functional.cross_entropy(
        logits_BSV[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    )
    loss.backward()  # type: ignore[no-untyped-call]
    named = model.named_parameters()
    return {canonical(name): p.grad for name, p in named if p.grad is not None}


def walked(
    rank: int, cases: Sequence[Case], batches: Batches, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """What ranks come to for each case, with each of the batches."""
    import torch.distributed as dist

    answers = []
    world = dist.get_world_size()
    for kind, lora, name, way, context in cases:
        mesh = {"world": world, "ranks_per_node": world, "context": context}
        plan = method(name, mesh=mesh, context={"way": way}, **settings)
        with Walker(make(kind, lora), plan, device="cpu") as walker:
            answer: dict[str, Any] = {}
            for shape, (lay, rows) in batches.items():
                batch = lay(rows)
                answer[shape] = {
                    "gradients": walker.gradients(batch),
                    "evaluated": walker.evaluate(batch).loss,
                    "rows": walker.label_losses(batch, batches=1).tolist(),
                }
            answer["step"] = walker.step(batch).loss
            answers.append(answer)
    return answers


def errors(
    world: int,
    cases: Sequence[Case],
    batches: Batches = BATCHES,
    timeout: float = 300,
    **settings: Any,
) -> Iterator[dict[str, float]]:
    """Yield for each case the largest differences of so many ranks from one process, relative to
    the figure or to the tensor's norm, by what they are of. A gradient is compared with
    one process's in float32, each document alone and all in one batch, and with float64's: the
    nearest counts."""
    for kind, lora, _, way, _ in dict.fromkeys(cases):  # once, before the ranks are forked
        mesh = {"world": 2, "ranks_per_node": 2, "context": 2}
        require_parts(make(kind, lora), method("hzp", mesh=mesh, context={"way": way}))
    answers = run_ranks(world, walked, list(cases), batches, settings, timeout=timeout)
    for k, (kind, lora, *_) in enumerate(cases):
        model = make(kind, lora)
        found: Counter[str] = Counter()
        for shape, (lay, rows) in batches.items():
            single = alone(model, rows, torch.float32)
            exact = alone(model, rows, torch.float64)
            together = in_one_batch(model, lay(rows))
            sums = single["rows"] if shape == "padded" else [sum(single["rows"])]
            for answer in answers:
                of_shape = answer[k][shape]
                assert of_shape["gradients"].keys() == single["gradients"].keys()
                losses = [(of_shape["evaluated"], exact["loss"])]
                losses += zip(of_shape["rows"], sums, strict=True)
                found |= Counter({f"{shape} loss": max(abs(a / b - 1) for a, b in losses)})  # type: ignore[dict-item]
                for name, gradient in of_shape["gradients"].items():
                    in_float32 = [single["gradients"][name], together[name]]
                    error = _difference(gradient, in_float32, exact["gradients"][name])
                    found |= Counter({f"{shape} gradients": error})  # type: ignore[dict-item]
        steps = [abs(answer[k]["step"] / exact["loss"] - 1) for answer in answers]
        yield {**found, "step loss": max(steps)}


def errors_against_float64(
    world: int, case: Case, seeds: Sequence[int], timeout: float = 300
) -> tuple[float, float]:
    """Return the root mean squares, over padded batches of these seeds, of every gradient's error
    against float64 relative to its norm: of the ranks, and of one process in float32, each document
    alone or all in one batch, whichever is larger."""
    kind, lora, *_ = case
    batches: Batches = {str(seed): (padded, documents(seed, [13, 9])) for seed in seeds}
    answers = run_ranks(world, walked, [case], batches, {}, timeout=timeout)
    model = make(kind, lora)
    of_ranks = []
    of_one: tuple[list[float], list[float]] = ([], [])
    for shape, (lay, rows) in batches.items():
        exact = alone(model, rows, torch.float64)["gradients"]
        in_float32 = (
            alone(model, rows, torch.float32)["gradients"],
            in_one_batch(model, lay(rows)),
        )
        for name, gradient in exact.items():
            norm = float(gradient.norm())
            if norm < 1e-7:
                continue
            of_rank = answers[0][0][shape]["gradients"][name]
            of_ranks.append(float((of_rank.double() - gradient).norm()) / norm)
            for errors, other in zip(of_one, in_float32, strict=True):
                errors.append(float((other[name].double() - gradient).norm()) / norm)
    return _root_mean_square(of_ranks), max(map(_root_mean_square, of_one))


def _root_mean_square(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).square().mean().sqrt())


def _difference(gradient: Tensor, in_float32: list[Tensor], exact: Tensor) -> float:
    """Return the smallest of the relative differences; 0 for a gradient that vanishes. Where one
    process in float32 is itself further than 1e-6 from the truth, ranks may be as far."""
    norm = float(exact.norm())
    if norm < 1e-7 and float(gradient.norm()) < 1e-6:
        return 0.0
    nearest = min(float((gradient.double() - other).norm()) for other in [*in_float32, exact])
    of_one_process = max(float((other.double() - exact).norm()) for other in in_float32)
    return nearest / norm / max(1.0, of_one_process / norm / TOLERANCE)
