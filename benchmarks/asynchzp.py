"""AsyncHZP's tables 1 to 5 by compiled programs: a plan for each row, a program for each stage,
played by the simulator.

Tokens of a step are the paper's 16M at 256 cards: 512 rows of 32K tokens, so 16 micro-batches for
each group of ranks that shares a row without a pipeline, and 64 with four stages. What the paper
does not say is stated where it is assumed, and printed."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.published import ENDS, balanced, line, rows, useful_flops

from blockwalk.plan.mesh import PIPELINE
from blockwalk.plan.methods import method
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.plan import Plan
from blockwalk.plan.work import NOTHING, Work
from blockwalk.program.compile import compile
from blockwalk.program.costs import Costs
from blockwalk.program.program import OpKind, Pool, Program, Shape, StepKind
from blockwalk.simulate import hardware
from blockwalk.simulate.hardware import Hardware
from blockwalk.simulate.planner import steady
from blockwalk.simulate.simulator import simulate
from blockwalk.walk.unit_costs import UnitCosts

TOKENS = 16 << 20
"""Tokens of a step on 256 cards."""

CARDS = 256
"""Cards of the tables, unless they say otherwise."""

MODELS: dict[str, dict[str, Any]] = {
    "Seed-OSS-9B": {"model_type": "seed_oss", "num_hidden_layers": 40, "hidden_size": 3072,
                    "intermediate_size": 16640, "num_attention_heads": 48},
    "Seed-OSS-36B": {"model_type": "seed_oss", "num_hidden_layers": 64, "hidden_size": 5120,
                     "intermediate_size": 27648, "num_attention_heads": 80},
}  # fmt: skip
"""Dimensions. The 36B's are its own configuration's. The paper has the others in no detail. The 9B
is taken for the 36B made smaller: queries twice as wide as the model, a feed-forward part of 5.4
times its width, a block for every 77 to 80 of it. Of the mixture of experts the paper prints no
dimensions: none are chosen, and its rows are not predicted."""

SHARED = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 155136, "dtype": "bfloat16",
          "attention_dropout": 0.0, "residual_dropout": 0.0, "attention_out_bias": False,
          "tie_word_embeddings": False}  # fmt: skip


THREADS = "threads"
"""Collectives are started by threads of their own, a block ahead: AsyncHZP's scheduling."""

ONE_THREAD = "one thread"
"""They are started by the thread that computes, still a block ahead: how we read the paper's rows
without its scheduling. Over eight cards a parameter the node's link is busy for most of a step, and
the paper loses 0.4%."""

