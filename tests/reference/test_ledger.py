"""Oracle: a run that was never stopped. Taken up from its ledger, or rebuilt from it, it ends with
the same bits."""

from __future__ import annotations

import copy
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from blockwalk import method
from blockwalk.checkpoints.ledger import Ledger, LedgerEntry, read_ledger, write_exported
from blockwalk.cli.main import main
from blockwalk.convert.replay import export, replay
from blockwalk.plan.choices import LoraSettings
from blockwalk.system import atomic_files
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.zeroth_order_runs import assert_same, trained

OPTIMIZER = {
    "name": "sgd",
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "schedule": "linear",
    "total_steps": 20,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("opt", tied=True).save_pretrained(folder)
    return folder


def go_on(
    base: Path, plan: Any, folder: Path, steps: int, lora: Any = None
) -> tuple[list[Any], dict[str, Any]]:
    """Take a run up where it stands and take it to ``steps``."""
    with Walker(
        base, plan, lora=lora, workdir=folder, device="cpu", ledger=folder / "ledger.jsonl"
    ) as walker:
        grads = []
        while walker.steps_done < steps:
            done = walker.steps_done
            grads.append(
                walker.step(
                    random_batch(seed=done),
                    seed=done if plan.zo.noise in ("mezo", "torch") else None,
                ).projected_grad
            )
        return grads, trained(walker)


RUNS: dict[str, dict[str, Any]] = {
    "resident": {"name": "mezo"},
    "disk": {"name": "zo2", "trainable": "disk", "update": {"flush_every": 3}},
    "disk bf16": {"name": "zo2", "trainable": "disk × bf16"},
    "host fp8": {"name": "zo2", "trainable": "host × fp8", "update": {"flush_every": 2}},
    "hizoo": {
        "name": "zo2",
        "trainable": "disk",
        "zo": {"kind": "hizoo", "hessian_alpha": 1e-3, "hessian_codec": "bf16"},
    },
    "fzoo": {
        "name": "zo2",
        "trainable": "disk",
        "zo": {"kind": "fzoo", "queries": 3, "noise": "rademacher"},
    },
    "adamw": {"name": "zo2", "optimizer": {**OPTIMIZER, "name": "adamw", "learning_rate": 1e-3}},
    "low rank": {
        "name": "zo2",
        "trainable": "disk",
        "zo": {"noise": "lowrank", "noise_rank": 2, "noise_interval": 3},
    },
    "scales": {
        "name": "zo2",
        "trainable": "disk × int4",
        "zo": {"target": "scales", "epsilon": 1e-4},
        "optimizer": {**OPTIMIZER, "learning_rate": 1e-6},
    },
    "pool of seeds": {"name": "zo2", "zo": {"noise": "gaussian", "queries": 2, "seed_pool": 3}},
    "torch's draws": {
        "name": "zo2",
        "trainable": "disk",
        "zo": {"noise": "torch"},
        "update": {"flush_every": 3},
    },
    "the original": {"name": "mezo", "zo": {"noise": "mezo"}, "loss": "model"},
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_taken_up_and_rebuilt(run: dict[str, Any], base: Path, tmp_path: Path) -> None:
    plan = method(**{"optimizer": OPTIMIZER, **run})
    whole, expected = go_on(base, plan, tmp_path / "whole", 7)
    first, _ = go_on(base, plan, tmp_path / "parts", 3)
    shutil.copytree(tmp_path / "parts", tmp_path / "lost")
    second, found = go_on(base, plan, tmp_path / "parts", 7)
    assert first + second == whole
    assert_same(found, expected)

    for store in (tmp_path / "lost").glob("weights-*"):  # the ledger alone is enough
        shutil.rmtree(store)
    third, found = go_on(base, plan, tmp_path / "lost", 7)
    assert first + third == whole
    assert_same(found, expected)

    assert replay(base, tmp_path / "whole" / "ledger.jsonl", tmp_path / "out", device="cpu") == 7
    rebuilt = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {name: tensor.to(rebuilt[name].dtype) for name, tensor in expected.items()}
    assert_same(rebuilt, wanted)
    assert (tmp_path / "out" / "config.json").is_file()


def test_replay_until_a_step(base: Path, tmp_path: Path) -> None:
    plan = method("zo2", trainable="disk", optimizer=OPTIMIZER)
    _, third = go_on(base, plan, tmp_path / "a", 3)
    go_on(base, plan, tmp_path / "b", 6)
    ledger = str(tmp_path / "b" / "ledger.jsonl")
    out = str(tmp_path / "out")
    assert main(["replay", str(base), ledger, out, "--until", "3"]) == 0
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), third)
    with refused(ValueError, "0 6"):
        replay(base, tmp_path / "b" / "ledger.jsonl", tmp_path / "other", until=7)


