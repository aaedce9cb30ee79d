"""Oracle: autograd over the whole model in memory, its frozen weights decoded from the 4-bit store,
with the same LoRA."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blockwalk.cutting.peft_models import add_adapter, lora_config
from blockwalk.engine.pack import pack
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.plan.placement import Codec, StateKind
from blockwalk.plan.run_config import RunConfig
from blockwalk.program.placements import Placements
from blockwalk.program.program import OpKind, Shape, StepKind
from blockwalk.report.foresee import model_spec
from blockwalk.tiers.block_store.store import BlockStore
from blockwalk.walk.unit_costs import UnitCosts
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused

LORA = LoraSettings(rank=4, alpha=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", tied=True, hidden_size=64, intermediate_size=96).save_pretrained(
        tmp_path / "model"
    )
    return tmp_path / "model"


def decoded_model(folder: Path, store: Path) -> nn.Module:
    """The checkpoint's model with every stored parameter decoded from the store."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    source = BlockStore(store)
    for name, parameter in model.named_parameters():
        source.read_into(name, parameter.data)
    return model


@pytest.mark.parametrize("codec", [Codec.INT4, Codec.INT8, Codec.BF16, Codec.RAW])
@pytest.mark.parametrize("target", ["all-linear", ("q_proj", "v_proj")])
def test_lora_gradients_are_those_of_autograd(
    folder: Path, tmp_path: Path, codec: Codec, target: Any
) -> None:
    store = tmp_path / "store"
    pack(folder, store, codec)
    lora = LoraSettings(rank=4, alpha=8, target_modules=target)
    batch = random_batch()
    with Walker(
        store, method("mebp", frozen=f"disk × {codec}"), lora=lora, workdir=tmp_path, device="cpu"
    ) as walker:
        walker.step(batch)  # B starts at zero: after a step every adapter matrix has a gradient
        state = {name: t.clone() for name, t in walker.engine.trained.masters.items()}
        gradients = walker.gradients(batch)
    control = add_adapter(decoded_model(folder, store), lora_config(4, 8, target), seed=0).train()
    for name, parameter in control.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(
                state[name.removeprefix("base_model.model.").replace(".default", "")]
            )
    control(**batch, use_cache=False).loss.backward()
    checked = 0
    for name, parameter in control.named_parameters():
        if parameter.requires_grad:
            mine = gradients.pop(name.removeprefix("base_model.model.").replace(".default", ""))
            assert parameter.grad is not None
            assert (mine - parameter.grad).norm() <= 3e-6 * parameter.grad.norm(), name
            checked += 1
    assert not gradients
    assert checked == 2 * 3 * (7 if target == "all-linear" else 2)


def test_a_program_has_the_bytes_of_a_store_in_groups_of_64(folder: Path, tmp_path: Path) -> None:
    """Oracle: the bytes of each unit in the store's index; in groups of 32 there are 6% more."""
    pack(folder, tmp_path / "store", Codec.INT4, 64)
    run = RunConfig(model=str(tmp_path / "store"), plan=method("mebp"), lora=LORA)
    with Walker(
        tmp_path / "store", method("mebp"), lora=LORA, workdir=tmp_path, device="cpu"
    ) as walker:
        stored = {
            unit.name: sum(p.nbytes for p in unit.params)
            for unit in BlockStore(tmp_path / "store").index.units
        }
        program = walker.program(StepKind.TRAIN, Shape(4, 12))
        fetched = {op.unit: op.nbytes for op in program.ops if op.kind is OpKind.FETCH}
        for spec in (walker.spec, model_spec(run.model, UnitCosts(run.model, lora=LORA))):
            assert {
                unit.name: unit.nbytes(Codec.INT4, trainable=False) for unit in spec.units
            } == stored
        assert all(
            fetched[number] == stored[unit.name]
            for number, unit in enumerate(walker.spec.units[:-1])
        )


