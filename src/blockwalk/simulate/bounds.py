"""The least that a plan over ranks needs, in closed form: bytes of the device and the host, and
seconds of a step. A search leaves out what these exclude, and compiles no program for it.

N trained parameters and F frozen ones of a stage, D hidden size. A choice that is not whole yet is
taken for the best that may become of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from blockwalk.plan.choices import MeshSettings
from blockwalk.plan.mesh import between, gather_bytes, make_axes
from blockwalk.plan.methods import method
from blockwalk.plan.placement import DTYPE_BYTES
from blockwalk.program.costs import UnitCost
from blockwalk.simulate.axes import CHUNKS, Choice, row_of, stage_ranks
from blockwalk.simulate.seconds import HOST_MEMORY, CostModel
from blockwalk.simulate.task import Task

HOSTS_INPUTS = ("host", "all")
HOSTS_STATES = ("states", "all")
"""Values of the axis ``memory`` with which inputs of blocks, and optimizer states, are on the
host."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds that blocks of a model and its ends compute for one micro-batch, and their bytes."""

    forwards: float
    """Seconds of all blocks, forwards and backwards of kept graphs."""
    again: float
    """Seconds of all blocks to compute again what no graph has."""
    prologue: float
    epilogue: float
    graph: float
    """Bytes of a block's graph, on average."""
    hidden: int
    """Bytes of a block's input."""
    transient: int
    """Bytes that the largest turn needs beside what is kept."""


@dataclass(frozen=True, slots=True)
class Least:
    """The least that a choice needs."""

    device: float
    """Bytes."""
    host: float
    """Bytes of a rank."""
    seconds: float
    """Seconds of a step; 0 where the choice is not whole."""
    tokens: int
    """Tokens of a step over all ranks."""
    moves: float = 0.0
    """Seconds of every link of a step by itself, added up."""

    @property
    def a_token(self) -> float:
        """Seconds of a token."""
        return self.seconds / self.tokens


