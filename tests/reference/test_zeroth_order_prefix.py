"""Oracle: the naive loops on the same PeftModel, whole and in memory. PEFT's prefix tuning hands
one key-value cache to every layer, which a layer writes into; a walk gives each call a view of its
own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from blockwalk import method
from blockwalk.convert.replay import replay
from blockwalk.reference.mezo import mezo_step
from blockwalk.reference.zeroth_order import masters_of, spsa_step
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.zeroth_order_runs import assert_same, trained

RATE = 1e-2
EPSILON = 1e-1
SETTINGS: dict[str, Any] = {"loss": "model", "optimizer": {"name": "sgd", "learning_rate": RATE}}


def prefixed(kind: str, *, projection: bool = False) -> Any:
    from peft import PrefixTuningConfig, get_peft_model

    model = tiny_model(kind, tied=True)
    config = PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=5, prefix_projection=projection
    )
    return get_peft_model(model, config)  # type: ignore[arg-type]


def canonical(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace(".default.", "."): value for name, value in values.items()}


class Renamed(nn.Module):
    """A PeftModel whose prefix has the names that its noise is drawn by."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return canonical(dict(self.model.named_parameters())).items()

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2", "gemma2"])
def test_a_prefix_trains_as_in_the_original_loop(kind: str, tmp_path: Path) -> None:
    model = prefixed(kind)
    control = copy.deepcopy(model)
    plan = method("mezo", zo={"noise": "mezo", "epsilon": EPSILON}, **SETTINGS)
    with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
        for step in range(4):
            found = walker.step(random_batch(seed=step), seed=step)
            expected = mezo_step(
                control, random_batch(seed=step), learning_rate=RATE, epsilon=EPSILON, seed=step
            )
            assert (found.loss, found.projected_grad) == (
                expected.losses[0],
                expected.projected_grads[0],
            )
            assert found.projected_grad
        values = {name: p.detach() for name, p in control.named_parameters() if p.requires_grad}
        assert_same(trained(walker), canonical(values))


@pytest.mark.parametrize("projection", [False, True], ids=["embedding", "projection"])
@pytest.mark.parametrize(
    "places",
    [{"name": "mezo"}, {"name": "zo2", "trainable": "host"}, {"name": "zo2", "frozen": "disk"}],
    ids=["resident", "host", "base on disk"],
)
def test_wherever_the_base_lies(places: dict[str, Any], projection: bool, tmp_path: Path) -> None:
    """And the base is only read."""
    model = prefixed("llama", projection=projection)
    before = {
        name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad
    }
    control: Any = Renamed(copy.deepcopy(model))
    masters = masters_of(control)
    assert len(masters) == (5 if projection else 1)
    with Walker(
        model,
        method(**places, zo={"epsilon": EPSILON}, seed=3, **SETTINGS),
        workdir=tmp_path,
        device="cpu",
    ) as walker:
        for step in range(1, 4):
            data = random_batch(seed=step)
            found = walker.step(data)
            expected = spsa_step(
                control, masters, data, step=step, seed=3, learning_rate=RATE, epsilon=EPSILON
            )
            assert (found.loss, found.projected_grad) == (
                expected.losses[0],
                expected.projected_grads[0],
            )
        assert_same(trained(walker), masters)
    if "frozen" not in places:
        return
    assert_same(
        {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}, before
    )
    stored = load_file(tmp_path / "in-memory" / "model.safetensors")
    assert all(
        torch.equal(stored[name.removeprefix("base_model.")], value)
        for name, value in before.items()
    )


@pytest.mark.parametrize("projection", [False, True], ids=["embedding", "projection"])
def test_a_saved_prefix_is_pefts(projection: bool, tmp_path: Path) -> None:
    """Oracle: `PeftModel.from_pretrained` on the folder, its logits and its greedy continuation."""
    from peft import PeftModel

    model = prefixed("llama", projection=projection)
    plan = method("mezo", zo={"epsilon": EPSILON}, **SETTINGS)
    ids = random_batch(seed=9)["input_ids"][:, :6]
    with Walker(copy.deepcopy(model), plan, workdir=tmp_path / "work", device="cpu") as walker:
        for step in range(3):
            walker.step(random_batch(seed=step))
        logits = walker.next_logits({"input_ids": ids})
        written = walker.generate(ids, 4)
        walker.save_pretrained(tmp_path / "prefix")
    saved: Any = PeftModel.from_pretrained(
        tiny_model("llama", tied=True), tmp_path / "prefix"
    ).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            saved(input_ids=ids, use_cache=False).logits[:, -1].float(), logits
        )
        assert not torch.allclose(
            model.eval()(input_ids=ids, use_cache=False).logits[:, -1].float(), logits
        )
        for _ in range(4):
            ids = torch.cat(
                [ids, saved(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1
            )
    assert torch.equal(written, ids)


@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2"])
def test_a_prefix_begins_as_real_tokens(kind: str, tmp_path: Path) -> None:
    """Oracle: what the whole model's own cache holds after those tokens, as PEFT hands the saved
    prefix to the layers; over a base in codes too. Then the ledger gives what the run saved, bit
    for bit."""
    from peft import PeftModel

    model: Any = tiny_model(kind)
    model.eval().save_pretrained(tmp_path / "model")
    plan = method("zo2", frozen="disk × int4", zo={"epsilon": EPSILON}, seed=3, **SETTINGS)
    given: dict[str, Any] = {
        "lora": {"num_virtual_tokens": 5},
        "workdir": tmp_path,
        "device": "cpu",
    }
    with Walker(tmp_path / "model", plan, **given, ledger=tmp_path / "ledger.jsonl") as walker:
        walker.save_pretrained(tmp_path / "begun")
        for step in range(3):
            walker.step(random_batch(seed=step))
        walker.save_pretrained(tmp_path / "prefix")
    ids = torch.randint(model.config.vocab_size, (1, 5), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=True).past_key_values
        handed: Any = PeftModel.from_pretrained(model, str(tmp_path / "begun")).get_prompt(1)
    for ours, theirs in zip(handed.layers, own.layers, strict=True):
        torch.testing.assert_close((ours.keys, ours.values), (theirs.keys, theirs.values))
    replay(tmp_path / "model", tmp_path / "ledger.jsonl", tmp_path / "again")
    begun, saved, again = (
        load_file(tmp_path / f / "adapter_model.safetensors") for f in ("begun", "prefix", "again")
    )
    assert torch.equal(saved["prompt_embeddings"], again["prompt_embeddings"])
    assert not torch.equal(saved["prompt_embeddings"], begun["prompt_embeddings"])


def test_a_model_without_keys_and_values_in_every_layer_is_refused(tmp_path: Path) -> None:
    """Oracle: the window: three tokens stay of five."""
    model: Any = tiny_model("gemma2", sliding_window=4)
    model.save_pretrained(tmp_path)
    with refused(ValueError, "Gemma2ForCausalLM 5"):
        Walker(tmp_path, method("mezo"), lora={"num_virtual_tokens": 5}, device="cpu")


def test_prompts_of_unequal_length_are_continued_as_alone(tmp_path: Path) -> None:
    """Oracle: each prompt by itself."""
    with Walker(
        prefixed("llama"), method("mezo"), workdir=tmp_path, device="cpu", training=False
    ) as walker:
        ids = random_batch(seed=9)["input_ids"][:2, :6]
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        together = walker.generate(ids, 4, attention_mask=mask)
        alone = [
            walker.generate(row[hidden:][None], 4)[0, -4:]
            for row, hidden in zip(ids, (2, 0), strict=True)
        ]
    assert torch.equal(together[:, 6:], torch.stack(alone))
