"""Oracle: one process; the operating system's exit codes; a run that nobody killed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from blockwalk.cli import main
from blockwalk.ranks import launch
from blockwalk.ranks import place as launch_place
from blockwalk.ranks.launch import first_failure
from blockwalk.ranks.place import LOST, Place, place
from blockwalk.ranks.watch import Watch, naming
from tests.conftest import TinyRun
from tests.forked import Forked
from tests.support.messages import refused, says

COMMON = (
    "--method distzo2 --data.max_length 32 --save_every 4 --log_every 1 --resume_from_checkpoint"
    " latest"
)
COMMON += " --optimizer.learning_rate 1e-3 --mesh.check_every 2 --lora false"


STEPS = 80


def arguments(tiny_run: TinyRun, output_dir: Path, steps: int) -> list[str]:
    return ["train", *tiny_run.arguments(output_dir), *COMMON.split(), "--max_steps", str(steps)]


def alone(tiny_run: TinyRun, output_dir: Path) -> Forked:
    """A run of one process."""
    return Forked(*arguments(tiny_run, output_dir, STEPS))


def start(
    tiny_run: TinyRun, output_dir: Path, *, steps: int, torchrun: str = "", settings: str = ""
) -> subprocess.Popen[str]:
    """A run of two ranks, started by ``torchrun`` with these arguments or by ``blockwalk``
    itself."""
    before = ["torch.distributed.run", "--standalone", *torchrun.split(), "-m"] if torchrun else []
    command = [
        sys.executable,
        "-m",
        *before,
        "blockwalk",
        *arguments(tiny_run, output_dir, steps),
        *settings.split(),
    ]
    command += [] if torchrun else ["--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def finish(process: subprocess.Popen[str] | Forked) -> str:
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 0, out + errors
    return out


def result(output_dir: Path) -> tuple[str, list[bytes]]:
    """The weights' digest, and the ledger without its header."""
    digest = hashlib.sha256((output_dir / "model" / "model.safetensors").read_bytes()).hexdigest()
    return digest, (output_dir / "ledger.jsonl").read_bytes().split(b"\n")[1:]


@pytest.fixture(scope="module")
def whole(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[bytes]]:
    """What one process makes of the whole run."""
    output_dir = tmp_path_factory.mktemp("whole") / "run"
    finish(alone(tiny_run, output_dir))
    return result(output_dir)


def test_a_killed_rank_ends_the_run_and_another_world_size_resumes_it(
    tiny_run: TinyRun, whole: tuple[str, list[bytes]], tmp_path: Path
) -> None:
    """Two ranks, of which one is killed; then one process goes on; the end is that of one process
    from the start."""
    killed = tmp_path / "killed"
    process = start(tiny_run, killed, steps=100_000)
    ledger = killed / "ledger.jsonl"
    number = kill_rank_1(process, killed, after=8)
    began = time.monotonic()
    out, errors = process.communicate(timeout=100)
    assert time.monotonic() - began < 30, errors
    assert process.returncode == 128 + signal.SIGKILL
    told, summed_up = errors.strip().splitlines()[-2:]
    says(told, "rank 0 connection")
    assert f"rank 1 (process {number}) was killed by SIGKILL" in summed_up
    assert len(re.findall(r"step +1/", out)) == 1, out
    lines = ledger.read_bytes().split(b"\n")
    ledger.write_bytes(b"\n".join(lines[:8]) + b"\n")  # seven steps: as if it had been killed there
    for folder in killed.glob("checkpoint-*"):
        if int(folder.name[-6:]) > 7:
            subprocess.run(["rm", "-r", str(folder)], check=True)
    assert "resumed at step 7" in finish(alone(tiny_run, killed))
    assert result(killed) == whole


