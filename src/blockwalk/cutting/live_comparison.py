"""The comparison of a model in memory with its walk, at the start of a run.

The trials of a configuration speak for transformers' code. An object that its owner changed is
compared itself: its own forward and autograd are the control, on two rows of eight tokens, in
float32. Each unit of the walk is given what the control gave to it, and must answer the same. Two
answers differ where they are further apart than :data:`MARGIN` times the walk's own distance
between float32 and float64.

B batch, S sequence, D hidden, R rows of a parameter."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from blockwalk.cutting.anatomy import Anatomy, canonical_name
from blockwalk.cutting.bound_units import base_of, gradient_hooks
from blockwalk.cutting.calls import BlockCall, Prologue
from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.live_state import code_of, functions_of, put_back
from blockwalk.cutting.ownership import find_parts
from blockwalk.cutting.small_instance import SEED
from blockwalk.cutting.trial_weights import TrialWeights
from blockwalk.cutting.verify import certified_anatomy
from blockwalk.numerics.codecs.weights import DenseWeight, Value
from blockwalk.numerics.lazy_parameter import LazyParameter

log = logging.getLogger(__name__)

MARGIN = 8.0
"""The factor of the walk's own distance between float32 and float64 that a difference may have."""
_LAST_PLACES = 2**-21
"""The relative distance that two float32 results of one sum may have in any case."""
_UNKNOWN_DISTANCE = 2**-18
"""The walk's relative distance where its code does not run in float64."""
_ROWS, _TOKENS = 2, 8
_STRETCH = 1024
"""Rows of a gradient that are read at a time."""

Key = tuple[int, str]
"""A figure's unit and name."""


@dataclass
class _Figures:
    """Answers of one run: each unit's output, gradients with respect to its input and its
    trained parameters, and the loss; those of a matrix as sketches."""

    answers: dict[Key, Tensor] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    """The hidden state that a unit is given, [B, S, D]."""
    seeds: dict[int, Tensor] = field(default_factory=dict)
    """The gradient of the loss with respect to a block's output."""

    def note(self, key: Key, tensor: Tensor) -> None:
        self.answers[key] = tensor.detach().clone()

    def note_gradient(
        self,
        unit: int,
        name: str,
        hooks: Sequence[Callable[[Tensor], Tensor | None]],
        gradient: Tensor,
    ) -> None:
        """Note a parameter's gradient, as its owner's hooks leave it; several uses add up."""
        with torch.no_grad():
            for hook in hooks:
                answer = hook(gradient)
                gradient = gradient if answer is None else answer
            sketch_R = _sketch(gradient.detach())
        key = (unit, f"the gradient of {name}")
        former = self.answers.get(key)
        self.answers[key] = sketch_R if former is None else former + sketch_R


@dataclass
class Observed:
    """A model in memory as its own forward and autograd show it: one entry a mode."""

    names: Mapping[int, str]
    """Each unit's modules."""
    values: Mapping[str, Tensor]
    """The parameters by canonical name."""
    device: torch.device
    units: Mapping[str, int]
    """The unit that owns each parameter."""
    trained: frozenset[str]
    """The parameters whose gradients are compared."""
    trainable: frozenset[str] | None
    """The parameters that require a gradient; None where the walk trains others."""
    adapted: bool
    """False where the walk's adapters are not the owner's: they are disabled meanwhile."""
    by_mode: dict[bool, _Figures]
    """Figures by whether the mode is training."""


class _NoDropout(TorchFunctionMode):
    """The mode in which nothing is dropped."""

    functions = frozenset(
        getattr(F, name) for name in dir(F) if "dropout" in name and not name.startswith("_")
    ) | {torch.dropout}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.functions:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)


