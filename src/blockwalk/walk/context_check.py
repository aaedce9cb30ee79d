"""The check that a configuration passes before ranks hold parts of its sequences.

A small random instance walks whole rows, and their parts: all of them in one process, each in a
thread, with what ranks would send handed over in memory. The loss and the gradient of every
parameter must be the whole rows'. A right loss proves little: where a layer sees its own part
alone, losses were right to 4e-4 and gradients wrong by 60 to 100%. The verdict is kept as that on
the walk is (:mod:`blockwalk.cutting.verify`)."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockwalk.cutting import verify
from blockwalk.cutting.block_tiles import kind_of
from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.ownership import find_parts
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.cutting.small_instance import SEED, TOLERANCE, difference, small_instance
from blockwalk.data import batch as batches
from blockwalk.data.batch import Batch, loss_tokens
from blockwalk.numerics import rule_mask, sequence_part
from blockwalk.numerics.drawing import own_draws
from blockwalk.numerics.sequence_part import SequencePart
from blockwalk.plan import row_order
from blockwalk.plan.losses import IGNORE
from blockwalk.plan.plan import Plan
from blockwalk.plan.row_order import part_tokens
from blockwalk.program.state_sizes import epilogue_reads
from blockwalk.system import cache
from blockwalk.system.deferred_imports import deferred_imports
from blockwalk.system.out_of_memory import is_out_of_memory
from blockwalk.system.paths import StrPath

COUNTS = {"keys": (2, 3), "heads": (2, 4)}
"""The numbers of parts that each way is tried with. A small instance has four heads."""
_TOKENS = 13
"""Tokens of the rows that are tried: no number of parts divides them."""
_BORDER = 5
"""The first token of the second document, and tokens that one row lacks."""
_PATIENCE = 60.0
"""Seconds that a part waits for another, before the check ends."""

_verdicts: dict[str, dict[str, str]] = {}
"""The reason to refuse each way, or nothing, by the configuration's key."""


@deferred_imports()  # gradients of plain shapes
def require_parts(model: StrPath | nn.Module, plan: Plan) -> None:
    """Check that ranks may hold parts of a model's sequences, as the plan says.

    Args:
        model: a model's name or folder, or a (Peft)model in memory.
        plan: its mesh, and the way.

    Raises:
        ValueError: a layer would not compute what it computes on whole sequences, with its name and
            the figures; or the heads do not divide among so many ranks.
    """
    count = plan.mesh.context
    if count == 1:
        return
    outer: Any = model if isinstance(model, nn.Module) else build_skeleton(model)
    base = outer.get_base_model() if hasattr(outer, "peft_config") else outer
    name = type(base).__name__
    if any(config.is_prompt_learning for config in getattr(outer, "peft_config", {}).values()):
        raise ValueError(
            f"mesh.context is {count}, and {name} has a prefix, which stands before the first part"
            " alone; set mesh.context: 1"
        )
    anatomy = verify.certified_anatomy(base)
    way = plan.context.way
    heads = getattr(base.config.get_text_config(), "num_attention_heads", count)
    if way == "heads" and heads % count:
        raise ValueError(
            f"context.way is heads, and the {heads} heads of {name} do not divide among"
            f" mesh.context: {count} ranks; set context.way: keys, or mesh.context to a divisor"
        )
    key = cache.key(f"{verify.key_of(base)} {_SOURCES}".encode())
    if key not in _verdicts:
        kept = cache.read_sealed(f"parts-{key}", dict)
        _verdicts[key] = kept or _study_and_keep(key, base, anatomy)
    for reason in [_verdicts[key][tried] for tried in COUNTS if way in (tried, "auto")]:
        if reason:
            raise ValueError(
                f"{name} cannot have its sequences in parts over ranks (mesh.context: {count}):"
                f" {reason}; {_without_dropout(base.config)}set mesh.context: 1"
            )


_ROOMS = (batches, row_order, rule_mask, sequence_part)
_SOURCES = cache.source_key(*(room.__file__ for room in _ROOMS), __file__)


def _without_dropout(config: Any) -> str:
    """Return the entries of a model's configuration that turn its attention's dropout off, in words
    that another remedy follows; empty where it has none."""
    values = config.get_text_config().to_dict()
    names = [
        name for name, value in values.items() if re.search("att.*drop|drop.*att", name) and value
    ]
    entries = ", ".join(f"{name}: 0" for name in names)
    return f"set {entries} in the model's config.json, or " if names else ""


