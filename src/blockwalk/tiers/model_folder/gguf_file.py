"""The tensors of a GGUF file under the names that they have in the model, as :class:`StoredTensor`
says where they lie.

Names are mapped by the ``gguf`` package. llama.cpp permutes the rows of a Llama's queries and keys,
which an index undoes when rows are read, and keeps some norms' weights with one added. Experts'
gates and their other half, which the model has above one another, are two tensors of the file, and
stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.models import gguf
from blockwalk.models.gguf_architectures import FACTORS, row
from blockwalk.numerics.codecs.codecs import decode_rows, gather_rows
from blockwalk.numerics.codecs.layout import Layout, dtype_of
from blockwalk.numerics.codecs.readers import Index, Reader, above
from blockwalk.plan.placement import Codec
from blockwalk.tiers.model_folder.stored import StoredTensor


def read_header(path: Path, model: nn.Module) -> dict[str, StoredTensor]:
    """Return the tensors of a GGUF file, or of all parts of a model, by the names of ``model``'s
    parameters, without reading them; one that the model does not have keeps the file's name.

    Raises:
        ValueError: as :func:`blockwalk.models.gguf.read_header`.
    """
    header = gguf.read_header(path)
    config: Any = model.config
    names = _names(header, model)
    form = row(header.metadata).form
    tensors: dict[str, StoredTensor] = {}
    weights = [
        info for info in header.tensors if info.name not in FACTORS
    ]  # which the configuration has
    for info in sorted(weights, key=lambda info: info.name):  # gates before what is below them
        name = names.get(info.name, info.name)
        dtype = dtype_of(info.codec.facts.dtype or "float32")
        shape = (
            (1, info.shape[-1]) if info.name.endswith("ffn_gate_inp_shexp.weight") else info.shape
        )
        order = None
        plus = 0.0
        if form == "permuted" and ".attn_q." in info.name:
            order = row_order(config.num_attention_heads, info.shape[0])
        elif form == "permuted" and ".attn_k." in info.name:
            order = row_order(config.num_key_value_heads, info.shape[0])
        elif form == "shifted" and info.name.endswith("norm.weight"):
            plus = -1.0
        tensor = StoredTensor(
            name, info.file, info.offset, info.nbytes, dtype, shape, info.codec, order, plus
        )
        tensors[name] = _stacked(tensors[name], tensor) if name in tensors else tensor
    return tensors


def _stacked(upper: StoredTensor, lower: StoredTensor) -> StoredTensor:
    """Return experts of which each has some rows in one tensor and the rest in another, both [E, N,
    D]."""
    halves = upper, lower
    layouts = [replace(half.layout, shape=half.shape[1:]) for half in halves]

    def read(parts: Sequence[Tensor]) -> Reader:
        upper_reader, lower_reader = (
            _rows_of(part_P, layout) for part_P, layout in zip(parts, layouts, strict=True)
        )
        return above(upper_reader, lower_reader, upper.shape[1])

    shapes = [(half.shape[0], layout.nbytes) for half, layout in zip(halves, layouts, strict=True)]
    parts = tuple(
        replace(half, dtype=torch.uint8, shape=shape)
        for half, shape in zip(halves, shapes, strict=True)
    )
    shape = (upper.shape[0], upper.shape[1] + lower.shape[1], *upper.shape[2:])
    nbytes = upper.nbytes + lower.nbytes
    return replace(upper, nbytes=nbytes, shape=shape, codec=Codec.STACKED, parts=parts, reader=read)


def _rows_of(bytes_P: Tensor, layout: Layout) -> Reader:
    """Return a matrix over its bytes, in any codec."""

    def read(rows: Index, columns: Index) -> Tensor:
        assert isinstance(columns, slice)
        if isinstance(rows, Tensor):
            rows_nD = torch.empty(len(rows), layout.columns, device=bytes_P.device)
            return gather_rows(bytes_P, layout, rows, rows_nD)[:, columns]
        out = torch.empty(
            rows.stop - rows.start, columns.stop - columns.start, device=bytes_P.device
        )
        return decode_rows(
            bytes_P, layout, rows.start, rows.stop, out, columns=(columns.start, columns.stop)
        )

    return read


def _names(header: gguf.Header, model: nn.Module) -> dict[str, str]:
    """Return the model's name of each tensor that it has, by the file's, as the ``gguf`` package
    maps them."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (architecture,) = (
        number for number, name in MODEL_ARCH_NAMES.items() if name == header.architecture
    )
    names_of_file = get_tensor_name_map(
        architecture, header.metadata[f"{header.architecture}.block_count"]
    )
    names = {}
    for name in model.state_dict(keep_vars=True):
        stem, _, leaf = name.rpartition(".")
        if (file_stem := names_of_file.get_name(stem)) is not None:
            names[f"{file_stem}.{leaf}"] = name
        elif leaf == "gate_up_proj":
            gates = names_of_file.get_name(f"{stem}.gate_proj")
            names |= {f"{gates}.weight": name, f"{gates}.weight".replace("gate", "up"): name}
        elif (file_stem := names_of_file.get_name(name)) is not None:
            names[f"{file_stem}.weight"] = name
    return names


@lru_cache(16)
def row_order(heads: int, rows: int) -> Tensor:
    """Return the place in the file of each of a Llama's query or key rows: a head's rows, of which
    the file has first and second half in turn (``permute`` of llama.cpp's
    ``convert_hf_to_gguf.py``)."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(rows)
