"""Oracle: transformers, which decodes the whole of a GGUF file. What is read of it as it lies has
the same bits in float32; and the ``gguf`` package, which writes the files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.cli import main
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.data.row_batch import collate
from blockwalk.models import gguf as gguf_header
from blockwalk.models.model_source import model_source
from blockwalk.plan.run_config import DataSettings
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from blockwalk.train.evaluation import HeldOut
from tests.support import gguf_files
from tests.support.messages import refused, says
from tests.support.versions import needs_gguf

needs_gguf()

TYPES = [name for name, _ in gguf_header.TYPES.values()]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path_factory.getbasetemp() / "gguf-cache"))


def theirs(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )


def same_weights(path: Path) -> CheckpointFolder:
    """A source of the file's weights, each compared with transformers' bit for bit."""
    source = CheckpointFolder(path, build_skeleton(path))
    loaded = theirs(path)
    state = loaded.state_dict(keep_vars=True)
    assert {id(state[name]) for name in source.names()} == {
        id(tensor) for tensor in state.values()
    }, "each tensor once"
    for name in source.names():
        weight = source.weights([name])[name]
        whole = torch.empty(state[name].shape)
        source.read_into(name, whole)
        assert torch.equal(whole, state[name]), name
        if not isinstance(weight, torch.Tensor):
            rows, columns = weight.shape
            assert torch.equal(weight.rows(1, rows), whole[1:])
            assert torch.equal(weight.columns(3, columns), whole[:, 3:])
            index = torch.tensor([[rows - 1, 0], [2, 2]])
            assert torch.equal(weight.gather(index), whole[index])
    return source


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_read_as_it_lies(kind: str, tmp_path: Path) -> None:
    """Oracle: ``from_pretrained(gguf_file=...)``, weights bit for bit; and the bytes of the
    file."""
    model = gguf_files.tiny("llama", hidden=256 if kind.endswith("_K") else 64, tied=kind == "Q4_1")
    path = gguf_files.write(tmp_path / f"tiny.{kind}.gguf", model, kind)
    source = same_weights(path)
    name = "model.layers.1.mlp.down_proj.weight"
    assert source.in_place(name)
    codec = dict(gguf_header.TYPES.values())[kind]
    assert model_source(path).codec == (codec if codec.encoded else None)
    (info,) = (
        t for t in gguf_header.read_header(path).tensors if t.name == "blk.1.ffn_down.weight"
    )
    assert source.prefetch([name]) == info.nbytes
    source.release([name])
    source.close()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        ("qwen3", {"tied": True}),
        ("gemma2", {"tied": True, "extra": {"attention.sliding_window": 32}}),
        ("gemma3_text", {"tied": True, "extra": {"attention.sliding_window": 32}}),
        ("phi3", {"extra": {"rope.dimension_count": 16}}),
        ("starcoder2", {"tied": True}),
    ],
)
def test_every_architecture_has_its_names_and_forms(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Oracle: ``from_pretrained(gguf_file=...)``, and the model that the file was written from."""
    changes = dict(changes)
    extra = changes.pop("extra", {})
    model = gguf_files.tiny(family, **changes)
    path = gguf_files.write(tmp_path / "tiny.gguf", model, "F32", **extra)
    source = same_weights(path)
    for name, tensor in model.state_dict().items():
        if name in source.names():
            whole = torch.empty(tensor.shape)
            source.read_into(name, whole)
            torch.testing.assert_close(whole, tensor, rtol=0, atol=2e-7)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file in Q4_K, and records for it."""
    folder = tmp_path_factory.mktemp("mixed")
    gguf_files.write(folder / "tiny.gguf", gguf_files.tiny("llama", hidden=256, tied=True), "Q4_K")
    turns = [
        [{"role": "user", "content": f"say {c}"}, {"role": "assistant", "content": c * 3}]
        for c in "abcdefgh"
    ]
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"messages": turn}) + "\n" for turn in turns)
    )
    return folder


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main.main([str(part) for part in arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_one_command_trains_and_the_others_take_the_file(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: transformers and PEFT on the decoded model: losses before and after in float32,
    greedy tokens, merged weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = mixed / "tiny.gguf"
    data = mixed / "data.jsonl"
    run = tmp_path / "run"
    base = ["--model", file, "--compute_dtype", "float32", "--data.max_length", 48]
    scored = [*base, "--data.eval", data, "--json"]
    plan = call(capsys, "plan", *base, "--batch_size", 2)
    stored = sum(t.nbytes for t in gguf_header.read_header(file).tensors)
    assert re.search(rf"frozen +disk × raw .* {stored / 1e3:.1f} kB", plan), plan
    before = json.loads(call(capsys, "eval", *scored))["loss"]
    trained = [
        *base,
        "--data.train",
        data,
        "--batch_size",
        4,
        "--max_steps",
        4,
        "--output_dir",
        run,
        "--lora.rank",
        4,
    ]
    call(capsys, "train", *trained, "--optimizer.learning_rate", "1e-2")
    assert not list(run.glob("scratch/*-*")), "nothing was packed"
    adapter = run / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(file)
    after = json.loads(call(capsys, "eval", *scored, "--adapter", adapter))["loss"]
    assert after < before - 0.05

    tokenizer = AutoTokenizer.from_pretrained(mixed, gguf_file=file.name)
    decoded = theirs(file)
    ids = tokenizer("say", return_tensors="pt")["input_ids"]
    greedy = decoded.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=1)[
        0, ids.shape[1] :
    ]
    said = call(capsys, "generate", *base, "--prompt", "say", "--max_new_tokens", 5)
    assert said.rstrip("\n") == tokenizer.decode(greedy, skip_special_tokens=True)

    rows = HeldOut.read(DataSettings(eval=str(data), max_length=48), tokenizer, batch_size=8).rows
    batch = collate(rows, range(8))
    assert before == pytest.approx(decoded(**batch).loss.item(), rel=1e-5)
    with_adapter = PeftModel.from_pretrained(decoded, adapter)
    assert after == pytest.approx(with_adapter(**batch).loss.item(), rel=1e-5)
    assert main.main(["merge", str(file), str(adapter), str(tmp_path / "merged")]) == 2
    says(capsys.readouterr().err, "Q4_K --dtype")
    assert not (tmp_path / "merged").exists()
    call(capsys, "merge", file, adapter, tmp_path / "merged", "--dtype", "float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    for name, tensor in with_adapter.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-7)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == tokenizer.chat_template
    )


def test_nothing_is_rounded_again(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the contract: codes are read as they lie, packed where that is asked for by name, and
    not trained themselves."""
    file = mixed / "tiny.gguf"
    data = mixed / "data.jsonl"
    train = [
        "train",
        "--model",
        file,
        "--data.train",
        data,
        "--output_dir",
        tmp_path / "run",
        "--data.max_length",
        48,
    ]
    for arguments, message in (
        ([*train, "--frozen", "disk × int4"], "q4_k int4"),
        ([*train, "--lora", "false"], "q4_k adapters"),
        ([*train, "--frozen", "disk × q4_k"], "q4_k"),
    ):
        assert main.main([str(part) for part in arguments]) == 2
        error = capsys.readouterr().err
        says(error, message)
        assert error.count("\n") == 1
    call(capsys, "pack", file, tmp_path / "store", "--codec", "int8")
    assert (tmp_path / "store" / "tokenizer.json").is_file()


