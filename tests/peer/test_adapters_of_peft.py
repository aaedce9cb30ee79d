"""Oracle: PEFT's loss with the adapter that it saved, and with what it loads of ours; transformers'
of a merged model."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from blockwalk import Walker, method
from blockwalk.convert.merge import merge
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import RunConfig
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.vision_models import batch_of_text, make

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

WALK = method("mebp", frozen="disk", compute_dtype="float32")
BOTH = ["q_proj", "embed_tokens", "lm_head"]
COPIES = {"modules_to_save": ["embed_tokens", "lm_head"]}
TIED_LORA = {"target_modules": BOTH, "ensure_weight_tying": True}


def base_in(folder: Path, **changes: Any) -> Path:
    tiny_model("llama", **changes).save_pretrained(folder / "base")
    return folder / "base"


def from_base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def loss_of(model: Any, batch: Mapping[str, torch.Tensor]) -> float:
    with torch.no_grad():
        return float(model.eval()(**batch).loss)


def saved_by_peft(base: Path, rows: int = 0, **settings: Any) -> tuple[Path, float]:
    """An adapter of random values, saved, and PEFT's loss with it."""
    model = from_base(base)
    if rows:
        model.resize_token_embeddings(rows)
    given = copy.deepcopy(
        {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], **settings}
    )  # PEFT changes lists in place
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **given))
    torch.manual_seed(1)
    for param in adapted.parameters():
        if param.requires_grad:
            param.data += 0.2 * torch.randn_like(param)
    folder = base.parent / "adapter"
    adapted.save_pretrained(folder)
    return folder, loss_of(adapted, random_batch())


def walked(
    base: Path | str, adapter: Path, batch: Mapping[str, torch.Tensor], plan: Plan = WALK
) -> float:
    with Walker(base, plan, lora=adapter, training=False, device="cpu") as walker:
        return walker.evaluate(batch).loss


def merged(base: Path, adapter: Path) -> float:
    merge(base, adapter, base.parent / "merged")
    return loss_of(from_base(base.parent / "merged"), random_batch())


def change(adapter: Path, key: str, value: Any) -> None:
    """Change a key of the adapter's configuration."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


@pytest.mark.parametrize(
    ("tied", "settings"),
    [
        (True, {"target_modules": ["q_proj", "lm_head"]}),
        (False, {"target_modules": ["q_proj", "lm_head"]}),
        (True, {"target_modules": ["q_proj", "embed_tokens"]}),
        (False, {"target_modules": ["q_proj", "embed_tokens"]}),
        (True, {"target_modules": BOTH}),
        (True, TIED_LORA),
        (True, {**COPIES, "ensure_weight_tying": True}),
        (False, {"init_lora_weights": "orthogonal", "r": 4}),
    ],
    ids=str,
)
def test_what_peft_saved_is_scored_as_it_does(
    tied: bool, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Its file has a copy of the embedding and of the head beside a LoRA on them."""
    base = base_in(tmp_path, tied=tied)
    adapter, expected = saved_by_peft(base, **settings)
    assert walked(base, adapter, random_batch()) == pytest.approx(expected, abs=2e-6)
    assert merged(base, adapter) == pytest.approx(expected, abs=2e-6)


def test_a_copy_beside_a_packed_base_is_the_checkpoints(tmp_path: Path) -> None:
    """The base is walked in four bits: its file's weights are what the copy is of."""
    base = base_in(tmp_path, tied=True)
    adapter, expected = saved_by_peft(base, target_modules=BOTH)
    packed = walked(base, adapter, random_batch(), method("mebp", compute_dtype="float32"))
    assert abs(packed - expected) < 0.2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("plan", ["plain", "mebp", "zo2"])
