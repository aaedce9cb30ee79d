"""A block computed by tiles of the sequence: what it does before its attention, its attention, what
it does after.

The block's own code runs on a tile. Where it calls the attention that transformers hands it, it
stops; the queries, keys and values of all tiles are attended to one another as ever, and each tile
runs again with its part of the answer. :mod:`blockwalk.cutting.tile_trial` tells which models may
be computed so.

B batch, S sequence, T positions of a tile, H heads, F features of a head, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.cutting.calls import rebuild
from blockwalk.numerics.device import is_cpu
from blockwalk.numerics.lazy_linear import unread, unread_now
from blockwalk.numerics.rule_mask import RuleMask
from blockwalk.numerics.sequence_tiles import Positionwise, by_tiles, unread_answer

SEQUENCE_DIM = {1: 0, 2: 1, 3: 1}
"""The dimension of the sequence in an argument of a block, by its number of dimensions: positions
[S] or [B, S], rotary tables [B, S, F]."""
_KIND = "sdpa"
EPILOGUE = "epilogue"
"""The kind of what lies between the last block and the loss."""
_OF_LIBRARIES = ("torch", "peft", "blockwalk")
"""Packages whose modules do not tell kinds of blocks apart: containers, adapters, ours."""


def kind_of(module: nn.Module) -> str:
    """Return a name that is equal for blocks that run the same code, whatever their shapes and
    adapters are: classes and switches of a model's own modules."""
    facts = {
        (type(child).__name__, name, value)
        for child in module.modules()
        if type(child).__module__.partition(".")[0] not in _OF_LIBRARIES
        for name, value in [("", ""), *vars(child).items()]
        if isinstance(value, bool | str) and name != "training" and not name.startswith("_")
    }
    words = repr(sorted(facts, key=repr))
    return f"{type(module).__name__}-{hashlib.blake2s(words.encode(), digest_size=4).hexdigest()}"


class _Attending(Exception):
    """The exception that ends a tile at its attention."""


class NotByTiles(Exception):
    """A block that does not call its attention once."""


