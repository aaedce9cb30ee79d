"""Oracle: PEFT's own model of the same configuration, whole in memory, and what it reads of the
files: losses and gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.dora import DoraLinearLayer

from blockwalk.plan.methods import method
from blockwalk.program.program import OpKind, Shape, StepKind
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

LLAMA = ["q_proj", "down_proj"]
"""The outputs of down_proj are read by no gradient but that of its magnitudes."""
UNDROPPED = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dora": ("llama", {}, {"use_dora": True, "target_modules": LLAMA}),
    "dora, bias": (
        "opt",
        {"dropout": 0.0},
        {"use_dora": True, "target_modules": ["q_proj", "fc2"]},
    ),
    "dora, turned": (
        "gpt2",
        UNDROPPED,
        {"use_dora": True, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    ),
    "dora on the head": ("llama", {}, {"use_dora": True, "target_modules": ["lm_head", "q_proj"]}),
    "ends": (
        "llama",
        {},
        {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": LLAMA},
    ),
    "norms": ("llama", {}, {"modules_to_save": ["norm"], "target_modules": LLAMA}),
    "tied": (
        "llama",
        {"tied": True},
        {"modules_to_save": ["lm_head"], "ensure_weight_tying": True, "target_modules": LLAMA},
    ),
}


def named(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of PEFT's model under the names that they have in its files."""
    grads = {name: param.grad for name, param in model.named_parameters() if param.requires_grad}
    for part in ("base_model.model.", ".default", ".modules_to_save"):
        grads = {name.replace(part, "", 1): grad for name, grad in grads.items()}
    return grads


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("PEFT's own forward decodes the weight whole")


