"""Oracle: closed forms. Limits written into a tree like the kernel's; bytes of checkpoints and
models counted by hand. The kernel itself refuses a file's growth, and limits a real control group's
memory."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from benchmarks.memory_limit import run_limited, why_not
from safetensors.torch import save_file

from blockwalk.cli import main
from blockwalk.data.tokenizer import load_tokenizer
from blockwalk.engine.master_updates import MasterUpdates
from blockwalk.plan.methods import method
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import RunConfig
from blockwalk.program.compile import compile
from blockwalk.program.program import Shape, StepKind
from blockwalk.report import capacity, disk_bytes, disk_room
from blockwalk.report.forecast import Forecast
from blockwalk.system import atomic_files
from blockwalk.system.process_memory import Limit, memory_limits
from blockwalk.train import prepared_run
from blockwalk.walk.unit_costs import UnitCosts
from tests.conftest import TinyRun
from tests.support.messages import says

MB = 10**6
PARAMETERS = 258 * 64 + 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
"""Of the tiny model, float32; embedding and head are one tensor."""


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def of_groups(root: Path, groups: str) -> list[tuple[int, str]]:
    """The limits that are neither the machine's nor the process's."""
    (root / "self").write_text(groups)
    found = [limit for limit in memory_limits(root, root / "self")[1:] if not limit.of_process]
    return [(limit.nbytes, str(Path(limit.source).relative_to(root))) for limit in found]


def test_limits_of_control_groups(tmp_path: Path) -> None:
    limits = {
        "a/b/memory.max": "max",
        "a/memory.max": "900",
        "a/memory.swap.max": "7",
        "other/memory.max": "1",
    }
    second = tree(tmp_path / "2", limits)
    assert of_groups(second, "0::/a/b\n") == [(900, "a/memory.max")]
    (limit,) = [each for each in memory_limits(second, second / "self")[1:] if not each.of_process]
    assert limit.swap == min(7, psutil.swap_memory().total)
    assert of_groups(tree(tmp_path / "3", {"memory.max": "800"}), "0::/\n") == [(800, "memory.max")]
    name = "memory.limit_in_bytes"
    most = 9223372036854771712
    first = tree(
        tmp_path / "1",
        {f"memory/a/b/{name}": "500", f"memory/a/{name}": "400", f"memory/{name}": str(most)},
    )
    both = [(500, f"memory/a/b/{name}"), (400, f"memory/a/{name}"), (most, f"memory/{name}")]
    assert of_groups(first, "5:cpu,memory:/a/b\n4:pids:/x\n1:name=systemd:/y\n") == both
    assert of_groups(first, "5:memory:/docker/of/the/host\n") == both[2:], (
        "in a container, the root is its own group"
    )
    assert (
        memory_limits(tmp_path / "none", tmp_path / "none")[0].nbytes
        == psutil.virtual_memory().total
    )


def train(tiny_run: TinyRun, folder: Path, *settings: str) -> int:
    method = [] if "--method" in settings else ["--method", "plain"]
    return main.main(["train", *tiny_run.arguments(folder), *method, "--max_steps", "4", *settings])


@pytest.mark.parametrize(("swap", "of_process"), [(0, False), (3 * MB, False), (0, True)])
def test_a_run_that_cannot_fit_is_refused_with_the_figures(
    swap: int,
    of_process: bool,
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 bytes a parameter (weight, gradient, two moments) do not fit beside the process into 1 MB
    and the swap."""
    held = 16 * PARAMETERS
    monkeypatch.setattr(prepared_run, "process_bytes", lambda: 100 * MB)

    def limits(spare: int) -> Callable[[], list[Limit]]:
        return lambda: [
            Limit(10**15, "this machine"),
            Limit(100 * MB + spare - swap, "the group", swap, of_process),
        ]

    monkeypatch.setattr(capacity, "memory_limits", limits(held))
    assert train(tiny_run, tmp_path / "run") == 3, "activations come on top"
    error = capsys.readouterr().err
    says(error, "100.0 MB")
    says(error, f"{(100 * MB + held - swap) / MB:.1f} MB")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(capacity, "memory_limits", limits(2 * held))
    assert train(tiny_run, tmp_path / "run") == 0
    says(capsys.readouterr().out, "MB foreseen group")


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two checkpoints of weights and two moments at a time (4 steps, one each 2), and the model at
    the end; beside them some kB of data and of the tokenizer's files."""
    needed = 2 * 12 * PARAMETERS + 4 * PARAMETERS
    usage = disk_room.shutil.disk_usage
    free = needed - 1
    beside = 0.1 * MB
    monkeypatch.setattr(
        disk_room.shutil, "disk_usage", lambda path: usage(path)._replace(free=free)
    )
    assert train(tiny_run, tmp_path / "run", "--save_every", "2") == 2
    error = capsys.readouterr().err
    said = float(re.search(r"writes ([\d.]+) MB to the disk of", error)[1]) * MB
    assert needed - 0.05 * MB < said < needed + beside
    says(error, "2 checkpoints 1.5 MB")
    assert not (tmp_path / "run").exists()
    free = needed + beside
    assert train(tiny_run, tmp_path / "run", "--save_every", "2") == 0
    free = 4 * PARAMETERS + beside  # the model stays until the new one is whole
    again = ["--save_every", "2", "--overwrite_output_dir", "true"]
    assert train(tiny_run, tmp_path / "run", *again) == 0, "the checkpoints that it replaces go"