def _study_and_keep(key: str, base: Any, anatomy: Any) -> dict[str, str]:
    verdict = {}
    for way in COUNTS:
        try:
            study(type(base), base.config, anatomy, way, _layers_by_kind(base, anatomy))
            verdict[way] = ""
        # whatever a model raises when it is run in parts is the reason to refuse it
        except Exception as error:
            if isinstance(error, OSError | ImportError) or is_out_of_memory(error):
                raise  # of the machine as it is now, not of the model
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            verdict[way] = f"{kind}{error}"
    cache.write_sealed(f"parts-{key}", verdict)
    return verdict


def _layers_by_kind(model: nn.Module, anatomy: Any) -> dict[str, list[str]]:
    """Return the names of a model's layers, in order, by what is equal for those that run the same
    code."""
    kinds: dict[str, list[str]] = {}
    for layer in find_parts(model, anatomy, str).layers:
        kinds.setdefault(kind_of(layer.module), []).append(layer.canonical)
    return kinds


def study(
    cls: Any,
    config: Any,
    anatomy: Any,
    way: str,
    layers: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Compare the parts of rows of a small instance of ``config`` with the whole rows.

    Args:
        layers: the names of the layers of each kind that the model itself has, which errors name;
            the small instance's own unless given.

    Raises:
        ValueError: a figure exceeds :data:`blockwalk.cutting.small_instance.TOLERANCE`, a layer
            draws random numbers in attention, or it is not of a form that parts can be of.
    """
    attention = config.get_text_config()._attn_implementation
    if attention != "sdpa":
        raise ValueError(
            f"its attention is {attention}, and parts attend by sdpa (scaled_dot_product_attention)"
        )
    with torch.enable_grad(), own_draws():
        cut = CutModel(small_instance(cls, config), anatomy)
        names = _Names(cut, layers or {})
        if cut.head.custom or anatomy.hands_on:
            form = (
                "hand tensors to later ones" if anatomy.hands_on else "end in a loss of their own"
            )
            raise ValueError(f"its layers {form}, which is of whole sequences")
        leaves = _bound(cut)
        for batch in _rows(cut):
            whole = _walk_whole(cut, leaves, batch)
            for count in COUNTS[way]:
                parts = _walk_parts(names, leaves, batch, count, way)
                _require_same(names, whole, parts, count)
        if cut.draws_random_numbers:
            cut.model.train()
            with torch.no_grad():
                _hidden_of_parts(names, batch, COUNTS[way][0], way)


@dataclass(frozen=True)
class _Names:
    """The names, in the model itself, of what a small instance of it has."""

    cut: CutModel
    """The small instance."""
    layers: Mapping[str, Sequence[str]]
    """The model's layers, by kind."""

    def alike(self, unit: int) -> Sequence[str]:
        """Return the model's layers that run the code of the small instance's."""
        (module,) = self.cut.modules(unit)
        return self.layers.get(kind_of(module)) or [self.cut.layer_name(unit)]

    def layer(self, unit: int) -> str:
        """Return the words for a layer: the first of its kind, and how many there are."""
        first, *others = self.alike(unit)
        return f"layer {first}" + (f" (one of {len(others) + 1} of its kind)" if others else "")

    def parameter(self, name: str) -> str:
        """Return the name of a parameter in the first layer of its kind."""
        for unit in range(1, self.cut.epilogue_index):
            own = self.cut.layer_name(unit)
            if name.startswith(f"{own}."):
                return self.alike(unit)[0] + name.removeprefix(own)
        return name


def _rows(cut: CutModel) -> Iterator[Batch]:
    """Yield rows of which one is padded, and rows of two documents where the model keeps these
    apart."""
    generator = torch.Generator().manual_seed(SEED)
    vocab = cut.base.config.get_text_config().vocab_size
    ids_BS = torch.randint(3, vocab, (2, _TOKENS), generator=generator)
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[1, -_BORDER:] = 0
    labels_BS = ids_BS.masked_fill(mask_BS == 0, IGNORE)
    if cut.anatomy.borders:
        places = [*range(_BORDER), *range(_TOKENS - _BORDER)]
        documents_BS = torch.tensor([places, places])
        learnt_BS = ids_BS.masked_fill(documents_BS == 0, IGNORE)
        yield {"input_ids": ids_BS, "position_ids": documents_BS, "labels": learnt_BS}
    yield {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": labels_BS}


def _bound(cut: CutModel) -> dict[str, Tensor]:
    """Bind all units of a small instance; the answer is its parameters by name."""
    leaves = {name: t.requires_grad_() for name, t in cut.take_parameters().items()}
    spec = cut.spec()
    for unit, reads in enumerate([*spec.units[:-1], epilogue_reads(spec)]):
        cut.bind(unit, {param.name: leaves[param.name] for param in reads.params})
    return leaves


@dataclass(frozen=True)
class _Walk:
    """The figures of one walk of some rows."""

    loss: Tensor
    hidden: Sequence[Tensor]
    """The hidden states [N, D] of real tokens after each block: some models number the padding as
    they like."""
    gradients: Mapping[str, Tensor]
    shared: frozenset[int] = frozenset()
    """Blocks in which parts exchanged something."""


def _walk_whole(cut: CutModel, leaves: Mapping[str, Tensor], batch: Batch) -> _Walk:
    prologue = cut.prologue(batch)
    if any(call.differentiable for call in prologue.calls):
        raise ValueError("its layers take arguments that have gradients, of whole sequences")
    hidden = [prologue.hidden_BSD]
    for call in prologue.calls:
        hidden.append(cut.forward(call, hidden[-1]))
    loss = _loss_sum(cut.logits(prologue, hidden[-1], batch), batch["labels"])
    real = _real_tokens(batch)
    states = [h_BSD[real] for h_BSD in hidden[1:]]
    return _walked(loss / loss_tokens(batch), states, leaves)


def _walk_parts(
    names: _Names, leaves: Mapping[str, Tensor], batch: Batch, count: int, way: str
) -> _Walk:
    cut = names.cut
    parts, prologues, hidden, shared = _hidden_of_parts(names, batch, count, way)
    losses = [
        _loss_sum(cut.logits(prologue, of_part[-1], part), part["labels"])
        for part, prologue, of_part in zip(parts, prologues, hidden, strict=True)
    ]
    real = _real_tokens(batch)
    pieces = [tokens for part in parts for tokens in part["part"].pieces]
    places_S = torch.cat([torch.arange(tokens.start, tokens.stop) for tokens in pieces])
    order_S = places_S.argsort()[: real.shape[1]]
    states = [torch.cat(of_block, 1)[:, order_S][real] for of_block in zip(*hidden, strict=True)]
    loss = torch.stack(losses).sum() / loss_tokens(batch)
    return _walked(loss, states, leaves, shared)


def _real_tokens(batch: Batch) -> Tensor:
    """Return which tokens of a batch are no padding, boolean [B, S]."""
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])) != 0