def observed(model: Any, *, trains: bool, differentiates: bool, adapted: bool) -> Observed | None:
    """Run a model in memory by its own forward and autograd; None where it cannot be run so, which
    is logged.

    Args:
        model: the model, or a ``PeftModel`` around it; it is left as it was.
        trains: False for a walk that evaluates: no gradients, and no training mode.
        differentiates: False for a walk without gradients.
        adapted: False for a walk that adds adapters which the object does not have.

    Raises:
        ValueError: a hook of its owner raises; with its name.
    """
    base = base_of(model)
    anatomy = certified_anatomy(base)
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1 or torch.device("meta") in devices:
        return None
    control = _Control(
        model,
        base,
        anatomy,
        devices.pop(),
        with_gradients=trains and differentiates,
        adapted=adapted,
    )
    modes = (False, True) if trains and differentiates else (False,)
    by_mode: dict[bool, _Figures] = {}
    with put_back(model):
        try:
            for training in modes:
                by_mode[training] = control.run(training)
        # whatever the owner's code raises
        except Exception as error:
            name = _hook_of(error, model)
            if name:
                raise ValueError(
                    f"{name} raises {type(error).__name__} ({error}) on 2 rows of 8 tokens, on"
                    " which a model in memory is compared with its walk; mend it, or set"
                    " compare: never"
                ) from error
            log.warning(
                "the model in memory was not compared with its walk, for its own forward raises"
                " %s on 2 rows of 8 tokens: %s",
                type(error).__name__,
                error,
            )
            return None
    return Observed(
        control.names,
        control.values,
        control.device,
        control.unit_of,
        frozenset(control.hooks),
        control.trainable if adapted and trains else None,
        adapted,
        by_mode,
    )


class _Control:
    """A model's own forward and autograd, whose parameters are copies in float32, those of a layer
    for the time of its call.

    Args:
        model: the model, or a ``PeftModel`` around it.
        base: the plain model in it.
        anatomy: that of its configuration.
        device: where it lies.
        with_gradients: False for losses and outputs alone.
        adapted: False where gradients of its own parameters are nobody's.
    """

    def __init__(
        self,
        model: Any,
        base: Any,
        anatomy: Anatomy,
        device: torch.device,
        *,
        with_gradients: bool,
        adapted: bool,
    ) -> None:
        self.model = model
        self.base = base
        self.device = device
        self.with_gradients = with_gradients
        adapters = tuple(getattr(model, "peft_config", ()))
        active = tuple(getattr(model, "active_adapters", ())) if adapters else ()
        prefix = "".join(f"{n}." for n, module in model.named_modules() if n and module is base)

        def canonical(name: str) -> str:
            return canonical_name(name, active, prefix)

        self.units = find_parts(model, anatomy, canonical)
        self.names = names_of(self.units.layers, self.units.pieces, self.units.epilogue)
        self.values: dict[str, Tensor] = {}
        self.canonical: dict[int, str] = {}
        self.unit_of: dict[str, int] = {}
        for name, param in model.named_parameters():
            self.values[canonical(name)] = param.detach()
            self.canonical[id(param)] = canonical(name)
            self.unit_of[canonical(name)] = self.units.owner(name)
        named = {canonical(name): param for name, param in model.named_parameters()}
        self.trainable = frozenset(name for name, param in named.items() if param.requires_grad)
        differentiated = self.trainable if with_gradients and adapted else ()
        hooks = gradient_hooks({name: named[name] for name in differentiated})
        self.hooks = {name: hooks.get(name, ()) for name in differentiated}

    def run(self, training: bool) -> _Figures:
        """Return the figures of one mode."""
        figures = _Figures()
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        weights = TrialWeights(torch.float32, anchor)
        batch = small_rows(self.base.config, self.device)
        signature = inspect.signature(self.base.forward).parameters
        if any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in signature.values()):
            batch["use_cache"] = False
        self.model.train(training)
        layers = {id(part.module): part for part in self.units.layers}
        outside = [
            module
            for module in _outside(self.model, layers)
            if any(param is not None for param in module._parameters.values())
        ]
        with ExitStack() as stack:
            if training:
                stack.enter_context(_NoDropout())
            stack.enter_context(torch.set_grad_enabled(self.with_gradients))
            stack.enter_context(weights.remade())
            for part in self.units.layers:
                self._watch(part.unit, part.module, weights, figures, stack)
            shared: dict[int, Any] = {}
            stack.enter_context(self._bound(outside, weights, figures, shared, lazily=True))
            _seed(SEED, self.device)
            output = self.model(**batch)
            figures.note((self.units.epilogue, "the loss"), output.loss)
            if self.with_gradients:
                torch.autograd.backward(output.loss, inputs=[anchor])
        return figures

    def _watch(
        self,
        unit: int,
        layer: nn.Module,
        weights: TrialWeights,
        figures: _Figures,
        stack: ExitStack,
    ) -> None:
        """Let a layer's call be noted, from before its hooks to after them."""
        bound = ExitStack()

        def begins(_module: Any, args: Any, kwargs: Any) -> Any:
            place: Any = 0 if args and isinstance(args[0], Tensor) else "hidden_states"
            given: Any = args[0] if place == 0 else kwargs[place]
            figures.inputs[unit] = given.detach().clone()
            if unit == 1:
                figures.note((0, "the output"), given)
            modules = list(layer.modules())
            bound.enter_context(self._bound(modules, weights, figures, {}, lazily=False))
            _seed(SEED + unit, self.device)
            if not self.with_gradients:
                return None
            key = (unit, "the gradient of its input")
            watched = weights.watched(given, partial(figures.note, key))
            if place == 0:
                return (watched, *args[1:]), kwargs
            return args, {**kwargs, place: watched}

        def ends(_module: Any, _args: Any, output: Any) -> Any:
            bound.close()
            hidden = output[0] if isinstance(output, tuple | list) else output
            figures.note((unit, "the output"), hidden)
            if unit == len(self.units.layers):
                _seed(SEED + self.units.epilogue, self.device)
            if not self.with_gradients:
                return None
            watched = weights.watched(hidden, partial(self._keep_seed, figures, unit))
            return (watched, *output[1:]) if isinstance(output, tuple | list) else watched

        stack.callback(bound.close)
        hook = layer.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
        stack.callback(hook.remove)
        stack.callback(layer.register_forward_hook(ends).remove)

    def _keep_seed(self, figures: _Figures, unit: int, gradient: Tensor) -> None:
        figures.seeds[unit] = gradient.detach().clone()
        if unit == len(self.units.layers):
            figures.note((self.units.epilogue, "the gradient of its input"), gradient)

    @contextmanager
    def _bound(
        self,
        modules: Sequence[nn.Module],
        weights: TrialWeights,
        figures: _Figures,
        copies: dict[int, Any],
        *,
        lazily: bool,
    ) -> Iterator[None]:
        """Let modules hold copies in float32 for the time of a call."""
        former = [(module, dict(module._parameters)) for module in modules]
        bound: dict[str, Value] = {}
        for module, parameters in former:
            for leaf, param in parameters.items():
                if param is None:
                    continue
                if id(param) not in copies:
                    name = self.canonical[id(param)]
                    copy: Any
                    if name in self.hooks:
                        unit = self.unit_of[name]
                        note = partial(figures.note_gradient, unit, name, self.hooks[name])
                        copy = weights.trained(param, note)
                    else:
                        copy = weights.lazy(param) if lazily else weights.copy(param)
                    bound[name] = copy
                    if isinstance(copy, DenseWeight):
                        copy = LazyParameter(copy, self.device)
                    copies[id(param)] = copy
                module._parameters[leaf] = copies[id(param)]
        try:
            yield
        finally:
            weights.forget(bound)
            for module, parameters in former:
                module._parameters.update(parameters)


