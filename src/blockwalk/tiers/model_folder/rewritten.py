"""A model folder's tensors written anew, some of them changed: the others keep name, dtype and
bytes.

A parameter that was fused from several tensors is written as these. Tensors that no parameter uses,
as heads that predict further tokens, are copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.plan.sizes import spans
from blockwalk.tiers.model_folder.conversion import Recipe
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from blockwalk.tiers.model_folder.safetensors import Entry

Read = Callable[[str], Iterable[Tensor]]
"""A reader of a changed parameter's values, by its name, in pieces of whole rows."""
_CHUNK = 1 << 22
"""Elements of a tensor that are copied at a time."""


@dataclass(slots=True)
class Rewritten:
    """The tensors of a folder, some of which are changed."""

    base: CheckpointFolder
    changed: Mapping[str, Entry]
    read: Read
    dtype: torch.dtype | None
    entries: dict[str, Entry] = field(default_factory=dict)
    """Shape and dtype of each tensor by its key, in the order in which they are to be asked for."""
    _streamed: dict[str, str] = field(default_factory=dict)
    """The parameter that a key holds as it is."""
    _groups: dict[str, _Group] = field(default_factory=dict)
    """The group that a key is made by."""
    _made: tuple[_Group, Mapping[str, Tensor]] | None = None
    """The group whose tensors are being written."""

    def values(self, key: str) -> Iterator[Tensor]:
        """Yield the values of one tensor, some rows at a time."""
        if key in self._streamed:
            yield from self.read(self._streamed[key])
        elif key not in self._groups:
            yield from self._copied(key)
        else:
            group = self._groups[key]
            if self._made is None or self._made[0] is not group:
                self._made = None  # let go of those before
                self._made = (group, group.split({n: self._whole(n) for n in group.names}))
            yield self._made[1][key]

    @property
    def reads(self) -> list[str]:
        """The changed parameters in the order in which :attr:`read` is asked for them, while the
        tensors are asked for in theirs."""
        names: dict[str, None] = {}
        for key in self.entries:
            group = self._groups.get(key)
            of_key = (
                [self._streamed[key]] if key in self._streamed else group.names if group else ()
            )
            names |= dict.fromkeys(name for name in of_key if name in self.changed)
        return list(names)

    def _whole(self, name: str) -> Tensor:
        """Return all values of a parameter, changed or not."""
        if name not in self.changed:
            whole = torch.empty(self.base.shape(name), dtype=self.dtype or self.base.dtype(name))
            self.base.read_into(name, whole)
            return whole
        entry = self.changed[name]
        pieces = [piece.detach().cpu().reshape(-1) for piece in self.read(name)]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(entry.shape)

    def _copied(self, key: str) -> Iterator[Tensor]:
        stored = self.base.stored[key]
        dtype = self.entries[key].dtype
        value_P = self.base.value(stored).reshape(-1)
        for start, stop in spans(0, value_P.numel(), _CHUNK):
            yield value_P[start:stop].to(dtype)
            self.base.release_stored(stored)


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Parameters that are made of tensors together, or that several tensors hold alike."""

    names: tuple[str, ...]
    split: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    """A function from the parameters' values to the tensors'."""


def rewritten(
    base: CheckpointFolder,
    model: nn.Module,
    changed: Mapping[str, Entry],
    read: Read,
    dtype: torch.dtype | None = None,
) -> Rewritten:
    """Return the tensors of a folder with some of its parameters changed.

    A parameter that is fused from several tensors, or that two of them hold, is held whole.

    Args:
        base: the folder.
        model: its model, on any device.
        changed: shape and dtype of the parameters that are changed, by canonical name; one that
            the folder does not have is written under its name.
        read: asked for each of them once, in their order.
        dtype: the dtype of all other floating tensors; None: their own.
    """
    result = Rewritten(base, changed, read, dtype)
    replaced: set[str] = set()
    by_alias = {alias: key for keys in base.duplicates.values() for alias, key in keys.items()}
    for name, entry in changed.items():
        recipe = base.recipes.get(name)
        duplicates = [
            key for alias, key in base.duplicates.get(name, {}).items() if alias not in changed
        ]
        if recipe is None:  # the other name of a tied parameter, or one that the folder lacks
            key = by_alias.get(name, name)
            replaced.add(key)
            result.entries[key] = entry
            result._streamed[key] = name
        elif recipe.conversion is not None:
            keys = [source.key for source in recipe.sources]
            if not replaced.issuperset(keys):
                replaced.update(keys)
                _add_group(result, model, recipe)
        elif duplicates:
            keys = [recipe.sources[0].key, *duplicates]
            replaced.update(keys)
            group = _Group((name,), partial(_alike, keys))
            result.entries |= dict.fromkeys(keys, entry)
            result._groups |= dict.fromkeys(keys, group)
        else:
            key = recipe.sources[0].key
            replaced.add(key)
            result.entries[key] = entry
            result._streamed[key] = name
    for key, stored in base.stored.items():
        if key not in replaced:
            floating = stored.dtype.is_floating_point
            written = dtype if dtype is not None and floating else stored.dtype
            result.entries[key] = Entry(stored.shape, written)
    return result


def _alike(keys: Sequence[str], values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    (value,) = values.values()
    return dict.fromkeys(keys, value)


def _add_group(result: Rewritten, model: nn.Module, recipe: Recipe) -> None:
    """Add the tensors that make the parameters of one conversion; under the parameters' own names
    where nothing turns the conversion round."""
    base = result.base
    conversion = recipe.conversion
    assert conversion is not None
    names = tuple(name for name, other in base.recipes.items() if other.conversion is conversion)
    dtypes = {
        name: result.changed[name].dtype
        if name in result.changed
        else result.dtype or base.dtype(name)
        for name in names
    }
    shapes = {source.key: source.shape for source in recipe.sources}
    if conversion.stacks and len(names) == 1:
        places = [(stored.key, expert, row) for stored, expert, row in recipe.stacked()]

        def split(values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            whole = values[names[0]]
            return {
                key: whole[expert].narrow(0, row, shapes[key][0]) for key, expert, row in places
            }

    else:

        def split(values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            return _turned_round(model, values, shapes)

    nothing = {
        name: torch.empty(base.shape(name), dtype=dtypes[name], device="meta") for name in names
    }
    pieces = split(nothing)
    if {key: tuple(tensor.shape) for key, tensor in pieces.items()} != shapes:
        pieces = nothing
        group = _Group(names, dict)
    else:
        group = _Group(names, split)
    result.entries |= {key: Entry(tuple(pieces[key].shape), pieces[key].dtype) for key in pieces}
    result._groups |= dict.fromkeys(pieces, group)


def _turned_round(
    model: nn.Module, values: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, Tensor]:
    """Return tensors of a checkpoint that make parameters, by transformers' own reversal; those of
    parameters themselves where it has none.

    Args:
        model: the parameters' model.
        values: the parameters, by name.
        shapes: the checkpoint's tensors, by key.
    """
    from transformers.core_model_loading import revert_weight_conversion

    plain: Any = model
    try:
        reverted = revert_weight_conversion(plain, dict(values))
    except Exception:  # whatever transformers' operations raise that have no reversal
        return values
    tensors = {}
    for name, tensor in reverted.items():  # a prefix that was dropped is not put back
        keys = [key for key in shapes if key == name or key.endswith(f".{name}")]
        tensors[keys[0] if len(keys) == 1 else name] = tensor
    return tensors
