"""Training that goes on from a trained adapter: its settings are read from its folder, and a run
may not contradict them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from blockwalk.cutting.adapters import as_adapters
from blockwalk.cutting.peft_models import lora_config
from blockwalk.cutting.saved_adapters import WEIGHTS_FILE, refuse_saved
from blockwalk.models.run_folder import ADAPTER_CONFIG, adapter_of
from blockwalk.plan.choices import LoraSettings
from blockwalk.system.atomic_files import reading

_OF_THE_FILE: dict[str, Any] = {
    "base_model_name_or_path": None,
    "revision": None,
    "auto_mapping": None,
    "inference_mode": False,
}
"""Fields of an adapter's configuration that say where it was, and not what it is."""


def settings_from(lora: LoraSettings, named: Collection[str]) -> LoraSettings:
    """Return the settings of the adapter in ``lora.from``, for a run that names some of them
    itself.

    Args:
        lora: the run's settings; ``from`` is the folder of an adapter, or of the run that trained
            it.
        named: the names of those that the user gave.

    Raises:
        ValueError: there is no LoRA adapter, or a setting contradicts it; the message has both
            values.
    """
    folder = adapter_of(lora.from_)
    is_complete = {"rank", "alpha", "target_modules"} <= set(named)
    if is_complete and not (folder / ADAPTER_CONFIG).is_file():
        return lora  # the settings of a run that has gone on from it
    saved = _saved_settings(folder)
    for name in ("rank", "alpha", "dropout", "target_modules"):
        value = getattr(lora, name)
        saved_value = getattr(saved, name)
        if name in named and _plain(value) != _plain(saved_value):
            raise ValueError(
                f"lora.{name} is {_shown(value)}, and the adapter in {folder} (lora.from) has"
                f" {_shown(saved_value)}: leave lora.{name} out, or begin a new adapter without"
                " lora.from"
            )
    default = lora_config()
    for name, value in lora.options.items():
        saved_value = saved.options.get(name, getattr(default, name, None))
        if _plain(value) != _plain(saved_value):
            raise ValueError(
                f"lora.options.{name} is {_shown(value)}, and the adapter in {folder} (lora.from)"
                f" has {_shown(saved_value)}: leave it out"
            )
    return dataclasses.replace(saved, from_=os.fspath(folder))


def _saved_settings(folder: Path) -> LoraSettings:
    """Return the settings of a saved LoRA adapter."""
    from peft import LoraConfig, PeftConfig

    if not (folder / ADAPTER_CONFIG).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(
            f"lora.from: {folder} holds no PEFT adapter: it has no {ADAPTER_CONFIG} with"
            f" {WEIGHTS_FILE}"
        )
    with reading(folder / ADAPTER_CONFIG):
        config = PeftConfig.from_pretrained(os.fspath(folder))
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"lora.from: {folder} is a {config.peft_type} adapter; training goes on from LoRA"
        )
    refuse_saved(folder, config)
    settings = as_adapters(dataclasses.replace(config, **_OF_THE_FILE, init_lora_weights=True))
    assert isinstance(settings, LoraSettings)
    return settings


def _plain(value: Any) -> Any:
    """Return a value for a comparison: names in whatever order, and whole numbers as numbers."""
    return sorted(value) if isinstance(value, list | tuple | set) else value


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple | set):
        return f"[{', '.join(map(str, sorted(value)))}]"
    return str(value)
