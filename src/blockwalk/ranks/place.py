"""A process's place among the ranks of a run, read from the variables of its launcher."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

PORT = 29500
"""The port at which rank 0 listens where nothing else is said."""
LOST = 13
"""The exit code of a rank that ends because others are gone."""
TIMEOUT = timedelta(hours=1)
"""The time that ranks wait for one another in every process group. Unless told, NCCL waits for ten
minutes: less than rank 0 may write at a run's end. :mod:`blockwalk.ranks.watch` finds a rank that
has died or hangs sooner."""


class LostRank(RuntimeError):
    """Another rank is gone, or cannot be reached."""


def reason_of(error: RuntimeError) -> str:
    """Return the first line of a collective's error, without gloo's place in its source and its
    advice."""
    text = str(error).splitlines()[0].partition(". This")[0]
    source, _, reason = text.partition("] ")
    return reason if source.startswith("[") and reason else text


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a run. Ranks are numbered node by node."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    ranks_per_node: int = 1

    def settings(self) -> list[tuple[str, int]]:
        """Return the mesh's settings, by name, that the configuration must have; none where there
        is one rank."""
        if self.world == 1:
            return []
        return [("mesh.world", self.world), ("mesh.ranks_per_node", self.ranks_per_node)]


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variables in which a launcher tells each process its place."""

    rank: str
    world: str
    local_rank: str
    ranks_per_node: str
    by_node: str
    """The way to have ranks numbered node by node."""


TORCHRUN = Launcher(
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "number them so, or leave LOCAL_RANK out",
)
SLURM = Launcher(
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    "srun --distribution=block",
)
OPEN_MPI = Launcher(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpirun --map-by slot",
)


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """Return this process's place, from the variables of torchrun, of a SLURM step or of Open MPI's
    mpirun.

    Raises:
        ValueError: a variable is missing beside others, is no number, or contradicts another one;
            nodes have different numbers of ranks; or ranks are not numbered node by node.
    """
    named = [name for name in (TORCHRUN.rank, TORCHRUN.world) if name in environment]
    if len(named) == 2:
        return _placed(TORCHRUN, environment)
    for launcher in (SLURM, OPEN_MPI):
        if launcher.world in environment and _number(environment, launcher.world, least=1) > 1:
            rank_place = _placed(launcher, environment)
            for name, value in (
                (TORCHRUN.rank, rank_place.rank),
                (TORCHRUN.world, rank_place.world),
            ):
                if name in named and _number(environment, name) != value:
                    variable = launcher.rank if name == TORCHRUN.rank else launcher.world
                    raise ValueError(
                        f"{name} is {environment[name]}, and {variable} is {value}: unset {name},"
                        " or set both alike"
                    )
            return rank_place
    for launcher in (TORCHRUN, OPEN_MPI):
        _refuse_half(launcher, environment)
    return Place()


def _refuse_half(launcher: Launcher, environment: Mapping[str, str]) -> None:
    """Raise ValueError where a launcher's variables are there in part: each of several ranks would
    train alone. One that says that there is one rank is no such part."""
    for name in (launcher.rank, launcher.world, launcher.local_rank, launcher.ranks_per_node):
        missing = launcher.world if name != launcher.world else launcher.rank
        if name not in environment or missing in environment:
            continue
        is_size = name in (launcher.world, launcher.ranks_per_node)
        if not is_size or _number(environment, name, least=1) > 1:
            raise ValueError(
                f"{name} is {environment[name]!r}, and {missing} is not set: set both, as the"
                " launcher does on every rank, or"
                f" unset {name} to train on one"
            )


