"""Runs of every row on a simulated accelerator in adversarial orders, and their outcome."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.tiers.block_store.store import BlockStore
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.simulated_device import Simulated

ORDERS = range(int(os.environ.get("BLOCKWALK_ORDERS", "4")))
"""``make sim`` takes 50."""


LORA = LoraSettings(rank=2, alpha=4)


ON_HOST = {"trainable": "host × fp32", "optimizer_state": "host × fp32", "recompute": "all"}


AT_TURN = {"update.timing": "block", "prefetch": 1}


CASES: dict[str, tuple[str, dict[str, Any], LoraSettings | None]] = {
    "plain": ("plain", {}, None),
    "plain, everything recomputed": (
        "plain",
        {"recompute": "all", "optimizer.max_grad_norm": 1.0},
        None,
    ),
    "plain, activations on the host": ("plain", {"recompute": "all", "activation": "host"}, LORA),
    "mebp": ("mebp", {"frozen": "disk × raw"}, LORA),
    "mebp int4 from the host": ("mebp", {"frozen": "host × int8", "activation": "host"}, LORA),
    "plain, masters on the host": ("plain", {**ON_HOST, "optimizer.max_grad_norm": 1.0}, None),
    "plain, masters on the host, at the block's turn": ("plain", {**ON_HOST, **AT_TURN}, None),
    "plain, bf16 masters on the host": (
        "plain",
        {**ON_HOST, **AT_TURN, "trainable": "host × bf16"},
        None,
    ),
    "plain, two micro-batches, masters on the host": (
        "plain",
        {**ON_HOST, **AT_TURN, "together": 2, "gradient_accumulation_steps": 2},
        None,
    ),
    "plain, states on the host": (
        "plain",
        {"optimizer_state": "host × fp32", "recompute": "all"},
        None,
    ),
    "plain, graphs kept, masters on the host": (
        "plain",
        {**ON_HOST, **AT_TURN, "recompute": "none"},
        None,
    ),
    "plain, everything on the host": (
        "plain",
        {**ON_HOST, "frozen": "host × raw", "activation": "host"},
        LORA,
    ),
    "mebp, all parameters": ("mebp", {"frozen": "disk × raw"}, None),
    "plain, states on disk": (
        "plain",
        {"optimizer_state": "disk × fp32", "recompute": "all"},
        None,
    ),
    "mezo": ("mezo", {}, None),
    "mezo, bf16 and momentum": (
        "mezo",
        {"trainable": "device × bf16", "optimizer.name": "momentum"},
        None,
    ),
    "zo2": ("zo2", {}, None),
    "zo2 fp8": ("zo2", {"trainable": "host × fp8", "gradient_accumulation_steps": 2}, None),
    "zo2 disk": ("zo2", {"trainable": "disk", "frozen": "disk", "update.flush_every": 2}, None),
    "zo2, two blocks stay": ("zo2", {"trainable": "host × bf16", "resident": 2}, None),
    "mebp, two blocks stay": (
        "mebp",
        {"frozen": "host × int8", "activation": "host", "resident": 2},
        LORA,
    ),
    "zero3": ("zero3", {}, None),
    "fcdp": ("fcdp", {"gradient_accumulation_steps": 2}, None),
    "hzp, states on the host": ("hzp", {"optimizer_state": "host × fp32"}, None),
}


UPDATED_ON_THE_HOST = {"hzp, states on the host": 6}
"""Rows whose optimizer runs on the processor: each unit's update waits for its gradient."""


Outcome = tuple[list[float], float, dict[str, torch.Tensor]]


def same(found: Outcome, expected: Outcome) -> bool:
    """Whether two runs have the same bits."""
    return (
        found[:2] == expected[:2]
        and found[2].keys() == expected[2].keys()
        and all(torch.equal(found[2][key], expected[2][key]) for key in expected[2])
    )


def run(
    name: str,
    folder: Path,
    device: str,
    orders: Iterable[int] = ORDERS,
    sim: Simulated | None = None,
) -> Outcome:
    """Losses of steps, each in another order of the device's; of an evaluation; and the state
    afterwards. In a step after the first the thread that issues it waits for the device twice at
    most."""
    row, settings, lora = CASES[name]
    model = tiny_model("llama" if lora else "opt", dropout=0.0, num_hidden_layers=4)
    model.save_pretrained(folder / "model")
    losses: list[float] = []
    with Walker(
        folder / "model", method(row, **settings), lora=lora, workdir=folder, device=device
    ) as walker:
        for step, seed in enumerate(orders):
            if sim is not None:
                sim.order(seed)
                sim.start_counting()
            losses.append(walker.step(random_batch(seed=step)).loss)
            if sim is not None and step:
                waits = sim.counts()
                assert waits.here <= 2 + UPDATED_ON_THE_HOST.get(name, 0), waits
        evaluated = walker.evaluate(random_batch(seed=9)).loss
        if "disk" in str(settings.get("trainable")):
            walker.flush()
            store = BlockStore(next(folder.glob("weights-*")))
            state: dict[str, Any] = store.weights(store.names())
        else:
            state = walker.state_dict()
        return (
            losses,
            evaluated,
            {n: t.cpu().clone() for n, t in state.items() if isinstance(t, torch.Tensor)},
        )
