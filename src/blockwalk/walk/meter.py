"""A mode that sees every operation: bytes of the storages that are alive under it, their peak, and
the work that is done."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from blockwalk.numerics.causal_attention import pairs
from blockwalk.plan.work import Work
from blockwalk.walk.attention_flops import attention_flops

_aten = torch.ops.aten
_OUR_ATTENTION = {
    torch.ops.blockwalk.causal_attention: 1.0,
    torch.ops.blockwalk.causal_attention_backward: 2.5,
}
"""Our kernel, whose arguments tell the documents: FLOPs as a multiple of the forward's two
products."""
_UNTOUCHED = (
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.detach,
    _aten._reshape_alias,
)
"""Operations that touch no data, views apart."""


@dataclass
class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages made under it that are alive, their peak, and FLOPs.

    An operation whose FLOPs cannot be counted is one that moves bytes: nothing that is foreseen
    may end a run.

    >>> with Meter() as meter:
    ...     x = torch.zeros(256); y = x + x; del x
    >>> meter.live, meter.peak
    (1024, 2048)
    """

    live: int = 0
    peak: int = 0
    products: int = 0
    attention: int = 0
    touched: int = 0
    uncounted: dict[str, str] = field(default_factory=dict)
    """Operations whose FLOPs could not be counted, with the reason."""
    starts: int = 0
    """Operations that have been started, views apart."""
    _known: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = {id(t.untyped_storage()) for t in _tensors((args, kwargs))}
        if func._overloadpacket is _aten._grouped_mm and args[0].dtype != torch.bfloat16:
            # Its fake kernel takes bfloat16 only, where real ones take float32: sizes are those of
            # the real output.
            operands = [
                a.to(torch.bfloat16) if isinstance(a, Tensor) and a.is_floating_point() else a
                for a in args
            ]
            out = func(*operands, **kwargs).to(args[0].dtype)
        elif func._overloadpacket in flop_registry and isinstance(kwargs.get("out"), FakeTensor):
            # without data there is nothing to do; PyTorch would take its operation apart for it
            out = kwargs["out"]
        else:
            out = func(*args, **kwargs)
        self._count(func, inputs, args, kwargs, out)
        self.starts += not _is_free(func, inputs, out)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if (
                tensor.device.type != "meta"
                and id(storage) not in inputs
                and id(storage) not in self._known
            ):
                self._enter(storage)
        return out

    def _enter(self, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()
        key = id(storage)
        self._known[key] = nbytes
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._leave, key).atexit = False

    def _leave(self, key: int) -> None:
        self.live -= self._known.pop(key)

    @property
    def work(self) -> Work:
        """The operations done under the meter so far."""
        return Work(self.products, self.attention, self.touched, self.starts)

    def _count(self, func: Any, inputs: set[int], args: Any, kwargs: Any, out: Any) -> None:
        try:
            flops = _flops(func, args, kwargs, out)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            self.uncounted[str(func._overloadpacket)] = f"{type(error).__name__}: {reason}"
            flops = None
        if flops is not None:
            self.products += flops.products
            self.attention += flops.attention
            return
        packet = func._overloadpacket
        if not _is_free(func, inputs, out):
            written = {} if packet is _aten.copy_ else {id(t): t for t in _tensors(out)}
            self.touched += sum(map(_touched, [*_tensors((args, kwargs)), *written.values()]))


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> Work | None:
    """Return the FLOPs of a product or of attention; None for an operation that moves bytes."""
    packet = func._overloadpacket
    if (attention := attention_flops(func, args, kwargs)) is not None:
        return Work(attention=attention)
    if packet in _OUR_ATTENTION:
        factor = _OUR_ATTENTION[packet]
        _, heads, _, width = args[0].shape  # the queries', or the gradient's
        return Work(attention=int(factor * 4 * heads * width * pairs(args[-2])))
    if packet is _aten.addmm_:
        return Work(flop_registry[_aten.addmm](*args, **kwargs, out_val=out))
    if packet is _aten._grouped_mm:  # rows by experts, or experts by rows in backward
        return Work(2 * args[0].numel() * args[1].shape[-1])
    if packet in flop_registry:
        return Work(flop_registry[packet](*args, **kwargs, out_val=out))
    return None


def _is_free(func: Any, inputs: set[int], out: Any) -> bool:
    """Return whether an operation is a view of its inputs, or touches no data."""
    if func._overloadpacket in _UNTOUCHED:
        return True
    is_view = all(id(tensor.untyped_storage()) in inputs for tensor in _tensors(out))
    return is_view and not func._schema.is_mutable


def _touched(tensor: Tensor) -> int:
    """Return bytes that going through a tensor once moves: an expanded one has fewer than
    elements."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]
