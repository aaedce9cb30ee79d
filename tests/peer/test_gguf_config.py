"""Oracle: llama.cpp (from the package xllamacpp): the next token's log-probabilities on the same
file within 0.01. Where a file is refused, the key that the test wrote into it, by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gguf_metadata

from blockwalk.models.gguf_folder import MADE
from blockwalk.models.model_source import model_source
from blockwalk.system import versions
from tests.support import gguf_files
from tests.support.messages import refused
from tests.support.versions import needs_gguf

needs_gguf()

CASES = {case.name: case for case in gguf_metadata.cases()}
READ = (
    "llama, linear × 4", "llama, linear and attn_factor", "qwen2, yarn and attn_factor",
    "starcoder2, base", "llama, rope_freqs of one's own", "llama, rope_freqs as Llama 3",
    "llama, longrope and a factor", "llama, both biases", "phi3, half a head turned",
    "phi3, long factors", "phi3, attn_factor", "gemma2, softcaps", "gemma3, softcap",
    "gemma3, yarn, six blocks", "gemma3, no window, six blocks", "gemma3, base of windows",
    "qwen3_moe, yarn × 4",
)  # fmt: skip
REFUSED = [name for name, case in CASES.items() if case.refusal]


@pytest.mark.parametrize("name", READ)
def test_a_model_of_unusual_metadata_is_that_of_llama_cpp(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    passed, text = gguf_metadata.run(CASES[name], tmp_path)
    assert passed, text
    assert not text.startswith("refused")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "phi3", "gemma2", "gemma3_text"])
def test_a_key_that_is_not_read_is_refused_by_its_name(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    for name in REFUSED:
        case = CASES[name]
        if case.family == family and "output bias" not in name and "rope_freqs" not in name:
            model = gguf_files.tiny(case.family, **case.changes)
            path = gguf_files.write(
                tmp_path / "tiny.gguf", model, "F32", vectors=case.vectors, **case.keys
            )
            with refused(ValueError, "model tiny.gguf") as error:
                _ = model_source(path).weights_folder
            assert case.refusal in str(error.value), name
    assert not list(tmp_path.rglob("config.json"))


@pytest.mark.parametrize(
    "key", ["attention.head_count", "attention.key_length", "rope.scaling.factor", "rope.freq_base"]
)
@pytest.mark.parametrize("value", ["x", [1, 2], float("nan"), float("inf")])
def test_a_key_of_another_kind_is_one_line_with_the_file(
    key: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the value that the test wrote, which is no such number."""
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    path = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.tiny("llama"), "F32", **{key: value})
    with refused(ValueError, "model tiny.gguf"):
        _ = model_source(path).weights_folder


def test_a_tensor_that_is_not_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    for name in ("llama, head output bias", "qwen2, rope_freqs"):
        passed, text = gguf_metadata.run(CASES[name], tmp_path)
        assert passed, text


def test_published_factors_become_llama3_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: transformers' own scaling, from which the factors were computed."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    constants = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rotary = {"rope_theta": 500000.0, "original_max_position_embeddings": 8192, **constants}
    model = gguf_files.tiny("llama", rope_parameters=rotary, head_dim=64)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    plain = [500000.0 ** -(pair / 32) for pair in range(32)]
    factors = [one / two for one, two in zip(plain, scaled.tolist(), strict=True)]
    path = gguf_files.write(
        tmp_path / "tiny.gguf", model, "F32", vectors={"rope_freqs.weight": factors}
    )
    assert AutoConfig.from_pretrained(model_source(path).weights_folder).rope_parameters == rotary


def test_a_padding_token_beyond_the_rows_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: PyTorch, whose embedding refuses such a number; Phi-3's default is 32,000."""
    from blockwalk.cutting.skeleton import build_skeleton

    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    path = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.tiny("phi3"), "F32", tokenizer=False)
    assert build_skeleton(path).config.pad_token_id is None


def test_an_older_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: llama.cpp's tokens (test_gguf_written), which versions before do not give."""
    monkeypatch.setattr(versions, "installed", lambda packages: dict.fromkeys(packages, "5.22.1"))
    path = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.tiny("llama"), "F32")
    with refused(ValueError, "tiny.gguf transformers 5.23"):
        _ = model_source(path).weights_folder


def test_a_folder_of_older_rules_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the configuration, which an older folder in the cache has without its scaling."""
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    model = gguf_files.tiny("llama")
    keys = gguf_metadata.scaling("linear", factor=4.0)
    path = gguf_files.write(tmp_path / "tiny.gguf", model, "F32", **keys)
    folder = model_source(path).weights_folder
    right = (folder / "config.json").read_text()
    (folder / "config.json").write_text(right.replace("linear", "default"))
    seen = json.loads((folder / MADE).read_text())
    (folder / MADE).write_text(json.dumps([part[:3] for part in seen]))
    assert (model_source(path).weights_folder / "config.json").read_text() == right


def _altered(path: Path, **changes: Any) -> None:
    """Write a file that begins otherwise, or is of another kind."""
    import gguf as package

    if "start" in changes:
        path.write_bytes(changes["start"] + path.read_bytes()[len(changes["start"]) :])
        return
    writer = package.GGUFWriter(path, changes["architecture"])
    writer.add_type(changes["kind"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start": b"version https://git-lfs.github.com/spec/v1\n"}, "git-lfs pull"),
        ({"start": b"GGUF" + struct.pack(">I", 3)}, "big-endian"),
        ({"architecture": "llama", "kind": "adapter"}, "model general.type adapter"),
        ({"architecture": "clip", "kind": "mmproj"}, "model general.type mmproj"),
    ],
)  # fmt: skip
def test_another_kind_of_file_is_called_by_its_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Oracle: the kind of file that the test made."""
    path = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.tiny("llama"), "F32")
    _altered(path, **changes)
    with refused(ValueError, words):
        _ = model_source(path).weights_folder
