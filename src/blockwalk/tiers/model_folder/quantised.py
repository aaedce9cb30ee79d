"""The tensors of a quantised checkpoint put together: codes, scales and zero points become one
stored tensor, read as they lie.

Each tool's format is a function that takes the tensors of one matrix by their names, checks what
they are, and says how they are read (:mod:`blockwalk.numerics.codecs.readers`). The formats are
facts of their tools: DeepSeek-V3's ``inference/kernel.py``, bitsandbytes' ``functional.py``,
AutoGPTQ's and AutoAWQ's linear layers, compressed-tensors' ``compressors``, and OCP's "Microscaling
Formats" (2023) in gpt-oss's arrangement. Activations, which some of them quantise too, are left as
they are."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from blockwalk.models.model_source import ModelSource
from blockwalk.numerics.codecs.layout import name_of
from blockwalk.numerics.codecs.readers import (
    Order,
    Reader,
    in_rows_of,
    looked_up,
    numbers,
    packed,
    scaled,
    turned,
)
from blockwalk.plan.placement import Codec
from blockwalk.system.atomic_files import reading
from blockwalk.tiers.model_folder.quantiser_settings import refuse_unknown
from blockwalk.tiers.model_folder.stored import StoredTensor

_INT = (torch.int32,)
_BYTE = (torch.uint8,)
_WIDE = (torch.float32,)
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_OF_ACTIVATIONS = re.compile(
    r".*\.(input|output|activation|k|v|q)_(scale|zero_point|global_scale|scale_ub)"
)

Parts = Sequence[torch.Tensor]
Dtypes = Sequence[torch.dtype]


def joined(model: ModelSource, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, by name, where those that make one matrix are one.

    Raises:
        ValueError: a tensor of a matrix is missing, or of another dtype or shape than its tool
            gives it; a form or a setting of it that is not read; or a tool.
    """
    if model.quantisation is None:
        return stored
    codec, settings = model.quantisation
    folder = model.folder
    marks, format_of = _FORMATS[codec]
    tensors = {key: tensor for key, tensor in stored.items() if not _OF_ACTIVATIONS.fullmatch(key)}
    with reading(folder / "config.json"):
        refuse_unknown(codec, settings, folder)
        for key in list(tensors):
            mark = next((mark for mark in marks if key.endswith(mark) and key in tensors), None)
            if mark is None:
                continue
            matrix = _Matrix(folder, tensors, key.removesuffix(mark), settings)
            if tensor := format_of(matrix):
                for part in matrix.parts:
                    del tensors[part]
                tensors[tensor.key] = replace(tensor, codec=codec)
    return tensors


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix of a checkpoint, and the tensors that it is made of."""

    folder: Path
    tensors: dict[str, StoredTensor]
    """Those of the checkpoint that are not yet part of a matrix."""
    stem: str
    """The beginning of its tensors' names."""
    settings: Mapping[str, Any]
    parts: list[str] = field(default_factory=list)
    """The names of those that were taken."""

    def dtype(self, leaf: str) -> torch.dtype | None:
        """Return the dtype of one of its tensors, by the end of its name; None where there is
        none."""
        tensor = self.tensors.get(self.stem + leaf)
        return None if tensor is None else tensor.dtype

    def take(
        self, leaf: str, dtypes: Dtypes, shape: tuple[int | None, ...] = (None, None)
    ) -> StoredTensor:
        """Return one of its tensors, which is of one of these dtypes and of a shape (None: any
        size)."""
        self.parts.append(self.stem + leaf)
        tensor = self.tensors.get(self.stem + leaf)
        if tensor is None:
            sibling = next(t for key, t in self.tensors.items() if key.startswith(self.stem))
            raise self.wrong(sibling, leaf, "is missing, and codes cannot be read without it")
        if prod(tensor.shape) == 1 and all(size == 1 for size in shape):
            tensor = replace(tensor, shape=(1,) * len(shape))
        fits = len(tensor.shape) == len(shape) and all(
            size in (None, stored) for size, stored in zip(shape, tensor.shape, strict=True)
        )
        if tensor.dtype not in dtypes or not fits:
            words = " or ".join(name_of(dtype) for dtype in dtypes)
            stored_as = f"{name_of(tensor.dtype)} {tensor.shape}"
            sizes = str(shape).replace("None", "any")
            raise self.wrong(tensor, leaf, f"is {stored_as}; read is {words} {sizes}")
        return tensor

    def bytes_of(self, tensor: StoredTensor) -> bytearray:
        """Return the bytes of a small tensor."""
        with open(self.folder / tensor.file, "rb") as file:
            file.seek(tensor.offset)
            return bytearray(file.read(tensor.nbytes))

    def setting(self, name: str, default: Any, *known: Any) -> Any:
        """Return a setting of its tool, which is one of those that are read."""
        value = self.settings.get(name, default)
        if value not in known:
            words = ", ".join(map(str, known))
            raise ValueError(
                f"{self.folder}/config.json: the weights are quantised with {name} {value}; read"
                f" is {words}"
            )
        return value

    def wrong(self, tensor: StoredTensor, leaf: str, fault: str) -> ValueError:
        return ValueError(f"{self.folder}/{tensor.file}: {self.stem}{leaf} {fault}")

    def groups(self, leaf: str, groups: int, size: int, columns: int) -> list[StoredTensor]:
        """Return the group of each column, where the file names it and neighbours do not make the
        groups; else nothing."""
        if self.dtype(leaf) is None:
            return []
        tensor = self.take(leaf, _INT, (columns,))
        named = torch.frombuffer(self.bytes_of(tensor), dtype=torch.int32)
        if bool((named == -1).all()) or torch.equal(
            named, torch.arange(columns, dtype=torch.int32) // size
        ):
            return []
        if int(named.min()) < 0 or int(named.max()) >= groups:
            raise self.wrong(
                tensor, leaf, f"names groups {int(named.min())} to {int(named.max())} of {groups}"
            )
        return [tensor]


