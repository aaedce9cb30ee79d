"""Adapters as PEFT saves them, of every kind: the walk's loss and the merged model's beside PEFT's
own, on small random models.

    python benchmarks/peft_adapters.py [--only WORD] [--json FILE] [--check]

Of each kind PEFT makes an adapter of random values, scores a batch with it, and saves it. The walk
puts the file on the base and scores the batch; so does transformers with the merged model. Where
one of them refuses, the table says which words it must do so with. ``--check`` exits with 1 where a
loss differs by more than 1e-5, or where a refusal is another than expected."""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from benchmarks.common import Bound, finish, parser
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, logging

from blockwalk import Walker, method
from blockwalk.convert.merge import merge

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
ENDS = ["q_proj", "embed_tokens", "lm_head"]
COPIES = {"modules_to_save": ["embed_tokens", "lm_head"]}
PATTERNS = {
    "target_modules": "all-linear",
    "rank_pattern": {r".*layers\.1\..*(q_proj|v_proj)": 2, "down_proj": 8},
    "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 32},
}
NAMES_OF_COMPILED = "names differ, the first is base_model.model._orig_mod"


def in_bfloat16(folder: Path) -> None:
    """Save the adapter in bfloat16."""
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)


def compiled(folder: Path) -> None:
    """Give the tensors the names that a compiled model has: PEFT loads none of them, and says
    nothing."""
    file = folder / "adapter_model.safetensors"
    plain = "base_model.model."
    other = "base_model.model._orig_mod."
    save_file(
        {name.replace(plain, other): tensor for name, tensor in load_file(file).items()}, file
    )


@dataclass(frozen=True)
class Kind:
    """A kind of adapter, and what the walk and merging answer: PEFT's loss, or a refusal with these
    words."""

    lora: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    rows: int = 0
    """Rows that PEFT's user resized the vocabulary to."""
    edit: Callable[[Path], None] | None = None
    walk: str = ""
    merged: str = ""


KINDS: dict[str, Kind] = {
    "plain": Kind(),
    "head, tied": Kind({"target_modules": ["q_proj", "lm_head"]}, TIED),
    "head": Kind({"target_modules": ["q_proj", "lm_head"]}),
    "embedding": Kind({"target_modules": ["q_proj", "embed_tokens"]}),
    "embedding, tied": Kind({"target_modules": ["q_proj", "embed_tokens"]}, TIED),
    "both ends": Kind({"target_modules": ENDS}),
    "both ends, tied": Kind({"target_modules": ENDS}, TIED),
    "both ends, tied by PEFT": Kind({"target_modules": ENDS, "ensure_weight_tying": True}, TIED),
    "both ends, to be tied of untied weights": Kind(
        {"target_modules": ENDS, "ensure_weight_tying": True}
    ),
    "copies": Kind(COPIES),
    "copies, tied by PEFT": Kind({**COPIES, "ensure_weight_tying": True}, TIED),
    "copies of tied weights": Kind(COPIES, TIED, walk="two different copies of one weight"),
    "copy of one tied weight": Kind(
        {"modules_to_save": ["lm_head"]}, TIED, walk="one of two tied weights"
    ),
    "copies of norms": Kind({"modules_to_save": ["norm"]}),
    "resized": Kind(
        rows=100, walk="the vocabulary was resized", merged="the vocabulary was resized"
    ),
    "resized, copies": Kind(
        COPIES, rows=100, walk="the vocabulary was resized", merged="the vocabulary was resized"
    ),
    "rows of the embedding": Kind(
        {"trainable_token_indices": [90, 91]},
        walk="trainable_token_indices",
        merged="trainable_token_indices",
    ),
    "dora": Kind({"use_dora": True}),
    "dora, rslora": Kind({"use_dora": True, "use_rslora": True}),
    "patterns": Kind(PATTERNS),
    "lora_bias": Kind({"lora_bias": True}, merged="has lora_bias, a bias for"),
    "lora_bias beside biases": Kind({"lora_bias": True}, {"attention_bias": True}),
    "bias all": Kind({"bias": "all"}, {"attention_bias": True}, walk="trained with bias = 'all'"),
    "bias lora_only": Kind(
        {"bias": "lora_only"}, {"attention_bias": True}, walk="trained with bias = 'lora_only'"
    ),
    "one layer": Kind({"layers_to_transform": [1]}),
    "all but one": Kind({"target_modules": "all-linear", "exclude_modules": ["down_proj"]}),
    "a pattern of names": Kind({"target_modules": r".*\.(q|k)_proj$"}),
    "pissa": Kind(
        {"init_lora_weights": "pissa"}, walk="init_lora_weights = 'pissa'", merged="'pissa'"
    ),
    "olora": Kind(
        {"init_lora_weights": "olora"}, walk="init_lora_weights = 'olora'", merged="'olora'"
    ),
    "orthogonal": Kind({"init_lora_weights": "orthogonal"}),
    "in bfloat16": Kind(edit=in_bfloat16),
    "of a compiled model": Kind(edit=compiled, walk=NAMES_OF_COMPILED, merged="_orig_mod"),
    "fused projections": Kind(
        {"target_modules": ["qkv_proj", "gate_up_proj"]}, {"pad_token_id": 0}, "phi3"
    ),
    "experts": Kind(
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        "mixtral",
        merged="target_parameters",
    ),
}


