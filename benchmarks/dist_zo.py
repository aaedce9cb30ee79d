"""Zeroth order over ranks: equality, bytes between nodes, speed-up of two ranks, slices, host
memory, and which axis is inside.

    sudo python benchmarks/dist_zo.py [--check] [--json FILE] [--parts
    equal,bytes,speed,slices,host,inner]

Ranks are processes of one thread each, joined by gloo; nodes are network namespaces joined by a
bridge (root), and bytes are the kernel's on each node's link. Runs take turns, and medians are
compared; speed needs cores that nobody else uses."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import Bound, finish, median, parser, random_batch

from blockwalk import method
from blockwalk.plan.mesh import Coordinates
from blockwalk.ranks.ranks import Ranks
from blockwalk.walk.walker import Walker
from tests.support.cluster import cluster, sent_bytes
from tests.support.processes import run_ranks

VOCAB = 1024
WARM = 3
"""Steps before the first that counts."""
Mesh = dict[str, Any]
Settings = dict[str, Any]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What a run trains, and for how long."""

    hidden: int = 128
    layers: int = 3
    batch: int = 8
    sequence: int = 32
    steps: int = 4
    model: str = ""
    """A folder to read the model from, so that no rank ever holds it whole; drawn in memory
    without."""
    counts: bool = False
    """Read the link's counters: inside a node of a cluster."""
    data_inside: bool = False
    """Neighbours share the batch, not the forwards."""

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(
            "opt", hidden_size=self.hidden, word_embed_proj_dim=self.hidden,
            ffn_dim=4 * self.hidden, num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64, vocab_size=VOCAB, dropout=0.0,
            max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
            dtype="bfloat16",
        )  # fmt: skip

    def make(self) -> Any:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        make: Any = AutoModelForCausalLM.from_config
        return make(self.config()).to(torch.bfloat16)

    def walker(self, mesh: Mesh, settings: Settings) -> Walker:
        mesh = dict(mesh)
        trainable = f"host × raw × {mesh.pop('over', 'node')}"
        plan = method("distzo2", mesh=mesh, trainable=trainable, seed=1, **settings)
        walker = Walker(self.model or self.make(), plan, device="cpu")
        if self.data_inside:
            walker.ranks.__class__ = DataInside
        return walker


