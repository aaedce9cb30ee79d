"""The changes that a LoRA adapter in PEFT's format makes to the weights of its base."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.cutting.saved_adapters import RESIZED, present_names, refuse_parted
from blockwalk.system import atomic_files
from blockwalk.system.paths import StrPath


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one parameter [N, D]: it is replaced, then scaling · left [N, R] · right [R, D]
    is added, then each row gets the norm that ``magnitude_N`` says."""

    replacement: Tensor | None = None
    left_NR: Tensor | None = None
    right_RD: Tensor | None = None
    scaling: float = 1.0
    magnitude_N: Tensor | None = None

    def rows(self, base_ND: Tensor, start: int, dtype: torch.dtype) -> Tensor:
        """Return the changed rows ``start`` … of a parameter whose rows there are ``base_ND``,
        rounded once to ``dtype``."""
        stop = start + base_ND.shape[0]
        out_ND = base_ND
        if self.replacement is not None:
            out_ND = self.replacement.view(-1, base_ND.shape[1])[start:stop]
        if self.left_NR is not None and self.right_RD is not None:
            delta_ND = (self.left_NR[start:stop] @ self.right_RD).mul_(self.scaling)
            out_ND = delta_ND.add_(out_ND)
        if self.magnitude_N is not None:
            norms_N = torch.linalg.vector_norm(out_ND, dim=1)
            out_ND = out_ND * (self.magnitude_N[start:stop] / norms_N).unsqueeze(1)
        return out_ND.to(dtype)

    def shape_for(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the parameter that the change fits, given the parameter's own."""
        if self.left_NR is not None and self.right_RD is not None:
            product = (self.left_NR.shape[0], self.right_RD.shape[1])[: len(shape)]
            if product != shape:
                return product
        return shape if self.replacement is None else tuple(self.replacement.shape)


_HONOURED = """
    alpha_pattern auto_mapping base_model_name_or_path bias ensure_weight_tying exclude_modules
    fan_in_fan_out inference_mode layers_pattern layers_to_transform lora_alpha lora_bias
    lora_dropout megatron_core modules_to_save peft_type peft_version qalora_group_size r
    rank_pattern revision runtime_config target_modules task_type use_dora use_rslora
"""
"""Keys of adapter_config.json that leave the merged weight W + scaling · B·A, or that the tensors
themselves express."""
_OF_INITIALISERS = """
    init_lora_weights loftq_config corda_config eva_config lora_ga_config
"""
"""Keys on how an adapter began, of which :data:`_INITIALISERS` says what is merged."""
_INITIALISERS = (True, False, None, "gaussian", "orthogonal", "eva")
"""``init_lora_weights`` that leave the base weights as they are in the checkpoint."""
_LORA_KEY = re.compile(
    r"(?P<module>.+)\.lora_(embedding_)?(?P<factor>[AB]|magnitude_vector)(\.(?P<leaf>weight|bias))?"
)
_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save)\.")
"""Parts of names that PEFT puts between a module and its weight; of a resized module it writes all
three."""


def read_adapter(adapter_dir: StrPath, model: nn.Module) -> dict[str, Change]:
    """Return changes that an adapter in PEFT's format makes to ``model`` (a skeleton will do), by
    parameter name.

    Ranks, alphas and their patterns, rslora, DoRA, Conv1D and embedding layers, ``lora_bias``,
    trained biases and ``modules_to_save`` are honoured.

    Raises:
        ValueError: no adapter, no plain LoRA (with the setting that makes it another), or one for
            another model.
    """
    folder = Path(adapter_dir)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no adapter in PEFT's format: it has no {name}")
    config: dict[str, Any] = atomic_files.read_json(folder / "adapter_config.json")
    _refuse_variants(folder, config)
    factors: dict[str, dict[str, Tensor]] = {}
    replacements: dict[str, Tensor] = {}
    for name, tensor in _tensors(folder, config, model).items():
        if key := _LORA_KEY.fullmatch(name):
            factor = key["factor"] + ("_bias" if key["leaf"] == "bias" else "")
            factors.setdefault(key["module"], {})[factor] = tensor.float()
        else:
            replacements[_WRAPPERS.sub(".", name)] = tensor
    changes = {name: Change(replacement=tensor) for name, tensor in replacements.items()}
    for name, factors_of_module in factors.items():
        changes |= _of_module(folder, config, model, name, factors_of_module, replacements)
    _require_fit(folder, model, changes)
    return changes


