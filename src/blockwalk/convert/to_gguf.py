"""``blockwalk gguf``: a model folder, or a LoRA adapter, as a GGUF file for llama.cpp and Ollama.

Names, keys and encodings are those of the ``gguf`` package. One parameter at a time is in memory. A
family that is not in :data:`FAMILIES` is converted from the merged folder by llama.cpp's own
``convert_hf_to_gguf.py``."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockwalk.convert.adapter_changes import read_adapter
from blockwalk.convert.gguf_marks import add_marks
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.engine.pack import Progress
from blockwalk.models.gguf_config import settings_of
from blockwalk.models.gguf_splits import SPLITS, WHOLE_WORDS
from blockwalk.models.model_source import model_source
from blockwalk.models.places import adapter_paths, model_paths, refuse_output
from blockwalk.models.stops import learnt_stops
from blockwalk.plan.words import counted
from blockwalk.system import atomic_files
from blockwalk.system.partial_outputs import held
from blockwalk.system.paths import StrPath
from blockwalk.tiers.model_folder.folder import CheckpointFolder

log = logging.getLogger(__name__)

INSTALL = "pip install 'blockwalk[gguf]'"

FAMILIES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""transformers' model types, and the architecture that llama.cpp runs each with."""

DTYPES = ("bf16", "f16", "f32", "q8_0")
"""Encodings of matrices; vectors are float32."""

_NOT_COMPUTED = frozenset(
    re.findall(
        r"\S+",
        "architectures attention_dropout auto_map bos_token_id dtype eos_token_id"
        " initializer_range layer_types "
        "max_window_layers model_type pad_token_id pretraining_tp torch_dtype"
        " transformers_version unsloth_fixed "
        "unsloth_version use_cache _name_or_path sliding_window use_sliding_window"
        " rope_parameters rope_scaling rope_theta",
    )
)
"""Settings that change no logit; windows and rotary scaling are looked at by themselves."""


def convert(
    model: StrPath,
    out: StrPath,
    *,
    adapter: StrPath | None = None,
    dtype: str = "bf16",
    progress: Progress | None = None,
) -> None:
    """Write a model as GGUF, or, with ``adapter``, that adapter alone, to be put on the model's
    GGUF when it is run.

    Args:
        model: the model's folder; of an adapter, its base model's.
        out: the file to make; it must not exist.
        adapter: a folder in PEFT's format.
        dtype: one of :data:`DTYPES`.
        progress: called with (bytes written, bytes in all) after each tensor.

    Raises:
        ValueError: ``gguf`` is not installed, a model of another family, a tokenizer, rotary
            scaling or other setting that the file could not say, or an output that exists.
    """
    try:
        import gguf
    except ImportError:
        raise ValueError(f"GGUF files are written with the gguf package: {INSTALL}") from None
    refuse_output(
        out, model=model_paths(model), adapter=[] if adapter is None else adapter_paths(adapter)
    )
    skeleton = build_skeleton(model)
    config: Any = skeleton.config
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{config.model_type} is not among {', '.join(FAMILIES)}: merge the adapter"
            " (blockwalk merge), and convert the folder with llama.cpp's convert_hf_to_gguf.py"
        )
    arch = getattr(gguf.MODEL_ARCH, FAMILIES[config.model_type])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)

    def named(parameter: str) -> str:
        name = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"GGUF has no name for {parameter} of {config.model_type}")
        return str(name)

    # Rows of these projections llama.cpp wants in another order, by heads: it turns neighbours,
    # transformers halves.
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    turned = heads if arch == gguf.MODEL_ARCH.LLAMA else {}
    part = atomic_files.beside(Path(out))
    writer = gguf.GGUFWriter(part, gguf.MODEL_ARCH_NAMES[arch])
    stack = ExitStack()
    try:
        stack.enter_context(held(part, Path(out), part.touch, atomic_files.PARTIAL))
        if adapter is not None:
            _warn_of_stops(adapter)
            _write(
                writer,
                _adapter_tensors(writer, read_adapter(adapter, skeleton), named, turned),
                progress,
            )
        else:
            folder = model_source(model).weights_folder
            _refuse_windows(config)
            factors = _hyperparameters(writer, config)
            _tokenizer(writer, folder, config.vocab_size)
            source = CheckpointFolder(model, skeleton)
            kind = getattr(gguf.GGMLQuantizationType, dtype.upper())
            tensors: list[_Tensor] = []
            for name in source.names():
                shape = source.shape(name)
                rows = turned.get(name.rpartition(".")[0].rpartition(".")[2])
                as_kind = (
                    kind
                    if len(shape) > 1 and shape[-1] % 32 == 0
                    else gguf.GGMLQuantizationType.F32
                )
                tensors.append((named(name), shape, as_kind, partial(_read, source, name, rows)))
            if factors is not None:
                f32 = gguf.GGMLQuantizationType.F32
                tensors.append(
                    ("rope_freqs.weight", tuple(factors.shape), f32, partial(torch.clone, factors))
                )
            _refuse_what_is_not_said(writer, config, {name: shape for name, shape, _, _ in tensors})
            _write(writer, tensors, progress)
            source.close()
        os.replace(part, out)
    finally:
        writer.close()
        part.unlink(missing_ok=True)
        stack.close()