def _made(
    key: str, shape: tuple[int, ...], read: Callable[[Parts], Reader], *parts: StoredTensor
) -> StoredTensor:
    nbytes = sum(part.nbytes for part in parts)
    return StoredTensor(
        key, parts[0].file, parts[0].offset, nbytes, torch.float32, shape, parts=parts, reader=read
    )


def _fp8(take: _Matrix) -> StoredTensor | None:
    """FP8 numbers, a scale for each block of them."""
    return _as_they_are(take, ".weight_scale_inv", take.settings.get("weight_block_size"))


_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")


def _bitsandbytes(take: _Matrix) -> StoredTensor:
    """Return nibbles, the earlier one high, that sixteen levels are looked up by; scales of blocks
    of a row, in float32 or in codes of eight bits themselves, whose blocks run on over the rows."""
    mark = next(mark for mark in _STATES if take.dtype(mark) is not None)
    state = take.take(mark, _BYTE, (None,))
    with reading(take.folder / state.file):
        facts = json.loads(take.bytes_of(state).decode())
        block = operator.index(facts["blocksize"])
        rows, columns = map(operator.index, facts["shape"])
        inner = operator.index(facts.get("nested_blocksize", 0))
        plus = facts.get("nested_offset", 0) + 0.0
    codes = take.take("", [dtype] if (dtype := take.dtype("")) else _BYTE)
    if codes.nbytes * 2 != rows * columns or block < 2 or block % 2 or columns % block or inner < 0:
        raise take.wrong(
            codes,
            "",
            f"is {codes.nbytes} bytes, and {rows} × {columns} in blocks of {block} is not read so",
        )
    codes = replace(codes, dtype=torch.uint8, shape=(rows, columns // 2))
    across = columns // block
    count = rows * columns // block
    levels = take.take(".quant_map", _WIDE, (16,))
    nested: list[StoredTensor] = []
    scales = take.take(".absmax", _BYTE if inner else _WIDE, (count,))
    if inner:
        outer = take.take(".nested_absmax", _WIDE, (-(-count // inner),))
        nested = [
            take.take(".nested_quant_map", _WIDE, (256,)),
            replace(outer, shape=(1, *outer.shape)),
        ]
    scales = replace(scales, shape=(1, count) if inner else (rows, across))

    def read(parts: Parts) -> Reader:
        codes, levels, scales, *nested = parts
        scale = numbers(scales)
        if nested:
            flat = scaled(
                looked_up(scale, nested[0]), numbers(nested[1]), block=(1, inner), plus=plus
            )
            scale = in_rows_of(across, flat)
        return scaled(
            looked_up(packed(codes, 4, order=lambda place: 1 - place), levels),
            scale,
            block=(1, block),
        )

    return _made(take.stem, (rows, columns), read, codes, levels, scales, *nested)


def _gptq(take: _Matrix) -> StoredTensor:
    """Return codes packed along the inputs, and zero points less one but in the second form."""
    bits = take.setting("bits", 4, 2, 4, 8)
    form = take.setting("checkpoint_format", "gptq", "gptq", "gptq_v2")
    return _in_groups(take, bits, 0, less=0.0 if form == "gptq_v2" else 1.0)


def _awq(take: _Matrix) -> StoredTensor:
    """Return codes packed along the outputs, in an order of their own."""
    take.setting("version", "gemm", "gemm", "GEMM")
    bits = take.setting("bits", 4, 4)
    return _in_groups(take, bits, 1, lambda place: place // 2 + place % 2 * 4)


def _in_groups(
    take: _Matrix, bits: int, dim: int, order: Order | None = None, less: float = 0.0
) -> StoredTensor:
    """Return a matrix that lies turned, [inputs, outputs], with scales and packed zero points of
    groups of inputs."""
    codes = take.take(".qweight", _INT)
    in_word = 32 // bits
    columns = codes.shape[0] * (in_word, 1)[dim]
    rows = codes.shape[1] * (1, in_word)[dim]
    size = take.settings.get("group_size", 128)
    size = size if size > 0 else columns
    count = -(-columns // size)
    zeros = take.take(".qzeros", _INT, (count, -(-rows // in_word)))
    scales = take.take(".scales", _PLAIN, (count, rows))

    def read(parts: Parts) -> Reader:
        codes, zeros, scales, *named = parts
        group_of = named[0].long() if named else None
        zero = packed(zeros, bits, 1, order)
        values = scaled(
            packed(codes, bits, dim, order),
            numbers(scales),
            zero,
            less=less,
            block=(size, 1),
            group_of=group_of,
            groups=count,
        )
        return turned(values)

    named = take.groups(".g_idx", count, size, columns)
    return _made(f"{take.stem}.weight", (rows, columns), read, codes, zeros, scales, *named)


def _compressed(take: _Matrix) -> StoredTensor | None:
    """Integers or FP8 numbers in a tensor of their own, or packed; the scales' shape says what
    shares one, but for blocks."""
    forms = (
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "mixed-precision",
    )
    take.setting("format", forms[0], *forms)
    named = [
        (g.get("weights") or {}).get("block_structure")
        for g in take.settings.get("config_groups", {}).values()
    ]
    return _as_they_are(take, ".weight_scale", named[0] if named and all(named) else None)


def _as_they_are(
    take: _Matrix, scale_leaf: str, block: Sequence[int] | None
) -> StoredTensor | None:
    """Return a matrix that does not lie turned. Packed codes, and zero points packed with them,
    have half of their range added."""
    bits = 0
    if take.dtype(".weight_packed") is not None:
        codes = take.take(".weight_packed", _INT)
        shape = take.take(".weight_shape", (torch.int64,), (2,))
        rows, columns = torch.frombuffer(take.bytes_of(shape), dtype=torch.int64).tolist()
        bits = next(
            (bits for bits in (2, 4, 8) if codes.shape == (rows, -(-columns * bits // 32))), 0
        )
        if not bits:
            raise take.wrong(
                codes,
                ".weight_packed",
                f"is {codes.shape}; read is {(rows, columns)} in 2, 4 or 8 bits",
            )
    elif take.dtype(".weight") in (torch.int8, *_FP8):
        codes = take.take(".weight", (torch.int8, *_FP8))
        rows, columns = codes.shape
    else:
        return None
    above, across = _sharing(take, (rows, columns), scale_leaf, block)
    count = -(-rows // above), -(-columns // across)
    zero: list[StoredTensor] = []
    scale = take.take(scale_leaf, _PLAIN, count)
    if take.dtype(".weight_zero_point") is not None:
        form = (
            (_INT, (-(-count[0] * bits // 32), count[1]))
            if bits
            else ((torch.int8, *_FP8, *_PLAIN), count)
        )
        zero = [take.take(".weight_zero_point", *form)]
    named = take.groups(".weight_g_idx", count[1], across, columns)
    less = 0.0 if zero or not bits else float(1 << bits - 1)

    def read(parts: Parts) -> Reader:
        values = numbers(parts[0])
        zeros = numbers(parts[2]) if zero else None
        if bits:
            values = packed(parts[0], bits)
            zeros = packed(parts[2], bits, 0) if zero else None
        if not named:
            return scaled(values, numbers(parts[1]), zeros, less=less, block=(above, across))
        values = turned(values)
        scales = turned(numbers(parts[1]))
        zeros = zeros and turned(zeros)
        group_of = parts[-1].long()
        block = (1, above)
        return turned(
            scaled(
                values, scales, zeros, less=less, block=block, group_of=group_of, groups=count[1]
            )
        )

    return _made(f"{take.stem}.weight", (rows, columns), read, codes, scale, *zero, *named)


def _sharing(
    take: _Matrix, shape: tuple[int, int], leaf: str, block: Sequence[int] | None
) -> tuple[int, int]:
    """Return the rows and columns that share a scale: those that are named, or as many as there are
    scales."""
    if block is not None:
        return operator.index(block[0]), operator.index(block[1])
    scales = take.tensors.get(take.stem + leaf)
    counts = scales.shape if scales is not None and len(scales.shape) == 2 else (1, 1)
    above, across = (
        size // count if size % count == 0 else size
        for size, count in zip(shape, counts, strict=True)
    )
    return above, across


def _mxfp4(take: _Matrix) -> StoredTensor:
    """Return experts that lie turned: blocks of 32 numbers of four bits, and the exponent of each
    block's scale."""
    codes = take.take("_blocks", _BYTE, (None, None, None, 16))
    experts, outputs, count, _ = codes.shape
    scales = take.take("_scales", _BYTE, (experts, outputs, count))

    def read(parts: Parts) -> Reader:
        levels = torch.tensor([*_E2M1, *(-level for level in _E2M1)], device=parts[0].device)
        powers = torch.exp2(torch.arange(-127.0, 129.0, device=parts[0].device))
        codes = looked_up(packed(parts[0], 4), levels)
        return turned(scaled(codes, looked_up(numbers(parts[1]), powers), block=(1, 32)))

    codes = replace(codes, shape=(experts, outputs, count * 16))
    return _made(take.stem, (experts, count * 32, outputs), read, codes, scales)


_FORMATS: dict[Codec, tuple[tuple[str, ...], Callable[[_Matrix], StoredTensor | None]]] = {
    Codec.FP8_BLOCKS: ((".weight",), _fp8),
    Codec.BITSANDBYTES: (_STATES, _bitsandbytes),
    Codec.GPTQ: ((".qweight",), _gptq),
    Codec.AWQ: ((".qweight",), _awq),
    Codec("compressed-tensors"): ((".weight_packed", ".weight"), _compressed),
    Codec.MXFP4: (("_blocks",), _mxfp4),
}
"""The formats: the ends of names that tell a quantised matrix, and the function that puts it
together."""
