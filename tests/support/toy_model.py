"""A model of a few parameters as planning knows it."""

from __future__ import annotations

from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec


def toy(layers: int, *, lora: bool, tied: bool, hidden: int = 64, vocab: int = 1000) -> ModelSpec:
    """A decoder's units without a model: an embedding, ``layers`` blocks of one matrix and one
    norm, a head."""

    def param(name: str, shape: tuple[int, ...], matrix: bool = True) -> ParamSpec:
        return ParamSpec(name, shape, "float32", not lora, matrix)

    def block(i: int) -> UnitSpec:
        adapter = (ParamSpec(f"layers.{i}.lora_A", (1, hidden), "float32", True),) if lora else ()
        frozen = (
            param(f"layers.{i}.weight", (hidden, hidden)),
            param(f"layers.{i}.norm", (hidden,), False),
        )
        return UnitSpec(f"layers.{i}", "block", frozen + adapter)

    head = () if tied else (param("head", (vocab, hidden)),)
    return ModelSpec(
        "toy",
        UnitSpec("prologue", "prologue", (param("embedding", (vocab, hidden)),)),
        tuple(block(i) for i in range(layers)),
        UnitSpec("epilogue", "epilogue", (param("norm", (hidden,), False), *head)),
        hidden,
        vocab,
        tied=(("head", "embedding"),) if tied else (),
    )
