"""A process's place among the ranks of a run, read from the variables of its launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

LOST = 13
"""The exit code of a rank that ends because others are gone."""


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
        """The mesh's settings, by name, that the configuration must have; none where there is one rank."""
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
        local, node = int(environment.get("LOCAL_RANK", 0)), int(environment.get("LOCAL_WORLD_SIZE", world))
        return Place(int(environment["RANK"]), world, local, node)
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in environment:
        tasks = environment["SLURM_STEP_TASKS_PER_NODE"]
        match = re.fullmatch(r"(\d+)(\(x\d+\))?", tasks)
        if match is None:
            raise ValueError(
                f"the SLURM step has {tasks} tasks on its nodes; every node must have as many (--ntasks-per-node)"
            )
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        rank, world, local = (int(environment[name]) for name in names)
        return Place(rank, world, local, int(match[1]))
    return Place()
