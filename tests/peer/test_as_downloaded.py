"""Oracle: transformers. One tiny checkpoint of each kind that users have, as its own tools write
it: Blockwalk walks it to the loss of the same files in transformers; what is not read gets one line
that says what would be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import blockwalk
from tests.models import random_batch
from tests.support import gguf_files, quantised_files
from tests.support.messages import refused
from tests.support.versions import needs_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "BLOCKWALK_CACHE", str(tmp_path_factory.getbasetemp() / "as-downloaded-cache")
    )


def safetensors(folder: Path, model: nn.Module, size: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=size)  # type: ignore[operator]
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (size != "5GB")
    return folder


def mixed(folder: Path, model: nn.Module) -> Path:
    """Norms in float32, all else as it is."""
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    return safetensors(folder, model)


def pickled(folder: Path, model: nn.Module) -> Path:
    model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def gguf(folder: Path, model: nn.Module, kind: str) -> Path:
    needs_gguf()
    folder.mkdir()
    return gguf_files.write(folder / f"model-{kind}.gguf", model, kind)


KINDS: dict[str, Any] = {
    "safetensors": safetensors,
    "safetensors in parts": lambda folder, model: safetensors(folder, model, "100KB"),
    "safetensors of two dtypes": mixed,
    "torch.save": pickled,
    **{
        f"GGUF {kind}": lambda folder, model, kind=kind: gguf(folder, model, kind)
        for kind in ("F32", "F16", "Q8_0", "Q5_1")
    },
}


def quantised(folder: Path, kind: str) -> Path:
    quantised_files.write(folder, kind)
    return folder


CASES = [(kind, torch.float32, tied) for kind in KINDS for tied in (True, False)]
CASES += [
    (kind, dtype, False)
    for kind in KINDS
    if "GGUF" not in kind
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize(("kind", "dtype", "tied"), CASES)
def test_the_loss_is_that_of_transformers(
    kind: str, dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    """Oracle: ``from_pretrained`` of the same files in float32; and the plain method, which holds
    them in memory."""
    path = KINDS[kind](tmp_path / "model", gguf_files.tiny("llama", tied=tied).to(dtype))
    walked_to_their_loss(path)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "bitsandbytes", "compressed-tensors int4"])
def test_the_loss_is_that_of_transformers_where_the_weights_are_quantised(
    kind: str, tmp_path: Path
) -> None:
    """Oracle: ``from_pretrained``, which decodes them. GPTQ's and AWQ's definitions are in
    ``test_quantised_models.py``."""
    for name, package in (("bitsandbytes", "bitsandbytes"), ("compressed", "compressed_tensors")):
        if kind.startswith(name):
            pytest.importorskip(package, reason=f"needs {package}")
    walked_to_their_loss(quantised(tmp_path / "model", kind))


def walked_to_their_loss(path: Path) -> None:
    from transformers import AutoModelForCausalLM

    named = {"gguf_file": path.name} if path.is_file() else {}
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent if named else path, dtype=torch.float32, **named
    )
    batch = random_batch()
    wanted = theirs(**batch).loss.item()
    for method, frozen in (("mebp", "disk × raw"), ("plain", "device × raw")):
        plan = blockwalk.method(method, frozen=frozen, compute_dtype="float32")
        with blockwalk.Walker(path, plan, training=False, device="cpu") as walker:
            found = walker.evaluate(batch)
        assert found.loss_sum / found.tokens == pytest.approx(wanted, rel=4e-6), method


@pytest.mark.parametrize("quant_method", ["quark", "hqq", "unheard-of"])
def test_what_others_quantised_is_refused_by_its_name(quant_method: str, tmp_path: Path) -> None:
    """Oracle: the configuration that the test wrote, as such tools write it."""
    folder = safetensors(tmp_path / "model", gguf_files.tiny("llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": quant_method}})
    )
    with refused(ValueError, f"config.json quant_method {quant_method} fp8 GGUF") as error:
        blockwalk.Walker(folder, blockwalk.method("mebp", frozen="disk × raw"), training=False)
    assert "\n" not in str(error.value)