def _tensors(folder: Path, config: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Return an adapter's tensors by their names in the plain model."""
    from peft import PeftConfig
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    modules = dict(model.named_modules(remove_duplicate=False))
    adapted = {_plain(key).partition(".lora_")[0] for key in tensors if ".lora_" in key}
    if not adapted <= modules.keys():
        tensors = present_names(model, PeftConfig.from_pretrained(str(folder)), tensors)
    tensors = {_plain(key): tensor for key, tensor in tensors.items()}
    refuse_parted(model, tensors, dict(config), file)
    return tensors


def _of_module(
    folder: Path,
    config: Mapping[str, Any],
    model: nn.Module,
    name: str,
    factors: Mapping[str, Tensor],
    replacements: Mapping[str, Tensor],
) -> dict[str, Change]:
    """Return the changes of a module's weight and bias that its factors ``A``, ``B``,
    ``magnitude_vector`` and ``B_bias`` make."""
    from transformers.pytorch_utils import Conv1D

    parameters = dict(model.named_parameters(remove_duplicate=False))
    if not {"A", "B"} <= factors.keys() or f"{name}.weight" not in parameters:
        raise ValueError(
            f"{folder} is not an adapter of {type(model).__name__}: {name} has no weight, or A or B"
        )
    # their weights are [input, output]
    transposed = isinstance(model.get_submodule(name), Conv1D | nn.Embedding)
    left_NR = factors["A"].T if transposed else factors["B"]
    right_RD = factors["B"].T if transposed else factors["A"]
    magnitude_N = factors.get("magnitude_vector")
    if transposed and magnitude_N is not None:
        raise ValueError(
            f"{folder} has DoRA on {name}, whose norms are not of rows: merge it with PEFT"
        )
    scaling = _scaling(config, name, rank=factors["A"].shape[0])
    replacement = replacements.get(f"{name}.weight")
    changes = {f"{name}.weight": Change(replacement, left_NR, right_RD, scaling, magnitude_N)}
    if "B_bias" in factors:
        if f"{name}.bias" not in parameters:
            raise ValueError(
                f"{folder} has lora_bias, a bias for {name}, which has none in"
                f" {type(model).__name__}: there is no tensor to merge it into. Use the adapter"
                " beside its base, or train it with lora_bias: false"
            )
        column_N1 = factors["B_bias"].unsqueeze(1)
        changes[f"{name}.bias"] = Change(
            replacements.get(f"{name}.bias"), column_N1, torch.ones(1, 1), scaling
        )
    return changes


def _scaling(config: Mapping[str, Any], module: str, *, rank: int) -> float:
    """Return the factor of B·A in a module: alpha / rank, or alpha / √rank with rslora."""
    from peft.utils.other import get_pattern_key

    alphas: dict[str, float] = config.get("alpha_pattern") or {}
    alpha: float = alphas.get(get_pattern_key(list(alphas), module), config["lora_alpha"])
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _require_fit(folder: Path, model: nn.Module, changes: Mapping[str, Change]) -> None:
    """Raise ValueError where a change has another shape than its parameter."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, change in changes.items():
        shape = tuple(parameters[name].shape) if name in parameters else None
        fitting = change.shape_for(shape or ())
        if shape is None or fitting != shape:
            resized = change.replacement is not None and name in _weights_of_ends(model)
            raise ValueError(
                f"{folder} is not an adapter of this {type(model).__name__}: {name} is"
                f" {shape or 'absent'} in the model and {fitting} in the adapter"
                f"{RESIZED if resized else ''}"
            )


def _plain(key: str) -> str:
    """Return a tensor's name in an adapter's file, as it is in the plain model."""
    return key.removeprefix("base_model.model.")


def _weights_of_ends(model: Any) -> set[str]:
    """Return the names of the weights of the embedding and of the head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {f"{name}.weight" for name, module in model.named_modules() if module in ends}


def _refuse_variants(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError for adapters whose weights are not W + scaling · B·A."""
    if config.get("peft_type") != "LORA":
        raise ValueError(
            f"{folder} is a {config.get('peft_type')} adapter; only LORA adapters can be merged"
        )
    initialiser = config.get("init_lora_weights", True)
    if initialiser not in _INITIALISERS:
        raise ValueError(
            f"{folder} was initialised with {initialiser!r}, which changed the base weights: merge"
            " it with PEFT, or save it with"
            " save_pretrained(path_initial_model_for_weight_conversion=...) first"
        )
    for key, value in config.items():
        if value and key not in (_HONOURED + _OF_INITIALISERS).split():
            raise ValueError(
                f"{folder} has {key} = {value!r}, which streaming cannot merge: merge it with PEFT"
            )