def _warn_of_stops(adapter: StrPath) -> None:
    """Warn of the ends of turns that an adapter has learnt, where its base does not end there."""
    if stops := learnt_stops(adapter):
        log.warning(
            "%s ends turns at the tokens %s too, which a GGUF adapter cannot say: its base's file"
            " must name them, as that of a merged model does",
            adapter,
            stops,
        )


_Tensor = tuple[str, tuple[int, ...], Any, Callable[[], Tensor]]
"""Name in the file, shape, encoding, and the function that reads it."""


def _write(writer: Any, tensors: list[_Tensor], progress: Progress | None) -> None:
    """Write header and tensors, one after another."""
    import gguf
    import numpy as np

    sizes = []
    for name, shape, kind, _ in tensors:
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        stored = (
            gguf.quant_shape_to_byte_shape(shape, kind)
            if kind != gguf.GGMLQuantizationType.F32
            else shape
        )
        sizes.append(nbytes * (int(np.prod(shape)) // block))
        dtype = np.dtype(np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.uint8)
        writer.add_tensor_info(name, stored, dtype, sizes[-1], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    written = 0
    for (_, _, kind, value), nbytes in zip(tensors, sizes, strict=True):
        values = value().float().contiguous().numpy()
        writer.write_tensor_data(
            values if kind == gguf.GGMLQuantizationType.F32 else gguf.quantize(values, kind)
        )
        written += nbytes
        if progress is not None:
            progress(written, sum(sizes))


def _read(source: Any, name: str, heads: int | None) -> Tensor:
    """Return a parameter, its rows in GGUF's order."""
    out = torch.empty(source.shape(name), dtype=source.dtype(name))
    source.read_into(name, out)
    source.release([name])
    return out if heads is None else _turn(out, heads)


def _turn(rows: Tensor, heads: int) -> Tensor:
    """Return rows [heads · 2 · half, ...] with each head's halves interleaved."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _adapter_tensors(
    writer: Any, changes: Any, named: Callable[[str], str], turned: dict[str, int]
) -> list[_Tensor]:
    """Return tensors of a LoRA file: A [R, D] and B [N, R] of each weight. llama.cpp scales B·A by
    alpha / R: alpha is 1, and what it lacks is in B."""
    import gguf

    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 1.0)
    tensors: list[_Tensor] = []
    for name, change in changes.items():
        more = change.replacement is not None or change.magnitude_N is not None
        if change.left_NR is None or change.right_RD is None or more:
            raise ValueError(
                f"GGUF adapters hold LoRA factors alone, and this one changes {name} otherwise:"
                " merge it (blockwalk merge)"
            )
        a = change.right_RD
        b = change.left_NR * (change.scaling * len(change.right_RD))
        heads = turned.get(name.rpartition(".")[0].rpartition(".")[2])
        b = b if heads is None else _turn(b, heads)
        for suffix, factor in (("lora_a", a), ("lora_b", b)):
            kind = gguf.GGMLQuantizationType.F32
            tensors.append(
                (f"{named(name)}.{suffix}", tuple(factor.shape), kind, partial(torch.clone, factor))
            )
    return tensors


def _hyperparameters(writer: Any, config: Any) -> Tensor | None:
    """Write the model's sizes; answers the factors of its rotary frequencies, where they are
    scaled."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    rotary = {**(getattr(config, "rope_parameters", None) or {})}
    kind = rotary.get("rope_type", "default")
    if (part := rotary.get("partial_rotary_factor", 1.0)) != 1:
        raise ValueError(
            f"partial_rotary_factor = {part} cannot be said in a GGUF file of {config.model_type}"
        )
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"rotary scaling of type {kind!r} is not written yet: take llama.cpp's"
            " convert_hf_to_gguf.py"
        )
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


def _refuse_windows(config: Any) -> None:
    """Raise ValueError for a window that is shorter than the model's context: llama.cpp has none in
    these families."""
    window = (
        getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True)
        else None
    )
    if window is not None and window < config.max_position_embeddings:
        raise ValueError(
            f"sliding_window = {window} is left out by llama.cpp in models of type"
            f" {config.model_type}, which would compute"
            f" texts of {window} to {config.max_position_embeddings} tokens otherwise: set"
            f" max_position_embeddings to {window}"
            " in config.json, and the file is right for texts up to that"
        )


def _refuse_what_is_not_said(writer: Any, config: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Read the metadata that were written, and raise ValueError where they make another
    configuration than the model's.

    Args:
        writer: what the file's header holds.
        config: the model's configuration.
        shapes: the tensors' shapes by their names in the file.
    """
    from transformers import AutoConfig, PreTrainedConfig

    (values,) = writer.kv_data
    metadata = {key: entry.value for key, entry in values.items()}
    settings = settings_of("the file", metadata, shapes, {})
    written = AutoConfig.for_model(**settings).to_dict()
    defaults = {**type(config)().to_dict(), **written}
    common = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    for key, value in config.to_dict().items():
        if key in _NOT_COMPUTED or key in common or value is None or key not in defaults:
            continue
        number = isinstance(value, float)
        if not (
            math.isclose(value, defaults[key], rel_tol=1e-6) if number else value == defaults[key]
        ):
            raise ValueError(
                f"{key} = {value!r} cannot be said in a GGUF file of {config.model_type}: llama.cpp"
                f" would compute with {defaults[key]!r}"
            )


def _tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    """Write the vocabulary, special tokens and chat template."""
    import gguf

    path = folder / "tokenizer.json"
    tokenizer: dict[str, Any] = atomic_files.read_json(path) if path.is_file() else {}
    model = tokenizer.get("model", {})
    if model.get("type") != "BPE":
        raise ValueError(
            f"{folder} has no tokenizer.json with byte pairs (BPE); take llama.cpp's"
            " convert_hf_to_gguf.py"
        )
    # the tokenizers of Llama 2 and Mistral: pieces of text, in order of their merges
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(_blank_before_text(tokenizer, folder))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split(tokenizer, folder))
    added = {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    by_id = {
        **{number: text for text, number in model["vocab"].items()},
        **{n: t["content"] for n, t in added.items()},
    }
    beyond = sorted(number for number in by_id if number >= vocab_size)
    if beyond:
        raise ValueError(
            f"{folder} has a tokenizer with {counted(len(beyond), 'token')} that the model has no"
            " row for"
            f" ({by_id[beyond[0]]!r} is number {beyond[0]}, of {vocab_size} rows), and llama.cpp"
            " refuses such a file: take them"
            " out of tokenizer.json, or resize the model's embedding (resize_token_embeddings)"
            " and train it"
        )
    tokens = []
    types = []
    for number in range(vocab_size):
        tokens.append(by_id.get(number, f"[PAD{number}]"))
        types.append(
            _kind(number, tokens[-1], by_id, added, bytes_too=bool(model.get("byte_fallback")))
        )
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    writer.add_token_types(types)
    logging.getLogger("gguf").setLevel(logging.ERROR)  # notes on templates that are not used
    special = gguf.SpecialVocab(
        folder, load_merges=not model.get("byte_fallback"), n_vocab=len(tokens)
    )
    add_marks(writer, folder, special)


def _kind(number: int, text: str, known: Any, added: Any, *, bytes_too: bool) -> Any:
    import gguf

    if number not in known:
        return gguf.TokenType.UNUSED
    if number in added:
        return (
            gguf.TokenType.CONTROL if added[number].get("special") else gguf.TokenType.USER_DEFINED
        )
    is_byte = bytes_too and len(text) == 6 and text.startswith("<0x")
    return gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a tokenizer's normalizer or pre-tokenizer, none for null."""
    if not part:
        return []
    inner = part.get("normalizers", part.get("pretokenizers"))
    return [part] if inner is None else [step for entry in inner for step in _steps(entry)]


def _split(tokenizer: dict[str, Any], folder: Path) -> str:
    """Return llama.cpp's name of the way in which a tokenizer splits text before it joins byte
    pairs."""
    steps = [_step(step) for step in _steps(tokenizer.get("pre_tokenizer"))]
    if len(steps) > 1 and steps[-1] == ("ByteLevel", ""):
        steps = steps[:-1]  # the letters of bytes, without a split
    changes = [
        step["type"] for step in _steps(tokenizer.get("normalizer")) if step["type"] != "NFC"
    ]
    names = {split: name for name, split in SPLITS.items()}
    if (name := names.get(tuple(steps))) is not None and not changes:
        added = {token["content"] for token in tokenizer.get("added_tokens", [])}
        _refuse_other_words(tokenizer["model"], added, name, folder)
        return name
    kinds = [f"{kind} {pattern}".strip() for kind, pattern in steps]
    raise ValueError(
        f"{folder} splits text in a way that llama.cpp has no name for here"
        f" ({'; '.join([*changes, *kinds])}): take llama.cpp's convert_hf_to_gguf.py"
    )


def _refuse_other_words(model: dict[str, Any], added: set[str], name: str, folder: Path) -> None:
    """Raise ValueError where words that no merges lead to are tokens here and none in llama.cpp, or
    the other way round."""
    ignores_merges = bool(model.get("ignore_merges"))
    merges = [
        merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", ())
    ]
    merged = added | {"".join(merge) for merge in merges}
    words = [token for token in model["vocab"] if len(token) > 1 and token not in merged]
    if words and ignores_merges != (name in WHOLE_WORDS):
        raise ValueError(
            f"{folder} has ignore_merges = {str(ignores_merges).lower()} with"
            f" {counted(len(words), 'token')} that no merges make ({words[0]!r}): llama.cpp takes"
            f" it for {str(not ignores_merges).lower()} under the name {name}: take llama.cpp's"
            " convert_hf_to_gguf.py"
        )


def _step(step: dict[str, Any]) -> tuple[str, str]:
    """Return a step's kind and pattern; what it does besides is a part of the pattern."""
    kind = str(step["type"])
    if kind == "Split":
        plain = step.get("behavior") == "Isolated" and not step.get("invert")
        return kind, str(step["pattern"].get("Regex", step["pattern"])) if plain else str(step)
    if kind == "ByteLevel":
        if step.get("add_prefix_space"):
            return kind, "prefix blank"
        return kind, "regex" if step.get("use_regex", True) else ""
    if kind == "Digits":
        return kind, "single" if step.get("individual_digits") else "in rows"
    return kind, ""


def _blank_before_text(tokenizer: dict[str, Any], folder: Path) -> bool:
    """Return whether a tokenizer of pieces puts a blank before a text.

    Raises:
        ValueError: it changes text in another way than by writing a blank as ▁, which llama.cpp
            does.
    """
    prepends = False
    for step in _steps(tokenizer.get("normalizer")) + _steps(tokenizer.get("pre_tokenizer")):
        if step["type"] == "Prepend" and step.get("prepend") == "▁":
            prepends = True
            continue
        if step["type"] == "Metaspace" and step.get("replacement", "▁") == "▁":
            prepends = prepends or step.get("prepend_scheme", "always") != "never"
            continue
        written = step["type"] == "Replace" and (step["pattern"].get("String"), step["content"])
        if written != (" ", "▁"):
            raise ValueError(
                f"{folder} changes text by {step['type']} before it is split, which a GGUF file"
                " cannot say: take llama.cpp's convert_hf_to_gguf.py"
            )
    return prepends


def modelfile(out: StrPath, base: StrPath | None = None) -> str:
    """Return an Ollama Modelfile for a GGUF model, or for an adapter on the GGUF file of its
    base."""
    if base is None:
        return f"FROM ./{Path(out).name}\n"
    return f"FROM {os.fspath(base)}\nADAPTER ./{Path(out).name}\n"
