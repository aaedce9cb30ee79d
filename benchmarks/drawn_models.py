"""Models at true dimensions whose random weights are made in place: on the device, or in the host
memory that it copies from, by a few kernels a unit, with nothing on the disk.

    with drawn("Qwen2.5-7B", Codec.INT4A, device=device) as model:
        walker = Walker(model, plan, lora=..., device=device)

Codes and scales are those of 64 random rows, encoded once for each width and repeated: every codec
has its own distribution, and the addresses that kernels read are all different."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from benchmarks.common import model_config
from torch import Tensor

from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.cutting.verify import certified
from blockwalk.engine import model_handle, model_weights
from blockwalk.engine.bucket_tensors import STATE
from blockwalk.engine.buckets import Buckets
from blockwalk.engine.frozen import Frozen
from blockwalk.numerics.codecs import codecs
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.weights import Value, opened
from blockwalk.plan.placement import Codec, StateKind
from blockwalk.tiers.block_store.writer import plan_units

ROWS = 64
"""Rows that are encoded, of each width."""
SPREAD = 0.02
"""The standard deviation of weights."""
GROUP = 32
"""Elements that share a scale."""


@functools.lru_cache
def _pattern(codec: Codec, columns: int, dtype: str, device: torch.device) -> tuple[Tensor, ...]:
    """Return the scales and the codes of random rows."""
    layout = Layout((ROWS, columns), codec, dtype, GROUP)
    rows_RD = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(0)) * SPREAD
    bytes_P = torch.empty(layout.nbytes, dtype=torch.uint8)
    codecs.encode_rows(rows_RD, bytes_P, layout, 0)
    bytes_P = bytes_P.to(device)
    return layout.scales(bytes_P), layout.codes(bytes_P)


def draw(name: str, layout: Layout, bytes_P: Tensor) -> None:
    """Write a random parameter into its bytes (uint8 [nbytes], on any device): norms are 1, other
    vectors 0."""
    codes = layout.codes(bytes_P)
    if len(layout.shape) < 2:
        codes.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    elif not layout.codec.encoded:
        codes.normal_(0, SPREAD)
    else:
        pattern = _pattern(layout.codec, layout.columns, layout.dtype, bytes_P.device)
        for target, rows in zip((layout.scales(bytes_P), codes), pattern, strict=True):
            repeated = len(target) // ROWS * ROWS
            repeats = target[:repeated].unflatten(0, (-1, ROWS))
            repeats.copy_(rows.expand_as(repeats))
            target[repeated:].copy_(rows[: len(target) - repeated])


class DrawnSource:
    """Weights that are drawn when they are read (:class:`blockwalk.tiers.protocols.WeightSource`),
    on the device."""

    def __init__(self, config: Any, codec: Codec, device: torch.device) -> None:
        self._device = device
        spec = certified(build_skeleton(config)).spec()
        self._params = {param.name: param for param in spec.params()}
        self._dtype = config.dtype
        units = plan_units(self, spec, codec, GROUP)  # type: ignore[arg-type]
        self._layouts = {p.name: p.layout(GROUP) for unit in units for p in unit.params}

    def names(self) -> Sequence[str]:
        return list(self._params)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._params[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def weights(self, names: Iterable[str]) -> dict[str, Value]:
        return {name: self._drawn(name, self._device) for name in names}

    def _drawn(self, name: str, device: torch.device) -> Value:
        layout = self._layouts[name]
        bytes_P = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        draw(name, layout, bytes_P)
        return opened(layout, bytes_P)

    def stored_as(self, name: str) -> Layout:
        return self._layouts[name]

    def in_place(self, name: str) -> bool:
        return True

    def read_into(self, name: str, out: Tensor) -> None:
        value = self._drawn(name, out.device)
        if isinstance(value, Tensor):
            out.copy_(value)
        else:
            value.read_into(out)

    def read_range_into(self, name: str, start: int, out_P: Tensor) -> None:
        whole = torch.empty(self.shape(name), dtype=out_P.dtype)
        self.read_into(name, whole)
        out_P.copy_(whole.view(-1)[start : start + len(out_P)])

    def prefetch(self, names: Iterable[str]) -> int:
        return 0

    def release(self, names: Iterable[str]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """There is no file."""


def _frozen_tier(home: Any, memories: Any, largest: int) -> Any:
    """:meth:`Frozen._open_tier`, with buckets that are drawn on the device and copied from
    there."""
    plan = home._model.plan
    if home._facts.mapped:
        raise ValueError(f"frozen is {plan.frozen}: drawn weights lie in memory, on no disk")
    tier = memories.buckets(plan.frozen.tier, StateKind.FROZEN, largest)
    for unit, bucket in home._buckets.items():
        bytes_P = torch.empty(bucket.nbytes, dtype=torch.uint8, device=home._model.device)
        for name, layout, part_P in bucket.parts(bytes_P):
            draw(name, layout, part_P)
        tier.write_unit(unit, home._own(bytes_P), 0)
    return tier


def _fill_buckets(home: Any, source: Any) -> None:
    """:meth:`Buckets._fill`, with buckets that are drawn on the device; no checksum is noted."""
    for number, unit in enumerate(home.units):
        bytes_P = torch.zeros(unit.nbytes, dtype=torch.uint8, device=home.device)
        for param in unit.params:
            if STATE not in param.name:
                part_P = bytes_P[param.offset : param.offset + param.nbytes]
                draw(param.name, param.layout(GROUP), part_P)
        if number in home.streamed:
            home.tier.write_unit(number, bytes_P, 0)
        else:
            home._resident[number] = bytes_P


@contextmanager
def drawn(name: str, codec: Codec, dtype: str = "bfloat16", *, device: Any) -> Iterator[str]:
    """Give the folder of a model's configuration. A walker that is made of it inside has random
    weights of that model in ``codec``, on the device and in host memory.

    Raises:
        ValueError: inside, for a plan whose frozen weights lie on the disk.
    """
    config = model_config(name, dtype)
    source = DrawnSource(config, codec, torch.device(device))
    patches = [
        mock.patch.object(module, "open_source", return_value=source)
        for module in (model_weights, model_handle)
    ]
    patches.append(mock.patch.object(Frozen, "_open_tier", _frozen_tier))
    patches.append(mock.patch.object(Buckets, "_fill", _fill_buckets))
    with tempfile.TemporaryDirectory(prefix="blockwalk-drawn-") as folder:
        config.save_pretrained(Path(folder))
        for patch in patches:
            patch.start()
        try:
            yield folder
        finally:
            for patch in patches:
                patch.stop()
