"""Oracle: what one rank was given that the other was not, named on both, with the weights as they
were."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.data.label_words import LabelWordBatch
from blockwalk.engine import pack_cache
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.plan.placement import Codec
from blockwalk.tiers.block_store.store import INDEX, BlockStore
from blockwalk.train import loop
from blockwalk.walk.walker import Walker
from tests.conftest import TinyRun
from tests.models import random_batch, tiny_model
from tests.support.processes import run_ranks
from tests.support.rank_runs import run_config

PLANS: list[tuple[str, dict[str, Any]]] = [
    ("mezo", {}),
    ("distzo2", {"mesh": {"perturb": 1}}),
    ("zero3", {}),
    ("mics", {"update.timing": "block"}),
    ("fcdp", {"gradient_accumulation_steps": 2}),
    ("hzp", {}),
]


def refused(work: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as told:
        work()
    return str(told.value)


def _plan(name: str, settings: dict[str, Any]) -> Any:
    mesh = {"world": 2, **settings.get("mesh", {})}
    return method(name, **{**settings, "mesh": mesh, "optimizer.learning_rate": 1e-2})


def _own_batches(rank: int) -> list[str]:
    said = []
    for name, settings in PLANS:
        walker = Walker(tiny_model("llama"), _plan(name, settings))
        before = {
            key: value.clone()
            for key, value in walker.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        said.append(refused(lambda: walker.step(random_batch(4, 8, seed=rank))))  # noqa: B023
        after = walker.state_dict()
        assert before
        assert all(torch.equal(value, after[key]) for key, value in before.items()), name
        walker.step(random_batch(4, 8, seed=1))
        walker.close()
    return said


def test_ranks_that_bring_a_batch_each_are_refused_by_every_method_before_an_update() -> None:
    for said in run_ranks(2, _own_batches):
        assert said == [
            "step 1: rank 1 was given other data than rank 0; give every rank the same whole batch:"
            " each takes its own share of it"
        ] * len(PLANS)


def _own_evaluations(rank: int) -> list[str]:
    said = []
    for name, settings in (PLANS[0], PLANS[2]):
        with Walker(tiny_model("llama"), _plan(name, settings)) as walker:
            for work in (
                lambda: walker.evaluate(random_batch(4, 8, seed=rank)),
                lambda: walker.label_losses(random_batch(4, 8 + rank)),
                lambda: walker.evaluate(random_batch(4, 8), batches=1 + rank),
            ):
                said.append(refused(work))
            walker.evaluate(random_batch(4, 8))
    return said


def test_ranks_that_evaluate_a_batch_each_are_refused() -> None:
    for said in run_ranks(2, _own_evaluations):
        assert len(said) == 6
        assert all(
            text.startswith("step 1: rank 1 was given other data than rank 0") for text in said
        ), said


def _unlike_batches(rank: int, name: str, nodes: int) -> list[str]:
    """Return what a step of each batch that rank 1 has unlike is refused with. A step before them
    leaves an update that waits, where a method has one; two after them are those of a walker that
    has never been given such a batch."""
    odd = rank == 1
    batch = random_batch(8, 8)
    unlike: list[Any] = [
        {name: value[:, : 8 - odd] for name, value in batch.items()},
        batch if odd else {name: batch[name] for name in ("input_ids", "labels")},
        [1] if odd else batch,
        {name: value[: 8 - 8 * odd] for name, value in batch.items()},
        {**batch, "input_ids": batch["input_ids"] + 99999 * odd},
    ]
    plan = method(name, mesh={"world": 2 * nodes, "ranks_per_node": 2})
    losses = []
    said = []
    for batches in (unlike, []):
        with Walker(tiny_model("llama"), plan) as walker:
            before = walker.step(batch).loss
            said += [refused(lambda: walker.step(given)) for given in batches]  # noqa: B023
            losses.append([before, walker.step(batch).loss, walker.step(batch).loss])
            assert walker.steps_done == 3
    assert losses[0] == losses[1]
    return said


@pytest.mark.parametrize(
    ("name", "nodes"), [("fcdp", 1), ("mezo", 1), ("distzo2", 1), ("distzo2", 2)]
)
def test_a_batch_of_another_shape_is_told_with_both_values_on_every_rank(
    name: str, nodes: int
) -> None:
    """By hand: lengths, keys, what is no batch, no rows, and a token that no row is of. What is
    learnt before and after is what is learnt without them."""
    answers = run_ranks(2 * nodes, _unlike_batches, name, nodes)
    for lengths, keys, none, empty, unknown in answers:
        assert "input_ids: rank 0 has 8 × 8 int64, rank 1 has 8 × 7 int64" in lengths
        assert "(attention_mask: rank 0 has none, rank 1 has 8 × 8 int64)" in keys
        assert none.startswith("step 2: rank 1: a batch is a mapping with input_ids and labels")
        assert empty.startswith("step 2: rank 1: every tensor of a batch must be")
        assert "input_ids (0, 8)" in empty
        assert unknown.startswith("step 2: rank 1: ")
        (number,) = re.findall("token id ([0-9]+)", unknown)
        assert int(number) - 99999 in random_batch(8, 8)["input_ids"]


def _unlike_words(rank: int) -> list[str]:
    batch = random_batch(8, 8)
    words = LabelWordBatch(batch, torch.tensor([0, 1, 1, 0]), 2)
    fewer = {name: value[: 8 - 4 * rank] for name, value in batch.items()}
    other = {**batch, "input_ids": batch["input_ids"] + 99999 * rank}
    unlike = [
        LabelWordBatch(fewer, torch.tensor([0, 1, 1, 0])[: 4 - 2 * rank], 2),
        LabelWordBatch(other, words.targets_B, 2),
    ]
    plan = method("mezo", mesh={"world": 2}, **{"zo.objective": "accuracy"})
    with Walker(tiny_model("llama"), plan) as walker:
        said = [refused(lambda: walker.step(given)) for given in unlike]  # noqa: B023
        assert walker.step(words).step == 1
    return said


def test_examples_of_label_words_are_compared_before_their_losses() -> None:
    """By hand: fewer examples on rank 1, whose losses are fewer; and a token that no row is of."""
    for fewer, unknown in run_ranks(2, _unlike_words):
        assert "input_ids: rank 0 has 8 × 8 int64, rank 1 has 4 × 8 int64" in fewer
        assert unknown.startswith("step 1: rank 1: ")


def _own_weights(rank: int, folders: list[Path]) -> list[str]:
    said = []
    for name in ("fcdp", "distzo2"):
        said.append(refused(lambda: Walker(folders[rank], _plan(name, {}))))  # noqa: B023
        said.append(refused(lambda: Walker(tiny_model("llama", seed=rank), _plan(name, {}))))  # noqa: B023
    Walker(folders[2 * rank], _plan("fcdp", {})).close()  # an equal copy
    return said


def test_ranks_that_read_other_weights_are_refused(tmp_path: Path) -> None:
    """One byte in the middle of a copy differs, its size does not; a copy without a difference is
    the same model."""
    folders = [tmp_path / name for name in ("a", "b", "c")]
    tiny_model("llama").save_pretrained(folders[0])
    for folder in folders[1:]:
        shutil.copytree(folders[0], folder)
    file = folders[1] / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    answers = run_ranks(2, _own_weights, folders)
    assert answers[0] == answers[1]
    for said in answers[0]:
        assert said.startswith(
            "the ranks were not started alike; the model's weights: rank 0 has '"
        )


def _own_tiers(rank: int) -> str:
    plan = _plan("zo2", {"frozen": ("device × int4", "disk × int4")[rank]})
    return refused(lambda: Walker(tiny_model("llama"), plan, lora={"rank": 2}))


def test_a_model_in_memory_is_in_no_codec_on_the_device() -> None:
    """There it stays as it is: with a rank that reads it in codes its steps would be of two
    models."""
    for said in run_ranks(2, _own_tiers):
        assert said == (
            "the ranks were not started alike; plan.frozen.codec: rank 0 has 'raw', rank 1 has"
            " 'int4'"
        )


def _own_settings(rank: int, changes: list[list[str]], arguments: list[str]) -> list[str]:
    return [
        refused(lambda: loop.train(run_config([*arguments, *(change if rank else [])], rank, 2)))  # noqa: B023
        for change in changes
    ]


def test_ranks_with_other_settings_or_data_are_refused_before_anything_is_written(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    output_dir = tmp_path / "run"
    other = tmp_path / "other.jsonl"
    arguments = [*tiny_run.arguments(output_dir), "--method", "fcdp"]
    lines = tiny_run.train.read_text().splitlines()
    other.write_text("\n".join(reversed(lines)) + "\n")
    changes = [
        ["--save_every", "3"],
        ["--eval_every", "2"],
        ["--optimizer.learning_rate", "0.5"],
        ["--data.train", str(other)],
    ]
    for said in run_ranks(2, _own_settings, changes, arguments):
        saved, evaluated, rate, data = said
        assert saved.endswith("; save_every: rank 0 has '0', rank 1 has '3'")
        assert evaluated.endswith("; eval_every: rank 0 has '0', rank 1 has '2'")
        assert "optimizer.learning_rate: rank 0 has '0.0001', rank 1 has '0.5'" in rate
        assert "; data.train: rank 0 has '" in data
    assert not list(output_dir.glob("*"))


def _other_node(rank: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", rank), ("WORLD_SIZE", 4), ("LOCAL_WORLD_SIZE", 2)):
            patch.setenv(name, str(value))
        said = refused(lambda: Walker(tiny_model("llama"), method("fcdp", mesh={"world": 4})))
        Walker(
            tiny_model("llama"), method("fcdp", mesh={"world": 4, "ranks_per_node": 1})
        ).close()  # islands in a node
        return said


def test_a_mesh_of_one_node_is_refused_where_two_were_started() -> None:
    """Closed form: torchrun's variables."""
    for said in run_ranks(4, _other_node):
        assert said == (
            "mesh.ranks_per_node is 4 (mesh.world unless given), and 2 ranks were started on this"
            " node; set mesh.ranks_per_node: 2"
        )