def test_replay_of_an_adapter(base: Path, tmp_path: Path) -> None:
    plan = method("mezo", optimizer={"name": "adamw", "learning_rate": 1e-2}, seed=3)
    _, expected = go_on(base, plan, tmp_path / "run", 4, LoraSettings(rank=2))
    replay(base, tmp_path / "run" / "ledger.jsonl", tmp_path / "out")
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert_same(
        {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}, expected
    )


@pytest.mark.parametrize("trained_as", ["full", "lora", "original noise"])
def test_an_exported_ledger_gives_the_same_weights(
    trained_as: str, base: Path, tmp_path: Path
) -> None:
    """Oracle: the files that the run's own ledger is replayed to, byte for byte."""
    lora = LoraSettings(rank=2) if trained_as == "lora" else None
    drawn = {"zo": {"noise": "mezo"}, "loss": "model"} if trained_as == "original noise" else {}
    go_on(base, method("mezo", optimizer=OPTIMIZER, **drawn), tmp_path / "run", 6, lora)
    ledger = str(tmp_path / "run" / "ledger.jsonl")
    exported = str(tmp_path / "tune.ledger")
    assert main(["export", str(base), exported, "--ledger", ledger]) == 0
    replay(base, ledger, tmp_path / "from ledger")
    assert main(["replay", str(base), exported, str(tmp_path / "from export")]) == 0
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    assert (tmp_path / "from export" / name).read_bytes() == (
        tmp_path / "from ledger" / name
    ).read_bytes()
    replay(base, ledger, tmp_path / "third", until=3)
    replay(base, exported, tmp_path / "third again", until=3)
    assert (tmp_path / "third again" / name).read_bytes() == (
        tmp_path / "third" / name
    ).read_bytes()


