"""Oracle: autograd over whole rows of a small instance, which parts of them must agree with; and
mutants of the parts, which must not."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from blockwalk.cutting import verify
from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.small_instance import small_instance
from blockwalk.data import batch as batches
from blockwalk.numerics.rule_mask import RuleMask
from blockwalk.numerics.sequence_part import PartMask, SequencePart
from blockwalk.plan.methods import method
from blockwalk.plan.row_order import RowOrder
from blockwalk.walk import context_check
from tests.models import tiny_model
from tests.support.architectures import TABLE
from tests.support.control import tiny_config
from tests.support.control import tiny_model as shrunk_model
from tests.support.messages import refused

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def check(kind: str, way: str = "keys", context: int = 2, **changes: Any) -> None:
    mesh = {"world": context, "ranks_per_node": context, "context": context}
    plan = method("hzp", mesh=mesh, context={"way": way})
    context_check.require_parts(tiny_model(kind, **changes), plan)


def test_layers_that_see_their_own_part_alone_are_named() -> None:
    """ALiBi, attention of a model's own, convolutions and states along the sequence."""
    bloom = {"n_head": 4, "n_layer": 2, "hidden_size": 32}
    with refused(ValueError, "BloomForCausalLM", "eager", "sdpa", "mesh.context: 1"):
        check("bloom", **bloom)
    falcon = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
    with refused(ValueError, "FalconForCausalLM", "before", "mesh.context: 1"):
        check("falcon", **falcon)
    with refused(ValueError, "FalconForCausalLM", "transformer.h.0", "mesh.context: 1"):
        check("falcon", **{**falcon, "alibi": False})
    lfm2 = {**SIZES, "num_key_value_heads": 2, "layer_types": ["full_attention", "conv"]}
    with refused(ValueError, "Lfm2ForCausalLM", "layers.1", "2 parts", "0.0001"):
        check("lfm2", **lfm2)


@pytest.mark.parametrize(("bad", "facts"), [((4,), ""), ((3, 5), "one of 2")])
def test_the_one_bad_kind_of_layer_is_named_as_the_model_has_it(
    bad: tuple[int, ...], facts: str
) -> None:
    """Six layers, of which the small instance has three: the first of the kind that is refused has
    another number there."""
    types = ["conv" if layer in bad else "full_attention" for layer in range(6)]
    sizes = {**SIZES, "num_hidden_layers": 6, "num_key_value_heads": 2, "layer_types": types}
    with refused(ValueError, f"layer model.layers.{bad[0]}", "state along", *facts.split()):
        check("lfm2", **sizes)


def test_a_gradient_that_differs_is_named_as_the_model_has_it() -> None:
    """Oracle: the configuration's own list of layers."""
    types = ["full_attention"] * 5 + ["conv"]
    sizes = {**SIZES, "num_hidden_layers": 6, "num_key_value_heads": 2, "layer_types": types}
    model: Any = tiny_model("lfm2", **sizes)
    anatomy = verify.certified_anatomy(model)
    cut = CutModel(small_instance(type(model), model.config), anatomy)
    names = context_check._Names(cut, context_check._layers_by_kind(model, anatomy))
    own = {name: names.parameter(name) for name in cut.take_parameters()}
    conv = {name: of for name, of in own.items() if ".conv." in name}
    assert conv
    assert {of.removeprefix("model.layers.").partition(".")[0] for of in conv.values()} == {"5"}
    assert own["model.embed_tokens.weight"] == "model.embed_tokens.weight"
    assert set(own.values()) <= {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("qwen3_next", "Qwen3NextForCausalLM model.layers.0 state 2 parts"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM"),
        ("mpt", "MptForCausalLM eager sdpa"),
        ("jamba", "JambaForCausalLM model.layers.0 state"),
        ("gemma4_text", "Gemma4ForCausalLM arguments gradients"),
    ],
)
def test_families_that_have_no_parts_are_refused(kind: str, facts: str) -> None:
    """State along the sequence, ALiBi, and arguments that have gradients; as they are shrunk."""
    plan = method("hzp", mesh={"world": 2, "ranks_per_node": 2, "context": 2})
    model = shrunk_model(tiny_config(kind, **TABLE.get(kind, {})), torch.float32)
    with refused(ValueError, "mesh.context: 1", *facts.split()):
        context_check.require_parts(model, plan)


def test_dropout_in_attention_is_refused() -> None:
    with refused(ValueError, "GPT2LMHeadModel", "transformer.h.0", "dropout 0.1"):
        check("gpt2")


def test_heads_must_divide() -> None:
    with refused(ValueError, "context.way", "4 heads", "mesh.context: 3", "keys"):
        check("llama", "heads", 3)


def test_two_mutants_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels that are cut before they are shifted, and a mask by the positions in a part."""
    model: Any = tiny_model("llama")
    anatomy = verify.certified_anatomy(model)

    def study() -> None:
        context_check.study(type(model), model.config, anatomy, "keys")

    study()
    columns = batches.columns

    def cut_before_shift(batch: batches.Batch, order: RowOrder, number: int) -> batches.Batch:
        part = dict(columns(batch, order, number))
        part["labels"] = part["labels"].clone()
        part["labels"][:, -1] = -100
        return part

    with monkeypatch.context() as patch:
        patch.setattr(batches, "columns", cut_before_shift)
        with refused(ValueError, "2 parts", "0.0001"):
            study()

    def local(part: SequencePart, rule: Any, rows: int, device: Any) -> PartMask:
        mask = PartMask.of(part, rule, rows, device)
        mask.of_part = RuleMask([(rule, rows)], [slice(0, part.order.tokens)], mask.keys, device)
        return mask

    with monkeypatch.context() as patch:
        patch.setattr(SequencePart, "mask", local)
        with refused(ValueError, "model.layers.0", "2 parts", "0.0001"):
            study()


def test_a_gradient_that_no_part_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts whose keys have no gradient from the others: the loss is right to the last bit."""
    model: Any = tiny_model("llama")
    anatomy = verify.certified_anatomy(model)

    def detached(self: Any, part_P: Tensor) -> Tensor:
        parts = self.board.share(self.number, part_P)
        own = [p if n == self.number else p.detach() for n, p in enumerate(parts)]
        return torch.stack(own)

    monkeypatch.setattr(context_check._BoardExchange, "gather", detached)
    with refused(ValueError, "the gradient of", "2 parts", "0.0001"):
        context_check.study(type(model), model.config, anatomy, "keys")


def test_a_busy_machine_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that wait too long for one another say nothing of the model: nothing is kept."""
    kept: list[str] = []
    monkeypatch.setattr(context_check.cache, "read_sealed", lambda *_: None)
    monkeypatch.setattr(context_check.cache, "write_sealed", lambda name, _: kept.append(name))
    monkeypatch.setattr(context_check, "_verdicts", {})
    monkeypatch.setattr(context_check, "_PATIENCE", 0.0)
    with refused(TimeoutError, "2 parts", "0 s"):
        check("llama", num_attention_heads=4)
    assert [name for name in kept if name.startswith("parts-")] == []


def test_a_part_that_ends_before_the_others_is_refused() -> None:
    """Oracle: two threads, of which one exchanges nothing."""
    board = context_check._Board(2)
    board.barrier = threading.Barrier(2, timeout=0.2)

    def walk(number: int) -> None:
        if number:
            board.share(number, torch.zeros(1))

    with refused(ValueError, "exchange"):
        board.run(walk)
