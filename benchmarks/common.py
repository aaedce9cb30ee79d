"""What the benchmarks share: models at true dimensions with random weights, the machine's name,
tables, and bounds."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import shutil
import statistics
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "GOMP_SPINCOUNT", "10000"
)  # as ``blockwalk`` sets both: they have to be there before torch is
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from benchmarks.common_models import MODELS

from blockwalk.plan.placement import Codec

CACHE = Path(
    os.environ.get("BLOCKWALK_BENCH_CACHE", Path.home() / ".cache" / "blockwalk" / "benchmarks")
)
"""Random models are made once and kept here."""


class RandomSource:
    """Random weights of a model at true dimensions, drawn when they are read: N(0, 0.02²), norms 1,
    biases 0."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._shapes = shapes
        self._dtype = dtype

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def weights(self, names: Iterable[str]) -> dict[str, Any]:
        return {
            name: self._matrix(name) if len(self._shapes[name]) > 1 else self._vector(name)
            for name in names
        }

    def _matrix(self, name: str) -> _RandomRows:
        *rows, columns = self._shapes[name]
        return _RandomRows(name, (math.prod(rows), columns), self._dtype)

    def _vector(self, name: str) -> torch.Tensor:
        fill = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        return torch.full(self._shapes[name], fill, dtype=self._dtype)

    def release(self, names: Iterable[str]) -> None:
        """Nothing is kept."""


@dataclass
class _RandomRows:
    """A random matrix [N, D] whose rows depend on their place only."""

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype

    def rows(self, start: int, stop: int) -> torch.Tensor:
        count = (stop - start) * self.shape[1]
        pool = _drawn(self.dtype)
        place = (len(self.name) * 7919 + start * 104729) % len(pool)
        repeated = [pool[place:], *[pool] * (count // len(pool) + 1)]
        return torch.cat(repeated)[:count].view(stop - start, self.shape[1])


@functools.cache
def _drawn(dtype: torch.dtype) -> torch.Tensor:
    """A prime number of draws, which matrices begin at different places of: drawing 7B numbers
    would take minutes."""
    return torch.randn(4_194_301, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)


def random_store(name: str, codec: Codec, dtype: str = "bfloat16") -> Path:
    """A block store of the named model with random weights; made once."""
    path = CACHE / f"{name}-{codec}-{dtype}"
    if not path.exists():
        from blockwalk.cutting.skeleton import build_skeleton
        from blockwalk.cutting.verify import certified
        from blockwalk.tiers.block_store.writer import write_store

        config = model_config(name, dtype)
        skeleton = build_skeleton(config)
        spec = certified(skeleton).spec()
        folder = CACHE / f"{name}-config-{dtype}"
        config.save_pretrained(folder)
        source = RandomSource({p.name: p.shape for p in spec.params()}, getattr(torch, dtype))
        write_store(path, source, spec, codec, copy_from=folder)  # type: ignore[arg-type]
    return path


def installed_text(size: int) -> str:
    """The first so many characters of the Python sources that are installed here."""
    parts: list[str] = []
    for root in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(root).rglob("*.py")):
            parts.append(path.read_text(encoding="utf-8", errors="ignore"))
            size -= len(parts[-1])
            if size <= 0:
                return "".join(parts)[: size or None]
    return "".join(parts)


def with_tokenizer(store: Path, name: str) -> Path:
    """A store of the named model with a tokenizer of as many entries as the model has, trained on
    installed text; made once for each number of entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder = CACHE / f"tokenizer-{MODELS[name]['vocab_size']}"
    if not folder.exists():
        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel()
        trained.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=MODELS[name]["vocab_size"], min_frequency=1, special_tokens=["<|endoftext|>"]
        )
        trained.train_from_iterator(installed_text(40 << 20).splitlines(), trainer)
        fast: Any = PreTrainedTokenizerFast
        fast(tokenizer_object=trained, eos_token="<|endoftext|>").save_pretrained(folder)
    shutil.copytree(folder, store, dirs_exist_ok=True)
    return store


def read_tokenizer(store: Path) -> None:
    """Read a store's tokenizer and some text with it, and let go of it before a model is opened, as
    a run does."""
    from blockwalk.data.tokenizer import load_tokenizer
    from blockwalk.system.heap import give_back, large_returned

    with large_returned():
        tokenizer = load_tokenizer(store)
    tokenizer(installed_text(1 << 17))  # 30,000 tokens, as a call of 256 records has
    del tokenizer
    give_back()


def model_config(name: str, dtype: str = "bfloat16") -> Any:
    from transformers import AutoConfig

    settings = dict(MODELS[name])
    return AutoConfig.for_model(settings.pop("model_type"), dtype=dtype, **settings)


def random_batch(vocab: int, batch: int, sequence: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (batch, sequence), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if "model name" in line
        ]
        model = found[0] if found else model
    kind = torch.accelerator.current_accelerator(check_available=True)
    there = torch.get_device_module(kind) if kind is not None else None
    names = (
        [there.get_device_name(i) for i in range(torch.accelerator.device_count())]
        if there is not None
        else []
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "accelerators": names,
    }


def parser(doc: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    options.add_argument("--json", metavar="FILE", help="write the figures here as well")
    options.add_argument("--check", action="store_true", help="exit 1 where a bound is missed")
    return options


@dataclass(frozen=True)
class Bound:
    """One promise: ``value`` on the right side of ``limit``."""

    name: str
    value: float
    limit: float
    at_most: bool = True
    rests: str = ""
    """The facts that the limit follows from."""

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def finish(arguments: argparse.Namespace, figures: Any, bounds: Sequence[Bound]) -> None:
    """Print the bounds, write the JSON, and exit 1 under ``--check`` if one is missed."""
    for bound in bounds:
        sign = "≤" if bound.at_most else "≥"
        rests = f" ({bound.rests})" if bound.rests else ""
        print(
            f"{'ok    ' if bound.holds else 'MISSED'} {bound.name}: {bound.value:.4g} {sign}"
            f" {bound.limit:.4g}{rests}"
        )
    if arguments.json:
        value = {
            "machine": machine(),
            "figures": figures,
            "bounds": [{**vars(b), "holds": b.holds} for b in bounds],
        }
        Path(arguments.json).write_text(json.dumps(value, indent=1) + "\n")
    if arguments.check and not all(bound.holds for bound in bounds):
        sys.exit(1)


def interleaved(runs: dict[str, Callable[[], float]], repeats: int = 5) -> dict[str, list[float]]:
    """Figures of each run, taken in turn: A B A B …, so that drift of the machine meets all
    alike."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            found[name].append(run())
    return found


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))
