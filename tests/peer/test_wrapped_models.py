"""Oracle: the objects that torch, PEFT and transformers make of a model. One that no walk can take
is refused before anything is made of it, with what to hand over instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn

from blockwalk import Walker, method
from tests.models import tiny_model
from tests.support.messages import refused


def _config() -> Any:
    return LoraConfig(target_modules=["q_proj"], r=2)


def _added(model: Any) -> Any:
    model.add_adapter(_config())
    return model


def _in_part_on_meta(model: Any) -> Any:
    model.model.layers[1].to("meta")
    return model


def _of_inference(model: Any) -> Any:
    with torch.inference_mode():
        return tiny_model("llama")


MADE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "compiled": (lambda model: torch.compile(model, backend="eager"), "torch.compile _orig_mod"),
    "parallel": (nn.DataParallel, "DataParallel model.module"),
    "a list": (nn.Sequential, "Sequential config"),
    "added": (_added, "default get_peft_model add_adapter"),
    "injected": (
        lambda model: inject_adapter_in_model(_config(), model),
        "default get_peft_model inject_adapter_in_model",
    ),
    "mixed": (
        lambda model: get_peft_model(model, _config(), mixed=True),
        "default get_peft_model mixed",
    ),
    "without values": (_in_part_on_meta, "model.layers.1.self_attn.q_proj.weight meta"),
    "of inference": (_of_inference, "model.embed_tokens.weight inference_mode"),
    "its class": (type, "type folder"),
    "a number": (lambda model: 3, "int folder"),
}


@pytest.mark.parametrize("kind", MADE)
def test_what_no_walk_can_take_is_refused_with_what_to_hand_over(kind: str) -> None:
    make, facts = MADE[kind]
    with refused(ValueError, facts):
        Walker(make(tiny_model("llama")), method("mebp", frozen="disk × raw"))
