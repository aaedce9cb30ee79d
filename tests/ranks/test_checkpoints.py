"""Oracle: the run that was never interrupted, bit for bit; files that transformers reads, with the
trained weights."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from blockwalk.cutting.verify import certified
from blockwalk.plan.methods import method
from blockwalk.ranks.groups import Groups
from blockwalk.system.atomic_files import Damaged
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.held import masters
from tests.support.messages import refused, says
from tests.support.processes import run_ranks


def walker_of(name: str, ranks_per_node: int = 2) -> Walker:
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = (
        {}
        if name == "plain"
        else {"mesh": {"world": world, "ranks_per_node": min(world, ranks_per_node)}}
    )
    model = tiny_model("llama", tied=True, seed=3)
    return Walker(model, method(name, optimizer={"learning_rate": 1e-3}, **mesh), device="cpu")


def weights(walker: Walker) -> dict[str, torch.Tensor]:
    engine: Any = walker.engine
    if walker.plan.home.gathered:
        return masters(walker)
    return {name: master.clone() for name, master in engine.trained.masters.items()}


def _saved_in_turn(rank: int, folder: Path) -> list[str]:
    """What a rank does while the model is saved: it gathers, and it meets the others."""
    done = []
    gather = Groups.gather_
    meet = Groups.meet
    with pytest.MonkeyPatch.context() as patch, walker_of("zero3") as walker:
        walker.step(random_batch(8, 8, seed=0))
        patch.setattr(
            Groups,
            "gather_",
            lambda *given, **more: (done.append("gather"), gather(*given, **more))[1],
        )
        patch.setattr(Groups, "meet", lambda groups: (done.append("meet"), meet(groups))[1])
        walker.save_pretrained(folder / "model")
    return done


def test_no_rank_gathers_ahead_of_the_one_that_writes(tmp_path: Path) -> None:
    """Oracle: the order of a rank's calls. An accelerator only queues a gather, whose time limit
    begins there: with a meeting before each, it is not queued before rank 0 has come so far."""
    writes, other = run_ranks(2, _saved_in_turn, tmp_path)
    assert writes == other
    assert writes.count("gather") > 2
    assert not any(one == two == "gather" for one, two in pairwise(["gather", *writes]))


def _interrupted(rank: int, folder: Path) -> Any:
    """Two steps, a checkpoint written behind the third, and the run without a stop."""
    with walker_of("hzp") as walker:
        for step in range(2):
            walker.step(random_batch(8, 8, seed=step))
        walker.save_state(folder / "four", wait=False)
        before = weights(walker)
        loss = walker.step(random_batch(8, 8, seed=2)).loss
        walker.save_pretrained(folder / "model")
        after = weights(walker)
    with refused(FileExistsError, "folder"), walker_of("hzp") as walker:
        walker.save_state(folder / "four")
    with walker_of("hzp") as again:
        again.load_state(folder / "four")
        assert again.steps_done == 2
        assert again.step(random_batch(8, 8, seed=2)).loss == loss
        resumed = weights(again)
        assert all(torch.equal(resumed[name], value) for name, value in after.items())
    return before, after, loss


def _continued(rank: int, name: str, source: Path, target: Path | None) -> Any:
    """Load at another world size, save again, and step once."""
    with walker_of(name) as walker:
        walker.load_state(source)
        loaded = weights(walker)
        if target is not None:
            walker.save_state(target)
        loss = walker.step(random_batch(8, 8, seed=2)).loss
        return loaded, weights(walker), loss


def test_a_run_goes_on_at_any_world_size_and_method(tmp_path: Path) -> None:
    """4 → 2 → 1 ranks, hzp → fcdp → plain: masters bit for bit, the next step to rounding; the
    saved model is that of transformers."""
    certified(tiny_model("llama", tied=True, seed=3))
    before, after, loss = run_ranks(4, _interrupted, tmp_path)[0]
    assert not list(tmp_path.glob(".*"))
    two = run_ranks(2, _continued, "fcdp", tmp_path / "four", tmp_path / "two")[0]
    one = _continued(0, "plain", tmp_path / "two", None)
    for loaded, stepped, found in (two, one):
        assert found == pytest.approx(loss, rel=1e-6)
        for name, value in before.items():
            assert torch.equal(loaded[name], value), name
            assert torch.allclose(stepped[name], after[name], rtol=1e-4, atol=1e-6), name

    from transformers import AutoModelForCausalLM

    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert saved.keys() == after.keys()
    assert all(torch.equal(saved[name], value) for name, value in after.items())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    with walker_of("plain") as walker:
        walker.save_state(tmp_path / "one")
    other = Walker(tiny_model("llama", num_hidden_layers=2), method("plain"), device="cpu")
    with other, refused(ValueError, "model optimizer"):
        other.load_state(tmp_path / "one")


def _damaged(rank: int, folder: Path) -> str:
    """Load a checkpoint whose second file was changed after it was saved: a rank of the same mesh
    reads its own alone."""
    with walker_of("zero3") as walker:
        walker.save_state(folder / "two")
        if rank == 0:
            data = bytearray((folder / "two" / "rank-00001.safetensors").read_bytes())
            data[-9] ^= 1
            (folder / "two" / "rank-00001.safetensors").write_bytes(data)
        dist.barrier()
        with pytest.raises(Damaged) as refused:
            walker.load_state(folder / "two")
    return str(refused.value)


def test_every_rank_hears_what_one_finds_damaged(tmp_path: Path) -> None:
    """Oracle: the one bit that was flipped."""
    certified(tiny_model("llama", tied=True, seed=3))
    for message in run_ranks(2, _damaged, tmp_path):
        says(message, "two/rank-00001.safetensors damaged")


def _blind(rank: int, folder: Path) -> str:
    """Save where rank 1 does not see what rank 0 made."""
    if rank == 1:
        Path.is_dir = lambda self, **_: False  # type: ignore[method-assign, assignment]
    with walker_of("fcdp") as walker, pytest.raises(ValueError) as refused:
        walker.save_state(folder / "here", beside={"note.txt": "beside"})
    return str(refused.value)


def test_a_folder_that_not_every_rank_sees_is_refused(tmp_path: Path) -> None:
    """Closed form: every rank names the one that is blind; nothing is left that looks like a
    checkpoint."""
    certified(tiny_model("llama", tied=True, seed=3))
    for message in run_ranks(2, _blind, tmp_path):
        assert message.startswith("rank 1 does not see"), message
        says(message, "file system nodes")
    assert not (tmp_path / "here").exists()


def test_a_folder_that_is_not_there_is_named_without_a_word_of_ranks(tmp_path: Path) -> None:
    """Closed form: one process, which has no ranks to share a file system with."""
    walker = Walker(tiny_model("llama"), method("plain"), device="cpu")
    with refused(ValueError, "gone") as told:
        walker.load_state(tmp_path / "gone")
    walker.close()
    assert "rank" not in str(told.value)