def _placed(launcher: Launcher, environment: Mapping[str, str]) -> Place:
    """Return the place that a launcher's variables say."""
    rank = _number(environment, launcher.rank)
    world = _number(environment, launcher.world, least=1)
    if rank >= world:
        raise ValueError(
            f"{launcher.rank} is {rank}, and {launcher.world} is {world}: ranks are numbered from"
            f" 0 to {world - 1}; correct one"
        )
    if launcher is SLURM:
        per_node = _tasks_per_node(environment, world)
    else:
        per_node = _number(environment, launcher.ranks_per_node, least=1, default=world)
    if world % per_node:
        raise ValueError(
            f"{launcher.ranks_per_node} is {per_node}, which does not divide {launcher.world}"
            f" {world}: start as many ranks on"
            " every node"
        )
    local = _number(
        environment, launcher.local_rank, default=None if launcher is SLURM else rank % per_node
    )
    cyclic = environment.get("SLURM_DISTRIBUTION", "").startswith("cyclic") and 1 < per_node < world
    if local != rank % per_node or (launcher is SLURM and cyclic):
        remark = "" if launcher.ranks_per_node in environment else " (not set: all on one node)"
        raise ValueError(
            f"{launcher.rank} is {rank} and {launcher.local_rank} {local} of {per_node} ranks on"
            " a node"
            f" ({launcher.ranks_per_node}{remark}): ranks must be numbered node by node"
            f"{', and SLURM_DISTRIBUTION is cyclic' if cyclic else ''}; use {launcher.by_node}"
            f"{f', or set {launcher.ranks_per_node}' if remark else ''}"
        )
    return Place(rank, world, local, per_node)


def _tasks_per_node(environment: Mapping[str, str], world: int) -> int:
    """Return the tasks that a SLURM step has on each of its nodes."""
    name = SLURM.ranks_per_node
    tasks = environment.get(name)
    if tasks is None:
        raise ValueError(
            f"{name} is not set, and {SLURM.world} is {world}: start the ranks with srun, which"
            " sets it"
        )
    match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", tasks.strip())
    if match is None or not int(match[1]):
        raise ValueError(
            f"{name} is {tasks!r}: every node of the SLURM step must have as many tasks, such as"
            " 4(x2); set --ntasks-per-node"
        )
    if int(match[1]) * int(match[2] or 1) != world:
        raise ValueError(
            f"{name} is {tasks!r}, and {SLURM.world} is {world}; start the ranks with srun, which"
            " sets both"
        )
    return int(match[1])


def _number(
    environment: Mapping[str, str], name: str, *, least: int = 0, default: int | None = None
) -> int:
    """Return the whole number in a variable; ``default`` where it is not set. Raises ValueError
    where it has none."""
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ValueError(
            f"{name} is not set, and other variables of its launcher are: set it on every rank"
        )
    if not re.fullmatch(r"\s*[0-9]+\s*", text) or int(text) < least:
        said = "is set and empty" if not text.strip() else f"is {text!r}"
        raise ValueError(f"{name} {said}; it must be a whole number from {least} on, or not be set")
    return int(text)


def meeting_point(here: Place, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the address and port at which rank 0 serves the store of keys: MASTER_ADDR and
    MASTER_PORT, and under SLURM unless these are set the first node and a port of the job's own.

    Raises:
        ValueError: they are not set, or are no address and port, or SLURM's nodes cannot be read.
    """
    purpose = f"there are {here.world} ranks, which meet where rank 0 listens"
    address = environment.get("MASTER_ADDR")
    if address is None and "SLURM_STEP_NODELIST" in environment:
        address = _first_node(environment["SLURM_STEP_NODELIST"])
    if not address:
        said = "is not set" if address is None else "is set and empty"
        raise ValueError(
            f"MASTER_ADDR {said}, and {purpose}: set it to the first node's name or address on"
            " every rank"
        )
    port = environment.get("MASTER_PORT")
    if port is None and "SLURM_JOB_ID" in environment:
        return address, PORT + _number(environment, "SLURM_JOB_ID") % 10000
    if port is None:
        raise ValueError(
            f"MASTER_PORT is not set, and {purpose}: set it to a free port of {address}, such as"
            f" {PORT}"
        )
    return address, port_of(port, "MASTER_PORT")


def port_of(text: str, setting: str) -> int:
    """Return a port, from 1 to 65535. Raises ValueError, with the setting that says it, where a
    text is none."""
    if not re.fullmatch(r"\s*[0-9]+\s*", text) or not 0 < int(text) < 1 << 16:
        raise ValueError(
            f"{setting} has port {text!r}; it must be a number from 1 to 65535, such as {PORT}"
        )
    return int(text)


def _first_node(nodes: str) -> str:
    """Return the first node of a list as SLURM writes it."""
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        names = []
        why = str(error)
    else:
        why = "it named none"
    if not names:
        raise ValueError(
            f"SLURM_STEP_NODELIST is {nodes!r}, and scontrol does not tell its first node"
            f" ({why}): set MASTER_ADDR to that"
            f" node's name, and MASTER_PORT to a free port of it, such as {PORT}"
        )
    return names[0]
