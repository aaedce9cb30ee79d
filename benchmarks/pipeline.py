"""Blocks over stages, beside one process, on paper, and when a stage dies.

    python benchmarks/pipeline.py [--part exact paper gathers random kills peer] [--check]
        [--json FILE] [--programs 2000] [--runs 20] [--deaths 50]

``exact``: gradients of nine families of models on 2 and 4 stages, by chunks and micro-batches, and
20 steps of AdamW with clipping, beside the same walk by one process. ``paper``: random plans whose
stages are run together by the simulator. ``gathers``: those of a step, with chunks that stay and
without. ``random``: such plans on four ranks. ``kills``: a stage that dies or is stopped at a
random moment, and the run that goes on from the checkpoint before. ``peer``: a step by
torch.distributed.pipelining, stages alone, beside ours without recomputation, in turns."""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import tempfile
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Bound, finish, median, parser

from blockwalk.cutting.verify import certified
from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.closed_form.test_stages import gathers, random_plan, walk_on_paper
from tests.models import random_batch, tiny_model
from tests.ranks.test_stages import CLIPPED, KINDS, made, make
from tests.support.held import masters
from tests.support.processes import run_ranks

ENDS_WITHIN = 30.0
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 2048,
}
MICRO_BATCHES = 8
TOKENS = 256


# ---- exact -----------------------------------------------------------------------------------


