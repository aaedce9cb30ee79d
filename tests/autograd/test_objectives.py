"""Oracle: torch's autograd on the whole model's logits, with the objectives as their papers have
them (tests/support/objectives.py)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockwalk.engine.pack import pack
from blockwalk.plan.methods import method
from blockwalk.plan.placement import Codec
from blockwalk.walk.walker import Walker
from tests.autograd.test_mebp import decoded_model
from tests.models import tiny_model
from tests.support.messages import refused
from tests.support.objectives import FORMULAS, judged_batch, on_whole_logits

WORST = 2e-6


def adapted(model: nn.Module, modules: list[str]) -> nn.Module:
    """The model with LoRA, B drawn as well."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=3, target_modules=modules, init_lora_weights=False))


def expected(
    model: nn.Module, objective: str, batch: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """The objective and its gradients by canonical name."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    model.zero_grad()
    value = on_whole_logits(
        FORMULAS[objective], model(**inputs, use_cache=False).logits.float(), batch
    )
    value.backward()
    gradients = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return float(value.detach()), gradients


def assert_alike(gradients: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Every gradient is autograd's, relative to the largest of its kind."""
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        size = float(wanted[name].norm())
        assert float((gradient - wanted[name]).norm()) <= WORST * size, name


def walk(
    model: nn.Module, batch: Mapping[str, Tensor], objective: str, folder: Path, **settings: Any
) -> tuple[float, dict[str, Tensor]]:
    name = settings.pop("name", "mebp")
    plan = method(name, objective=objective, **settings)
    with Walker(copy.deepcopy(model), plan, workdir=folder, device="cpu") as walker:
        gradients = walker.gradients(batch)
        return walker.step(batch).loss, gradients


@pytest.mark.parametrize("objective", FORMULAS)
def test_lora_and_full(objective: str, tmp_path: Path) -> None:
    """LoRA on blocks, whose head is read once, rows side by side; and every parameter of a tied
    model in two micro-batches, whose head is read twice."""
    model = adapted(tiny_model("llama"), ["q_proj", "up_proj"])
    batch = judged_batch()
    value, wanted = expected(model, objective, batch)
    loss, gradients = walk(model, batch, objective, tmp_path / "lora", frozen="disk × raw")
    assert loss == pytest.approx(value, rel=1e-6, abs=1e-7)
    assert_alike(gradients, wanted)
    tied = tiny_model("llama", tied=True, seed=1)
    value, wanted = expected(tied, objective, batch)
    loss, gradients = walk(
        tied, batch, objective, tmp_path / "full", name="plain", gradient_accumulation_steps=2
    )
    assert loss == pytest.approx(value, rel=1e-6, abs=1e-7)
    assert_alike(gradients, wanted)


@pytest.mark.parametrize("objective", ["dpo(beta=0.3)", "policy_gradient(epsilon_high=0.3)"])
def test_other_heads(objective: str, tmp_path: Path) -> None:
    """A head with a LoRA of its own, soft-capped; and a long sequence in tiles, whose losses come
    before its gradients."""
    batch = judged_batch(seed=2)
    capped = adapted(tiny_model("gemma2", tied=True), ["lm_head", "v_proj"])
    value, wanted = expected(capped, objective, batch)
    loss, gradients = walk(capped, batch, objective, tmp_path / "head", frozen="disk × raw")
    assert loss == pytest.approx(value, rel=1e-6, abs=1e-7)
    assert_alike(gradients, wanted)
    batch = judged_batch(seed=3, rows=2, sequence=150)
    tiled = adapted(tiny_model("llama", max_position_embeddings=256), ["v_proj", "down_proj"])
    value, wanted = expected(tiled, objective, batch)
    loss, gradients = walk(
        tiled, batch, objective, tmp_path / "tiles", frozen="disk × raw", sequence_tile=64
    )
    assert loss == pytest.approx(value, rel=1e-6, abs=1e-7)
    assert_alike(gradients, wanted)


def test_a_head_in_4_bits(tmp_path: Path) -> None:
    """Oracle: the model that the codes decode to. The adapter is one that is gone on from."""
    tiny_model("llama", tied=True).save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "store", Codec.INT4)
    decoded = adapted(decoded_model(tmp_path / "model", tmp_path / "store"), ["q_proj", "o_proj"])
    decoded.save_pretrained(tmp_path / "adapter")
    batch = judged_batch(seed=5)
    value, wanted = expected(decoded, "dpo(beta=0.3)", batch)
    plan = method("mebp", objective="dpo(beta=0.3)")
    with Walker(
        tmp_path / "store", plan, lora=tmp_path / "adapter", workdir=tmp_path, device="cpu"
    ) as walker:
        gradients = walker.gradients(batch)
        assert walker.step(batch).loss == pytest.approx(value, rel=1e-6, abs=1e-7)
    assert_alike(gradients, wanted)


