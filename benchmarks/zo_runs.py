"""Zeroth-order runs that the benchmarks compare: the naive loop, ``mezo``, ``zo2``, and ``zo2``
with one idea taken out.

The ablations are those of Wang et al., "ZO2" (2025), table 3: no overlap of transfers with compute,
no reusable memory, no update while a block is on the device anyway; and one of our own, no
transfers at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import model_config, random_batch

from blockwalk import Walker, method
from blockwalk.engine.slots import PAGE
from blockwalk.reference.mezo import mezo_step

ABLATIONS: dict[str, dict[str, Any]] = {
    "zo2": {},
    "zo2, no overlap": {"prefetch": 0},
    "zo2, no reusable slots": {},
    "zo2, no deferred update": {"update": {"timing": "step"}},
    "zo2, nothing moved": {},
}
"""Settings on top of the row's; slots that are not reused, and blocks that do not move, are no
settings: see :func:`fresh_slots` and :func:`nothing_moved`."""

NAIVE = "naive MeZO"
MEZO = "mezo"
HOST = "zo2 on the host"


def fresh_slots(walker: Walker) -> None:
    """Give every fetch a new buffer instead of a slot that is there, as an implementation without
    slots would."""
    buckets = walker.engine.trained
    reused = buckets.fetch

    def fetch(unit: int, slot: int) -> None:
        if (
            buckets.device.type != "cpu"
        ):  # what cudaFree does: wait for the device, then give the memory back
            torch.accelerator.synchronize(buckets.device)
        nbytes = len(buckets.slots._buffers[slot])
        buckets.slots._buffers[slot] = torch.empty(0, dtype=torch.uint8)
        if buckets.device.type != "cpu":
            torch.accelerator.empty_cache()
        whole_P = torch.empty(nbytes + PAGE, dtype=torch.uint8, device=buckets.device)
        start = -whole_P.data_ptr() % PAGE
        buckets.slots._buffers[slot] = whole_P[start : start + nbytes]
        reused(unit, slot)

    buckets.fetch = fetch  # type: ignore[method-assign]


def nothing_moved(walker: Walker) -> None:
    """Leave out a disk tier's writes, and its reads from the third step on, all else as it is. A
    slot then holds the block that was in it last, so losses mean nothing: this is to be timed
    only."""
    tier: Any = walker.engine.trained.tier
    read_unit = tier.read_unit
    stored = tier.step
    written = dict[int, int]()
    tier.read_unit = lambda unit, out_P: (
        written[unit] if unit in written else read_unit(unit, out_P)
    )
    tier.write_unit = lambda unit, data_P, step: written.update({unit: step})
    tier.step = lambda unit: written.get(unit, stored(unit))


def open_walker(case: str, store: Path, tier: str, device: str, **settings: Any) -> Walker:
    """A walker of one case: :data:`MEZO`, :data:`HOST`, or a row of :data:`ABLATIONS` with its
    weights on ``tier``."""
    if case == MEZO:
        plan = method("mezo", **{key: value for key, value in settings.items() if key != "update"})
        return Walker(store, plan, device=device)
    if case == HOST:
        case = "zo2"
        tier = "host"
    merged = {**settings, **ABLATIONS[case]}
    walker = Walker(store, method("zo2", frozen=tier, trainable=tier, **merged), device=device)
    if case == "zo2, no reusable slots":
        fresh_slots(walker)
    elif case == "zo2, nothing moved":
        nothing_moved(walker)
    return walker


def stepper(walker: Walker, batch: int, sequence: int) -> Callable[[], float]:
    """Seconds of one step on the next random batch, all of its work done."""
    vocab = walker.spec.vocab_size
    count = iter(range(1 << 30))

    def step() -> float:
        data = random_batch(vocab, batch, sequence, seed=next(count))
        wait(walker.device)
        began = time.perf_counter()
        walker.step(data)
        wait(walker.device)
        return time.perf_counter() - began

    return step


def naive_model(name: str, dtype: str, device: str) -> torch.nn.Module:
    """The model whole on the device, with random weights."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(model_config(name, dtype))
    return model.eval()


def naive_stepper(
    model: torch.nn.Module, batch: int, sequence: int, *, learning_rate: float = 1e-6
) -> Callable[[], float]:
    """Seconds of one step of the original's lines: four passes of ``torch.normal`` over all
    parameters, two forwards."""
    count = iter(range(1 << 30))
    device = next(model.parameters()).device
    vocab = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]

    def step() -> float:
        seed = next(count)
        data = {
            key: value.to(device)
            for key, value in random_batch(vocab, batch, sequence, seed=seed).items()
        }
        wait(device)
        began = time.perf_counter()
        mezo_step(model, data, learning_rate=learning_rate, seed=seed)
        wait(device)
        return time.perf_counter() - began

    return step


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
