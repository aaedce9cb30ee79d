"""Oracle: each form's published definition, written down undivided in
``tests/support/quantised_files.py``, and transformers with the quantisers' own libraries where they
run: float32 weights bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import blockwalk
from blockwalk.cli import main
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.models.model_source import model_source
from blockwalk.models.quantised import METHODS
from blockwalk.numerics.codecs.weights import EncodedWeight, opened
from blockwalk.system.versions import is_older
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from tests.conftest import TinyRun
from tests.models import random_batch
from tests.support import quantised_files
from tests.support.messages import refused, says, warned
from tests.support.quantised_files import KINDS

Folders = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_run: TinyRun) -> Folders:
    """A checkpoint of a kind with a tokenizer, and the model that it stands for, each written
    once."""
    there: dict[tuple[str, str], tuple[Path, Any]] = {}

    def folder_of(kind: str, family: str = "") -> tuple[Path, Any]:
        if (kind, family) not in there:
            folder = tmp_path_factory.mktemp("quantised") / "model"
            there[kind, family] = folder, quantised_files.write(folder, kind, family)
            for file in tiny_run.model.glob("*token*"):
                shutil.copy(file, folder)
                shutil.copy(file, folder.parent / "model-dense")
        return there[kind, family]

    return folder_of


def same_weights(folder: Path, model: Any) -> CheckpointFolder:
    """A source of a checkpoint's weights, each compared with the model's bit for bit, whole and in
    ranges."""
    source = CheckpointFolder(folder, build_skeleton(folder))
    state = model.state_dict()
    assert set(source.names()) == state.keys()
    for name in source.names():
        whole = torch.empty(state[name].shape)
        source.read_into(name, whole)
        assert torch.equal(whole, state[name]), name
        weight = source.weights([name])[name]
        if isinstance(weight, torch.Tensor):
            assert torch.equal(weight.float(), whole), name
            continue
        if isinstance(weight, EncodedWeight) and len(weight.shape) == 3:
            assert torch.equal(weight.rows(0, len(whole)), whole.flatten(1)), name
            weight = weight.expert(1)
            whole = whole[1]
        rows, columns = weight.shape
        for first, last in ((0, rows), (3, 5), (rows - 7, rows - 1)):
            assert torch.equal(weight.rows(first, last), whole[first:last]), name
        for first, last in ((0, columns), (3, 37), (columns - 33, columns)):
            assert torch.equal(weight.columns(first, last), whole[:, first:last]), name
        index = torch.tensor([[rows - 1, 0], [2, 2]])
        assert torch.equal(weight.gather(index), whole[index])
    return source


@pytest.mark.parametrize(
    ("kind", "family"),
    [*((kind, "") for kind in KINDS), ("fp8", "qwen3_moe"), ("gptq", "qwen3_moe")],
)
def test_every_form_is_read_as_it_lies(kind: str, family: str, made: Folders) -> None:
    """Oracle: the definition of the form; the bytes of the files; and these in one piece, as they
    travel to a device."""
    folder, model = made(kind, family)
    source = same_weights(folder, model)
    method = KINDS[kind][0]["quant_method"]
    assert model_source(folder).codec is METHODS[method]
    name = "model.layers.1." + (
        "mlp.experts.gate_up_proj" if kind == "mxfp4" else "self_attn.o_proj.weight"
    )
    weight = source.weights([name])[name]
    assert isinstance(weight, EncodedWeight)
    assert source.in_place(name)
    together = weight.together(torch.empty(weight.layout.nbytes, dtype=torch.uint8))
    arrived = opened(weight.layout, together)
    assert isinstance(arrived, EncodedWeight)
    assert torch.equal(arrived.rows(0, weight.shape[0]), model.state_dict()[name].flatten(1))
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    stem = name.removesuffix(".weight") + ("_" if kind == "mxfp4" else ".")
    left_out = (
        "weight_shape",
        "input_scale",
        "quant_state.bitsandbytes__nf4",
        "quant_state.bitsandbytes__fp4",
    )
    left_out += (
        ("bias",)
        if kind == "mxfp4"
        else ()
        if KINDS[kind][0].get("desc_act") or "actorder" in kind
        else ("g_idx",)
    )
    bytes_read = sum(
        t.nbytes
        for part in files
        for key, t in part.items()
        if key.startswith(stem) and not key.endswith(left_out)
    )
    assert source.prefetch([name]) == bytes_read
    source.release([name])
    source.close()


DECODED_LATER = (
    "compressed-tensors int8",
    "compressed-tensors naive",
    "compressed-tensors int8 asymmetric",
)
"""Forms that the oldest transformers does not decode; the other tests here hold them."""


def theirs(folder: Path, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if not kind.startswith(("gptq", "awq")) and "actorder" not in kind],
)
def test_the_weights_are_those_that_transformers_decodes(kind: str, made: Folders) -> None:
    """Oracle: ``from_pretrained`` of the same folder, decoded by transformers or by the quantiser's
    library, bit for bit. GPTQ's and AWQ's own run on a GPU alone, and groups by name have left
    compressed-tensors: their definition is the oracle above."""
    settings: dict[str, Any] = {}
    if kind.startswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: the extra quantisers")
    elif kind.startswith("compressed"):
        pytest.importorskip(
            "compressed_tensors", reason="needs compressed-tensors: the extra quantisers"
        )
        if kind in DECODED_LATER and is_older("transformers", "5.18"):
            pytest.skip("transformers 5.17 has no decoder of these, or another")
        from transformers import CompressedTensorsConfig

        settings["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    folder, model = made(kind)
    decoded = theirs(folder, **settings)
    if kind.startswith("bitsandbytes"):
        decoded.dequantize()
    found = decoded.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "nested"), [("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True)]
)
def test_what_bitsandbytes_writes(kind: str, nested: bool, tmp_path: Path) -> None:
    """Oracle: bitsandbytes, which quantises, saves and decodes."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: the extra quantisers")
    from transformers import BitsAndBytesConfig

    quantised_files.tiny("bitsandbytes").save_pretrained(tmp_path / "dense")  # type: ignore[operator]
    form = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested
    )
    model = theirs(tmp_path / "dense", quantization_config=form)
    model.save_pretrained(tmp_path / "model")
    assert (
        any("nested" in key for key in load_file(tmp_path / "model" / "model.safetensors"))
        == nested
    )
    decoded = theirs(tmp_path / "model")
    decoded.dequantize()
    same_weights(tmp_path / "model", decoded).close()