def _walked(
    loss: Tensor,
    hidden: Sequence[Tensor],
    leaves: Mapping[str, Tensor],
    shared: frozenset[int] = frozenset(),
) -> _Walk:
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = zip(leaves, grads, strict=True)
    gradients = {name: grad for name, grad in named if grad is not None}
    return _Walk(loss.detach(), [h_ND.detach() for h_ND in hidden], gradients, shared)


def _loss_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return the summed cross-entropy of the labels from the second on, as
    :class:`blockwalk.estimators.losses.TokenSum` reads them."""
    predicted = labels_BS.shape[1] - 1
    return F.cross_entropy(
        logits_BSV[:, :predicted].flatten(0, 1),
        labels_BS[:, 1:].flatten(),
        ignore_index=IGNORE,
        reduction="sum",
    )


def _hidden_of_parts(
    names: _Names, batch: Batch, count: int, way: str
) -> tuple[list[Any], list[Any], list[list[Tensor]], frozenset[int]]:
    """Run prologue and blocks on every part of a batch, all parts at once.

    Returns:
        The parts, their prologues, the hidden states after each block of each part, and the blocks
        in which the first part exchanged something.
    """
    cut = names.cut
    board = _Board(count)
    parts = [board.part(batch, number, way) for number in range(count)]
    with _naming("what comes before its layers"):
        prologues = [cut.prologue(part) for part in parts]
    hidden: list[list[Tensor]] = [[] for _ in parts]
    shared: set[int] = set()

    def walk(number: int) -> None:
        of_part = prologues[number].hidden_BSD
        for call in prologues[number].calls:
            exchanges = board.exchanges[number]
            with _naming(names.layer(call.unit)):
                of_part = cut.forward(call, of_part)
            hidden[number].append(of_part)
            if not number and board.exchanges[number] > exchanges:
                shared.add(call.unit)

    board.run(walk)
    return parts, prologues, hidden, frozenset(shared)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Say what an error is of."""
    try:
        yield
    except threading.BrokenBarrierError:
        raise
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{place}: {error}") from error