def kill_rank_1(process: subprocess.Popen[str], output_dir: Path, after: int) -> int:
    """Kill the second rank once the ledger has some steps; answers its process number."""
    ledger = output_dir / "ledger.jsonl"
    log = output_dir / "logs" / "rank-0001.log"
    while (
        not (ledger.exists() and ledger.read_bytes().count(b"\n") > after)
        and process.poll() is None
    ):
        time.sleep(0.02)
    match = re.search(r"rank 1 of 2, process (\d+)", log.read_text() if log.exists() else "")
    if match is None or process.poll() is not None:
        raise AssertionError("".join(process.communicate(timeout=60)))
    os.kill(int(match[1]), signal.SIGKILL)
    return int(match[1])


def processes(launcher: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [launcher, *map(int, children)]


def listening(process: int) -> set[str]:
    """The addresses, as the kernel writes them, of the TCP sockets on which a process listens."""
    held = set()
    for fd in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            held.add(os.readlink(fd))
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()
    ]
    return {
        fields[1].partition(":")[0]
        for fields in lines
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in held
    }


def test_ranks_of_one_machine_are_reached_by_nobody_else_and_end_with_their_launcher(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operating system: every listening socket of the run is on a loopback address, also where the
    user's environment names another interface; the folder through which ranks meet is their user's
    alone; ranks whose launcher is killed save a checkpoint and are gone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none")
    output_dir = tmp_path / "run"
    process = start(tiny_run, output_dir, steps=100_000, settings="--save_every 100000")
    ledger = output_dir / "ledger.jsonl"
    while not (ledger.exists() and ledger.read_bytes().count(b"\n") > 2) and process.poll() is None:
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()
    everyone = processes(process.pid)
    assert len(everyone) == 3
    assert set().union(*map(listening, everyone)) == {"0100007F"}  # 127.0.0.1: gloo's
    (folder,) = tmp_path.glob("blockwalk-ranks-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{each}").exists() for each in everyone) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{each}").exists() for each in everyone)
    assert max(output_dir.glob("checkpoint-*")).name > "checkpoint-000000"


NETWORK = """
ip link set lo up
ip link add out1 type veth peer name out2
for each in 1 2; do ip addr add 10.79.$each.1/24 dev out$each; ip link set out$each up; done
exec "$@"
"""
EAR = """
import sys
def hear(event, arguments):
    if event == "pickle.find_class":
        with open({path!r}, "a") as file:
            print(*arguments, file=file)
sys.addaudithook(hear)
"""


@pytest.mark.parametrize("launcher", [True, False], ids=["started here", "a store on one address"])
def test_on_a_host_with_several_interfaces_nothing_listens_beyond_loopback(
    launcher: bool, tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Operating system: ss, in a network namespace with two interfaces beside the loopback and no
    other process; and the interpreter, which tells of every pickle that is opened: there is
    none."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ss", "ip"))):
        pytest.skip("a network namespace needs root, util-linux and iproute2")
    (tmp_path / "sitecustomize.py").write_text(EAR.format(path=str(tmp_path / "unpickled")))
    run = ["--max_steps", "100000", "--output_dir", str(output_dir := tmp_path / "run")]
    train = [
        sys.executable,
        "-m",
        "blockwalk",
        "train",
        *tiny_run.arguments(output_dir),
        *COMMON.split(),
        *run,
    ]
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "TMPDIR": str(tmp_path),
    }
    if launcher:
        train += ["--nproc-per-node", "2"]
    else:  # as SLURM or a loop over machines starts them; rank 0 has the store
        both = 'for rank in 0 1; do RANK=$rank LOCAL_RANK=$rank "$@" --interface lo & done; wait'
        train = ["sh", "-c", both, "sh", *train]
        environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-ec", NETWORK, "sh", *train],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        ledger = output_dir / "ledger.jsonl"
        while (
            not (ledger.exists() and ledger.read_bytes().count(b"\n") > 2)
            and process.poll() is None
        ):
            time.sleep(0.05)
        assert process.poll() is None, process.communicate()[0]
        inside = ["nsenter", "-t", str(process.pid), "-n"]
        found = subprocess.run(
            [*inside, "ss", "-Htln"], capture_output=True, text=True, check=True
        ).stdout
        addresses = {line.split()[3].rpartition(":")[0] for line in found.splitlines()}
        assert addresses == {"127.0.0.1"}, found
        outside = subprocess.run(
            [*inside, "ip", "-br", "addr"], capture_output=True, text=True, check=True
        ).stdout
        assert {"10.79.1.1/24", "10.79.2.1/24"} <= set(outside.split())
        assert not (tmp_path / "unpickled").exists(), (tmp_path / "unpickled").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