FULL = {
    "at the turn": ["--method", "mebp", "--lora", "false", "--frozen", "disk × raw"],
    "at the end": [
        *(
            "--method",
            "plain",
            "--lora",
            "false",
            "--recompute",
            "all",
            "--trainable",
            "disk × fp32",
        ),
        *("--optimizer_state", "disk × fp32", "--gradient", "disk × fp32"),
    ],
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
@pytest.mark.parametrize("timing", FULL)
def test_the_check_counts_the_scratch_that_is_made(
    timing: str, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the maps of nameless files that the kernel lists when a step is about to count."""
    made: list[int] = []
    counted: list[int] = []

    def sized(
        self: MasterUpdates, commit: Callable[[MasterUpdates], None] = MasterUpdates.commit
    ) -> None:
        lines = [
            line for line in Path("/proc/self/maps").read_text().splitlines() if ".scratch-" in line
        ]
        ends = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
        made.append(sum(stop - start for start, stop in ends))
        commit(self)

    def count(run: Any, forecast: Any, real: Callable[..., int] = disk_room.scratch_bytes) -> int:
        counted.append(real(run, forecast))
        return counted[-1]

    monkeypatch.setattr(MasterUpdates, "commit", sized)
    monkeypatch.setattr(disk_room, "scratch_bytes", count)
    assert train(tiny_run, tmp_path / "run", *FULL[timing], "--activation", "device") == 0
    pages = 64 * 4096  # maps end with a page, and the data have some of their own
    least = {"at the turn": 24, "at the end": 16}[timing] * PARAMETERS
    assert least <= counted[0] <= made[0] <= counted[0] + pages


@pytest.mark.parametrize("method", ["plain", "mezo"])
def test_a_file_that_finds_no_room_is_named(
    method: str, tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the kernel, which lets no file grow beyond 100 kB (``ulimit -f``)."""
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, resource.RLIM_INFINITY))
        os._exit(train(tiny_run, tmp_path, "--save_every", "3", "--method", method))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    nbytes = (12 if method == "plain" else 4) * PARAMETERS
    assert f" {nbytes / MB:.1f}" in error, "the size, whose last digits are of the file's header"
    assert "checkpoint-000003" in error
    if method == "mezo":
        says(error, "step 3 --resume_from_checkpoint latest")
    assert not list(tmp_path.glob("*checkpoint-000003*")), "nothing is left half written"


@pytest.mark.parametrize("library", ["safetensors", "tokenizers"])
def test_a_library_that_finds_no_room_is_named(
    library: str, tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Oracle: the kernel, as above. Errors of libraries in Rust are no OSError; a full disk at the
    adapter named no file."""
    tokenizer = load_tokenizer(tiny_run.model)
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))
        try:
            with atomic_files.atomic_folder(tmp_path / "adapter") as folder:
                if library == "safetensors":
                    save_file({"weight": torch.zeros(1000)}, folder / "adapter_model.safetensors")
                else:
                    tokenizer.save_pretrained(folder)
        except OSError as error:
            os._exit(
                7
                if error.filename == str(tmp_path / "adapter") and error.errno == errno.EFBIG
                else 1
            )
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_real_limit_is_read(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Oracle: the kernel. 33 million parameters that are trained in 500 MB are refused in words,
    and not killed."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 258,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=0, eos_token_id=1)).save_pretrained(
        tmp_path / "model"
    )
    AutoTokenizer.from_pretrained(tiny_run.model).save_pretrained(tmp_path / "model")
    settings = [
        "--method",
        "plain",
        "--max_steps",
        "1",
        "--data.eval",
        "",
        "--model",
        str(tmp_path / "model"),
    ]
    command = [
        sys.executable,
        "-m",
        "blockwalk",
        "train",
        *tiny_run.arguments(tmp_path / "run"),
        *settings,
    ]
    done, _ = run_limited(command, 500 * MB)
    assert done.returncode == 3, done.stderr
    says(done.stderr, "memory.limit_in_bytes 500.0 MB")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_scratch_is_counted_by_tier_on_every_device(device: str, tiny_run: TinyRun) -> None:
    """Oracle: arithmetic. Inputs are float32 [B, S, D]; a sharded master and two moments take 12
    bytes a parameter."""
    inputs = method(
        "mebp", frozen="disk × raw", activation="disk", compute_dtype="float32", recompute="all"
    )
    sharded = method(
        "hzp", optimizer_state="disk × fp32 × world", mesh={"world": 2, "ranks_per_node": 2}
    )
    costs = UnitCosts(tiny_run.model, lora=None)
    spec = costs.spec()
    run = RunConfig(model=str(tiny_run.model), plan=inputs, lora=None)
    shape = Shape(2, 8)

    def scratch(plan: Plan) -> int:
        program = compile(plan, spec, StepKind.TRAIN, shape, device=device)
        forecast = Forecast(plan, spec, (program,), device)
        return disk_bytes.scratch_bytes(dataclasses.replace(run, plan=plan), forecast)

    activations = 4 * shape.tokens * spec.hidden_size * len(spec.blocks)
    assert scratch(inputs) >= activations
    assert scratch(sharded) >= 12 * spec.numel(trainable=True)