def _packing(rank: int, model: Path, folder: Path, dies: bool) -> bool:
    """Open a model whose weights are packed: whether this rank wrote a store."""
    wrote: list[bool] = []
    write_store = pack_cache.write_store

    def counted(*args: Any, **options: Any) -> Any:
        wrote.append(True)
        time.sleep(0.3)
        if dies and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return write_store(*args, **options)

    pack_cache.write_store = counted  # type: ignore[assignment]
    if dies:  # its neighbour is not there to meet
        pack_cache.packed(model, Codec.INT4, build_skeleton(model), folder)
        os._exit(0)
    plan = _plan("fcdp", {"frozen": "device × int4"})
    Walker(model, plan, lora=LoraSettings(rank=2), workdir=folder).close()
    return bool(wrote)


def test_the_ranks_of_a_node_pack_once(tmp_path: Path) -> None:
    """Closed form: one of two ranks writes the store, and there is one; the next takes over from a
    packer that is killed."""
    model = tmp_path / "model"
    tiny_model("llama").save_pretrained(model)
    assert sorted(run_ranks(2, _packing, model, tmp_path / "run", False)) == [False, True]
    assert len(list((tmp_path / "run").rglob("model-int4-*"))) == 1
    codes = run_ranks(2, _packing, model, tmp_path / "again", True, may_die=True)
    assert sorted(codes) == [-signal.SIGKILL, 0]
    assert len(list((tmp_path / "again").rglob("model-int4-*"))) == 1


