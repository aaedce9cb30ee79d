"""Oracle: the programs of main, byte for byte, of models as the cut of real ``transformers`` models
describes them. A change to what is compiled must show here as a diff that its author meant;
``python -m tests.golden.programs`` rewrites them."""

from __future__ import annotations

import difflib
from typing import Any

import pytest

from blockwalk.plan.methods import METHODS
from tests.golden.programs import path_of, text
from tests.golden.specs import BLOCKS, HIDDEN, MODELS, VOCABULARY


@pytest.mark.fast
@pytest.mark.parametrize("row", METHODS)
def test_the_programs_of_a_row_are_those_of_main(row: str) -> None:
    expected = path_of(row).read_text()
    changed = list(
        difflib.unified_diff(
            expected.splitlines(), text(row).splitlines(), "main", "here", n=1, lineterm=""
        )
    )
    assert not changed, (
        "\n".join(changed[:40]) + "\n\nif this is meant: python -m tests.golden.programs"
    )


SIZES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 176, "num_key_value_heads": 2},
    "opt": {
        "ffn_dim": 4 * HIDDEN,
        "word_embed_proj_dim": HIDDEN,
        "max_position_embeddings": 128,
    },
    "mixtral": {
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_the_models_are_those_that_a_cut_finds(name: str) -> None:
    """Oracle: the cut of the model that transformers builds from these sizes."""
    import torch
    from transformers import AutoConfig

    from blockwalk.cutting.peft_models import add_adapter, lora_config
    from blockwalk.cutting.skeleton import build_skeleton
    from blockwalk.cutting.verify import certified

    wanted = MODELS[name]
    config = AutoConfig.for_model(
        name,
        num_hidden_layers=BLOCKS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        **SIZES[name],
    )
    model = build_skeleton(config, getattr(torch, wanted.dtype))
    if name == "llama":
        model = add_adapter(model, lora_config(4, target_modules=["q_proj", "v_proj"]))
    found = certified(model).spec()
    assert (found.tied, found.hidden_size, found.vocab_size, found.dtype) == (
        wanted.tied,
        wanted.hidden_size,
        wanted.vocab_size,
        wanted.dtype,
    )
    for one, other in zip(found.units, wanted.units, strict=True):
        assert one.name == other.name
        assert [(p.name, p.shape, p.dtype, p.quantizable) for p in one.params] == [
            (p.name, p.shape, p.dtype, p.quantizable) for p in other.params
        ]
