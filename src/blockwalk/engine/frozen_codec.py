"""The choice of the codec of frozen weights, for a plan that leaves it open (``frozen: disk ×
auto``).

The rule: the first of raw, int8 and int4a whose weights take at most half of this machine's memory.
Weights that the page cache holds cost no reading, so that rounding them gains nothing; where it
cannot hold them, a step waits for the disk, and fewer bits are fewer bytes (docs/measured.md has
the losses, seconds and bytes that this rests on)."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from blockwalk.cutting.adapters import adapt
from blockwalk.cutting.peft_models import adapter_parameters
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.models.model_source import SINGLE_FILES, ModelSource, listed_parts, model_source
from blockwalk.numerics.codecs.layout import name_of
from blockwalk.plan.codecs import CODECS
from blockwalk.plan.methods import method
from blockwalk.plan.model_spec import encoded_nbytes
from blockwalk.plan.placement import Codec
from blockwalk.plan.plan import Plan
from blockwalk.plan.settings import override
from blockwalk.program.program import human_bytes
from blockwalk.system.paths import StrPath
from blockwalk.system.process_memory import host_memory
from blockwalk.tiers.model_folder.safetensors import read_header

log = logging.getLogger(__name__)

SHARE = 0.5
"""The part of the machine's memory that frozen weights may take: the rest is the process's own, and
other programs'."""


def stored_codec(model: StrPath | nn.Module) -> Codec | None:
    """Return the codec that most weights of a model's files are in, where it is one of codes; None
    of a model in memory."""
    return None if isinstance(model, nn.Module) else model_source(model).codec


def with_stored_codec(plan: Plan, model: StrPath | nn.Module) -> Plan:
    """Return the plan for a model: where it is packed, or comes in codes, its weights are read as
    they lie if ``frozen`` leaves the codec open or is the row's. One in memory that stays on the
    device whole stays as it is."""
    stays = (
        isinstance(model, nn.Module) and plan.frozen.tier.facts.resident and not plan.home.gathered
    )
    unnamed = plan.frozen.codec.facts.chosen_later or plan.frozen == method(plan.method).frozen
    if not unnamed and not (plan.frozen.codec.encoded and stays):
        return plan
    if stays or (not isinstance(model, nn.Module) and _read_as_stored(model_source(model))):
        return override(plan, {"frozen.codec": str(Codec.RAW)})
    return plan


def _read_as_stored(model: ModelSource) -> bool:
    return model.packed or model.codec is not None


def refuse_rounded(model: StrPath | nn.Module, plan: Plan, lora: Any) -> None:
    """Raise ValueError where parameters of the model itself are trained, and would start from
    rounded values: all of them for want of adapters, or ``modules_to_save`` of a model that comes
    in codes; or where a replay would start from others than rounded ones."""
    origin = f"frozen: {plan.frozen}"
    codec = plan.frozen.codec
    form = str(codec)
    stored = stored_codec(model)
    if isinstance(model, nn.Module) and plan.frozen.tier.facts.resident:
        return  # they stay as they are in memory
    if stored is not None:
        origin = os.fspath(model)  # type: ignore[arg-type]
        codec = stored
        form = model_source(origin).form
    if not codec.encoded:
        return
    if lora is None and not hasattr(model, "peft_config"):
        raise ValueError(
            f"{origin} keeps weights in {form}, and without adapters every weight is trained: it"
            " would start from rounded values; set lora.rank, or the original checkpoint and"
            " frozen: disk × raw"
        )
    options = getattr(lora, "options", {})
    if plan.estimator.facts.ledger and options.get("use_dora"):
        raise ValueError(
            f"{origin} keeps weights in {form}, and DoRA's magnitudes begin as their norms: the"
            f" ledger of method {plan.method!r} would be replayed from those of the original"
            " weights; set frozen: disk × raw, or leave use_dora out"
        )
    if stored is not None and options.get("modules_to_save"):
        trained = adapter_parameters(adapt(build_skeleton(model), lora)).items()
        rounded = [name for name, param in trained if ".lora_" not in name and param.ndim > 1]
        if rounded:
            raise ValueError(
                f"{origin} keeps weights in {form}, and lora.options.modules_to_save trains"
                f" {rounded[0]}: it would start from rounded values; set model to the original"
                " checkpoint, or leave it out"
            )


