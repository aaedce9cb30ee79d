"""The check that a configuration passes before its models are cut.

A small random instance of the same configuration must not look at later tokens. It then runs twice
in float32: by its own forward and autograd (the control), and block by block with nothing but the
unit at work holding its parameters. What its head, its blocks and its masks allow is found by
trying. The verdict is kept in memory and in the cache folder, under a hash of the configuration,
the versions and this folder's code."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.cutting.anatomy import Anatomy, CallTrace, dissect, layer_candidates, watch
from blockwalk.cutting.cached_walk import with_cache_form
from blockwalk.cutting.calls import Prologue
from blockwalk.cutting.causality import require_causal
from blockwalk.cutting.cut_model import CutModel, refuse_settings
from blockwalk.cutting.document_borders import find_borders
from blockwalk.cutting.head_form import with_head_form
from blockwalk.cutting.joint_forward import takes_joint_forwards
from blockwalk.cutting.live_changes import head_class, loss_type, of_live_model
from blockwalk.cutting.parameter_writes import refuse_writes
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.cutting.small_instance import SEED, small_batch, small_instance
from blockwalk.cutting.tile_trial import try_tiles
from blockwalk.cutting.unread_outputs import unread_outputs
from blockwalk.cutting.walk_check import compare
from blockwalk.numerics.drawing import own_draws
from blockwalk.plan.parsing import from_plain
from blockwalk.system import cache
from blockwalk.system.deferred_imports import deferred_imports
from blockwalk.system.out_of_memory import is_out_of_memory

OPENING = threading.RLock()
"""Held while a model is opened: transformers sets the process's default dtype for the time of a
constructor, and what is tried on a small instance is tried once."""

_verdicts: dict[str, Anatomy | str] = {}
"""The verdicts of this process on configurations, by key: an anatomy, or the reason to refuse."""


def certified(model: nn.Module) -> CutModel:
    """Return the cut of a model (or of a ``PeftModel`` around one) whose configuration was checked
    on a small instance.

    Raises:
        ValueError: the model cannot be walked block by block, with the reason.
    """
    outer: Any = model
    base = outer.get_base_model() if hasattr(model, "peft_config") else outer
    refuse_settings(base)
    return CutModel(model, of_live_model(model, base, certified_anatomy(base)))


@deferred_imports()  # gradients of plain shapes
def certified_anatomy(model: Any) -> Anatomy:
    """Return the anatomy of a (plain) model's configuration, checked on a small instance of it.

    Raises:
        ValueError: the walk would not be the model's own computation, with the figures.
    """
    key = key_of(model)
    with OPENING:
        if key not in _verdicts:
            verdict = cache.read_sealed(_entry(key), _parsed)
            _verdicts[key] = verdict or _study_and_keep(key, model)
        verdict = _verdicts[key]
    if isinstance(verdict, str):
        raise ValueError(
            f"{type(model).__name__} cannot be walked block by block: {verdict} (tried on a small"
            " instance of its configuration, with a layer of each kind)"
        )
    return verdict


def identity_of(model: Any) -> dict[str, str]:
    """Return the key of a (plain) model's configuration, and a digest of what was concluded from
    it. A checkpoint has both: under one key every run walks alike.

    Raises:
        ValueError: as :func:`certified_anatomy`.
    """
    facts = asdict(certified_anatomy(model))
    del facts["notes"]  # figures of rounding errors, which depend on the number of threads
    digest = cache.key(json.dumps(facts, sort_keys=True).encode())
    return {"key": key_of(model), "digest": digest}


def file_of(key: str) -> Path:
    """Return the file of the cache that keeps the verdict on a configuration."""
    return cache.file_of(_entry(key))


def _entry(key: str) -> str:
    return f"anatomy-{key}"


_SOURCES = cache.source_key(*map(str, sorted(Path(__file__).parent.glob("*.py"))))


def key_of(model: Any) -> str:
    """Return everything that the verdict depends on."""
    import transformers

    excluded = ("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache")
    config = {key: value for key, value in model.config.to_dict().items() if key not in excluded}
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
    verdict: Anatomy | str
    verdict = str(kept["refused"]) if "refused" in kept else from_plain(Anatomy, kept)
    return verdict


def _study_and_keep(key: str, model: Any) -> Anatomy | str:
    verdict: Anatomy | str
    try:
        verdict = study(type(model), model.config)
    # whatever a model raises when it is run in pieces is the reason to refuse it
    except Exception as error:
        if isinstance(error, OSError | ImportError) or is_out_of_memory(error):
            raise  # of the machine as it is now, not of the model
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        verdict = f"{kind}{error}"
        if "meta" in verdict:
            verdict = f"a unit reads a parameter that another one owns ({verdict})"
    kept = {"refused": verdict} if isinstance(verdict, str) else asdict(verdict)
    cache.write_sealed(_entry(key), kept)
    return verdict


def study(cls: Any, config: Any) -> Anatomy:
    """Dissect a small instance of ``config``, find out what it allows, and compare the walk with
    the control.

    Raises:
        ValueError: the model is no sequence of layers, or a figure exceeds
            :data:`blockwalk.cutting.small_instance.TOLERANCE`; with the reason.
    """
    with torch.enable_grad(), own_draws():
        model = small_instance(cls, config)
        batch = small_batch(model.config)
        require_causal(model)
        anatomy = _dissected(model, batch)
        cut = CutModel(model, anatomy)
        anatomy = replace(with_head_form(cut, batch), unread=unread_outputs(cut, batch, SEED))
        anatomy = replace(
            anatomy,
            borders=find_borders(model, anatomy),
            loss_type=loss_type(model),
            head_class=head_class(model),
            joint_forwards=takes_joint_forwards(cut, batch),
        )
        anatomy = with_cache_form(CutModel(model, anatomy))
        tiles = try_tiles(cut, batch)
        anatomy = replace(
            anatomy,
            against_tiles=tiles.reason,
            by_tiles=tiles.by_tiles,
            attended=tiles.attended,
        )
        notes = {"eval": compare(model, anatomy, batch)}
        model.train()
        refuse_writes(model, batch)
        if cut.draws_random_numbers:
            notes["train"] = compare(model, anatomy, batch)
    return replace(anatomy, notes=notes)


def _dissected(model: Any, batch: Mapping[str, Tensor]) -> Anatomy:
    """Return the layers of a model and their calls, as a forward of it shows them."""
    candidates = layer_candidates(model)
    trace = CallTrace()
    handles = watch(model, candidates, trace)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    with torch.no_grad():
        model(**inputs, use_cache=False)
    for handle in handles:
        handle.remove()
    anatomy = dissect(model, candidates, trace)
    return _with_entries(model, anatomy, batch)


def _with_entries(model: Any, anatomy: Anatomy, batch: Mapping[str, Tensor]) -> Anatomy:
    """Return an anatomy that says whether blocks add entries to a dictionary, and later ones read
    them: these fail, or answer otherwise, where nobody hands the entries on. Gemma 4 without shared
    keys adds entries for an assistant model, and reads none."""
    handing = replace(anatomy, hands_on=True)
    dropping = replace(anatomy, drops_entries=True)

    def through(cut: CutModel) -> tuple[Tensor, Prologue]:
        prologue = cut.prologue(batch)
        hidden_BSD = prologue.hidden_BSD
        for call in prologue.calls:
            hidden_BSD = cut.forward(call, hidden_BSD)
        return hidden_BSD, prologue

    with torch.no_grad():
        handed_BSD, prologue = through(CutModel(model, handing))
        if not prologue.calls[0].handed.entries:
            return anatomy
        try:
            dropped_BSD, _ = through(CutModel(model, dropping))
        # whatever a block raises without an entry, it asked for it
        except Exception as error:
            if isinstance(error, OSError | ImportError) or is_out_of_memory(error):
                raise
            return handing
    return dropping if torch.equal(handed_BSD, dropped_BSD) else handing


def require_borders(folder: str | Path) -> None:
    """Raise ValueError for a model that lets one document of a packed row see another."""
    model = build_skeleton(folder)
    if not certified_anatomy(model).borders:
        raise ValueError(
            f"{type(model).__name__} does not keep documents apart that share a row, by positions"
            " or by a mask; set data.packing: false"
        )