@pytest.mark.parametrize("objective", ["dpo(beta=0.3)", "cpo(beta=0.3, label_smoothing=0.1)"])
def test_cut_into_micro_batches(objective: str, tmp_path: Path) -> None:
    """One batch as 1, 2 and 4 micro-batches, whose walks follow each other or visit together."""
    model = adapted(tiny_model("llama"), ["q_proj", "up_proj"])
    batch = judged_batch(seed=1)
    value, wanted = expected(model, objective, batch)
    for count, together in ((1, 1), (2, 1), (4, 1), (4, 4)):
        loss, gradients = walk(
            model,
            batch,
            objective,
            tmp_path / f"{count} {together}",
            frozen="disk × raw",
            gradient_accumulation_steps=count,
            together=together,
        )
        assert loss == pytest.approx(value, rel=1e-6, abs=1e-7)
        assert_alike(gradients, wanted)


def test_metrics_are_means_over_the_step(tmp_path: Path) -> None:
    """Oracle: rewards of whole logits. Reward accuracy and margin are the step's, however it is
    cut."""
    model = adapted(tiny_model("llama"), ["q_proj"])
    batch = judged_batch(seed=4)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logps_BSV = model(**inputs, use_cache=False).logits[:, :-1].double().log_softmax(-1)
    labels_BS = batch["labels"][:, 1:]
    logp_BS = logps_BSV.gather(2, labels_BS.clamp(min=0).unsqueeze(2)).squeeze(2)
    ratio_B = (logp_BS * (labels_BS != -100)).sum(1)
    ratio_B -= batch["objective.reference_log_probabilities"]
    margin_P = 0.3 * (ratio_B[::2] - ratio_B[1::2])
    plan = method(
        "mebp", frozen="disk × raw", objective="dpo(beta=0.3)", gradient_accumulation_steps=2
    )
    with Walker(copy.deepcopy(model), plan, workdir=tmp_path, device="cpu") as walker:
        metrics = walker.step(batch).metrics
    assert metrics["margin"] == pytest.approx(float(margin_P.mean()), rel=1e-5)
    assert metrics["reward_accuracy"] == float((margin_P > 0).double().mean())


@pytest.mark.parametrize("batches", [1, 2])
def test_losses_of_sequences_that_lie_side_by_side(batches: int, tmp_path: Path) -> None:
    """Oracle: the cross-entropy of whole logits, summed over each row. A batch is walked without
    its padding."""
    model = adapted(tiny_model("llama"), ["q_proj"])
    batch = judged_batch(seed=10, sequence=60)
    batch["attention_mask"][::2, 20:] = 0
    batch["labels"][::2, 20:] = -100
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits_BSV = model(**inputs, use_cache=False).logits[:, :-1].double()
        expected_BS = torch.nn.functional.cross_entropy(
            logits_BSV.transpose(1, 2), batch["labels"][:, 1:], reduction="none"
        )
    plan = method("mebp", frozen="disk × raw", objective="dpo")
    with Walker(copy.deepcopy(model), plan, workdir=tmp_path, device="cpu") as walker:
        losses_B = walker.label_losses(batch, batches=batches, packs=True)
        shapes = [tuple(labels.shape) for labels in walker._forward.labels]
    assert all(rows == 1 for rows, _ in shapes), shapes
    torch.testing.assert_close(losses_B, expected_BS.sum(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["plain", "zero3"])
def test_a_batch_without_its_numbers_is_refused(name: str) -> None:
    """Before any of it is walked."""
    batch = judged_batch()
    del batch["objective.reference_log_probabilities"]
    with Walker(tiny_model("llama"), method(name, objective="dpo"), device="cpu") as walker:
        with refused(ValueError, "objective.reference_log_probabilities"):
            walker.step(batch)
        with refused(ValueError, "3 2"):
            walker.step({name: tensor[:3] for name, tensor in judged_batch().items()})
