"""The check that a configuration passes before its models are cut: causality, then loss and
gradients against the model's own.

A small random instance of the same configuration must not look at later tokens: it would learn from
the very tokens that it is to predict. It then runs twice in float32: by its own forward and
autograd (the control), and block by block with nothing but the unit at work holding its parameters.
The verdict is kept in memory and in the cache folder, under a hash of the configuration, the
versions and this code."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from blockwalk.cutting import anatomy as anatomy_room
from blockwalk.cutting import by_part, calls, cut_model, ownership, shrink, skeleton
from blockwalk.cutting.anatomy import Anatomy, CallTrace, dissect, layer_candidates, watch
from blockwalk.cutting.calls import BlockCall, joined_call
from blockwalk.cutting.cut_model import CutModel, refuse_settings
from blockwalk.plan.parsing import from_plain
from blockwalk.system import cache
from blockwalk.system.out_of_memory import is_out_of_memory

TOLERANCE = 1e-4
"""Largest relative difference (of norms) between the walk and the control, in float32."""
CAUSAL_TOLERANCE = 1e-5
"""Largest change of the logits up to a token, relative to their norm, that other tokens after it
may make, in float32. It is rounding alone: an expert's product has other rows, which moves a
mixture's logits by about 1e-7."""
_CAUSAL_TOKENS = 24
"""Tokens of the rows that causality is tried on: several windows, chunks and blocks of a small
instance."""
_CAUSAL_SETTINGS: Mapping[str, Any] = {
    "is_decoder": True,
    "is_causal": True,
    "causal": True,
    "use_bidirectional_attention": False,
}
"""Settings of ``transformers`` configurations that let a model see later tokens, with the value
that forbids it."""
SEED = 20_26
_known: dict[str, Anatomy | str] = {}


@dataclass(frozen=True)
class Run:
    """A loss, its logits [B, S, V] and the gradient of every parameter, by canonical name."""

    loss: Tensor
    logits: Tensor
    gradients: Mapping[str, Tensor]