def test_an_interface_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Operating system: the interfaces that it lists."""
    joined = launch.joined(Place(1, 2, 1, 2), tmp_path, 1.0, "nowhere0")
    with refused(ValueError, "interface nowhere0 lo"), joined:
        pass


def test_a_launcher_passes_signals_on_and_names_the_rank_that_failed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Operating system: exit codes of shells in the place of ranks, which end as ranks do."""

    def attended(*scripts: str, sent: int = 0) -> int:
        ranks = [subprocess.Popen(["sh", "-c", script], process_group=0) for script in scripts]
        if sent:
            threading.Timer(0.3, os.kill, (os.getpid(), sent)).start()
        code = launch._attend(ranks)
        assert all(each.returncode is not None for each in ranks)
        return code

    saves = "trap 'exit 143' TERM; while :; do sleep 0.05; done"
    assert attended(saves, saves, sent=signal.SIGTERM) == 143
    assert attended("exit 0", "sleep 0.2") == 0
    assert (
        attended("trap 'exit 13' TERM; while :; do sleep 0.05; done", "sleep 0.1; kill -9 $$")
        == 128 + signal.SIGKILL
    )
    assert "rank 1" in capfd.readouterr().err
    assert attended("exit 3", saves) == 3


def test_torchrun_starts_a_run_again_where_its_ledger_ends(
    tiny_run: TinyRun, whole: tuple[str, list[bytes]], tmp_path: Path
) -> None:
    """A run that nobody killed. With --max-restarts both ranks begin again, in the same store of
    addresses, from the slices that they have on the disk."""
    killed = tmp_path / "killed"
    restarting = "--nproc-per-node 2 --max-restarts 1 --monitor-interval 0.1"
    process = start(tiny_run, killed, steps=STEPS, torchrun=restarting, settings="--trainable disk")
    kill_rank_1(process, killed, after=5)
    assert "resumed at step" in finish(process)
    assert result(killed) == whole


def test_a_master_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operating system: a port on which nobody listens, within the time that a rank waits for
    others."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody else's, as long as this one holds it
        port = held.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with refused(launch_place.LostRank, f"rank 1 0 127.0.0.1:{port} 0.6 refused"):
            launch._store(Place(1, 2, 1, 2), 0.6)