def test_awq_is_what_compressed_tensors_makes_of_it(made: Folders) -> None:
    """Oracle: compressed-tensors' converter of AutoAWQ's matrices, and its decompression."""
    pytest.importorskip(
        "compressed_tensors", reason="needs compressed-tensors: the extra quantisers"
    )
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    folder, model = made("awq")
    stem = "model.layers.0.mlp.up_proj"
    tensors = {
        key: t for path in folder.glob("*.safetensors") for key, t in load_file(path).items()
    }
    codes, scales, zeros = AutoAWQConverter()._convert_gemm_module(
        *(tensors[f"{stem}.{leaf}"] for leaf in ("qweight", "scales", "qzeros"))
    )
    each = 32
    weights = (codes.float() - zeros.repeat_interleave(each, 1)) * scales.float().repeat_interleave(
        each, 1
    )
    assert torch.equal(model.state_dict()[f"{stem}.weight"], weights)


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main.main([str(part) for part in arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "kind",
    ["fp8", "bitsandbytes nested", "gptq desc_act", "awq", "compressed-tensors int4", "mxfp4"],
)
def test_one_command_trains_and_the_others_take_the_folder(
    kind: str, made: Folders, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the model that the folder stands for, in float32: losses before and after, tokens;
    PEFT's merged weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    written, model = made(kind)
    folder = tmp_path / "model"
    shutil.copytree(written, folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    base = [*tiny_run.arguments(tmp_path / "run"), "--compute_dtype", "float32", "--model", folder]
    assert re.search(r"frozen +disk × raw", command(capsys, "plan", *base)), (
        "codes are not rounded again"
    )
    lora = ["--max_steps", 3, "--lora.rank", 4, "--optimizer.learning_rate", "1e-2"]
    scored = json.loads(command(capsys, "eval", *base, "--json"))["loss"]
    command(capsys, "train", *base, *lora)
    adapter = tmp_path / "run" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(folder)
    after = json.loads(command(capsys, "eval", *base, "--json", "--adapter", adapter))["loss"]
    assert after < scored - 0.01

    dense = written.parent / "model-dense"
    plain = [*base[:-1], dense, "--method", "plain"]
    assert scored == pytest.approx(
        json.loads(command(capsys, "eval", *plain, "--json"))["loss"], rel=1e-5
    )
    assert after == pytest.approx(
        json.loads(command(capsys, "eval", *plain, "--json", "--adapter", adapter))["loss"],
        rel=1e-5,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the", return_tensors="pt")["input_ids"]
    greedy = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=1)[
        0, ids.shape[1] :
    ]
    said = command(capsys, "generate", *base, "--prompt", "the", "--max_new_tokens", 4)
    text = tokenizer.decode(greedy, skip_special_tokens=True)
    assert said.rstrip("\n") == re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f]", lambda c: f"\\x{ord(c[0]):02x}", text
    )

    assert main.main(["merge", str(folder), str(adapter), str(tmp_path / "merged")]) == 2
    asked = capsys.readouterr().err
    says(asked, f"{model_source(folder).codec} --dtype")
    assert not (tmp_path / "merged").exists()
    command(capsys, "merge", folder, adapter, tmp_path / "merged", "--dtype", "float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    with_adapter = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32), adapter
    )
    for name, tensor in with_adapter.merge_and_unload().state_dict().items():  # type: ignore[operator]
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-7)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_nothing_is_rounded_again(
    made: Folders, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the contract: codes are read as they lie, packed where that is asked for by name, and
    not trained themselves."""
    folder, model = made("awq")
    train = ["train", *tiny_run.arguments(tmp_path / "run"), "--model", folder]
    for arguments, message in (
        ([*train, "--frozen", "disk × int4"], "awq int4 frozen disk raw"),
        ([*train, "--lora", "false"], "awq adapters"),
        ([*train, "--frozen", "disk × awq"], "awq raw"),
    ):
        capsys.readouterr()
        assert main.main([str(part) for part in arguments]) == 2
        error = capsys.readouterr().err
        says(error, message)
        assert error.count("\n") == 1, error
    command(capsys, "pack", folder, tmp_path / "store", "--codec", "int8")
    assert "quantization_config" not in (tmp_path / "store" / "config.json").read_text()
    with blockwalk.Walker(
        tmp_path / "store", blockwalk.method("mebp", frozen="disk × int8"), training=False
    ) as walker:
        found = walker.evaluate(random_batch())
    assert found.loss_sum / found.tokens == pytest.approx(
        model(**random_batch()).loss.item(), rel=1e-2
    )


def change(folder: Path, key: str, to: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Another tensor of a name, or none."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if key in tensors:
            new = to(tensors.pop(key))
            save_file(
                {**tensors, **({} if new is None else {key: new.contiguous()})},
                path,
                {"format": "pt"},
            )
            return
    raise AssertionError(key)


def configure(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))


UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"
NOTE = ".weight.quant_state.bitsandbytes__nf4"
INT4 = "compressed-tensors int4"
ONE = r"compressed-tensors fp8"
ROTATED = {"config_groups": {"R": {"type": "hadamard", "apply": [{"targets": ["Linear"]}]}}}
WRONG: list[tuple[str, dict[str, Any] | tuple[str, Callable[[torch.Tensor], torch.Tensor | None]],
                  str]] = [
    ("awq", {"quant_method": "quark"}, "config.json quant_method quark fp8 GGUF"),
    ("awq", {"quant_method": ["awq"]}, "config.json damaged"),
    ("awq", {"version": "gemv"}, "config.json version gemv gemm"),
    ("awq", {"group_size": "many"}, "config.json damaged"),
    ("awq", {"group_size": 64}, "_proj.qzeros int32 (4, 16) (2, 16)"),
    ("awq", (".scales", lambda t: None), f"{UP}.scales missing"),
    ("awq", (".scales", lambda t: t.int()), f"{UP}.scales int32 (4, 128) float32"),
    ("gptq", {"bits": 3}, "bits 3 2 4 8"),
    ("gptq", (".qweight", lambda t: None), f"1 missing {UP}.weight"),
    ("gptq", (".g_idx", lambda t: t + 1), f"{UP}.g_idx 1 4"),
    ("gptq", (".qweight", lambda t: t[0]), f"{UP}.qweight int32 (128,) (any, any)"),
    ("fp8", (".weight_scale_inv", lambda t: None), f"{UP}.weight_scale_inv missing"),
    ("fp8", (".weight_scale_inv", lambda t: t[:1]), f"{UP}.weight_scale_inv float32 (1, 4) (2, 4)"),
    ("fp8", {"weight_block_size": [0, 32]}, "config.json damaged"),
    ("fp8", {"weight_block_size": 128}, "config.json damaged"),
    ("bitsandbytes", (NOTE, lambda t: None), f"{UP}.weight misshaped|uint8"),
    ("bitsandbytes", (NOTE, lambda t: t[:-9]), "safetensors damaged"),
    ("bitsandbytes", (NOTE, lambda t: said(t, shape=[1 << 40, 64])), f"{UP}.weight 8192"),
    ("bitsandbytes", (NOTE, lambda t: said(t, blocksize="64")), "safetensors damaged TypeError"),
    ("bitsandbytes nested", (".weight.absmax", lambda t: t.float()), "absmax float32 (256,) uint8"),
    (INT4, {"format": "marlin-24"}, "format marlin-24"),
    (INT4, (".weight_shape", lambda t: t * 0 - 1), f"{UP}.weight_packed (128, 16)"),
    (INT4, (".weight_scale", lambda t: t[:3]), f"{UP}.weight_scale float32 (3, 4)"),
    (ONE, (".weight_scale", lambda t: None), f"{UP}.weight_scale missing"),
    (INT4, {"transform_config": ROTATED}, "config.json transform_config"),
    (INT4, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "config.json sparsity_config"),
    (INT4, {"moe_sparsity_config": {"top": 2}}, "config.json moe_sparsity_config"),
    (INT4, {"config_groups": {"g": {"weights": {"num_bits": 4, "rotation": "spin"}}}},
     "config.json config_groups.weights.rotation spin"),
    ("gptq", {"rotation": "hadamard"}, "config.json rotation hadamard"),
    ("gptq", {"meta": {"quantizer": "x", "run": {"hadamard_dim": 64}}},
     "config.json meta.run.hadamard_dim 64"),
    ("gptq", {"dynamic": {r".*down_proj": {"bits": 8}}}, "config.json dynamic"),
    ("awq", {"online_rotation": True}, "config.json online_rotation"),
    ("fp8", {"expert_dtype": "fp4"}, "config.json expert_dtype fp4"),
    ("mxfp4", ("_scales", lambda t: None), f"{DOWN}_scales missing"),
    ("mxfp4", ("_blocks", lambda t: t[..., :8]),
     f"{DOWN}_blocks uint8 (4, 64, 3, 8) (any, any, any, 16)"),
]  # fmt: skip


def said(state: torch.Tensor, **changes: Any) -> torch.Tensor:
    """bitsandbytes' note with other values."""
    return torch.tensor(
        list(json.dumps({**json.loads(bytes(state.tolist())), **changes}).encode()),
        dtype=torch.uint8,
    )


@pytest.mark.parametrize(("kind", "spoil", "message"), WRONG)
def test_what_cannot_be_read_gets_one_line(
    kind: str, spoil: Any, message: str, made: Folders, tmp_path: Path
) -> None:
    """Oracle: the defect that the test made; the line names the file."""
    folder = tmp_path / "model"
    shutil.copytree(made(kind)[0], folder)
    if isinstance(spoil, dict):
        configure(folder, **spoil)
    else:
        change(folder, (DOWN if kind == "mxfp4" else UP) + spoil[0], spoil[1])
    with refused(ValueError, message) as error:
        CheckpointFolder(folder, build_skeleton(folder))
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


USUAL: list[tuple[str, dict[str, Any]]] = [
    ("fp8", {"fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}),
    ("gptq", {"dynamic": {r"-:.*lm_head": {}}, "meta": {"quantizer": ["gptqmodel:4.0"], "mse": 0.0,
              "v2": False, "act_group_aware": True}, "pack_dtype": "int32"}),
    ("gptq", {"autoround_version": "0.5", "iters": 200, "nsamples": 128, "enable_minmax_tuning":
              True, "extra_config": {}, "data_type": "int", "low_gpu_mem_usage": True}),
    ("awq", {"do_fuse": False, "modules_to_fuse": None, "exllama_config": {"version": 2}}),
    (INT4, {"transform_config": {}, "sparsity_config": {"format": "dense"}, "kv_cache_scheme": None,
            "quantization_status": "compressed", "global_compression_ratio": 1.9}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings"), USUAL)
def test_what_tools_write_of_themselves_is_read(
    kind: str, settings: dict[str, Any], made: Folders, tmp_path: Path
) -> None:
    """Oracle: the configurations that the tools publish, which change no weight."""
    folder = tmp_path / "model"
    shutil.copytree(made(kind)[0], folder)
    configure(folder, **settings)
    CheckpointFolder(folder, build_skeleton(folder)).close()


def test_what_transformers_writes_of_each_tool_is_known() -> None:
    """Oracle: transformers' own classes of these tools' settings."""
    from transformers.utils import quantization_config as tools

    from blockwalk.tiers.model_folder.quantiser_settings import refuse_unknown

    bits = {"bits": 4}
    for cls, settings in (
        (tools.FineGrainedFP8Config, {}),
        (tools.BitsAndBytesConfig, {"load_in_4bit": True}),
        (tools.GPTQConfig, bits),
        (tools.AwqConfig, bits),
        (tools.Mxfp4Config, {}),
    ):
        written = cls(**settings).to_dict()
        refuse_unknown(METHODS[written["quant_method"]], written, Path("model"))


def test_a_tensor_of_a_quantised_folder_that_nobody_reads_is_refused(
    made: Folders, tmp_path: Path
) -> None:
    """Oracle: the names that the test adds. Heads for further tokens are named; a bias of zeros
    adds nothing."""
    folder = tmp_path / "model"
    shutil.copytree(made("gptq")[0], folder)
    path = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(path)
    heads = {"mtp.fc.weight": torch.ones(2, 2), "model.layers.9.eh_proj.weight": torch.ones(2, 2)}
    zeros = {f"{UP}.bias": torch.zeros(4)}
    save_file({**tensors, **heads, **zeros}, path, {"format": "pt"})
    with warned(UserWarning, "mtp.fc.weight model.layers.9.eh_proj.weight"):
        CheckpointFolder(folder, build_skeleton(folder)).close()
    for name in ("model.layers.0.mlp.down_proj.R_input.weight", f"{UP}.bias"):
        save_file({**tensors, **heads, name: torch.ones(4)}, path, {"format": "pt"})
        with refused(ValueError, "1 tensor", name):
            CheckpointFolder(folder, build_skeleton(folder))


def test_a_file_that_was_cut_off(
    made: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the length that the test left; the command writes nothing."""
    folder = tmp_path / "model"
    shutil.copytree(made("gptq")[0], folder)
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    assert main.main(["pack", str(folder), str(tmp_path / "out"), "--codec", "int8"]) == 2
    assert re.search(rf"{path} is truncated: .*\n$", capsys.readouterr().err)
    with refused(ValueError, path, "truncated"):
        CheckpointFolder(folder, build_skeleton(folder))
    assert not (tmp_path / "out").exists()
