"""The norms, feed-forward layers and rotary positions of a model whose element-wise operations are
one pass each on a processor (:mod:`blockwalk.numerics.chains`), without code of any model's own.

A norm is one by a trial of its class: its own forward, on random numbers in bfloat16, answers as
one of :mod:`~blockwalk.numerics.chains`, but for rounding. So is a feed-forward layer of three
linear layers and an activation, by their names, and the function that attention calls to turn
queries and keys by their positions. Others, other numbers and other devices keep their own
code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockwalk.numerics import chains
from blockwalk.system.deferred_imports import deferred_imports

_EPS = ("variance_epsilon", "eps")
"""Names under which norms keep the number that they add to the mean of squares."""
_LINEARS = ("gate_proj", "up_proj", "down_proj")
"""The names of a feed-forward layer's linear layers; ``act_fn`` is its activation's."""
_ROTARY = "apply_rotary_pos_emb"
"""The name that models call their rotary positions by."""
_WIDTH = 24
_ROUNDED = 2**-7
"""The relative distance of a trial's answers: bfloat16's rounding a few times."""
_EXACT = 1e-9
"""That of activations in float64: gelu and its approximation by tanh are nearer than bfloat16."""

_NormChain = Callable[[Tensor, Tensor, float], Tensor]
_NORMS: tuple[_NormChain, ...] = (chains.rms_norm, chains.rms_norm_less_one)


@dataclass(frozen=True)
class _Gate:
    """An activation, and its product with another tensor in one pass."""

    activation: Callable[[Tensor], Tensor]
    chain: Callable[[Tensor, Tensor], Tensor]


_GATES = (
    _Gate(F.silu, chains.swiglu),
    _Gate(partial(F.gelu, approximate="tanh"), chains.geglu),
)


@deferred_imports()  # a trial's gradients are of plain shapes
def fuse_chains(model: nn.Module) -> None:
    """Let norms and feed-forward layers of a model compute their chains in one pass each, where
    they get bfloat16 on a processor."""
    for module in model.modules():
        if "forward" in module.__dict__:
            continue
        eps = _eps(module)
        kind: Any = type(module)
        if eps is not None and (chain := _norm_of(kind, eps)) is not None:
            module.__dict__["forward"] = partial(_norm, module, module.forward, chain, eps)
        elif (gate := _gate_of(module)) is not None:
            module.__dict__["forward"] = partial(_feed_forward, module, module.forward, gate)
        elif (turns := _rotary_of(kind.forward)) is not None:
            module.__dict__["forward"] = MethodType(turns, module)


def unfuse_chains(model: nn.Module) -> None:
    """Let a model's modules answer by their own code again."""
    for module in model.modules():
        if is_fused(module):
            del module.__dict__["forward"]


def is_fused(module: nn.Module) -> bool:
    """Return whether a module answers by a forward of :func:`fuse_chains`."""
    forward = module.__dict__.get("forward")
    function = getattr(forward, "func", getattr(forward, "__func__", None))
    return bool(function) and function in (_norm, _feed_forward, _rotary_of(type(module).forward))


def _norm(
    module: Any, original: Callable[..., Tensor], chain: _NormChain, eps: float, x: Tensor
) -> Tensor:
    return chain(x, module.weight, eps) if _fits(x, module.weight) else original(x)


def _feed_forward(module: Any, original: Callable[..., Tensor], gate: _Gate, x: Tensor) -> Tensor:
    if not _fits(x):
        return original(x)
    answer: Tensor = module.down_proj(gate.chain(module.gate_proj(x), module.up_proj(x)))
    return answer


def _fits(*tensors: Tensor) -> bool:
    return chains.fits(*tensors) and not torch.compiler.is_compiling()


def _eps(module: nn.Module) -> float | None:
    """Return the number that a norm adds to the mean of squares; None of what is no such norm: it
    has one vector, and nothing else."""
    if module._modules or module._buffers or list(module._parameters) != ["weight"]:
        return None
    weight = module._parameters["weight"]
    if weight is None or weight.dim() != 1:
        return None
    values = [getattr(module, name) for name in _EPS if hasattr(module, name)]
    return values[0] if len(values) == 1 and isinstance(values[0], float) else None


def _gate_of(module: nn.Module) -> _Gate | None:
    """Return the gate of a feed-forward layer; None of what is none, or has another activation."""
    parts = module._modules
    if set(parts) != {*_LINEARS, "act_fn"}:
        return None
    own: Any = parts["act_fn"]
    kind: Any = type(module)
    for gate in _GATES:
        if _is_activation(own, gate.activation) and _is_gated(kind, gate):
            return gate
    return None


@lru_cache
def _norm_of(kind: type[nn.Module], eps: float) -> _NormChain | None:
    """Return the norm that a class of norms is, by trial; None of others."""
    alone = _bare(kind)
    weight_D = _drawn(_WIDTH)
    alone.weight = nn.Parameter(weight_D, requires_grad=False)
    for name in _EPS:
        setattr(alone, name, eps)
    inputs = [_drawn(5, _WIDTH) * size for size in (1.0, 10 * eps**0.5)]
    for chain in _NORMS:
        if _agree(alone.forward, partial(_called, chain, weight_D, eps), inputs):
            return chain
    return None


