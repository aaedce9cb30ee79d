"""``blockwalk convert``: checkpoints as ``torch.distributed.checkpoint`` reads and writes them.

A first-order checkpoint becomes a folder of torch's Hugging Face storage writer, safetensors
without a pickle: ``param.NAME`` are the trainables' masters, ``exp_avg.NAME`` and the other states
of the rule lie beside them, float32 and in the parameters' shapes. Such a folder becomes a
checkpoint again, and so does FSDP's, whose optimizer states are in it; the weights of any such
folder become a model."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from blockwalk.checkpoints.distributed import write_folder
from blockwalk.checkpoints.pieces import Pieces, Saved, refuse_format_1
from blockwalk.checkpoints.run_checkpoint import SCALARS
from blockwalk.convert.dcp_folder import SpreadTensor, read_folder
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.models.places import refuse_output
from blockwalk.plan.update_rules import RULES
from blockwalk.system import atomic_files
from blockwalk.system.paths import StrPath
from blockwalk.tiers.block_store.writer import copy_model_files
from blockwalk.tiers.model_folder import safetensors
from blockwalk.tiers.model_folder.folder import CheckpointFolder

FACTS = "blockwalk.json"
"""The file beside the tensors with the steps that were done, and what a resumed run must know."""
FILE_BYTES = 1 << 30
"""The most bytes of a file; torch's writer holds the tensors of one at a time."""
_STATES = tuple(dict.fromkeys(state for rule in RULES.values() for state in rule.states))
_OURS = re.compile(rf"(param|{'|'.join(_STATES)})\.(.+)")
_THEIRS = re.compile(rf"(?:\w+\.)?state\.(.+)\.({'|'.join(_STATES)}|step)")
"""Optimizer states as ``get_optimizer_state_dict`` names them, under any name of the optimizer."""
_LORA = re.compile(r"(.+)\.lora_([AB])\.weight")


# ---- to torch ------------------------------------------------------------------------------------


def to_dcp(checkpoint: StrPath, out: StrPath, *, model: StrPath = "") -> int:
    """Write a first-order checkpoint as a folder that ``HuggingFaceStorageReader`` of
    torch.distributed.checkpoint reads; returns the number of its tensors.

    Args:
        checkpoint: a run's ``checkpoint-NNNNNN``.
        out: the folder to make.
        model: the model whose parameters give the shapes; the one of the run unless given.

    Raises:
        ValueError: it is no such checkpoint, ``out`` is there, or a shape is not known.
        Damaged: bytes are not those that were written.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = Path(checkpoint)
    refuse_output(out, checkpoint=[folder])
    refuse_format_1(folder)
    if not (folder / "rank-00000.json").is_file():
        raise ValueError(
            f"{folder} is no checkpoint of a first-order run: give its checkpoint-NNNNNN folder"
        )
    with Saved(folder) as saved:
        names = {tuple(key.rpartition("/")[::2]): numel for key, numel in saved.numel.items()}
        parameters = {name: numel for (name, kind), numel in names.items() if kind == "master"}
        shapes = _shapes(model or _model_of(folder), parameters)
        tensors: dict[str, Tensor] = {}
        files: dict[str, int] = {}
        written = 0
        for (name, kind), numel in names.items():
            key = f"{'param' if kind == 'master' else kind}.{name}"
            flat_P = torch.empty(numel)
            saved.read_into(f"{name}/{kind}", 0, flat_P)
            tensors[key] = flat_P.view(shapes[name])
            files[key] = 1 + written // FILE_BYTES
            written += flat_P.nbytes
        with atomic_files.atomic_folder(out, sweeps=True) as made:
            writer = HuggingFaceStorageWriter(str(made), fqn_to_index_mapping=files)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it says that there is one process
                save(tensors, storage_writer=writer, no_dist=True)
            facts = {"steps_done": saved.steps_done, "facts": dict(saved.facts)}
            atomic_files.write_json(made / FACTS, facts)
            if (folder / SCALARS).is_file():
                shutil.copyfile(folder / SCALARS, made / SCALARS)
    return len(tensors)


def _model_of(checkpoint: Path) -> str:
    """Return the model that a run's checkpoint names."""
    state = checkpoint / SCALARS
    name = atomic_files.read_sealed(state)["config"]["model"] if state.is_file() else ""
    if not name:
        raise ValueError(f"{checkpoint} does not say of which model it is: name it with --model")
    return str(name)