def certified(model: nn.Module) -> CutModel:
    """Return the cut of a model (or of a ``PeftModel`` around one) whose configuration was checked
    on a small instance.

    Raises:
        ValueError: the model cannot be walked block by block, with the reason.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    refuse_settings(base)
    return CutModel(model, certified_anatomy(base))


def certified_anatomy(model: Any) -> Anatomy:
    """Return the anatomy of a (plain) model's configuration, checked on a small instance of it.

    Raises ValueError where the walk would not be the model's own computation, with the figures.
    """
    key = _key(model)
    if key not in _known:
        _known[key] = cache.read_json(f"anatomy-{key}", _parsed) or _study_and_keep(key, model)
    verdict = _known[key]
    if isinstance(verdict, str):
        raise ValueError(f"{type(model).__name__} cannot be walked block by block: {verdict}")
    return verdict


_ROOMS = (anatomy_room, by_part, calls, cut_model, ownership, shrink, skeleton)
_SOURCES = cache.source_key(*(room.__file__ for room in _ROOMS), __file__)


def _key(model: Any) -> str:
    """Return everything that the verdict depends on."""
    import transformers

    left_out = ("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache")
    config = {key: value for key, value in model.config.to_dict().items() if key not in left_out}
    code = [_SOURCES.encode()]
    with suppress(OSError, TypeError):  # a class that was typed in has no file
        code.append(Path(inspect.getfile(type(model))).read_bytes())
    facts = [
        type(model).__name__,
        model.config._attn_implementation,
        transformers.__version__,
        torch.__version__,
    ]
    text = json.dumps([facts, config], sort_keys=True, default=str).encode()
    return cache.key(text + b"".join(code))


def _parsed(kept: dict[str, Any]) -> Anatomy | str:
    found: Anatomy | str = str(kept["refused"]) if "refused" in kept else from_plain(Anatomy, kept)
    return found


def _study_and_keep(key: str, model: Any) -> Anatomy | str:
    verdict: Anatomy | str
    try:
        verdict = study(type(model), model.config)
    except (
        Exception
    ) as error:  # whatever a model raises when it is run in pieces is the reason to refuse it
        if isinstance(error, OSError | ImportError) or is_out_of_memory(error):
            raise  # of the machine as it is now, not of the model
        verdict = (
            str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        )
        if "meta" in verdict:
            verdict = f"a unit reads a parameter that another one owns ({verdict})"
    kept = {"refused": verdict} if isinstance(verdict, str) else asdict(verdict)
    cache.write_json(f"anatomy-{key}", kept)
    return verdict


def study(cls: Any, config: Any) -> Anatomy:
    """Dissect a small instance of ``config``, find the form of its head, and compare the walk with
    the control.

    Raises ValueError with the reason where the model is no sequence of layers or any figure exceeds
    ``TOLERANCE``."""
    small = shrink.shrink(config)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = cls._from_config(small, dtype=torch.float32)
        _roughen(model)
        batch = small_batch(model.config)
        model.eval()
        _require_causal(model)
        candidates = layer_candidates(model)
        trace = CallTrace()
        handles = watch(model, candidates, trace)
        with torch.no_grad():
            model(
                **{name: value for name, value in batch.items() if name != "labels"},
                use_cache=False,
            )
        for handle in handles:
            handle.remove()
        anatomy = dissect(model, candidates, trace)
        anatomy = replace(anatomy, hands_on=_hands_on(model, anatomy, batch))
        cut = CutModel(model, anatomy)
        anatomy = replace(_find_head_form(cut, batch), unread=unread_outputs(cut, batch, SEED))
        anatomy = replace(
            anatomy, borders=_find_borders(model, anatomy), together=_go_together(cut, batch)
        )
        notes = {"eval": compare(model, anatomy, batch)}
        model.train()
        _refuse_writes(model, batch)
        if cut.draws_random_numbers:
            notes["train"] = compare(model, anatomy, batch)
    return replace(anatomy, notes=notes)


class _ParameterWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Parameters that operations write into, by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
        self.written: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = {
            **dict(zip([a.name for a in func._schema.arguments], args, strict=False)),
            **(kwargs or {}),
        }
        for argument in func._schema.arguments:
            value = values.get(argument.name)
            if (
                isinstance(value, Tensor)
                and argument.alias_info is not None
                and argument.alias_info.is_write
            ):
                name = self._names.get(value.untyped_storage().data_ptr())
                if name is not None:
                    self.written.add(name)
        return func(*args, **(kwargs or {}))


def _refuse_writes(model: Any, batch: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a model whose forward in training mode writes into its own parameters:
    they are read-only."""
    with torch.no_grad(), _ParameterWrites(model) as writes:
        model(**batch, use_cache=False)
    if writes.written:
        raise ValueError(
            "its forward in training mode writes into its parameters, such as"
            f" {min(writes.written)}, and frozen weights"
            " are read-only"
        )


def _hands_on(model: Any, anatomy: Anatomy, batch: Mapping[str, Tensor]) -> bool:
    """Return whether a block adds entries to a dictionary that later blocks are given."""
    cut = CutModel(model, replace(anatomy, hands_on=True))
    with torch.no_grad():
        prologue = cut.prologue(batch)
        hidden_BSD = prologue.hidden_BSD
        for call in prologue.calls:
            hidden_BSD = cut.forward(call, hidden_BSD)
    return bool(prologue.calls[0].handed.entries)


