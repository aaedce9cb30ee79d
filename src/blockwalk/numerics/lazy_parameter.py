"""A parameter that is not there: it stands in a module's place and is decoded a range at a time
when it is used.

A tensor subclass rather than another ``forward`` per class of module, so that every module keeps
its own code: scaled embeddings, routers that call ``F.linear`` themselves, ``x @ weight.T``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockwalk.numerics.codecs.weights import Experts, Weight
from blockwalk.numerics.lazy_linear import grouped_linear, lazy_linear

_TURNED = (Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
_SWAPPED = (Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes)
_GROUPED = (F.grouped_mm, torch._grouped_mm)
_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_FACTS = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "grad",
    "layout",
    "_version",
)
_KINDS = ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized")
METADATA = {getattr(Tensor, name).__get__ for name in (*_FACTS, *_KINDS)}
METADATA |= {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.is_inference,
    torch.is_floating_point,
}
"""What a tensor answers without its elements."""


class LazyParameter(Tensor):
    """Stands for a frozen 2-D weight [N, D] (or its transpose, ``turned``) that a :class:`Weight`
    materialises, or for a layer's experts [E, N, D], of which those are materialised that rows are
    routed to.

    ``F.linear``, ``F.embedding``, ``addmm``, ``x @ weight``, ``F.grouped_mm`` and ``experts[e]``
    never hold it whole; any other operation decodes it whole for that operation."""

    weight: Any
    """A :class:`Weight`; in three dimensions
    :class:`~blockwalk.numerics.codecs.weights.Experts`."""
    turned: bool

    @staticmethod
    def __new__(
        cls, weight: Weight | Experts, device: torch.device, turned: bool = False
    ) -> LazyParameter:
        *stack, rows, columns = weight.shape
        shape = (*stack, columns, rows) if turned else weight.shape
        parameter: LazyParameter = Tensor._make_wrapper_subclass(
            cls, shape, dtype=weight.dtype, device=device
        )
        parameter.weight = weight
        parameter.turned = turned
        return parameter

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyParameter({tuple(self.shape)}, {self.dtype})"

    def decoded(self) -> Tensor:
        """Return the whole weight, freshly allocated (what a provider answers is scratch)."""
        if self.ndim == 3:
            tensor = torch.empty(self.weight.shape, dtype=self.dtype, device=self.device)
            self.weight.read_into(tensor)
        else:
            tensor = self.weight.rows(0, self.weight.shape[0]).clone()
        return tensor.mT if self.turned else tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse the operation: beneath the torch functions there is no data to work on."""
        raise AssertionError(f"{func} reached a lazily decoded weight")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:  # first, for most of a walk's calls are these
            return _linear(*args, **kwargs)
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        match func:
            case F.embedding:
                return _embedding(*args, **kwargs)
            case Tensor.__getitem__ if args[0].ndim == 3 and _index(args[1]):
                return cls(args[0].weight.expert(int(args[1])), args[0].device, args[0].turned)
            case torch.addmm if not kwargs and args[0].ndim == 1 and _only(args[2], args[1]):
                return lazy_linear(args[1], args[2].weight, args[0], transposed=not args[2].turned)
        if func in _MATMULS and _only(args[1], args[0]):
            return lazy_linear(args[0], args[1].weight, None, transposed=not args[1].turned)
        named = {name for name, value in kwargs.items() if value is not None}
        if func in _GROUPED and _only(args[1], args[0]) and named == {"offs"}:
            return grouped_linear(
                args[0], args[1].weight, kwargs["offs"], transposed=not args[1].turned
            )
        if func in _TURNED or (
            func in _SWAPPED and not kwargs and (args[0].ndim == 2 or set(args[1:]) == {-2, -1})
        ):
            lazy = args[0]
            return cls(lazy.weight, lazy.device, not lazy.turned)
        plain_args, plain_kwargs = torch.utils._pytree.tree_map_only(
            cls, cls.decoded, (args, kwargs)
        )
        return func(*plain_args, **plain_kwargs)


def _index(value: Any) -> bool:
    return isinstance(value, int) or (
        isinstance(value, Tensor) and value.ndim == 0 and value.dtype == torch.int64
    )


def _only(weight: Any, other: Any) -> bool:
    return isinstance(weight, LazyParameter) and not isinstance(other, LazyParameter)


def _linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    input = input.decoded() if isinstance(input, LazyParameter) else input
    if not isinstance(weight, LazyParameter):
        return F.linear(input, weight, bias)
    return lazy_linear(input, weight.weight, bias, transposed=weight.turned)


def _embedding(
    input: Tensor,
    weight: LazyParameter,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Return ``F.embedding``. Its arguments after ``norm_type`` concern the gradient, which a
    frozen weight has not."""
    if max_norm is not None or weight.turned:
        return F.embedding(
            input, weight.decoded(), padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    rows: Tensor = weight.weight.gather(input)
    return rows
