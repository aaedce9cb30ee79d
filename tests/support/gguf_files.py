"""GGUF files of tiny models, written with the ``gguf`` package as llama.cpp's converter writes
them. Not a test: no oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""The places of float16 numbers in a block of each type."""


def random_blocks(
    kind: str, rows: int, columns: int, *, block: tuple[int, int], seed: int = 0
) -> np.ndarray:
    """Blocks of any codes with scales that are numbers, uint8 [rows, bytes]: the ``gguf`` package
    cannot encode all types. ``block``: elements and bytes of one."""
    elements, nbytes = block
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // elements, nbytes), dtype=np.uint8)
    for place in HALVES[kind]:
        scales = rng.normal(0, 1e-3, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = (
            scales[..., None].view(np.uint8).reshape(*blocks.shape[:2], 2)
        )
    return blocks.reshape(rows, -1)


def tiny(
    family: str, *, hidden: int = 64, tied: bool = False, spread: float = 0.0, **changes: Any
) -> nn.Module:
    """A random model of two blocks, ``hidden`` wide, whose norms and biases are no constants.
    ``spread``: the deviation of matrices, if it is not the family's, so that attention is far from
    even."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 128, "hidden_size": hidden, "intermediate_size": hidden,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": tied, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 1,
    }  # fmt: skip
    sizes |= {
        "qwen3": {"head_dim": 128},
        "gemma2": {"head_dim": 16},
        "gemma3_text": {"head_dim": 16},
    }.get(family, {})
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": max(32, hidden)}
    sizes |= {
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": {"head_dim": max(32, hidden // 4), "norm_topk_prob": True, **experts},
        "qwen2_moe": {"shared_expert_intermediate_size": hidden, **experts},
    }.get(family, {})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**sizes, **changes}), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn(parameter.shape) / 4)
            elif spread:
                parameter.copy_(torch.randn(parameter.shape) * spread)
    return model


def write(
    path: Path,
    model: nn.Module,
    kind: str,
    *,
    tokenizer: bool = True,
    tensors_in_a_part: int = 0,
    vectors: dict[str, Any] | None = None,
    **extra: Any,
) -> Path:
    """A model as a GGUF file, or as several of so many tensors, of which the first one's path is
    the answer: matrices in one type, the rest in F32. ``extra`` are metadata of its architecture,
    None for a key that is left out; ``vectors`` are further tensors by name."""
    import gguf
    from gguf import quants

    config: Any = model.config
    renamed = {
        "gemma3_text": "gemma3",
        "mixtral": "llama",
        "qwen2_moe": "qwen2moe",
        "qwen3_moe": "qwen3moe",
    }
    architecture = renamed.get(config.model_type, config.model_type)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_in_a_part)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    rotary = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(float(rotary.get("rope_theta", 10000.0)))
    writer.add_vocab_size(config.vocab_size)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_epsilon)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if experts := getattr(config, "num_experts", getattr(config, "num_local_experts", 0)):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if width := getattr(config, "moe_intermediate_size", 0):
        writer.add_expert_feed_forward_length(width)
    if width := getattr(config, "shared_expert_intermediate_size", 0):
        writer.add_expert_shared_feed_forward_length(width)
    for key, value in extra.items():
        _add(writer, f"{architecture}.{key}", value)
    if tokenizer:
        add_tokenizer(writer, config.vocab_size)
    quantised = gguf.GGMLQuantizationType[kind]
    seen: set[int] = set()
    tensors = {
        part: values
        for name, tensor in model.state_dict(keep_vars=True).items()
        for part, values in halves(name, tensor)
    }
    for seed, (name, tensor) in enumerate(tensors.items()):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        stem, _, leaf = name.rpartition(".")
        values = as_converted(architecture, name, tensor.detach(), config).contiguous().numpy()
        target = f"{names.get_name(stem)}.{leaf}"
        if values.ndim < 2 or kind == "F32":
            writer.add_tensor(target, values)
        elif kind == "F16":
            writer.add_tensor(target, values.astype(np.float16))
        elif kind.endswith("_K"):
            rows = values.size // values.shape[-1]
            columns = values.shape[-1]
            blocks = random_blocks(
                kind, rows, columns, block=gguf.GGML_QUANT_SIZES[quantised], seed=seed
            )
            writer.add_tensor(target, blocks.reshape(*values.shape[:-1], -1), raw_dtype=quantised)
        else:
            writer.add_tensor(target, quants.quantize(values, quantised), raw_dtype=quantised)
    for name, vector in (vectors or {}).items():
        writer.add_tensor(name, np.asarray(vector, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.is_file() else min(path.parent.glob(f"{path.stem}-*.gguf"))


def _add(writer: Any, key: str, value: Any) -> None:
    """Write a key in the form that llama.cpp expects of its value's type; None takes it out."""
    for part in writer.kv_data:
        part.pop(key, None)
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        kinds[type(value)](key, value)


def halves(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A parameter by its name; experts as their matrices, under those."""
    stem, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj":
        gate, up = tensor.detach().chunk(2, 1)
        return [(f"{stem}.gate_proj.weight", gate), (f"{stem}.up_proj.weight", up)]
    return [(f"{name}.weight", tensor)] if leaf == "down_proj" else [(name, tensor)]


def as_converted(architecture: str, name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """What llama.cpp's converter makes of a tensor before it is quantised."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for projection, count in heads.items():
        if architecture == "llama" and projection in name:
            halves = tensor.view(count, 2, len(tensor) // count // 2, *tensor.shape[1:])
            return halves.transpose(1, 2).reshape(tensor.shape)
    if name.endswith("shared_expert_gate.weight"):
        return tensor.squeeze(0)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def add_tokenizer(writer: Any, vocabulary: int) -> None:
    """Bytes for tokens, a beginning and an end, and a chat template; the last tokens stand for
    nothing."""
    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ", "th", "he"]
    tokens = ["<s>", "</s>", *letters]
    tokens += [f"<unused{i}>" for i in range(vocabulary - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * len(letters), *[3] * (vocabulary - len(letters) - 2)])
    writer.add_token_merges(["t h", "h e"])  # older readers take a list of one for its entry
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_chat_template(
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    )