def test_an_exported_ledger_is_whole_or_refused(base: Path, tmp_path: Path) -> None:
    """Oracle: files that were cut, and entries and results that were changed, by hand."""
    go_on(base, method("mezo", optimizer=OPTIMIZER), tmp_path / "run", 4)
    ledger = tmp_path / "run" / "ledger.jsonl"
    out = tmp_path / "tune.ledger"
    steps, nbytes = export(base, ledger, out)
    assert (steps, nbytes) == (4, out.stat().st_size)
    for name in ("run", "base", "rule", "parameters"):
        assert read_ledger(out)[0][name] == read_ledger(ledger)[0][name]
    with refused(ValueError, "exists"):
        export(base, ledger, out)
    out.rename(ledger)
    with refused(ValueError, "step"):
        go_on(base, method("mezo", optimizer=OPTIMIZER), tmp_path / "run", 4)
    data = ledger.read_bytes()
    head, *lines = gzip.decompress(data).splitlines(keepends=True)
    for damaged in (
        data[:-9],
        gzip.compress(head + b"".join(lines[:-1])),
        gzip.compress(head + b"".join(lines[1:] + lines[:1])),
    ):
        out.write_bytes(damaged)
        with refused(ValueError, "damaged"):
            replay(base, out, tmp_path / "out")
    out.write_bytes(data)
    told, entries = read_ledger(out)
    write_exported(out, {**told, "result": "0" * 32}, entries)
    with refused(ValueError, "ledger"):
        replay(base, out, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    other = tiny_model("opt", tied=True)
    with torch.no_grad():
        other.get_parameter("model.decoder.layers.1.fc1.weight")[3, 4].mul_(1 + 2**-22)
    other.save_pretrained(tmp_path / "other")
    go_on(base, method("mezo", optimizer=OPTIMIZER), tmp_path / "again", 1)
    with refused(ValueError, "differ"):
        export(tmp_path / "other", tmp_path / "again" / "ledger.jsonl", tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_replay_refuses_another_base(base: Path, tmp_path: Path) -> None:
    """Oracle: one weight changed by one bit."""
    go_on(base, method("mezo", optimizer=OPTIMIZER), tmp_path / "run", 2)
    other = tiny_model("opt", tied=True)
    with torch.no_grad():
        other.get_parameter("model.decoder.layers.1.fc1.weight")[3, 4].mul_(1 + 2**-22)
    other.save_pretrained(tmp_path / "other")
    with refused(ValueError, "differ"):
        replay(tmp_path / "other", tmp_path / "run" / "ledger.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with refused(ValueError, "base"):
        go_on(tmp_path / "other", method("mezo", optimizer=OPTIMIZER), tmp_path / "run", 3)
    with refused(ValueError, "rule.weight_decay 0.1 0.0"):
        go_on(base, method("mezo"), tmp_path / "run", 3)


def test_a_ledger_that_was_cut_is_not_taken_for_whole(base: Path, tmp_path: Path) -> None:
    """Oracle: weights on disk are of a later step."""
    plan = method("zo2", trainable="disk", optimizer=OPTIMIZER)
    go_on(base, plan, tmp_path, 4)
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    with refused(ValueError, "2 weights 4"):
        go_on(base, plan, tmp_path, 5)


HEADER = {"run": "r", "rule": {"kind": "spsa"}}


def entry(step: int) -> LedgerEntry:
    return LedgerEntry(step, 0, 1e-7 / 3, 1e-3, (0.1 + 0.2, 2.0), (1 / 3,))


def test_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    """Oracle: the entries themselves."""
    ledger = Ledger(tmp_path / "ledger.jsonl", HEADER)
    for step in (1, 2):
        ledger.append(entry(step))
    ledger.close()
    header, entries = read_ledger(tmp_path / "ledger.jsonl")
    assert entries == [entry(1), entry(2)]
    assert header["run"] == "r"


def test_every_torn_tail_is_cut_off(tmp_path: Path) -> None:
    """Oracle: the lines that were whole. The last line is cut at every byte; the next step stands
    alone on its line."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, HEADER)
    ledger.append(entry(1))
    before = path.stat().st_size
    ledger.append(entry(2))
    ledger.close()
    data = path.read_bytes()
    for length in range(before, len(data)):
        path.write_bytes(data[:length])
        ledger = Ledger(path, HEADER)
        assert ledger.entries == [entry(1)]
        ledger.append(entry(2))
        ledger.close()
        assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line"),
        ("{}\n", "ledger"),
        (json.dumps({"format": "blockwalk-ledger", "version": 9}) + "\n", "9"),
        (
            atomic_files.seal(json.dumps({"format": "blockwalk-ledger", "version": 1}))[0] + "\n",
            "1 2",
        ),
        ("{torn\n{}\n", "JSON"),
        (
            atomic_files.seal(json.dumps({"format": "blockwalk-ledger", "version": 2}))[0]
            + "\n{torn\n{}\n",
            "2",
        ),
    ],
)
def test_what_is_no_ledger_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    """Oracle: the format's description."""
    path = tmp_path / "ledger.jsonl"
    path.write_text(text)
    with refused(ValueError, reason):
        read_ledger(path)


@pytest.mark.parametrize("change", ["digit", "removed", "moved", "header"])
def test_a_changed_line_breaks_the_chain(change: str, tmp_path: Path) -> None:
    """Oracle: the lines as they were written. One digit, one line, the order of two, one word of
    the header."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, HEADER)
    for step in range(1, 5):
        ledger.append(entry(step))
    ledger.close()
    lines = path.read_bytes().splitlines(keepends=True)
    at, changed = {
        "digit": (3, [lines[2].replace(b"0.3333", b"0.3332")]),
        "removed": (3, []),
        "moved": (3, [lines[3], lines[2]]),
        "header": (1, [lines[0].replace(b"spsa", b"fzoo")]),
    }[change]
    path.write_bytes(
        b"".join([*lines[: at - 1], *changed, *lines[at - 1 + max(1, len(changed)) :]])
    )
    with refused(atomic_files.Damaged, f"ledger.jsonl damaged {at}"):
        read_ledger(path)


def test_a_ledger_of_kilobytes(base: Path, tmp_path: Path) -> None:
    """Oracle: the file's size."""
    go_on(base, copy.deepcopy(method("mezo", optimizer=OPTIMIZER)), tmp_path, 6)
    lines = (tmp_path / "ledger.jsonl").read_bytes().splitlines()
    assert len(lines) == 7
    assert max(map(len, lines[1:])) < 300


def test_without_a_ledger_the_disk_keeps_nothing(base: Path, tmp_path: Path) -> None:
    """Oracle: the folder's contents, and the refusal of a state that would lack the weights."""
    with Walker(base, method("zo2", trainable="disk"), workdir=tmp_path, device="cpu") as walker:
        walker.step(random_batch())
        assert list(tmp_path.glob("weights-*"))
        with refused(ValueError, "ledger"):
            walker.state_dict()
    assert not list(tmp_path.glob("weights-*"))
