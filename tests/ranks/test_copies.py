"""Oracle: the bit that was flipped, on the rank and in the unit where it was; a run in which none
was; numpy's integers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from blockwalk.cutting.verify import certified
from blockwalk.engine.buckets import word_sum
from blockwalk.plan.methods import method
from blockwalk.plan.placement import StateKind
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.processes import run_ranks

LORA = {"rank": 2, "target_modules": ("q_proj",)}


def flipped(walker: Walker, state: str) -> None:
    """Flip two bits, of opposite sign where they are counted, in one kind of the state of the
    second block."""
    engine: Any = walker.engine
    masters = engine.trained.units[2]
    frozen = engine.homes[StateKind.FROZEN].units[2]
    kept = {**masters.kept, "frozen": frozen.node if frozen.node is not None else frozen.source}
    words_N = kept[state].view(torch.int32)
    words_N[5] ^= 1 << 3
    words_N[-7] ^= 1 << 3
    if state != "frozen":  # the ranks' programs stay alike: none refreshes what the others do not
        estimator: Any = walker.estimator
        estimator.updates.masters_changed()


def _spoilt(rank: int, name: str, changes: dict[str, Any], state: str, folder: Path) -> list[str]:
    """What this rank says at its second step, whose number is a multiple of ``mesh.check_every``;
    after it; and of a folder to save to."""
    said = []
    lora = LORA if state == "frozen" else None

    def told(work: Callable[[], object]) -> str:
        try:
            work()
        except RuntimeError as error:
            return str(error)
        return "nothing noticed"

    for check_every, spoils in ((2, True), (100, True), (1, False)):
        mesh = {"world": 4, "ranks_per_node": 2, "check_every": check_every}
        walker = Walker(
            tiny_model("llama"), method(name, mesh=mesh, **changes), lora=lora, device="cpu"
        )
        walker.step(random_batch(8))
        if rank == 3 and spoils:
            flipped(walker, state)
        said.append(told(lambda: walker.step(random_batch(8, seed=1))))  # noqa: B023
        said.append(told(lambda: walker.save_state(folder / f"{check_every}")))  # noqa: B023
        walker.close()
        dist.barrier()
    return said


@pytest.mark.parametrize(
    ("name", "changes", "state"),
    [
        ("mics", {}, "master"),
        (
            "hzp",
            {"optimizer_state": "disk × fp32 × node", "compute_dtype": "bfloat16"},
            "exp_avg_sq",
        ),
        ("fcdp", {}, "frozen"),
    ],
)
def test_copies_that_differ_end_the_run_on_every_rank_and_are_never_saved(
    name: str, changes: dict[str, Any], state: str, tmp_path: Path
) -> None:
    certified(tiny_model("llama"))
    for said in run_ranks(4, _spoilt, name, changes, state, tmp_path):
        at_step, saved, unnoticed, refused, *fine = said
        assert at_step.startswith(
            f"step 2: the weights of model.layers.1 ({state}) on rank 3 differ from those on the"
        )
        assert unnoticed == "nothing noticed"
        assert saved == refused == at_step
        assert fine == ["nothing noticed"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("words", [1, 5, (1 << 20) + 3])
def test_a_checksum_counts_every_word_by_its_place(words: int) -> None:
    """Closed form: Σ wᵢ·(2i + 1) mod 2⁶⁴ by numpy."""
    values_N = np.random.default_rng(words).integers(-(2**63), 2**63, words)
    expected = (values_N.astype(np.uint64) * np.arange(1, 2 * words, 2, dtype=np.uint64)).sum(
        dtype=np.uint64
    )
    found = word_sum(torch.from_numpy(values_N).view(torch.float32))
    assert found == int(np.int64(expected))
