"""A block's call and a batch's prologue, as values.

B batch, S sequence, D hidden.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

_MISSING = object()
"""The value of a key that a dictionary does not have."""


@dataclass(frozen=True, eq=False)
class HandedEntry:
    """One entry of a dictionary through which a block hands tensors to later ones, such as shared
    keys and values."""

    writer: int
    """The unit that adds the entry."""
    argument: int | str
    """The position or keyword of the dictionary among the block's arguments."""
    key: Hashable
    value: Any
    """The entry with leaves in place of its tensors."""
    leaves: tuple[Tensor, ...]
    """The leaves: a reader's gradient ends at them, and the writer's backward begins with it."""


@dataclass(eq=False)
class Handed:
    """The entries that the blocks of one batch hand on, in the order in which they are added.

    A block adds its entries when it runs for the first time. When it is recomputed, its tensors are
    those with a graph, and the leaves stay."""

    entries: list[HandedEntry] = field(default_factory=list)

    def before(self, unit: int) -> list[HandedEntry]:
        """Return the entries that a unit is given: those of the units before it."""
        return [entry for entry in self.entries if entry.writer < unit]

    def leaves_before(self, unit: int) -> tuple[Tensor, ...]:
        """Return the leaves of the entries that a unit is given."""
        return tuple(leaf for entry in self.before(unit) for leaf in entry.leaves)

    def leaves_of(self, unit: int) -> tuple[Tensor, ...]:
        """Return the leaves of the entries that a unit adds, in the order of
        :attr:`BlockResult.handed`."""
        return tuple(
            leaf for entry in self.entries if entry.writer == unit for leaf in entry.leaves
        )

    def take(
        self,
        unit: int,
        argument: int | str,
        dictionary: MutableMapping[Any, Any],
        before: Mapping[Any, Any],
    ) -> list[Tensor]:
        """Remove from a dictionary what a unit added to it, and keep it as entries.

        Args:
            unit: the block that has just run.
            argument: the position or keyword of the dictionary.
            dictionary: the block's own copy of it.
            before: the copy's items before the block ran.

        Returns:
            The tensors of the added entries, with the graph that the block made.

        Raises:
            ValueError: the block replaced or removed an entry.
        """
        if any(dictionary.get(key, _MISSING) is not value for key, value in before.items()):
            raise ValueError(f"block {unit} replaces an entry of its argument {argument}")
        tensors: list[Tensor] = []
        recomputed = any(
            entry.writer == unit and entry.argument == argument for entry in self.entries
        )
        for key in [key for key in dictionary if key not in before]:
            value = dictionary.pop(key)
            tensors += tensors_of(value)
            if not recomputed:
                self.entries.append(_entry(unit, argument, key, value))
        return tensors


def _entry(unit: int, argument: int | str, key: Hashable, value: Any) -> HandedEntry:
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        differentiable = tensor.is_floating_point() and not tensor.is_inference()
        leaves.append(tensor.detach().requires_grad_(differentiable))
        return leaves[-1]

    return HandedEntry(
        unit,
        argument,
        key,
        rebuild(value, leaf, f"entry {key!r} of argument {argument}"),
        tuple(leaves),
    )


@dataclass(frozen=True, eq=False)
class BlockResult:
    """The answer of one block."""

    hidden_BSD: Tensor
    handed: tuple[Tensor, ...] = ()
    """The tensors that the block hands to later ones, in the order of :meth:`Handed.leaves_of`."""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """All tensors through which a gradient can reach the block: the hidden state first."""
        return (self.hidden_BSD, *self.handed)


