"""Oracle: the model that transformers builds, and the costs that are measured on its blocks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from blockwalk.cutting.adapters import adapt
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.cutting.verify import certified
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.program.program import Shape
from blockwalk.simulate import formula_costs, formula_model
from blockwalk.walk.unit_costs import unit_costs

GATED: dict[str, Any] = {"intermediate_size": 352, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "qwen2": GATED,
    "qwen3": {"head_dim": 32, **GATED},
    "gemma2": {"head_dim": 32, **GATED},
    "gemma3_text": {"head_dim": 32, **GATED},
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 128, "dropout": 0.0},
    "mixtral": {"num_local_experts": 4, **GATED},
}
SIZES: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 3000}
CASES = [
    (family, name, rank)
    for family in FAMILIES
    for name, rank in (("plain", None), ("mebp", 8), ("zo2", None))
    if not (family == "mixtral" and rank)
]


def params(spec: ModelSpec) -> list[list[tuple[Any, ...]]]:
    return [sorted((p.name, p.shape, p.dtype, p.trainable, p.quantizable) for p in unit.params) for unit in spec.units]


@pytest.mark.parametrize(("family", "name", "rank"), CASES)
def test_formulas_agree_with_the_model_and_its_measured_costs(family: str, name: str, rank: int | None) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, dtype="bfloat16", **SIZES, **FAMILIES[family])
    settings = {**config.to_dict(), "dtype": "bfloat16"}
    lora = LoraSettings(rank=rank) if rank else None
    built = build_skeleton(config).model
    real = certified(adapt(built, lora) if lora else built).spec()
    assert params(formula_model.model_spec(settings, lora_rank=rank)) == params(real)
    plan, shape = method(name), Shape(2, 128)
    measured = unit_costs(config, plan, shape, lora=lora)
    foreseen = formula_costs.costs(settings, plan, shape, lora_rank=rank)
    assert foreseen.scratch == measured.scratch
    for kind, cost in measured.units:
        mine = foreseen.of(kind if kind in ("prologue", "epilogue") else "block")
        assert mine.saved == pytest.approx(cost.saved, rel=0.12)
        assert mine.forward_flops == pytest.approx(cost.forward_flops, rel=0.01)
        assert mine.backward_flops == pytest.approx(cost.backward_flops, rel=0.01)
        if kind != "prologue":
            assert mine.forward_transient == pytest.approx(cost.forward_transient, rel=0.12)
        assert mine.backward_transient == pytest.approx(cost.backward_transient, rel=0.12)
        assert mine.forward.flops == pytest.approx(cost.forward.flops, rel=0.01)
        assert mine.forward.touched == pytest.approx(cost.forward.touched, rel=0.2, abs=2**21)
        assert mine.backward.touched == pytest.approx(cost.backward.touched, rel=0.35)


def test_no_formula_needs_torch() -> None:
    """Oracle: the interpreter's list of modules."""
    code = "import sys, blockwalk.simulate.formula_model, blockwalk.program.compile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