def spoilt(path: Path, found: bytes, instead: bytes) -> None:
    data = path.read_bytes()
    assert data.count(found) >= 1
    path.write_bytes(data.replace(found, instead, 1))


FFN_UP = b"blk.0.ffn_up.weight\2\0\0\0" + b"\x40\0\0\0\0\0\0\0" * 2
"""The beginning of the entry of a matrix of 64 × 64 numbers: its type follows."""


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]),
         r"tiny.gguf is cut off: .* ends at byte \d+, the file has"),
        (lambda path: path.write_bytes(path.read_bytes()[:600]),
         r"tiny.gguf is cut off, or altered: its header does not end"),
        (lambda path: spoilt(path, b"GGUF", b"GGML"),
         "tiny.gguf is no GGUF file: it does not begin with GGUF"),
        (lambda path: spoilt(path, b"GGUF\3", b"GGUF\x09"),
         "is of GGUF's version 9; read are 2 and 3"),
        (lambda path: spoilt(path, b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba"),
         "'mamba'; read are llama,"),
        (lambda path: spoilt(path, b"llama.block_count\4", b"llama.block_count\x63"),
         "altered: the value of llama.block"),
        (
            lambda path: spoilt(path, FFN_UP + b"\x08", FFN_UP + b"\x0b"),
            "blk.0.ffn_up.weight is of type Q3_K; read are F32, F16, BF16, Q4_0, .* Take a file"
            " in one of those",
        ),
        (
            lambda path: spoilt(path, b"blk.0.ffn_up.weight\2\0\0\0\x40",
                                b"blk.0.ffn_up.weight\2\0\0\0\x41"),
            r"is altered: blk.0.ffn_up.weight \(64, 65\) does not consist of Q8_0's blocks of 32",
        ),
        (lambda path: spoilt(path, b"blk.1.attn_v", b"blk.1.attn_x"),
         r"1 missing \(model.layers.1.self_attn.v_proj.weight\)"),
        (lambda path: spoilt(path, b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokemz"),
         "no tokenizer could be loaded"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_gets_one_line(
    spoil: Any,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the defect that the test made; nothing is written."""
    monkeypatch.chdir(tmp_path)
    path = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.tiny("llama"), "Q8_0")
    spoil(path)
    Path("data.jsonl").write_text('{"text": "abc"}\n')
    assert main.main(["train", "--model", "tiny.gguf", "--data.train", "data.jsonl"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1, error
    assert "tiny.gguf" in error
    assert not Path("runs").exists() or not list(Path("runs").rglob("*.*"))


def test_a_folder_of_several_files_asks_which(tmp_path: Path) -> None:
    """Oracle: the files that lie there."""
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with refused(ValueError, "GGUF a.gguf b.gguf"):
        _ = model_source(tmp_path).weights_folder


def test_a_codec_has_the_name_of_the_format() -> None:
    """Oracle: the gguf package's own names of the types that files number."""
    theirs_by_number = pytest.importorskip("gguf").GGMLQuantizationType
    for number, (_, codec) in gguf_header.TYPES.items():
        assert gguf_header.name_of(codec) == theirs_by_number(number).name