@dataclass(frozen=True, eq=False)
class BlockCall:
    """The arguments of one block for one batch: an explicit value, to be run any number of times in
    any order."""

    unit: int
    module: nn.Module
    hidden_at: int | str
    """Position or keyword of the hidden state."""
    arguments: Mapping[int | str, Any]
    """The other arguments by position or keyword; None in the hidden state's place."""
    differentiable: tuple[Tensor, ...]
    """Leaves among the arguments that receive a gradient; blocks that share an argument share its
    leaf."""
    attention_mode: AbstractContextManager[object]
    """The mode in which its attention keeps the documents of a packed row apart, or reads what
    other ranks hold of its rows."""
    live_cache: bool = False
    """Whether the block writes into the batch's own key-value cache (generation), not into a view
    of it."""
    handed: Handed = field(default_factory=Handed)
    """The entries that blocks hand to one another; all calls of a batch share it."""
    hands_on: bool = False
    """Whether blocks of this model hand entries to one another."""

    @cached_property
    def is_plain(self) -> bool:
        """Whether the arguments hold tensors and constants alone, in tuples at most: a run can
        write into nothing but the tensors' elements, so that all runs may share them."""
        return _is_plain(self.arguments.values())

    @cached_property
    def _constants(self) -> list[Tensor]:
        """The tensors among the arguments that have versions, beside the hidden state."""
        tensors = tensors_of(self.arguments, caches=False)
        return [tensor for tensor in tensors if not tensor.is_inference()]

    def watched(self, arguments: Mapping[int | str, Any]) -> list[Tensor]:
        """Return the tensors of one run's arguments whose versions tell that it wrote into them."""
        if not self.is_plain:
            tensors = tensors_of(arguments, caches=False)
            return [tensor for tensor in tensors if not tensor.is_inference()]
        hidden_BSD = arguments[self.hidden_at]
        return self._constants if hidden_BSD.is_inference() else [hidden_BSD, *self._constants]

    def writes(
        self, arguments: Mapping[int | str, Any], watched: Iterable[Tensor]
    ) -> tuple[list[int], list[tuple[str, int]]]:
        """Return what differs once a run has written into its arguments: versions of tensors, and
        lengths of containers."""
        versions = [tensor._version for tensor in watched]
        return versions, [] if self.is_plain else containers_of(arguments)

    @property
    def dictionaries(self) -> list[int | str]:
        """Positions and keywords of the arguments that are dictionaries, in which a block may hand
        tensors on."""
        return [key for key, value in self.arguments.items() if isinstance(value, Mapping)]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The leaves that the block's gradient reaches beside its hidden state and its
        parameters."""
        handed = self.handed.leaves_before(self.unit)
        return (*self.differentiable, *(leaf for leaf in handed if leaf.requires_grad))

    def view(self, hidden_BSD: Tensor) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments for one run, in containers of their own."""
        arguments = self.arguments_of(hidden_BSD)
        positional = [value for key, value in arguments.items() if type(key) is int]
        keywords = {key: value for key, value in arguments.items() if type(key) is str}
        return positional, keywords

    def arguments_of(self, hidden_BSD: Tensor) -> dict[int | str, Any]:
        """Return the arguments of one run by position or keyword, in containers of their own."""
        if self.is_plain:
            return {**self.arguments, self.hidden_at: hidden_BSD}
        live = self.live_cache
        arguments = {
            key: rebuild(value, _same, str(key), share_caches=live)
            for key, value in self.arguments.items()
        }
        arguments[self.hidden_at] = hidden_BSD
        for entry in self.handed.before(self.unit):
            arguments[entry.argument][entry.key] = entry.value
        return arguments


def joined_call(
    calls: Sequence[BlockCall], rows: int, joined: dict[tuple[int, ...], Tensor]
) -> BlockCall | None:
    """Return a block's calls for several batches of ``rows`` sequences as the call for all of them,
    one batch after the other; None where an argument differs between the calls and is not of their
    rows. ``joined`` are the arguments joined before, by the identities of their parts."""
    if not isinstance(calls[0].attention_mode, nullcontext):
        return None  # documents side by side are computed by themselves
    if calls[0].hands_on:
        return None  # what a block hands on belongs to one batch
    tensors = []
    for parts in zip(*(tensors_of(call.arguments) for call in calls), strict=True):
        key = tuple(map(id, parts))
        if key not in joined:
            of_rows = parts[0].ndim > 1 and len(parts[0]) == rows
            may_be_shared = rows == 1 or not of_rows
            if may_be_shared and all(torch.equal(parts[0], other) for other in parts[1:]):
                joined[key] = parts[0]
            elif of_rows:
                joined[key] = torch.cat(parts)
            else:
                return None
        tensors.append(joined[key])
    arguments = rebuild(calls[0].arguments, lambda _: tensors.pop(0), "argument")
    return replace(calls[0], arguments=arguments)