IN_TURN = "in turn"
"""A block is gathered when it is its turn, not ahead."""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of the paper."""

    model: str
    strategy: str
    sequence: int = 32768
    cards: int = CARDS
    tokens: int = TOKENS
    scheduling: str = THREADS

    @property
    def sizes(self) -> Counter[str]:
        """The sizes in the paper's word for the strategy: Z1, Z2, Z3, CP, PP; 0 where it has
        none."""
        sizes: Counter[str] = Counter()
        for word in self.strategy.split():
            *names, size = word.split("=")
            sizes.update({name: int(size) for name in names})
        return sizes

    @property
    def stages(self) -> int:
        return self.sizes["PP"] or 1

    @property
    def context(self) -> int:
        return self.sizes["CP"] or 1

    @property
    def tensor(self) -> int:
        """Ranks that each product is cut over; only in :data:`TENSOR_PARALLEL`."""
        return self.sizes["TP"] or 1

    @property
    def micro_batches(self) -> int:
        """One row each, of every group of ranks that shares it."""
        groups = self.cards // self.stages // self.context // self.tensor
        return self.tokens // self.sequence // groups

    @property
    def shape(self) -> Shape:
        """A rank's part of a micro-batch."""
        return Shape(1, self.sequence // self.context)

    def settings(self) -> dict[str, Any]:
        """Return the plan's settings, as a run's YAML has them. A node is two meshes of eight."""
        z1 = self.sizes["Z1"]
        stage = self.cards // self.stages
        mesh: dict[str, Any] = {"world": self.cards, "ranks_per_node": 16, "groups": ["eight=8"]}
        states = "world"
        if z1 < stage:
            mesh["groups"] = ["eight=8", f"states={z1}"]
            states = "states"
        settings: dict[str, Any] = {"mesh": mesh}
        if self.context > 1:
            mesh["context"] = self.context
            settings["context"] = {"way": "keys"}
        if self.stages > 1:
            mesh["pipeline"] = self.stages
            settings["pipeline"] = {"chunks": CHUNKS}
        return settings | {
            "trainable": "device × raw × eight",
            "frozen": "device × raw × eight",
            "gradient": "device × fp32 × eight",
            "optimizer_state": f"device × fp32 × {states}",
            "gradient_accumulation_steps": self.micro_batches,
            "prefetch": int(self.scheduling != IN_TURN),
        }


CHUNKS = 4
"""Virtual stages of a stage: the paper has several, and does not say how many."""

PP4 = "Z1=64 Z2=Z3=8 PP=4 CP=8"
ALONE = "Z1=256 Z2=Z3=8 CP=8"
CASES = {
    "2: 9B": Case("Seed-OSS-9B", "Z1=64 Z2=Z3=8 CP=8"),
    "2: 36B": Case("Seed-OSS-36B", PP4),
    "3: PP=8": Case("Seed-OSS-36B", "Z1=64 Z2=Z3=8 PP=8", 8192, 512),
    "3: PP=8, one thread": Case(
        "Seed-OSS-36B", "Z1=64 Z2=Z3=8 PP=8", 8192, 512, scheduling=ONE_THREAD
    ),
    "3: PP=8, in turn": Case("Seed-OSS-36B", "Z1=64 Z2=Z3=8 PP=8", 8192, 512, scheduling=IN_TURN),
    "3: CP=8, one thread": Case("Seed-OSS-36B", ALONE, 8192, scheduling=ONE_THREAD),
    "3: CP=8, in turn": Case("Seed-OSS-36B", ALONE, 8192, scheduling=IN_TURN),
    "4: 8K": Case("Seed-OSS-36B", ALONE, 8192),
    "4: 128K": Case("Seed-OSS-36B", PP4, 131072),
    "5: 512 cards, 32M tokens": Case("Seed-OSS-36B", PP4, cards=512, tokens=2 * TOKENS),
    "5: 1,024 cards, 64M tokens": Case("Seed-OSS-36B", PP4, cards=1024, tokens=4 * TOKENS),
    "5: 512 cards, 16M tokens": Case("Seed-OSS-36B", PP4, cards=512),
    "5: 1,024 cards, 16M tokens": Case("Seed-OSS-36B", PP4, cards=1024),
}
"""The rows, by table. Those without asynchronous scheduling are played in both ways, by one thread
beside the published figures. Assumed: 512 cards for eight stages, the fewest that hold Z1 = 64
ranks in each; of table 5 both as many tokens a card as at 256, and as many in all."""

FITTED = "4: 128K"
"""The row whose MFU the rate of attention is fitted on: the one that spends most of its time there.
The rate of products is that of the description as it ships, 70% of the peak."""

TENSOR_PARALLEL = {
    "2: 9B": Case("Seed-OSS-9B", "TP=8"),
    "2: 36B": Case("Seed-OSS-36B", "TP=8 PP=4"),
    "4: 8K": Case("Seed-OSS-36B", "TP=8", 8192),
    "4: 128K": Case("Seed-OSS-36B", "TP=8 PP=4 CP=8", 131072),
}
"""The rows of tensor parallelism beside those of :data:`CASES`. No program here has it: their MFU
is priced by a published formula (:func:`priced`), and marked so."""

DEVICE_BYTES = 64 * 10**9
"""Bytes of a card."""

RECOMPUTING = {"recompute": "auto", "budget": DEVICE_BYTES}
"""As many blocks keep their activations as the card's memory allows: the paper recomputes as
needed, and says no more."""


@functools.cache
def measured(model: str, sequence: int) -> UnitCosts:
    """The costs of a model of these dimensions, without a weight."""
    from transformers import AutoConfig

    settings = {**SHARED, **MODELS[model], "max_position_embeddings": sequence}
    return UnitCosts(AutoConfig.for_model(**settings), device="cuda")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A case's programs, and what they are played with."""

    case: Case
    plan: Plan
    model: ModelSpec
    costs: Costs
    programs: tuple[Program, ...]

    @property
    def gigabytes(self) -> float:
        """GB of the fullest stage."""
        return max(program.peaks()[Pool.DEVICE] for program in self.programs) / 1e9

    def mfu(self, machine: Hardware) -> float:
        """Useful FLOPs of a card as a share of what the machine's promise."""
        simulation = simulate(self.programs, self.plan, self.model, machine, self.costs)
        of_row = useful_flops(self.costs, (unit.kind for unit in self.model.units))
        useful = of_row * self.case.micro_batches / self.case.stages
        seconds = simulation.seconds + self.starts * machine.op_seconds
        return useful / (seconds * simulation.peak_flops)

    @property
    def starts(self) -> int:
        """Collectives of a stage that the thread which computes must start."""
        if self.case.scheduling != ONE_THREAD:
            return 0
        return max(
            sum(bool(op.axes and op.nbytes) for op in program.ops) for program in self.programs
        )

    @property
    def recomputed(self) -> float:
        """Share of the first stage's backwards that recompute their block."""
        backwards = [op for op in self.programs[0].ops if op.kind is OpKind.BACKWARD]
        return sum(not op.keep_graph for op in backwards) / len(backwards)

    def line(self) -> str:
        """Return what was compiled, in words."""
        case = self.case
        parameters = self.model.numel() / 1e9
        return (
            f"{case.model} ({parameters:.1f}B), {case.strategy}, {case.sequence} tokens,"
            f" {case.cards} cards: {case.micro_batches} micro-batches,"
            f" {self.recomputed:.0%} recomputed"
        )


@functools.cache
def compiled(case: Case) -> Compiled:
    """Return a program for each stage. As little is recomputed as the card's memory allows."""
    units = measured(case.model, case.sequence)
    model = units.spec()
    plan = method("hzp", **case.settings(), **RECOMPUTING)
    costs = balanced(units(plan, case.shape), case.context)
    programs = tuple(
        compile(
            plan,
            model,
            StepKind.TRAIN,
            case.shape,
            costs=costs,
            pending=steady(plan, model),
            device="cuda",
            coordinates=((PIPELINE, stage),),
        )
        for stage in range(case.stages)
    )
    return Compiled(case, plan, model, costs, programs)


def fitted(machine: Hardware, case: Compiled, published: float) -> Hardware:
    """Return the machine with the rate of attention at which a case has its published MFU."""
    low = 0.05 * machine.peak_of("bfloat16")
    high = machine.peak_of("bfloat16")
    for _ in range(8):
        middle = (low * high) ** 0.5
        is_slow = case.mfu(with_rate(machine, "attention", middle)) < published
        low, high = (middle, high) if is_slow else (low, middle)
    return with_rate(machine, "attention", (low * high) ** 0.5)


def with_rate(machine: Hardware, name: str, rate: float) -> Hardware:
    """Return the machine with another rate of 16-bit products or attention, FLOP/s."""
    rates = {**getattr(machine, name), "bfloat16": rate}
    changes: dict[str, Any] = {name: rates}
    return dataclasses.replace(machine, **changes)


def machine_seconds(work: Work, machine: Hardware) -> float:
    """Return seconds of 16-bit operations of one card."""
    flops = work.products / machine.flops_of("bfloat16")
    flops += work.attention / machine.attention["bfloat16"]
    return flops + work.touched / machine.memory_bandwidth


def priced(case: Case, machine: Hardware, recomputed: float) -> float:
    """Return the MFU of a row of tensor parallelism, by Megatron-LM's formulas.

    A block has two all-reduces of its hidden states in the forward and two in the backward (Shoeybi
    et al. 2019, section 3), each a ring's, 2 (t - 1) / t of its bytes, and none hidden. Stages are
    idle for (p - 1) / (m v) of the step (Narayanan et al. 2021, section 2.2). The
    share of blocks that is recomputed is that of the row beside it."""
    units = measured(case.model, case.sequence)
    model = units.spec()
    ranks = case.tensor
    plan = method("zero3", mesh={"world": ranks, "ranks_per_node": ranks})
    costs = balanced(units(plan, case.shape), case.context)
    work = NOTHING
    again: list[float] = []
    for unit in model.units:
        cost = costs.of(unit.kind)
        if unit.kind in ENDS:
            work = work + cost.forward * 3
            continue
        work = work + cost.forward + cost.backward
        again.append(machine_seconds(cost.forward, machine))
    computing = machine_seconds(work, machine) + recomputed * sum(again)
    all_reduce = 2 * (ranks - 1) / ranks * case.shape.tokens * model.hidden_size * 2
    sums = 4 * len(model.blocks) * machine.intra.seconds(all_reduce)
    of_stage = (computing / ranks + sums) / case.stages
    idle = (case.stages - 1) / (case.micro_batches * (CHUNKS if case.stages > 1 else 1))
    seconds = of_stage * (1 + idle)
    useful = useful_flops(costs, (unit.kind for unit in model.units)) / ranks / case.stages
    return useful / (seconds * machine.peak_of("bfloat16"))


# ---- table 1: bytes of states --------------------------------------------------------------------

STATES = 16
"""Ranks of the programs whose bytes are compared: one node."""


def static_bytes(z1: int, z2: int, z3: int, rule: str) -> int:
    """Return bytes that a rank holds on its device between steps, in a program of the 9B."""
    units = measured("Seed-OSS-9B", 1024)
    model = units.spec()
    sizes = sorted({z1, z2, z3} - {STATES})

    def over(size: int) -> str:
        return "world" if size == STATES else f"g{size}"

    plan = method(
        "hzp",
        mesh={
            "world": STATES,
            "ranks_per_node": STATES,
            "groups": [f"{over(size)}={size}" for size in sizes],
        },
        trainable=f"device × raw × {over(z3)}",
        frozen=f"device × raw × {over(z3)}",
        gradient=f"device × fp32 × {over(z2)}",
        optimizer_state=f"device × fp32 × {over(z1)}",
        gradient_accumulation_steps=2,
        optimizer={"name": rule},
    )
    shape = Shape(1, 64)
    program = compile(
        plan,
        model,
        StepKind.TRAIN,
        shape,
        costs=units(plan, shape),
        pending=steady(plan, model),
        device="cuda",
    )
    return dict(program.static)[Pool.DEVICE]


def state_table() -> Iterator[dict[str, Any]]:
    """Yield table 1: bytes a parameter, each from two programs that differ in one group's size."""
    print("AsyncHZP table 1: bytes a parameter, by programs that differ in one of Z1, Z2, Z3")
    numel = measured("Seed-OSS-9B", 1024).spec().numel()

    def bytes_a_parameter(fewer: int, more: int, ranks: int) -> float:
        """Return what a state takes, by bytes of a rank where so many, and twice as many, hold
        it."""
        return (fewer - more) / numel * 2 * ranks

    moments = {
        rule: bytes_a_parameter(
            static_bytes(STATES // 2, 8, 8, rule), static_bytes(STATES, 8, 8, rule), STATES // 2
        )
        for rule in ("adamw", "sgd")
    }
    moment = (moments["adamw"] - moments["sgd"]) / 2
    predicted = {
        "parameters": bytes_a_parameter(
            static_bytes(STATES, 8, 4, "adamw"), static_bytes(STATES, 8, 8, "adamw"), 4
        ),
        "gradients": bytes_a_parameter(
            static_bytes(STATES, 4, 4, "adamw"), static_bytes(STATES, 8, 4, "adamw"), 4
        ),
        "parameter_replica": moments["sgd"],
        "adam_momentum": moment,
        "adam_variance": moment,
    }
    for row in rows("asynchzp_table1_state_bytes"):
        component = row["component"]
        yield line(component, predicted[component], float(row["bytes_per_param"]), "bytes")


def asynchzp_tables() -> Iterator[dict[str, Any]]:
    """Yield tables 2 to 5: each row of Z1, Z2 and Z3 by programs, and the MFU of tensor parallelism
    by a published formula."""
    print("AsyncHZP tables 2 to 5: a program for each stage, 16M tokens a step at 256 cards")
    published = {name: next(of_paper(case), {}) for name, case in CASES.items()}
    machine = fitted(
        hardware.load("asynchzp-64gb"), compiled(CASES[FITTED]), published[FITTED]["mfu"]
    )
    peak = machine.peak_of("bfloat16")
    share = machine.flops_of("bfloat16") / peak
    print(f"  products as the description ships, not fitted: {share:.0%} of the peak")
    rate = machine.attention["bfloat16"]
    yield line(f"attention, fitted on table {FITTED}", rate, None, "FLOP/s")
    print(f"    {rate / peak:.0%} of the peak")
    mfu: dict[str, float] = {}
    for name, case in CASES.items():
        programs = compiled(case)
        mfu[name] = programs.mfu(machine)
        print(f"    {programs.line()}")
        row = published[name]
        if name == FITTED:
            print(f"      MFU {mfu[name]:.4f}, fitted; published {row['mfu']:.4f}")
        else:
            yield line(f"table {name}, MFU", mfu[name], row.get("mfu"), "")
        yield line(f"table {name}, memory", programs.gigabytes, row.get("memory"), "GB")
    (scaling,) = rows("asynchzp_table5")
    kept = mfu["5: 1,024 cards, 16M tokens"] / mfu["2: 36B"]
    words = "table 5, MFU kept from 256 to 1,024 cards, 16M tokens"
    yield line(words, kept, float(scaling["linearity"]), "")
    for name, case in TENSOR_PARALLEL.items():
        (row,) = of_paper(case)
        words = f"table {name}, TP={case.tensor}, MFU, priced by a formula"
        mfu_of_formula = priced(case, machine, compiled(CASES[name]).recomputed)
        yield line(words, mfu_of_formula, row["mfu"], "")
        print(f"      not predicted: its {row['memory']:.2f} GB, for which no formula is at hand")
    for row in rows("asynchzp_table2_moe"):
        print(
            f"  not predicted, dimensions not printed: {row['model']}, {row['strategy']}:"
            f" MFU {row['mfu']}, {row['memory_GB']} GB"
        )


def of_paper(case: Case) -> Iterator[dict[str, float]]:
    """Return the published MFU and memory (GB) of a case, where its row is at hand."""
    at_256 = case.cards == CARDS and case.sequence == 32768
    for row in rows("asynchzp_table2") if at_256 else ():
        if (row["model"], row["strategy"]) == (case.model, case.strategy):
            yield {"mfu": float(row["mfu"]), "memory": float(row["memory_GB"])}
    length = f"{case.sequence // 1024}K"
    for row in rows("asynchzp_table4") if case.scheduling == THREADS else ():
        if (row["context"], row["strategy"]) == (length, case.strategy):
            yield {"mfu": float(row["mfu_percent"]) / 100, "memory": float(row["memory_gb"])}
    for row in rows("asynchzp_table3") if length == "8K" else ():
        scheduling = THREADS if row["async_scheduling"] == "yes" else ONE_THREAD
        if (row["strategy"], scheduling) == (case.strategy, case.scheduling):
            yield {"mfu": float(row["mfu_percent"]) / 100}
