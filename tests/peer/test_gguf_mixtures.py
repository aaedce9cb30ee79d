"""Oracle: the ``gguf`` package, which writes the files and decodes them; transformers' and PEFT's
model with those weights: losses and gradients. Mixtures of experts, and models in several parts."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import blockwalk
from blockwalk.cli import main
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.models.model_source import model_source
from blockwalk.numerics.codecs.weights import EncodedWeight
from blockwalk.numerics.lazy_parameter import LazyParameter
from blockwalk.plan.placement import Codec
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from tests.models import random_batch
from tests.support import gguf_files
from tests.support.versions import needs_gguf

needs_gguf()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))


def decoded(path: Path, model: Any) -> Any:
    """The model with the weights that the ``gguf`` package reads in all files of the folder."""
    from gguf import GGUFReader, dequantize

    found = {}
    for file in path.parent.glob("*.gguf"):
        for tensor in GGUFReader(file).tensors:
            found[tensor.name] = torch.from_numpy(
                dequantize(tensor.data, tensor.tensor_type).copy()
            )
    config = model.config
    state = {}
    places = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        **{f"mlp.shared_expert.{word}_proj": f"ffn_{word}_shexp" for word in ("gate", "up",
                                                                              "down")},
    }  # fmt: skip
    ends = {"model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight"}  # fmt: skip
    for name, tensor in model.state_dict().items():
        if name in ends:
            state[name] = found[ends[name]]
            continue
        _, _, block, rest = name.split(".", 3)
        stem, _, leaf = rest.rpartition(".")
        if leaf == "gate_up_proj":
            halves = [found[f"blk.{block}.ffn_{word}_exps.weight"] for word in ("gate", "up")]
            state[name] = torch.cat(halves, 1)
        elif leaf == "down_proj":
            state[name] = found[f"blk.{block}.ffn_down_exps.weight"]
        else:
            state[name] = found[f"blk.{block}.{places[stem]}.{leaf}"].view(tensor.shape)
        heads = {
            "self_attn.q_proj": config.num_attention_heads,
            "self_attn.k_proj": config.num_key_value_heads,
        }.get(stem)
        if config.model_type == "mixtral" and heads:
            pairs = state[name].view(heads, -1, 2, tensor.shape[1])
            state[name] = pairs.transpose(1, 2).reshape(tensor.shape)
    model.load_state_dict(state)
    return model.eval()


@pytest.mark.parametrize(
    ("family", "kind", "parts"),
    [
        ("qwen3_moe", "Q4_K", 0),
        ("qwen3_moe", "Q8_0", 7),
        ("qwen2_moe", "Q4_0", 5),
        ("mixtral", "Q8_0", 0),
        ("mixtral", "F16", 9),
    ],
)
def test_experts_are_read_one_by_one_where_they_lie(
    family: str, kind: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the decoded weights bit for bit; PEFT's loss and gradients after a step."""
    from peft import PeftModel

    model = gguf_files.tiny(family, hidden=256 if kind.endswith("_K") else 64)
    (tmp_path / "model").mkdir()
    path = gguf_files.write(tmp_path / "model" / "tiny.gguf", model, kind, tensors_in_a_part=parts)
    assert (len(list(path.parent.glob("*.gguf"))) > 2) == bool(parts)
    model = decoded(path, model)
    skeleton = build_skeleton(path)
    assert skeleton.config.model_type == family
    source = CheckpointFolder(path, skeleton)
    state = model.state_dict()
    assert set(source.names()) == state.keys()
    for name in source.names():
        whole = torch.empty(state[name].shape)
        source.read_into(name, whole)
        assert torch.equal(whole, state[name]), name
    name = "model.layers.1.mlp.experts.gate_up_proj"
    experts = source.weights([name])[name]
    whole = state[name][1]
    assert source.in_place(name)
    assert isinstance(experts, EncodedWeight)
    one = experts.expert(1).to(torch.float32)
    rows = len(whole)
    for first, last in (
        (0, rows),
        (3, rows // 2),
        (rows // 2 - 3, rows // 2 + 5),
        (rows // 2, rows - 1),
    ):
        assert torch.equal(one.rows(first, last), whole[first:last])
    assert torch.equal(one.columns(5, 37), whole[:, 5:37])
    assert torch.equal(
        one.gather(torch.tensor([rows - 1, 0, rows // 2])), whole[[rows - 1, 0, rows // 2]]
    )
    source.close()

    read_whole = LazyParameter.decoded

    def watched(lazy: LazyParameter) -> torch.Tensor:
        assert lazy.ndim == 2, "a layer's experts were decoded whole"
        return read_whole(lazy)

    monkeypatch.setattr(LazyParameter, "decoded", watched)
    batch = random_batch()
    plan = blockwalk.method(
        "mebp", frozen="disk × raw", compute_dtype="float32", optimizer={"learning_rate": 1e-2}
    )
    with blockwalk.Walker(path, plan, lora={"rank": 2}, workdir=tmp_path, device="cpu") as walker:
        walker.step(batch)
        walker.save_pretrained(tmp_path / "adapter")
        found = walker.evaluate(batch)
        gradients = walker.gradients(batch)
    theirs = PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
    loss = theirs(**batch).loss
    loss.backward()
    assert found.loss_sum / found.tokens == pytest.approx(loss.item(), rel=1e-5)
    own = {
        name.replace(".default", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    assert {f"base_model.model.{name}" for name in gradients} == own.keys()
    for name, gradient in gradients.items():
        expected = own[f"base_model.model.{name}"]
        assert expected is not None
        assert (gradient - expected).norm() <= 1e-4 * expected.norm(), name


def test_a_model_in_parts_is_named_by_any_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the same model in one file: names, weights and losses; one folder in the cache stands
    for it."""
    model = gguf_files.tiny("llama")
    for folder, most in (("whole", 0), ("parts", 6)):
        (tmp_path / folder).mkdir()
        gguf_files.write(tmp_path / folder / "tiny.gguf", model, "Q8_0", tensors_in_a_part=most)
    parts = sorted((tmp_path / "parts").glob("*.gguf"))
    assert [part.name for part in parts] == [f"tiny-0000{n}-of-00004.gguf" for n in range(1, 5)]
    (data := tmp_path / "data.jsonl").write_text('{"text": "abc"}\n' * 4)
    losses = []
    for name in (tmp_path / "whole" / "tiny.gguf", parts[0], parts[2], tmp_path / "parts"):
        capsys.readouterr()
        arguments = ["eval", "--model", name, "--data.eval", data, "--data.max_length", 8, "--json"]
        assert main.main([str(part) for part in arguments]) == 0, capsys.readouterr().err
        losses.append(capsys.readouterr().out.split('"loss"')[1])
    assert len(set(losses)) == 1
    assert model_source(parts[1]).codec is Codec.Q8_0
    folder = model_source(parts[3]).weights_folder
    assert (
        folder
        == model_source(tmp_path / "parts").weights_folder
        == model_source(folder).weights_folder
    )
    assert sorted(path.name for path in folder.glob("*.gguf")) == [part.name for part in parts]
    source = CheckpointFolder(parts[1], build_skeleton(parts[1]))
    assert {stored.file for name in source.names() for stored in source.recipes[name].sources} == {
        p.name for p in parts
    }
    source.close()


def altered(path: Path, key: bytes, value: int) -> None:
    """Write another 16-bit number for a key of a part's metadata."""
    data = bytearray(path.read_bytes())
    place = data.index(key) + len(key) + 4
    data[place : place + 2] = value.to_bytes(2, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda parts: parts[1].unlink(),
         r"00001-of-00004.gguf is one of 4 parts, and \S+-00002-of-00004.gguf is not beside it"),
        (lambda parts: altered(parts[2], b"split.count", 5),
         r"00003-of-00004.gguf is part 3 of 5, and not named so: its name would end in"
         r" -00003-of-00005.gguf"),
        (lambda parts: shutil.copy(parts[1], parts[3]),
         r"00004-of-00004.gguf is part 2 of 4, and not named so"),
        (lambda parts: altered(parts[0], b"split.tensors.count", 30),
         r"00001-of-00004.gguf tells of 30 tensors in 4 parts, which have 21"),
        (lambda parts: parts[2].write_bytes(parts[2].read_bytes()[:-999]),
         r"00003-of-00004.gguf is cut off: .* ends at byte"),
        (lambda parts: parts[3].write_bytes(parts[3].read_bytes()[:50]),
         r"00004-of-00004.gguf is cut off, or altered"),
        (lambda parts: parts[0].write_bytes(parts[0].read_bytes().replace(b"llama", b"mamba", 1)),
         r"'mamba'; read are llama,"),
        (lambda parts: [
            part.rename(part.with_name(f"part{n}.gguf")) for n, part in enumerate(parts)
         ][1:],
         r"holds several GGUF files, part0.gguf, .*: name one of them"),
    ],
)  # fmt: skip
def test_parts_that_do_not_belong_together_get_one_line(
    spoil: Any,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the defect that the test made; nothing is written."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("data.jsonl").write_text('{"text": "abc"}\n')
    gguf_files.write(Path("model/tiny.gguf"), gguf_files.tiny("llama"), "Q8_0", tensors_in_a_part=6)
    spoil(sorted(Path("model").glob("*.gguf")))
    assert main.main(["train", "--model", "model", "--data.train", "data.jsonl"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert re.search(message, error[-1]), error
    assert not Path("runs").exists() or not list(Path("runs").rglob("*.*"))