class Bounds:
    """The bounds of a task's plans. Costs of units are asked for once per number of parts."""

    def __init__(self, task: Task) -> None:
        self.task = task
        model = task.model
        self.trained = model.numel(trainable=True)
        self.frozen = model.numel(trainable=False)
        block = max(model.blocks, key=lambda unit: unit.numel())
        self.block = block.numel()
        self.trained_block = block.numel(trainable=True)
        self._work: Callable[[str, int, str], _Work] = cache(self._measured)

    def _measured(self, name: str, parts: int, way: str) -> _Work:
        """Return the work of a method's row with sequences in so many parts."""
        task = self.task
        hardware = task.hardware
        mesh = {
            "world": hardware.world,
            "ranks_per_node": hardware.devices_per_node,
            "context": parts,
        }
        plan = method(name, mesh=mesh, context={"way": way})
        shape = task.shape.part(parts)
        costs = task.costs(plan, shape)
        model = task.model
        priced = CostModel(plan, model, hardware, costs)
        size = DTYPE_BYTES[priced.dtype]
        by_kind = {unit.kind: costs.of(unit.kind) for unit in model.units}
        numels = {unit.kind: unit.numel() for unit in model.blocks}

        def once(kind: str) -> float:
            weights = size * numels[kind] / hardware.memory_bandwidth
            return hardware.idle_seconds + weights

        def sent(cost: UnitCost) -> float:
            return hardware.intra.seconds(cost.forward_sent) if cost.forward_sent else 0.0

        forwards = again = graph = 0.0
        for unit in model.blocks:
            cost = by_kind[unit.kind]
            forwards += priced.work_seconds(cost.forward + cost.backward) + 2 * once(unit.kind)
            if cost.forward_sent:
                forwards += sent(cost) + hardware.intra.seconds(cost.backward_sent)
            again += priced.work_seconds(cost.again) + sent(cost)
            graph += cost.graph(kept=True).nbytes / len(model.blocks)
        prologue, epilogue = (
            priced.work_seconds(by_kind[unit.kind].forward + by_kind[unit.kind].backward)
            for unit in (model.prologue, model.epilogue)
        )
        transient = max(cost.forward_transient for cost in by_kind.values())
        hidden = shape.tokens * model.hidden_size * size
        return _Work(forwards, again, prologue, epilogue, graph, hidden, transient)

    def least(self, choice: Choice) -> Least:
        """Return the least that a choice needs. Each bound is of the program that would be
        compiled, with terms left out and none added; for stages it is taken that they hold equally
        many blocks. One call is O(1) once the work is measured."""
        task = self.task
        ranks = stage_ranks(task, choice)
        stages = int(choice.get("stages", 1))
        name = str(choice["method"])
        row = row_of(choice)
        over = {
            axis: int(choice.get(axis, ranks)) for axis in ("parameters", "gradients", "states")
        }
        memory = choice.get("memory", "all" if task.hardware.device == "cuda" else "device")
        trained = self.trained / stages
        frozen = self.frozen / stages
        size = DTYPE_BYTES[task.model.dtype]
        words = 4 * (1 + len(row.update_rule.states))
        states = words * trained / over["states"]
        codes = choice.get("codec", "coded" if task.adapters else "raw")
        parameters = ((frozen if codes == "raw" else 0) + trained) * size / over["parameters"]
        if row.cache.off_device or (size == 4 and over["parameters"] == over["states"]):
            parameters = 0
        device_bytes = parameters
        host = 0.0
        if memory in HOSTS_STATES:
            host += states
        else:
            device_bytes += states
        if "parts" not in choice:
            return Least(device_bytes, host, 0.0, 1)
        parts = int(choice["parts"])
        steps = task.steps(stages, parts)
        joint = int(choice.get("together", 1))
        walks = -(-steps // joint)
        if walks > 1 and row.gradient.tier.facts.resident:
            device_bytes += 4 * trained / over["gradients"]
        # a chunk's parameters stay in their slots for the next micro-batch, and shared sums on the
        # device: some chunk has no fewer blocks than the average
        of_chunk = 0 if stages == 1 else -(-len(task.model.blocks) // stages // _chunks(choice))
        if over["parameters"] > 1:
            kept = self.block if codes == "raw" else self.trained_block
            device_bytes += size * (self.block + of_chunk * kept)
        shared = choice.get("sums") == "shared" and over["gradients"] > 1
        device_bytes += 4 * self.trained_block * max(of_chunk * shared, 1)
        work = self._work(name, parts, str(choice.get("way", "auto")))
        alive = self._alive(choice, steps)
        blocks = len(task.model.blocks) / stages
        inputs = min(work.hidden, work.graph) * blocks * alive
        if memory in HOSTS_INPUTS:
            host += inputs
            inputs = 0
        device_bytes += inputs + work.transient
        tokens = task.shape.tokens * steps * task.hardware.world // (stages * parts)
        if "together" not in choice:
            return Least(device_bytes, host, 0.0, tokens)
        links = _link_seconds(task, choice, over, trained, frozen, steps // joint)
        seconds = max(self._seconds(choice, work, steps, over, task.room - device_bytes), *links)
        copied = 2 * steps * work.hidden * blocks * (memory in HOSTS_INPUTS)
        copied += 2 * states * (memory in HOSTS_STATES)
        moves = sum(links) + task.hardware.host_to_device.seconds(int(copied))
        return Least(device_bytes, host, seconds, tokens, moves)

    def _alive(self, choice: Choice, steps: int) -> float:
        """Return micro-batches whose inputs the first stage keeps at once, a chunk's counted for
        the share of blocks that it is."""
        stages = int(choice.get("stages", 1))
        chunks = int(choice.get("chunks", 1))
        if stages == 1:
            return int(choice.get("together", 1))
        ahead = stages if chunks == 1 else (chunks - 1) * stages + 2 * (stages - 1) + 1
        return min(ahead / chunks, steps)

    def _seconds(
        self,
        choice: Choice,
        work: _Work,
        steps: int,
        over: Mapping[str, int],
        left: float,
    ) -> float:
        """Return the least seconds in which a stage computes, waits for other stages and
        updates.

        Args:
            left: device bytes that graphs may take.
        """
        task = self.task
        stages = int(choice["stages"])
        chunks = int(choice["chunks"])
        blocks = len(task.model.blocks) / stages
        again = 1.0
        if task.hardware.device == "cuda":
            grows = max(work.graph - work.hidden, 1.0) * self._alive(choice, steps) * blocks
            again = min(max(1 - max(left, 0.0) / grows, 0.0), 1.0)
        a_block = (work.forwards + again * work.again) / len(task.model.blocks)
        on_average = (a_block * len(task.model.blocks) + work.prologue + work.epilogue) / stages
        computes = max(
            on_average * (steps + (stages - 1) / chunks),
            steps * self._slowest_stage(stages, chunks, a_block, work),
        )
        updates = self._update_seconds(choice, self.trained / stages / over["states"])
        return computes + updates

    def _slowest_stage(self, stages: int, chunks: int, a_block: float, work: _Work) -> float:
        """Return the least seconds of the slowest stage for one micro-batch. Blocks are whole, and
        the stage that ends in the loss has one of them in each of its chunks at the least."""
        count = len(self.task.model.blocks)
        if stages == 1:
            return count * a_block + work.prologue + work.epilogue
        fewest = min(chunks, count)
        return a_block * min(
            max(blocks + work.epilogue / a_block, -(-(count - blocks) // (stages - 1)))
            for blocks in range(fewest, max(fewest, count // stages) + 1)
        )

    def _update_seconds(self, choice: Choice, elements: float) -> float:
        """Return seconds of updating so many elements in one place."""
        hardware = self.task.hardware
        touched = 28 * elements
        if choice["memory"] in HOSTS_STATES:
            return touched / HOST_MEMORY
        return touched / hardware.memory_bandwidth


def _chunks(choice: Choice) -> int:
    """Return the chunks of a stage, the most that it may have where they are not chosen yet."""
    return int(choice.get("chunks", max(CHUNKS)))


def _link_seconds(
    task: Task,
    choice: Choice,
    over: Mapping[str, int],
    trained: float,
    frozen: float,
    walks: int,
) -> tuple[float, float]:
    """Return the least seconds of the node's own link, and of that between nodes.

    A chunk's parameters that stay for the next micro-batch come once a round of them; sums that
    neighbours share leave once a round."""
    hardware = task.hardware
    stages = int(choice["stages"])
    size = DTYPE_BYTES[task.model.dtype]
    groups = [f"g{ranks}={ranks}" for ranks in sorted({*over.values()} - {1})]
    mesh = MeshSettings(
        pipeline=stages,
        groups=tuple(groups),
        ranks_per_node=hardware.devices_per_node,
        world=hardware.world,
    )
    axes = make_axes(mesh)
    ranks = hardware.world // stages
    arrivals = walks
    sums = walks
    if stages > 1:
        rounds = 1 if choice["chunks"] == 1 else -(-walks // stages)
        arrivals = rounds
        sums = rounds if choice["sums"] == "shared" else walks
    gathered = trained + (frozen if choice["codec"] == "raw" else 0)
    seconds = {False: 0.0, True: 0.0}

    def add(inner: int, outer: int, nbytes: float, times: float) -> None:
        for axis in between(axes, inner, outer):
            moved = times * gather_bytes([axis], int(nbytes * inner / axis.inner))
            sharing = hardware.devices_per_node if axis.crosses_nodes else 1
            link = hardware.inter if axis.crosses_nodes else hardware.intra
            seconds[axis.crosses_nodes] += moved * sharing / link.bandwidth

    add(1, over["parameters"], size * gathered, 2 * arrivals)
    add(1, over["gradients"], 4 * trained, sums)
    add(over["gradients"], over["states"], 4 * trained / over["gradients"], 1)
    add(over["states"], ranks, 4 * trained / over["states"], 1)
    add(over["parameters"], over["states"], size * trained / over["parameters"], 1)
    return seconds[False], seconds[True]
