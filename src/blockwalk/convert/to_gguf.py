"""``blockwalk gguf``: a model folder, or a LoRA adapter, as a GGUF file for llama.cpp and Ollama.

Names, keys and encodings are those of the ``gguf`` package. One parameter at a time is in memory. A family that is not in
:data:`FAMILIES` is converted from the merged folder by llama.cpp's own ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockwalk.convert.merge import read_adapter
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.engine.pack import Progress
from blockwalk.models.folder import model_folder
from blockwalk.models.places import adapter_paths, model_paths, refuse_output
from blockwalk.system import atomic_files
from blockwalk.system.paths import StrPath
from blockwalk.tiers.model_folder.folder import CheckpointFolder

INSTALL = "pip install 'blockwalk[gguf]'"

FAMILIES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""transformers' model types, and the architecture that llama.cpp runs each with."""

DTYPES = ("bf16", "f16", "f32", "q8_0")
"""Encodings of matrices; vectors are float32."""

_SPLITS = {
    r"\p{N}{1,3}": "llama-bpe",
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}": "qwen2",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}": "qwen35",
}
"""A part of the pattern that splits text before byte pairs are joined, and llama.cpp's name for it."""


def convert(
    model: StrPath,
    out: StrPath,
    *,
    adapter: StrPath | None = None,
    dtype: str = "bf16",
    progress: Progress | None = None,
) -> None:
    """Write a model as GGUF, or, with ``adapter``, that adapter alone, to be put on the model's GGUF when it is run.

    Args:
        model: the model's folder; of an adapter, its base model's.
        out: the file to make; it must not exist.
        adapter: a folder in PEFT's format.
        dtype: one of :data:`DTYPES`.
        progress: called with (bytes written, bytes in all) after each tensor.

    Raises:
        ValueError: ``gguf`` is not installed, a model of another family, a tokenizer or rotary scaling that GGUF has no name
            for, or an output that exists.
    """
    try:
        import gguf
    except ImportError:
        raise ValueError(f"GGUF files are written with the gguf package: {INSTALL}") from None
    refuse_output(out, model=model_paths(model), adapter=[] if adapter is None else adapter_paths(adapter))
    skeleton = build_skeleton(model)
    config: Any = skeleton.config
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{config.model_type} is not among {', '.join(FAMILIES)}: merge the adapter (blockwalk merge), and convert the"
            " folder with llama.cpp's convert_hf_to_gguf.py"
        )
    arch = getattr(gguf.MODEL_ARCH, FAMILIES[config.model_type])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)

    def named(parameter: str) -> str:
        found = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"GGUF has no name for {parameter} of {config.model_type}")
        return str(found)

    # Rows of these projections llama.cpp wants in another order, by heads: it turns neighbours, transformers halves.
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    turned = heads if arch == gguf.MODEL_ARCH.LLAMA else {}
    part = atomic_files.beside(Path(out))
    writer = gguf.GGUFWriter(part, gguf.MODEL_ARCH_NAMES[arch])
    try:
        if adapter is not None:
            _write(writer, _adapter_tensors(writer, read_adapter(adapter, skeleton), named, turned), progress)
        else:
            folder = model_folder(model)
            factors = _hyperparameters(writer, config)
            _tokenizer(writer, folder, config.vocab_size)
            source = CheckpointFolder(model, skeleton)
            kind = getattr(gguf.GGMLQuantizationType, dtype.upper())
            tensors: list[_Tensor] = []
            for name in source.names():
                shape, rows = source.shape(name), turned.get(name.rpartition(".")[0].rpartition(".")[2])
                as_kind = kind if len(shape) > 1 and shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F32
                tensors.append((named(name), shape, as_kind, partial(_read, source, name, rows)))
            if factors is not None:
                f32 = gguf.GGMLQuantizationType.F32
                tensors.append(("rope_freqs.weight", tuple(factors.shape), f32, partial(torch.clone, factors)))
            _write(writer, tensors, progress)
            source.close()
        os.replace(part, out)
    finally:
        writer.close()
        part.unlink(missing_ok=True)


_Tensor = tuple[str, tuple[int, ...], Any, Callable[[], Tensor]]
"""Name in the file, shape, encoding, and the function that reads it."""


