"""Oracle: the bytes of a filled cache as they were written: with any bit of them flipped, an entry
counts as not there, or is mended from its source."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from blockwalk.cli import main
from blockwalk.cutting import verify
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.engine import pack_cache
from blockwalk.models import gguf_folder
from blockwalk.numerics import native
from blockwalk.plan.methods import method
from blockwalk.program.program import OpKind, Shape
from blockwalk.system import cache, remembered_digests
from blockwalk.tiers.block_store.store import INDEX
from blockwalk.tiers.block_store.writer import restore_model_files
from blockwalk.tiers.model_folder.identity import weights_digest
from blockwalk.walk import context_check, timed_units
from blockwalk.walk.unit_costs import UnitCosts
from tests.conftest import TinyRun

FLIPS = 2000
SECONDS = (((OpKind.FORWARD, "block", True), 0.25),)
"""What a timed walk of a model would have answered."""


def fill(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every kind of entry kept in an empty cache."""
    known = verify.certified_anatomy(build_skeleton(model))
    monkeypatch.setenv("BLOCKWALK_CACHE", str(folder))
    monkeypatch.setattr(verify, "_verdicts", {})
    monkeypatch.setattr(verify, "study", lambda cls, config: known)
    monkeypatch.setattr(context_check, "_verdicts", {})
    monkeypatch.setattr(context_check, "study", lambda *arguments: None)
    monkeypatch.setattr(remembered_digests, "_SETTLED", -60.0)
    monkeypatch.setattr(timed_units, "measure", lambda request: SECONDS)
    costs = UnitCosts(model)
    costs(method("plain"), Shape(1, 8))
    assert costs.timed(method("plain"), Shape(1, 8), "a machine") == SECONDS
    context_check.require_parts(model, method("hzp", mesh={"world": 2, "context": 2}))
    monkeypatch.setattr(native, "_loaded", {})
    native.load("codecs")
    packs = folder / "packed" / "of-a-model"
    packs.mkdir(parents=True)
    pack_cache.packed(model, method("mebp").frozen.codec, build_skeleton(model), packs)
    gguf_file = folder.parent / "model.gguf"
    assert main.main(["gguf", str(model), str(gguf_file), "--dtype", "f32"]) == 0
    gguf_folder.folder_of(gguf_file)
    weights_digest(model)


def put(path: Path, content: bytes) -> None:
    """Give a name another file: this process has mapped the one that was there, a library."""
    beside = path.with_name("beside")
    beside.write_bytes(content)
    beside.replace(path)


def reader(path: Path, model: Path) -> Callable[[], bool]:
    """Return whether what reads a file of the cache takes it, with another value than it had: to be
    called once the file has changed."""
    folder = cache.folder()
    whole = path.read_bytes()
    kind = path.relative_to(folder).parts[0]
    if kind == "native":
        stem = path.stem.rpartition("-")[0]

        def takes() -> bool:
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                return native._undamaged(path.parent, descriptor, stem) is not None
            finally:
                os.close(descriptor)

        return takes
    if kind == "gguf":
        return lambda: gguf_folder._stands_for(path.parent)
    if kind != "packed":
        return lambda: cache.read_sealed(path.stem, dict) is not None
    store = path.parent
    if path.name == INDEX:
        return lambda: pack_cache._is_undamaged(store)

    def stays() -> bool:
        restore_model_files(model, store)
        return path.read_bytes() != whole

    return stays


def test_a_flipped_bit_of_the_cache_is_never_taken(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: every file as it was written; of 2,000 flips in all small files, none is taken."""
    folder = tmp_path / "cache"
    fill(tiny_run.model, folder, monkeypatch)
    units = sorted(folder.glob("packed/*/*/unit-*.bin"))
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and path not in units and path.stat().st_size
    ]
    kinds = {path.relative_to(folder).parts[0].partition("-")[0] for path in files}
    assert kinds == {
        *("anatomy", "costs", "digest", "gguf", "native", "packed", "parts", "seconds")
    }
    readers = {path: reader(path, tiny_run.model) for path in files}
    untouched = {path for path in files if path.parent.parent.parent != folder / "packed"}
    assert all(readers[path]() for path in untouched), "the readers take what was written"
    generator = random.Random(7)
    taken: Counter[str] = Counter()
    for number in range(FLIPS):
        path = files[number % len(files)]
        whole = path.read_bytes()
        flipped = bytearray(whole)
        bit = generator.randrange(8 * len(whole))
        flipped[bit // 8] ^= 1 << bit % 8
        put(path, bytes(flipped))
        taken[str(path.relative_to(folder))] += readers[path]()
        put(path, whole)
    assert taken.total() == 0, taken