def is_open(plan: Plan) -> bool:
    """Return whether a plan leaves the codec of frozen weights to be chosen."""
    return plan.frozen.codec.facts.chosen_later


def chosen(
    plan: Plan, model: StrPath | nn.Module, *, adapters: bool, kept: Codec | None = None
) -> tuple[Plan, str]:
    """Choose the frozen codec of a plan for a model.

    Returns:
        The plan with it, and the reason; an empty one where nothing was open.

    Args:
        adapters: whether adapters are trained or read; without them nothing is rounded.
        kept: the codec that the run has had so far.

    Raises:
        ValueError: there is no such model, or the plan does not go with the codec that fits.
    """
    plan = with_stored_codec(plan, model)
    if not is_open(plan):
        return plan, ""
    if kept is not None:
        codec = kept
        reason = "as the run began"
    elif not adapters:
        codec = Codec.RAW
        reason = "without adapters nothing is rounded"
    else:
        codec, reason = _fitting(model)
    return override(plan, {"frozen.codec": str(codec)}), reason


_said: ContextVar[bool] = ContextVar("_said", default=False)


@contextmanager
def already_said() -> Iterator[None]:
    """Log no line on codecs meanwhile: whoever calls has printed its own, or nobody is to read
    it."""
    token = _said.set(True)
    try:
        yield
    finally:
        _said.reset(token)


def say_codec(plan: Plan, model: StrPath | nn.Module, reason: str) -> None:
    """Log the codec that was chosen, with the reason; as a warning where it rounds a model that
    comes in no codes, for answers and gradients are then those of rounded weights."""
    codec = plan.frozen.codec
    if _said.get():
        return
    if codec.encoded and stored_codec(model) is None:
        why = f" (auto: {reason})" if reason else ""
        log.warning(
            "the model is read in %s%s, which rounds its weights; frozen: disk reads them as"
            " they are",
            codec,
            why,
        )
    elif reason:
        log.info("frozen weights are %s (auto: %s)", codec, reason)


def _fitting(model: StrPath | nn.Module) -> tuple[Codec, str]:
    """Return the first codec that fits, and why it does, or that none does."""
    tensors = list(_tensors(model))
    memory = host_memory()[0]
    sizes = {name: _stored_bytes(tensors, Codec(name)) for name in CODECS.tried("frozen")}
    most_bytes_first = sorted(sizes.items(), key=operator.itemgetter(1), reverse=True)
    for name, nbytes in most_bytes_first:
        if nbytes <= SHARE * memory:
            half = f"at most half of the {human_bytes(memory)} of memory"
            return Codec(name), f"{human_bytes(nbytes)} of weights, {half}"
    name, nbytes = most_bytes_first[-1]
    fewest = f"{human_bytes(nbytes)} of weights, the fewest, of {human_bytes(memory)} of memory"
    return Codec(name), fewest


def _tensors(model: StrPath | nn.Module) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield shape and dtype of each weight: those that the files name where they are here, for a
    skeleton brings the model's own code, which is to come after the tokenizer; else the
    skeleton's."""
    if not isinstance(model, nn.Module):
        folder = model_source(model).folder
        files = [
            folder / name for name in listed_parts(folder, SINGLE_FILES[0]) or SINGLE_FILES[:1]
        ]
        if all(file.is_file() for file in files):
            stored = (tensor for file in files for tensor in read_header(file).values())
            yield from ((tensor.shape, name_of(tensor.dtype)) for tensor in stored)
            return
    module = model if isinstance(model, nn.Module) else build_skeleton(model)
    yield from ((tuple(param.shape), name_of(param.dtype)) for param in module.parameters())


def _stored_bytes(tensors: Iterable[tuple[tuple[int, ...], str]], codec: Codec) -> int:
    """Sum the bytes of a model's weights where its matrices are in a codec."""
    return sum(
        encoded_nbytes(shape, dtype, codec if len(shape) > 1 else Codec.RAW)
        for shape, dtype in tensors
    )