def test_places_are_read_from_torchrun_and_from_slurm() -> None:
    """Closed form: what these launchers document."""
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert place(torchrun) == Place(5, 8, 1, 4)
    slurm = {
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    }
    assert place(slurm) == Place(5, 8, 1, 4)
    assert place({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == Place()  # a batch script is no step
    with refused(ValueError, "--ntasks-per-node"):
        place({**slurm, "SLURM_STEP_TASKS_PER_NODE": "4,2"})
    mpirun = {
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    }
    assert place({**mpirun, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}) == Place(5, 8, 1, 4)
    assert place({**slurm, "WORLD_SIZE": "8", "MASTER_ADDR": "first"}) == Place(5, 8, 1, 4)
    for alone in (
        {"MASTER_ADDR": "gone"},
        {"WORLD_SIZE": "1"},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ):
        assert place(alone) == Place()


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HALF = [
    *itertools.product(
        [TORCHRUN, SLURM, MPIRUN], range(4), ["", " ", "two", "-1", "1.0", "0x2", "99"]
    )
]
"""Each variable of each launcher, with values that it cannot have."""


@pytest.mark.parametrize(("launcher", "place_of_name", "value"), HALF)
def test_a_variable_of_a_launcher_that_makes_no_sense_is_named(
    launcher: dict[str, str], place_of_name: int, value: str
) -> None:
    """Closed form: the variable that was changed, in one line."""
    name = list(launcher)[place_of_name]
    with refused(ValueError, name) as told:
        place({**launcher, name: value})
    assert "invalid literal" not in str(told.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": "0"}, "RANK 0 WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE 2 RANK"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK 0 WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE 2 WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_RANK": "3"}, "OMPI_COMM_WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, "OMPI_COMM_WORLD_RANK"),
        ({**TORCHRUN, "RANK": "4"}, "RANK 4 WORLD_SIZE 0 3"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE 3 WORLD_SIZE 4"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE"),
        ({**SLURM, "RANK": "2"}, "RANK 2 SLURM_PROCID 1"),
        ({**SLURM, "WORLD_SIZE": "2"}, "WORLD_SIZE 2 SLURM_STEP_NUM_TASKS 4"),
        ({**SLURM, "SLURM_LOCALID": "0"}, "--distribution=block"),
        ({**SLURM, "SLURM_DISTRIBUTION": "cyclic"}, "--distribution=block"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "SLURM_STEP_NUM_TASKS 4"),
        *(({k: v for k, v in SLURM.items() if k != name}, f"{name}")
          for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "--map-by slot"),
    ],
)  # fmt: skip
def test_variables_of_a_launcher_in_part_are_refused(changes: dict[str, str], said: str) -> None:
    """Closed form: what is missing, or contradicts another."""
    with refused(ValueError, said):
        place(changes)