def _seed(number: int, device: torch.device) -> None:
    """Seed torch's own generators, which are put back when the comparison ends."""
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)


def _outside(model: nn.Module, layers: Mapping[int, Any]) -> Iterator[nn.Module]:
    """Yield the modules of a model that are in none of its layers."""
    if id(model) in layers:
        return
    yield model
    for child in model.children():
        yield from _outside(child, layers)


def names_of(layers: Sequence[Any], pieces: Sequence[Any], epilogue: int) -> dict[int, str]:
    """Return the canonical names of each unit's modules, with their classes."""
    names: dict[int, str] = {}
    for part in (*pieces, *layers):
        name = f"{part.canonical} ({type(part.module).__name__})"
        names[part.unit] = f"{names[part.unit]}, {name}" if part.unit in names else name
    return names


def small_rows(config: Any, device: torch.device) -> dict[str, Any]:
    """Return two rows of eight tokens with their labels: int64 [2, 8]."""
    vocab_size = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(SEED)
    shape = (_ROWS, _TOKENS)
    ids_BS = torch.randint(min(3, vocab_size - 1), vocab_size, shape, generator=generator)
    return {"input_ids": ids_BS.to(device), "labels": ids_BS.clone().to(device)}


def _hook_of(error: Exception, model: nn.Module) -> str:
    """Return the name of the owner's function that an error came through; empty: of none."""
    names = {}
    for name, module in model.named_modules():
        for function in functions_of(module):
            code = code_of(function)
            if code is not None:
                said = getattr(code, "co_qualname", code.co_name)
                place = f"{code.co_filename}:{code.co_firstlineno}"
                names[code] = f"the hook or forward {said} ({place}) of {name or 'the model'}"
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in names:
            return names[trace.tb_frame.f_code]
        trace = trace.tb_next
    return ""


