"""Oracle: transformers itself, on the weights that lie in the folder now. Nothing that was made
from other weights is used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from blockwalk import Walker, method
from blockwalk.checkpoints import run_checkpoint
from blockwalk.cli import main
from blockwalk.plan.choices import LoraSettings
from blockwalk.system import remembered_digests
from blockwalk.tiers.model_folder import identity
from blockwalk.tiers.model_folder.identity import weights_digest
from tests.conftest import TinyRun
from tests.models import random_batch, tiny_model
from tests.support.messages import says


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def replace_weights(folder: Path, seed: int, *, in_place: bool) -> None:
    """Other weights of the same size under the same time of modification, in the same file or in
    another."""
    file = folder / "model.safetensors"
    before = file.stat()
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    model.save_pretrained(folder.parent / "other")
    data = (folder.parent / "other" / "model.safetensors").read_bytes()
    if not in_place:
        file.unlink()
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def own_loss(model: Any) -> float:
    model = AutoModelForCausalLM.from_pretrained(model) if isinstance(model, Path) else model
    with torch.no_grad():
        return float(model(**random_batch(seed=1)).loss)


def walked_loss(model: Any, workdir: Path) -> float:
    plan = method("mebp", frozen="disk × int8")
    with Walker(model, plan, lora=LoraSettings(rank=2), workdir=workdir, device="cpu") as walker:
        return walker.evaluate(random_batch(seed=1)).loss


@pytest.mark.parametrize("in_place", [True, False])
def test_a_pack_is_of_the_weights_that_are_there(in_place: bool, tmp_path: Path) -> None:
    """Oracle: ``from_pretrained``'s loss, before and after the weights are replaced; the pack
    itself, for being used again."""
    folder = tmp_path / "model"
    work = tmp_path / "work"
    tiny_model("llama").save_pretrained(folder)  # type: ignore[operator]
    for seed in (1, 2):
        assert walked_loss(folder, work) == pytest.approx(own_loss(folder), rel=2e-3)
        (store,) = work.glob("*/store.json")
        before = store.stat()
        walked_loss(folder, work)
        assert store.stat() == before, "packed once"
        replace_weights(folder, seed, in_place=in_place)
    assert own_loss(folder) != pytest.approx(walked_loss(tiny_model("llama"), work), rel=1e-2)


def test_models_in_memory_share_a_working_folder(tmp_path: Path) -> None:
    """Oracle: each model's own loss; the first one is still walked when the second comes."""
    first, second = (tiny_model("llama", seed=seed) for seed in (1, 2))
    plan = method("plain", frozen="disk × raw")
    with Walker(first, plan, lora=LoraSettings(rank=2), workdir=tmp_path, device="cpu") as walker:
        assert walked_loss(second, tmp_path) == pytest.approx(own_loss(second), rel=2e-3)
        assert walker.evaluate(random_batch(seed=1)).loss == pytest.approx(
            own_loss(first), rel=1e-6
        )
    assert walked_loss(first, tmp_path) == pytest.approx(own_loss(first), rel=2e-3)


def test_a_digest_is_remembered_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a digest taken with nothing remembered; a count of the spans that are read."""
    folder = tmp_path / "model"
    read = []
    tiny_model("llama").save_pretrained(folder, max_shard_size="20KB")  # type: ignore[operator]
    span = identity._digest_span
    monkeypatch.setattr(identity, "_digest_span", lambda *place: read.append(place) or span(*place))
    first = weights_digest(folder)
    assert weights_digest(folder) == first
    assert len(read) == 2 * (1 + len(list(folder.glob("*.safetensors")))), (
        "of a fresh file the times say too little"
    )
    monkeypatch.setattr(remembered_digests, "_SETTLED", -60.0)
    weights_digest(folder)
    read.clear()
    assert weights_digest(folder) == first
    assert not read
    shard = sorted(folder.glob("*.safetensors"))[1]
    before = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = weights_digest(folder)
    assert changed != first
    data[-1] ^= 1
    shard.write_bytes(data)
    assert weights_digest(folder) == first


@pytest.mark.parametrize(
    "settings", ["--method mebp --lora.rank 2", "--method plain", "--method zo2 --trainable disk"]
)
def test_a_run_does_not_go_on_with_other_weights(
    settings: str, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the weights that the test replaced; put back, the run goes on."""
    folder = tmp_path / "model"
    out = tmp_path / "out"
    folder.mkdir()
    for file in tiny_run.model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    train = [
        "train",
        *tiny_run.arguments(out),
        "--model",
        str(folder),
        "--data.eval",
        "",
        *settings.split(),
    ]
    assert main.main([*train, "--max_steps", "1", "--optimizer.total_steps", "2"]) == 0
    before = sorted(path.name for path in out.rglob("*"))
    replace_weights(folder, 1, in_place=True)
    again = [
        *train,
        "--max_steps",
        "2",
        "--optimizer.total_steps",
        "2",
        "--resume_from_checkpoint",
        "latest",
    ]
    capsys.readouterr()
    assert main.main(again) == 2
    says(capsys.readouterr().err, "weights")
    assert sorted(path.name for path in out.rglob("*")) == before
    (folder / "model.safetensors").write_bytes((tiny_run.model / "model.safetensors").read_bytes())
    assert main.main(again) == 0


def test_eval_and_generate_keep_their_pack(tiny_run: TinyRun, tmp_path: Path, cache: Path) -> None:
    """Oracle: the packs that lie there, and when they were made: in the run's folder where it has
    one, else in the cache."""
    arguments = tiny_run.arguments(tmp_path / "out")
    rounded = ["--frozen", "disk × int4a"]
    evaluate = ["eval", *arguments, *rounded]
    generate = [
        "generate",
        *rounded,
        "--model",
        str(tiny_run.model),
        "--prompt",
        "fresh",
        "--max_new_tokens",
        "1",
    ]
    assert main.main(evaluate) == 0
    (store,) = cache.rglob("store.json")
    made = store.stat()
    assert main.main(evaluate) == main.main(generate) == 0
    assert [path.stat() for path in cache.rglob("store.json")] == [made]
    store.unlink()
    train = [
        "train",
        *arguments,
        *rounded,
        "--max_steps",
        "1",
        "--lora.rank",
        "2",
        "--data.eval",
        "",
    ]
    for more in ([], ["--overwrite_output_dir", "true"]):
        assert main.main([*train, *more]) == 0
        (packed,) = (tmp_path / "out" / run_checkpoint.SCRATCH).rglob("store.json")
        made = packed.stat() if not more else made
        assert main.main(evaluate) == 0
        assert packed.stat() == made
    assert not list(cache.rglob("store.json"))
