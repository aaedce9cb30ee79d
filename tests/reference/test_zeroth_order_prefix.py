"""Oracle: the naive loops on the same PeftModel, whole and in memory. PEFT's prefix tuning hands one key-value cache to every
layer, which a layer writes into; a walk gives each call a view of its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from blockwalk import method
from blockwalk.reference.mezo import mezo_step
from blockwalk.reference.zeroth_order import masters_of, spsa_step
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.reference.test_zeroth_order import assert_same, trained

RATE, EPSILON = 1e-2, 1e-1
SETTINGS: dict[str, Any] = {"loss": "model", "optimizer": {"name": "sgd", "learning_rate": RATE}}


def prefixed(kind: str, *, projection: bool = False) -> Any:
    from peft import PrefixTuningConfig, get_peft_model

    model = tiny_model(kind, tied=True)
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, prefix_projection=projection)
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
            expected = mezo_step(control, random_batch(seed=step), learning_rate=RATE, epsilon=EPSILON, seed=step)
            assert (found.loss, found.projected_grad) == (expected.losses[0], expected.projected_grads[0])
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
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    control: Any = Renamed(copy.deepcopy(model))
    masters = masters_of(control)
    assert len(masters) == (5 if projection else 1)
    with Walker(
        model, method(**places, zo={"epsilon": EPSILON}, seed=3, **SETTINGS), workdir=tmp_path, device="cpu"
    ) as walker:
        for step in range(1, 4):
            data = random_batch(seed=step)
            found = walker.step(data)
            expected = spsa_step(control, masters, data, step=step, seed=3, learning_rate=RATE, epsilon=EPSILON)
            assert (found.loss, found.projected_grad) == (expected.losses[0], expected.projected_grads[0])
        assert_same(trained(walker), masters)
    if "frozen" not in places:
        return
    assert_same({name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}, before)
    stored = load_file(tmp_path / "in-memory" / "model.safetensors")
    assert all(torch.equal(stored[name.removeprefix("base_model.")], value) for name, value in before.items())


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
    saved: Any = PeftModel.from_pretrained(tiny_model("llama", tied=True), tmp_path / "prefix").eval()
    with torch.no_grad():
        torch.testing.assert_close(saved(input_ids=ids, use_cache=False).logits[:, -1].float(), logits)
        assert not torch.allclose(model.eval()(input_ids=ids, use_cache=False).logits[:, -1].float(), logits)
        for _ in range(4):
            ids = torch.cat([ids, saved(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(written, ids)
