"""Oracle: the run that nobody killed, bit for bit; one process; transformers, which reads what was
saved."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.checkpoints import distributed
from blockwalk.checkpoints.pieces import Pieces
from blockwalk.cli import main
from blockwalk.cutting.verify import certified
from blockwalk.plan.methods import method
from blockwalk.train import loop
from blockwalk.walk.walker import Walker
from tests.conftest import TinyRun
from tests.models import random_batch, tiny_model
from tests.support.processes import run_ranks
from tests.support.rank_runs import _trained, dies, result, run_config


@pytest.mark.parametrize("lora", [False, True])
def test_a_killed_run_goes_on_with_the_same_bits(
    tiny_run: TinyRun, tmp_path: Path, lora: bool
) -> None:
    """One of two ranks is killed in the sixth step; both start again from the checkpoint of the
    fourth."""
    common = [
        "--method",
        "fcdp",
        "--max_steps",
        "8",
        "--save_every",
        "2",
        "--gradient_accumulation_steps",
        "2",
    ]
    common += [
        "--optimizer.learning_rate",
        "3e-3",
        *(["--lora.rank", "4", "--lora.dropout", "0.1"] if lora else []),
    ]
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    run_ranks(2, _trained, 2, [*tiny_run.arguments(whole), *common], 0)
    arguments = [*tiny_run.arguments(killed), *common]
    codes = run_ranks(2, dies, 2, arguments, 5, may_die=True)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != "trained"
    assert sorted(path.name for path in killed.glob("checkpoint-*")) == [
        "checkpoint-000002",
        "checkpoint-000004",
    ]
    run_ranks(2, _trained, 2, [*arguments, "--resume_from_checkpoint", "latest"], 0)
    name = "adapter" if lora else "model"
    (expected, losses), (found, again) = result(whole, name), result(killed, name)
    assert again == losses
    assert len(losses) == 8
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_the_command_line_over_ranks_and_one_process_that_goes_on(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """``blockwalk train --method fcdp --nproc-per-node 2`` to the end; one process resumes its
    checkpoint under ``plain``."""
    from transformers import AutoModelForCausalLM

    steps = ["--optimizer.learning_rate", "3e-3", "--optimizer.schedule", "constant"]
    alone = tmp_path / "alone"
    ranks = tmp_path / "ranks"
    loop.train(
        run_config(
            [*tiny_run.arguments(alone), *steps, "--method", "plain", "--max_steps", "6"], 0, 1
        )
    )
    command = [
        sys.executable,
        "-m",
        "blockwalk",
        "train",
        *tiny_run.arguments(ranks),
        *steps,
        "--method",
        "fcdp",
    ]
    command += ["--max_steps", "4", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("saved to  ") == 1, done.stdout  # the last lines of rank 0
    AutoModelForCausalLM.from_pretrained(ranks / "model")
    resumed = [*tiny_run.arguments(ranks), *steps, "--method", "plain", "--max_steps", "6"]
    loop.train(run_config([*resumed, "--resume_from_checkpoint", "latest"], 0, 1))
    (expected, losses), (found, again) = result(alone), result(ranks)
    assert again == pytest.approx(losses, rel=2e-6)
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= 1e-4 * float(value.norm()), name


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_of_one_process_goes_on_over_ranks(
    tiny_run: TinyRun, tmp_path: Path, lora: bool
) -> None:
    """Oracle: the process that goes on alone. Its checkpoint is one rank's; each of two ranks takes
    its slices of it."""
    common = [
        "--optimizer.learning_rate",
        "3e-3",
        "--optimizer.schedule",
        "constant",
        *(["--lora.rank", "4"] if lora else []),
    ]
    alone = tmp_path / "alone"
    ranks = tmp_path / "ranks"
    loop.train(
        run_config(
            [*tiny_run.arguments(alone), *common, "--method", "plain", "--max_steps", "6"], 0, 1
        )
    )
    loop.train(
        run_config(
            [*tiny_run.arguments(ranks), *common, "--method", "plain", "--max_steps", "3"], 0, 1
        )
    )
    over = [
        *tiny_run.arguments(ranks),
        *common,
        "--method",
        "fcdp",
        "--max_steps",
        "6",
        "--resume_from_checkpoint",
        "latest",
    ]
    run_ranks(2, _trained, 2, over, 0)
    name = "adapter" if lora else "model"
    (expected, losses), (found, again) = result(alone, name), result(ranks, name)
    assert again == pytest.approx(losses, rel=2e-6)
    for key, value in expected.items():
        assert float((found[key] - value).norm()) <= 1e-4 * float(value.norm()), key


@pytest.mark.parametrize("name", ["fcdp", "distzo2"])
def test_ranks_go_on_from_the_checkpoint_before_a_damaged_one(
    name: str, tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Oracle: a run that nobody disturbed, bit for bit. One bit of the last file of the newest
    checkpoint is another."""
    rate = "3e-3" if name == "fcdp" else "1e-5"
    common = [
        "--method",
        name,
        "--save_every",
        "2",
        "--optimizer.learning_rate",
        rate,
        "--optimizer.schedule",
        "constant",
    ]
    whole = tmp_path / "whole"
    half = tmp_path / "half"
    run_ranks(2, _trained, 2, [*tiny_run.arguments(whole), *common, "--max_steps", "6"], 0)
    half_way = [*tiny_run.arguments(half), *common]
    run_ranks(2, _trained, 2, [*half_way, "--max_steps", "4"], 0)
    file = sorted((half / "checkpoint-000004").glob("rank-*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    run_ranks(
        2, _trained, 2, [*half_way, "--max_steps", "6", "--resume_from_checkpoint", "latest"], 0
    )
    (expected, losses), (found, again) = result(whole), result(half)
    assert again == losses
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_rank_that_does_not_see_one_processs_checkpoint_stops_every_rank(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """The contract of a resume: nothing starts from the base weights in silence. The second rank
    works in another folder."""
    common = [
        *tiny_run.arguments(tmp_path / "seen" / "run"),
        "--method",
        "plain",
        "--max_steps",
        "2",
    ]
    loop.train(run_config(common, 0, 1))
    (tmp_path / "blind").mkdir()
    over = [
        *tiny_run.arguments(Path("run")),
        "--method",
        "fcdp",
        "--max_steps",
        "4",
        "--resume_from_checkpoint",
        "latest",
    ]
    said = run_ranks(2, _refused, [tmp_path / "seen", tmp_path / "blind"], over)
    assert all("rank 1 does not see run/checkpoint-000002" in each for each in said), said


def _refused(rank: int, folders: list[Path], arguments: list[str]) -> str:
    os.chdir(folders[rank])
    with pytest.raises(ValueError) as caught:
        loop.train(run_config(arguments, rank, 2))
    return str(caught.value)


def _gradient(
    world: int, dropout: float, batch: dict[str, torch.Tensor], name: str = "zero3"
) -> dict[str, torch.Tensor]:
    model = tiny_model("gpt2", resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0)
    with Walker(
        model, method(name, **({"mesh": {"world": world}} if name != "plain" else {})), device="cpu"
    ) as walker:
        return walker.gradients(batch)


def _with_dropout(rank: int, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [_gradient(2, dropout, batch) for dropout in (0.3, 0.3, 0.0)]


def test_ranks_drop_different_elements() -> None:
    """Closed form: with the same sequence on both ranks the mean gradient is that of one process,
    unless their masks differ; one rank has the masks of ``plain``."""
    row = random_batch(1, 10, seed=1)
    dropped, again, kept = run_ranks(
        2, _with_dropout, {key: value.repeat(2, 1) for key, value in row.items()}
    )[0]
    plain, alone, control = (
        _gradient(1, *case) for case in ((0.3, row, "plain"), (0.3, row), (0.0, row))
    )
    for name, value in plain.items():
        assert torch.equal(alone[name], value), name
        assert torch.equal(again[name], dropped[name]), name
        assert torch.allclose(kept[name], control[name], rtol=1e-4, atol=1e-7), name
    weight = "transformer.h.1.mlp.c_fc.weight"
    assert float((dropped[weight] - alone[weight]).norm()) > 0.1 * float(alone[weight].norm())


def _ended_by_one(rank: int, world: int, arguments: list[str]) -> int:
    """Train with a callback on the last rank alone, which ends the run after the second step."""
    callbacks = (
        [lambda event: event.name == "step" and event.step == 2] if rank == world - 1 else []
    )
    return loop.train(run_config(arguments, rank, world), callbacks=callbacks).steps


def _blocks_of(checkpoint: Path, rank: int) -> set[int]:
    """The blocks that a rank has written to a checkpoint."""
    table = json.loads((checkpoint / f"rank-{rank:05d}.json").read_text())
    names = (row["tensor"] for row in table["pieces"])
    return {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}


def test_uneven_stages_are_one_process(tiny_run: TinyRun, tmp_path: Path) -> None:
    """The words of a head are worth two blocks: the last of two stages has one block of four, and
    every bit of the model is that of one process."""
    wide = tmp_path / "wide"
    shutil.copytree(tiny_run.model, wide)
    model = tiny_model("llama", num_hidden_layers=4, vocab_size=768)
    certified(model)
    model.save_pretrained(wide)  # type: ignore[operator]
    common = ["--method", "zero3", "--max_steps", "3", "--gradient_accumulation_steps", "2"]
    clipped = ["--optimizer.max_grad_norm", "0.5", "--optimizer.learning_rate", "3e-3"]
    alone = tmp_path / "alone"
    stages = tmp_path / "stages"
    arguments = [*dataclasses.replace(tiny_run, model=wide).arguments(alone), *common, *clipped]
    loop.train(run_config(arguments, 0, 1))
    of_ranks = ["--output_dir", str(stages), "--mesh.pipeline", "2"]
    run_ranks(2, _trained, 2, [*arguments, *of_ranks], 0)
    assert _blocks_of(stages / "checkpoint-000003", 0) == {0, 1, 2}
    assert _blocks_of(stages / "checkpoint-000003", 1) == {3}
    (expected, losses), (found, again) = result(alone), result(stages)
    assert again == losses
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_codes_inside_a_stage(tiny_run: TinyRun, tmp_path: Path) -> None:
    """An adapter over frozen weights in four bits, a block of which only its own stage holds."""
    common = ["--method", "hzp", "--frozen", "device × int4a × node", "--lora.rank", "4"]
    common += ["--max_steps", "3", "--gradient_accumulation_steps", "2"]
    arguments = [*tiny_run.arguments(tmp_path / "alone"), *common]
    loop.train(run_config(arguments, 0, 1))
    of_ranks = ["--output_dir", str(tmp_path / "stages"), "--mesh.pipeline", "2"]
    run_ranks(2, _trained, 2, [*arguments, *of_ranks], 0)
    expected, losses = result(tmp_path / "alone", "adapter")
    found, again = result(tmp_path / "stages", "adapter")
    assert again == losses
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def _copies(rank: int, world: int, arguments: list[str]) -> list[int]:
    """Train, and return the number of each checkpoint's tensors that are copied before they are
    written."""
    copied = [0]
    copy = Pieces.copied
    write = distributed.write_folder

    def counted(pieces: Pieces) -> Pieces:
        copied[-1] += 1
        return copy(pieces)

    def written(*of_checkpoint: Any) -> None:
        copied.append(0)
        write(*of_checkpoint)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pieces, "copied", counted)
        patch.setattr(distributed, "write_folder", written)
        run = run_config(arguments, rank, world)
        assert run.saves_before(3)
        assert not run.saves_before(1)
        loop.train(run)
    return copied


def test_the_last_checkpoint_is_not_copied(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Counted: each of two checkpoints between the steps is, all of its tensors; the third, after
    the last step, is written as it lies."""
    arguments = [*tiny_run.arguments(tmp_path), "--method", "fcdp", "--max_steps", "3"]
    for copied in run_ranks(2, _copies, 2, [*arguments, "--save_every", "1"]):
        first, second, last, after = copied
        assert first == second > 10
        assert last == after == 0


@pytest.mark.parametrize("method_name", ["fcdp", "mezo"])
def test_a_callback_of_one_rank_ends_the_run_on_all(
    method_name: str, tiny_run: TinyRun, tmp_path: Path
) -> None:
    arguments = [*tiny_run.arguments(tmp_path), "--method", method_name, "--max_steps", "5"]
    if method_name == "mezo":
        arguments += ["--lora", "false", "--mesh.perturb", "2"]
    assert run_ranks(2, _ended_by_one, 2, arguments) == [2, 2]
    assert len(result(tmp_path)[1]) == 2


@pytest.mark.parametrize(
    "settings",
    [
        ("--method", "hzp", "--mesh.pipeline", "2", "--lora.rank", "2"),
        ("--method", "fcdp", "--mesh.context", "2", "--lora.rank", "2"),
        ("--method", "distzo2", "--mesh.perturb", "2", "--lora", "false"),
    ],
)
def test_one_process_reads_what_ranks_have_trained(
    settings: tuple[str, ...],
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: a run of one rank's settings with the same weights."""
    run = tmp_path / "run"
    run_ranks(2, _trained, 2, [*tiny_run.arguments(run), *settings, "--max_steps", "2"], 0)
    assert main.main(["eval", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    weights = ["--model", str(run / "model")]
    if (run / "adapter").is_dir():
        weights = ["--model", str(tiny_run.model), "--adapter", str(run / "adapter")]
    alone = [*tiny_run.arguments(tmp_path / "alone"), *weights, "--method", "plain"]
    assert main.main(["eval", *alone, "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert main.main(["generate", str(run), "--prompt", "a", "--max_new_tokens", "2"]) == 0