class BlockTiles:
    """One run of a block by tiles.

    Args:
        module: the block.
        arguments: its arguments by position or keyword.
        hidden_at: the position or keyword of the hidden state [B, S, D] among them.
        size: positions of a tile.
        around: the context of attention, and of a tile.
        idle: paths of linear layers that attention alone reads; they rest after it.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Mapping[int | str, Any],
        hidden_at: int | str,
        size: int,
        around: Callable[[], AbstractContextManager[object]],
        idle: Sequence[str] = (),
    ) -> None:
        self.module = module
        self.arguments = arguments
        self.hidden_at = hidden_at
        self.hidden_BSD: Tensor = arguments[hidden_at]
        self.size = size
        self._around = around
        self._unread = unread_now()
        modules = dict(module.named_modules())
        self._idle = [modules[path] for path in idle if path in modules]
        self._attending: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def run(self, *, reads_answer: bool, uses_up: bool = False) -> Tensor:
        """Return the block's hidden state [B, S, D].

        Args:
            reads_answer: False where gradients alone are wanted, at once: zeros then stand for it,
                and tiles are computed in backward. With a graph and an answer, tiles keep theirs.
            uses_up: whether backward may write over the gradient of the hidden state. It does where
                nobody reads the answer.

        Raises:
            NotByTiles: the block does not call its attention, or nothing but tensors goes there.
        """
        trained = [p for p in self.module.parameters() if p.requires_grad]
        keeps_graphs = reads_answer and torch.is_grad_enabled()
        before = Positionwise(self.before_attention, (1,), (2, 2, 2), self._context)
        query_BHSF, key_BHSF, value_BHSF = by_tiles(
            before, [self.hidden_BSD], trained, self.size, keeps_graphs=keeps_graphs
        )
        assert self._attending is not None
        attention, rest, options = self._attending
        mask = options.get("attention_mask", *rest[1:2])
        with self._context(), _unrepeated(rest[0], mask):
            out_BSHF, *_ = attention(
                rest[0], query_BHSF, key_BHSF, value_BHSF, *rest[1:], **options
            )
        del query_BHSF, key_BHSF, value_BHSF
        inputs = [self.hidden_BSD, out_BSHF]
        after = Positionwise(self.after_attention, (1, 1), (1,), self._context)
        if not reads_answer:
            return unread_answer(after, inputs, trained, self.size, self.hidden_BSD)
        (answer_BSD,) = by_tiles(
            after, inputs, trained, self.size, keeps_graphs=keeps_graphs, uses_up=uses_up
        )
        return answer_BSD

    @contextmanager
    def _context(self) -> Iterator[None]:
        with self._around(), unread(self._unread):
            yield

    def _call(self, tile: slice, hidden_BTD: Tensor) -> tuple[Any, dict[int, Tensor]]:
        """Call the block on a tile; beside its answer the whole arguments, by the identities of
        their parts."""
        wholes: dict[int, Tensor] = {}
        parts: list[Tensor] = []
        length = self.hidden_BSD.shape[1]

        def part(tensor: Tensor) -> Tensor:
            dim = SEQUENCE_DIM.get(tensor.dim())
            if dim is None or tensor.shape[dim] != length:
                return tensor
            parts.append(tensor.narrow(dim, tile.start, tile.stop - tile.start))
            wholes[id(parts[-1])] = tensor
            return parts[-1]

        values = {
            key: hidden_BTD if key == self.hidden_at else rebuild(value, part, str(key))
            for key, value in self.arguments.items()
        }
        positional = [value for key, value in values.items() if isinstance(key, int)]
        keywords = {key: value for key, value in values.items() if isinstance(key, str)}
        return lambda: self.module(*positional, **keywords), wholes

    def before_attention(self, tile: slice, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return queries, keys and values of a tile, [B, H, T, F]."""
        call, wholes = self._call(tile, inputs[0])
        caught: list[Tensor] = []

        def attend(
            original: Any, module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any
        ) -> Any:
            caught.extend((query, key, value))
            if self._attending is None:

                def whole(tensor: Tensor) -> Tensor:
                    return wholes.get(id(tensor), tensor)

                self._attending = (
                    original,
                    (module, *(rebuild(item, whole, "attention") for item in rest)),
                    {name: rebuild(item, whole, name) for name, item in options.items()},
                )
            raise _Attending

        try:
            with attention_by(attend):
                call()
        except _Attending:
            if any(t.dim() != 4 or t.shape[2] != inputs[0].shape[1] for t in caught):
                raise NotByTiles("its attention takes no heads side by side") from None
            return caught
        raise NotByTiles("it has no attention that transformers hands it")

    def after_attention(self, tile: slice, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the block's answer of a tile, [B, T, D], from its hidden state and the answer of
        attention, [B, T, H, F]."""
        hidden_BTD, out_BTHF = inputs
        call, _ = self._call(tile, hidden_BTD)
        answers = [out_BTHF]

        def attend(*_: Any, **__: Any) -> Any:
            if not answers:
                raise NotByTiles("it attends more than once")
            return answers.pop(), None

        with attention_by(attend), _resting(self._idle):
            out = call()
        hidden = out[0] if isinstance(out, tuple | list) else out
        assert isinstance(hidden, Tensor)
        return (hidden,)


@contextmanager
def attention_by(attend: Callable[..., Any]) -> Iterator[None]:
    """Let ``attend`` answer in place of the attention that transformers hands to layers; its first
    argument is the function that it takes the place of."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions: Any = ALL_ATTENTION_FUNCTIONS
    local = functions._local_mapping
    was_local = _KIND in local
    original = functions[_KIND]

    def instead(*args: Any, **kwargs: Any) -> Any:
        return attend(original, *args, **kwargs)

    functions[_KIND] = instead
    try:
        yield
    finally:
        if was_local:
            functions[_KIND] = original
        else:
            del functions[_KIND]


@contextmanager
def _unrepeated(module: Any, mask: Any) -> Iterator[None]:
    """Keep transformers from copying keys and values for every head that reads them, where a
    processor attends under a rule: that takes them as they are."""
    groups = getattr(module, "num_key_value_groups", 1)
    if groups == 1 or not isinstance(mask, RuleMask) or not is_cpu(mask.device):
        yield
        return
    module.num_key_value_groups = 1
    try:
        yield
    finally:
        module.num_key_value_groups = groups


@contextmanager
def _resting(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let zeros stand for the answers of linear layers."""

    def zeros_of(module: Any) -> Callable[..., Tensor]:
        features = module.nf if hasattr(module, "nf") else module.out_features
        return lambda x, *_, **__: x.new_zeros(*x.shape[:-1], features)

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_answering(module, zeros_of(module)))
        yield


@contextmanager
def _answering(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    original = module.__dict__.get("forward")
    module.__dict__["forward"] = function
    try:
        yield
    finally:
        if original is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = original