def test_a_plain_folder_is_packed_once_and_trained(folder: Path, tmp_path: Path) -> None:
    """Oracle: the run on the store that `pack` writes."""
    pack(folder, tmp_path / "store", Codec.INT4A)
    ends = []
    for model in (folder, tmp_path / "store"):
        plan = method("mebp", optimizer={"learning_rate": 1e-2})
        with Walker(model, plan, lora=LORA, workdir=tmp_path / "work", device="cpu") as walker:
            losses = [walker.step(random_batch(seed=step)).loss for step in range(3)]
            ends.append(
                (losses, {name: t.clone() for name, t in walker.engine.trained.masters.items()})
            )
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[0][1][name], ends[1][1][name]) for name in ends[0][1])


@pytest.mark.parametrize("codec", ["int4", "int8", "raw"])
def test_a_row_reads_a_store_as_it_was_packed(codec: str, folder: Path, tmp_path: Path) -> None:
    """Oracle: the run that names the codec. What a row has yields to what is packed; what is set
    does not."""
    pack(folder, tmp_path / "store", Codec(codec))
    found = []
    for settings in ({}, {"frozen": f"disk × {codec}"}):
        with Walker(
            tmp_path / "store", method("mebp", **settings), lora=LORA, device="cpu"
        ) as walker:
            found.append(walker.step(random_batch()).loss)
    assert found[0] == found[1]
    with refused(ValueError, f"{codec} fp8"):
        Walker(tmp_path / "store", method("mebp", frozen="disk × fp8"), lora=LORA, device="cpu")


def test_the_adapter_loads_in_plain_peft_with_the_same_logits(folder: Path, tmp_path: Path) -> None:
    """Oracle: peft.PeftModel over the decoded model."""
    from peft import PeftModel

    pack(folder, tmp_path / "store", Codec.INT4)
    batch = random_batch()
    plan = method("mebp", optimizer={"learning_rate": 1e-2})
    with Walker(tmp_path / "store", plan, lora=LORA, workdir=tmp_path, device="cpu") as walker:
        for step in range(5):
            walker.step(random_batch(seed=step))
        walker.save_pretrained(tmp_path / "adapter")
        expected = walker.evaluate(batch)
    peft = PeftModel.from_pretrained(
        decoded_model(folder, tmp_path / "store"), tmp_path / "adapter"
    ).eval()
    with torch.no_grad():
        loss = float(peft(**batch, use_cache=False).loss)
    assert expected.loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2", "gemma2", "mixtral"])
@pytest.mark.parametrize("trains", ["adapters", "everything"])
def test_graphs_in_file_maps_give_the_gradients_of_recomputation(
    kind: str, trains: str, tmp_path: Path
) -> None:
    """Oracle: the walk that recomputes every block, bit for bit; autograd is that one's. A second
    step writes over the first's maps, block by block and micro-batch by micro-batch, under the
    dropout of the model's own configuration."""
    model = tiny_model(kind)
    lora = (
        LoraSettings(rank=4, dropout=0.0 if kind == "mixtral" else 0.1)
        if trains == "adapters"
        else None
    )
    frozen = {"frozen": "disk × raw"}
    found = {}
    for recompute in ("all", "none"):
        plan = method(
            "mebp",
            recompute=recompute,
            gradient_accumulation_steps=2,
            **{"update.timing": "step"},
            **frozen,
        )
        with Walker(
            copy.deepcopy(model), plan, lora=lora, workdir=tmp_path / recompute, device="cpu"
        ) as walker:
            found[recompute] = []
            for seed in range(2):
                gradients = walker.gradients(random_batch(4, 64, seed=seed))
                walker.step(random_batch(4, 64, seed=seed))
                found[recompute].append(gradients)
            saved = walker.estimator.saved
            kept = saved.keys() - {(0, 0)}  # under which recomputed graphs take turns
            assert bool(kept) == (recompute == "none")
            if kept:
                held = {
                    key: [m.bytes_P.data_ptr() for m in each._maps] for key, each in saved.items()
                }
                walker.step(random_batch(4, 64, seed=2))
                assert held == {
                    key: [m.bytes_P.data_ptr() for m in each._maps] for key, each in saved.items()
                }
    for kept, again in zip(found["none"], found["all"], strict=True):
        assert kept.keys() == again.keys()
        for name, gradient in kept.items():
            if (
                kind == "mixtral"
            ):  # views with gaps are written without them, and other kernels read them
                assert torch.allclose(gradient, again[name], rtol=1e-5, atol=1e-8), name
            else:
                assert torch.equal(gradient, again[name]), name


