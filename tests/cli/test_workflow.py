"""Oracle: plain ``transformers`` and PEFT, which load what the commands write and must find the
same loss and accuracy."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockwalk import Walker, method
from blockwalk.cli import main
from blockwalk.tiers.block_store.store import BlockStore
from tests.conftest import TinyRun
from tests.support.messages import refused, says


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main.main(list(arguments))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def accuracy_and_loss(
    model: Any, tokenizer: Any, records: list[dict[str, str]]
) -> tuple[float, float]:
    """MeZO's classification by label words, written out: of two continuations the one whose tokens
    are likelier on average."""
    correct = 0
    total = 0.0
    tokens = 0
    for record in records:
        losses = {}
        means = {}
        for word in ("good", "bad"):
            prompt = tokenizer(f"{record['text']} It was")["input_ids"]
            ids = torch.tensor([prompt + tokenizer(f" {word}")["input_ids"]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : -1].double()
            losses[word] = torch.nn.functional.cross_entropy(
                logits, ids[0, len(prompt) :], reduction="sum"
            ).item()
            means[word] = losses[word] / (ids.shape[1] - len(prompt))
            if word == record["label"]:
                total = total + losses[word]
                tokens = tokens + ids.shape[1] - len(prompt)
        correct += min(means, key=means.__getitem__) == record["label"]
    return correct / len(records), total / tokens


def test_pack_train_eval_merge_generate(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    merged = str(tmp_path / "merged")
    raw = ["--frozen.codec", "raw"]
    arguments = [*tiny_run.arguments(out), "--method", "mebp"]
    steps = ["--max_steps", "60", "--optimizer.learning_rate", "1e-2", "--batch_size", "16"]
    printed = run(capsys, "train", *arguments, *raw, *steps)
    assert "held-out accuracy" in printed
    assert f"saved to           {out / 'adapter'}" in printed
    first, last = [
        json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()
    ]
    assert (first["step"], last["step"]) == (0, 60)
    assert last["loss"] < first["loss"]

    records = [json.loads(line) for line in tiny_run.eval.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    base = AutoModelForCausalLM.from_pretrained(tiny_run.model)
    before = accuracy_and_loss(base, tokenizer, records)
    after = accuracy_and_loss(
        PeftModel.from_pretrained(base, str(out / "adapter")), tokenizer, records
    )
    for found, expected in ((first, before), (last, after)):
        assert found["accuracy"] == expected[0]
        assert found["loss"] == pytest.approx(expected[1], rel=1e-5)

    saved = json.loads(
        run(capsys, "eval", *arguments, *raw, "--adapter", str(out / "adapter"), "--json")
    )
    assert saved["loss"] == pytest.approx(last["loss"], rel=1e-7), (
        "the same tokens in batches of another size"
    )
    assert saved["accuracy"] == last["accuracy"]
    assert json.loads(run(capsys, "eval", str(out), *raw, "--json")) == saved, (
        "a run's folder means what it has trained"
    )
    untrained = json.loads(run(capsys, "eval", str(out), *raw, "--adapter", "none", "--json"))
    assert untrained["loss"] == pytest.approx(before[1], rel=1e-5)

    rounded = ["--frozen", "disk × int4a"]
    both = json.loads(
        run(capsys, "eval", *arguments, *rounded, "--adapter", str(out / "adapter"), "--json")
    )
    assert both["loss"] != saved["loss"], "in 4 bits"
    assert both["unrounded"]["loss"] == pytest.approx(after[1], rel=1e-5), "what is deployed"
    alone = [*rounded, "--adapter", str(out / "adapter"), "--json", "--as-trained"]
    short = json.loads(run(capsys, "eval", *arguments, *alone))
    assert short == {name: value for name, value in both.items() if name != "unrounded"}

    run(capsys, "merge", str(tiny_run.model), str(out / "adapter"), merged)
    model = AutoModelForCausalLM.from_pretrained(merged).eval()
    assert accuracy_and_loss(model, tokenizer, records)[1] == pytest.approx(after[1], rel=1e-4)

    prompt = "fresh. It was"
    found = run(
        capsys,
        "generate",
        "--model",
        merged,
        "--method",
        "plain",
        "--prompt",
        prompt,
        "--max_new_tokens",
        "8",
    )
    ids = model.generate(
        **tokenizer(prompt, return_tensors="pt"), max_new_tokens=8, do_sample=False
    )[0]
    assert (
        found
        == tokenizer.decode(ids[len(tokenizer(prompt)["input_ids"]) :], skip_special_tokens=True)
        + "\n"
    )

    found = run(capsys, "generate", "--model", merged, "--prompt", prompt, "--max_new_tokens", "8")
    assert (
        found
        == tokenizer.decode(ids[len(tokenizer(prompt)["input_ids"]) :], skip_special_tokens=True)
        + "\n"
    )
    alone = json.loads(run(capsys, "eval", *arguments, "--model", merged, "--json"))
    assert alone.keys() == saved.keys(), "nothing is rounded, so there is one figure"
    assert alone["loss"] == pytest.approx(after[1], rel=1e-4)

    store = str(tmp_path / "store")
    run(capsys, "pack", str(tiny_run.model), store, "--codec", "int8")
    on_store = [
        "eval",
        *arguments,
        "--model",
        store,
        "--frozen",
        "disk × int8",
        "--adapter",
        str(out / "adapter"),
    ]
    coded = json.loads(run(capsys, *on_store, "--json"))
    assert coded["loss"] != last["loss"]
    assert coded["loss"] == pytest.approx(last["loss"], rel=0.02), "8 bits are nearly the same"


def test_what_rounds_says_so_in_one_line(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the loss in transformers. Without an adapter a model is read raw, whatever the run's
    file says of training, unless the command line names a codec."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    records = [json.loads(line) for line in tiny_run.eval.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    loss = accuracy_and_loss(
        AutoModelForCausalLM.from_pretrained(tiny_run.model), tokenizer, records
    )[1]
    arguments = [*tiny_run.arguments(tmp_path / "out"), "--method", "mebp"]
    file = tmp_path / "run.yaml"
    file.write_text("frozen: disk × int4a\n", encoding="utf-8")
    for asked, note in (
        ([], ""),
        ([str(file)], ""),
        (["--frozen", "disk × int4a"], "over weights in int4a, then over the model's own"),
        ([str(file), "--as-trained"], "over weights in int4a alone"),
    ):
        assert main.main(["eval", *asked, *arguments, "--json"]) == 0
        captured = capsys.readouterr()
        figures = json.loads(captured.out)
        notes = [line for line in captured.err.splitlines() if "over weights" in line]
        assert (figures["loss"] == pytest.approx(loss, rel=1e-5)) == (not note)
        assert len(notes) == bool(note)
        assert note in "".join(notes)
    pytest.importorskip("gguf")
    half = tmp_path / "half.gguf"
    assert main.main(["gguf", str(tiny_run.model), str(half), "--dtype", "f16"]) == 0
    capsys.readouterr()
    assert (
        main.main(
            ["eval", *arguments, "--model", str(half), "--compute_dtype", "float32", "--json"]
        )
        == 0
    )
    captured = capsys.readouterr()
    assert json.loads(captured.out)["loss"] == pytest.approx(loss, rel=1e-4)
    assert "over weights" not in captured.err
    prompt = ["--model", str(tiny_run.model), "--prompt", "fresh", "--max_new_tokens", "1"]
    for asked, lines in (([], 0), (["--frozen.codec", "int4a"], 1)):
        assert main.main(["generate", *asked, *prompt]) == 0
        assert (
            capsys.readouterr().err.count(
                "over weights in int4a; --frozen disk reads the model's own"
            )
            == lines
        )


@pytest.mark.parametrize("codec", ["int4", "int8", "fp8", "bf16", "fp16", "fp32", "raw"])
def test_every_codec_is_packed(codec: str, tiny_run: TinyRun, tmp_path: Path) -> None:
    """Oracle: transformers' tensors, within what the codec's page promises of the largest element
    of a row."""
    from transformers import AutoModelForCausalLM

    assert main.main(["pack", str(tiny_run.model), str(tmp_path / "store"), "--codec", codec]) == 0
    store = BlockStore(tmp_path / "store")
    store.verify()
    bound = {"int4": 1 / 8, "int8": 1 / 254, "fp8": 1 / 16, "bf16": 2**-8, "fp16": 2**-11}.get(
        codec, 0.0
    )
    for name, theirs in AutoModelForCausalLM.from_pretrained(tiny_run.model).named_parameters():
        ours = torch.empty(theirs.shape)
        store.read_into(name, ours)
        assert float((ours - theirs).abs().max()) <= bound * float(theirs.abs().max()), name


@pytest.mark.parametrize("from_store", [False, True])
def test_rounded_weights_are_not_what_training_starts_from(
    from_store: bool, tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Oracle: the command line's refusal, which Python's walker makes as well; nothing is packed
    for it."""
    model = tiny_run.model
    frozen = "disk × int8"
    if from_store:
        assert main.main(["pack", str(model), str(tmp_path / "store"), "--codec", "int8"]) == 0
        model = tmp_path / "store"
        frozen = "disk × raw"
    plan = method("plain", frozen=frozen)
    with refused(ValueError, "adapters"):
        Walker(model, plan, workdir=tmp_path / "work", device="cpu")
    assert not (tmp_path / "work").exists()
    Walker(model, plan, workdir=tmp_path / "work", device="cpu", training=False).close()
    arguments = [
        "train",
        *tiny_run.arguments(tmp_path / "out"),
        "--model",
        str(model),
        "--method",
        "plain",
    ]
    assert main.main([*arguments, "--frozen", frozen, "--lora", "false"]) == 2


