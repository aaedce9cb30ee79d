"""The choice of the codec of frozen weights, for a plan that leaves it open (``frozen: disk ×
auto``).

The rule: the first of raw, int8 and int4a whose weights take at most half of this machine's memory.
Weights that the page cache holds cost no reading, so that rounding them gains nothing; where it
cannot hold them, a step waits for the disk, and fewer bits are fewer bytes (docs/measured.md has
the losses, seconds and bytes that this rests on)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.engine.open_model import as_it_comes, comes_in
from blockwalk.models.folder import listed_parts, model_folder
from blockwalk.numerics.codecs.layout import name_of
from blockwalk.plan.model_spec import encoded_nbytes
from blockwalk.plan.placement import Codec
from blockwalk.plan.plan import Plan
from blockwalk.plan.settings import override
from blockwalk.program.program import human_bytes
from blockwalk.system.paths import StrPath
from blockwalk.system.process_memory import host_memory
from blockwalk.tiers.model_folder.safetensors import read_header

log = logging.getLogger(__name__)

LADDER = (Codec.RAW, Codec.INT8, Codec.INT4A)
"""The codecs that are tried, with the most bits first; the last one is taken where none fits."""
SINGLE = "model.safetensors"
"""The file that holds a whole checkpoint, or is cut in parts."""
SHARE = 0.5
"""The part of the machine's memory that frozen weights may take: the rest is the process's own, and
other programs'."""


def is_open(plan: Plan) -> bool:
    """Return whether a plan leaves the codec of frozen weights to be chosen."""
    return plan.frozen.codec.facts.chosen_later


def chosen(
    plan: Plan, model: StrPath | nn.Module, *, adapters: bool, kept: Codec | None = None
) -> tuple[Plan, str]:
    """Choose the frozen codec of a plan for a model: answer the plan with it, and the reason; none
    where nothing was open.

    Args:
        adapters: whether adapters are trained or read; without them nothing is rounded.
        kept: the codec that the run has had so far.

    Raises:
        ValueError: there is no such model, or the plan does not go with the codec that fits.
    """
    plan = as_it_comes(plan, model)
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
    before = _said.set(True)
    try:
        yield
    finally:
        _said.reset(before)


def say_codec(plan: Plan, model: StrPath | nn.Module, reason: str) -> None:
    """Log the codec that was chosen, with the reason; as a warning where it rounds a model that
    comes in no codes, for answers and gradients are then those of rounded weights."""
    codec = plan.frozen.codec
    if _said.get():
        return
    if codec.encoded and comes_in(model) is None:
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
    sizes = {codec: _stored_bytes(tensors, codec) for codec in LADDER}
    for codec, nbytes in sizes.items():
        if nbytes <= SHARE * memory:
            return (
                codec,
                f"{human_bytes(nbytes)} of weights, at most half of the {human_bytes(memory)} of"
                " memory",
            )
    nbytes = sizes[LADDER[-1]]
    return LADDER[
        -1
    ], f"{human_bytes(nbytes)} of weights, the fewest, of {human_bytes(memory)} of memory"


def _tensors(model: StrPath | nn.Module) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield shape and dtype of each weight: those that the files name where they are here, for a
    skeleton brings the model's own code, which is to come after the tokenizer; else the
    skeleton's."""
    if not isinstance(model, nn.Module):
        folder = model_folder(model, weights=False)
        files = [folder / name for name in listed_parts(folder, SINGLE) or [SINGLE]]
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
