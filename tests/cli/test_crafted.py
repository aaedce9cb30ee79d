"""Oracle: what crafted files are made to do: a folder that appears, a file elsewhere that is read,
memory that is taken. None of it happens, and one line says which file is wrong."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.cli import main
from blockwalk.engine.pack import pack
from blockwalk.plan.placement import Codec
from blockwalk.system import atomic_files
from tests.conftest import TinyRun
from tests.support.bomb import Bomb
from tests.support.messages import says
from tests.support.report_page import Page

UNPICKLED: list[str] = []
"""Names that anything in this process has unpickled, as the interpreter itself tells."""


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        UNPICKLED.append(".".join(map(str, arguments)))


sys.addaudithook(_hear)


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[bytes]:
    """A pickle that makes a folder; nobody has opened it when the test ends."""
    UNPICKLED.clear()
    yield pickle.dumps(Bomb(tmp_path / "executed"))
    assert not (tmp_path / "executed").exists()
    assert not UNPICKLED


def test_the_oracle_hears(tmp_path: Path) -> None:
    UNPICKLED.clear()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()
    assert UNPICKLED


@pytest.fixture(scope="module")
def made(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter's run, a zeroth-order run, its exported ledger, and a block store."""
    folder = tmp_path_factory.mktemp("made")
    for name, method in (
        ("mebp", "mebp --lora.rank 2"),
        ("mezo", "mezo --optimizer.learning_rate 1e-5"),
    ):
        flags = f"--method {method} --max_steps 2 --save_every 1".split()
        assert main.main(["train", *tiny_run.arguments(folder / name), *flags]) == 0
    pack(tiny_run.model, folder / "store", Codec.INT4)
    there = ["--ledger", str(folder / "mezo" / "ledger.jsonl"), "--no_rebuild"]
    assert main.main(["export", str(tiny_run.model), str(folder / "exported"), *there]) == 0
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "runs")
    return tmp_path / "runs"