def _packs_at_once(rank: int, model: Path, folder: Path) -> bytes:
    """The index of a store that is packed on a node whose locks on a folder hold nobody else, as
    over NFS; each node begins before the other ends."""
    write_store = pack_cache.write_store

    def met(*args: Any, **options: Any) -> Any:
        dist.barrier()
        if rank:
            time.sleep(0.2)
        return write_store(*args, **options)

    pack_cache.write_store = met  # type: ignore[assignment]
    fcntl.flock = lambda *_: None  # type: ignore[assignment]
    store = pack_cache.packed(model, Codec.INT4, build_skeleton(model), folder)
    with closing(BlockStore(store)) as opened:
        dist.barrier()
        opened.verify()
    assert [path.name for path in folder.iterdir()] == [store.name]
    return (store / INDEX).read_bytes()


@pytest.mark.parametrize("damaged", [False, True])
def test_nodes_that_share_a_folder_without_locks_take_the_pack_that_is_there(
    tmp_path: Path, damaged: bool
) -> None:
    """Closed form: two packs of one model are one; a damaged one is there no longer."""
    model = tmp_path / "model"
    folder = tmp_path / "run"
    tiny_model("llama").save_pretrained(model)
    if damaged:
        store = pack_cache.packed(model, Codec.INT4, build_skeleton(model), folder)
        (store / "unit-00002.bin").write_bytes(b"nothing")
        (store / "spoilt").touch()
    one, other = run_ranks(2, _packs_at_once, model, folder)
    assert one == other
    assert not list(folder.rglob("spoilt"))