@dataclass(frozen=True, eq=False)
class Prologue:
    """The skeleton pass of one batch: the first block's hidden state, and every block's call."""

    hidden_BSD: Tensor
    calls: tuple[BlockCall, ...]
    sources: tuple[Tensor, ...]
    """Tensors of the prologue's graph that blocks take as arguments, beside the hidden state."""
    leaves: tuple[Tensor, ...]
    """The stand-ins of ``sources`` in the blocks' calls, in the same order."""
    stand_ins: Mapping[str, tuple[Any, ...]]
    """The answers of the prologue's modules, on the meta device: the epilogue's pass runs on zeros
    of these shapes."""

    @property
    def handed_over(self) -> Prologue:
        """The same, without the memory of its hidden state: blocks have it, and no gradient goes
        back through it."""
        nothing_BSD = self.hidden_BSD.new_empty(()).expand(self.hidden_BSD.shape)
        return replace(self, hidden_BSD=nothing_BSD)

    def roots(
        self, grad_hidden_BSD: Tensor | None, grad_leaves: Iterable[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors from which the prologue's graph is differentiated, and their
        gradients. None where an adapter's part was not run by this batch: it leaves the prologue
        without a graph.

        ``grad_leaves`` are the gradients of ``leaves``, summed over the blocks.
        """
        sources = (self.hidden_BSD, *self.sources)
        grads = (grad_hidden_BSD, *grad_leaves)
        pairs = [
            (source, grad)
            for source, grad in zip(sources, grads, strict=True)
            if grad is not None and source.requires_grad
        ]
        return [source for source, _ in pairs], [grad for _, grad in pairs]


def _same(tensor: Tensor) -> Tensor:
    return tensor


_PYTHON_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range)
_TORCH_CONSTANTS = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_CONSTANTS = _PYTHON_CONSTANTS + _TORCH_CONSTANTS
_OPAQUE = ("BlockMask",)
"""Class names of immutable objects that attention implementations pass to layers."""


_PLAIN = frozenset((Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype))
"""Classes of what a container's copy shares with it."""


def _is_plain(values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind is tuple:
            if not _is_plain(value):
                return False
        elif kind not in _PLAIN:
            return False
    return True


def is_cache(value: Any) -> bool:
    """Whether a value is a ``transformers`` key-value cache, or one layer of it."""
    return any(cls.__module__ == "transformers.cache_utils" for cls in type(value).__mro__)


def rebuild(
    value: Any, on_tensor: Callable[[Tensor], Tensor], where: str, *, share_caches: bool = False
) -> Any:
    """Copy ``value`` with each tensor replaced by ``on_tensor`` of it; containers and caches are
    built anew.

    The copy shares no mutable container with the original, so whatever a call writes into it is
    thrown away with it (a key-value cache stays the same object where ``share_caches``: generation
    writes into it on purpose). ``where`` names the argument in the ValueError that refuses an
    object of an unknown class."""

    def again(item: Any) -> Any:
        return rebuild(item, on_tensor, where, share_caches=share_caches)

    kind = type(value)
    if kind is Tensor or isinstance(value, Tensor):
        return on_tensor(value)
    if kind in _PLAIN or isinstance(value, _CONSTANTS) or kind.__name__ in _OPAQUE:
        return value
    if isinstance(value, tuple):
        items = map(again, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return list(map(again, value))
    if isinstance(value, set | frozenset):
        return type(value)(value)
    if isinstance(value, Mapping):
        twin = copy.copy(value)
        for key, item in value.items():
            twin[key] = again(item)  # type: ignore[index]
        return twin
    if is_cache(value):
        if share_caches:
            return value
        twin = copy.copy(value)
        for key, item in vars(value).items():
            # Lists of layers and dicts of states are rebuilt; streams, classes and the like are
            # shared as they are.
            if isinstance(item, Tensor | list | dict | tuple) or is_cache(item):
                setattr(twin, key, again(item))
        return twin
    if isinstance(value, type) or callable(value):
        return value
    raise ValueError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which could carry state"
        " from one block to the next; Blockwalk trains models whose layers take tensors, numbers"
        " and containers of these"
    )


def tensors_of(value: Any, *, caches: bool = True) -> list[Tensor]:
    """Return all tensors in a value (those of key-value caches only where ``caches``), in a fixed
    order."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    rebuild(value, note, "argument", share_caches=not caches)
    return tensors


def containers_of(value: Any) -> list[tuple[str, int]]:
    """Return (path, length) of every dict and list that is not part of a cache: a call must leave
    them as they were."""
    items: Any = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list | tuple):
        items = enumerate(value)
    inner = [
        (f"[{key!r}]{path}", size) for key, item in items for path, size in containers_of(item)
    ]
    return [("", len(value)), *inner] if isinstance(value, Mapping | list) else inner