def refused(arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends by itself, in one line that has the file's name."""
    capsys.readouterr()
    assert main.main(arguments) == main.BAD_INPUT, capsys.readouterr().err
    said = capsys.readouterr().err
    says(said, names)
    assert said.count("\n") == 1, said


def evaluate(tiny_run: TinyRun, folder: Path, *more: str) -> list[str]:
    kept = tiny_run.arguments(folder)
    return ["eval", *kept, "--method", "plain", *more]


def test_a_pickle_in_place_of_every_file_of_a_run(
    bomb: bytes, runs: Path, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint before a planted one is taken up; without its ledger a run is refused; what is
    beside them is replaced."""
    for name, method in (
        ("mebp", "mebp --lora.rank 2"),
        ("mezo", "mezo --optimizer.learning_rate 1e-5"),
    ):
        resume = f"--method {method} --max_steps 3 --resume_from_checkpoint latest".split()
        files = [
            path
            for path in sorted((runs / name).rglob("*"))
            if path.is_file() and path.stat().st_size
        ]
        newest = [path for path in files if path.parent.name == "checkpoint-000002"]
        chain = [path for path in files if path.name == "ledger.jsonl"]
        marks = [
            path for path in files if path.name == ".blockwalk"
        ]  # without one a run's result is anybody's
        beside = [
            path
            for path in files
            if path not in (*chain, *marks) and "checkpoint-" not in path.parent.name
        ]
        assert len(newest) == 3
        assert len(beside) > 5
        for number, planted in enumerate((beside, newest, chain, marks)):
            folder = tmp_path / f"{name}-{number}"
            shutil.copytree(runs / name, folder)
            for path in planted:
                (folder / path.relative_to(runs / name)).write_bytes(bomb)
            if planted is beside:
                assert main.main(["report", str(folder)]) == main.BAD_INPUT
            if planted is marks:
                refused(
                    ["train", *tiny_run.arguments(folder), *resume], "overwrite_output_dir", capsys
                )
            elif planted and planted is chain:
                refused(["train", *tiny_run.arguments(folder), *resume], "ledger.jsonl", capsys)
            elif planted:
                assert main.main(["train", *tiny_run.arguments(folder), *resume]) == 0, (
                    capsys.readouterr().err
                )
                assert main.main(["report", str(folder)]) == 0


def test_a_pickle_for_an_adapter_a_store_a_ledger_a_model_or_records(
    bomb: bytes, runs: Path, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = runs / "mebp" / "adapter"
    model = tmp_path / "model"
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        kept = (adapter / name).read_bytes()
        (adapter / name).write_bytes(bomb)
        refused(evaluate(tiny_run, tmp_path / "out", "--adapter", str(adapter)), name, capsys)
        (adapter / name).write_bytes(kept)
    (adapter / "adapter_model.bin").write_bytes(
        bomb
    )  # PEFT's older form, beside the one that is read
    assert main.main(evaluate(tiny_run, tmp_path / "out", "--adapter", str(adapter))) == 0
    (adapter / "adapter_model.safetensors").unlink()
    refused(
        evaluate(tiny_run, tmp_path / "out", "--adapter", str(adapter)),
        "adapter_model.safetensors",
        capsys,
    )
    for path in [*sorted((runs / "store").glob("unit-*")), runs / "store" / "store.json"]:
        kept = path.read_bytes()
        path.write_bytes(bomb)
        refused(
            evaluate(tiny_run, tmp_path / "out", "--model", str(runs / "store")), path.name, capsys
        )
        path.write_bytes(kept)
    for name in (str(runs / "exported"), str(runs / "mezo" / "ledger.jsonl")):
        Path(name).write_bytes(bomb)
        refused(["replay", str(tiny_run.model), name, str(tmp_path / "replayed")], name, capsys)
    shutil.copytree(tiny_run.model, model)
    (model / "pytorch_model.bin").write_bytes(bomb)
    assert main.main(evaluate(tiny_run, tmp_path / "out", "--model", str(model))) == 0
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (model / name).write_bytes(bomb)
        refused(evaluate(tiny_run, tmp_path / "out", "--model", str(model)), str(model), capsys)
        shutil.copy(tiny_run.model / name, model / name)
    (model / "model.safetensors").unlink()
    torch.save({"weight": Bomb(tmp_path / "executed")}, tmp_path / "zipped")
    for data in (bomb, (tmp_path / "zipped").read_bytes()):
        (model / "pytorch_model.bin").write_bytes(data)
        refused(
            evaluate(tiny_run, tmp_path / "out", "--model", str(model)), "pytorch_model.bin", capsys
        )
    (tmp_path / "records.jsonl").write_bytes(bomb)
    refused(
        evaluate(tiny_run, tmp_path / "out", "--data.eval", str(tmp_path / "records.jsonl")),
        "records.jsonl",
        capsys,
    )


def test_code_that_a_model_brings_is_not_run(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers would import these files, were it told to trust them."""
    model = tmp_path / "model"
    shutil.copytree(tiny_run.model, model)
    (model / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'executed')!r})\n")
    config = json.loads((model / "config.json").read_text())
    own = {
        "AutoConfig": "own.Config",
        "AutoModelForCausalLM": "own.Model",
        "AutoTokenizer": ["own.Tokenizer", None],
    }
    for kind in (config["model_type"], "of-their-own"):
        (model / "config.json").write_text(
            json.dumps({**config, "auto_map": own, "model_type": kind})
        )
        settings = json.loads((tiny_run.model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(
            json.dumps({**settings, "auto_map": own, "tokenizer_class": "Own"})
        )
        assert main.main(evaluate(tiny_run, tmp_path / "out", "--model", str(model))) in (
            0,
            main.BAD_INPUT,
        )
        assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("command", ["train", "plan --hardware"])
def test_tags_and_aliases_of_yaml(
    command: str, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyYAML's own loader would call the function; aliases of aliases are two to the sixtieth
    values."""
    file = tmp_path / "crafted.yaml"
    laughs = "\n".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))
    for text in (
        f"seed: !!python/object/apply:os.mkdir ['{tmp_path / 'executed'}']",
        f"a0: &a0 [x, x]\n{laughs}",
        "[" * 100_000,
        "seed: !!timestamp x",
    ):
        file.write_text(text)
        given = (
            ["train", str(file)]
            if command == "train"
            else ["plan", *tiny_run.arguments(tmp_path), "--hardware", str(file)]
        )
        refused(given, str(file), capsys)
    assert not (tmp_path / "executed").exists()


def header(tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def resealed(path: Path, change: Callable[[Any], None]) -> None:
    """Change a sealed file and seal it again: the digest is no secret."""
    value = atomic_files.read_sealed(path)
    change(value)
    atomic_files.write_sealed(path, value)


def test_files_that_lead_elsewhere_or_say_too_much(
    bomb: bytes, runs: Path, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Path traversal, offsets outside a file, headers longer than the file, a ledger that unpacks
    to a thousand times it."""
    model = tmp_path / "model"
    store = runs / "store"
    shutil.copytree(tiny_run.model, model)
    (model / "model.safetensors").unlink()
    at_model = evaluate(tiny_run, tmp_path / "out", "--model", str(model))
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": f"../{tiny_run.model.name}/model.safetensors"}})
    )
    refused(at_model, "model.safetensors.index.json", capsys)
    for other in ("[]", "{}", '{"weight_map": [1]}', "[" * 100_000):
        (model / "model.safetensors.index.json").write_text(other)
        refused(at_model, "model.safetensors.index.json", capsys)
    whole = (tiny_run.model / "model.safetensors").read_bytes()
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for data in (
        (1 << 60).to_bytes(8, "little") + whole[8:],
        header([]) + bytes(8),
        header({"a": []}) + bytes(8),
        header({"a": {**entry, "data_offsets": [-8, 0]}}) + bytes(8),
        header({"a": {**entry, "shape": [-1, -2]}}) + bytes(8),
        header({"a": {**entry, "shape": [2.0]}}) + bytes(8),
        header({"a": {**entry, "shape": [1 << 62, 0], "data_offsets": [0, 0]}}),
        header({"a": {**entry, "data_offsets": [1 << 62, (1 << 62) + 8]}}) + bytes(8),
    ):
        (model / "model.safetensors").write_bytes(data)
        refused(at_model, str(model), capsys)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes"}})
    )
    for note in (
        bomb,
        b"[" * 100_000,
        b"\xff",
        b"{}",
        b'{"blocksize": 64, "shape": [1099511627776, 64]}',
        b'{"blocksize": 0, "shape": [1, 16]}',
        b'{"blocksize": 8, "shape": [-1, -16]}',
        b'{"blocksize": 8, "shape": [1, 16], "nested_blocksize": -1}',
    ):
        codes = {"dtype": "U8", "shape": [8, 1], "data_offsets": [0, 8]}
        told = {"dtype": "U8", "shape": [len(note)], "data_offsets": [8, 8 + len(note)]}
        tensors = {"a.weight": codes, "a.weight.quant_state.bitsandbytes__nf4": told}
        (model / "model.safetensors").write_bytes(header(tensors) + bytes(8) + note)
        refused(at_model, str(model), capsys)
    at_store = evaluate(tiny_run, tmp_path / "out", "--model", str(store))
    index = (store / "store.json").read_bytes()
    crafted: list[Callable[[Any], None]] = [
        lambda value: value["units"][1].update(file=f"../store/{value['units'][1]['file']}"),
        lambda value: value["units"][1]["params"][0].update(offset=1 << 40),
        lambda value: value["units"][1]["params"][0].update(offset=-64),
        lambda value: value["units"][1]["params"][1].update(shape=[1 << 20, 64]),
        lambda value: value.update(group_size=0),
        lambda value: value.update(generations=[]),
        lambda value: value.update(units={"a": 1}),
    ]
    for change in crafted:
        resealed(store / "store.json", change)
        refused(at_store, "store.json", capsys)
        (store / "store.json").write_bytes(index)
    table = runs / "mezo" / "checkpoint-000002" / "rank-00000.json"
    kept = table.read_bytes()
    changes: list[Callable[[Any], None]] = [
        lambda value: value["pieces"][0].update(dtype="load"),
        lambda value: value["pieces"][0].update(offset=1 << 40),
        lambda value: value["pieces"][0].update(crc32=[]),
        lambda value: value["pieces"][0].update(numel="x"),
        lambda value: value["pieces"][0].update(numel=1 << 63),
        lambda value: value["pieces"][0].update(first=1),
        lambda value: value["pieces"].append(value["pieces"][0]),
        lambda value: value.update(ranks=1 << 40),
        lambda value: value.update(pieces=7),
    ]
    for change in changes:
        resealed(table, change)
        flags = [
            "--method",
            "mezo",
            "--max_steps",
            "3",
            "--resume_from_checkpoint",
            str(table.parent),
        ]
        there = [*tiny_run.arguments(runs / "mezo"), *flags]
        refused(["train", *there], "rank-00000|rank-00001", capsys)
        table.write_bytes(kept)
    (runs / "exported").write_bytes(gzip.compress(bytes(1 << 26)))
    refused(
        ["replay", str(tiny_run.model), str(runs / "exported"), str(tmp_path / "replayed")],
        "exported",
        capsys,
    )


def gguf(*values: tuple[bytes, int, bytes], tensors: tuple[bytes, ...] = ()) -> bytes:
    """A GGUF file of metadata, each a name, a kind and a value's bytes, and of tensors'
    descriptions."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    return b"".join(
        [
            head,
            *(text(name) + struct.pack("<I", kind) + value for name, kind, value in values),
            *tensors,
        ]
    )


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


LLAMA = (b"general.architecture", 8, text(b"llama"))
TENSOR = text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0)
NUMBERS = {
    b"block_count": 1,
    b"embedding_length": 256,
    b"feed_forward_length": 4,
    b"attention.head_count": 7,
}
GGUF = {
    "no blocks": gguf(LLAMA, tensors=(TENSOR,)),
    "endless blocks": gguf(
        LLAMA, (b"llama.block_count", 4, struct.pack("<I", 2**32 - 1)), tensors=(TENSOR,)
    ),
    "heads that do not divide": gguf(
        LLAMA,
        *((b"llama." + name, 4, struct.pack("<I", value)) for name, value in NUMBERS.items()),
        tensors=(TENSOR + bytes(64),),
    ),
    "arrays in arrays": gguf((b"a", 9, struct.pack("<IQ", 9, 1) * 3000 + struct.pack("<IQ", 0, 0))),
    "an unknown kind": gguf((b"a", 9, struct.pack("<IQ", 77, 2))),
    "an endless array": gguf((b"a", 9, struct.pack("<IQ", 10, 2**64 - 1)), LLAMA),
    "an endless text": gguf((b"a", 8, struct.pack("<Q", 2**63))),
    "no alignment": gguf(LLAMA, (b"general.alignment", 4, struct.pack("<I", 0))),
    "alignment in words": gguf(LLAMA, (b"general.alignment", 8, text(b"x"))),
    "parts in words": gguf(LLAMA, (b"split.count", 8, text(b"x"))),
    "endless dimensions": gguf(LLAMA, tensors=(text(b"t") + struct.pack("<I", 2**31),)),
    "an endless tensor": gguf(
        LLAMA, tensors=(text(b"t") + struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0),)
    ),
    "a tensor elsewhere": gguf(LLAMA, tensors=(text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 2**63),)),
    "nothing": b"GGUF",
    "a pickle": b"",
}


@pytest.mark.parametrize("kind", GGUF)
def test_a_gguf_file(
    kind: str, bomb: bytes, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "crafted.gguf").write_bytes(GGUF[kind] or bomb)
    refused(
        evaluate(tiny_run, tmp_path / "out", "--model", str(tmp_path / "crafted.gguf")),
        "crafted.gguf",
        capsys,
    )


def test_numbers_that_do_not_go_together(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the file's name, where transformers has an exception of its own."""
    shutil.copytree(tiny_run.model, model := tmp_path / "crafted")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "num_attention_heads": 7}))
    refused(evaluate(tiny_run, tmp_path / "out", "--model", str(model)), "crafted", capsys)