@lru_cache
def _signs(length: int) -> Tensor:
    """Return random signs, always the same: float64."""
    generator = torch.Generator().manual_seed(SEED)
    signs = torch.randint(0, 2, (length,), generator=generator) * 2 - 1
    return signs.double()


def _sketch(gradient: Tensor) -> Tensor:
    """Return a gradient as its rows' sums under random signs, float64 [R], in which a difference
    has, on average, the norm that it has; a vector is itself."""
    if gradient.dim() < 2:
        return gradient.double().reshape(-1).clone()
    rows_RD = gradient.reshape(-1, gradient.shape[-1])
    signs_D = _signs(rows_RD.shape[1]).to(gradient.device)
    stretches = torch.split(rows_RD, _STRETCH)
    return torch.cat([stretch_RD.double() @ signs_D for stretch_RD in stretches])


# ---- the walk ------------------------------------------------------------------------------------


def require_same(control: Observed, cut: CutModel) -> None:
    """Compare the walk of a cut model with what was observed of the model in memory.

    Args:
        control: its parameters are what the walk computes with, whatever the plan rounds.
        cut: no unit of it is bound.

    Raises:
        ValueError: an answer differs, or the walk raises; with the module's name and the figures.
    """
    device = cut.device
    _require_same_trainables(control, cut)
    try:
        with put_back(cut.model):
            cut.to(control.device)
            if not control.adapted:
                _disable_adapters(cut)
            _compare(control, cut)
    finally:
        cut.to(device)


def _require_same_trainables(control: Observed, cut: CutModel) -> None:
    """Raise ValueError where a parameter is trained on one side, and frozen on the other."""
    if control.trainable is None:
        return
    for spec in cut.spec().params():
        if spec.trainable is not (spec.name in control.trainable) and spec.name in control.units:
            walks = "trained" if spec.trainable else "frozen"
            raise ValueError(
                f"{spec.name} is {walks} in the walk, and not in the model in memory; set its"
                " requires_grad on the model, or set compare: never"
            )


def _disable_adapters(cut: CutModel) -> None:
    """Let the modules of a cut model answer without the adapters that the walk added."""
    for module in cut.model.modules():
        if "_disable_adapters" in module.__dict__:
            module.__dict__["_disable_adapters"] = True
    configurations = getattr(cut.model, "peft_config", {}).values()
    if any(configuration.is_prompt_learning for configuration in configurations):
        cut.model.__dict__["forward"] = cut.base.forward


def _compare(control: Observed, cut: CutModel) -> None:
    """Compare a walk in each mode, in training where the control answers otherwise than in
    evaluation."""
    evaluated = _walked(control, cut, False, torch.float32).answers
    modes = {False: evaluated}
    if True in control.by_mode and not _alike(control):
        modes[True] = _walked(control, cut, True, torch.float32).answers
    differences = {
        training: _differences(control.by_mode[training].answers, answers)
        for training, answers in modes.items()
    }
    if any(differences.values()):
        distances = _distances(control, cut, evaluated)
        for training, of_mode in differences.items():
            _require_near(control, of_mode, distances, training)


def _alike(control: Observed) -> bool:
    """Return whether the control answers the same in training and in evaluation, bit for bit."""
    evaluated, trained = (control.by_mode[mode].answers for mode in (False, True))
    return evaluated.keys() == trained.keys() and all(
        torch.equal(answer, trained[key]) for key, answer in evaluated.items()
    )


def _distances(
    control: Observed, cut: CutModel, evaluated: Mapping[Key, Tensor]
) -> dict[Key, float]:
    """Return the walk's own distance between float32 and float64, of each figure."""
    try:
        double = _walked(control, cut, False, torch.float64).answers
    # a model's code may know some dtypes alone
    except Exception as error:
        log.debug("no walk in float64: %s", error)
        double = {}
    return {
        key: float((answer.double() - double[key].double()).norm())
        if key in double
        else _UNKNOWN_DISTANCE * float(answer.double().norm())
        for key, answer in evaluated.items()
    }


