"""Oracle: llama.cpp (from the package xllamacpp), which must split a text into the tokenizer's
tokens and find the loss of transformers in it within one part in a thousand, that of PEFT within
1%."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.cli import main
from tests.support import llama_cpp
from tests.support.messages import says

ROOT = Path(__file__).parents[2]
TEXT = "Hugo went to the theater. It's 2024,\n\n  the music was lovely."


def their_loss(ask: Any, ids: list[int], vocabulary: int) -> float:
    """The mean loss of a text in llama.cpp, a token at a time."""
    options = {
        "n_predict": 1,
        "n_probs": vocabulary,
        "temperature": 0.0,
        "post_sampling_probs": False,
    }
    losses = []
    for at in range(1, len(ids)):
        (first,) = ask("/completion", {"prompt": ids[:at], **options})["completion_probabilities"]
        losses.append(
            -next(each["logprob"] for each in first["top_logprobs"] if each["id"] == ids[at])
        )
    return math.fsum(losses) / len(losses)


def our_loss(model: Any, ids: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])))


def folder_of(kind: str, path: Path) -> Path:
    """The example's model, or a random one of a family with biases (qwen2) or norms of queries and
    keys (qwen3)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(ROOT / "examples" / "tiny-llama", path)
    if kind != "llama":
        vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        more = (
            {"num_key_value_heads": 2, "head_dim": 32}
            if kind == "qwen3"
            else {"num_key_value_heads": 2}
        )
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            kind, vocab_size=vocabulary, tie_word_embeddings=kind == "qwen2", **sizes, **more
        )
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.data += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_model_in_llama_cpp_is_the_model(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = folder_of(kind, tmp_path / kind)
    assert main.main(["gguf", str(folder), str(tmp_path / "model.gguf"), "--dtype", "f32"]) == 0
    assert f"llama-cli -m {tmp_path}/model.gguf" in capsys.readouterr().out
    assert (tmp_path / "Modelfile").read_text().startswith("FROM ./model.gguf\n# ")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids = tokenizer(TEXT)["input_ids"]
    pytest.importorskip("xllamacpp")
    ask = llama_cpp.serve(tmp_path / "model.gguf")
    assert ask("/tokenize", {"content": TEXT, "add_special": True})["tokens"] == ids
    loss = their_loss(ask, ids[:14], len(tokenizer))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert loss == pytest.approx(our_loss(model, ids[:14]), rel=1e-3)


def test_an_adapter_in_llama_cpp_is_that_of_peft(tmp_path: Path) -> None:
    """Two ranks, two alphas and the square root of rsLoRA; queries and keys, whose rows llama.cpp
    has in another order."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = folder_of("llama", tmp_path / "llama")
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"][:14]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = our_loss(model, ids)
    config = LoraConfig(
        r=4,
        target_modules="all-linear",
        use_rslora=True,
        rank_pattern={"q_proj": 2},
        alpha_pattern={"up_proj": 3},
    )
    torch.manual_seed(1)
    peft = get_peft_model(model, config)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.02)
    peft.save_pretrained(tmp_path / "adapter")
    expected = our_loss(peft.eval(), ids)
    assert abs(expected - plain) > 0.05, "the adapter says something"
    base = tmp_path / "llama.gguf"
    lora = tmp_path / "lora" / "adapter.gguf"
    lora.parent.mkdir()
    assert main.main(["gguf", str(folder), str(base), "--dtype", "f32"]) == 0
    arguments = [
        "gguf",
        str(folder),
        str(lora),
        "--adapter",
        str(tmp_path / "adapter"),
        "--base",
        str(base),
    ]
    assert main.main(arguments) == 0
    assert (
        (lora.parent / "Modelfile")
        .read_text()
        .startswith(f"FROM {base}\nADAPTER ./adapter.gguf\n# ")
    )
    pytest.importorskip("xllamacpp")
    ask = llama_cpp.serve(base, adapter=lora)
    assert their_loss(ask, ids, model.config.vocab_size) == pytest.approx(expected, rel=1e-2)


def test_rotary_scaling_and_codes(tmp_path: Path) -> None:
    """Oracle: the gguf package's own reader; llama.cpp's definition of a scaled frequency, the
    plain one over its factor."""
    gguf = pytest.importorskip("gguf")
    folder = folder_of("llama", tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    config["rope_parameters"] = {
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        **scaling,
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert main.main(["gguf", str(folder), str(tmp_path / "m.gguf"), "--dtype", "q8_0"]) == 0
    read = gguf.GGUFReader(tmp_path / "m.gguf")
    tensors = {tensor.name: tensor for tensor in read.tensors}
    factors = tensors["rope_freqs.weight"].data
    assert factors[0] == pytest.approx(1.0)
    assert factors[-1] == pytest.approx(8.0)
    up = tensors["blk.0.ffn_up.weight"]
    assert up.tensor_type == gguf.GGMLQuantizationType.Q8_0
    from safetensors.torch import load_file

    exact = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].float()
    coded = torch.from_numpy(gguf.dequantize(up.data, up.tensor_type))
    assert float((exact - coded).abs().max()) <= float(exact.abs().max()) / 127


def test_what_gguf_has_no_name_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the exit code, and the folder, in which nothing is left."""
    folder = folder_of("llama", tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "stablelm"}, "convert_hf_to_gguf.py"),
        ({"rope_parameters": yarn}, "yarn"),
    ]
    for changes, words in cases:
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        assert main.main(["gguf", str(folder), str(tmp_path / "m.gguf")]) == 2
        says(capsys.readouterr().err, words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]