def of_cases(rank: int, stages: int, cases: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    answers = []
    for kind, chunks, count in cases:
        chunks = chunks if stages > 1 else 1
        with made(kind, stages, chunks, count, CLIPPED) as walker:
            answer: dict[str, Any] = {"gradients": walker.gradients(random_batch(2 * count, 10))}
            if kind in ("llama", "mixtral") and count == 4:
                losses = [
                    walker.step(random_batch(2 * count, 10, seed=seed)).loss for seed in range(20)
                ]
                answer |= {"losses": losses, "masters": masters(walker)}
            answers.append(answer)
    return answers


def exact(figures: dict[str, Any]) -> list[Bound]:
    counts = (1, 3, 4, 8)
    two = [(kind, chunks, count) for kind, chunks, count in product(KINDS, (1, 2), counts)]
    four = [(kind, 1, count) for kind, count in product(KINDS, counts)]
    four += [("llama", 2, count) for count in counts]
    cases = {2: two, 4: four}
    for kind in KINDS:
        certified(make(kind))
    single: dict[tuple[str, int], dict[str, Any]] = {}
    for kind, _, count in dict.fromkeys((k, 1, c) for k, _, c in two):
        (single[kind, count],) = of_cases(0, 1, [(kind, 1, count)])
    unlike = 0
    worst = 0.0
    steps_unlike = 0
    for stages, of_stages in cases.items():
        for rank in run_ranks(stages, of_cases, stages, of_stages, timeout=1200):
            for (kind, _, count), answer in zip(of_stages, rank, strict=True):
                reference = single[kind, count]
                for name, value in reference["gradients"].items():
                    found = answer["gradients"][name]
                    if KINDS[kind].get("tied"):
                        worst = max(worst, float((found - value).norm() / value.norm()))
                    else:
                        unlike += not torch.equal(found, value)
                if "losses" in reference:
                    steps_unlike += answer["losses"] != reference["losses"] or any(
                        not torch.equal(answer["masters"][name], value)
                        for name, value in reference["masters"].items()
                    )
    total = sum(map(len, cases.values()))
    print(f"exact: {total} combinations, {unlike} gradients with other bits, tied {worst:.1e}")
    figures["exact"] = {"combinations": total, "unlike": unlike, "tied": worst}
    return [
        Bound(f"gradients with other bits than one process's, {total} combinations", unlike, 0),
        Bound("tied ends: the worst gradient's difference, of its norm", worst, 1e-6),
        Bound("20 steps of AdamW with clipping: runs with other bits", steps_unlike, 0),
    ]


# ---- on paper --------------------------------------------------------------------------------


def paper(figures: dict[str, Any], programs: int) -> list[Bound]:
    began = time.perf_counter()
    broken = 0
    for seed in range(programs):
        try:
            walk_on_paper(1000 + seed)
        except AssertionError as error:
            broken += 1
            print(f"seed {1000 + seed}: {str(error)[:200]}", flush=True)
    seconds = time.perf_counter() - began
    print(f"paper: {programs} random plans in {seconds:.0f} s, {broken} broken")
    figures["paper"] = {"plans": programs, "broken": broken, "seconds": seconds}
    return [Bound(f"random plans of {programs} that wait, leak or idle more", broken, 0)]


def of_gathers(figures: dict[str, Any]) -> list[Bound]:
    bounds = []
    for chunks in (1, 2):
        count, _ = gathers(2, chunks, reuse=True)
        without, _ = gathers(2, chunks, reuse=False)
        figures[f"gathers, {chunks} chunks"] = {"with": count, "without": without}
        print(f"gathers with {chunks} chunks a stage: {count} of {without}")
        name = f"gathers with reuse ÷ without, 2 stages × {chunks} chunks, 8 micro-batches"
        bounds.append(Bound(name, count / without, 0.55))
    return bounds


# ---- on four ranks ---------------------------------------------------------------------------


def of_plans(rank: int, seeds: list[int], stages: bool) -> list[float]:
    """The losses of two steps under random plans, over stages or over as many ranks as one has."""
    losses = []
    for seed in seeds:
        plan, blocks = random_plan(random.Random(seed))
        mesh = plan.mesh
        count = plan.gradient_accumulation_steps
        model = tiny_model("llama", num_hidden_layers=mesh.pipeline * plan.pipeline.chunks * blocks)
        sizes = {
            "world": dist.get_world_size(),
            "ranks_per_node": dist.get_world_size(),
            "pipeline": mesh.pipeline if stages else 1,
        }
        settings: dict[str, Any] = {
            "gradient_accumulation_steps": count,
            "prefetch": plan.prefetch,
            "together": plan.together,
            "activation": str(plan.activation.tier),
            "recompute": plan.recompute,
            **CLIPPED,
        }
        if stages:
            settings["pipeline.chunks"] = plan.pipeline.chunks
            settings["pipeline.reuse"] = plan.pipeline.reuse
        with Walker(model, method(plan.method, mesh=sizes, **settings), device="cpu") as walker:
            for step in range(2):
                losses.append(walker.step(random_batch(2 * count, 8, seed=step)).loss)
    return losses


def of_random_runs(figures: dict[str, Any], runs: int) -> list[Bound]:
    fits: list[int] = []
    seed = 0
    while len(fits) < runs:
        plan, _ = random_plan(random.Random(seed))
        fits += [seed] * (plan.mesh.world == 4)
        seed += 1
    certified(tiny_model("llama"))
    worst = 0.0
    for stages in (2, 4):
        seeds = [s for s in fits if random_plan(random.Random(s))[0].mesh.pipeline == stages]
        if not seeds:
            continue
        over = run_ranks(4, of_plans, seeds, True, timeout=900)[0]
        alone = run_ranks(4 // stages, of_plans, seeds, False, timeout=900)[0]
        worst = max([worst, *(abs(a / b - 1) for a, b in zip(over, alone, strict=True))])
    print(f"random: {len(fits)} plans on four ranks ended; losses differ by {worst:.1e}")
    figures["random"] = {"plans": len(fits), "worst": worst}
    return [Bound(f"{len(fits)} random plans on 4 ranks: worst difference of a loss", worst, 1e-6)]


# ---- a stage that dies -----------------------------------------------------------------------


def until_it_ends(rank: int, folder: Path, fault: str, victim: int, after: float) -> None:
    said = os.open(folder / f"said-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(said, 2)
    with made("llama", 2, 2, 4, CLIPPED) as walker:
        for step in range(2):
            walker.step(random_batch(8, 10, seed=step))
        walker.save_state(folder / "saved")

        def harm() -> None:
            time.sleep(after)
            (folder / "began").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)

        if rank == victim:
            threading.Thread(target=harm, daemon=True).start()
        try:
            for step in range(2, 1_000_000):
                walker.step(random_batch(8, 10, seed=step % 5))
        except RuntimeError as error:
            print(f"rank {rank}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            os._exit(1)


def resumed(rank: int, folder: Path) -> float:
    with made("llama", 2, 2, 4, CLIPPED) as walker:
        walker.load_state(folder)
        return walker.step(random_batch(8, 10, seed=2)).loss


def uninterrupted(rank: int) -> float:
    with made("llama", 2, 2, 4, CLIPPED) as walker:
        for step in range(3):
            result = walker.step(random_batch(8, 10, seed=step))
        return result.loss


def of_kills(figures: dict[str, Any], deaths: int) -> list[Bound]:
    certified(make("llama"))
    expected = run_ranks(2, uninterrupted)[0]
    rng = random.Random(1)
    seconds: dict[str, list[float]] = {"killed": [], "stopped": []}
    same = silent = 0
    for number in range(deaths):
        fault = "stopped" if number % 10 == 9 else "killed"
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            given = (folder, fault, number % 2, rng.uniform(0.05, 1.5))
            run_ranks(2, until_it_ends, *given, timeout=120, may_die=True)
            seconds[fault].append(time.time() - float((folder / "began").read_text()))
            other = (folder / f"said-{1 - number % 2}").read_text()
            silent += f"rank {number % 2}" not in other
            if number == 0 or fault == "stopped":
                print(f"{fault}: {other.strip().splitlines()[-1:]}", flush=True)
            same += run_ranks(2, resumed, folder / "saved")[0] == expected
    for fault, ended in seconds.items():
        if ended:
            print(
                f"{fault}: {len(ended)} runs, ended after {median(ended):.1f} s, {max(ended):.1f}"
            )
    figures["kills"] = {**seconds, "same": same}
    return [
        Bound(
            "seconds until the other stage has ended, worst",
            max([*seconds["killed"], *seconds["stopped"]]),
            ENDS_WITHIN,
        ),
        Bound("runs that ended without a line that names a rank", silent, 0),
        Bound("runs that went on with the same bits", same, deaths, at_most=False),
    ]


# ---- torch's own pipelines -------------------------------------------------------------------


def of_peer(rank: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of ours and of torch's, in turns; two stages of one rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    model: Any = tiny_model("llama", **SIZES)
    half = SIZES["num_hidden_layers"] // 2
    parts = copy.deepcopy(model)

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = parts.model
            self.embed = inner.embed_tokens if rank == 0 else None
            self.layers = inner.layers[:half] if rank == 0 else inner.layers[half:]
            self.rotary = inner.rotary_emb
            self.norm = inner.norm if rank else None
            self.head = parts.lm_head if rank else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = x if self.embed is None else self.embed(x)
            places = torch.arange(hidden.shape[1])[None]
            rope = self.rotary(hidden, places)
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=rope, attention_mask=None)
            if self.head is None or self.norm is None:
                return hidden
            answer: torch.Tensor = self.head(self.norm(hidden))
            return answer

    ours = method(
        "zero3",
        mesh={"world": 2, "ranks_per_node": 2, "pipeline": 2},
        gradient_accumulation_steps=MICRO_BATCHES,
        recompute="none",
        pipeline={"blocks": [half, half]},
        optimizer={"name": "sgd", "learning_rate": 1e-3},
    )
    ids = torch.randint(
        3, SIZES["vocab_size"], (MICRO_BATCHES, TOKENS), generator=torch.Generator().manual_seed(1)
    )
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    module = Half()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss)
    seconds: dict[str, list[float]] = {"ours": [], "torch": []}
    with Walker(model, ours, device="cpu") as walker:
        for turn in range(rounds + 1):
            dist.barrier()
            began = time.perf_counter()
            walker.step(batch)
            dist.barrier()
            middle = time.perf_counter()
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(ids)
            else:
                schedule.step(target=ids)
            optimizer.step()
            dist.barrier()
            if turn:  # the first of each makes its buffers
                seconds["ours"].append(middle - began)
                seconds["torch"].append(time.perf_counter() - middle)
    return seconds


def peer(figures: dict[str, Any]) -> list[Bound]:
    certified(tiny_model("llama", **SIZES))
    seconds = run_ranks(2, of_peer, 5, timeout=900)[0]
    ratio = median(seconds["ours"]) / median(seconds["torch"])
    print(f"peer: ours {median(seconds['ours']):.3f} s, torch {median(seconds['torch']):.3f} s")
    figures["peer"] = seconds
    rests = "stages of one rank each, without FSDP2; no recomputation; SGD"
    return [Bound("a step ÷ torch.distributed.pipelining's, 2 stages", ratio, 1.05, rests=rests)]


PARTS = ("exact", "paper", "gathers", "random", "kills", "peer")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--programs", type=int, default=2000)
    options.add_argument("--runs", type=int, default=20)
    options.add_argument("--deaths", type=int, default=50)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    bounds: list[Bound] = []
    for part in arguments.part:
        match part:
            case "exact":
                bounds += exact(figures)
            case "paper":
                bounds += paper(figures, arguments.programs)
            case "gathers":
                bounds += of_gathers(figures)
            case "random":
                bounds += of_random_runs(figures, arguments.runs)
            case "kills":
                bounds += of_kills(figures, arguments.deaths)
            case "peer":
                bounds += peer(figures)
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()