def test_the_cyclic_distribution_is_refused_on_every_rank() -> None:
    """Closed form: SLURM's numbering round two nodes of two tasks, of which two ranks stand where
    block would have them too."""
    step = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_DISTRIBUTION": "cyclic:block",
    }
    for rank in range(4):
        with refused(ValueError, "--distribution=block"):
            place({**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank // 2)})
    one_each = {
        **step,
        "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "0",
    }
    assert place(one_each) == Place(3, 4, 0, 1)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "MASTER_ADDR 2"),
        ({"MASTER_ADDR": "", "MASTER_PORT": "29500"}, "MASTER_ADDR empty"),
        ({"MASTER_ADDR": "first"}, "MASTER_PORT"),
        *(({"MASTER_ADDR": "first", "MASTER_PORT": port}, f"MASTER_PORT '{port}'")
          for port in ("", "http", "0", "65536", "99999", "-1")),
        ({"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}, "MASTER_ADDR"),
        ({"MASTER_ADDR": "first", "SLURM_JOB_ID": "job"}, "SLURM_JOB_ID job"),
    ],
)  # fmt: skip
def test_where_rank_0_is_must_be_said(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Closed form: the variable to set; nothing is written before it is refused."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no scontrol
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with refused(ValueError, said), launch.joined(Place(1, 2, 1, 2), tmp_path / "run", 1.0):
        pass
    assert not (tmp_path / "run").exists()


def test_the_first_node_of_a_slurm_step_is_where_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed form: a scontrol that answers as SLURM's does."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho n1\necho n2\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    step = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "12345"}
    assert launch_place.meeting_point(Place(1, 2, 0, 1), step) == ("n1", 29500 + 2345)
    assert launch_place.meeting_point(Place(1, 2, 0, 1), {**step, "MASTER_PORT": "31"}) == (
        "n1",
        31,
    )


def test_a_port_of_a_program_that_says_nothing_is_named() -> None:
    """Operating system: a socket that accepts connections and never answers, within the time that a
    rank waits for others."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        began = time.monotonic()
        with refused(launch_place.LostRank, f"127.0.0.1:{port} 1"):
            launch.key_store("127.0.0.1", port, 1.0, False, "rank 1", "rank 0", "MASTER_PORT")
        assert time.monotonic() - began < 30
    with refused(ValueError, "elastic 99999"):
        launch.key_store("127.0.0.1", 99999, 1.0, True, "the host", "the host", "elastic")


def test_an_interface_without_an_address_is_no_lost_rank() -> None:
    """Closed form: what gloo says where a rank's interface is down."""
    said = (
        "[enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address"
        " for: lo"
    )
    found = launch.lost_rank(1, RuntimeError(said))
    assert (
        "has no address to talk to other ranks from (ifa != nullptr. Unable to find address for:"
        " lo)" in str(found)
    )
    assert "lost the connection" not in str(found)


def test_the_rank_that_an_error_names_stays_named() -> None:
    """Closed form: gloo's words where a neighbour was killed, with and without its place in the
    source, and those of the watch, which knows who has ended."""
    reason = "Read error [127.0.0.1]:60303: Connection reset by peer"
    for said in (f"[/src/gloo/pair.cc:537] {reason}. This may be", f"gloo: {reason}. This may be"):

        class OfRankOne:
            ended = staticmethod(lambda: [1])

        with pytest.raises(launch_place.LostRank) as raised, naming(cast(Watch, OfRankOne())):
            raise RuntimeError(said)
        told = str(launch.lost_rank(0, raised.value))
        assert told.startswith("rank 1 has ended (")
        assert reason in told
        assert "pair.cc" not in told
        assert told.count("The run ends") == 1
        assert told.endswith("start it again to resume")
    unnamed = str(launch.lost_rank(0, RuntimeError(f"[/src/gloo/pair.cc:537] {reason}. This may")))
    assert f"lost the connection to another rank ({reason})" in unnamed


def test_a_machine_without_loopback_is_told_before_ranks_are_started(tmp_path: Path) -> None:
    """Operating system: a new network namespace, whose loopback interface is down."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a network namespace needs root and util-linux")
    code = "from blockwalk.ranks import launch; launch.start(['--version'], 2, 1)"
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    says(done.stderr, "ip link set lo up")


def test_the_rank_that_failed_first_is_named() -> None:
    """Closed form: what a launcher sees where rank 2 is killed, rank 1 loses it, and the launcher
    stops rank 0."""
    message, code = first_failure(
        [(0, 10, -signal.SIGTERM), (1, 11, LOST), (2, 12, -signal.SIGKILL)]
    )
    assert message.startswith("rank 2 (process 12) was killed by SIGKILL")
    assert code == 128 + signal.SIGKILL
    assert first_failure([(3, 13, 2), (1, 11, LOST)])[1] == 2
    stopped = (0, 10, 128 + signal.SIGTERM)  # the launcher's SIGTERM, answered with a checkpoint
    assert first_failure([stopped, (1, 11, 2)])[0].startswith(
        "rank 1 (process 11) ended with exit code 2"
    )
    assert first_failure([(0, 10, LOST), (1, 11, LOST)])[1] == LOST
    assert first_failure([(0, 10, -signal.SIGTERM), (1, 11, LOST)])[0].startswith(
        "rank 1 (process 11) lost the others"
    )


def test_several_nodes_get_a_command_each(capsys: pytest.CaptureFixture[str]) -> None:
    """Closed form: the user's own command line without what was for the launcher. The model may lie
    on those nodes alone; a setting that every node would refuse is refused here."""
    run = "--method distzo2 --model /nodes/model --data.train /nodes/train.jsonl --batch_size 6"
    launched = ["train", *run.split(), "--nproc-per-node", "2", "--nnodes=3"]
    assert main.main(launched) == 0
    _, *commands, _, firewall = capsys.readouterr().out.splitlines()
    assert firewall.startswith(
        "iptables -I INPUT ! -i lo ! -s NETWORK -p tcp -m multiport --dports 29500,"
    )
    assert commands == [
        f"PYTHONSAFEPATH=1 torchrun --nnodes 3 --node-rank {node} --master-addr HOST"
        f" --master-port 29500 --nproc-per-node 2 -m blockwalk train {run}"
        for node in range(3)
    ]
    for wrong, said in (
        (["--batch_size", "0"], "batch_size 0"),
        (["--model", ""], "model missing"),
    ):
        assert main.main([*launched, *wrong]) == main.BAD_INPUT
        out, errors = capsys.readouterr()
        assert (out, errors.count("\n")) == ("", 1)
        says(errors, said)