@dataclass(frozen=True)
class _Difference:
    """The distance of two answers, and the norm of the control's."""

    distance: float
    norm: float


def _differences(
    expected: Mapping[Key, Tensor], answers: Mapping[Key, Tensor]
) -> dict[Key, _Difference]:
    """Return what differs by more than float32's last places, outputs first, as they are
    computed."""
    differences = {}
    for key in sorted(expected, key=lambda key: ("gradient" in key[1], key[0])):
        control_answer = expected[key].double()
        answer = answers.get(key, torch.zeros_like(control_answer)).double()
        same_shape = answer.shape == control_answer.shape
        if same_shape and torch.allclose(answer, control_answer, 0.0, 0.0, equal_nan=True):
            continue  # a loss that is not finite is so on both sides
        distance = float((answer - control_answer).norm()) if same_shape else float("inf")
        norm = float(control_answer.norm())
        if not distance <= _LAST_PLACES * norm:
            differences[key] = _Difference(distance, norm)
    return differences


def _require_near(
    control: Observed,
    differences: Mapping[Key, _Difference],
    distances: Mapping[Key, float],
    training: bool,
) -> None:
    """Raise ValueError for the first difference that rounding does not explain."""
    for (unit, what), difference in differences.items():
        allowed = MARGIN * distances.get((unit, what), 0.0)
        if difference.distance <= allowed:
            continue
        norm = difference.norm or 1.0
        raise ValueError(
            f"{control.names.get(unit, 'the model')}: {what} differs between the model in memory"
            f" and its walk, in {'training' if training else 'evaluation'} mode, by"
            f" {difference.distance / norm:.2g} of its norm, where {allowed / norm:.2g} is allowed."
            " Its owner changed something that a walk does not follow (a hook, a forward, an"
            " attribute, the loss): remove it, or set compare: never to train without it"
        )


def _walked(control: Observed, cut: CutModel, training: bool, dtype: torch.dtype) -> _Figures:
    """Return the figures of a walk whose units are given what the control's were."""
    run = _Walk(control, cut, control.by_mode[training], dtype)
    cut.model.train(training)
    with ExitStack() as stack:
        if training:
            stack.enter_context(_NoDropout())
        stack.enter_context(torch.set_grad_enabled(bool(run.given.seeds)))
        stack.enter_context(run.weights.remade())
        return run.figures_of_units()