def test_peft_scores_what_we_trained_at_both_ends_as_we_do(
    plan: str, tied: bool, tmp_path: Path
) -> None:
    base = base_in(tmp_path, tied=tied)
    lora = LoraSettings(rank=2, target_modules=tuple(BOTH))
    settings = {"mebp": {"frozen": "disk"}, "plain": {}, "zo2": {}}[plan]
    rate = 1e-4 if plan == "zo2" else 3e-2
    chosen = method(plan, compute_dtype="float32", optimizer={"learning_rate": rate}, **settings)
    with Walker(base, chosen, lora=lora, device="cpu") as walker:
        for seed in range(3):
            walker.step(random_batch(seed=seed))
        ours = walker.evaluate(random_batch()).loss
        walker.save_pretrained(tmp_path / "ours")
    theirs = loss_of(PeftModel.from_pretrained(from_base(base), tmp_path / "ours"), random_batch())
    assert ours == pytest.approx(theirs, abs=5e-6)


def test_names_of_older_models_with_pictures_are_read(tmp_path: Path) -> None:
    """Before transformers 4.52 the decoder stood above ``language_model``: PEFT renames what it
    loads."""
    make("gemma3").save_pretrained(tmp_path / "base")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32)
    targets = r".*language_model.*\.(q|v)_proj"
    adapted = get_peft_model(model, LoraConfig(r=3, task_type="CAUSAL_LM", target_modules=targets))
    for param in adapted.parameters():
        if param.requires_grad:
            param.data += 0.2 * torch.randn_like(param)
    adapted.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    new = "base_model.model.model.language_model."
    old = "base_model.model.language_model.model."
    tensors = {name.replace(new, old): tensor for name, tensor in load_file(file).items()}
    assert all(name.startswith(old) for name in tensors)
    save_file(tensors, file)
    again = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32),
        tmp_path / "adapter",
    )
    batch = batch_of_text()
    types = {"token_type_ids": torch.zeros_like(batch["input_ids"])}
    expected = loss_of(again, {**batch, **types})
    assert walked(tmp_path / "base", tmp_path / "adapter", batch) == pytest.approx(
        expected, abs=2e-6
    )
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert loss_of(whole, {**batch, **types}) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("base_settings", "settings", "words"),
    [
        ({"tied": True}, COPIES, "model.embed_tokens.weight lm_head.weight"),
        ({"tied": True}, {"modules_to_save": ["lm_head"]}, "tied"),
        ({"attention_bias": True}, {"bias": "all"}, "bias all"),
    ],
)
def test_what_changes_the_model_itself_is_merged(
    base_settings: dict[str, Any], settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """It cannot be walked beside its base; the message says what can be done, and that has PEFT's
    loss."""
    base = base_in(tmp_path, **base_settings)
    adapter, expected = saved_by_peft(base, **settings)
    with refused(ValueError, words) as error:
        walked(base, adapter, random_batch())
    assert f"blockwalk merge MODEL {adapter} OUT" in str(error.value)
    assert merged(base, adapter) == pytest.approx(expected, abs=2e-6)


def test_copies_of_other_weights_are_refused(tmp_path: Path) -> None:
    """PEFT would load them into the model."""
    base = base_in(tmp_path)
    adapter, _ = saved_by_peft(base, target_modules=BOTH)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.base_layer.weight"] += 0.01
    save_file(tensors, file)
    with refused(ValueError, "lm_head.weight merge"):
        walked(base, adapter, random_batch())
    expected = loss_of(PeftModel.from_pretrained(from_base(base), adapter), random_batch())
    assert merged(base, adapter) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("settings", [{}, COPIES])
def test_a_resized_vocabulary_is_told_with_its_sizes(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    base = base_in(tmp_path)
    adapter, _ = saved_by_peft(base, rows=104, **settings)
    with refused(ValueError, "104 101 32 resized"):
        walked(base, adapter, random_batch())
    with refused(ValueError, "101 104 32 resized"):
        merge(base, adapter, tmp_path / "merged")


def test_tied_factors_that_differ_are_refused(tmp_path: Path) -> None:
    """Of two pairs PEFT takes one for both ends, and says nothing."""
    base = base_in(tmp_path, tied=True)
    adapter, apart = saved_by_peft(base, target_modules=BOTH)
    change(adapter, "ensure_weight_tying", value=True)
    tied = loss_of(PeftModel.from_pretrained(from_base(base), adapter), random_batch())
    assert abs(tied - apart) > 1e-3
    for reader in (
        lambda: walked(base, adapter, random_batch()),
        lambda: merge(base, adapter, tmp_path / "merged"),
    ):
        with refused(ValueError, "ensure_weight_tying LoRA model.embed_tokens lm_head"):
            reader()


def test_tied_factors_are_not_trained(tmp_path: Path) -> None:
    base = base_in(tmp_path, tied=True)
    adapter, _ = saved_by_peft(base, **TIED_LORA)
    in_memory = get_peft_model(from_base(base), LoraConfig(r=2, task_type="CAUSAL_LM", **TIED_LORA))
    settings = LoraSettings(
        rank=2, target_modules=tuple(BOTH), options={"ensure_weight_tying": True}
    )
    for model, lora in ((base, settings), (base, adapter), (in_memory, None)):
        with refused(ValueError, "ensure_weight_tying"):
            Walker(model, method("plain"), lora=lora, device="cpu")


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"target_modules": ["q_proj", "vproj"]}, "lora.target_modules vproj v_proj"),
        ({"target_modules": ["qproj"]}, "lora.target_modules qproj down_proj gate_proj"),
        ({"target_modules": "layers.*q_prj"}, "lora.target_modules layers.*q_prj"),
        ({"options": {"exclude_modules": ["down_prj"]}}, "lora.options.exclude_modules down_prj"),
        (
            {"options": {"layers_to_transform": [0, 9]}, "target_modules": ["q_proj"]},
            "layers_to_transform 9",
        ),
        ({"options": {"rank_pattern": {"q_prj": 2}}}, "lora.options.rank_pattern q_prj"),
        ({"options": {"alpha_pattern": {"lm_head": 2}}}, "lora.options.alpha_pattern lm_head"),
    ],
)
def test_a_name_that_means_nothing_is_refused(lora: dict[str, Any], words: str) -> None:
    """Oracle: PEFT passes over it, and trains another number of adapters than was meant."""
    with refused(ValueError, words):
        Walker(tiny_model("llama"), method("plain"), lora=lora, device="cpu")


