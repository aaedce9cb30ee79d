"""A checkpoint folder as others write it: its files as a source of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from blockwalk.models.model_source import model_source
from blockwalk.numerics.codecs.codecs import decode_whole
from blockwalk.numerics.codecs.layout import Bytes, Layout
from blockwalk.numerics.codecs.weights import Weight
from blockwalk.system.paths import StrPath
from blockwalk.tiers.disk import MappedFile
from blockwalk.tiers.model_folder import conversion, gguf_file, quantised, safetensors, torch_file
from blockwalk.tiers.model_folder.stored import StoredTensor

_READERS: dict[str, Callable[[Path, nn.Module], dict[str, StoredTensor]]] = {
    ".safetensors": lambda path, model: safetensors.read_header(path),
    ".bin": lambda path, model: torch_file.read_header(path),
    ".gguf": gguf_file.read_header,
}
"""The tensors of a model's file, by name, by the file's ending."""


class CheckpointFolder:
    """An unmodified model folder as a read-only tier (WeightSource): zero copy, matrices in the
    codec that the files have.

    Where the stored names or shapes are not the model's, transformers' own conversion mapping says
    how one becomes the other; such a parameter has several sources and is fused when it is fetched
    (:mod:`blockwalk.tiers.model_folder.conversion`).

    Args:
        path: the folder, or another name of a model
            (:class:`blockwalk.models.model_source.ModelSource`).
        model: the same transformers model on the meta device; its ``state_dict()`` says which names
            and shapes are wanted. The dtype is the one stored.

    Raises:
        ValueError: tensors are missing or of the wrong shape, with their names; codes that are not
            read; no weights; or tied weights that differ in the checkpoint. Tensors that the model
            does not know are a warning; of a GGUF file and of a quantised folder they are an error,
            but for heads that predict further tokens.
    """

    def __init__(self, path: StrPath, model: nn.Module) -> None:
        files = model_source(path)
        self.path = files.weights_folder
        stored: dict[str, StoredTensor] = {}
        self._files: dict[str, MappedFile] = {}
        for name in files.checkpoint_files():
            stored |= _READERS[Path(name).suffix](self.path / name, model)
            self._files[name] = MappedFile(self.path / name)
        stored = quantised.joined(files, stored)
        # A GGUF's configuration was made of its tensors' names: one that is left over is a part of
        # another model. So is one of a quantised folder: it may say how codes are read.
        all_used = files.quantisation is not None or any(
            name.endswith(".gguf") for name in self._files
        )
        self.stored: Mapping[str, StoredTensor] = stored
        """All tensors of the files, by their keys, used or not."""
        self.recipes: Mapping[str, conversion.Recipe]
        self.duplicates: Mapping[str, Mapping[str, str]]
        """Further tensors that hold a tied parameter, by its canonical name: keys by its other
        names."""
        self.recipes, self.duplicates = conversion.resolve(
            model, stored, self._view, str(path), all_used=all_used
        )

    def _bytes(self, stored: StoredTensor) -> Bytes:
        if stored.parts:
            return tuple(
                self._files[p.file].view(p.offset, p.nbytes, p.dtype, p.shape) for p in stored.parts
            )
        bytes_P = self._files[stored.file].view(
            stored.offset, stored.nbytes, torch.uint8, (stored.nbytes,)
        )
        # a header of any length is allowed
        return bytes_P.clone() if stored.offset % stored.dtype.itemsize else bytes_P

    def _open(self, stored: StoredTensor) -> Tensor | Weight:
        return stored.open(self._bytes(stored))

    def _view(self, stored: StoredTensor) -> Tensor:
        """Return a tensor as it lies; decoded whole where it is a matrix in codes."""
        weight = self._open(stored)
        return weight if isinstance(weight, Tensor) else weight.rows(0, weight.shape[0]).clone()

    def _rows(self, stored: StoredTensor, start: int, stop: int) -> Tensor:
        """Return rows of a matrix; those alone are read, and decoded where it is in codes."""
        weight = self._open(stored)
        return weight[start:stop] if isinstance(weight, Tensor) else weight.rows(start, stop)

    def names(self) -> Sequence[str]:
        return tuple(self.recipes)

    def original_key(self, name: str) -> str | None:
        """Return the name that ``name`` has in the files, or None where it is fused from, or cut
        out of, other tensors."""
        recipe = self.recipes[name]
        return recipe.sources[0].key if recipe.conversion is None else None

    @property
    def unused(self) -> list[str]:
        """The keys of the tensors that make no parameter."""
        used = {source.key for recipe in self.recipes.values() for source in recipe.sources}
        used |= {key for keys in self.duplicates.values() for key in keys.values()}
        return [key for key in self.stored if key not in used]

    def value(self, stored: StoredTensor) -> Tensor:
        """Return a tensor of the files as it lies; decoded whole where it is in codes."""
        return self._view(stored)

    def release_stored(self, stored: StoredTensor) -> None:
        """Give the pages of a tensor of the files back to the kernel."""
        for part in stored.parts or (stored,):
            self._files[part.file].dont_need([(part.offset, part.nbytes)])

    def shape(self, name: str) -> tuple[int, ...]:
        return self.recipes[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.recipes[name].sources[0].dtype

    def stored_as(self, name: str) -> Layout:
        return self.recipes[name].sources[0].layout

    def weights(self, names: Iterable[str]) -> dict[str, Tensor | Weight]:
        out: dict[str, Tensor | Weight] = {}
        for name in names:
            recipe = self.recipes[name]
            if recipe.conversion is None:
                out[name] = self._open(recipe.sources[0])
            else:
                fused = torch.empty(recipe.shape, dtype=recipe.sources[0].dtype)
                recipe.read_into(fused, self._view)
                out[name] = fused
        return out

    def in_place(self, name: str) -> bool:
        recipe = self.recipes[name]
        return recipe.conversion is None and recipe.sources[0].in_place

    def read_into(self, name: str, out: Tensor) -> None:
        recipe = self.recipes[name]
        if tuple(out.shape) != recipe.shape:
            raise ValueError(
                f"{name} has shape {recipe.shape}, the buffer given has {tuple(out.shape)}"
            )
        stored = recipe.sources[0]
        if stored.codec.encoded and recipe.conversion is None and out.is_contiguous():
            decode_whole(self._bytes(stored), stored.layout, out)
        else:
            recipe.read_into(out, self._view)

    def read_range_into(self, name: str, start: int, out_P: Tensor) -> None:
        self.recipes[name].read_range_into(start, out_P, self._view, self._rows)

    def _ranges(self, names: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
        ranges: dict[str, list[tuple[int, int]]] = {}
        for name in names:
            for source in self.recipes[name].sources:
                for stored in source.parts or (source,):
                    ranges.setdefault(stored.file, []).append((stored.offset, stored.nbytes))
        return ranges

    def prefetch(self, names: Iterable[str]) -> int:
        return sum(
            self._files[file].will_need(ranges) for file, ranges in self._ranges(names).items()
        )

    def release(self, names: Iterable[str]) -> None:
        for file, ranges in self._ranges(names).items():
            self._files[file].dont_need(ranges)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
