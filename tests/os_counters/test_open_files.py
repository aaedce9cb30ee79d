"""Oracle: the kernel: /proc/self/fd, /proc/self/maps, its limit of open files, and its answers
EBUSY, EMFILE and ENODEV; and the interpreter's audit events, one for each file that it opens."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blockwalk.checkpoints import sweeping
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.train import train
from blockwalk.train.callbacks import Event
from blockwalk.walk.walker import Walker
from tests.conftest import TinyRun
from tests.models import random_batch, tiny_model
from tests.support.messages import says

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")

ON_DISK = {"trainable": "disk × fp32", "optimizer_state": "disk × fp32", "gradient": "disk × fp32"}
BLOCKS = 12


PAGE_COUNTS = "/proc/self/statm"
"""The file that says how far the heap has grown, after each block."""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Opened:
    """Names of the files that Python opens while ``names`` is a list. Hooks stay as long as their
    process does."""

    def __init__(self) -> None:
        self.names: list[str] | None = None
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self.names is not None:
            self.names.append(os.fsdecode(arguments[0]))


def test_a_step_like_the_last_opens_nothing_but_the_count_of_its_pages(tmp_path: Path) -> None:
    """Limits of memory in files of control groups, which were read once a block, are read when a
    map is made."""
    opened = Opened()
    model = tiny_model("llama", num_hidden_layers=BLOCKS)
    with Walker(model, method("mebp"), lora=LoraSettings(rank=2), workdir=tmp_path) as walker:
        walker.step(random_batch())
        walker.step(random_batch())
        opened.names = []
        walker.step(random_batch())
        names = opened.names
        opened.names = None
    assert names.count(PAGE_COUNTS) >= BLOCKS, "a hook that hears nothing tells nothing"
    assert set(names) == {PAGE_COUNTS}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mebp", {"frozen": "disk × raw"}),
        ("plain", {**ON_DISK, "recompute": "all"}),
        ("zo2", {"trainable": "disk × raw", "frozen": "disk × raw"}),
    ],
)
def test_a_walk_holds_at_most_two_descriptors_a_unit_and_leaves_none(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    """Masters, moments, what a step may go back to, activations and graphs are all on the disk
    here."""
    model = tiny_model("llama", num_hidden_layers=BLOCKS)
    model.save_pretrained(tmp_path / "model")
    held = []
    for run in range(2):
        before = open_files()
        ledger = tmp_path / f"ledger-{run}" if name == "zo2" else None
        with Walker(
            tmp_path / "model", method(name, **settings), ledger=ledger, device="cpu"
        ) as walker:
            walker.step(random_batch())
            held.append(open_files() - before)
        assert open_files() == before
    assert max(held) <= 2 * (BLOCKS + 2) + 4, (
        "the ledger, the store's lock and the like are four at most"
    )
    if name != "zo2":
        assert max(held) <= 4, "maps have no descriptor"


LIMITS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))
from blockwalk.cli.main import main
main(["env", "--json"])
print(resource.getrlimit(resource.RLIMIT_NOFILE), file=sys.stderr)
"""


def test_the_command_line_raises_the_limit_of_open_files() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITS], capture_output=True, text=True, check=True
    )
    assert done.stderr.split("\n")[-2] == "(512, 512)"


TOO_FEW = """
import os, resource, sys
from blockwalk.cli.main import main
import blockwalk.walk.walker, blockwalk.train.loop, transformers.models.llama.modeling_llama
free = os.dup(1)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, free + 1))
sys.exit(main(sys.argv[1:]))
"""


def test_a_limit_that_is_too_low_is_named(tiny_run: TinyRun, tmp_path: Path) -> None:
    arguments = [
        "train",
        *tiny_run.arguments(tmp_path / "run"),
        "--method",
        "mebp",
        "--max_steps",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-c", TOO_FEW, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = done.stderr.strip().split("\n")[-1]
    assert "Too many open files" in last
    assert "raise that limit with ulimit -n" in last


def resumed(tiny_run: TinyRun, folder: Path, watch: Any) -> Any:
    """A zeroth-order run of two steps, and the same with four, of which a checkpoint of each
    replaces the one before it."""
    run = {
        "model": str(tiny_run.model),
        "method": "mezo",
        "data": {
            "train": str(tiny_run.train),
            "template": "{text} It was {label}.",
            "label_words": ["good", "bad"],
        },
        "batch_size": 4,
        "optimizer": {"learning_rate": 1e-4},
        "output_dir": str(folder),
        "save_every": 1,
        "keep_checkpoints": 1,
        "resume_from_checkpoint": "latest",
    }
    train({**run, "max_steps": 2})
    return train({**run, "max_steps": 4}, callbacks=[watch])


def test_a_checkpoint_is_not_mapped_when_its_time_comes(tiny_run: TinyRun, tmp_path: Path) -> None:
    """An NFS client cannot remove a file that is mapped."""
    mapped = []

    def watch(event: Event) -> None:
        if event.name == "begin":
            mapped.append("checkpoint-000002" in Path("/proc/self/maps").read_text())

    assert resumed(tiny_run, tmp_path / "run", watch).steps == 4
    assert mapped == [False]


def test_a_checkpoint_that_another_process_reads_does_not_end_the_run(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's EBUSY, as an NFS client has it for a file in use; what stays is gone once it is
    not."""
    unlink = os.unlink
    folder = tmp_path / "run"

    def busy(path: Any, **more: Any) -> None:
        if str(path).endswith("rank-00000.safetensors"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        unlink(path, **more)

    with monkeypatch.context() as another_reads:
        another_reads.setattr(os, "unlink", busy)
        assert resumed(tiny_run, folder, lambda event: None).steps == 4
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-000004"]
    assert list(folder.glob(".checkpoint-*"))
    sweeping.sweep(folder)
    assert not list(folder.glob(".checkpoint-*"))


@pytest.fixture(scope="module")
def no_shared_maps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that stands between a process and the kernel, whose answer to shared maps below a
    folder it changes."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("library") / "maps.so"
    source = Path(__file__).parents[1] / "support" / "no_shared_maps.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", source, "-o", library, "-ldl"], check=True)
    return library


TWICE = """
import sys
from blockwalk.cli.main import main
arguments, mount, other = sys.argv[1:-2], *sys.argv[-2:]
first = main([*arguments, "--output_dir", other])
second = main([*arguments, "--output_dir", mount])
print("exits", first, second)
"""


def test_a_mount_without_shared_maps(
    tiny_run: TinyRun, tmp_path: Path, no_shared_maps: Path
) -> None:
    """A model is read from there, and an output_dir there is refused before anything is written."""
    mount = tmp_path / "mount"
    shutil.copytree(tiny_run.model, mount / "model")
    arguments = [
        *tiny_run.arguments(Path("-")),
        "--model",
        str(mount / "model"),
        "--method",
        "mebp",
        "--max_steps",
        "1",
    ]
    environment = {**os.environ, "LD_PRELOAD": str(no_shared_maps), "NO_SHARED_MAPS": str(mount)}
    command = [
        sys.executable,
        "-c",
        TWICE,
        "train",
        *arguments,
        str(mount / "run"),
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "exits 0 2" in done.stdout
    says(done.stderr, mount / "run" / "scratch", "file system")
    assert not (mount / "run").exists()
    assert (tmp_path / "run" / "adapter").is_dir()
