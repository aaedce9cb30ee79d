"""Oracle: the folder that a server hands out with the hub's own protocol, which huggingface_hub's
client downloads; and transformers, which loads the same name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftConfig

from blockwalk.cli import main
from blockwalk.cutting.skeleton import build_skeleton, load_config
from blockwalk.data.tokenizer import load_tokenizer
from blockwalk.models import hub as hub_files
from blockwalk.models.model_source import model_source
from blockwalk.plan.methods import method
from blockwalk.report import card
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from blockwalk.tiers.model_folder.identity import weights_digest
from blockwalk.walk.walker import Walker
from tests.conftest import TinyRun
from tests.models import tiny_model
from tests.support import gguf_files
from tests.support.hub import COMMITS, Hub, serving
from tests.support.messages import refused
from tests.support.versions import needs_gguf


@pytest.fixture(scope="module")
def repos(
    tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Path]]:
    """One repository in safetensors, and folders that are not ours; one in ``.bin``; one in parts,
    with two revisions."""
    root = tmp_path_factory.mktemp("repos")
    main = root / "main"
    shutil.copytree(tiny_run.model, main)
    (main / "onnx").mkdir()
    (main / "onnx" / "config.json").write_text("{}")
    (main / "pytorch_model.bin").write_bytes(b"the same in another format, which nobody needs")
    pickled = root / "pickled"
    model = tiny_model("llama")
    model.config.save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    parts = root / "parts"
    other = root / "other"
    tiny_model("llama").save_pretrained(parts, max_shard_size="20KB")
    tiny_model("llama", seed=1).save_pretrained(other)
    return {
        "ours/safetensors": {"main": main},
        "ours/pickled": {"main": pickled},
        "ours/parts": {"main": parts, "other": other},
        "ours/gated": {"main": parts},
    }


@pytest.fixture
def hub(
    repos: dict[str, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    from huggingface_hub import constants

    with serving(Hub(repos, gated=("ours/gated",), token="hf_known")) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            found.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        hub_files.download.cache_clear()
        yield found
    hub_files.download.cache_clear()


def test_a_name_of_the_hub_is_its_folder(
    hub: Hub, repos: dict[str, dict[str, Path]], tiny_run: TinyRun
) -> None:
    """Oracle: the folder that was handed out, read by its path: weights bit for bit, tokenizer,
    digest."""
    name = "ours/safetensors"
    model_source(name).require_weights()
    source, original = (CheckpointFolder(n, build_skeleton(n)) for n in (name, tiny_run.model))
    assert source.names() == original.names()
    for parameter in source.names():
        assert torch.equal(
            source.weights([parameter])[parameter], original.weights([parameter])[parameter]
        )
    assert load_tokenizer(name).get_vocab() == load_tokenizer(tiny_run.model).get_vocab()
    assert weights_digest(name) == weights_digest(tiny_run.model)
    assert load_config(name).name_or_path == model_source(f"{name}@{'a' * 40}").repository == name
    fetched = {p.name for p in model_source(name).weights_folder.rglob("*") if p.is_file()}
    assert fetched == {p.name for p in tiny_run.model.iterdir()}, (
        "neither other folders nor the same weights twice"
    )


def test_any_part_of_a_gguf_brings_the_others(
    hub: Hub, repos: dict[str, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the files that were handed out, beside one of another model."""
    needs_gguf()
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "stands-for"))
    (folder := tmp_path / "gguf").mkdir()
    for name, most in (("tiny.gguf", 6), ("other.gguf", 0)):
        gguf_files.write(folder / name, gguf_files.tiny("llama"), "Q8_0", tensors_in_a_part=most)
    monkeypatch.setitem(repos, "ours/gguf", {"main": folder})
    name = "ours/gguf/tiny-00003-of-00004.gguf"
    found = sorted(path.name for path in model_source(name).weights_folder.glob("*.gguf"))
    assert found == sorted(path.name for path in folder.glob("tiny*.gguf"))
    source = CheckpointFolder(name, build_skeleton(name))
    assert torch.equal(
        source.weights(["model.norm.weight"])["model.norm.weight"],
        gguf_files.tiny("llama").model.norm.weight,
    )
    assert not any(path.endswith("other.gguf") for path in hub.asked)


