"""Cut a model into prologue, blocks and epilogue, without code of any model's own.

One skeleton pass suffices: every decoder layer's forward gives way to a stub that records its arguments, and the model's own
forward runs. It yields what each layer would have been called with for this batch. The prologue is that pass up to the
last layer's stub, the epilogue the same pass with the last stub answering the true hidden state.

B batch, S sequence, D hidden, V vocabulary. Units: 0 the prologue, 1..L the blocks, L+1 the epilogue.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from blockwalk.anatomy import Anatomy, canonical_name, pieces
from blockwalk.arguments import containers_of, rebuild, tensors_of
from blockwalk.lazy_parameter import LazyParameter
from blockwalk.state import ModelSpec, ParamSpec, UnitSpec, Weight

Batch = Mapping[str, Any]
_IDS_OF_PLACE = ("layer_idx", "layer_id", "layer_index", "layer_number")


class _Stop(Exception):
    """Ends a skeleton pass where nothing after it is wanted."""


@dataclass(frozen=True, eq=False)
class BlockCall:
    """What one block is called with for one batch: an explicit value, to be run any number of times in any order."""

    unit: int
    module: nn.Module
    hidden_at: int | str
    """Position or keyword of the hidden state."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    differentiable: tuple[torch.Tensor, ...]
    """Leaves among the arguments that receive a gradient; blocks that share an argument share its leaf."""
    live_cache: bool = False
    """Whether the block writes into the batch's own key-value cache (generation), not into a view of it."""

    def view(self, hidden_BSD: torch.Tensor) -> tuple[list[Any], dict[str, Any]]:
        """Arguments for one run, in containers of their own."""
        live = self.live_cache
        args = [rebuild(value, _same, f"argument {i}", share_caches=live) for i, value in enumerate(self.args)]
        kwargs = {name: rebuild(value, _same, name, share_caches=live) for name, value in self.kwargs.items()}
        if isinstance(self.hidden_at, int):
            args[self.hidden_at] = hidden_BSD
        else:
            kwargs[self.hidden_at] = hidden_BSD
        return args, kwargs


@dataclass(frozen=True, eq=False)
class Prologue:
    """The skeleton pass of one batch: the first block's hidden state, and every block's call."""

    hidden_BSD: torch.Tensor
    calls: tuple[BlockCall, ...]
    sources: tuple[torch.Tensor, ...]
    """Tensors of the prologue's graph that blocks take as arguments, beside the hidden state."""
    leaves: tuple[torch.Tensor, ...]
    """Their stand-ins in the calls, in the same order."""
    stand_ins: Mapping[str, tuple[Any, ...]]
    """What the prologue's modules answered, on the meta device: the epilogue's pass runs on zeros of these shapes."""

    def backward(
        self, grad_hidden_BSD: torch.Tensor | None, grad_leaves: Sequence[torch.Tensor | None] | None = None
    ) -> None:
        """Backpropagate through the prologue's graph into ``.grad`` of its trainable parameters.

        ``grad_leaves`` are the gradients of ``leaves`` summed over the blocks (None: taken from ``leaf.grad``).
        """
        given = [leaf.grad for leaf in self.leaves] if grad_leaves is None else grad_leaves
        pairs = [
            (source, grad)
            for source, grad in zip((self.hidden_BSD, *self.sources), (grad_hidden_BSD, *given), strict=True)
            if grad is not None and source.requires_grad
        ]
        if pairs:
            torch.autograd.backward([source for source, _ in pairs], [grad for _, grad in pairs])


