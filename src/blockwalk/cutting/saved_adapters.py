"""Adapters in PEFT's files: written, and read onto a model, with what would make another model
refused."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.cutting.anatomy import canonical_name
from blockwalk.cutting.peft_models import (
    STARTS,
    adapter_parameters,
    add_adapter,
    prompt_encoder,
    ties_its_ends,
)
from blockwalk.models.safetensors_file import Entry, write
from blockwalk.numerics.codecs.weights import DenseWeight, Value
from blockwalk.plan.sizes import DECODE_BYTES, spans
from blockwalk.system.atomic_files import reading
from blockwalk.system.lfs import refuse_pointer

WEIGHTS_FILE = "adapter_model.safetensors"
"""PEFT's name for the adapter's weights; its configuration is ``adapter_config.json`` beside it."""

_LEAVES_BASE = ("orthogonal", "eva")
"""Further ones that leave the base weights as they are, so that a saved adapter is plain LoRA."""

RESIZED = (
    ": the vocabulary was resized before the adapter was trained; resize the model in the same way"
    " (resize_token_embeddings), save it, and name that one"
)
"""The end of a message about an embedding or a head that has another number of rows in an adapter's
file."""


def save_adapter(model: Any, state: Mapping[str, Tensor], folder: str | Path) -> None:
    """Write an adapter in PEFT's format (``adapter_model.safetensors``, ``adapter_config.json``).

    ``state`` holds the adapter's parameters by canonical name; names of other parameters are
    ignored. Raises ValueError where one of the adapter's parameters is missing."""
    names = adapter_parameters(model)
    if not names:
        names = {n: p for n, p in prompt_encoder(model).items() if p.requires_grad}
    alias = getattr(model.get_base_model(), "all_tied_weights_keys", None) or {}
    kept = {name: name if name in state else alias.get(name, name) for name in names}
    missing = sorted(set(kept.values()) - state.keys())
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(names)} adapter parameters are missing, the first is"
            f" {missing[0]}"
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if not next(iter(names)).startswith("prompt_encoder."):
        tied = {
            name: state[source].detach().to("cpu", copy=name != source)
            for name, source in kept.items()
        }
        tensors = {_in_file(name): tensor.contiguous() for name, tensor in tied.items()}
        tensors = {**_buffers_in_file(model), **tensors}
    else:
        tensors = {"prompt_embeddings": _prompt(model, state)}
    entries = {
        name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(tensors.items())
    }
    write(target / WEIGHTS_FILE, entries, (tensors[name] for name in entries))
    (config,) = model.peft_config.values()
    inference_mode = config.inference_mode
    config.inference_mode = True
    try:
        config.save_pretrained(str(target))
    finally:
        config.inference_mode = inference_mode


def _buffers_in_file(model: Any) -> dict[str, Tensor]:
    """Return what PEFT's files hold of an adapter beside its parameters, by the names there: VeRA's
    projections, for one. LoRA has none."""
    from peft import PeftType, get_peft_model_state_dict

    ((adapter, config),) = model.peft_config.items()
    if config.peft_type == PeftType.LORA:
        return {}
    state = get_peft_model_state_dict(
        model, model.state_dict(), adapter, save_embedding_layers=False
    )
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in state.items()
        if not tensor.is_meta
    }


def _in_file(name: str) -> str:
    """Return PEFT's name of an adapter's parameter, or of the embeddings that are a prefix, in its
    files."""
    if name == "prompt_encoder.embedding.weight":
        return "prompt_embeddings"
    if name.endswith(".lora_magnitude_vector.weight"):
        name = name.removesuffix(".weight")
    return f"base_model.model.{name}"


