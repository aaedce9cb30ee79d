"""``blockwalk merge``: a model with an adapter merged into it, streamed into another folder.

It holds a few rows of one parameter at a time and works on maps whose pages it gives back, so that
neither the model's size nor its largest matrix matters. Its output appears, synced, when it is
whole."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blockwalk.convert.adapter_changes import Change, read_adapter
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.engine.model_weights import open_source
from blockwalk.engine.pack import CHUNK_ELEMENTS, Progress
from blockwalk.models.model_source import ModelSource, model_source
from blockwalk.models.places import adapter_paths, model_paths, refuse_output
from blockwalk.models.saved_template import FILE as TEMPLATE
from blockwalk.models.saved_template import saved_with
from blockwalk.models.stops import GENERATION, learnt_stops, with_stops
from blockwalk.numerics.codecs.weights import DenseWeight
from blockwalk.plan.sizes import spans
from blockwalk.plan.words import counted
from blockwalk.system import atomic_files
from blockwalk.system.paths import StrPath
from blockwalk.tiers.block_store.writer import copy_model_files
from blockwalk.tiers.model_folder import safetensors
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from blockwalk.tiers.model_folder.rewritten import rewritten
from blockwalk.tiers.protocols import WeightSource


def merge(
    model: StrPath,
    adapter_dir: StrPath,
    out_dir: StrPath,
    *,
    dtype: str = "",
    progress: Progress | None = None,
) -> None:
    """Write a model with a LoRA adapter in PEFT's format merged into it, as a Hugging Face model
    folder, streaming.

    Each adapted weight is W + scaling · B·A, computed in float32 and rounded once to W's dtype, or
    to ``dtype``; everything else is copied, under the names that it has there, and with the tensors
    that the model does not use. These are the numbers of PEFT's ``merge_and_unload``, except where
    the adapter changes one of two tied weights: PEFT then changes both, and we untie them, which is
    what the adapter computed. Of a model in codes and of a block store the model's own tensors are
    written, and a warning names others.

    Args:
        model: the name of a model; a block store is decoded (what packing lost stays lost).
        adapter_dir: adapter_config.json and adapter_model.safetensors.
        out_dir: the folder to make; it must not exist.
        dtype: torch's name of the dtype to write in, which a model that comes in codes needs; else
            that of each tensor.
        progress: called with (bytes written, bytes in all) now and then.

    Raises:
        ValueError: an adapter that is no plain LoRA, or not this model's; codes and no ``dtype``;
            an output that exists; a disk that is too full.
    """
    model = model_source(model)
    refuse_output(out_dir, model=model_paths(model), adapter=adapter_paths(adapter_dir))
    if not dtype and model.codec is not None and not model.packed:
        raise ValueError(
            f"{model} is in {model.form}, and a sum of weights and adapter is not: say with --dtype"
            " (bfloat16, float16 or float32) what the merged model is written in; or use the"
            " adapter beside its base, unmerged"
        )
    skeleton = build_skeleton(model)
    changes = read_adapter(adapter_dir, skeleton)
    with closing(_opened(model, skeleton)) as source:
        outputs, untied = _outputs(source, skeleton, changes)
        as_dtype = getattr(torch, dtype) if dtype else None
        parameters = {}
        for name, output in outputs.items():
            stored = source.dtype(output.source)
            written = as_dtype if as_dtype and stored.is_floating_point else stored
            parameters[name] = safetensors.Entry(source.shape(output.source), written)

        def read(name: str) -> Iterator[Tensor]:
            return _merged(source, outputs[name], parameters[name].dtype)

        entries = parameters
        values: Callable[[str], Iterator[Tensor]] = read
        if isinstance(source, CheckpointFolder) and model.codec is None:
            changed = {
                name: parameters[name]
                for name, output in outputs.items()
                if output.is_changed(name)
            }
            tensors = rewritten(source, skeleton, changed, read, as_dtype)
            entries = tensors.entries
            values = tensors.values
        elif isinstance(source, CheckpointFolder) and (unused := source.unused):
            names = ", ".join(unused[:4]) + " ..." * (len(unused) > 4)
            warnings.warn(
                f"{out_dir} is without {counted(len(unused), 'tensor')} of {model} that no"
                f" parameter uses: {names}",
                stacklevel=2,
            )
        total = sum(entry.nbytes for entry in entries.values())
        atomic_files.require_space(out_dir, total, "the merged model")
        written_bytes = 0

        def told(key: str) -> Iterator[Tensor]:
            nonlocal written_bytes
            for part_ND in values(key):
                yield part_ND
                written_bytes += part_ND.nbytes
                if progress is not None:
                    progress(written_bytes, total)

        with atomic_files.atomic_folder(out_dir, sweeps=True) as folder:
            _copy_files(model, adapter_dir, folder, dtype=dtype, untied=untied)
            safetensors.write_shards(folder, entries, told)
            # it loads, and nothing is missing
            _opened(model_source(folder), build_skeleton(folder)).close()


def _opened(model: ModelSource, skeleton: nn.Module) -> WeightSource:
    """Return a model's weights, without a warning of tensors that no parameter uses: they are
    copied, or the merged folder's own warning names them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not use")
        return open_source(model, skeleton)


def _copy_files(
    model: ModelSource, adapter_dir: StrPath, folder: Path, *, dtype: str, untied: bool
) -> None:
    """Write the files beside the weights: the model's, with what the adapter has taught it."""
    copy_model_files(model, folder)
    if template := saved_with(adapter_dir):
        atomic_files.write_bytes(folder / TEMPLATE, template.encode())
    if stops := learnt_stops(adapter_dir):
        atomic_files.write_bytes(folder / GENERATION, with_stops(folder, stops))
    config = atomic_files.read_json(folder / "config.json")
    changed: dict[str, Any] = {"tie_word_embeddings": False} if untied else {}
    if dtype:
        config.pop("torch_dtype", None)  # the older name
        changed["dtype"] = dtype
    if changed:
        atomic_files.write_json(folder / "config.json", {**config, **changed})


class _Output(NamedTuple):
    """One tensor of the merged model: the parameter that it starts from, and what is done to it."""

    source: str
    change: Change | None

    def is_changed(self, name: str) -> bool:
        """Return whether the tensor ``name`` is another one than in the base."""
        return self.change is not None or self.source != name


def _outputs(
    source: WeightSource, model: nn.Module, changes: Mapping[str, Change]
) -> tuple[dict[str, _Output], bool]:
    """Return the merged model's tensors by their canonical names, and whether tied weights had to
    be parted."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    tied = {names[0]: names for names in aliases.values()}
    outputs: dict[str, _Output] = {}
    untied = False
    for name in source.names():
        names: Sequence[str] = tied.get(name, [name])
        if len(names) > 1 and any(alias in changes for alias in names):
            untied = True
            outputs |= {alias: _Output(name, changes.get(alias)) for alias in names}
        else:
            outputs[name] = _Output(name, changes.get(name))
    return outputs, untied


def _merged(source: WeightSource, output: _Output, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield an output's values in a dtype, some rows at a time."""
    name, change = output
    weight = source.weights([name])[name]
    shape = source.shape(name)
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    if isinstance(weight, Tensor):
        weight = DenseWeight(weight.reshape(rows, columns))
    rows_at_once = max(1, CHUNK_ELEMENTS // max(1, columns))
    for start, stop in spans(0, rows, rows_at_once):
        part_ND = weight.rows(start, stop)
        yield part_ND.to(dtype) if change is None else change.rows(part_ND, start, dtype)
        source.release([name])