@pytest.mark.parametrize("method_name", ["mebp", "plain", "zo2"])
def test_codes_are_refused_before_any_work(
    method_name: str, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the tensor that the test stored as int8; nothing is written, and no model is
    opened."""
    folder = tmp_path / "model"
    key = "model.layers.1.mlp.up_proj.weight"
    shutil.copytree(tiny_run.model, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, key: (tensors[key] * 100).to(torch.int8)},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    arguments = [
        "train",
        *tiny_run.arguments(tmp_path / "out"),
        "--model",
        str(folder),
        "--method",
        method_name,
    ]
    assert main.main(arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if key in line]
    assert "model.safetensors" in line
    assert "int8" in line
    assert not (tmp_path / "out").exists()


def test_all_parameters(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole model is trained and saved; the folder that it came from is left as it was."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    original = (tiny_run.model / "model.safetensors").read_bytes()
    arguments = [*tiny_run.arguments(tmp_path), "--method", "plain", "--max_steps", "20"]
    run(
        capsys,
        "train",
        *arguments,
        "--optimizer.learning_rate",
        "3e-3",
        "--gradient_accumulation_steps",
        "2",
    )
    last = json.loads((tmp_path / "evaluations.jsonl").read_text().splitlines()[-1])
    records = [json.loads(line) for line in tiny_run.eval.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    accuracy, loss = accuracy_and_loss(
        model, AutoTokenizer.from_pretrained(tmp_path / "model"), records
    )
    assert (last["accuracy"], last["loss"]) == (accuracy, pytest.approx(loss, rel=1e-5))
    assert main.main(["eval", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["loss"] == pytest.approx(loss, rel=1e-5)
    assert printed.err.count(str(tmp_path / "model")) == 1
    base = json.loads(run(capsys, "eval", str(tmp_path), "--adapter", "none", "--json"))
    assert base["loss"] > 1.1 * loss
    few = json.loads(run(capsys, "eval", str(tmp_path), "--data.eval_limit", "3", "--json"))
    assert few["examples"] == 3 < base["examples"]
    (tmp_path / "later.yaml").write_text((tmp_path / "config.yaml").read_text())
    unrun = [
        "eval",
        str(tmp_path / "later.yaml"),
        "--output_dir",
        str(tmp_path / "to come"),
        "--json",
    ]
    assert json.loads(run(capsys, *unrun)) == base, "a run that has trained nothing yet"
    assert (tiny_run.model / "model.safetensors").read_bytes() == original


def test_a_ledger_is_replayed(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the weights that the run itself saved; another run of half the steps."""
    settings = ["--method", "zo2", "--trainable", "disk", "--optimizer.learning_rate", "1e-5"]
    for name, steps in (("whole", "10"), ("half", "5")):
        run(capsys, "train", *tiny_run.arguments(tmp_path / name), *settings, "--max_steps", steps)
    ledger = str(tmp_path / "whole" / "ledger.jsonl")
    for name, until in (("whole", []), ("half", ["--until", "5"])):
        out = tmp_path / f"replayed-{name}"
        run(capsys, "replay", str(tiny_run.model), ledger, str(out), *until)
        saved = tmp_path / name / "model" / "model.safetensors"
        assert (out / "model.safetensors").read_bytes() == saved.read_bytes()


def test_a_bad_record_is_named(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the line that was broken."""
    broken = tmp_path / "broken.jsonl"
    lines = tiny_run.train.read_text().splitlines()
    lines[2] = '{"text": "no label"}'
    broken.write_text("\n".join(lines))
    assert (
        main.main(["train", *tiny_run.arguments(tmp_path / "out"), "--data.train", str(broken)])
        == 2
    )
    says(capsys.readouterr().err, f"{broken} 3 label")
    assert not (tmp_path / "out").exists(), "nothing was written"
