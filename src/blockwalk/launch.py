"""Where a process stands among the ranks of a run: read from torchrun's or SLURM's variables, or started here.

    blockwalk train run.yaml --nproc-per-node 4             starts torchrun on this machine
    torchrun ... -m blockwalk train run.yaml                one of these on each node of a cluster
    srun --ntasks-per-node 4 blockwalk train run.yaml       likewise

Nothing here imports torch before a process joins the others.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

PORT = 29500
LAUNCH_FLAGS = ("--nproc-per-node", "--nnodes")
LOST = 13
"""What a rank exits with when others are gone."""


class LostRank(RuntimeError):
    """Another rank is gone, or cannot be reached."""


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a run. Ranks are numbered node by node."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    ranks_per_node: int = 1

    def settings(self) -> list[tuple[str, int]]:
        """What the configuration must say of the mesh; nothing where there is one rank."""
        if self.world == 1:
            return []
        return [("mesh.world", self.world), ("mesh.ranks_per_node", self.ranks_per_node)]


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """This process's place, from the variables of torchrun or of a SLURM step.

    Raises:
        ValueError: a SLURM step whose nodes have different numbers of tasks.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        world = int(environment["WORLD_SIZE"])
        return Place(
            int(environment["RANK"]),
            world,
            int(environment.get("LOCAL_RANK", 0)),
            int(environment.get("LOCAL_WORLD_SIZE", world)),
        )
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in environment:
        tasks = environment["SLURM_STEP_TASKS_PER_NODE"]
        match = re.fullmatch(r"(\d+)(\(x\d+\))?", tasks)
        if match is None:
            raise ValueError(f"the SLURM step has {tasks} tasks on its nodes; every node must have as many (--ntasks-per-node)")
        return Place(
            int(environment["SLURM_PROCID"]),
            int(environment["SLURM_STEP_NUM_TASKS"]),
            int(environment["SLURM_LOCALID"]),
            int(match[1]),
        )
    return Place()


def start(arguments: Sequence[str], ranks_per_node: int, nodes: int) -> int:
    """Start ranks on this machine and answer their exit code, or, for several nodes, print what to run on each of them.

    Args:
        arguments: of ``blockwalk``, without :data:`LAUNCH_FLAGS`.
    """
    command = ["--nproc-per-node", str(ranks_per_node), "-m", "blockwalk", *arguments]
    if nodes > 1:
        print("run on each node, with the first node's name in place of HOST:")
        for node in range(nodes):
            print(shlex.join(["torchrun", *_rendezvous(nodes, node), *command]))
        return 0
    print(f"starting {ranks_per_node} ranks here; for several nodes, add --nnodes N to see the command for each", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks_per_node)))
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it prints what is said here in short
    try:
        torchrun: Any = torch.distributed.run
        torchrun.run(torchrun.parse_args(["--standalone", *command]))
    except ChildFailedError as error:
        message, code = first_failure([(rank, each.pid, each.exitcode) for rank, each in error.failures.items()])
        print(f"blockwalk: {message}", file=sys.stderr)
        return code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def first_failure(failures: Sequence[tuple[int, int, int]]) -> tuple[str, int]:
    """What to say, and to exit with, where ranks failed: (rank, process, exit code) of each. One that only lost the others, or
    was stopped because of them, is not the cause."""
    causes = [each for each in failures if each[2] not in (LOST, -signal.SIGTERM)]
    rank, process, code = min(causes or failures)
    who = f"rank {rank} (process {process})"
    if code > 0 and code != LOST:
        return f"{who} ended with exit code {code}, so the run ended; what it says is above, and in output_dir/logs", code
    how = "lost the others" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    again = "go on with --resume_from_checkpoint latest, with as many ranks as you like"
    return f"{who} {how}, so the run ended. Every rank's log is in output_dir/logs; {again}", code if code > 0 else 128 - code


def _rendezvous(nodes: int, node: int) -> list[str]:
    return ["--nnodes", str(nodes), "--node-rank", str(node), "--master-addr", "HOST", "--master-port", str(PORT)]


def lost_rank(rank: int, error: RuntimeError) -> LostRank | None:
    """What a broken collective means, said so that it helps; None where the error is another one."""
    from torch.distributed import DistError

    if not isinstance(error, DistError) and "gloo" not in str(error):
        return None
    reason = str(error).splitlines()[0].partition("] ")[2].partition(". This")[0] or str(error)
    return LostRank(
        f"rank {rank} lost the connection to another rank ({reason}): that one has ended, or cannot be reached. The run ends;"
        " start it again to resume"
    )


@contextmanager
def joined(here: Place, output_dir: Path) -> Iterator[None]:
    """Join the other ranks for the time of a run. Every rank's log is ``output_dir/logs``; what ranks other than 0 print
    goes there as well."""
    if here.world == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    from blockwalk.affinity import bind_to_gpu

    folder = output_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{here.rank:04d}.log"
    logging.basicConfig(filename=path, level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.captureWarnings(True)
    logging.getLogger(__name__).info("rank %d of %d, process %d", here.rank, here.world, os.getpid())
    _master()
    backend = "gloo"
    if torch.cuda.is_available():
        devices = torch.cuda.device_count()
        torch.cuda.set_device(here.local_rank % devices)
        bind_to_gpu(here.local_rank % devices)
        backend = "cpu:gloo,cuda:nccl" if here.ranks_per_node <= devices else "gloo"
    timeout, c10d, attempt = timedelta(hours=1), vars(dist), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = next(c10d["rendezvous"]("env://", here.rank, here.world, timeout=timeout))[0]
    # torchrun's store outlives its restarts, and gloo would find the addresses of ranks that are gone
    store = c10d["PrefixStore"](f"attempt-{attempt}", store)
    dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world, timeout=timeout)
    console = sys.stdout
    if here.rank:
        sys.stdout = path.open("a", encoding="utf-8", buffering=1)
    try:
        yield
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError as error:
        raise (lost_rank(here.rank, error) or error) from error.__cause__
    finally:
        sys.stdout = console


def _master() -> None:
    """Under SLURM, say where rank 0 is: its first node, and a port of the job's own."""
    if "MASTER_ADDR" not in os.environ:
        nodes = os.environ["SLURM_STEP_NODELIST"]
        found = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
        os.environ["MASTER_ADDR"] = found.stdout.split()[0]
        os.environ["MASTER_PORT"] = str(PORT + int(os.environ.get("SLURM_JOB_ID", 0)) % 10000)
