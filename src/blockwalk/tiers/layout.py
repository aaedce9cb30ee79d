"""How an encoded parameter lies in its bytes.

**Layout** (format version 1). A parameter of shape [..., D] is R rows of D elements (R = product of the leading
dimensions; a 1-D parameter is one row). Its bytes are the scales of all rows, then the codes of all rows, with no padding
between: exactly :func:`blockwalk.state.encoded_nbytes`. All numbers are little-endian.

    codec             scales                    codes                        value
    raw               –                         R × D, the model's dtype     itself
    fp32, bf16, fp16  –                         R × D                        itself
    fp8               float32 [R]               e4m3fn [R, D]                scale · code; scale = max|row| / 448
    int8              float32 [R]               int8 [R, D]                  scale · code; scale = max|row| / 127
    int4              float16 [R, G]            uint8 [R, G, group/2]        d · (nibble − 8)

int4 works on G = ⌈D / group⌉ groups of 32 or 64 consecutive elements of a row, the last one padded with zeros. Its scale
is d = −m/8, where m is the group's element of largest magnitude (the positive one of a tie): m itself becomes the code
−8, and the error is less than with max|group|/7. The first half of a group stands in the low nibbles of its bytes, the
second half in the high ones, so that a decoder writes two runs and shuffles nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from blockwalk.state import CODEC_DTYPE, Codec, ParamSpec, encoded_nbytes

FORMAT_VERSION = 1
"""Of the layout above: stands in every file that holds encoded parameters."""

GROUP_SIZES = (32, 64)

LARGEST_CODE = {Codec.FP8: 448.0, Codec.INT8: 127.0}
"""Of the codecs with one scale a row."""

_CODE_DTYPE = {Codec.FP8: torch.float8_e4m3fn, Codec.INT8: torch.int8, Codec.INT4: torch.uint8}


@dataclass(frozen=True, slots=True)
class Layout:
    """How one parameter lies in its bytes.

    ``dtype`` (torch's name without ``torch.``) is that of the raw codec; ``group_size`` is that of int4.
    """

    shape: tuple[int, ...]
    codec: Codec
    dtype: str = "float32"
    group_size: int = 32

    def __post_init__(self) -> None:
        if self.codec is Codec.INT4 and self.group_size not in GROUP_SIZES:
            raise ValueError(
                f"group_size is {self.group_size}; int4 has groups of {GROUP_SIZES[0]} or {GROUP_SIZES[1]}"
            )

    @classmethod
    def of(cls, spec: ParamSpec, codec: Codec, group_size: int = 32) -> Layout:
        return cls(spec.shape, codec, spec.dtype, group_size)

    @property
    def columns(self) -> int:
        """D: elements in a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """R: all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def groups(self) -> int:
        """Scales in a row."""
        if self.codec is Codec.INT4:
            return -(-self.columns // self.group_size)
        return 1 if self.codec in LARGEST_CODE else 0

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float16 if self.codec is Codec.INT4 else torch.float32

    @property
    def code_dtype(self) -> torch.dtype:
        name = self.dtype if self.codec is Codec.RAW else CODEC_DTYPE.get(self.codec)
        dtype = getattr(torch, name) if name else _CODE_DTYPE[self.codec]
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def code_columns(self) -> int:
        """Elements of ``code_dtype`` in a row."""
        return self.groups * self.group_size // 2 if self.codec is Codec.INT4 else self.columns

    @property
    def scale_bytes(self) -> int:
        """Bytes of all scales: where the codes begin."""
        return self.rows * self.groups * self.scale_dtype.itemsize

    @property
    def nbytes(self) -> int:
        return encoded_nbytes(self.shape, self.dtype, self.codec, self.group_size)

    def scales(self, buffer: torch.Tensor) -> torch.Tensor:
        """The scales in an encoded parameter's bytes, [R, groups], as a view."""
        return buffer[: self.scale_bytes].view(self.scale_dtype).view(self.rows, self.groups)

    def codes(self, buffer: torch.Tensor) -> torch.Tensor:
        """The codes in an encoded parameter's bytes, [R, code_columns], as a view."""
        return buffer[self.scale_bytes : self.nbytes].view(self.code_dtype).view(self.rows, self.code_columns)