def test_an_adapter_names_the_file_of_its_base(
    hub: Hub, repos: dict[str, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: PEFT and huggingface_hub, which read what it is to be put on; a repository alone
    would not say which."""
    needs_gguf()
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "stands-for"))
    (folder := tmp_path / "several").mkdir()
    for name, kind in (("a.gguf", "Q8_0"), ("b.gguf", "F32")):
        gguf_files.write(folder / name, gguf_files.tiny("llama"), kind)
    monkeypatch.setitem(repos, "ours/several", {"main": folder})
    (data := tmp_path / "data.jsonl").write_text('{"text": "abc abc"}\n' * 4)
    run = tmp_path / "run"
    named = [
        "--model",
        "ours/several/b.gguf@main",
        "--data.train",
        str(data),
        "--output_dir",
        str(run),
    ]
    assert (
        main.main(["train", *named, "--method", "plain", "--lora.rank", "2", "--max_steps", "1"])
        == 0
    )
    found = PeftConfig.from_pretrained(str(run / "adapter"))
    assert (found.base_model_name_or_path, found.revision) == ("ours/several/b.gguf", "main")
    assert (
        ModelCard((card.write(run) / "README.md").read_text()).data["base_model"] == "ours/several"
    )
    merged = [str(tmp_path / "merged"), "--dtype", "float32"]
    assert main.main(["merge", found.base_model_name_or_path, str(run / "adapter"), *merged]) == 0


def test_a_configuration_is_read_without_the_weights(hub: Hub) -> None:
    """Oracle: what the server was asked for."""
    assert (model_source("ours/safetensors").require_config() / "config.json").is_file()
    assert not any(path.endswith((".safetensors", ".bin")) for path in hub.asked)


@pytest.mark.parametrize(
    "name", ["ours/pickled", "ours/parts", "ours/parts@other", f"ours/parts@{COMMITS['other']}"]
)
def test_every_form_and_revision(hub: Hub, repos: dict[str, dict[str, Path]], name: str) -> None:
    """Oracle: the folder of that revision, and its files."""
    repo, _, revision = name.partition("@")
    folder = repos[repo]["other" if revision else "main"]
    assert model_source(name).checkpoint_files() == model_source(folder).checkpoint_files()
    assert weights_digest(name) == weights_digest(folder)


def test_an_adapter_names_the_revision_of_its_base(hub: Hub, tmp_path: Path) -> None:
    """Oracle: PEFT, which reads what it is to be put on."""
    for name in ("ours/parts@other", "ours/parts"):
        with Walker(name, method("plain"), lora={"rank": 2}, device="cpu") as walker:
            walker.save_pretrained(tmp_path / name)
        found = PeftConfig.from_pretrained(str(tmp_path / name))
        assert (found.base_model_name_or_path, found.revision) == (
            "ours/parts",
            "other" if "@" in name else None,
        )


def test_a_token_opens_what_its_owners_gated(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the server's refusal without the token, and the folder with it."""
    with refused(ValueError, "ours/gated /ours/gated HF_TOKEN"):
        _ = model_source("ours/gated").weights_folder
    monkeypatch.setenv("HF_TOKEN", "hf_known")
    model_source("ours/gated").require_weights()


def test_what_the_hub_does_not_have(hub: Hub) -> None:
    """Oracle: the server's answers; one line each."""
    for name, message in (
        ("ours/absent", "http://127.0.0.1"),
        ("ours/parts@absent", "revision absent"),
    ):
        with refused(ValueError, message) as error:
            model_source(name).require_config()
        assert "\n" not in str(error.value)


def test_without_a_network_the_cache_is_read(
    hub: Hub, repos: dict[str, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: what was downloaded before, while no server answers; and one line for what was
    not."""
    from huggingface_hub import constants

    _ = model_source("ours/parts").weights_folder
    model_source("ours/pickled").require_config()
    hub_files.download.cache_clear()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert weights_digest("ours/parts") == weights_digest(repos["ours/parts"]["main"])
    assert model_source("ours/pickled").require_config().is_dir()
    for name in ("ours/gated", "ours/pickled"):
        with refused(ValueError, "http://127.0.0.1:9 cache") as error:
            model_source(name).require_weights()
        assert "\n" not in str(error.value)