def _require_causal(model: Any) -> None:
    """Raise ValueError for a model whose logits up to a token change with the tokens after it, with
    the figures."""
    changes_T = later_changes(model)
    worst = int(changes_T.argmax())
    if bool(changes_T[worst] <= CAUSAL_TOLERANCE):
        return
    config = model.config.get_text_config()
    settings = [
        f"; its configuration has {name} = {json.dumps(getattr(config, name))}, and a decoder's"
        f" has {json.dumps(causal)}"
        for name, causal in _CAUSAL_SETTINGS.items()
        if getattr(config, name, causal) not in (causal, None)
    ]
    raise ValueError(
        "it attends to later tokens, as an encoder does, and would read what it is to"
        f" predict{''.join(settings)}. On a small"
        f" instance, other tokens after token {worst + 1} change its logits up to there by"
        f" {float(changes_T[worst]):.1e} of"
        f" their norm (at most {CAUSAL_TOLERANCE} is allowed)"
    )


def later_changes(model: Any) -> Tensor:
    """Return the relative change of the logits up to each token, in float64 [S - 1], when every
    later token becomes another: the larger of those without a mask and under one that hides the
    right end of the rows."""
    generator = torch.Generator().manual_seed(SEED)
    count = _CAUSAL_TOKENS
    vocab = model.config.get_text_config().vocab_size
    ids_S = torch.randint(3, vocab, (count,), generator=generator)
    shift_S = torch.randint(1, vocab - 3, (count,), generator=generator)
    others_S = (ids_S - 3 + shift_S) % (vocab - 3) + 3
    seen_SS = torch.ones(count, count, dtype=torch.bool).tril()
    ids_SS = torch.where(
        seen_SS, ids_S, others_S
    )  # row t: the tokens up to t, then others; the last row: all of them
    mask_SS = torch.ones_like(ids_SS)
    mask_SS[:, -2:] = 0
    changes = []
    for masks in ({}, {"attention_mask": mask_SS}):
        with torch.no_grad():
            logits_SSV = model(input_ids=ids_SS, **masks, use_cache=False).logits
        changes.append(
            torch.tensor(
                [
                    difference(row[:t], logits_SSV[-1, :t])
                    for t, row in enumerate(logits_SSV[:-1], 1)
                ]
            )
        )
    return torch.stack(changes).amax(0)


def _find_head_form(cut: CutModel, batch: Mapping[str, Tensor]) -> Anatomy:
    """Return the soft cap and the scale, out of the configuration's numbers, that turn W·h + b into
    the model's own logits and loss.

    The head's weight is enlarged for the time of the test: only large logits show a cap.
    """
    anatomy = cut.anatomy
    head = cut.base.get_output_embeddings()
    if anatomy.head is None or not isinstance(head, nn.Linear):
        return anatomy
    caps, scales = _head_numbers(cut.base.config)
    with torch.no_grad():
        prologue = cut.prologue(batch)
        hidden = prologue.hidden_BSD
        for call in prologue.calls:
            hidden = cut.forward(call, hidden)
        weight = head.weight.detach().clone()
        head.weight.mul_(100.0)
        own = cut.logits(prologue, hidden, batch)
        own_loss = cut.own_loss(prologue, hidden, batch)
        raw = F.linear(cut.head_input(prologue, hidden, batch), head.weight, head.bias)
        head.weight.copy_(weight)
        for cap, scale in product(caps, scales):
            logits = raw * scale
            logits = torch.tanh(logits / cap) * cap if cap else logits
            if logits.shape != own.shape or difference(logits, own) > TOLERANCE:
                continue
            loss = F.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()
            )
            if difference(loss, own_loss) <= TOLERANCE:
                return replace(anatomy, head_custom=False, soft_cap=cap, scale=scale)
    return anatomy


def _head_numbers(config: Any) -> tuple[list[float | None], list[float]]:
    """Return candidates for the soft cap and the scale (or its inverse): the configuration's
    numbers that are named like them."""
    caps: list[float | None] = [None]
    scales = [1.0]
    for key, value in config.get_text_config().to_dict().items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value:
            continue
        if "softcap" in key or "soft_cap" in key:
            caps.append(float(value))
        elif ("logit" in key or "head" in key) and ("scal" in key or "multiplier" in key):
            scales += [float(value), 1.0 / value]
    return caps, scales