def test_markup_in_a_run_is_text_in_its_page(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: Python's HTML parser, which finds the page's own elements alone."""
    run = runs / "mebp"
    bad = "</title><script>alert(1)</script><img src=x onerror=alert(1)>"
    before = {tag for tag, _ in Page(_report(run)).tags}
    lines = atomic_files.whole_lines(run / "metrics.jsonl")
    for line in lines:
        line["bytes_moved"] = {bad: 7}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    forecast = json.loads((run / "forecast.json").read_text())
    atomic_files.write_json(
        run / "forecast.json", {**forecast, "peaks": {bad: 1}, "versions": {bad: bad}}
    )
    trace = json.loads((run / "trace.json").read_text())
    for event in trace["traceEvents"]:
        event.update(name=bad, cat=bad, args={"name": bad})
    atomic_files.write_json(run / "trace.json", trace)
    (run / "config.yaml").write_text(f"model: {bad}\n")
    os.rename(run, run.with_name(name := "<script>alert(1)<%2fscript>"))
    page = _report(run.with_name(name))
    assert {tag for tag, _ in Page(page).tags} <= before
    assert page.count("&lt;script&gt;") > 6
    for file, text in (
        ("trace.json", '{"traceEvents": [{"ph": "X"}]}'),
        ("trace.json", "[1]"),
        ("forecast.json", '{"peaks": 3}'),
        ("metrics.jsonl", '{"step": 1}\n'),
        ("metrics.jsonl", '{"step": 1, "loss": "<b>"}\n'),
    ):
        kept = (run.with_name(name) / file).read_bytes()
        (run.with_name(name) / file).write_text(text)
        assert main.main(["report", str(run.with_name(name))]) == main.BAD_INPUT
        assert capsys.readouterr().err.count("\n") == 1
        (run.with_name(name) / file).write_bytes(kept)


def _report(run: Path) -> str:
    assert main.main(["report", str(run)]) == 0
    return (run / "report.html").read_text()


def test_a_cache_that_somebody_else_wrote(
    bomb: bytes, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of the cache folder are made again; compiled kernels have tests of their own
    (closed_form/test_native.py)."""
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BLOCKWALK_NATIVE", "0")
    at = evaluate(
        tiny_run,
        tmp_path / "out",
        "--frozen",
        "disk × int4",
        "--lora.rank",
        "2",
        "--method",
        "mebp",
    )
    from blockwalk.cutting import verify
    from blockwalk.system import remembered_digests

    monkeypatch.setattr(remembered_digests, "_SETTLED", -60.0)
    for text in (b"", bomb, b"[1]", b'{"seen": 1}', b"[" * 100_000):
        monkeypatch.setattr(verify, "_verdicts", {})
        for path in (tmp_path / "cache").rglob("*.json"):
            if path.parent == tmp_path / "cache" and text:
                path.write_bytes(text)
        assert main.main(at) == 0
        assert any((tmp_path / "cache").glob("*.json"))