def test_names_that_peft_renames_mean_something() -> None:
    """Mixtral's experts had names of their own before transformers 5."""
    lora = {"target_modules": ["q_proj", "w1", "w3"]}
    with Walker(tiny_model("mixtral"), method("plain"), lora=lora, device="cpu") as walker:
        names = [name for name in walker.state_dict() if ".lora_" in name]
    assert any("experts" in name for name in names)


def test_dropout_under_zeroth_order_is_refused() -> None:
    for name in ("mezo", "zo2"):
        lora = LoraSettings(rank=2, dropout=0.1)
        with refused(ValueError, "lora.dropout 0.1 method 0"):
            Walker(tiny_model("llama"), method(name), lora=lora, device="cpu")
        with refused(ValueError, "lora.dropout 0.1"):
            RunConfig("model", plan=method(name), lora=lora)


def test_lora_bias_without_a_bias_is_told(tmp_path: Path) -> None:
    base = base_in(tmp_path)
    adapter, expected = saved_by_peft(base, lora_bias=True)
    assert walked(base, adapter, random_batch()) == pytest.approx(expected, abs=2e-6)
    with refused(ValueError, "lora_bias model.layers.0.self_attn.q_proj"):
        merge(base, adapter, tmp_path / "merged")


def test_the_folder_of_a_run_is_told_from_its_adapter(tmp_path: Path) -> None:
    base = base_in(tmp_path)
    adapter, _ = saved_by_peft(base)
    with refused(ValueError, f"{adapter}"):
        walked(base, tmp_path, random_batch())
