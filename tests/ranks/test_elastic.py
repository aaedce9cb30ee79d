"""Oracle: one process that nobody helps: the same ledger lines and the same bits of every weight,
whoever came and went."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk import method
from blockwalk.cli import main
from blockwalk.contrib.elastic_ranks.elastic import Elastic, Lent, elastic
from blockwalk.data.label_words import LabelWordBatch
from blockwalk.ranks.place import LOST
from blockwalk.train import config
from blockwalk.train.elastic import facts, follow
from blockwalk.train.prepared_run import prepare
from blockwalk.walk.walker import Walker
from tests.conftest import TinyRun
from tests.models import random_batch, tiny_model
from tests.support.comers import arguments, disturb_run, forked, free_address
from tests.support.messages import refused, says
from tests.support.zeroth_order_runs import assert_same, trained

STEPS = 5
OPTIMIZER = {
    "name": "sgd",
    "learning_rate": 3e-2,
    "schedule": "linear",
    "total_steps": 12,
    "weight_decay": 0.1,
}
ZO2 = (
    "--method zo2 --lora false --gradient_accumulation_steps 4 --optimizer.learning_rate 1e-3"
    " --max_steps 40 --eval_first false"
)


def batch_at(step: int, words: bool) -> Any:
    batch = random_batch(8, seed=step)
    return LabelWordBatch(batch, torch.tensor([0, 1, 1, 0]), 2) if words else batch


def walk(settings: dict[str, Any], kind: str, ranks: Elastic | None = None) -> tuple[Any, Any, int]:
    """Scalars of each step and the weights after all; steps in which others had a share."""
    words = "zo.objective" in settings
    shared = 0
    results = []
    plan = method("zo2", **{"optimizer": OPTIMIZER, **settings})
    with Walker(tiny_model(kind, tied=kind == "opt"), plan, device="cpu", sharing=ranks) as walker:
        if ranks is not None:
            ranks.open({}, [])
            deadline = time.monotonic() + 30
            while len(ranks.store.get("asks").splitlines()) < 2:
                assert time.monotonic() < deadline, "the ranks do not come"
                time.sleep(0.01)
        for step in range(STEPS):
            if ranks is not None:
                ranks.position = (step, int(words))
            results.append(walker.step(batch_at(step, words)))
            shared += ranks is not None and len(ranks.turn["shares"]) == 3
        if ranks is not None:
            ranks.announce(ended=True)
        return [(each.loss, each.projected_grad) for each in results], trained(walker), shared


def lend(settings: dict[str, Any], kind: str, address: str) -> int:
    plan = method("zo2", **{"optimizer": OPTIMIZER, **settings})
    ranks = elastic(address, 30, joins=True)
    with Walker(tiny_model(kind, tied=kind == "opt"), plan, device="cpu", sharing=ranks) as walker:
        return 0 if follow(walker, ranks, lambda place: batch_at(place[0], bool(place[1]))) else 1


CASES: list[tuple[str, dict[str, Any]]] = [
    (
        "opt",
        {
            "trainable": "host × bf16",
            "gradient_accumulation_steps": 2,
            "update": {"flush_every": 3},
        },
    ),
    ("llama", {"zo": {"kind": "fzoo", "queries": 4, "noise": "rademacher"}}),
    ("llama", {"zo": {"kind": "hizoo", "queries": 2}}),
    ("llama", {"zo": {"noise": "lowrank", "queries": 2}, "gradient_accumulation_steps": 2}),
    ("llama", {"trainable": "host × int8", "update": {"rounding": "stochastic"}}),
    ("llama", {"zo.objective": "f1", "gradient_accumulation_steps": 2}),
    ("opt", {"zo": {"noise": "torch", "queries": 2}}),
]


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_whoever_computes_a_share_the_bits_are_one_processs(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Two ranks on other tiers, with other prefetching, and a host; forwards and micro-batches
    shared in uneven parts."""
    expected = walk(settings, kind)
    address = free_address()
    codec = settings.get("trainable", " raw").split(" ")[-1]
    host = elastic(address, 30, joins=False)
    others = [{"trainable": f"disk × {codec}"}, {"trainable": f"device × {codec}", "prefetch": 0}]
    ranks = [
        forked(lambda own=own: lend({**settings, **own}, kind, address), tmp_path / f"{number}")  # type: ignore[misc]
        for number, own in enumerate(others)
    ]
    try:
        losses, weights, shared = walk(settings, kind, host)
        for process in ranks:
            process.join(30)
    finally:
        for process in ranks:
            process.kill()
    assert losses == expected[0]
    assert_same(weights, expected[1])
    assert shared >= STEPS - 2, "ranks that came were not asked, or were not waited for"