@dataclass(frozen=True)
class HeadSpec:
    """The output embedding: logits = soft_cap·tanh(scale·(W·h + b)/soft_cap), or without a cap scale·(W·h + b)."""

    weight: str
    """Canonical name of W [V, D]; the embedding's where the two are tied."""
    bias: str | None
    soft_cap: float | None
    scale: float
    tied: bool
    custom: bool
    """True where logits or loss are not of this form (verified with numbers): use ``own_loss`` and ``logits``."""
    lora: tuple[str, str, float] | None = None
    """Canonical names of A [R, D] and B [V, R] and the factor of B·A where the head carries a plain LoRA."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """One place where a parameter sits."""

    module: nn.Module
    leaf: str


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _quantizable(module: nn.Module, leaf: str, param: torch.Tensor, name: str) -> bool:
    if "lora_" in name or not param.is_floating_point():
        return False
    if param.ndim == 3 and "expert" in name and leaf.endswith(("proj", "weight", "w1", "w2", "w3", "v1")):
        return True
    matrix = isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D"
    return matrix and leaf == "weight" and param.ndim == 2


def _kind(module: nn.Module, params: Sequence[tuple[str, ParamSpec]]) -> str:
    """Equal for blocks that run the same code on the same shapes: class, parameters and every whole-number setting."""
    facts = [(local, spec.shape, spec.dtype, spec.trainable) for local, spec in params]
    settings = [
        (type(child).__name__, key, str(value))
        for child in module.modules()
        for key, value in sorted(vars(child).items())
        if isinstance(value, bool | int | str) and key not in _IDS_OF_PLACE and key != "training"
    ]
    digest = hashlib.blake2s(repr((facts, settings)).encode(), digest_size=3).hexdigest()
    attention = getattr(module, "attention_type", None) or getattr(module, "layer_type", None)
    parts = [type(module).__name__, attention if isinstance(attention, str) else None, digest]
    return "-".join(part for part in parts if part)


def _has_dropout(model: nn.Module) -> bool:
    """Whether a training-mode forward may draw random numbers (dropout, router jitter, stochastic depth)."""
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules()):
        return True
    config = getattr(model, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    flat = [settings, *(value for value in settings.values() if isinstance(value, dict))]
    return any(
        isinstance(value, float) and value > 0 and any(word in key for word in ("drop", "jitter"))
        for level in flat
        for key, value in level.items()
    )


class CutModel:
    """A ``transformers`` causal language model (or a ``PeftModel`` around one) as a sequence of units.

    The modules stay, their parameters come and go: :meth:`bind` puts tensors or lazily decoded weights in their places,
    :meth:`unbind` takes them out again. Raises ValueError for a model that is no sequence of layers, with the reason.
    """

    def __init__(self, model: nn.Module, *, verify: bool = True, anatomy: Anatomy | None = None) -> None:
        self.model = model
        self.base: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
        self.adapters: tuple[str, ...] = tuple(getattr(model, "peft_config", ()))
        if len(self.adapters) > 1:
            raise ValueError(f"the model carries {len(self.adapters)} adapters {self.adapters}; Blockwalk trains one")
        self._prefix = "".join(f"{name}." for name, module in model.named_modules() if name and module is self.base)
        self._refuse_settings()
        if anatomy is None:
            from blockwalk.verification import certified_anatomy

            anatomy = certified_anatomy(self.base, verify=verify)
        self.anatomy = anatomy
        self.device = torch.device("cpu")
        self.draws_random_numbers = _has_dropout(model)
        """Whether a forward in training mode may draw random numbers."""
        signature = inspect.signature(self.base.forward).parameters
        self._takes_use_cache = "use_cache" in signature or any(
            p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values()
        )
        named = [(name, self._canonical(name), module) for name, module in model.named_modules()]
        self._layers = [
            (name, canonical, module)
            for name, canonical, module in named
            if canonical.rpartition(".")[0] in anatomy.layer_parents
        ]
        self._epilogue_index = len(self._layers) + 1
        self._find_pieces()
        self._find_parameters()
        self._bound: dict[int, list[_Slot]] = {}
        self.head = self._head_spec()

    def _canonical(self, name: str) -> str:
        return canonical_name(name, self.adapters, self._prefix)

    def _refuse_settings(self) -> None:
        config = self.base.config
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{type(self.base).__name__} is an encoder–decoder: Blockwalk walks decoders only")
        for key in ("layerdrop", "decoder_layerdrop", "encoder_layerdrop"):
            if getattr(config, key, 0.0):
                raise ValueError(
                    f"{key} = {getattr(config, key)} skips layers at random, so steps differ in their walk; set it to 0"
                )
        if getattr(config, "output_router_logits", False):
            raise ValueError(
                "output_router_logits = True adds a loss that reads every layer's router; set it to False "
                "(the auxiliary loss is then 0)"
            )
        for module in self.model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False  # the walk recomputes blocks itself

    # --- construction -------------------------------------------------------------------------------------------------

    def _find_pieces(self) -> None:
        """Name the modules outside the layers, and the unit of each."""
        layers = {name: module for name, _, module in self._layers}
        self._pieces: list[tuple[str, int, nn.Module]] = []
        for name, module in pieces(self.model, layers):
            canonical = self._canonical(name)
            late = canonical in self.anatomy.epilogue
            self._pieces.append((name, self._epilogue_index if late else 0, module))
        self._prologue_pieces = [
            (name, module)
            for name, unit, module in self._pieces
            if unit == 0 and next(module.parameters(), None) is not None
        ]

    def _unit_of(self, name: str) -> int:
        for index, (layer, _, _) in enumerate(self._layers, 1):
            if name.startswith(f"{layer}."):
                return index
        for piece, unit, _ in self._pieces:
            if name.startswith(f"{piece}."):
                return unit
        return 0

    def _find_parameters(self) -> None:
        """Resolve every parameter once: canonical name, unit, and the slots where it sits."""
        model, count = self.model, self._epilogue_index + 1
        modules = dict(model.named_modules(remove_duplicate=False))
        canonical_of: dict[int, str] = {}
        home: dict[str, int] = {}
        tied: list[tuple[str, str]] = []
        self._slots: list[dict[str, list[_Slot]]] = [{} for _ in range(count)]
        self._placeholders: dict[str, nn.Parameter] = {}
        self._trainable: set[str] = set()
        specs: list[list[tuple[str, ParamSpec]]] = [[] for _ in range(count)]
        for name, param in model.named_parameters(remove_duplicate=False):
            prefix, _, leaf = name.rpartition(".")
            alias, unit = self._canonical(name), self._unit_of(name)
            canonical = canonical_of.setdefault(id(param), alias)
            assert canonical not in home or self._placeholders[canonical] is param, f"two parameters named {canonical}"
            slot = _Slot(modules[prefix], leaf)
            self._slots[unit].setdefault(canonical, []).append(slot)
            if canonical not in home:
                home[canonical] = unit
                self._placeholders[canonical] = param
                if param.requires_grad:
                    self._trainable.add(canonical)
                spec = ParamSpec(
                    canonical,
                    tuple(param.shape),
                    str(param.dtype).removeprefix("torch."),
                    param.requires_grad,
                    _quantizable(slot.module, leaf, param, canonical),
                )
                specs[unit].append((name, spec))
            elif alias != canonical:
                tied.append((alias, canonical))
                if home[canonical] != unit and {home[canonical], unit} != {0, self._epilogue_index}:
                    raise ValueError(f"{alias} and {canonical} are one parameter in two blocks: no sequence of layers")
        names = ["prologue", *(canonical for _, canonical, _ in self._layers), "epilogue"]
        units = [
            UnitSpec(
                name,
                _kind(self._layers[index - 1][2], [(n[len(self._layers[index - 1][0]) :], s) for n, s in specs[index]])
                if 0 < index < count - 1
                else name,
                tuple(spec for _, spec in specs[index]),
            )
            for index, name in enumerate(names)
        ]
        config = self.base.config.get_text_config()
        dtypes = Counter(spec.dtype for unit in specs for _, spec in unit if "lora_" not in spec.name)
        self._spec = ModelSpec(
            name=type(self.base).__name__,
            prologue=units[0],
            blocks=tuple(units[1:-1]),
            epilogue=units[-1],
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            dtype=dtypes.most_common(1)[0][0],
            tied=tuple(tied),
        )

    def _head_spec(self) -> HeadSpec:
        anatomy = self.anatomy
        module = self.base.get_output_embeddings()
        lora = None
        custom = anatomy.head_custom or module is None
        if module is None:
            return HeadSpec("", None, None, 1.0, False, True)
        if hasattr(module, "base_layer"):
            lora = self._lora_of(module)
            custom = custom or lora is None
            module = module.base_layer
        config = next(iter(getattr(self.model, "peft_config", {}).values()), None)
        if config is not None and config.is_prompt_learning and str(config.peft_type) != "PeftType.PREFIX_TUNING":
            custom = True  # virtual tokens lengthen the sequence: only the wrapper knows how to pad the labels
        params = {
            leaf: name
            for unit in self._slots
            for name, slots in unit.items()
            for s in slots
            if s.module is module
            for leaf in (s.leaf,)
        }
        weight = params.get("weight", "")
        tied = any(weight == canonical for _, canonical in self._spec.tied)
        return HeadSpec(weight, params.get("bias"), anatomy.soft_cap, anatomy.scale, tied, custom or not weight, lora)

    def _lora_of(self, module: Any) -> tuple[str, str, float] | None:
        """Names and factor of a plain LoRA on a linear head (no dropout, no bias, no DoRA), or None."""
        adapter = self.adapters[0]
        plain = (
            adapter in getattr(module, "lora_A", {})
            and isinstance(module.lora_dropout[adapter], nn.Identity)
            and not getattr(module, "lora_variant", {})
            and module.lora_B[adapter].bias is None
            and len(module._parameters) == 0
        )
        if not plain:
            return None
        names = {id(p): name for name, p in self._placeholders.items()}
        a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        return names[id(a)], names[id(b)], float(module.scaling[adapter])

    # --- what the model is made of ------------------------------------------------------------------------------------

    def spec(self) -> ModelSpec:
        """Units in execution order with their parameters."""
        return self._spec

    @property
    def epilogue_index(self) -> int:
        """The epilogue's unit index, L + 1."""
        return self._epilogue_index

    def modules(self, unit: int) -> list[nn.Module]:
        """The unit's outermost modules."""
        if 0 < unit < self._epilogue_index:
            return [self._layers[unit - 1][2]]
        return [module for _, piece_unit, module in self._pieces if piece_unit == unit]

    def to(self, device: torch.device | str) -> CutModel:
        """Move the buffers; parameters are wherever they are bound from."""
        self.device = torch.device(device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)
        return self

    def take_parameters(self) -> dict[str, torch.Tensor]:
        """Hand over the real parameters that the modules hold, by canonical name; placeholders take their places."""
        taken: dict[str, torch.Tensor] = {}
        for unit, slots in enumerate(self._slots):
            assert unit not in self._bound, "take_parameters with a unit bound"
            for name, places in slots.items():
                held = self._placeholders[name]
                if not held.is_meta:
                    taken[name] = held.detach()
                    empty = torch.empty_like(held, device="meta")
                    self._placeholders[name] = nn.Parameter(empty, requires_grad=held.requires_grad)
                for slot in places:
                    slot.module._parameters[slot.leaf] = self._placeholders[name]
        return taken

    # --- parameters come and go ---------------------------------------------------------------------------------------

    def bind(self, unit: int, values: Mapping[str, torch.Tensor | Weight]) -> dict[str, torch.Tensor]:
        """Put parameters in their places: tensors, or weights that are decoded when used (2-D, frozen).

        Answers the bound trainable tensors by name: the leaves whose gradients are the parameters'. A tensor that does not
        require a gradient is given a leaf that does, over the same memory. The epilogue accepts a tied head's weight.
        """
        slots, leaves = self._slots[unit], {}
        bound = self._bound.setdefault(unit, [])
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                if name in self._trainable:
                    value = value if value.requires_grad else value.detach().requires_grad_(True)
                    leaves[name] = value
                    placed = value
                else:
                    # A Parameter, as PEFT's parametrizations of expert weights ask for.
                    placed = nn.Parameter(value, requires_grad=False)
            else:
                assert name not in self._trainable, f"{name} is trained: bind it as a tensor"
                placed = LazyParameter(value, self.device)
            for slot in slots[name]:
                slot.module._parameters[slot.leaf] = placed  # type: ignore[assignment]
                bound.append(slot)
        return leaves

    def unbind(self, unit: int) -> None:
        """Put placeholders back, so that nothing here refers to what was bound."""
        if self._bound.pop(unit, None) is None:
            return
        for name, slots in self._slots[unit].items():
            for slot in slots:
                slot.module._parameters[slot.leaf] = self._placeholders[name]

    # --- passes -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _seeded(self, seed: int | None) -> Iterator[None]:
        """Draw from a generator seeded for this unit, and leave the global ones as they were."""
        if seed is None or not self.draws_random_numbers or not self.model.training:
            yield
            return
        cuda = self.device.type == "cuda"
        with torch.random.fork_rng(devices=[self.device] if cuda else []):
            self._seed(seed)
            yield

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)

    @contextmanager
    def _forwards(self, replaced: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
        """Let modules answer by other functions for the time of a pass."""
        before = [(module, module.__dict__.get("forward")) for module, _ in replaced]
        try:
            for module, function in replaced:
                module.__dict__["forward"] = function
            yield
        finally:
            for module, forward in before:
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = forward

    def _answer(self, module: nn.Module, hidden_BSD: torch.Tensor) -> Any:
        length = self.anatomy.returns[type(module).__name__]
        return (hidden_BSD, *[None] * (length - 1)) if length else hidden_BSD

    def _inputs(self, batch: Batch, *, labels: bool) -> dict[str, Any]:
        given = {name: value for name, value in batch.items() if labels or name != "labels"}
        if self._takes_use_cache and "use_cache" not in given:
            given["use_cache"] = False
        return given

    def prologue(self, batch: Batch, seed: int | None = None) -> Prologue:
        """Run the model up to its first layer and record what every layer is called with.

        ``batch`` holds the model's keyword arguments (``input_ids`` [B, S], ...; labels are ignored). In grad mode the
        graph is kept, see :meth:`Prologue.backward`. For generation the batch carries ``past_key_values`` and
        ``use_cache=True``; blocks then write into that cache. Raises ValueError where the layers are not called
        once each, one after the other.
        """
        records: list[BlockCall] = []
        leaf_of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        first: list[torch.Tensor] = []
        outputs: dict[str, list[Any]] = {}
        live = bool(batch.get("use_cache"))

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            if id(tensor) not in leaf_of:
                leaf_of[id(tensor)] = (tensor, tensor.detach().requires_grad_(True))
            return leaf_of[id(tensor)][1]

        def record(value: Any, where: str) -> Any:
            return rebuild(value, leaf, where, share_caches=live)

        def stub_of(index: int, name: str, module: nn.Module) -> Callable[..., Any]:
            def stub(*args: Any, **kwargs: Any) -> Any:
                if index != len(records):
                    raise ValueError(
                        f"layer {name} was called as number {len(records) + 1} where number {index + 1} was due: "
                        "the model does not run its layers once each, in order"
                    )
                where = self._hidden_at(args, kwargs, first, name)
                hidden = args[where] if isinstance(where, int) else kwargs[where]
                if not first:
                    first.append(hidden)
                seen = [
                    None if i == where else record(value, f"argument {i} of {name}") for i, value in enumerate(args)
                ]
                named = {
                    key: None if key == where else record(value, f"{key} of {name}") for key, value in kwargs.items()
                }
                mine = {id(t): t for t in tensors_of([seen, named]) if t.requires_grad}
                records.append(BlockCall(index + 1, module, where, tuple(seen), named, tuple(mine.values()), live))
                if len(records) == len(self._layers):
                    raise _Stop
                return self._answer(module, hidden)

            return stub

        def note(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                outputs.setdefault(name, []).append(rebuild(output, _shape_of, name))

            return hook

        stubs = [(module, stub_of(i, name, module)) for i, (_, name, module) in enumerate(self._layers)]
        with ExitStack() as stack:
            stack.enter_context(self._seeded(seed))
            stack.enter_context(self._forwards(stubs))
            for name, module in self._prologue_pieces:
                stack.callback(module.register_forward_hook(note(name)).remove)
            try:
                self.model(**self._inputs(batch, labels=False))
            except _Stop:
                pass
            else:
                raise ValueError(f"{len(records)} of {len(self._layers)} layers were called in this pass")
        return Prologue(
            first[0],
            tuple(records),
            tuple(source for source, _ in leaf_of.values()),
            tuple(stand for _, stand in leaf_of.values()),
            {name: tuple(values) for name, values in outputs.items()},
        )

    @staticmethod
    def _hidden_at(args: tuple[Any, ...], kwargs: Mapping[str, Any], first: list[torch.Tensor], name: str) -> int | str:
        """Where the hidden state goes; from the second layer on it must be the very tensor that the first was given."""
        if first:
            for place, value in [*enumerate(args), *kwargs.items()]:
                if value is first[0]:
                    return place
            raise ValueError(f"the model works on the hidden state before {name}, outside its layers")
        if args and isinstance(args[0], torch.Tensor):
            return 0
        if isinstance(kwargs.get("hidden_states"), torch.Tensor):
            return "hidden_states"
        raise ValueError(f"{name} is called with no hidden state: arguments {len(args)}, keywords {sorted(kwargs)}")

    def forward(self, call: BlockCall, hidden_BSD: torch.Tensor, seed: int | None = None) -> torch.Tensor:
        """Run one block in the current grad mode: its hidden state out, of the shape that went in.

        Its parameters must be bound. With the same ``seed`` a block drops the same activations again. Raises ValueError
        where the block writes into an argument that other blocks read.
        """
        args, kwargs = call.view(hidden_BSD)
        watched = [t for t in tensors_of([args, kwargs], caches=False) if not t.is_inference()]
        versions = [t._version for t in watched]
        containers = containers_of([args, kwargs])
        with self._seeded(seed):
            out = call.module(*args, **kwargs)
        if [t._version for t in watched] != versions or containers_of([args, kwargs]) != containers:
            raise ValueError(
                f"block {call.unit} ({self._layers[call.unit - 1][1]}) writes into one of its arguments "
                f"{sorted(kwargs)}: it hands state to other layers"
            )
        hidden = out[0] if isinstance(out, tuple | list) else out
        assert isinstance(hidden, torch.Tensor)
        return hidden

    def differentiable(self, calls: Sequence[BlockCall]) -> tuple[torch.Tensor, ...]:
        """The leaves among the arguments of these calls that receive a gradient, each once."""
        return tuple({id(leaf): leaf for call in calls for leaf in call.differentiable}.values())

    def _epilogue_pass(
        self, prologue: Prologue, hidden_BSD: torch.Tensor, batch: Batch, seed: int | None, *, head: bool
    ) -> Any:
        """The model's forward with its prologue's modules and layers stubbed: its output, or the head's input."""
        queues = {name: list(values) for name, values in prologue.stand_ins.items()}
        caught: list[torch.Tensor] = []
        last = self._layers[-1][2]

        def layer_stub(module: nn.Module, at: int | str) -> Callable[..., Any]:
            def stub(*args: Any, **kwargs: Any) -> Any:
                if module is not last:
                    return self._answer(module, args[at] if isinstance(at, int) else kwargs[at])
                if seed is not None and self.draws_random_numbers and self.model.training:
                    self._seed(seed)
                return self._answer(module, hidden_BSD)

            return stub

        def zeros(shape: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(shape, device=self.device)

        def piece_stub(name: str) -> Callable[..., Any]:
            return lambda *_args, **_kwargs: rebuild(queues[name].pop(0), zeros, name)

        def head_stub(hidden: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
            caught.append(hidden)
            raise _Stop

        replaced = [(call.module, layer_stub(call.module, call.hidden_at)) for call in prologue.calls]
        replaced += [(module, piece_stub(name)) for name, module in self._prologue_pieces if name in queues]
        if not head:
            replaced.append((self.base.get_output_embeddings(), head_stub))
        with self._seeded(seed), self._forwards(replaced):
            try:
                output = self.model(**self._inputs(batch, labels=head))
            except _Stop:
                return caught[0]
        assert head, "the model's output embedding was not called"
        return output

    def head_input(
        self, prologue: Prologue, hidden_BSD: torch.Tensor, batch: Batch, seed: int | None = None
    ) -> torch.Tensor:
        """What the output embedding is given: the last block's hidden state [B, S, D] after the final norm.

        The epilogue's own parameters must be bound; neither the embedding's nor the head's weight is needed.
        """
        normed: torch.Tensor = self._epilogue_pass(prologue, hidden_BSD, batch, seed, head=False)
        return normed

    def logits(
        self, prologue: Prologue, hidden_BSD: torch.Tensor, batch: Batch, seed: int | None = None
    ) -> torch.Tensor:
        """The model's own logits [B, S, V] from the last block's hidden state; the head must be bound."""
        unlabelled = {name: value for name, value in batch.items() if name != "labels"}
        logits: torch.Tensor = self._epilogue_pass(prologue, hidden_BSD, unlabelled, seed, head=True).logits
        return logits

    def own_loss(
        self, prologue: Prologue, hidden_BSD: torch.Tensor, batch: Batch, seed: int | None = None
    ) -> torch.Tensor:
        """The model's own loss (a scalar) of ``batch["labels"]`` from the last block's hidden state; the head must be bound."""
        loss: torch.Tensor = self._epilogue_pass(prologue, hidden_BSD, batch, seed, head=True).loss
        return loss
