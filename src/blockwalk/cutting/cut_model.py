"""A model cut into prologue, blocks and epilogue, without code of any model's own.

One skeleton pass suffices: every decoder layer's forward gives way to a stub that records its
arguments, and the model's own forward runs. It yields what each layer would have been called with
for this batch. The prologue is that pass up to the last layer's stub, the epilogue the same pass
with the last stub answering the true hidden state.

B batch, S sequence, D hidden, V vocabulary. Units: 0 the prologue, 1..L the blocks, L+1 the
epilogue."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.cutting.anatomy import Anatomy
from blockwalk.cutting.batch_facts import answered
from blockwalk.cutting.block_tiles import EPILOGUE, SEQUENCE_DIM, BlockTiles, kind_of
from blockwalk.cutting.bound_units import BoundUnits, base_of
from blockwalk.cutting.by_part import ByPart, NotByPart
from blockwalk.cutting.calls import (
    BlockCall,
    BlockResult,
    Handed,
    Prologue,
    is_cache,
    rebuild,
)
from blockwalk.cutting.fused_chains import fuse_chains
from blockwalk.cutting.ownership import Part
from blockwalk.cutting.parts_of_rows import attention_of_parts, masks_of_rows
from blockwalk.cutting.recording import Recording
from blockwalk.cutting.rule_masks import long_masks_as_rules
from blockwalk.numerics.codecs.weights import Value
from blockwalk.numerics.device import is_cpu
from blockwalk.numerics.documents import by_document
from blockwalk.numerics.drawing import GLOBAL_DRAWS, DrawingFrom
from blockwalk.numerics.row_tiles import narrow_products
from blockwalk.numerics.sequence_part import SequencePart
from blockwalk.plan.plan import Plan
from blockwalk.plan.sizes import Tiling

log = logging.getLogger(__name__)

ModelInputs = Mapping[str, Any]


class _Stop(Exception):
    """The exception that ends a skeleton pass where nothing after it is wanted."""


def _has_dropout(model: nn.Module) -> bool:
    """Whether a training-mode forward may draw random numbers (dropout, router jitter, stochastic
    depth)."""
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules()):
        return True
    config: Any = getattr(model, "config", None)
    settings: dict[str, Any] = config.to_dict() if config is not None else {}
    parts = [settings, *(value for value in settings.values() if isinstance(value, dict))]
    return any(
        isinstance(value, float) and value > 0 and ("drop" in key or "jitter" in key)
        for part in parts
        for key, value in part.items()
    )


_NO_MODE = nullcontext()


@contextmanager
def _entered(contexts: Sequence[AbstractContextManager[object]]) -> Iterator[None]:
    """Enter contexts, the first first."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


_CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that keep the functions that are called beside its forward."""


@contextmanager
def _attributes(changes: Iterable[tuple[nn.Module, Mapping[str, Any]]]) -> Iterator[None]:
    """Give modules other attributes of their instances, and put the former ones back."""
    former: list[tuple[nn.Module, str, Any]] = []
    try:
        for module, values in changes:
            for name, value in values.items():
                former.append((module, name, module.__dict__.get(name)))
                module.__dict__[name] = value
        yield
    finally:
        for module, name, value in reversed(former):
            if value is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value


def _call(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return module(*args, **kwargs)


def refuse_settings(base: Any) -> None:
    """Raise ValueError for a model whose settings no walk can honour: its steps would differ, or
    read every layer at once."""
    config = base.config
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(base).__name__} is an encoder–decoder: Blockwalk walks decoders only"
        )
    for key in ("layerdrop", "decoder_layerdrop", "encoder_layerdrop"):
        if getattr(config, key, 0.0):
            raise ValueError(
                f"{key} = {getattr(config, key)} skips layers at random, so steps differ in their"
                " walk; set it to 0"
            )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits = True adds a loss that reads every layer's router; set it to"
            " False (the auxiliary loss is then 0)"
        )


class CutModel(BoundUnits):
    """A ``transformers`` causal language model (or a ``PeftModel`` around one) as a sequence of
    units, and the passes over them.

    The modules stay, their parameters come and go (:class:`BoundUnits`). The ``anatomy`` says what
    is called in which order; :func:`blockwalk.cutting.verify.certified` finds and checks it. Raises
    ValueError for a model whose settings no walk can honour, with the reason."""

    def __init__(self, model: nn.Module, anatomy: Anatomy) -> None:
        refuse_settings(base_of(model))
        super().__init__(model, anatomy)
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                # the walk recomputes blocks itself
                module.__dict__["gradient_checkpointing"] = False
        fuse_chains(model)
        self.anatomy = anatomy
        self._call_block: Callable[..., Any] = _call
        self._told = False
        """Whether it was said that long sequences are computed whole."""
        self.tiling: Tiling | None = None
        """Tiles by which long sequences are computed; None: they are computed whole."""
        self.draws_random_numbers = _has_dropout(model)
        """Whether a forward in training mode may draw random numbers."""
        self._generator = torch.default_generator
        """The generator that the unit at work draws from."""
        signature = inspect.signature(self.base.forward).parameters
        self._takes_use_cache = any(
            p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in signature.values()
        )
        # transformers 5.24 gave the argument of some another name, and Mamba's has one of its own
        names = ("past_key_values", "cache", "cache_params")
        self._cache_keyword = next((name for name in names if name in signature), names[0])
        owning = [
            part for part in self._units.pieces if next(part.module.parameters(), None) is not None
        ]
        self._prologue_pieces = [(part.name, part.module) for part in owning if part.unit == 0]

    def walks_documents(self, plan: Plan) -> bool:
        """Whether a batch may be walked as one row of its documents, at the cost of each by itself:
        they are kept apart, attention is computed by them, and no random numbers are drawn for the
        shape of a batch. Under zeroth order losses are those of the batch as it came."""
        attention = self.base.config.get_text_config()._attn_implementation
        split = (
            is_cpu(self.device)
            and attention == "sdpa"
            and plan.estimator.facts.walks_back
            and plan.loss_facts.for_head(custom=self.head.custom).by_chunks
        )
        split = split and self.anatomy.side_by_side
        split = split and not (plan.compile or plan.neftune_noise_alpha or plan.mesh.context > 1)
        prompted = any(
            config.is_prompt_learning for config in getattr(self.model, "peft_config", {}).values()
        )
        return split and bool(self.anatomy.borders) and not (prompted or self.draws_random_numbers)

    def _masks(self, batch: ModelInputs) -> AbstractContextManager[None]:
        """Return the context of a pass in which long masks are rules, and those of a part of rows
        are of whole rows; a compiled block takes none."""
        if "part" in batch:
            return masks_of_rows(batch["part"])
        compiled = self._call_block is not _call
        return nullcontext() if compiled else long_masks_as_rules()

    def compile_blocks(self) -> None:
        """Run blocks through ``torch.compile`` from now on. Parameters are inputs of the compiled
        graph, so that one graph serves all blocks of a kind, whatever is bound; none of a block's
        parameters may then be lazily decoded."""
        self._call_block = torch.compile(_call)

    def _draws(self, seed: int | None) -> bool:
        """Return whether a pass with this seed draws random numbers."""
        return seed is not None and self.draws_random_numbers and self.model.training

    @contextmanager
    def _seeded(self, seed: int | None) -> Iterator[None]:
        """Draw from a generator seeded for this unit, and leave the global ones as they were."""
        if not self._draws(seed):
            yield
            return
        assert seed is not None
        if is_cpu(self.device) and self._call_block is _call:
            self._generator = torch.Generator()
            self._seed(seed)
            with DrawingFrom(self._generator):
                yield
            return
        # a compiled block and an accelerator's operators know torch's own generators alone
        devices = [] if is_cpu(self.device) else [self.device]
        forked = torch.random.fork_rng(devices=devices, device_type=self.device.type)
        with GLOBAL_DRAWS, forked:
            self._generator = torch.default_generator
            self._seed(seed)
            yield

    def _seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)
        if not is_cpu(self.device):
            with torch.accelerator.device_index(self.device.index):
                torch.get_device_module(self.device).manual_seed(seed)

    @contextmanager
    def _forwards(self, replaced: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
        """Let modules answer by other functions for the time of a pass."""
        with _attributes((module, {"forward": function}) for module, function in replaced):
            yield

    @contextmanager
    def _stubs(self, replaced: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
        """Let functions stand for modules in a pass: for their hooks too, which belong to the
        module's turn, once."""
        without: dict[str, Any] = {hooks: OrderedDict() for hooks in _CALL_HOOKS}
        with _attributes((module, {"forward": f, **without}) for module, f in replaced):
            yield

    def _answer(self, module: nn.Module, hidden_BSD: Tensor) -> Any:
        length = self.anatomy.returns[type(module).__name__]
        return (hidden_BSD, *[None] * (length - 1)) if length else hidden_BSD

    def inputs(self, batch: ModelInputs, *, labels: bool) -> dict[str, Any]:
        """Return the model's keyword arguments: the batch with or without its labels, and no cache
        unless it brings one.

        A model that builds its mask without looking at positions gets one that keeps the documents
        of a row apart. One that is run on a part of its rows gets the places of that part."""
        inputs = {name: value for name, value in batch.items() if labels or name != "labels"}
        part: SequencePart | None = inputs.pop("part", None)
        if part is not None:
            inputs |= part.inputs(inputs["input_ids"])
        if self._takes_use_cache and "use_cache" not in inputs:
            inputs["use_cache"] = False
        masked = inputs.keys() & {"attention_mask", "past_key_values"}
        if self.anatomy.borders == "mask" and "position_ids" in inputs and not masked:
            from transformers.masking_utils import create_masks_for_generate

            ids_BS = inputs["input_ids"]
            stand_in = torch.empty(*ids_BS.shape, 1, dtype=self.base.dtype, device=ids_BS.device)
            inputs["attention_mask"] = create_masks_for_generate(
                self.base.config,
                stand_in,
                None,  # no padding
                None,  # no cache
                position_ids=inputs["position_ids"],
            )
        if "past_key_values" in inputs:
            inputs[self._cache_keyword] = inputs.pop("past_key_values")
        return inputs

    def add_noise(self, alpha: float) -> None:
        """Let the embeddings answer with NEFTune's noise in training mode, by transformers' own
        hook."""
        from transformers.integrations.neftune import neftune_post_forward_hook

        embeddings = self.base.get_input_embeddings()
        embeddings.neftune_noise_alpha = alpha
        embeddings.register_forward_hook(neftune_post_forward_hook)
        self.draws_random_numbers = True

    def prologue(self, batch: ModelInputs, seed: int | None = None) -> Prologue:
        """Run the model up to its first layer and record what every layer is called with.

        ``batch`` holds the model's keyword arguments (``input_ids`` [B, S], ...; labels are
        ignored). In grad mode the graph is kept, see :meth:`Prologue.roots`. For generation the
        batch carries ``past_key_values`` and ``use_cache=True``; blocks then write into that cache.
        Raises ValueError where the layers are not called once each, one after the other."""
        masked = batch.keys() & {"attention_mask", "past_key_values"}
        attention_mode = by_document(None if masked else batch.get("position_ids"), self.base.dtype)
        if "part" in batch:
            attention_mode = attention_of_parts
        layers = self._units.layers
        live = bool(batch.get("use_cache"))
        recording = Recording(attention_mode, live=live, hands_on=self.anatomy.hands_on)

        def stub_of(layer: Part) -> Callable[..., Any]:
            def stub(*args: Any, **kwargs: Any) -> Any:
                arguments: Any = {**dict(enumerate(args)), **kwargs}
                hidden_BSD = recording.record_call(layer, arguments)
                if len(recording.calls) == len(layers):
                    raise _Stop
                return self._answer(layer.module, hidden_BSD)

            return stub

        with ExitStack() as stack:
            stack.enter_context(self._seeded(seed))
            stack.enter_context(self._stubs([(part.module, stub_of(part)) for part in layers]))
            stack.enter_context(answered(batch))
            stack.enter_context(self._masks(batch))
            for name, module in self._prologue_pieces:
                hook = module.register_forward_hook(recording.hook_of(name))
                stack.callback(hook.remove)
            try:
                self.model(**self.inputs(batch, labels=False))
            except _Stop:
                pass
            else:
                called = len(recording.calls)
                raise ValueError(f"{called} of {len(layers)} layers were called in this pass")
        return recording.prologue()

    @torch.no_grad()
    def prologue_of_zeros(self, batch: ModelInputs) -> Prologue:
        """Return the prologue of a batch whose parameters read as zeros, where they are not bound:
        what layers are called with, beside the hidden state, depends on the batch alone
        (:mod:`blockwalk.walk.stages_check`)."""
        with self.zeros_in_prologue():
            return self.prologue(batch)

    def forward(self, call: BlockCall, hidden_BSD: Tensor, seed: int | None = None) -> Tensor:
        """Run one block in the current grad mode: its hidden state out, of the shape that went in.
        See :meth:`run`."""
        return self.run(call, hidden_BSD, seed).hidden_BSD

    def tile(self, length: int, block: nn.Module | None = None) -> int:
        """Return the positions of a tile of a sequence of this length, in a block or in the
        epilogue; 0 where it is computed whole."""
        if self.tiling is None or length <= self.tiling.threshold:
            return 0
        reason = self.anatomy.against_tiles
        if reason and self.anatomy.by_tiles:
            kind = EPILOGUE if block is None else kind_of(block)
            reason = "" if kind in self.anatomy.by_tiles else reason
        if self.draws_random_numbers and self.model.training:
            reason = "it draws random numbers in training, as dropout does"
        if reason:
            if not self._told:
                some = " in some layers" if self.anatomy.by_tiles else ""
                log.warning("long sequences are computed whole%s, not by tiles: %s", some, reason)
            self._told = True
            return 0
        return self.tiling.size

    def _by_tiles(
        self,
        call: BlockCall,
        arguments: Mapping[int | str, Any],
        *,
        reads_answer: bool,
        uses_up: bool,
    ) -> Tensor | None:
        """Run one block by tiles of the sequence; None where it is to be run whole."""
        size = self.tile(arguments[call.hidden_at].shape[1], call.module)
        if not size or call.leaves or call.hands_on or self._call_block is not _call:
            return None
        if any(map(is_cache, arguments.values())):
            return None

        @contextmanager
        def around() -> Iterator[None]:
            with narrow_products(arguments[call.hidden_at]), call.attention_mode:
                yield

        return BlockTiles(
            call.module, arguments, call.hidden_at, size, around, self.anatomy.attended
        ).run(reads_answer=reads_answer, uses_up=uses_up)

    def run(
        self,
        call: BlockCall,
        hidden_BSD: Tensor,
        seed: int | None = None,
        *,
        reads_answer: bool = True,
        uses_up: bool = False,
    ) -> BlockResult:
        """Run one block in the current grad mode: its hidden state, of the shape that went in, and
        what it hands on.

        Its parameters must be bound. With the same ``seed`` a block drops the same activations
        again. Where nobody ``reads_answer``, and gradients alone are wanted, zeros may stand for
        the hidden state. A long sequence is computed by tiles where the model's cut allows it,
        whose backward ``uses_up`` the gradient of the hidden state where it may: writes over it.
        Raises ValueError where the block writes into an argument that other blocks read, but for
        entries that it adds to a dictionary."""
        arguments = call.arguments_of(hidden_BSD)
        watched = call.watched(arguments)
        before = call.writes(arguments, watched)
        dictionaries = {}
        if self.anatomy.hands_on or self.anatomy.drops_entries:
            dictionaries = {key: dict(arguments[key]) for key in call.dictionaries}
        out: Any = self._by_tiles(call, arguments, reads_answer=reads_answer, uses_up=uses_up)
        if out is None:
            args = [value for key, value in arguments.items() if type(key) is int]
            kwargs = {key: value for key, value in arguments.items() if type(key) is str}
            with self._modes(call, hidden_BSD, seed):
                out = self._call_block(call.module, args, kwargs)
        handed: list[Tensor] = []
        entries = Handed() if self.anatomy.drops_entries else call.handed
        for key, items in dictionaries.items():
            tensors = entries.take(call.unit, key, arguments[key], items)
            handed += [] if self.anatomy.drops_entries else tensors
        if call.writes(arguments, watched) != before:
            raise ValueError(
                f"block {call.unit} ({self._units.layers[call.unit - 1].canonical}) writes into"
                f" one of its arguments {sorted(key for key in arguments if isinstance(key, str))}:"
                " it hands state to other layers"
            )
        hidden = out[0] if isinstance(out, tuple | list) else out
        assert isinstance(hidden, Tensor)
        return BlockResult(hidden, tuple(handed))

    def _modes(
        self, call: BlockCall, hidden_BSD: Tensor, seed: int | None
    ) -> AbstractContextManager[object]:
        """Return the context that a block runs in: its generator's seed, and its modes unless a
        compiler runs it. Most blocks have none."""
        contexts: list[AbstractContextManager[object]] = []
        if self._draws(seed):
            contexts.append(self._seeded(seed))
        if self._call_block is _call:
            modes = (narrow_products(hidden_BSD), call.attention_mode)
            contexts += [mode for mode in modes if type(mode) is not nullcontext]
        return _entered(contexts) if contexts else _NO_MODE

    def forward_together(
        self, call: BlockCall, hidden_PSD: Tensor, values: Sequence[Mapping[str, Value]]
    ) -> Tensor | None:
        """Run one block, without a graph, on the rows of several forwards at once, for which its
        trainables have these values: a forward after the other. None where the block does not call
        the modules that own them with all rows, once each."""
        of_modules: dict[nn.Module, dict[str, list[Value]]] = {}
        for name in values[0]:
            for place in self._units.places[call.unit][name]:
                of_modules.setdefault(place.module, {})[place.leaf] = [
                    of_forward[name] for of_forward in values
                ]
        parts = [
            ByPart(module, leaves, hidden_PSD, self._placed)
            for module, leaves in of_modules.items()
        ]
        self.bind(call.unit, values[-1])
        try:
            with self._forwards([(part.module, part) for part in parts]):
                out = self.forward(call, hidden_PSD)
        except NotByPart:
            return None
        return out if all(part.called for part in parts) else None

    def _epilogue_pass(
        self,
        prologue: Prologue,
        hidden_BSD: Tensor,
        batch: ModelInputs,
        seed: int | None,
        *,
        head: bool,
        tile: slice | None = None,
    ) -> Any:
        """Return the model's forward with its prologue's modules and layers stubbed: its output, or
        the head's input. The hidden state may be that of a ``tile`` of the sequence."""
        queues = {name: list(values) for name, values in prologue.stand_ins.items()}
        if tile is not None:
            length = batch["input_ids"].shape[1]
            batch = {"input_ids": batch["input_ids"][:, tile]}

            def part(tensor: Tensor) -> Tensor:
                dim = SEQUENCE_DIM.get(tensor.dim())
                if dim is None or tensor.shape[dim] != length:
                    return tensor
                return tensor.narrow(dim, tile.start, tile.stop - tile.start)

            queues = {name: rebuild(values, part, name) for name, values in queues.items()}
        caught: list[Tensor] = []
        last_layer = self._units.layers[-1].module

        def layer_stub(module: nn.Module, at: int | str) -> Callable[..., Any]:
            def stub(*args: Any, **kwargs: Any) -> Any:
                if module is not last_layer:
                    return self._answer(module, args[at] if isinstance(at, int) else kwargs[at])
                if seed is not None and self._draws(seed):
                    self._seed(seed)
                return self._answer(module, hidden_BSD)

            return stub

        def zeros(recorded: Tensor) -> Tensor:
            # of a tensor without storage zeros_like would import torch's symbolic shapes
            return torch.zeros(recorded.shape, dtype=recorded.dtype, device=self.device)

        def piece_stub(name: str) -> Callable[..., Any]:
            return lambda *_args, **_kwargs: rebuild(queues[name].pop(0), zeros, name)

        def head_stub(hidden: Tensor, *_args: Any, **_kwargs: Any) -> Any:
            caught.append(hidden)
            raise _Stop

        replaced = [
            (call.module, layer_stub(call.module, call.hidden_at)) for call in prologue.calls
        ]
        replaced += [
            (module, piece_stub(name)) for name, module in self._prologue_pieces if name in queues
        ]
        if not head:
            replaced.append((self.base.get_output_embeddings(), head_stub))
        passing = (
            self._seeded(seed),
            self._stubs(replaced),
            self.zeros_in_prologue(),
            answered(batch),
            self._masks(batch),
        )
        with ExitStack() as stack, narrow_products(hidden_BSD):
            for context in passing:
                stack.enter_context(context)
            try:
                output = self.model(**self.inputs(batch, labels=head))
            except _Stop:
                return caught[0]
        assert head, "the model's output embedding was not called"
        return output

    def head_input(
        self,
        prologue: Prologue,
        hidden_BSD: Tensor,
        batch: ModelInputs,
        seed: int | None = None,
        tile: slice | None = None,
    ) -> Tensor:
        """Return the output embedding's input: the last block's hidden state [B, S, D] after the
        final norm, or that of a ``tile`` of the sequence, [B, T, D].

        The epilogue's own parameters must be bound; neither the embedding's nor the head's weight
        is needed."""
        normed: Tensor = self._epilogue_pass(
            prologue, hidden_BSD, batch, seed, head=False, tile=tile
        )
        return normed

    def logits(
        self, prologue: Prologue, hidden_BSD: Tensor, batch: ModelInputs, seed: int | None = None
    ) -> Tensor:
        """Return the model's own logits [B, S, V] from the last block's hidden state; the head must
        be bound."""
        unlabelled = {name: value for name, value in batch.items() if name != "labels"}
        logits: Tensor = self._epilogue_pass(
            prologue, hidden_BSD, unlabelled, seed, head=True
        ).logits
        return logits

    def own_loss(
        self, prologue: Prologue, hidden_BSD: Tensor, batch: ModelInputs, seed: int | None = None
    ) -> Tensor:
        """Return the model's own loss (a scalar) of ``batch["labels"]`` from the last block's
        hidden state; the head must be bound."""
        loss: Tensor = self._epilogue_pass(prologue, hidden_BSD, batch, seed, head=True).loss
        return loss