@pytest.mark.parametrize("plan", ["mebp", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters_are_pefts(
    kind: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One adapter begun at one seed; three steps later the files give PEFT, and a walk, the loss
    that the run had."""
    family, sizes, settings = KINDS[kind]
    config = LoraConfig(r=3, lora_alpha=7, task_type="CAUSAL_LM", **settings)
    batch = random_batch()
    model: Any = tiny_model(family, **sizes)
    model.save_pretrained(tmp_path / "model")
    from_disk = method("mebp", frozen="disk × raw", optimizer={"learning_rate": 1e-2})
    chosen = from_disk if plan == "mebp" else method(plan, optimizer={"learning_rate": 1e-2})
    given = copy.deepcopy(config)
    with Walker(tmp_path / "model", chosen, lora=given, device="cpu") as walker:
        torch.manual_seed(chosen.seed)
        control = get_peft_model(copy.deepcopy(model), copy.deepcopy(config))
        loss = control(**batch, use_cache=False).loss
        loss.backward()
        with monkeypatch.context() as patch:
            patch.setattr(DoraLinearLayer, "forward", refuse)
            found = walker.gradients(batch)
            expected = named(control)
            assert walker.evaluate(batch).loss == pytest.approx(float(loss.detach()), rel=1e-6)
            for _ in range(3):
                walker.step(batch)
            trained = walker.evaluate(batch).loss
        walker.save_pretrained(tmp_path / "adapter")
    assert given == config, "the caller's configuration stays as it was"
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 3e-6 * gradient.norm(), name
    assert trained < float(loss.detach()) - 0.01
    theirs = PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        assert float(theirs(**batch, use_cache=False).loss) == pytest.approx(trained, rel=1e-6)
    with Walker(
        tmp_path / "model", from_disk, lora=tmp_path / "adapter", training=False, device="cpu"
    ) as walker:
        assert walker.evaluate(batch).loss == pytest.approx(trained, rel=1e-6)


def test_dora_over_codes_begins_from_what_the_codes_say(tmp_path: Path) -> None:
    """Oracle: the loss of the walk without adapters: a new adapter changes nothing, so magnitudes
    are the norms of the rows that the walk multiplies with."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    plan = method("mebp")
    batch = random_batch()
    with Walker(tmp_path / "model", plan, training=False, device="cpu") as walker:
        expected = walker.evaluate(batch).loss
    with Walker(
        tmp_path / "model", plan, lora={"options": {"use_dora": True}}, device="cpu"
    ) as walker:
        assert walker.evaluate(batch).loss == pytest.approx(expected, rel=1e-4)
        walker.step(batch)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_start_that_changes_the_base_is_taken_as_peft_made_it(start: str, tmp_path: Path) -> None:
    """PEFT's model in memory, its base changed; saved, PEFT loads it on the base as it was."""
    config = LoraConfig(
        r=3, lora_alpha=7, task_type="CAUSAL_LM", target_modules=LLAMA, init_lora_weights=start
    )
    model = tiny_model("llama")
    batch = random_batch()
    control = get_peft_model(copy.deepcopy(model), config)
    with Walker(
        copy.deepcopy(control), method("mebp", frozen="disk × raw"), device="cpu"
    ) as walker:
        loss = control(**batch, use_cache=False).loss
        loss.backward()
        found = walker.gradients(batch)
        expected = named(control)
        assert walker.evaluate(batch).loss == pytest.approx(float(loss.detach()), rel=1e-6)
        walker.step(batch)
        trained = walker.evaluate(batch).loss
        walker.save_pretrained(tmp_path)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 3e-6 * gradient.norm(), name
    theirs = PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path)).eval()
    with torch.no_grad():
        assert float(theirs(**batch, use_cache=False).loss) == pytest.approx(trained, rel=1e-5)


@pytest.mark.parametrize(
    ("tied", "plan", "options", "words"),
    [
        (
            True,
            "plain",
            {"modules_to_save": ["lm_head"]},
            "model.embed_tokens.weight ensure_weight_tying",
        ),
        (False, "plain", {"modules_to_save": ["lm_haed"]}, "lm_haed lm_head"),
        (False, "plain", {"init_lora_weights": "pissa"}, "model PEFT"),
        (False, "mezo", {"use_dora": True}, "int8 DoRA's|DoRA"),
    ],
)
def test_refused(
    tied: bool, plan: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Oracle: the names of the parameters."""
    tiny_model("llama", tied=tied).save_pretrained(tmp_path / "model")
    chosen = method(plan, frozen="disk × int8") if plan == "mezo" else method(plan)
    with refused(ValueError, words):
        Walker(
            tmp_path / "model",
            chosen,
            lora={"options": options},
            workdir=tmp_path / "work",
            device="cpu",
        )
    assert not list((tmp_path / "work").rglob("*.blocks*")), "nothing was packed"


def test_norms_are_trained_over_codes(tmp_path: Path) -> None:
    """Oracle: the tensors in the file: norms, which no codec rounds, have moved."""
    from safetensors.torch import load_file

    model: Any = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    with Walker(
        tmp_path / "model",
        method("mebp"),
        lora={"options": {"modules_to_save": ["norm"]}},
        device="cpu",
    ) as walker:
        walker.step(random_batch())
        walker.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert not torch.equal(saved["base_model.model.model.norm.weight"], model.model.norm.weight)


def test_copies_in_memory_are_refused() -> None:
    """Oracle: the name of the field."""
    model = get_peft_model(
        tiny_model("llama"), LoraConfig(target_modules=LLAMA, modules_to_save=["lm_head"])
    )
    with refused(ValueError, "modules_to_save"):
        Walker(model, method("plain"), device="cpu")


def test_modules_of_a_packed_model_are_refused(tmp_path: Path) -> None:
    """Oracle: the name of the parameter, of which the store has codes alone."""
    model: Any = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    with Walker(
        tmp_path / "model", method("mebp"), training=False, workdir=tmp_path / "work", device="cpu"
    ):
        (store,) = (tmp_path / "work").iterdir()
    with refused(ValueError, "int4a lora.options.modules_to_save lm_head.weight"):
        Walker(store, method("mebp"), lora=HEAD, device="cpu")


HEAD: dict[str, Any] = {"target_modules": [], "options": {"modules_to_save": ["lm_head"]}}
TIED = {**HEAD, "options": {**HEAD["options"], "ensure_weight_tying": True}}
PREFIX: dict[str, Any] = {"num_virtual_tokens": 5}


@pytest.mark.parametrize("plan", ["plain", "mebp"])
@pytest.mark.parametrize(
    ("lora", "family", "tied"),
    [
        (HEAD, "llama", False),
        (TIED, "llama", True),
        (PREFIX, "llama", False),
        (PREFIX, "opt", True),
        (PREFIX, "gemma2", True),
    ],
    ids=["head", "tied head", "prefix", "opt's prefix", "gemma2's prefix"],
)
def test_a_head_or_a_prefix_alone(
    lora: dict[str, Any], family: str, tied: bool, plan: str, tmp_path: Path
) -> None:
    """Loss and gradients are those of PEFT's model, which begins from what an untrained run saved;
    three steps later too."""
    sizes = (
        {"dropout": 0.0}
        if family == "opt"
        else {"sliding_window": 64}
        if family == "gemma2"
        else {}
    )
    model = tiny_model(family, tied=tied, **sizes)
    batch = random_batch()
    model.save_pretrained(tmp_path / "model")
    chosen = method(
        plan,
        optimizer={"learning_rate": 1e-2},
        **({"frozen": "disk × raw"} if plan == "mebp" else {}),
    )
    with Walker(tmp_path / "model", chosen, lora=lora, device="cpu") as walker:
        walker.save_pretrained(tmp_path / "begun")
        begun = copy.deepcopy(model)  # which PEFT loads to be read alone
        prefixed = lora is PREFIX
        control: Any = PeftModel.from_pretrained(
            begun, str(tmp_path / "begun"), is_trainable=not prefixed
        ).eval()
        if prefixed:
            control.prompt_encoder.requires_grad_(True)
        loss = control(**batch).loss
        loss.backward()
        found = walker.gradients(batch)
        expected = named(control)
        assert walker.evaluate(batch).loss == pytest.approx(float(loss.detach()), rel=1e-6)
        backward = [
            op.unit
            for op in walker.program(StepKind.TRAIN, Shape(2, 8)).ops
            if op.kind is OpKind.BACKWARD
        ]
        for _ in range(3):
            walker.step(batch)
        trained = walker.evaluate(batch).loss
        walker.save_pretrained(tmp_path / "adapter")
    assert bool(backward) == (lora is not HEAD), "below a head nothing is differentiated"
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= 3e-6 * gradient.norm(), name
    theirs = PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        assert (
            float(theirs(**batch).loss)
            == pytest.approx(trained, rel=1e-6)
            != pytest.approx(float(loss.detach()), rel=1e-5)
        )
    with Walker(
        tmp_path / "model", chosen, lora=tmp_path / "adapter", training=False, device="cpu"
    ) as walker:
        assert walker.evaluate(batch).loss == pytest.approx(trained, rel=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_over_codes_begins_from_the_checkpoint(tied: bool, tmp_path: Path) -> None:
    """Oracle: the checkpoint's own weight: the others alone are rounded, in the store that the walk
    reads."""
    from safetensors.torch import load_file

    model: Any = tiny_model("llama", tied=tied)
    model.save_pretrained(tmp_path / "model")
    with Walker(
        tmp_path / "model", method("mebp"), lora=TIED if tied else HEAD, device="cpu"
    ) as walker:
        walker.save_pretrained(tmp_path / "begun")
        walker.step(random_batch())
        walker.save_pretrained(tmp_path / "adapter")
    begun, after = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("begun", "adapter")
    )
    assert torch.equal(begun["base_model.model.lm_head.weight"], model.lm_head.weight)
    assert not torch.equal(after["base_model.model.lm_head.weight"], model.lm_head.weight)
