"""DistZO2's tables 2, 4 and 5 by the simulator: batches, cards and lengths.

A row is predicted for every size, whether a published one is at hand or not. Nothing is fitted on
these tables: products are as fast as MeZO's published OPT-6.7B on one card, of table 1. Draws take
as long as the published programs' (:func:`benchmarks.zeroth_order_runs.published_noise`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.published import line, number, rows
from benchmarks.zeroth_order_runs import (
    fitted,
    opt,
    published_noise,
    run,
    with_draws_of_published,
    with_positions,
    zo2_plans,
)

from blockwalk.plan.methods import method
from blockwalk.plan.plan import Plan
from blockwalk.program.program import Pool, Shape
from blockwalk.simulate import hardware
from blockwalk.simulate.hardware import Hardware
from blockwalk.simulate.simulator import Simulation

DTYPE = "float16"
SEQUENCE = 2048
BATCH = 4
"""Rows of all cards, and tokens of a row, unless a table says otherwise."""

SIZES = ("1.3B", "2.7B", "6.7B", "13B", "30B")


@dataclass(frozen=True, slots=True)
class Strategy:
    """A column of a table: which method, and how many cards share the forwards and the batch."""

    streams: bool
    perturb: int
    data: int

    @property
    def cards(self) -> int:
        """Cards in all."""
        return self.perturb * self.data

    def plan(self) -> Plan:
        """Return the plan; on one card it is the published MeZO or ZO2."""
        if self.cards == 1:
            return zo2_plans(DTYPE)["zo2" if self.streams else "mezo"]
        mesh = {
            "world": self.cards,
            "ranks_per_node": self.cards,
            "perturb": self.perturb,
            "data": self.data,
        }
        if self.streams:
            return method("distzo2", loss="model", mesh=mesh)
        noise = {} if self.perturb > 1 else {"zo": {"noise": "mezo"}}
        return method("mezo", loss="model", mesh=mesh, **noise)

    def machine(self, card: Hardware) -> Hardware:
        """Return a node of so many cards whose draws take as long as the published program's."""
        node = dataclasses.replace(card, devices_per_node=self.cards)
        both = self.perturb == 1
        if self.streams:
            return with_draws_of_published(node, both=both, ranks=self.cards)
        return node if both else with_draws_of_published(node, both=False)


def two_dimensional() -> Strategy:
    """Return two dimensions of two cards each. Which one is inside makes no difference on one node,
    whose links are alike."""
    return Strategy(True, 2, 2)


@functools.cache
def card() -> Hardware:
    """Return an H20 with products as fast as MeZO's published OPT-6.7B on one card, of table 1."""
    table = rows("distzo2_table1_h20_fp16_bs4_seq2048")
    target = next(float(row["mezo_tok_s"]) for row in table if row["model"] == "OPT-6.7B")
    machine = published_noise(hardware.load("h20-96gb-x4").without_host(), DTYPE)
    return fitted(machine, opt("6.7B", DTYPE), Shape(BATCH, SEQUENCE), target, fused=True)


def simulated(size: str, strategy: Strategy, batch: int, sequence: int) -> Simulation:
    """Return a step of so many rows of all cards."""
    config = with_positions(opt(size, DTYPE), sequence)
    shape = Shape(batch // strategy.data, sequence)
    return run(config, strategy.plan(), shape, strategy.machine(card()))


def cells(
    case: str,
    size: str,
    strategies: Mapping[str, Strategy],
    row: Mapping[str, str],
    *,
    batch: int = BATCH,
    sequence: int = SEQUENCE,
) -> Iterator[dict[str, Any]]:
    """Yield the speeds of a row, by the names of their columns."""
    for column, strategy in strategies.items():
        words = f"OPT-{size} {case} {column}"
        simulation = simulated(size, strategy, batch, sequence)
        if simulation.peaks[Pool.DEVICE] > card().device_bytes:
            print(f"  {words:<44} does not fit")
            continue
        speed = simulation.tokens_per_second
        yield line(f"{words} speed", speed, number(row, f"{column}_tok_s"), "tok/s")


def batch_table() -> Iterator[dict[str, Any]]:
    """Yield table 2: batches of 2 to 8 rows on two and four cards."""
    print("DistZO2 table 2: batches of rows of 2,048 tokens, of all cards; products as in table 1")
    strategies = {
        "mezo_pertp2": Strategy(False, 2, 1),
        "zo2_pertp2": Strategy(True, 2, 1),
        "mezo_ddp2": Strategy(False, 1, 2),
        "zo2_ddp2": Strategy(True, 1, 2),
        "zo2_ddp_inner_pertp_outer4": two_dimensional(),
        "zo2_pertp_inner_ddp_outer4": two_dimensional(),
    }
    published = {(row["model"], row["batch"]): row for row in rows("distzo2_table2_batch")}
    for batch in (2, 4, 6, 8):
        for size in SIZES:
            row = published.get((f"OPT-{size}", str(batch)), {})
            yield from cells(f"batch {batch}", size, strategies, row, batch=batch)


def card_table() -> Iterator[dict[str, Any]]:
    """Yield table 4: the batch over 1, 2 and 4 cards."""
    print("DistZO2 table 4: 4 × 2,048 tokens over 1, 2 and 4 cards; products as in table 1")
    table = rows("distzo2_table4_gpus_fp16_bs4")
    published = {(row["model"], row["gpus"]): row for row in table}
    for cards in (1, 2, 4):
        strategies = {
            "mezo_ddp": Strategy(False, 1, cards),
            "zo2_ddp": Strategy(True, 1, cards),
        }
        for size in SIZES:
            row = published.get((f"OPT-{size}", str(cards)), {})
            yield from cells(f"{cards} cards", size, strategies, row)


def length_table() -> Iterator[dict[str, Any]]:
    """Yield table 5: rows of 1,024 to 8,192 tokens on two and four cards."""
    print("DistZO2 table 5: 4 rows of so many tokens; products as in table 1")
    strategies = {
        "zo2_pertp2": Strategy(True, 2, 1),
        "mezo_ddp2": Strategy(False, 1, 2),
        "zo2_ddp2": Strategy(True, 1, 2),
        "zo2_ddp_inner_pertp_outer4": two_dimensional(),
        "zo2_pertp_inner_ddp_outer4": two_dimensional(),
    }
    published = {(row["model"], row["seq"]): row for row in rows("distzo2_table5_seqlen")}
    for length in (1024, 2048, 4096, 8192):
        for size in SIZES:
            row = published.get((f"OPT-{size}", str(length)), {})
            yield from cells(f"seq {length}", size, strategies, row, sequence=length)