def _find_borders(model: Any, anatomy: Anatomy) -> str:
    """Return the first of the ways in which two documents in one row have the logits that each has
    by itself; empty: none does."""
    ids = small_batch(model.config)["input_ids"][:1]
    positions = torch.tensor([[*range(5), *range(ids.shape[1] - 5)]])
    with torch.no_grad():
        alone = torch.cat(
            [model(input_ids=part, use_cache=False).logits for part in (ids[:, :5], ids[:, 5:])], 1
        )
        for borders in ("positions", "mask"):
            cut = CutModel(model, replace(anatomy, borders=borders))
            with suppress(Exception):  # a model that takes no positions, or no such mask
                packed = model(
                    **cut.inputs({"input_ids": ids, "position_ids": positions}, labels=False)
                ).logits
                if difference(packed, alone) <= TOLERANCE:
                    return borders
    return ""


def _go_together(cut: CutModel, batch: Mapping[str, Tensor]) -> bool:
    """Return whether every block's answer to three batches at once, of one sequence each and of
    two, each with weights of its linear layers and vectors of its own, is its answer to one after
    the other."""
    generator = torch.Generator().manual_seed(SEED)
    named = dict(cut.model.named_parameters())

    def near(tensor: Tensor) -> Tensor:
        return tensor.detach() + torch.randn(tensor.shape, generator=generator)

    few = {rows: {name: each[:rows] for name, each in batch.items()} for rows in (1, 2)}
    for rows, call in ((n, call) for n in few for call in cut.prologue(few[n]).calls):
        params = cut.spec().units[call.unit].params
        linears = cut.linears(call.unit)
        given = {p.name: named[p.name] for p in params if len(p.shape) == 1 or p.name in linears}
        values = [{name: near(tensor) for name, tensor in given.items()} for _ in range(3)]
        hidden = [
            near(torch.zeros(rows, batch["input_ids"].shape[1], cut.spec().hidden_size))
            for _ in values
        ]
        alone = []
        found = None
        with torch.no_grad(), suppress(Exception):  # whatever it raises, it does not take them so
            for each_BSD, own in zip(hidden, values, strict=True):
                cut.bind(call.unit, own)
                alone.append(cut.forward(call, each_BSD))
            if (joined := joined_call([call] * 3, rows, {})) is not None:
                found = cut.forward_together(joined, torch.cat(hidden), values)
        cut.unbind(call.unit)
        if found is None or not difference(found, torch.cat(alone)) <= TOLERANCE:
            return False
    return True


def require_borders(folder: str | Path) -> None:
    """Raise ValueError for a model that lets one document of a packed row see another."""
    model = skeleton.build_skeleton(folder)
    if not certified_anatomy(model).borders:
        raise ValueError(
            f"{type(model).__name__} does not keep documents apart that share a row, by positions"
            " or by a mask; set"
            " data.packing: false"
        )


def require_positions(folder: str | Path, tokens: int) -> None:
    """Raise ValueError where a model has learnt fewer positions than a sequence has tokens: it has
    no row for the others."""
    model: Any = skeleton.build_skeleton(folder)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _POSITIONS.search(name):
            learnt = module.num_embeddings - int(getattr(module, "offset", 0))
            if tokens > learnt == positions:  # others are of pictures
                raise ValueError(
                    f"sequences have up to {tokens} tokens, and the model has learnt {learnt}"
                    f" positions ({name}): lower"
                    f" data.max_length to {learnt}"
                )


_POSITIONS = re.compile(r"(^|\.)(wpe|\w*positions?(_embed\w*)?)$")
"""Names of embeddings of positions: GPT-2's wpe, OPT's embed_positions, the first GPT's
positions_embed."""


