"""Oracle: transformers itself. A model whose persistent buffers are not those of a constructor has
``from_pretrained``'s loss under every method, and what is saved has the buffers that it came
with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from blockwalk import Walker, method
from blockwalk.convert.merge import merge
from blockwalk.convert.replay import replay
from blockwalk.engine.pack import pack
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.placement import Codec
from tests.models import random_batch
from tests.support.buffered_models import SIZES, changed, make, own_loss
from tests.support.messages import refused

METHODS: dict[str, Any] = {
    "mebp": method("mebp", frozen="disk × raw"),
    "plain": method("plain"),
    "plain-host": method("plain", frozen="host"),
    "mezo": method("mezo"),
    "zo2": method("zo2"),
    "zo2-disk": method("zo2", trainable="disk"),
}


class Gained(LlamaForCausalLM):
    """A class that no configuration names: gains and counters in the prologue, a block and the
    epilogue."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for owner in (self.model.embed_tokens, self.model.layers[1].mlp, self.model.norm):
            owner.register_buffer("gain", torch.ones(32))
            owner.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            owner.register_forward_hook(
                lambda module, _, out: out * module.gain.to(out.dtype) + int(module.seen)
            )
        self.post_init()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *[("gemma4_text", name) for name in METHODS],
        ("deepseek_v3", "mebp"),
        ("deepseek_v3", "zo2"),
        ("glm4_moe", "plain-host"),
    ],
)
def test_a_folder(family: str, name: str, tmp_path: Path) -> None:
    """Oracle: the loss of ``from_pretrained``; the saved folder's tensors, and its loss there."""
    buffers = make(family, tmp_path / "model")
    with Walker(
        tmp_path / "model", METHODS[name], workdir=tmp_path / "work", device="cpu"
    ) as walker:
        assert walker.evaluate(random_batch(seed=1)).loss == pytest.approx(
            own_loss(tmp_path / "model"), rel=1e-5
        )
        walker.step(random_batch())
        trained = walker.evaluate(random_batch(seed=1)).loss
        walker.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], buffer) for name, buffer in buffers.items())
    assert own_loss(tmp_path / "saved") == pytest.approx(trained, rel=1e-5)


@pytest.mark.parametrize(
    ("family", "stored"),
    [
        ("gemma4_text", torch.float64),
        ("deepseek_v3", torch.float32),
        ("deepseek_v3", torch.bfloat16),
        ("glm4_moe", torch.float64),
    ],
)
def test_other_dtypes_than_the_models(family: str, stored: torch.dtype, tmp_path: Path) -> None:
    """Oracle: ``from_pretrained`` in bfloat16, which keeps some buffers in float32; the source, for
    the saved folder."""
    make(family, tmp_path / "model", torch.bfloat16)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    buffers = {
        n: t.to(stored) + 1e-3
        for n, t in tensors.items()
        if n.endswith(("layer_scalar", "e_score_correction_bias"))
    }
    save_file({**tensors, **buffers}, file, {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    with Walker(
        tmp_path / "model", method("plain"), workdir=tmp_path / "work", device="cpu"
    ) as walker:
        for name, buffer in theirs.named_buffers():
            if name in buffers:
                ours = walker.engine.module.get_buffer(name)
                assert ours.dtype == buffer.dtype
                assert torch.equal(ours, buffer), name
        walker.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(
        saved[n].dtype == stored and torch.equal(saved[n], buffer) for n, buffer in buffers.items()
    )


@pytest.mark.parametrize("frozen", ["disk × raw", "disk × int8", "host", "device"])
def test_a_model_in_memory(frozen: str, tmp_path: Path) -> None:
    """Oracle: the model's own loss, of a class that no folder names; int8 is near it, the initial
    buffers are not."""
    torch.manual_seed(0)
    model = Gained(LlamaConfig(**{**SIZES, "tie_word_embeddings": True})).float()
    with torch.no_grad():
        before = float(model(**random_batch(seed=1)).loss)
        buffers = changed(model)
        expected = float(model(**random_batch(seed=1)).loss)
    assert abs(expected - before) > 0.05
    lora = LoraSettings(rank=2) if "int8" in frozen else None
    with Walker(
        model, method("plain", frozen=frozen), lora=lora, workdir=tmp_path, device="cpu"
    ) as walker:
        found = walker.evaluate(random_batch(seed=1)).loss
        walker.save_pretrained(tmp_path / "saved")
    assert found == pytest.approx(expected, rel=1e-2 if "int8" in frozen else 1e-6)
    if lora is None:
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        assert all(torch.equal(saved[name], buffer) for name, buffer in buffers.items())


@pytest.mark.parametrize("frozen", ["disk × raw", "host", "device"])
def test_what_a_model_in_memory_does_not_train(frozen: str, tmp_path: Path) -> None:
    """Oracle: the parameters that the test froze; they are trained nowhere."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).float()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].requires_grad_(False)
    expected = {name for name, param in model.named_parameters() if param.requires_grad}
    with Walker(model, method("plain", frozen=frozen), workdir=tmp_path, device="cpu") as walker:
        assert (
            walker.gradients(random_batch()).keys()
            == walker.engine.trained.masters.keys()
            == expected
        )


@pytest.mark.parametrize("family", ["gemma4_text", "deepseek_v3"])
def test_a_block_store_a_merge_and_a_replay(family: str, tmp_path: Path) -> None:
    """Oracle: ``from_pretrained``'s loss, and the tensors of the original folder."""
    buffers = make(family, tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "store", Codec.RAW)
    work: dict[str, Any] = {"workdir": tmp_path / "work", "device": "cpu"}
    with Walker(
        tmp_path / "store",
        METHODS["mebp"],
        lora=LoraSettings(rank=2, target_modules=["o_proj"]),
        **work,
    ) as walker:
        assert walker.evaluate(random_batch(seed=1)).loss == pytest.approx(
            own_loss(tmp_path / "model"), rel=1e-5
        )
        walker.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
    with Walker(tmp_path / "model", METHODS["zo2"], ledger=tmp_path / "ledger", **work) as walker:
        walker.step(random_batch())
        walker.save_pretrained(tmp_path / "trained")
    replay(tmp_path / "model", tmp_path / "ledger", tmp_path / "replayed")
    for folder in ("merged", "replayed", "trained"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert all(torch.equal(saved[name], buffer) for name, buffer in buffers.items()), folder


def test_a_buffer_that_does_not_fit(tmp_path: Path) -> None:
    """Oracle: the tensor that the test reshaped or removed is named."""
    buffers = make("gemma4_text", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    name = next(iter(buffers))
    tensors = load_file(file)
    for changes, reason in (({name: torch.ones(2)}, "1 misshaped"), ({name: None}, "1 missing")):
        kept = {n: t for n, t in {**tensors, **changes}.items() if t is not None}
        save_file(kept, file, {"format": "pt"})
        with refused(ValueError, reason, name):
            Walker(tmp_path / "model", METHODS["plain"], workdir=tmp_path / "work", device="cpu")