def test_graphs_keep_no_experts_that_are_decoded_where_rows_are_routed(tmp_path: Path) -> None:
    """Oracle: the walk that recomputes. Fused experts in 4 bits are read where they lie, in every
    block's graph."""
    tiny_model("mixtral").save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "store", Codec.INT4)
    found = []
    for recompute in ("all", "none"):
        with Walker(
            tmp_path / "store", method("mebp", recompute=recompute), lora=LORA, device="cpu"
        ) as walker:
            found.append(walker.gradients(random_batch()))
            blocks = range(1, len(walker.spec.blocks) + 1)
            assert walker.estimator.saved.keys() == (
                {(b, 0) for b in blocks} if recompute == "none" else {(0, 0)}
            )
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("codec", ["int4", "int8", "bf16", "raw"])
def test_frozen_blocks_that_visit_slots_give_the_same_bits(
    kind: str, codec: str, tmp_path: Path
) -> None:
    """Oracle: the walk that reads them where they are mapped. On the host tier they are copied to
    slots, as a GPU would have them, experts too, in their codes. Updates, evaluation and zeroth
    order read them too."""
    tiny_model(kind).save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "store", Codec(codec))
    for name, prefetch in (("mebp", 1), ("mebp", 0), ("zo2", 3)):
        found = []
        for tier in ("disk", "host"):
            plan = method(name, recompute="all", frozen=f"{tier} × {codec}", prefetch=prefetch)
            with Walker(tmp_path / "store", plan, lora=LORA, device="cpu") as walker:
                slots = walker.engine.homes[StateKind.FROZEN].slots
                places = Placements(plan, walker.spec, "cpu")
                assert (slots is None) == (tier == "disk")
                if (
                    slots is not None
                ):  # what a program reckons with: the buffers that are there, but for their padding
                    held = slots.nbytes // places.slot_count
                    foreseen = places.sizes.memory_bytes(walker.spec.blocks[0])
                    assert foreseen <= held <= 1.1 * foreseen
                losses = [walker.step(random_batch(seed=seed)).loss for seed in range(3)]
                found.append(
                    (losses, walker.evaluate(random_batch(seed=9)).loss_sum, walker.state_dict())
                )
        (losses, evaluated, state), (again, evaluated_again, state_again) = found
        assert losses == again
        assert evaluated == evaluated_again
        for key, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(tensor, state_again[key]), key


def test_a_model_whose_frozen_part_visits_slots_is_saved_whole(tmp_path: Path) -> None:
    """Oracle: the model itself. A slot holds the last block that visited it, not what every block's
    parameters are."""
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    plan = method("mebp", frozen="host × raw", **{"optimizer.learning_rate": 0.0})
    with Walker(copy.deepcopy(model), plan, device="cpu") as walker:
        walker.step(random_batch())
        walker.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(
        torch.equal(p, dict(saved.named_parameters())[name]) for name, p in model.named_parameters()
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("frozen", ["disk × int4", "host × int4", "disk × raw"])
def test_on_a_gpu(frozen: str, folder: Path, tmp_path: Path) -> None:
    """Oracle: the same walk on the CPU, to float32's rounding."""
    found = []
    for device in ("cpu", "cuda"):
        plan = method("mebp", recompute="all", frozen=frozen)
        with Walker(folder, plan, lora=LORA, workdir=tmp_path / device, device=device) as walker:
            losses = [walker.step(random_batch(seed=seed)).loss for seed in range(3)]
            found.append(
                (
                    losses,
                    {name: g.cpu() for name, g in walker.gradients(random_batch(seed=3)).items()},
                )
            )
    (losses, gradients), (on_gpu, gradients_on_gpu) = found
    assert on_gpu == pytest.approx(losses, rel=1e-5)
    for name, gradient in gradients.items():
        assert torch.allclose(gradients_on_gpu[name], gradient, rtol=1e-3, atol=1e-6), name