def _write(writer: Any, tensors: list[_Tensor], progress: Progress | None) -> None:
    """Write header and tensors, one after another."""
    import gguf
    import numpy as np

    sizes = []
    for name, shape, kind, _ in tensors:
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        stored = gguf.quant_shape_to_byte_shape(shape, kind) if kind != gguf.GGMLQuantizationType.F32 else shape
        sizes.append(nbytes * (int(np.prod(shape)) // block))
        dtype = np.dtype(np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.uint8)
        writer.add_tensor_info(name, stored, dtype, sizes[-1], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done = 0
    for (_, _, kind, read), nbytes in zip(tensors, sizes, strict=True):
        values = read().float().contiguous().numpy()
        writer.write_tensor_data(values if kind == gguf.GGMLQuantizationType.F32 else gguf.quantize(values, kind))
        done += nbytes
        if progress is not None:
            progress(done, sum(sizes))


def _read(source: Any, name: str, heads: int | None) -> Tensor:
    """A parameter, its rows in GGUF's order."""
    out = torch.empty(source.shape(name), dtype=source.dtype(name))
    source.read_into(name, out)
    source.release([name])
    return out if heads is None else _turn(out, heads)


def _turn(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads · 2 · half, ...] with each head's halves interleaved."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _adapter_tensors(writer: Any, changes: Any, named: Callable[[str], str], turned: dict[str, int]) -> list[_Tensor]:
    """Tensors of a LoRA file: A [R, D] and B [N, R] of each weight. llama.cpp scales B·A by alpha / R: alpha is 1, and what it
    lacks is in B."""
    import gguf

    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 1.0)
    tensors: list[_Tensor] = []
    for name, change in changes.items():
        more = change.replacement is not None or change.magnitude_N is not None
        if change.left_NR is None or change.right_RD is None or more:
            raise ValueError(
                f"GGUF adapters hold LoRA factors alone, and this one changes {name} otherwise: merge it (blockwalk merge)"
            )
        a, b = change.right_RD, change.left_NR * (change.scaling * len(change.right_RD))
        heads = turned.get(name.rpartition(".")[0].rpartition(".")[2])
        b = b if heads is None else _turn(b, heads)
        for suffix, factor in (("lora_a", a), ("lora_b", b)):
            kind = gguf.GGMLQuantizationType.F32
            tensors.append((f"{named(name)}.{suffix}", tuple(factor.shape), kind, partial(torch.clone, factor)))
    return tensors


def _hyperparameters(writer: Any, config: Any) -> Tensor | None:
    """Write the model's sizes; answers the factors of its rotary frequencies, where they are scaled."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    rotary = {**(getattr(config, "rope_parameters", None) or {})}
    kind = rotary.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise ValueError(f"rotary scaling of type {kind!r} is not written yet: take llama.cpp's convert_hf_to_gguf.py")
    writer.add_name(Path(str(config.name_or_path)).name or "model")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(rotary.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if kind == "default":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    plain = rotary["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    return torch.as_tensor(plain / scaled)


def _tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    """Write the vocabulary, special tokens and chat template."""
    import gguf

    path = folder / "tokenizer.json"
    found: dict[str, Any] = atomic_files.read_json(path) if path.is_file() else {}
    model = found.get("model", {})
    if model.get("type") != "BPE":
        raise ValueError(
            f"{folder} has no tokenizer.json with byte pairs (BPE); take llama.cpp's convert_hf_to_gguf.py"
        )
    if model.get("byte_fallback"):  # the tokenizers of Llama 2 and Mistral: pieces of text, in order of their merges
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split(found, folder))
    added = {token["id"]: token for token in found.get("added_tokens", [])}
    by_id = {**{number: text for text, number in model["vocab"].items()}, **{n: t["content"] for n, t in added.items()}}
    tokens, types = [], []
    for number in range(max(vocab_size, max(by_id) + 1)):
        tokens.append(by_id.get(number, f"[PAD{number}]"))
        types.append(_kind(number, tokens[-1], by_id, added, bytes_too=bool(model.get("byte_fallback"))))
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    writer.add_token_types(types)
    logging.getLogger("gguf").setLevel(logging.ERROR)  # notes on templates that are not used
    special = gguf.SpecialVocab(folder, load_merges=not model.get("byte_fallback"), n_vocab=len(tokens))
    special.add_to_gguf(writer, quiet=True)


def _kind(number: int, text: str, known: Any, added: Any, *, bytes_too: bool) -> Any:
    import gguf

    if number not in known:
        return gguf.TokenType.UNUSED
    if number in added:
        return gguf.TokenType.CONTROL if added[number].get("special") else gguf.TokenType.USER_DEFINED
    is_byte = bytes_too and len(text) == 6 and text.startswith("<0x")
    return gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL


def _split(found: dict[str, Any], folder: Path) -> str:
    """llama.cpp's name of the way in which a tokenizer splits text before it joins byte pairs."""
    splitting = found.get("pre_tokenizer") or {}
    parts = [step for step in splitting.get("pretokenizers", [splitting]) if "type" in step]
    patterns = [step["pattern"].get("Regex", "") for step in parts if step["type"] == "Split"]
    for pattern in patterns:
        for part, name in _SPLITS.items():
            if part in pattern:
                return name
    if not patterns and any(step["type"] == "ByteLevel" and step.get("use_regex", True) for step in parts):
        return "smollm" if any(step["type"] == "Digits" for step in parts) else "gpt-2"
    raise ValueError(
        f"{folder} splits text in a way that is not known here ({patterns or [step['type'] for step in parts]}): take"
        " llama.cpp's convert_hf_to_gguf.py"
    )


def modelfile(out: StrPath, base: StrPath | None = None) -> str:
    """An Ollama Modelfile for a GGUF model, or for an adapter on the GGUF file of its base."""
    if base is None:
        return f"FROM ./{Path(out).name}\n"
    return f"FROM {os.fspath(base)}\nADAPTER ./{Path(out).name}\n"