@dataclass
class _Board:
    """The place at which the parts of one process hand over what ranks would send each other."""

    count: int
    slots: list[Any] = field(init=False)
    exchanges: list[int] = field(init=False)
    """Exchanges of each part."""
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [None] * self.count
        self.exchanges = [0] * self.count
        self.barrier = threading.Barrier(self.count, timeout=_PATIENCE)

    def part(self, batch: Batch, number: int, way: str) -> Any:
        """Return one part of a batch, as a rank's walker has it."""
        tokens = part_tokens(batch["input_ids"].shape[1], self.count)
        order = batches.row_order(batch, self.count, tokens)
        tensors = dict(batches.columns(batch, order, number))
        part = SequencePart(
            number,
            order,
            way,
            _BoardExchange(self, number),
            attention_mask_BS=tensors.pop("attention_mask", None),
            position_ids_BS=tensors.pop("position_ids", None),
        )
        return {**tensors, "part": part}

    def share(self, number: int, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all parts, which call this together."""
        self.exchanges[number] += 1
        self.slots[number] = tensor
        self.barrier.wait()
        shared = list(self.slots)
        self.barrier.wait()
        return shared

    def run(self, walk: Callable[[int], None]) -> None:
        """Walk every part, each in a thread.

        Raises:
            ValueError: as the first that failed raised it, or a part ended while others waited.
            TimeoutError: every part waited too long for another, as on a machine that is busy.
        """
        errors: list[BaseException] = []
        grad = torch.is_grad_enabled()

        def work(number: int) -> None:
            try:
                with torch.set_grad_enabled(grad):
                    walk(number)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(n,)) for n in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        causes = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if causes:
            raise causes[0]
        if len(errors) == self.count:
            raise TimeoutError(
                f"the {self.count} parts of a small instance waited more than {_PATIENCE:.0f} s for"
                " one another; start again when this machine is less busy"
            )
        if errors:
            raise ValueError("its parts do not exchange alike")


@dataclass(frozen=True)
class _BoardExchange:
    """The exchange of one part (:class:`blockwalk.numerics.sequence_part.Exchange`)."""

    board: _Board
    number: int

    def gather(self, part_P: Tensor) -> Tensor:
        return torch.stack(self.board.share(self.number, part_P))

    def swap(self, pieces_cP: Tensor) -> Tensor:
        pieces = self.board.share(self.number, pieces_cP)
        return torch.stack([of_part[self.number] for of_part in pieces])


def _require_same(names: _Names, whole: _Walk, parts: _Walk, count: int) -> None:
    """Raise ValueError where parts came to something else than whole rows: the first layer whose
    answers differ is named, or else the gradient that differs most."""
    for unit, (of_parts, of_rows) in enumerate(zip(parts.hidden, whole.hidden, strict=True), 1):
        change = difference(of_parts, of_rows)
        if not change <= TOLERANCE:
            reason = (
                "reads more of other tokens than keys, values and transformers' masks"
                if unit in parts.shared
                else "has state along the sequence, or attention that is not transformers' own"
            )
            raise ValueError(
                f"{names.layer(unit)} {reason}: with {count} parts its answers differ by"
                f" {change:.1e} of their norm (at most {TOLERANCE} is allowed)"
            )
    figures = {"loss": difference(parts.loss, whole.loss)}
    largest = max(float(grad.norm()) for grad in whole.gradients.values())
    for name, of_rows in whole.gradients.items():
        # rounding in a gradient that is zero in exact arithmetic is no difference
        scale = max(float(of_rows.norm()), TOLERANCE * largest)
        of_parts = parts.gradients.get(name, torch.zeros_like(of_rows))
        figures[name] = float((of_parts.double() - of_rows.double()).norm()) / scale
    name = max(figures, key=lambda figure: (figures[figure] != figures[figure], figures[figure]))
    if not figures[name] <= TOLERANCE:
        differs = "the loss" if name == "loss" else f"the gradient of {names.parameter(name)}"
        raise ValueError(
            f"with {count} parts {differs} differs by {figures[name]:.1e} of its norm (at most"
            f" {TOLERANCE} is allowed)"
        )
