"""Oracle: torch.distributed.checkpoint, which reads what we write and writes what we read."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from transformers import AutoModelForCausalLM

from blockwalk.checkpoints.pieces import Saved
from blockwalk.cli import main
from blockwalk.convert import dcp as conversion
from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused, says

OPTIMIZER = {"learning_rate": 1e-2, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and two steps' checkpoints of it: of all parameters, and of adapters."""
    path = tmp_path_factory.mktemp("dcp")
    tiny_model("llama").save_pretrained(path / "model")
    for name, lora in (("whole", None), ("lora", {"rank": 2})):
        with Walker(path / "model", method("plain", optimizer=OPTIMIZER), lora=lora) as walker:
            for step in range(2):
                walker.step(random_batch(4, 8, seed=step))
            walker.save_state(path / name)
    return path


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    out = {}
    with Saved(checkpoint) as saved:
        for name, numel in saved.numel.items():
            out[name] = torch.empty(numel)
            saved.read_into(name, 0, out[name])
    return out


@pytest.mark.parametrize("name", ["whole", "lora"])
def test_torch_reads_what_we_write_and_it_comes_back(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor in the parameter's shape, with the checkpoint's bits; no pickle on the way."""
    monkeypatch.setattr(conversion, "FILE_BYTES", 20_000)  # several files
    out = tmp_path / "torch"
    count = conversion.to_dcp(folder / name, out, model=folder / "model")
    assert len(list(out.glob("*.safetensors"))) > 1
    assert {path.suffix for path in out.iterdir()} == {".safetensors", ".json"}
    reader = HuggingFaceStorageReader(str(out))
    metadata = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {key: torch.empty(stored.size) for key, stored in metadata.items()}  # type: ignore[union-attr]
    dcp.load(state, storage_reader=reader, no_dist=True)
    saved = tensors_of(folder / name)
    assert len(state) == len(saved) == count
    shapes = {key: p.shape for key, p in tiny_model("llama").named_parameters()}
    for key, tensor in saved.items():
        parameter, _, kind = key.rpartition("/")
        loaded = state[f"{'param' if kind == 'master' else kind}.{parameter}"]
        assert torch.equal(loaded.reshape(-1), tensor)
        if name == "whole":
            assert loaded.shape == shapes[parameter]
        else:
            assert min(loaded.shape) == 2
            assert len(loaded.shape) == 2
    conversion.to_checkpoint(out, tmp_path / "back")
    back = tensors_of(tmp_path / "back")
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in saved.items())
    lora = {"rank": 2} if name == "lora" else None
    losses = []
    for checkpoint in (folder / name, tmp_path / "back"):
        with Walker(folder / "model", method("plain", optimizer=OPTIMIZER), lora=lora) as walker:
            walker.load_state(checkpoint)
            assert walker.steps_done == 2
            losses.append(walker.step(random_batch(4, 8, seed=9)).loss)
    assert losses[0] == losses[1]


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        batch = random_batch(4, 8, seed=step)
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("writer", ["metadata", "flat", "safetensors"])
def test_an_fsdp_folder_becomes_a_model_and_a_checkpoint(
    writer: str, folder: Path, tmp_path: Path
) -> None:
    """The names that get_state_dict gives, in a tree or side by side as torchtitan has them, by
    torch's own writers; the checkpoint goes on where torch's AdamW stood."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = tiny_model("llama", seed=3)
    optimizer = trained(model)
    weights, states = get_state_dict(model, optimizer)
    source = tmp_path / "fsdp"
    state = {"model": weights, "optimizer": states}
    if writer == "metadata":
        dcp.save(state, checkpoint_id=source, no_dist=True)
    else:
        prefix = "" if writer == "flat" else "model."
        flat: dict[str, Any] = {prefix + name: tensor for name, tensor in weights.items()}
        flat |= {
            f"{'optimizer.' if prefix else ''}state.{name}.{kind}": value
            for name, kinds in states["state"].items()
            for kind, value in kinds.items()  # type: ignore[union-attr]
        }
        hub = HuggingFaceStorageWriter(str(source)) if prefix else None
        dcp.save(flat, checkpoint_id=source, storage_writer=hub, no_dist=True)
    conversion.to_model(source, tmp_path / "model", model=folder / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    conversion.to_checkpoint(source, tmp_path / "checkpoint")
    ours = tensors_of(tmp_path / "checkpoint")
    kinds = Counter(key.rpartition("/")[2] for key in ours)
    assert set(kinds) == {"master", "exp_avg", "exp_avg_sq"}
    for name, parameter in model.named_parameters():
        assert torch.equal(ours[f"{name}/master"], parameter.detach().reshape(-1))
        for kind in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[parameter][kind]
            assert torch.equal(ours[f"{name}/{kind}"], value.reshape(-1))
    with Walker(folder / "model", method("plain", optimizer=OPTIMIZER)) as walker:
        walker.load_state(tmp_path / "checkpoint")
        assert walker.steps_done == 3


def test_a_foreign_global_is_refused_by_name_and_not_run(folder: Path, tmp_path: Path) -> None:
    """A pickle that would make a file; and folders that hold no checkpoint."""
    made = tmp_path / "made"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (str(made), "w"))

    source = tmp_path / "fsdp"
    dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=source, no_dist=True)
    with (source / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data = Bomb()
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    out = tmp_path / "out"
    for name in ("to_model", "to_checkpoint"):
        options = {"model": folder / "model"} if name == "to_model" else {}
        with refused(ValueError, ".metadata open"):
            getattr(conversion, name)(source, out, **options)
    assert not made.exists()
    assert not out.exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    with refused(ValueError, str(empty), ".metadata .safetensors"):
        conversion.to_checkpoint(empty, out)
    with refused(ValueError, str(folder / "model"), "--to model"):
        conversion.to_checkpoint(folder / "model", out)
    with refused(ValueError, "rank|checkpoint-NNNNNN"):
        conversion.to_dcp(folder / "model", out)
    with refused(ValueError, "--model"):
        conversion.to_dcp(folder / "whole", out)


def test_the_command_says_what_it_wrote_and_what_it_lacks(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit codes and messages; a folder is written by the command as by the function."""
    source = folder / "whole"
    out = tmp_path / "out"
    back = tmp_path / "back"
    command = ["convert", str(source), str(out), "--to"]
    assert main.main([*command, "model"]) == 2
    says(capsys.readouterr().err, "--to model --model")
    assert main.main([*command, "checkpoint", "--model", str(folder / "model")]) == 2
    says(capsys.readouterr().err, "--model --to checkpoint")
    assert not out.exists()
    assert main.main([*command, "dcp", "--model", str(folder / "model")]) == 0
    tensors = len(tensors_of(source))
    says(capsys.readouterr().out, tensors, str(out))
    assert main.main(["convert", str(out), str(back), "--to", "checkpoint"]) == 0
    says(capsys.readouterr().out, tensors // 3, str(back))
    assert tensors_of(back).keys() == tensors_of(source).keys()