def _prompt(model: Any, state: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor that PEFT keeps of a prefix: the encoder's answer [virtual tokens,
    2·layers·D], not the encoder."""
    (name,) = model.peft_config
    encoder = model.prompt_encoder[name]
    config = model.peft_config[name]
    values = {
        n: state[canonical_name(f"prompt_encoder.{name}.{n}", (name,))]
        for n, _ in encoder.named_parameters()
    }
    tokens = torch.arange(config.num_virtual_tokens).unsqueeze(0)
    with torch.no_grad():
        prompt: Tensor = torch.func.functional_call(encoder, values, (tokens,))[0]
    return prompt.cpu().contiguous()


def load_adapter(
    model: nn.Module, folder: str | Path, *, read: Callable[[str], Value] | None = None
) -> Any:
    """Put a saved adapter on a model: what :func:`add_adapter` answers, with the saved values (the
    adapter's in float32). A prefix that was computed is one now: its values are what PEFT keeps.

    A file may hold copies of base weights beside the adapter (PEFT writes the embedding and the
    head where they carry one, as ``base_layer``): they must be the model's own, which ``given``
    reads by canonical name. Without it those of a skeleton are not compared. Names of older
    versions of transformers are read as PEFT reads them.

    Raises ValueError where the folder's tensors are not those that its configuration asks for.
    """
    from peft import PeftConfig
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no PEFT adapter: there is no"
            f" {WEIGHTS_FILE}{_where_it_is(Path(folder))}"
        )
    with reading(Path(folder) / "adapter_config.json"):
        config = PeftConfig.from_pretrained(str(folder))
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        refuse_pointer(path)
        raise ValueError(f"{path} is no safetensors file, or truncated: {error}") from None
    refuse_saved(folder, config)
    if getattr(config, "is_prompt_learning", False):
        _refuse_prefix(config, tensors, path)
    config.inference_mode = config.prefix_projection = False
    initialiser = getattr(config, "init_lora_weights", True)
    if initialiser not in STARTS:
        config.init_lora_weights = True  # it comes with its values
    wrapped = add_adapter(model, config, saved=os.fspath(folder))
    if initialiser not in STARTS:
        wrapped.peft_config["default"].init_lora_weights = initialiser
    params = adapter_parameters(wrapped) or prompt_encoder(wrapped)
    if not tensors.keys() >= {_in_file(name) for name in params}:
        tensors = present_names(wrapped, config, tensors)
    saved = {name: tensors.pop(_in_file(name)) for name in params if _in_file(name) in tensors}
    tensors = _without_copies(wrapped, tensors, read, path)
    if odd := sorted(tensors.keys() | params.keys() - saved.keys()):
        raise ValueError(
            f"{path} does not fit this model: {len(odd)} names differ, the first is {odd[0]}"
        )
    first_name: dict[int, str] = {}
    for name, param in params.items():
        if param.shape != saved[name].shape:
            rows = RESIZED if ".lora_" not in name and param.ndim == 2 else ""
            source = f" by {path.with_name('adapter_config.json')}" if ".lora_" in name else ""
            raise ValueError(
                f"{name} is {list(saved[name].shape)} in {path} and {list(param.shape)} in this"
                f" model{source}{rows}"
            )
        alias = first_name.setdefault(id(param), name)
        if not torch.equal(saved[alias], saved[name]):
            raise ValueError(
                f"{path} has two different copies of one weight, {alias} and {name}, which this"
                " model ties: PEFT trained them apart. Write a model that has both (blockwalk merge"
                f" MODEL {os.fspath(folder)} OUT), and name OUT"
            )
    refuse_parted(wrapped.get_base_model(), saved, config.to_dict(), path)
    _put(wrapped, params, saved)
    return wrapped


def _put(wrapped: Any, params: Mapping[str, nn.Parameter], saved: Mapping[str, Tensor]) -> None:
    """Give an adapter's parameters their values. Those that are placeholders have no data: PEFT
    ties some, which cannot be swapped, and gives way to a parameter of its own."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in wrapped.modules():
        for leaf, param in module._parameters.items():
            holders.setdefault(id(param), []).append((module, leaf))
    for name, param in params.items():
        value = saved[name].to(torch.float32 if ".lora_" in name else param.dtype)
        if not param.is_meta:
            param.data = value
        elif ".lora_" in name:
            for module, leaf in holders[id(param)]:
                module._parameters[leaf] = nn.Parameter(value)
        else:
            torch.utils.swap_tensors(param, nn.Parameter(value))  # type: ignore[no-untyped-call]


_GROUPED = 64
"""Heads that share keys and values, at most: a prefix is so many times narrower than the heads that
its configuration may tell of."""


def _refuse_prefix(config: Any, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise ValueError for a prefix whose configuration asks for other sizes than the file has:
    PEFT makes one of these sizes before it looks at the file."""
    saved = tensors.get("prompt_embeddings", torch.empty(0, 0))
    tokens = config.num_virtual_tokens
    width = 2 * (config.num_layers or 1) * (config.token_dim or 1)
    copies = config.num_transformer_submodules or 1
    fits = saved.ndim == 2 and tokens == saved.shape[0] and copies == 1
    if not fits or width > _GROUPED * saved.shape[1]:
        raise ValueError(
            f"{path.with_name('adapter_config.json')} asks for a prefix of {tokens} tokens and"
            f" {width} values for each (num_virtual_tokens, num_layers, token_dim), and {path} has"
            f" prompt_embeddings {list(saved.shape)}"
        )


def _where_it_is(folder: Path) -> str:
    """Return a hint for the folder of a run, or of one of its checkpoints, in place of its
    adapter's."""
    if (folder / "adapter" / WEIGHTS_FILE).is_file():
        return f"; did you mean {folder / 'adapter'}?"
    if (folder / "state.json").is_file():
        return (
            "; a checkpoint goes on with --resume_from_checkpoint, and a run's adapter is written"
            " at its end"
        )
    return ""


def refuse_saved(folder: str | Path, config: Any) -> None:
    """Raise ValueError for a saved adapter that changes the model itself, with the way to use it
    all the same."""
    if getattr(config, "bias", "none") != "none":
        raise ValueError(
            f"{folder} was trained with bias = {config.bias!r}: it holds biases of the model"
            " itself. Write a model that has them"
            f" (blockwalk merge MODEL {folder} OUT), and name OUT"
        )
    start = getattr(config, "init_lora_weights", True)
    if start not in (*STARTS, None, *_LEAVES_BASE):
        raise ValueError(
            f"{folder} began with init_lora_weights = {start!r}, which changed the model's own"
            " weights; save it as plain LoRA with PEFT: save_pretrained(FOLDER,"
            " path_initial_model_for_weight_conversion=...)"
        )
    if getattr(config, "trainable_token_indices", None):
        raise ValueError(
            f"{folder} has trainable_token_indices: it trained rows of the embedding beside it."
            " Merge it with PEFT (merge_and_unload), and name the merged model"
        )


def present_names(model: Any, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an adapter's tensors under the names of PEFT's files for this version of transformers,
    as PEFT itself renames them when it loads: models with pictures had other names before
    transformers 4.52."""
    try:
        from peft.utils.transformers_weight_conversion import (
            convert_peft_adapter_state_dict_for_transformers,
        )
    except ImportError:  # an older PEFT renames nothing
        return dict(tensors)
    renamed: dict[str, Tensor] = convert_peft_adapter_state_dict_for_transformers(
        model=model, peft_config=config, adapter_state_dict=dict(tensors), adapter_name="default"
    )
    return renamed


def _without_copies(
    wrapped: Any, tensors: Mapping[str, Tensor], read: Callable[[str], Value] | None, path: Path
) -> dict[str, Tensor]:
    """Return the tensors of a file without those that are copies of the model's own weights.

    Raises ValueError for one of another shape or with other values: PEFT would load it into the
    model."""
    adapters = tuple(wrapped.peft_config)
    first_name: dict[int, str] = {}
    base: dict[str, nn.Parameter] = {}
    for name, param in wrapped.named_parameters(remove_duplicate=False):
        if ".lora_" not in name:
            base[canonical_name(name, adapters)] = param
            first_name.setdefault(id(param), canonical_name(name, adapters))
    remaining = {}
    for key, tensor in tensors.items():
        name = re.sub(
            r"\.(base_layer|original_module|modules_to_save)\.",
            ".",
            key.removeprefix("base_model.model."),
        )
        if name not in base:
            remaining[key] = tensor
            continue
        param = base[name]
        if tensor.shape != param.shape:
            raise ValueError(
                f"{name} is {list(tensor.shape)} in {path} and {list(param.shape)} in this"
                f" model{RESIZED}"
            )
        base_value: Value | None = None if param.is_meta else param.detach()
        if base_value is None and read is not None:
            base_value = read(first_name[id(param)])
        if base_value is not None and not _is_copy(tensor, base_value):
            raise ValueError(
                f"{path} holds {name} with other values than this model's. Write a model that has"
                f" them (blockwalk merge MODEL {path.parent} OUT), and name OUT"
            )
    return remaining


def _is_copy(tensor: Tensor, value: Value) -> bool:
    """Whether a saved tensor has a weight's values, up to the rounding of either dtype."""
    if isinstance(value, Tensor) and value.ndim < 2:
        return torch.equal(tensor.to(value.dtype), value)
    weight = DenseWeight(value) if isinstance(value, Tensor) else value
    rows_at_once = max(1, DECODE_BYTES["cpu"] // (tensor.shape[1] * weight.dtype.itemsize))
    for start, stop in spans(0, tensor.shape[0], rows_at_once):
        saved_ND = tensor[start:stop]
        base_ND = weight.rows(start, stop).to("cpu")
        rounded = torch.equal(saved_ND.to(base_ND.dtype), base_ND)
        if not rounded and not torch.equal(base_ND.to(saved_ND.dtype), saved_ND):
            return False
    return True


def refuse_parted(
    model: Any, saved: Mapping[str, Tensor], config: Mapping[str, Any], path: Path
) -> None:
    """Raise ValueError where a file's two pairs of factors, of the embedding and of the head,
    differ that PEFT ties: of these it takes one. ``saved`` has them by their names in ``model``,
    the plain one."""
    if not config.get("ensure_weight_tying") or not ties_its_ends(model):
        return
    ends = {
        module: canonical_name(name, ("default",), "") for name, module in model.named_modules()
    }
    embedding = ends.get(model.get_input_embeddings())
    head = ends.get(model.get_output_embeddings())
    for factor, other in (("A", "B"), ("B", "A")):
        of_embedding = saved.get(f"{embedding}.lora_embedding_{factor}")
        of_head = saved.get(f"{head}.lora_{other}.weight")
        if of_embedding is None or of_head is None:
            continue
        if not torch.equal(of_embedding.t(), of_head):
            raise ValueError(
                f"{path} has ensure_weight_tying, and its LoRA of {embedding} is not that of"
                f" {head}: PEFT would take one of them for both. Set ensure_weight_tying to false"
                " in its adapter_config.json, if they were trained apart"
            )
