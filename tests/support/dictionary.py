"""A source of weights that are tensors in memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Dictionary:
    """A WeightSource over tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def in_place(self, name: str) -> bool:
        return True

    def weights(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: self.tensors[name] for name in names}

    def read_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self.tensors[name])

    def prefetch(self, names: Iterable[str]) -> int:
        return sum(self.tensors[name].nbytes for name in names)

    def release(self, names: Iterable[str]) -> None: ...

    def close(self) -> None: ...