def small_batch(config: Any) -> dict[str, Tensor]:
    """Return two sequences of unequal length, right-padded, with labels: ``input_ids``,
    ``attention_mask``, ``labels`` [2, 11]."""
    vocab = config.get_text_config().vocab_size
    ids = torch.randint(3, vocab, (2, 11), generator=torch.Generator().manual_seed(SEED))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _roughen(model: nn.Module) -> None:
    """Spread every parameter, so that no gradient and no difference hides behind a zero or a
    one."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim >= 2:
                noise = torch.randn(param.shape, generator=generator)
                param.copy_(noise * 0.6 / param.shape[-1] ** 0.5)
            else:
                param.add_(torch.randn(param.shape, generator=generator), alpha=0.1)


def control_run(model: Any, cut: CutModel, batch: Mapping[str, Tensor]) -> Run:
    """Return the model's own forward and autograd; each unit seeds the random numbers as the walk
    does."""
    handles = []
    if model.training:
        for unit in range(1, cut.epilogue_index):
            module = cut.modules(unit)[0]
            handles.append(
                module.register_forward_pre_hook(
                    lambda *_, unit=unit: torch.manual_seed(SEED + unit) and None
                )
            )
        handles.append(
            module.register_forward_hook(
                lambda *_: torch.manual_seed(SEED + cut.epilogue_index) and None
            )
        )
    torch.manual_seed(SEED)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    try:
        out = model(**batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    named = zip(
        params, torch.autograd.grad(out.loss, list(params.values()), allow_unused=True), strict=True
    )
    gradients = {anatomy_room.canonical_name(n, cut.adapters): g for n, g in named if g is not None}
    return Run(out.loss.detach(), out.logits.detach(), gradients)


def walk_run(cut: CutModel, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Run:
    """Return the run block by block, to be compared with :func:`control_run`: forward without a
    graph, then every block recomputed with one, last to first.

    ``params`` are the parameters by canonical name, out of the modules; each unit holds its own
    only while at work."""
    last = cut.epilogue_index
    gradients: dict[str, Tensor] = {}
    owned = [[spec.name for spec in unit.params] for unit in cut.spec().units]
    owned[last] += [cut.head.weight] if cut.head.tied else []

    def bind(unit: int) -> dict[str, Tensor]:
        return cut.bind(unit, {name: params[name] for name in owned[unit]})

    def collect(leaves: Mapping[str, Tensor]) -> None:
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad

    first_leaves = bind(0)
    prologue = cut.prologue(batch, SEED)
    cut.unbind(0)
    inputs = [prologue.hidden_BSD.detach()]
    with torch.no_grad():
        for call in prologue.calls:
            bind(call.unit)
            inputs.append(cut.forward(call, inputs[-1], SEED + call.unit))
            cut.unbind(call.unit)
    hidden = inputs.pop().requires_grad_(True)
    leaves = bind(last)
    logits = cut.logits(prologue, hidden.detach(), batch, SEED + last).detach()
    loss = cut.own_loss(prologue, hidden, batch, SEED + last)
    torch.autograd.backward(loss)
    cut.unbind(last)
    collect(leaves)
    grad = hidden.grad
    for call in reversed(prologue.calls):
        leaves = bind(call.unit)
        hidden = inputs.pop().requires_grad_(True)
        result = cut.run(call, hidden, SEED + call.unit)
        seeds = [grad, *(leaf.grad for leaf in call.handed.leaves_of(call.unit))]
        reached = [pair for pair in zip(result.outputs, seeds, strict=True) if pair[1] is not None]
        torch.autograd.backward([output for output, _ in reached], [seed for _, seed in reached])
        cut.unbind(call.unit)
        collect(leaves)
        grad = hidden.grad
    if (roots := prologue.roots(grad, [leaf.grad for leaf in prologue.leaves]))[0]:
        torch.autograd.backward(*roots)
    collect(first_leaves)
    return Run(loss.detach(), logits, gradients)


def difference(walked: Tensor, control: Tensor) -> float:
    """‖walked − control‖ / ‖control‖ in float64 (absolute where the control is zero)."""
    norm = float(control.double().norm())
    return float((walked.double() - control.double()).norm()) / (norm or 1.0)


def compare(model: Any, anatomy: Anatomy, batch: Mapping[str, Tensor]) -> float:
    """Return largest relative difference of loss, logits and gradients. Raises ValueError above
    ``TOLERANCE``, with the figures."""
    cut = CutModel(copy.deepcopy(model), anatomy)
    control = control_run(model, CutModel(model, anatomy), batch)
    walked = walk_run(cut, cut.take_parameters(), batch)
    figures = {
        "loss": difference(walked.loss, control.loss),
        "logits": difference(walked.logits, control.logits),
    }
    largest = max((float(g.norm()) for g in control.gradients.values()), default=0.0)
    for name in control.gradients.keys() | walked.gradients.keys():
        ours = walked.gradients.get(name)
        theirs = control.gradients.get(name)
        if ours is None or theirs is None:
            only = float((ours if theirs is None else theirs).norm())  # type: ignore[union-attr]
            figures[name] = only / (largest or 1.0)
        else:
            # Rounding noise in a gradient that is zero in exact arithmetic (a key's bias) is no
            # difference.
            floor = 1e-4 * largest
            figures[name] = float((ours.double() - theirs.double()).norm()) / max(
                float(theirs.norm()), floor
            )
    wrong = {name: round(value, 6) for name, value in figures.items() if not value <= TOLERANCE}
    if wrong:
        worst = dict(sorted(wrong.items(), key=lambda item: -item[1])[:3])
        raise ValueError(
            f"on a small instance, {'training' if model.training else 'evaluation'} mode,"
            f" {len(wrong)} of {len(figures)} "
            f"figures differ from the model's own, relatively by {worst} (at most {TOLERANCE} is"
            " allowed)"
        )
    return max(figures.values())


def unread_outputs(cut: CutModel, batch: Mapping[str, Tensor], seed: int) -> tuple[str, ...]:
    """Return paths of linear layers inside a block (``mlp.down_proj``) whose output no gradient of
    any block reads.

    Args:
        cut: a small instance with its parameters in place.
        batch: what it is run on, in evaluation and, where it draws random numbers, in training
            mode.
        seed: of the gradients that are handed to the blocks.
    """
    was_training = cut.model.training
    read: set[str] = set()
    unread: set[str] = set()
    for training in (False, True) if cut.draws_random_numbers else (False,):
        cut.model.train(training)
        prologue = cut.prologue(batch, seed)
        hidden_BSD = prologue.hidden_BSD.detach()
        for call in prologue.calls:
            expected = _gradients(cut, call, hidden_BSD, seed)
            for path, module in call.module.named_modules():
                if (
                    isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
                ) and path not in read:
                    handle = module.register_forward_hook(
                        lambda _module, _inputs, output: output + torch.nan
                    )
                    try:
                        same = _same(_gradients(cut, call, hidden_BSD, seed), expected)
                    except (RuntimeError, ValueError, TypeError):
                        same = False  # looked at on the way, or no tensor (a router's tuple)
                    finally:
                        handle.remove()
                    (unread if same else read).add(path)
            with torch.no_grad():
                hidden_BSD = cut.forward(call, hidden_BSD, seed)
    cut.model.train(was_training)
    return tuple(sorted(unread - read))


def _gradients(
    cut: CutModel, call: BlockCall, hidden_BSD: Tensor, seed: int
) -> list[Tensor | None]:
    """Return gradients of a block's input, parameters and differentiable arguments, in that
    order."""
    leaf_BSD = hidden_BSD.clone().requires_grad_()
    parameters = [p for p in call.module.parameters() if p.requires_grad]
    inputs = [leaf_BSD, *parameters, *call.leaves]
    result = cut.run(call, leaf_BSD, seed)
    outputs = [tensor for tensor in result.outputs if tensor.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in outputs]
    return list(torch.autograd.grad(outputs, inputs, grads, allow_unused=True))


def _same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(
        a is b if a is None or b is None else torch.allclose(a, b, rtol=1e-6, atol=1e-9)
        for a, b in pairs
    )