def test_a_rank_that_answers_too_late_costs_a_wait_and_nothing_else() -> None:
    """Also where it asked again: what it says then is of another turn."""
    address = free_address()
    said = list[str]()
    host, late = (elastic(address, 5, joins=joins) for joins in (False, True))
    host.say = said.append
    plan = method("zo2", optimizer=OPTIMIZER, zo={"queries": 3})
    with Walker(tiny_model("llama"), plan, device="cpu") as alone:
        expected = [alone.step(random_batch(8, seed=step)).projected_grad for step in range(3)]
        weights = trained(alone)
    found = []
    with Walker(tiny_model("llama"), plan, device="cpu", sharing=host) as walker:
        host.open({}, [])
        late.next_turn()
        for step in range(3):
            late.ask()
            found.append(walker.step(random_batch(8, seed=step)).projected_grad)
            late.read(random_batch(8, seed=step))
            late.next_turn()
            own = late.share(step + 1, 6, 1)
            with pytest.raises(Lent):
                late.losses(step + 1, [1e9] * len(own), [1], 6, 1)
        assert_same(trained(walker), weights)
    assert found == expected
    for step in (1, 2, 3):
        assert said.pop(0) == f"rank 1 takes part from step {step} on"
        assert said.pop(0) == f"step {step}: rank 1 is gone, or late: its share is computed here"


@pytest.mark.parametrize(
    ("paces", "expected"),
    [
        ({0: 1.0}, [(0, 12)]),
        ({0: 1.0, 1: 1.0, 2: 1.0}, [(0, 4), (4, 8), (8, 12)]),
        ({0: 2.0, 1: 1.0}, [(0, 4), (4, 12)]),
        ({0: 1000.0, 1: 1.0, 2: 1.0}, [(0, 1), (1, 6), (6, 12)]),
        ({0: 1.0, 1: 1000.0}, [(0, 12), (12, 12)]),
    ],
)
def test_shares_follow_speed(paces: dict[int, float], expected: list[tuple[int, int]]) -> None:
    """Closed form: consecutive, disjoint, all of them; in proportion to speed, and one at least for
    the host."""
    host = elastic(free_address(), 5, joins=False)
    host.open({}, [])
    host._paces = paces
    own = host.share(1, 3, 4)
    assert list(host.turn["shares"].values()) == expected
    assert list(own) == [(p, m) for p in range(3) for m in range(4)][slice(*expected[0])]


def test_the_store_listens_on_its_address_alone() -> None:
    """Oracle: the kernel's table of sockets."""
    address = free_address()
    host = elastic(address, 5, joins=False)
    port = f":{int(address.rpartition(':')[2]):04X}"
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    assert [row[1] for row in rows if row[1].endswith(port) and row[3] == "0A"] == [
        f"0100007F{port}"
    ]
    del host


def test_weights_that_differ_from_the_hosts_end_their_rank() -> None:
    address = free_address()
    host, other = (elastic(address, 5, joins=joins) for joins in (False, True))
    host.compare(100, {"prologue": 1, "epilogue": 2})
    other.compare(100, {"prologue": 1, "epilogue": 2})
    other.compare(200, {"prologue": 3, "epilogue": 2})  # the host has not said
    with refused(RuntimeError, "100 weights rank 1"):
        other.compare(100, {"prologue": 1, "epilogue": 3})


