"""Oracle: the sizes of the files: one that asks for far more memory, or for time without end, is
named and refused before anything is made."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model

from blockwalk.cutting import adapter_patterns
from blockwalk.cutting.peft_models import add_adapter, lora_config
from blockwalk.cutting.saved_adapters import load_adapter
from blockwalk.data import sources
from blockwalk.data.normalizer_growth import require_bounded, require_bounded_file
from blockwalk.models.model_source import model_source
from blockwalk.system.process_memory import process_bytes
from blockwalk.tiers.model_folder import torch_file
from tests.models import tiny_model
from tests.support.messages import refused

ROOT = Path(__file__).parents[2]
ENDLESS = "(([a-z]|[._0-9])+)+!"
"""A pattern that Python matches in exponential time."""


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def saved(folder: Path, config: Any) -> Path:
    """The folder of an adapter of PEFT's."""
    get_peft_model(tiny_model("llama"), config).save_pretrained(folder)
    return folder


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return saved(tmp_path / "lora", LoraConfig(r=4, target_modules=["q_proj"]))


def test_a_rank_of_other_tensors_makes_none(lora: Path) -> None:
    """Oracle: the tensors' rank, and the bytes that this process holds before and after."""
    edit(lora / "adapter_config.json", r=100_000_000)
    before = process_bytes()
    with refused(ValueError, "adapter_config.json 4 100000000"):
        load_adapter(tiny_model("llama"), lora)
    assert process_bytes() - before < 200e6


@pytest.mark.parametrize(
    "changes",
    [
        {"num_virtual_tokens": 2 * 10**9},
        {"token_dim": 10**9},
        {"num_transformer_submodules": 10**9},
    ],
)
def test_a_prefix_of_other_sizes_is_not_made(changes: dict[str, int], tmp_path: Path) -> None:
    """Oracle: the sizes of the tensor in the file."""
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    folder = saved(tmp_path / "prefix", config)
    load_adapter(tiny_model("llama"), folder)
    edit(folder / "adapter_config.json", **changes)
    with refused(ValueError, "adapter_config.json num_virtual_tokens"):
        load_adapter(tiny_model("llama"), folder)


@pytest.mark.parametrize(
    "field",
    [
        *("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"),
        *("modules_to_save", "layers_pattern"),
    ],
)
def test_a_pattern_without_end_is_refused(
    field: str, lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the pattern alone, which takes longer than any time for a name of 30 letters."""
    monkeypatch.setattr(adapter_patterns, "SECONDS", 0.2)
    value: Any = {ENDLESS: 4} if field.endswith("k_pattern") or field[0] == "a" else ENDLESS
    if field in ("modules_to_save", "layers_pattern"):
        value = [ENDLESS]
    layers = {"layers_to_transform": [0]} if field == "layers_pattern" else {}
    edit(lora / "adapter_config.json", **{field: value}, **layers)
    with refused(ValueError, f"{lora}/adapter_config.json {field} 0.2 s"):
        load_adapter(tiny_model("llama"), lora)


def test_a_pattern_of_a_recipe_is_tried_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_patterns, "SECONDS", 0.2)
    with refused(ValueError, "lora target_modules 0.2 s"):
        add_adapter(tiny_model("llama"), lora_config(4, 8.0, ENDLESS))
    with refused(ValueError, "lora target_modules"):
        add_adapter(tiny_model("llama"), lora_config(4, 8.0, "(q_proj"))


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


GROWING = {
    "doublings": [replace("a", "aa")] * 36,
    "of what another makes": [replace("b", ""), replace("[c-d]", "b", "Regex")]
    + [replace("b", "bb")] * 20,
    "in turn": [replace("a", "bb"), replace("b", "aa")] * 12,
    "at once": [replace("a", "b" * 100_000)],
    "of words": [replace("hello", "hello hello")] * 20,
}


@pytest.mark.parametrize("name", GROWING)
def test_rules_that_multiply_a_text_are_refused(name: str, tmp_path: Path) -> None:
    """Oracle: the length of the text by the rules' arithmetic: 2²⁰ times and more."""
    file = tmp_path / "tokenizer.json"
    rules = {"type": "Sequence", "normalizers": GROWING[name]}
    file.write_text(json.dumps({"version": "1.0", "normalizer": rules}))
    with refused(ValueError, f"{file} normalizer 1,000"):
        require_bounded_file(file)


def test_usual_rules_are_taken() -> None:
    """Oracle: rules of published tokenizers, and many that lengthen, each another character."""
    for file in (ROOT / "examples").glob("*/tokenizer.json"):
        require_bounded_file(file)
    llama = [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]
    fractions = [replace(chr(0xBC + number), "1/2" * 5) for number in range(40)]
    albert = [replace("``", '"'), {"type": "NFKD"}, {"type": "Lowercase"}]
    spaces = [
        replace(" {2,}", "▁", "Regex"),
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ]
    for rules in (llama, fractions, albert, spaces):
        require_bounded({"type": "Sequence", "normalizers": rules}, Path("tokenizer.json"))


@pytest.mark.parametrize("kind", ["one row", "one text"])
def test_rows_that_unpack_without_bound_are_refused(kind: str, tmp_path: Path) -> None:
    """Oracle: the bytes of the file, and those that this process holds."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "c.parquet"
    texts = ["y" * (100 << 20)] if kind == "one row" else ["y" * (1 << 20)]
    column = arrow.array(texts) if kind == "one row" else arrow.array(texts[:1]).take([0] * 300)
    table = arrow.table({"text": column})
    parquet.write_table(table, file, compression="zstd", use_dictionary=kind == "one text")
    del table, column, texts
    before = process_bytes()
    with refused(ValueError, f"{file} {file.stat().st_size:,} {sources.UNPACKED:,}"):
        list(sources.read_records(file))
    assert process_bytes() - before < 1e9


def test_usual_rows_are_read(tmp_path: Path) -> None:
    """Oracle: the rows that were written."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"text {number % 7}" for number in range(300)]
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "c.parquet", row_group_size=100)
    records = sources.read_records(tmp_path / "c.parquet")
    assert [record.fields["text"] for record in records] == texts


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_hidden_layers", 5_000_000), ("n_layer", 10**12), ("num_local_experts", 10**9)],
)
def test_layers_that_no_tensor_stands_for_are_not_made(
    name: str, value: int, tmp_path: Path
) -> None:
    """Oracle: the number of tensors that safetensors counts."""
    tiny_model("llama").save_pretrained(tmp_path)
    model_source(tmp_path).configuration()
    edit(tmp_path / "config.json", **{name: value})
    with refused(ValueError, f"{tmp_path}/config.json {name} {value:,}"):
        model_source(tmp_path).configuration()
    (tmp_path / "model.safetensors").unlink()
    with refused(ValueError, f"config.json {name}"):
        model_source(tmp_path / "config.json").configuration()


def test_compressed_tensors_are_not_unpacked(tmp_path: Path) -> None:
    """Oracle: the archive's own list of entries."""
    torch.save({"w": torch.zeros(1000)}, tmp_path / "stored.bin")
    assert torch_file.read_header(tmp_path / "stored.bin").keys() == {"w"}
    with (
        zipfile.ZipFile(tmp_path / "stored.bin") as stored,
        zipfile.ZipFile(tmp_path / "packed.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    with refused(ValueError, f"{tmp_path / 'packed.bin'} compressed"):
        torch_file.read_header(tmp_path / "packed.bin")
