"""``blockwalk pack`` and ``blockwalk merge``: streaming a model from one folder into another.

Both hold a few rows of one parameter at a time and work on maps whose pages they give back, so that
neither the model's size nor its largest matrix matters. Their output appears, synced, when it is
whole."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blockwalk.cutting.adapters import RESIZED, present_names, refuse_parted
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.engine.model_weights import open_source
from blockwalk.engine.pack import CHUNK_ELEMENTS, Progress
from blockwalk.models.model_source import model_source
from blockwalk.models.places import adapter_paths, model_paths, refuse_output
from blockwalk.models.saved_template import FILE as TEMPLATE
from blockwalk.models.saved_template import saved_with
from blockwalk.models.stops import GENERATION, learnt_stops, with_stops
from blockwalk.numerics.codecs.weights import DenseWeight
from blockwalk.plan.sizes import spans
from blockwalk.system import atomic_files
from blockwalk.system.paths import StrPath
from blockwalk.tiers.block_store.writer import copy_model_files
from blockwalk.tiers.model_folder import safetensors
from blockwalk.tiers.model_folder.folder import CheckpointFolder
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
    to ``dtype``; everything else is copied. These are the numbers of PEFT's ``merge_and_unload``,
    except where the adapter changes one of two tied weights: PEFT then changes both, and we untie
    them, which is what the adapter computed.

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
    source = open_source(model, skeleton)
    try:
        outputs, untied = _outputs(source, skeleton, changes)
        stored = {key: source.dtype(output.source) for key, output in outputs.items()}
        written = {
            key: getattr(torch, dtype) if dtype and own.is_floating_point else own
            for key, own in stored.items()
        }
        entries = {
            key: safetensors.Entry(source.shape(out.source), written[key])
            for key, out in outputs.items()
        }
        total = sum(entry.nbytes for entry in entries.values())
        atomic_files.require_space(out_dir, total, "the merged model")
        done = 0

        def values(key: str) -> Iterator[Tensor]:
            nonlocal done
            for part_ND in _merged(source, outputs[key], entries[key].dtype):
                yield part_ND
                done += part_ND.nbytes
                if progress is not None:
                    progress(done, total)

        with atomic_files.atomic_folder(out_dir) as folder:
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
            safetensors.write_shards(folder, entries, values)
            CheckpointFolder(
                folder, build_skeleton(folder)
            ).close()  # it loads, and nothing is missing
    finally:
        source.close()


@dataclass(frozen=True, slots=True)
class Change:
    """The change that an adapter makes to one parameter [N, D]: replace it, then add scaling · left
    [N, R] · right [R, D], then give each row the norm that ``magnitude_N`` says."""

    replacement: Tensor | None = None
    left_NR: Tensor | None = None
    right_RD: Tensor | None = None
    scaling: float = 1.0
    magnitude_N: Tensor | None = None

    def rows(self, base_ND: Tensor, start: int, dtype: torch.dtype) -> Tensor:
        """Return the changed rows ``start`` … of a parameter whose rows there are ``base_ND``,
        rounded once to ``dtype``."""
        stop = start + base_ND.shape[0]
        out_ND = (
            base_ND
            if self.replacement is None
            else self.replacement.view(-1, base_ND.shape[1])[start:stop]
        )
        if self.left_NR is not None and self.right_RD is not None:
            delta_ND = (self.left_NR[start:stop] @ self.right_RD).mul_(self.scaling)
            out_ND = delta_ND.add_(out_ND)
        if self.magnitude_N is not None:
            out_ND = out_ND * (
                self.magnitude_N[start:stop] / torch.linalg.vector_norm(out_ND, dim=1)
            ).unsqueeze(1)
        return out_ND.to(dtype)


_HONOURED = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_bias", "lora_dropout",
    "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
"""Keys of adapter_config.json that leave the merged weight W + scaling · B·A, or that the tensors
themselves express."""
_INITIALISERS = (True, False, None, "gaussian", "orthogonal", "eva")
"""``init_lora_weights`` that leave the base weights as they are in the checkpoint."""
_LORA_KEY = re.compile(
    r"(?P<module>.+)\.lora_(embedding_)?(?P<factor>[AB]|magnitude_vector)(\.(?P<leaf>weight|bias))?"
)


def read_adapter(adapter_dir: StrPath, model: nn.Module) -> dict[str, Change]:
    """Return changes that an adapter in PEFT's format makes to ``model`` (a skeleton will do), by
    parameter name.

    Ranks, alphas and their patterns, rslora, DoRA, Conv1D and embedding layers, ``lora_bias``,
    trained biases and ``modules_to_save`` are honoured.

    Raises:
        ValueError: no adapter, no plain LoRA (with the setting that makes it another), or one for
            another model.
    """
    from peft import PeftConfig
    from peft.utils.other import get_pattern_key
    from safetensors.torch import load_file
    from transformers.pytorch_utils import Conv1D

    folder = Path(adapter_dir)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no adapter in PEFT's format: it has no {name}")
    config: dict[str, Any] = atomic_files.read_json(folder / "adapter_config.json")
    _refuse_variants(folder, config)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    factors: dict[str, dict[str, Tensor]] = {}
    replacements: dict[str, Tensor] = {}
    tensors = load_file(folder / "adapter_model.safetensors")
    if any(
        ".lora_" in key and _plain(key).partition(".lora_")[0] not in modules for key in tensors
    ):
        tensors = present_names(model, PeftConfig.from_pretrained(str(folder)), tensors)
    tensors = {_plain(key): tensor for key, tensor in tensors.items()}
    refuse_parted(model, tensors, config, folder / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        found = _LORA_KEY.fullmatch(name)
        if found:
            factor = found["factor"] + ("_bias" if found["leaf"] == "bias" else "")
            factors.setdefault(found["module"], {})[factor] = tensor.float()
        else:
            replacements[re.sub(_WRAPPERS, ".", name)] = tensor

    changes = {name: Change(replacement=tensor) for name, tensor in replacements.items()}
    for name, factor_of in factors.items():
        if (
            not {"A", "B"} <= factor_of.keys()
            or name not in modules
            or f"{name}.weight" not in parameters
        ):
            raise ValueError(
                f"{folder} is not an adapter of {type(model).__name__}: {name} has no weight, or"
                " A or B"
            )
        a = factor_of["A"]
        b = factor_of["B"]
        turned = isinstance(
            modules[name], Conv1D | torch.nn.Embedding
        )  # their weights are [input, output]
        left_NR, right_RD = (a.T, b.T) if turned else (b, a)
        rank = a.shape[0]
        alphas: dict[str, float] = config.get("alpha_pattern") or {}
        alpha = alphas.get(get_pattern_key(list(alphas), name), config["lora_alpha"])
        scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        replacement = replacements.get(f"{name}.weight")
        magnitude_N = factor_of.get("magnitude_vector")
        if turned and magnitude_N is not None:
            raise ValueError(
                f"{folder} has DoRA on {name}, whose norms are not of rows: merge it with PEFT"
            )
        changes[f"{name}.weight"] = Change(replacement, left_NR, right_RD, scaling, magnitude_N)
        if "B_bias" in factor_of:
            if f"{name}.bias" not in parameters:
                raise ValueError(
                    f"{folder} has lora_bias, a bias for {name}, which has none in"
                    f" {type(model).__name__}: there is no"
                    " tensor to merge it into. Use the adapter beside its base, or train it with"
                    " lora_bias: false"
                )
            column_N1 = factor_of["B_bias"].unsqueeze(1)
            changes[f"{name}.bias"] = Change(
                replacements.get(f"{name}.bias"), column_N1, torch.ones(1, 1), scaling
            )
    for name, change in changes.items():
        wanted = tuple(parameters[name].shape) if name in parameters else None
        given: tuple[int, ...] | None = wanted
        if change.left_NR is not None and change.right_RD is not None and wanted:
            given = (change.left_NR.shape[0], change.right_RD.shape[1])[: len(wanted)]
        if change.replacement is not None and given == wanted:
            given = tuple(change.replacement.shape)
        if given != wanted or wanted is None:
            ends = {f"{module}.weight" for module in _ends(model)}
            raise ValueError(
                f"{folder} is not an adapter of this {type(model).__name__}: {name} is"
                f" {wanted or 'absent'} in the model "
                f"and {given} in the"
                f" adapter{RESIZED if name in ends and change.replacement is not None else ''}"
            )
    return changes


_WRAPPERS = r"\.(base_layer|original_module|modules_to_save)\."
"""Parts of names that PEFT puts between a module and its weight; of a resized module it writes all
three."""


def _plain(key: str) -> str:
    """Return a tensor's name in an adapter's file, as it is in the plain model."""
    return key.removeprefix("base_model.model.")


def _ends(model: Any) -> list[str]:
    """Return the names of the embedding and of the head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if module in ends]


