"""Oracle: transformers, TRL, PEFT and bitsandbytes' configuration themselves: every field that they
have is answered."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import Any

import pytest

from blockwalk.plan.foreign_names import find
from blockwalk.train import config
from blockwalk.train.foreign_settings import WRITE


def fields() -> dict[str, Any]:
    """The fields of the configurations of four libraries, with their defaults."""
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig, TrainingArguments

    kinds: list[Any] = [TrainingArguments, LoraConfig]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from trl import ModelConfig, ScriptArguments, SFTConfig
        except ImportError:
            pass
        else:
            kinds += [SFTConfig, ModelConfig, ScriptArguments]
    found = {f.name: f.default for kind in kinds for f in dataclasses.fields(kind)}
    parameters = inspect.signature(BitsAndBytesConfig.__init__).parameters
    return {
        **found,
        **{name: p.default for name, p in parameters.items() if name not in ("self", "kwargs")},
    }


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    return fields()


def test_every_field_is_ours_or_in_the_table(theirs: dict[str, Any]) -> None:
    known = set(config.setting_names())
    assert len(theirs) > 150
    assert [name for name in theirs if name not in known and find(name) is None] == []


def test_every_field_at_its_default_is_taken_or_refused_with_a_sentence(
    theirs: dict[str, Any],
) -> None:
    """What is refused says what to write, or to leave it out, or names the setting."""
    known = set(config.setting_names())
    for name, value in theirs.items():
        if name in known or value is dataclasses.MISSING:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                config.from_mapping({name: value})
            except ValueError as error:
                text = str(error)
                assert (
                    WRITE in text
                    or text.endswith("Leave it out.")
                    or "The setting is" in text
                    or "it takes" in text
                ), text
