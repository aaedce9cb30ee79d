"""A writable block store, made and opened. Not a test: no oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import Codec
from blockwalk.tiers.block_store.writable import WritableStore
from blockwalk.tiers.block_store.writer import write_store
from blockwalk.tiers.protocols import TensorSource


def writable_store(
    path: Path,
    source: TensorSource,
    spec: ModelSpec,
    codec: Codec,
    *,
    sync: bool = True,
    **settings: Any,
) -> WritableStore:
    write_store(path, source, spec, codec, generations=2, **settings)
    return WritableStore(path, sync=sync)