class DataInside(Ranks):
    """Ranks whose neighbours share the batch; those that share the forwards are further apart."""

    __slots__ = ()

    def coordinates(self, rank: int) -> Coordinates:
        return (("perturb", rank // self.mesh.data), ("data", rank % self.mesh.data))


def digest(walker: Walker) -> str:
    """Of the weights, and of every scalar that led to them."""
    walker.flush()
    seen = hashlib.sha256(repr(walker.estimator.entries).encode())  # type: ignore[union-attr]
    for name, weight in walker.engine.trained.weights().items():
        values = weight if isinstance(weight, torch.Tensor) else weight.rows(0, weight.shape[0])
        seen.update(name.encode() + values.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


# --------------------------------------------------------------------------------------------------
# What a rank does
# --------------------------------------------------------------------------------------------------


def trains(rank: int, work: Work, mesh: Mesh, settings: Settings) -> str:
    """The digest after a few steps."""
    with work.walker(mesh, settings) as walker:
        for step in range(work.steps):
            walker.step(random_batch(VOCAB, work.batch, work.sequence, seed=step))
        return digest(walker)


def steps(rank: int, work: Work, mesh: Mesh, settings: Settings) -> dict[str, float]:
    """Median seconds of a step, the first ones left out, in which heaps settle; bytes that this
    rank's node sent in each."""
    with work.walker(mesh, settings) as walker:
        batches = [
            random_batch(VOCAB, work.batch, work.sequence, seed=step)
            for step in range(work.steps + WARM)
        ]
        for batch in batches[:WARM]:
            walker.step(batch)
        if dist.is_initialized():
            dist.barrier()
        seconds = []
        began = sent_bytes() if work.counts else 0
        for batch in batches[WARM:]:
            start = time.perf_counter()
            walker.step(batch)
            seconds.append(time.perf_counter() - start)
        sent = sent_bytes() - began if work.counts else 0
        return {"seconds": median(seconds), "sent": sent / work.steps}


def alone(rank: int, work: Work) -> dict[str, float]:
    """:func:`steps` of a process by itself, beside others that do the same: what the cores give at
    most."""
    dist.barrier()
    dist.destroy_process_group()
    return steps(rank, work, {}, {})


def uploads(rank: int, work: Work, mesh: Mesh) -> tuple[float, float]:
    """Parameters a second that come to the device (gather included), and that go back to the
    host."""
    with work.walker(mesh, {}) as walker:
        buckets = walker.engine.trained
        units = sorted(buckets.streamed)
        numel = sum(walker.spec.units[unit].numel() for unit in units)
        up = []
        down = []
        for _ in range(work.steps + 1):
            dist.barrier()
            start = time.perf_counter()
            for unit in units:
                buckets.fetch(unit, 0)
                if buckets.sliced(unit):
                    buckets.gather(unit)
            dist.barrier()
            middle = time.perf_counter()
            for unit in units:
                buckets.store(unit)
            dist.barrier()
            up.append(middle - start)
            down.append(time.perf_counter() - middle)
        return numel / median(up[1:]), numel / median(down[1:])


def holds(rank: int, work: Work, mesh: Mesh) -> dict[str, int]:
    """Bytes by which the kernel's proportional set size grows from an untrained model of no layers
    to this one in training."""
    with replace(work, layers=1, hidden=64, model="").walker(mesh, {}) as small:
        small.step(random_batch(VOCAB, work.batch, work.sequence))
    bytes_before = pss()
    with work.walker(mesh, {}) as walker:
        for step in range(work.steps):
            walker.step(random_batch(VOCAB, work.batch, work.sequence, seed=step))
        dist.barrier()
        grown = pss() - bytes_before
        buckets = walker.engine.trained
        streamed = sum(buckets.units[unit].nbytes for unit in buckets.streamed)
        return {"grown": grown, "streamed": streamed, "slots": 2 * buckets.slots.nbytes}


def pss() -> int:
    """Bytes of memory of this process by the kernel's count, pages of files left out."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(
        int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
    )


# --------------------------------------------------------------------------------------------------
# Parts
# --------------------------------------------------------------------------------------------------


def equal(work: Work, rounds: int, figures: Figures) -> list[Bound]:
    cases: list[tuple[str, int, Mesh, Settings]] = [
        ("2 perturb", 2, {"perturb": 2}, {}),
        ("2 data", 2, {"data": 2}, {}),
        ("4: 2 × 2", 4, {"data": 2, "perturb": 2, "over": "nobody"}, {}),
        (
            "4: slice 2, 2 × 2",
            4,
            {"data": 2, "perturb": 2, "over": "node", "ranks_per_node": 2},
            {},
        ),
        ("8: perturb 8, q = 4", 8, {"perturb": 8}, {"zo.queries": 4}),
    ]
    bounds = []
    for name, world, mesh, settings in cases:
        expected = trains(
            0, work, {}, {**settings, "gradient_accumulation_steps": mesh.get("data", 1)}
        )
        losses = run_ranks(world, trains, work, {"world": world, **mesh}, settings, timeout=300)
        same = sum(each == expected for each in losses)
        figures[f"equal {name}"] = same
        bounds.append(Bound(f"{name}: ranks equal to one process", same, world, at_most=False))
    return bounds


def bytes_between_nodes(work: Work, rounds: int, figures: Figures) -> list[Bound]:
    bounds = []
    work = replace(work, counts=True)
    for ranks_per_node in (1, 2):
        mesh = {"world": 2 * ranks_per_node, "ranks_per_node": ranks_per_node}
        with cluster(2, ranks_per_node) as nodes:
            for hidden in (work.hidden, 4 * work.hidden):
                found = nodes.run(
                    steps, replace(work, hidden=hidden, steps=20), mesh, {}, timeout=300
                )
                sent = max(each["sent"] for each in found) / ranks_per_node
                name = f"bytes a step and rank, 2 nodes × {ranks_per_node}, hidden {hidden}"
                figures[name] = sent
                bounds.append(Bound(name, sent, 1024))
    seconds: dict[str | None, list[float]] = {None: [], "1mbit": []}
    with cluster(2, 1) as nodes:
        for _ in range(rounds):
            for rate, taken in seconds.items():
                nodes.limit(rate)
                longer = replace(work, sequence=8 * work.sequence)
                found = nodes.run(steps, longer, {"world": 2, "ranks_per_node": 1}, {}, timeout=300)
                taken.append(found[0]["seconds"])
    figures["seconds a step, 1 Mbit/s and unshaped"] = [
        median(seconds["1mbit"]),
        median(seconds[None]),
    ]
    ratio = median(seconds[None]) / median(seconds["1mbit"])
    return [*bounds, Bound("throughput at 1 Mbit/s / unshaped", ratio, 0.95, at_most=False)]


def speed(work: Work, rounds: int, figures: Figures) -> list[Bound]:
    meshes: dict[str, Mesh] = {
        "perturb 2": {"world": 2, "perturb": 2, "over": "nobody"},
        "data 2": {"world": 2, "data": 2, "over": "nobody"},
        "perturb 2, slices": {"world": 2, "perturb": 2},
    }
    taken: dict[str, list[float]] = {
        "1 rank": [],
        "2 by themselves": [],
        **{name: [] for name in meshes},
    }
    for _ in range(rounds):
        taken["1 rank"].append(run_ranks(1, steps, work, {}, {}, timeout=300)[0]["seconds"])
        taken["2 by themselves"].append(
            median([each["seconds"] for each in run_ranks(2, alone, work, timeout=300)])
        )
        for name, mesh in meshes.items():
            taken[name].append(run_ranks(2, steps, work, mesh, {}, timeout=300)[0]["seconds"])
        print(
            "  " + ", ".join(f"{name} {each[-1]:.2f}" for name, each in taken.items()), flush=True
        )
    figures["seconds a step"] = {name: median(each) for name, each in taken.items()}
    one = median(taken["1 rank"])
    figures["speed-up that the cores give at most"] = 2 * one / median(taken["2 by themselves"])
    for name in meshes:
        figures[f"speed-up {name}"] = one / median(taken[name])
    return [
        Bound(f"speed-up of {name}", figures[f"speed-up {name}"], 1.9, at_most=False)
        for name in ("perturb 2", "data 2")
    ]


def slices(work: Work, rounds: int, figures: Figures) -> list[Bound]:
    for name, over in (("naive", "nobody"), ("sliced", "node")):
        answers = run_ranks(4, uploads, work, {"world": 4, "over": over}, timeout=300)
        figures[f"{name}, parameters a second of all ranks"] = {
            "upload": answers[0][0],
            "offload": answers[0][1],
        }
    return []


def host(work: Work, rounds: int, figures: Figures) -> list[Bound]:
    with tempfile.TemporaryDirectory() as folder:
        work.make().save_pretrained(folder)
        found = {
            count: run_ranks(4, holds, replace(work, model=folder), {"world": 4, "over": over})
            for count, over in ((1, "nobody"), (4, "node"))
        }
    bounds = []
    for count, answers in found.items():
        grown = median([each["grown"] for each in answers])
        expected = answers[0]["streamed"] / count + answers[0]["slots"]
        figures[f"a rank's memory, {count} slices"] = {"PSS": grown, "M/n + 2 slots": expected}
        bounds.append(Bound(f"PSS of a rank / (M/{count} + 2 slots)", grown / expected, 1.15))
    return bounds


def inner(work: Work, rounds: int, figures: Figures) -> list[Bound]:
    mesh = {"world": 4, "ranks_per_node": 2, "data": 2, "perturb": 2}
    taken: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with cluster(2, 2) as nodes:
        for _ in range(rounds):
            for data_inside, found in taken.items():
                found.append(
                    nodes.run(
                        steps,
                        replace(work, counts=True, data_inside=data_inside),
                        mesh,
                        {},
                        timeout=300,
                    )[0]
                )
    for data_inside, found in taken.items():
        figures["data inside" if data_inside else "perturb inside"] = {
            "seconds": median([each["seconds"] for each in found]),
            "bytes a rank": median([e["sent"] for e in found]) / 2
        }  # fmt: skip
    return []


PARTS = {
    "equal": (equal, Work()),
    "bytes": (bytes_between_nodes, Work()),
    "speed": (speed, Work(hidden=256, layers=6, batch=12, sequence=2048, steps=3)),
    "slices": (slices, Work(hidden=1024, layers=8, steps=5)),
    "host": (host, Work(hidden=1024, layers=24, batch=4, sequence=8, steps=2)),
    "inner": (inner, Work(hidden=256, layers=4, batch=8, sequence=256, steps=5)),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--parts", default=",".join(PARTS))
    options.add_argument("--rounds", type=int, default=3)
    sizes = ("hidden", "layers", "batch", "sequence", "steps")
    for name in sizes:
        options.add_argument(f"--{name}", type=int, help="in place of each part's own")
    arguments = options.parse_args()
    changed = {name: value for name in sizes if (value := getattr(arguments, name)) is not None}
    torch.set_num_threads(1)
    figures: Figures = {}
    bounds: list[Bound] = []
    for name in arguments.parts.split(","):
        part, work = PARTS[name]
        found: Figures = {}
        bounds += part(replace(work, **changed), arguments.rounds, found)
        for title, figure in found.items():
            print(f"{title:48} {figure}", flush=True)
        figures |= found
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()