def _refuse_variants(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError for adapters whose weights are not W + scaling · B·A."""
    if config.get("peft_type") != "LORA":
        raise ValueError(
            f"{folder} is a {config.get('peft_type')} adapter; only LORA adapters can be merged"
        )
    initialiser = config.get("init_lora_weights", True)
    if initialiser not in _INITIALISERS:
        raise ValueError(
            f"{folder} was initialised with {initialiser!r}, which changed the base weights:"
            " merge it with PEFT, or save "
            f"it with save_pretrained(path_initial_model_for_weight_conversion=...) first"
        )
    passed_over = {
        *_HONOURED,
        "init_lora_weights",
        "loftq_config",
        "corda_config",
        "eva_config",
        "lora_ga_config",
    }
    for key, value in config.items():
        if key not in passed_over and value:
            raise ValueError(
                f"{folder} has {key} = {value!r}, which streaming cannot merge: merge it with PEFT"
            )


class _Output(NamedTuple):
    """One tensor of the merged model: the parameter that it starts from, and what is done to it."""

    source: str
    change: Change | None


def _outputs(
    source: WeightSource, model: nn.Module, changes: Mapping[str, Change]
) -> tuple[dict[str, _Output], bool]:
    """Return the merged model's tensors by their names in its files, and whether tied weights had
    to be parted.

    A checkpoint's own names are kept, so that the merged folder looks like the one it came from; a
    parameter that was fused from several tensors, and a parted one, are written under the model's
    own name, which transformers loads as well."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    tied = {names[0]: names for names in aliases.values()}
    original: Callable[[str], str | None] = getattr(source, "original_key", lambda name: None)
    outputs: dict[str, _Output] = {}
    untied = False
    for name in source.names():
        names: Sequence[str] = tied.get(name, [name])
        if len(names) > 1 and any(alias in changes for alias in names):
            untied = True
            outputs |= {alias: _Output(name, changes.get(alias)) for alias in names}
        else:
            outputs[original(name) or name] = _Output(name, changes.get(name))
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
    some = max(1, CHUNK_ELEMENTS // max(1, columns))
    for start, stop in spans(0, rows, some):
        part_ND = weight.rows(start, stop)
        yield part_ND.to(dtype) if change is None else change.rows(part_ND, start, dtype)
        source.release([name])