class _Walk:
    """One walk of the comparison."""

    def __init__(
        self, control: Observed, cut: CutModel, given: _Figures, dtype: torch.dtype
    ) -> None:
        self.control = control
        self.cut = cut
        self.given = given
        self.dtype = dtype
        self.anchor = torch.zeros((), device=control.device, requires_grad=True)
        self.weights = TrialWeights(dtype, self.anchor)
        self.figures = _Figures()
        self.trained = {spec.name for spec in cut.spec().params() if spec.trainable}
        self.tied_gradients: dict[str, Tensor] = {}
        """Gradients that another use of a tied parameter adds to, before its hooks read them."""
        self.owned = [[spec.name for spec in unit.params] for unit in cut.spec().units]
        if cut.head.tied:
            self.owned[-1].append(cut.head.weight)

    def figures_of_units(self) -> _Figures:
        """Run every unit forward, then every unit backward."""
        cut = self.cut
        batch = small_rows(cut.base.config, self.control.device)
        bound = self._bind(0)
        prologue = cut.prologue(batch, SEED)
        self.weights.forget(bound)
        cut.unbind(0)
        self.figures.note((0, "the output"), prologue.hidden_BSD)
        graphs = []
        for call in prologue.calls:
            hidden_BSD = self._leaf(self.given.inputs[call.unit])
            bound = self._bind(call.unit)
            result = cut.run(call, hidden_BSD, SEED + call.unit)
            self.weights.forget(bound)
            cut.unbind(call.unit)
            self.figures.note((call.unit, "the output"), result.hidden_BSD)
            graphs.append((call, hidden_BSD, result.outputs))
        self._end(prologue, batch)
        if self.given.seeds:
            while graphs:
                self._backward(*graphs.pop())
            self._begin(prologue)
        for name, gradient in self.tied_gradients.items():
            self._note_gradient(name, gradient)
        return self.figures

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        hooks = self.cut.gradient_hooks.get(name, ())
        self.figures.note_gradient(self.control.units[name], name, hooks, gradient)

    def _add_tied(self, name: str, gradient: Tensor) -> None:
        former = self.tied_gradients.get(name)
        self.tied_gradients[name] = gradient if former is None else former + gradient

    def _leaf(self, hidden_BSD: Tensor) -> Tensor:
        return hidden_BSD.detach().to(self.dtype, copy=True).requires_grad_(bool(self.given.seeds))

    def _bind(self, unit: int) -> dict[str, Value]:
        """Bind a unit's parameters, those of the control in this walk's dtype."""
        bound: dict[str, Value] = {}
        for name in self.owned[unit]:
            value = self.control.values.get(name)
            if value is None:
                continue
            if name in self.control.trained and self.given.seeds:
                tied = self.cut.head.tied and name == self.cut.head.weight
                hooked = tied and name in self.cut.gradient_hooks
                note = self._add_tied if hooked else self._note_gradient
                bound[name] = self.weights.trained(value, partial(note, name))
            elif name in self.trained:
                bound[name] = self.weights.copy(value)
            elif self.dtype == torch.float64 or unit in (0, self.cut.epilogue_index):
                bound[name] = self.weights.lazy(value)
            else:
                bound[name] = self.weights.copy(value)
        self.cut.bind(unit, bound)
        return bound

    def _end(self, prologue: Prologue, batch: Mapping[str, Tensor]) -> None:
        """Note the loss, as a walk computes it from the last block's output."""
        cut = self.cut
        unit = cut.epilogue_index
        output = self.given.answers[unit - 1, "the output"]
        hidden_BSD = self._leaf(output)
        bound = self._bind(unit)
        seed = SEED + unit
        if cut.head.custom:
            loss = cut.own_loss(prologue, hidden_BSD, batch, seed)
        else:
            loss = self._by_form(cut.head_input(prologue, hidden_BSD, batch, seed), bound, batch)
        self.weights.forget(bound)
        self.figures.note((unit, "the loss"), loss)
        if self.given.seeds:
            torch.autograd.backward(loss, inputs=[self.anchor, hidden_BSD])
            key = (unit, "the gradient of its input")
            assert hidden_BSD.grad is not None
            self.figures.note(key, hidden_BSD.grad)
        cut.unbind(unit)

    def _by_form(
        self, normed_BSD: Tensor, bound: Mapping[str, Value], batch: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the mean loss of logits of the known form, see
        :class:`~blockwalk.cutting.anatomy.HeadSpec`."""
        head = self.cut.head

        def tensor(name: str) -> Any:
            value = bound[name]
            return value if isinstance(value, Tensor) else LazyParameter(value, self.control.device)

        bias = None if head.bias is None else tensor(head.bias)
        logits = F.linear(normed_BSD, tensor(head.weight), bias)
        if head.lora is not None:
            a, b, factor = head.lora
            if a in bound:
                logits = logits + F.linear(F.linear(normed_BSD, tensor(a)), tensor(b)) * factor
        logits = logits * head.scale
        if head.soft_cap is not None:
            logits = torch.tanh(logits / head.soft_cap) * head.soft_cap
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def _backward(self, call: BlockCall, hidden_BSD: Tensor, outputs: Sequence[Tensor]) -> None:
        seeds = [
            self.given.seeds[call.unit].to(self.dtype),
            *(leaf.grad for leaf in call.handed.leaves_of(call.unit)),
        ]
        pairs = [
            (output, seed)
            for output, seed in zip(outputs, seeds, strict=True)
            if seed is not None and output.requires_grad
        ]
        inputs = [self.anchor, hidden_BSD, *call.leaves]
        torch.autograd.backward(
            [output for output, _ in pairs], [seed for _, seed in pairs], inputs=inputs
        )
        if hidden_BSD.grad is not None:
            self.figures.note((call.unit, "the gradient of its input"), hidden_BSD.grad)

    def _begin(self, prologue: Prologue) -> None:
        """Differentiate the prologue."""
        grad = self.given.answers.get((1, "the gradient of its input"))
        grads = [leaf.grad for leaf in prologue.leaves]
        roots, seeds = prologue.roots(None if grad is None else grad.to(self.dtype), grads)
        if roots:
            torch.autograd.backward(roots, seeds, inputs=[self.anchor])
