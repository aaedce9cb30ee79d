"""The names that an adapter's settings may mean in a model, and the refusal of those that mean
nothing in it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.parsing import did_you_mean
from blockwalk.plan.table import LOOSE


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """The names in a plain model that an adapter's settings may mean."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    linears: tuple[str, ...]
    """The last parts of the names of its linear layers, sorted."""
    layers: int

    @staticmethod
    def of(model: Any) -> Places:
        """Return the names of a plain model."""
        from transformers.pytorch_utils import Conv1D

        linears = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D)
        }
        return Places(
            tuple(name for name, _ in model.named_modules()),
            tuple(name for name, _ in model.named_parameters(remove_duplicate=False)),
            tuple(sorted(linears)),
            int(getattr(model.config.get_text_config(), "num_hidden_layers", 0)),
        )


def require_matches(config: Any, places: Places) -> None:
    """Raise ValueError where a name, a pattern or a layer's number in a ``LoraConfig`` means
    nothing in the model: PEFT would pass over it as long as another one means something."""
    from peft.utils.constants import DUMMY_TARGET_MODULES

    fields = (
        ("target_modules", "lora", places.modules),
        ("exclude_modules", "lora.options", places.modules),
        ("target_parameters", "lora.options", places.parameters),
    )
    for field, section, names in fields:
        targets = getattr(config, field, None) or ()
        if isinstance(targets, str):
            all_or_none = targets.lower() == "all-linear" or targets == DUMMY_TARGET_MODULES
            if not all_or_none and not any(re.fullmatch(targets, name) for name in names):
                raise ValueError(
                    f"{section}.{field} is {targets!r}, a pattern for whole names, and no name"
                    " matches it; a list names modules by their ends. The model's linear layers are"
                    f" {', '.join(places.linears)}"
                )
            continue
        for end in sorted(targets):
            if not any(name == end or name.endswith(f".{end}") for name in names):
                leaves = {name.rpartition(".")[2] for name in names}
                hint = did_you_mean(end, sorted(leaves), LOOSE)
                raise ValueError(
                    f"{section}.{field} has {end!r}, and no name in the model ends so{hint};"
                    f" its linear layers are {', '.join(places.linears)}"
                )
    numbers = getattr(config, "layers_to_transform", None)
    numbers = [numbers] if isinstance(numbers, int) else numbers or ()
    beyond = [number for number in numbers if places.layers and not 0 <= number < places.layers]
    if beyond:
        raise ValueError(
            f"lora.options.layers_to_transform has {beyond[0]}, and the model's layers are 0 to"
            f" {places.layers - 1}"
        )


def require_patterns(lora: LoraSettings, adapted: Sequence[str]) -> None:
    """Raise ValueError for a rank or an alpha of modules that have no adapter."""
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in lora.options.get(field) or ():
            if not any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in adapted):
                leaves = sorted({name.rpartition(".")[2] for name in adapted})
                raise ValueError(
                    f"lora.options.{field} has {pattern!r}, and no module with an adapter is"
                    f" named so; they end in {', '.join(leaves)}"
                )