def _called(chain: _NormChain, weight_D: Tensor, eps: float, x: Tensor) -> Tensor:
    return chain(x, weight_D, eps)


def _is_activation(own: nn.Module, activation: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a module's activation is this one, by trial in float64."""
    x = torch.linspace(-6.0, 6.0, 97, dtype=torch.float64)
    # whatever a class raises here is the reason to leave it as it is
    try:
        return torch.allclose(own(x), activation(x), rtol=0.0, atol=_EXACT)
    except Exception:
        return False


@lru_cache
def _is_gated(kind: type[nn.Module], gate: _Gate) -> bool:
    """Return whether a class of feed-forward layers is this gate between three linear layers, by
    trial."""
    alone = _bare(kind)
    layers = {name: nn.Linear(_WIDTH, _WIDTH, bias=False) for name in _LINEARS}
    for name, layer in layers.items():
        layer.weight = nn.Parameter(_drawn(_WIDTH, _WIDTH) / _WIDTH**0.5, requires_grad=False)
        setattr(alone, name, layer)
    alone.act_fn = gate.activation
    gated, up, down = layers.values()

    def fused(x: Tensor) -> Tensor:
        return down(gate.chain(gated(x), up(x)))  # type: ignore[no-any-return]

    return _agree(alone.forward, fused, [_drawn(5, _WIDTH)])


class _Names(dict[str, Any]):
    """The names that a function of a module sees, one of them another's: those of the module as
    they are when they are asked for."""

    def __init__(self, names: dict[str, Any], **others: Any) -> None:
        super().__init__(others, __builtins__=names["__builtins__"])
        self._names = names

    def __missing__(self, name: str) -> Any:
        return self._names[name]


@lru_cache
def _rotary_of(forward: Any) -> FunctionType | None:
    """Return a class's forward whose rotary positions are one pass; None of a forward that has
    none, or others than Llama's, by trial."""
    if not isinstance(forward, FunctionType) or _ROTARY not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(_ROTARY)
    if own is None or not _is_rotary(own):
        return None
    names = _Names(forward.__globals__, **{_ROTARY: partial(_turned, own)})
    closure = forward.__closure__
    fused = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, closure)
    fused.__kwdefaults__ = forward.__kwdefaults__
    return fused


def _turned(
    own: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *arguments: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Answer as a model's own function of queries and keys [B, H, S, D]."""
    positions = (cosine, sine)
    told = arguments or options
    well = all(_lies_well(tensor, cosine) for tensor in (query, key)) and cosine.dim() == 3
    if told or not well or not _fits(query, key, *positions) or cosine.requires_grad:
        return own(query, key, cosine, sine, *arguments, **options)
    cosine, sine = (part.contiguous() for part in positions)
    return chains.rotary(query, cosine, sine), chains.rotary(key, cosine, sine)


def _lies_well(tensor: Tensor, cosine: Tensor) -> bool:
    width = tensor.shape[-1]
    return (
        tensor.dim() == 4 and tensor.stride(-1) == 1 and cosine.shape[-1] == width and not width % 2
    )


@lru_cache
def _is_rotary(function: Callable[..., Any]) -> bool:
    """Return whether a function turns queries and keys as Llama's, by trial."""
    cosine, sine, more = (
        _drawn(2, 5, _WIDTH),
        _drawn(2, 5, _WIDTH).flip(1),
        _drawn(2, 1, 5, _WIDTH),
    )

    def both(turn: Callable[..., Any], query: Tensor) -> Tensor:
        return torch.cat(turn(query, more, cosine, sine), 1)

    query = _drawn(2, 3, 5, _WIDTH).flip(2)
    return _agree(partial(both, function), partial(both, partial(_turned, function)), [query])


def _bare(kind: type[nn.Module]) -> Any:
    """Return a module of a class without what its constructor makes."""
    alone = kind.__new__(kind)
    nn.Module.__init__(alone)
    return alone


def _drawn(*shape: int) -> Tensor:
    """Return normal numbers in bfloat16, always the same."""
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def _agree(
    function: Callable[[Tensor], Any], fused: Callable[[Tensor], Tensor], inputs: list[Tensor]
) -> bool:
    """Return whether two functions have the same answers and gradients, but for rounding."""
    if not chains.fits(*inputs):
        return False
    # whatever a class raises here is the reason to leave it as it is
    try:
        for x in inputs:
            found = _with_gradient(function, x)
            for one, other in zip(found, _with_gradient(fused, x), strict=True):
                distance = (one.double() - other.double()).norm()
                if one.dtype != other.dtype or not distance <= _ROUNDED * other.double().norm():
                    return False
    except Exception:
        return False
    return True


def _with_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        answer = function(leaf)
        (gradient,) = torch.autograd.grad(answer, leaf, answer.detach())
    return answer.detach(), gradient