def loss_of(model: Any) -> float:
    """The loss of one fixed batch."""
    ids = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float(
            model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        )


def loaded(folder: Path, rows: int = 0) -> Any:
    """A model in float32, its vocabulary resized where ``rows`` says so."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if rows:
        model.resize_token_embeddings(rows)
    return model


def make(kind: Kind, folder: Path) -> float:
    """Write a base and an adapter of random values; PEFT's loss with what it loads again."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.family, **{**SIZES, **kind.base})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(std=0.1)
    model.save_pretrained(folder / "base")
    settings = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        **copy.deepcopy(kind.lora),
    }
    adapted = get_peft_model(
        loaded(folder / "base", kind.rows), LoraConfig(task_type="CAUSAL_LM", **settings)
    )
    torch.manual_seed(3)
    for param in adapted.parameters():
        if param.requires_grad:
            param.data += 0.1 * torch.randn_like(param)
    adapted.save_pretrained(folder / "adapter")
    if kind.edit is not None:
        kind.edit(folder / "adapter")
    return loss_of(
        PeftModel.from_pretrained(loaded(folder / "base", kind.rows), folder / "adapter")
    )


def walk(folder: Path) -> float:
    """The walk's loss with the adapter."""
    ids = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    plan = method("mebp", frozen="disk", compute_dtype="float32")
    with Walker(
        folder / "base", plan, lora=folder / "adapter", device="cpu", training=False
    ) as walker:
        return walker.evaluate(batch).loss


def merged(folder: Path) -> float:
    """The loss of transformers with the merged model."""
    merge(folder / "base", folder / "adapter", folder / "merged")
    return loss_of(loaded(folder / "merged"))


def verdict(run: Callable[[Path], float], folder: Path, expected: float, words: str) -> str:
    """Empty, or what is wrong with an answer."""
    try:
        difference = abs(run(folder) - expected)
    except ValueError as error:
        refusal = " ".join(str(error).split())
        return "" if words and words in refusal else f"refused: {refusal[:160]}"
    if words:
        return f"not refused ({words})"
    return "" if difference <= 1e-5 else f"{difference:.1e} from PEFT's loss"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="kinds whose names have this word")
    arguments = options.parse_args()
    logging.disable_progress_bar()
    figures: dict[str, dict[str, str]] = {}
    for name, kind in KINDS.items():
        if arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = make(kind, Path(scratch))
            wrong = {
                "walk": verdict(walk, Path(scratch), expected, kind.walk),
                "merged": verdict(merged, Path(scratch), expected, kind.merged),
            }
        figures[name] = wrong
        said = {"walk": kind.walk, "merged": kind.merged}
        answers = [
            f"{part}: {wrong[part] or ('refused' if said[part] else 'as PEFT')}" for part in wrong
        ]
        print(f"{name:42} {'   '.join(answers)}", flush=True)
    failures = sum(bool(text) for wrong in figures.values() for text in wrong.values())
    finish(
        arguments, figures, [Bound("answers that are not as expected", failures, 0, at_most=True)]
    )


if __name__ == "__main__":
    main()