def same_as_alone(tiny_run: TinyRun, tmp_path: Path, settings: str) -> None:
    """Compare the run in ``tmp_path/run`` with one that nobody helps."""
    alone = forked(
        lambda: main.main(arguments(tiny_run, tmp_path / "alone", settings)),
        tmp_path / "alone.said",
    )
    alone.join()
    assert alone.exitcode == 0
    lines = [
        (tmp_path / name / "ledger.jsonl").read_bytes().split(b"\n")[1:]
        for name in ("alone", "run")
    ]
    assert len(lines[0]) == 41
    assert lines[0] == lines[1]
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("alone", "run")
    ]
    assert weights[0] == weights[1]
    assert not (tmp_path / "run" / "scratch").exists(), "what killed ranks left is still there"


def test_ranks_are_killed_and_stopped_and_come_again(tiny_run: TinyRun, tmp_path: Path) -> None:
    settings = f"{ZO2} --trainable host --mesh.check_every 5"
    own = ["--trainable disk", "--trainable host --prefetch 2"]
    found = disturb_run(tiny_run, tmp_path / "run", settings, own, kills=3, stops=1, seed=1)
    said = (tmp_path / "run-host").read_text()
    assert found.codes == [0, 0, 0], said
    assert found.shared, said
    same_as_alone(tiny_run, tmp_path, settings)


@pytest.mark.parametrize("noise", ["gaussian", "torch"])
def test_a_host_that_is_killed_is_resumed_and_joined_again(
    noise: str, tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Its ranks end with one line and the exit code of the lost. Seeds of steps, which torch's
    noise has, had come from numpy's generator as the process found it: no two runs were alike."""
    address = free_address()
    settings = f"{ZO2} --zo.noise {noise} --save_every 10 --resume_from_checkpoint latest"
    host_line = arguments(tiny_run, tmp_path / "run", settings, f"--elastic {address}")
    for ends in (False, True):
        host = forked(lambda: main.main(host_line), tmp_path / f"host-{ends}")
        rank = forked(lambda: main.main([*host_line, "--join"]), tmp_path / f"rank-{ends}")
        while (
            not ends
            and host.is_alive()
            and "takes part" not in (tmp_path / f"host-{ends}").read_text()
        ):
            time.sleep(0.02)
        if not ends:
            os.kill(host.pid, signal.SIGKILL)
        host.join(60)
        rank.join(60)
        assert (host.exitcode, rank.exitcode) == ((0, 0) if ends else (-signal.SIGKILL, LOST))
    said = [
        line
        for line in (tmp_path / "rank-False").read_text().splitlines()
        if line.startswith("blockwalk:")
    ]
    assert len(said) == 1
    says(said[0], f"{address}")
    same_as_alone(tiny_run, tmp_path, settings)


MISTAKES = [
    ("--method mebp --elastic 127.0.0.1:29600", "mebp mezo zo2 distzo2"),
    ("--method zo2 --elastic 29600", "elastic 29600 address"),
    ("--method zo2 --elastic 127.0.0.1:29600 --mesh.world 2 --mesh.data 2", "mesh.world 2"),
    ("--method mezo --elastic 127.0.0.1:29600 --zo.noise mezo --loss model", "weights"),
    ("--method zo2 --join", "elastic missing"),
]


@pytest.mark.parametrize(("settings", "words"), MISTAKES)
def test_mistakes_are_told_in_one_line_before_any_work(
    settings: str, words: str, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(arguments(tiny_run, tmp_path / "run", settings)) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    says(said[0], words)
    assert not (tmp_path / "run").exists()


def test_a_rank_that_would_compute_other_bits_is_refused(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings, data and weights, before the model is opened."""
    address = free_address()
    line = arguments(tiny_run, tmp_path / "run", ZO2, f"--elastic {address}")
    run = config.load(None, config.split_flags(line[1:])[0])
    host = elastic(address, 5, joins=False)
    host.open({"facts": facts(run, prepare(run)), "ledger": {}}, [])
    less = tmp_path / "less.jsonl"
    less.write_text("".join(tiny_run.train.read_text().splitlines(keepends=True)[:-1]))
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_run.model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    for changed, words in (
        (["--zo.epsilon", "1e-2"], "zo.epsilon 0.001 0.01"),
        (["--trainable", "host×bf16"], "codecs raw bf16"),
        (["--data.train", str(less)], "data.train"),
        (["--model", str(other)], "weights"),
    ):
        capsys.readouterr()
        assert main.main([*line, "--join", *changed]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1
        says(said[0], words)