def _shapes(model: StrPath, parameters: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of trainables, of which the elements are known: those of the model, and of
    LoRA's two matrices beside a linear layer.

    Raises:
        ValueError: the model has no parameter of a name, or of other elements.
    """
    skeleton: Any = build_skeleton(model)
    known = {name: tuple(p.shape) for name, p in skeleton.named_parameters(remove_duplicate=False)}
    transposed = {  # GPT-2's layers keep [in, out]
        name for name, module in skeleton.named_modules() if type(module).__name__ == "Conv1D"
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, numel in parameters.items():
        shape = known.get(name, ())
        lora = _LORA.fullmatch(name)
        base = known.get(f"{lora[1]}.weight", ()) if lora else ()
        if lora and len(base) == 2:
            outputs, inputs = reversed(base) if lora[1] in transposed else base
            shape = (numel // inputs, inputs) if lora[2] == "A" else (outputs, numel // outputs)
        if prod(shape) != numel or not shape:
            raise ValueError(
                f"{name} has {numel} elements, and {model} has {shape or 'no parameter'} of that"
                " name: give the run's base with --model"
            )
        shapes[name] = shape
    return shapes


# ---- from torch ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Flat:
    """A spread tensor as a flat float32 one, assembled when its first rows are asked for and let go
    of after its last."""

    tensor: SpreadTensor
    dtype: ClassVar[torch.dtype] = torch.float32
    _whole: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (prod(self.tensor.shape),)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return elements ``start:stop``."""
        if self._whole is None:
            self._whole = self.tensor.whole().reshape(-1)
        part_P = self._whole[start:stop].to(self.dtype)
        if stop == self.shape[0]:
            self._whole = None
        return part_P


def to_checkpoint(source: StrPath, out: StrPath) -> int:
    """Write a folder of torch.distributed.checkpoint as a first-order checkpoint, which
    ``Walker.load_state`` reads; returns the number of its parameters.

    Args:
        source: what :func:`to_dcp` wrote, or an FSDP run's folder with its optimizer's states.
        out: the checkpoint to make.

    Raises:
        ValueError: a parameter lacks a state that others have, or nothing says how many steps were
            done.
    """
    folder = Path(source)
    refuse_output(out, source=[folder])
    stored = read_folder(folder)
    parameters, states, steps = _sorted(folder, stored)
    facts: dict[str, str] = {}
    if (folder / FACTS).is_file():
        with atomic_files.reading(folder / FACTS):
            noted = json.loads((folder / FACTS).read_text())
            steps = int(noted["steps_done"])
            facts = {str(name): str(value) for name, value in noted["facts"].items()}
    if steps is None:
        raise ValueError(
            f"{folder} has no {FACTS} and no step of an optimizer: it holds no state of training;"
            " its weights become a model with --to model"
        )
    pieces: dict[str, Pieces] = {}
    for name, parameter in parameters.items():
        for kind, tensor in {"master": parameter, **states.get(name, {})}.items():
            pieces[f"{name}/{kind}"] = Pieces(prod(tensor.shape), {0: _Flat(tensor)})
    beside = {}
    if (folder / SCALARS).is_file():
        beside[SCALARS] = (folder / SCALARS).read_text()
    write_folder(Path(out), pieces, steps, beside, facts=facts)
    return len(parameters)


def _sorted(
    folder: Path, stored: Mapping[str, SpreadTensor]
) -> tuple[dict[str, SpreadTensor], dict[str, dict[str, SpreadTensor]], int | None]:
    """Return parameters by name, the states of each by kind, and the steps that an optimizer counts
    (None: it counts none).

    Raises:
        ValueError: parameters have unequal states; both are named.
    """
    ours = {key: match for key in stored if (match := _OURS.fullmatch(key))}
    theirs = {key: match for key in stored if (match := _THEIRS.fullmatch(key))}
    states: dict[str, dict[str, SpreadTensor]] = {}
    parameters: dict[str, SpreadTensor] = {}
    steps: int | None = None
    for key, match in theirs.items():
        name, kind = match.groups()
        if kind == "step":
            steps = int(stored[key].whole())
        else:
            states.setdefault(name, {})[kind] = stored[key]
    for key, match in () if theirs else ours.items():
        kind, name = match.groups()
        if kind == "param":
            parameters[name] = stored[key]
        else:
            states.setdefault(name, {})[kind] = stored[key]
    for name in states if theirs else ():
        candidates = [key for key in (name, f"model.{name}", f"app.model.{name}") if key in stored]
        if not candidates:
            raise ValueError(f"{folder} has states of {name}, and no parameter of that name")
        parameters[name] = stored[candidates[-1]]
    kinds = {name: sorted(states.get(name, {})) for name in parameters}
    for name, of_name in kinds.items():
        first = next(iter(kinds))
        if of_name != kinds[first]:
            raise ValueError(
                f"{folder} has {', '.join(of_name) or 'no states'} of {name}, and"
                f" {', '.join(kinds[first]) or 'no states'} of {first}: a checkpoint needs the same"
                " of both"
            )
    return parameters, states, steps


def to_model(source: StrPath, out: StrPath, *, model: StrPath) -> int:
    """Write the weights of a folder of torch.distributed.checkpoint as a model folder, a tensor at
    a time; returns their number.

    Args:
        source: FSDP's or torchtitan's folder, with the names of transformers, or what
            :func:`to_dcp` wrote of a run that trained all parameters.
        out: the folder to make.
        model: the model of the same architecture that configuration and tokenizer come from.

    Raises:
        ValueError: tensors are missing or of another shape, by name.
    """
    folder = Path(source)
    refuse_output(out, source=[folder])
    skeleton = build_skeleton(model)
    weights = _weights(read_folder(folder), set(skeleton.state_dict()))
    entries = {
        name: safetensors.Entry(tensor.shape, tensor.dtype) for name, tensor in weights.items()
    }
    atomic_files.require_space(out, sum(entry.nbytes for entry in entries.values()), "the model")

    def values(name: str) -> Iterator[Tensor]:
        yield weights[name].whole()

    with atomic_files.atomic_folder(out, sweeps=True) as made:
        copy_model_files(model, made)
        safetensors.write_shards(made, entries, values)
        with closing(CheckpointFolder(made, build_skeleton(made))):
            pass  # it loads, and nothing is missing
    return len(weights)


def _weights(stored: Mapping[str, SpreadTensor], names: set[str]) -> dict[str, SpreadTensor]:
    """Return the weights by the model's names: those under the prefix that most of these have, or
    all tensors but an optimizer's where none fits."""
    prefixes = {key.removesuffix(name) for key in stored for name in names if key.endswith(name)}

    def matches(prefix: str) -> int:
        return sum(prefix + name in stored for name in names)

    best = max(sorted(prefixes), key=matches, default="")
    return {
        key.removeprefix(best): tensor
        for key, tensor in stored.items()
        if key.startswith(best) and not _THEIRS.fullmatch(key)
    }
