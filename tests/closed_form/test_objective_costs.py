"""Oracle: formulas: what an objective costs beside the loss, and which rows its table has."""

from __future__ import annotations

import pytest

from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.plan.objectives import OBJECTIVES
from blockwalk.program.program import Shape
from blockwalk.walk.unit_costs import UnitCosts
from tests.models import tiny_model


@pytest.mark.parametrize(("name", "product"), [("plain", 2 * 126 * 32 * 101), ("mebp", 0)])
def test_forecasts_know_its_numbers_and_its_reads(name: str, product: int) -> None:
    """80 bytes a token; where the head is trained its losses are computed twice, which is one
    product with the head."""
    lora = None if name == "plain" else LoraSettings(rank=4)
    costs = UnitCosts(tiny_model("llama").config, lora=lora)
    sft, dpo = (
        costs(method(name, objective=objective), Shape(2, 64)).of("epilogue")
        for objective in ("sft", "dpo")
    )
    assert dpo.backward_transient - sft.backward_transient == 80 * 126
    assert dpo.forward.flops - sft.forward.flops == product


def test_rows_say_what_they_need() -> None:
    """The objectives of pairs, of references and of numbers, as their papers have them."""
    pairs = {name for name, row in OBJECTIVES.items() if row.group == 2}
    assert pairs == {"dpo", "ipo", "simpo", "orpo", "cpo"}
    assert {name for name, row in OBJECTIVES.items() if row.reference} == {"dpo", "ipo", "kto"}
    numbers = {name: row.numbers for name, row in OBJECTIVES.items() if row.numbers}
    assert numbers == {"kto": ("desirable",), "policy_gradient": ("advantages",)}
    assert [name for name, row in OBJECTIVES.items() if not row.of_log_probabilities] == ["sft"]
