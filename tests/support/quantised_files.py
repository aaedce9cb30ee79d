"""Checkpoints of tiny models in the forms that quantisers write, with codes drawn at random, and
the float32 weights that these stand for by each form's published definition, whole and undivided.
Not a test: no oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from blockwalk.numerics.codecs.nf4 import LEVELS
from tests.support import gguf_files

Tensors = dict[str, torch.Tensor]
Made = tuple[Tensors, torch.Tensor]
"""A matrix's tensors by the ends of their names, and the weights that they stand for."""


def drawn(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.int32)


def scales_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape) * 0.02 + 0.002).to(dtype)


def packed_in_32(
    codes: torch.Tensor, dim: int, order: tuple[int, ...] = (), bits: int = 4
) -> torch.Tensor:
    """The codes of ``bits`` bits along ``dim``, as many as fit, in one int32: code ``order[i]`` of
    them at bit bits·i (``pack`` of AutoGPTQ and AutoAWQ, whose order is their ``order_map``)."""
    codes = codes.transpose(0, dim)
    codes_a_word = 32 // bits
    out = torch.zeros(len(codes) // codes_a_word, *codes.shape[1:], dtype=torch.int32)
    for i, place in enumerate(order or range(codes_a_word)):
        out |= codes[place::codes_a_word] << bits * i
    return out.transpose(0, dim).contiguous()


def spread(block_values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return block_values.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def fp8(
    rows: int,
    columns: int,
    block: tuple[int, int] = (64, 32),
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Made:
    codes = (torch.randn(rows, columns) * 64).to(dtype)
    scales = scales_of(rows // block[0], columns // block[1]) / 64
    return {".weight": codes, ".weight_scale_inv": scales}, codes.float() * spread(scales, *block)


FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
"""The levels of bitsandbytes' FP4 that are not negative (its ``get_4bit_type``: twelfths, of which
the greatest is 12)."""


def bitsandbytes(rows: int, columns: int, nested: bool = False, kind: str = "nf4") -> Made:
    levels = torch.tensor(LEVELS if kind == "nf4" else [*FP4, *(-level for level in FP4)])
    codes = drawn(16, rows * columns)
    said: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": 64,
        "dtype": "float32",
        "shape": [rows, columns],
    }
    scales = scales_of(rows * columns // 64)
    tensors: Tensors = {".absmax": scales}
    if nested:
        eight = torch.randint(0, 256, scales.shape, dtype=torch.uint8)
        map_of = torch.linspace(-1, 1, 256)
        outer = scales_of(-(-len(scales) // 256))
        said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.015625}
        scales = map_of[eight.int()] * outer.repeat_interleave(256)[: len(scales)] + 0.015625
        tensors = {".absmax": eight, ".nested_absmax": outer, ".nested_quant_map": map_of}
    tensors |= {
        "": (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1),
        ".quant_map": levels,
    }
    tensors[f".quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(said).encode()), dtype=torch.uint8
    )
    weights = levels[codes] * scales.repeat_interleave(64)
    return {f".weight{leaf}": tensor for leaf, tensor in tensors.items()}, weights.view(
        rows, columns
    )


def gptq(
    rows: int, columns: int, *, desc_act: bool = False, less: int = 1, size: int = 32, bits: int = 4
) -> Made:
    group_of = torch.arange(columns, dtype=torch.int32) // size
    if desc_act:
        group_of = group_of[torch.randperm(columns)]
    codes = drawn(1 << bits, columns, rows)
    zeros = drawn(1 << bits, columns // size, rows)
    scales = scales_of(columns // size, rows, dtype=torch.float16)
    tensors = {
        ".qweight": packed_in_32(codes, 0, bits=bits),
        ".qzeros": packed_in_32(zeros, 1, bits=bits),
        ".scales": scales,
        ".g_idx": group_of,
    }
    weights = (codes - (zeros + less)[group_of]).float() * scales.float()[group_of]
    return tensors, weights.t().contiguous()


def awq(rows: int, columns: int, size: int = 32) -> Made:
    codes = drawn(16, columns, rows)
    zeros = drawn(16, columns // size, rows)
    scales = scales_of(columns // size, rows, dtype=torch.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        ".qweight": packed_in_32(codes, 1, order),
        ".qzeros": packed_in_32(zeros, 1, order),
        ".scales": scales,
    }
    weights = (codes - zeros.repeat_interleave(size, 0)).float() * scales.float().repeat_interleave(
        size, 0
    )
    return tensors, weights.t().contiguous()


def compressed(
    rows: int,
    columns: int,
    *,
    symmetric: bool = True,
    actorder: bool = False,
    size: int = 32,
    bits: int = 4,
) -> Made:
    """pack-quantized: codes of four bits, −8 to 7, stored with 8 added; zero points likewise,
    packed along the rows; other widths by their own half. ``actorder``: columns name their
    groups."""
    half = 1 << bits - 1
    codes = drawn(2 * half, rows, columns) - half
    zeros = drawn(2 * half, rows, columns // size) - half
    zeros *= not symmetric
    scales = scales_of(rows, columns // size)
    tensors = {".weight_packed": packed_in_32(codes + half, 1, bits=bits), ".weight_scale": scales}
    tensors[".weight_shape"] = torch.tensor([rows, columns])
    if not symmetric:
        tensors[".weight_zero_point"] = packed_in_32(zeros + half, 0, bits=bits)
    if not actorder:
        return tensors, (codes - zeros.repeat_interleave(size, 1)).float() * spread(scales, 1, size)
    group_of = tensors[".weight_g_idx"] = (torch.arange(columns, dtype=torch.int32) // size)[
        torch.randperm(columns)
    ]
    return tensors, (codes - zeros[:, group_of]).float() * scales[:, group_of]


def compressed_fp8_blocks(rows: int, columns: int) -> Made:
    tensors, weights = fp8(rows, columns)
    return {".weight": tensors[".weight"], ".weight_scale": tensors[".weight_scale_inv"]}, weights


def compressed_int8(rows: int, columns: int, zero: int = 0) -> Made:
    codes = (drawn(256, rows, columns) - 128).to(torch.int8)
    scales = scales_of(rows, 1) / 16
    tensors = {".weight": codes, ".weight_scale": scales, ".input_scale": torch.tensor([0.5])}
    if zero:
        tensors[".weight_zero_point"] = torch.full((rows, 1), zero, dtype=torch.int8)
    return tensors, (codes.float() - zero) * scales


def compressed_fp8(rows: int, columns: int) -> Made:
    codes = (torch.randn(rows, columns) * 64).to(torch.float8_e4m3fn)
    scales = scales_of(1) / 64
    return {".weight": codes, ".weight_scale": scales}, codes.float() * scales


def mxfp4(experts: int, inputs: int, outputs: int) -> Made:
    """Experts of gpt-oss, which their model has as [experts, inputs, outputs] and the file
    turned."""
    codes = drawn(16, experts, outputs, inputs)
    powers = drawn(6, experts, outputs, inputs // 32) + 119
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    blocks = (
        (codes[..., ::2] | codes[..., 1::2] << 4)
        .to(torch.uint8)
        .view(experts, outputs, inputs // 32, 16)
    )
    weights = levels[codes] * 2.0 ** (powers.float() - 127).repeat_interleave(32, -1)
    return {"_blocks": blocks, "_scales": powers.to(torch.uint8)}, weights.transpose(
        1, 2
    ).contiguous()


def _ct(form: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, **weights},
    }
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_GROUP = {"num_bits": 4, "strategy": "group", "group_size": 32}
KINDS: dict[str, tuple[dict[str, Any], Callable[..., Made]]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [64, 32]}, fp8),
    "fp8 e5m2": (
        {"quant_method": "fp8", "weight_block_size": [64, 32]},
        lambda rows, columns: fp8(rows, columns, dtype=torch.float8_e5m2),
    ),
    "bitsandbytes": (_BNB, bitsandbytes),
    "bitsandbytes nested": (
        {**_BNB, "bnb_4bit_use_double_quant": True},
        lambda rows, columns: bitsandbytes(rows, columns, nested=True),
    ),
    "bitsandbytes fp4": (
        {**_BNB, "bnb_4bit_quant_type": "fp4"},
        lambda rows, columns: bitsandbytes(rows, columns, kind="fp4"),
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, gptq),
    "gptq 2": (
        {"quant_method": "gptq", "bits": 2, "group_size": 32, "desc_act": True},
        lambda rows, columns: gptq(rows, columns, desc_act=True, bits=2),
    ),
    "gptq 8": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False},
        lambda rows, columns: gptq(rows, columns, bits=8),
    ),
    "gptq desc_act": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        lambda rows, columns: gptq(rows, columns, desc_act=True),
    ),
    "gptq_v2 whole": (
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"},
        lambda rows, columns: gptq(rows, columns, less=0, size=columns),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        awq,
    ),
    "compressed-tensors int4": (_ct("pack-quantized", **_GROUP), compressed),
    "compressed-tensors int4 asymmetric": (
        _ct("pack-quantized", **_GROUP, symmetric=False),
        lambda rows, columns: compressed(rows, columns, symmetric=False),
    ),
    "compressed-tensors int4 actorder": (
        _ct("pack-quantized", **_GROUP, symmetric=False, actorder="group"),
        lambda rows, columns: compressed(rows, columns, symmetric=False, actorder=True),
    ),
    "compressed-tensors int2": (
        _ct("pack-quantized", **_GROUP | {"num_bits": 2}, symmetric=False),
        lambda rows, columns: compressed(rows, columns, symmetric=False, bits=2),
    ),
    "compressed-tensors int8 packed": (
        _ct("pack-quantized", **_GROUP | {"num_bits": 8}),
        lambda rows, columns: compressed(rows, columns, bits=8),
    ),
    "compressed-tensors int8": (_ct("int-quantized", strategy="channel"), compressed_int8),
    "compressed-tensors naive": (_ct("naive-quantized", strategy="channel"), compressed_int8),
    "compressed-tensors int8 asymmetric": (
        _ct("int-quantized", strategy="channel", symmetric=False),
        lambda rows, columns: compressed_int8(rows, columns, zero=-3),
    ),
    "compressed-tensors fp8": (
        _ct("float-quantized", type="float", strategy="tensor"),
        compressed_fp8,
    ),
    "compressed-tensors fp8 blocks": (
        _ct("float-quantized", type="float", strategy="block", block_structure=[64, 32]),
        compressed_fp8_blocks,
    ),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4),
}
"""The kinds of checkpoints: what their configuration says, and a matrix of each."""


def tiny(kind: str, family: str = "") -> nn.Module:
    if kind == "mxfp4":
        experts = {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "intermediate_size": 96,
        }
        model = gguf_files.tiny("gpt_oss", hidden=64, vocab_size=258, **experts)
        model.config.layer_types = ["full_attention"] * 2  # type: ignore[union-attr]
        return model
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "head_dim": 32,
    }
    return gguf_files.tiny(
        family or "llama", hidden=128, vocab_size=258, **(experts if family == "qwen3_moe" else {})
    )


def write(folder: Path, kind: str, family: str = "") -> nn.Module:
    """Write a checkpoint of a kind, its tensors in two files by turns; the answer is the model in
    the weights that it stands for, in float32."""
    from transformers import AutoModelForCausalLM

    model: Any = tiny(kind, family)
    model.save_pretrained(folder)
    (single,) = folder.glob("*.safetensors")
    from safetensors.torch import load_file

    tensors = load_file(single)
    dense = {}
    settings, make = KINDS[kind]
    torch.manual_seed(1)
    for name in list(tensors):
        stem, _, leaf = name.rpartition(".")
        if kind == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            parts, dense[name] = make(*tensors.pop(name).shape)
            tensors |= {name + end: part for end, part in parts.items()}
        elif kind != "mxfp4" and ("_proj" in stem and leaf == "weight"):
            parts, dense[name] = make(*tensors.pop(name).shape)
            tensors |= {stem + end: part for end, part in parts.items()}
    config = json.loads((folder / "config.json").read_text())
    dense_folder = folder.parent / f"{folder.name}-dense"
    dense_folder.mkdir()
    (dense_folder / "config.json").write_text(json.dumps(config))
    plain = {name: tensor for name, tensor in load_file(single).items() if name not in dense}
    save_file({**plain, **dense}, dense_folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    single.unlink()
    for number in range(2):
        part = {key: tensors[key].contiguous() for key in sorted(tensors)[number::2]}
        save_file(part, folder / f"model-{number + 1:05d}-of-00002.safetensors", {"format": "pt"})
    files = {
        key: f"model-{place % 2 + 1:05d}-of-00002.safetensors"
        for place, key in enumerate(sorted(tensors))
    }
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    return AutoModelForCausalLM.from_pretrained(dense_folder, dtype=torch.float32)  # type: ignore[no-any-return]
