"""A run's header, and ``blockwalk replay`` and ``export``: weights rebuilt from the base and the
ledger, bit for bit.

A step of zeroth order is a handful of scalars, so a fine-tune is a file of kilobytes. The model is
streamed once, unit by unit, however many steps there are: encode a unit as the run had it, apply
every entry in order, write it out."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blockwalk.checkpoints.ledger import NAME, LedgerEntry, read_ledger, write_exported
from blockwalk.cutting.adapters import adapt
from blockwalk.cutting.saved_adapters import save_adapter
from blockwalk.cutting.skeleton import build_skeleton, persistent_buffers
from blockwalk.cutting.verify import certified
from blockwalk.engine.bucket_tensors import BucketTensors, Initial, fill, tensors_in, trainable_spec
from blockwalk.engine.buckets import checksum
from blockwalk.engine.model_weights import open_source
from blockwalk.engine.pack import Progress
from blockwalk.estimators.zeroth_order.updates import apply_all_, rule_of, trained_in_order
from blockwalk.models.hub import file_of
from blockwalk.models.model_source import model_source
from blockwalk.models.places import adapter_paths, model_paths, refuse_output
from blockwalk.numerics.codecs.layout import dtype_of
from blockwalk.numerics.codecs.weights import Value
from blockwalk.numerics.device import chosen
from blockwalk.numerics.noise.key import GENERATOR_VERSION
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.model_spec import ModelSpec, ParamSpec
from blockwalk.plan.noise_kinds import NOISES
from blockwalk.plan.parsing import adapter_settings
from blockwalk.plan.placement import Codec
from blockwalk.plan.table import resolved
from blockwalk.system import atomic_files
from blockwalk.system.paths import StrPath
from blockwalk.tiers.block_store.store import crc32
from blockwalk.tiers.block_store.writer import copy_model_files, plan_units
from blockwalk.tiers.model_folder import safetensors
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from blockwalk.tiers.model_folder.rewritten import rewritten


def replay(
    base: StrPath,
    ledger: StrPath,
    out: StrPath,
    *,
    until: int | None = None,
    progress: Progress | None = None,
    device: str | None = None,
) -> int:
    """Rebuild what a zeroth-order run trained: a model folder, or an adapter in PEFT's format.

    Memory is that of one block (of the whole model where the run's noise was ``mezo``, whose draws
    go through all parameters at once).

    Args:
        base: the model that the run began from: a checkpoint folder or a block store.
        ledger: the run's ``ledger.jsonl``, what :func:`export` made of it, or the hub's repository
            that holds it.
        out: the folder to write; it appears when it is whole.
        until: the last step to apply; all of them unless given.
        progress: called with (bytes of trainables done, bytes in all) now and then.
        device: where steps are applied; unless given ``BLOCKWALK_DEVICE``, or the accelerator where
            there is one.

    Returns:
        Steps applied.

    Raises:
        ValueError: the ledger is damaged or of another version, the base is not the run's, or
            ``out`` exists; or the weights that come out are not those that an exported ledger says.
    """
    header, entries = read_for(ledger, until)
    _refuse_output(out, base, ledger, header)
    with (
        ReplayedRun(Path(base), header, entries, progress, device) as run,
        atomic_files.atomic_folder(out, sweeps=True) as folder,
    ):
        run.write(folder)
    return len(entries)


def export(
    base: StrPath,
    ledger: StrPath,
    out: StrPath,
    *,
    until: int | None = None,
    rebuild: bool = True,
    progress: Progress | None = None,
    device: str | None = None,
) -> tuple[int, int]:
    """Write a fine-tune as one small file: header and steps, which :func:`replay` turns into
    weights where the base is.

    Args: as :func:`replay`, and
        rebuild: replay the run once and write a checksum of its weights into the file, which every
        later replay is compared
            with; without it the base alone is compared, by whoever replays.

    Returns:
        Steps, and the bytes of the file.

    Raises:
        ValueError: as :func:`replay`; or the run began from a saved adapter, which would have to go
            with the file.
    """
    header, entries = read_for(ledger, until)
    _refuse_output(out, base, ledger, header)
    if isinstance(header["lora"], str):
        raise ValueError(
            f"this run began from the adapter in {header['lora']}: a ledger is enough only where a"
            " run begins from its base; hand on the adapter that it trained"
        )
    if rebuild:
        with ReplayedRun(Path(base), header, entries, progress, device) as replayed:
            deque(replayed.units_after(), maxlen=0)
        header = {**header, "result": replayed.result}
    return len(entries), write_exported(out, header, entries)


def _refuse_output(out: StrPath, base: StrPath, ledger: StrPath, header: Mapping[str, Any]) -> None:
    """Refuse an output that exists, or lies over the base, the ledger, or the adapter that the run
    began from."""
    lora = header["lora"]
    adapter = adapter_paths(lora) if isinstance(lora, str) else []
    refuse_output(out, model=model_paths(base), ledger=[file_of(ledger, NAME)], adapter=adapter)


def read_for(ledger: StrPath, until: int | None) -> tuple[dict[str, Any], list[LedgerEntry]]:
    """Return a ledger's header and its steps up to ``until`` (all of them unless given), where this
    version can apply them."""
    header, entries = read_ledger(file_of(ledger, NAME))
    if until is not None and not 0 <= until <= len(entries):
        raise ValueError(f"--until is {until}, and {ledger} has the steps 0 to {len(entries)}")
    if header["noise_version"] != GENERATOR_VERSION:
        raise ValueError(
            f"{ledger} was written with noise of version {header['noise_version']}; this version of"
            f" blockwalk draws version {GENERATOR_VERSION}: replay it with the blockwalk that wrote"
            " it"
        )
    if until not in (None, len(entries)):
        header.pop("result", None)  # it is that of the last step
    return header, entries[:until]


class ReplayedRun:
    """A run that its ledger rebuilds.

    Args:
        base: the model that it began from.
        header: the ledger's header; its ``result``, if any, is what the weights must come to.
        entries: the steps to apply.
        progress, device: as :func:`replay`.
    """

    def __init__(
        self,
        base: Path,
        header: Mapping[str, Any],
        entries: Sequence[LedgerEntry],
        progress: Progress | None,
        device: str | None,
    ) -> None:
        self.device = chosen(device)
        self.base = base
        self.header = header
        self.entries = entries
        self.progress = progress
        self.module: Any = build_skeleton(base)
        self.buffers = persistent_buffers(self.module)
        self.source = open_source(base, self.module)
        lora = header["lora"]
        if lora is not None:
            adapter = lora if isinstance(lora, str) else adapter_settings(lora)
            self.module = adapt(
                self.module,
                adapter,
                seed=header["seed"],
                revision=model_source(base).revision,
                read=lambda name: self.source.weights([name])[name],
            )
        self.cut = certified(self.module)
        self.spec = self._as_it_was(self.cut.spec())
        self.rule = rule_of(header, trained_in_order(self.cut, self.spec), len(entries))
        self._replay_at_once = NOISES[self.rule.zo.noise].replay
        states = self.rule.states
        codec = Codec(header["codec"])
        spec, written_as = trainable_spec(
            self.spec, codec, {name: kept for name, (kept, _) in states.items()}
        )
        begin = {name: value for name, (_, value) in states.items()}
        self.initial = Initial(spec, self.source, self.cut.take_parameters(), begin)
        self.units = list(plan_units(self.initial, spec, written_as, group_size=32))
        self.result = ""
        """A checksum of the trainables after the last entry; there once :meth:`units_after` is
        through."""

    def _as_it_was(self, spec: ModelSpec) -> ModelSpec:
        """Return the model with the run's trainables, in the run's dtypes."""
        trained = {name: (tuple(shape), dtype) for name, shape, dtype in self.header["parameters"]}
        shapes = {p.name: p.shape for p in spec.params()}
        missing = [name for name, (shape, _) in trained.items() if shapes.get(name) != shape]
        if missing:
            raise ValueError(
                f"{self.base} is not what this ledger builds on: it has no {missing[0]} of that"
                " shape"
            )

        def as_trained(p: ParamSpec) -> ParamSpec:
            if p.name not in trained:
                return replace(p, trainable=False)
            return replace(p, trainable=True, dtype=trained[p.name][1])

        return spec.as_stored(as_trained)

    def units_after(self) -> Iterator[dict[str, Value]]:
        """Yield the trainables of each unit in turn, after the last entry; those of the units
        before are no longer held."""
        replayed_bytes = 0
        total = sum(unit.nbytes for unit in self.units)
        in_turn = self._after_at_once() if self._replay_at_once else self._after()
        for unit, trained in zip(self.units, in_turn, strict=True):
            yield trained
            replayed_bytes += unit.nbytes
            if self.progress is not None:
                self.progress(replayed_bytes, total)

    def _after(self) -> Iterator[dict[str, Value]]:
        """Yield the trainables of each unit after the last entry, a unit at a time."""
        scratch = ScratchArena()
        sums = []
        for number in range(len(self.units)):
            bytes_P = self._fill(number)
            tensors = tensors_in(self.units[number], bytes_P)
            apply_all_(self.rule, self.entries, tensors.items(), scratch)
            bytes_P = bytes_P.cpu()
            sums.append(crc32(bytes_P))
            yield values_of(tensors_in(self.units[number], bytes_P))
        self._check(sums)

    def _after_at_once(self) -> Iterator[dict[str, Value]]:
        """Yield the trainables of each unit after the last entry, under the original's noise: its
        draws go through all parameters at once, so that the whole model is held."""
        buckets = [self._fill(number) for number in range(len(self.units))]
        filled = [
            tensors_in(unit, bytes_P) for unit, bytes_P in zip(self.units, buckets, strict=True)
        ]
        tensors = {name: states[""].tensor for cells in filled for name, states in cells.items()}
        apply = resolved(self._replay_at_once)
        apply(self.cut, tensors, self.entries, self.rule)
        buckets = [bytes_P.cpu() for bytes_P in buckets]
        self._check([crc32(bytes_P) for bytes_P in buckets])
        for unit, bytes_P in zip(self.units, buckets, strict=True):
            yield values_of(tensors_in(unit, bytes_P))

    def _fill(self, number: int) -> torch.Tensor:
        """Return a unit's bucket as the run began with it, on the device."""
        bytes_P = torch.zeros(self.units[number].nbytes, dtype=torch.uint8)
        self.units[number] = fill(self.units[number], self.initial, bytes_P)
        return bytes_P.to(self.device)

    def _check(self, sums: Sequence[int]) -> None:
        """Compare the base with the run's, and the CRC of each unit's bytes with that of an
        exported ledger."""
        if checksum(self.units) != self.header["base"]:
            raise ValueError(
                f"{self.base} is not what this ledger builds on: the weights differ from those"
                " that the run began with"
            )
        self.result = hashlib.blake2b(json.dumps(sums).encode(), digest_size=16).hexdigest()
        if self.header.get("result", self.result) != self.result:
            raise ValueError(
                "the weights that came out are not those that the ledger was exported with"
                f" ({self.result}, and not {self.header['result']}); optimizers other than sgd may"
                " differ between builds of torch"
            )

    def write(self, folder: Path) -> None:
        """Write the adapter, or the whole model."""
        if self.header["lora"] is not None:
            trained = [pair for unit in self.units_after() for pair in unit.items()]
            tensors = {name: value for name, value in trained if isinstance(value, torch.Tensor)}
            save_adapter(self.module, tensors, folder)
            return
        copy_model_files(self.base, folder)
        if isinstance(self.source, CheckpointFolder) and model_source(self.base).codec is None:
            self._write_over(self.source, folder)
            return
        entries = {p.name: safetensors.Entry(p.shape, self._dtype(p)) for p in self.spec.params()}
        buffers = self.source.weights(name for name in self.buffers if name in self.source.names())
        entries |= {n: safetensors.Entry(tuple(b.shape), b.dtype) for n, b in buffers.items()}
        values = self._values(buffers)
        safetensors.write_shards(folder, entries, lambda _: safetensors.pieces(next(values)))
        assert next(values, None) is None

    def _write_over(self, source: CheckpointFolder, folder: Path) -> None:
        """Write the base's tensors, with the trained parameters among them."""
        trained = [p for p in self.spec.params() if p.trainable]
        entries = {p.name: safetensors.Entry(p.shape, self._dtype(p)) for p in trained}
        units = self.units_after()
        unit: dict[str, Value] = {}

        def read(name: str) -> Iterator[torch.Tensor]:
            nonlocal unit
            while name not in unit:  # they are asked for in the order of the units
                unit = next(units)
            return safetensors.pieces(unit[name])

        tensors = rewritten(source, self.module, entries, read)
        safetensors.write_shards(folder, tensors.entries, tensors.values)
        for _ in units:  # the last ones check what came out
            pass

    def _dtype(self, param: ParamSpec) -> torch.dtype:
        """Return the dtype that a parameter is written in: its master's dtype, or the model's where
        that is no plain one."""
        codec = Codec(self.header["codec"])
        name = codec.dtype_of(param.dtype) if param.trainable else None
        return self.source.dtype(param.name) if name is None else dtype_of(name)

    def _values(self, buffers: Mapping[str, Value]) -> Iterator[Value]:
        for unit, trained in zip(self.spec.units, self.units_after(), strict=True):
            for p in unit.params:
                yield trained[p.name] if p.trainable else self.source.weights([p.name])[p.name]
        yield from buffers.values()

    def __enter__(self) -> ReplayedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()


def values_of(cells: BucketTensors) -> dict[str, Value]:
    """Return the parameters of a bucket as they lie there."""
    return {name: states[""].value for name, states in cells.items()}
