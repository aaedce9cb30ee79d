"""Oracle: the row ``plain``, bit for bit. The method is registered from here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blockwalk import Plan, method
from blockwalk.cli.schema import schema
from blockwalk.cli.settings_help import described
from blockwalk.plan.methods import METHODS
from blockwalk.plan.placement import Placement, Tier
from blockwalk.train.config import from_mapping
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.rows import registered


def shelf() -> Plan:
    """Frozen weights in host memory, activations and moments on disk, each block computed twice."""
    return Plan(
        method="shelf",
        frozen=Placement(Tier.HOST),
        trainable=Placement(Tier.DISK),
        optimizer_state=Placement(Tier.DISK),
        activation=Placement(Tier.DISK),
        prefetch=2,
    )


@pytest.fixture(autouse=True)
def row() -> Iterator[None]:
    with registered(METHODS, "shelf", shelf):
        yield


def test_a_method_from_outside_trains_as_plain_does(tmp_path: Path) -> None:
    ends = []
    for name in ("shelf", "plain"):
        plan = method(name, optimizer={"learning_rate": 1e-2})
        workdir = tmp_path / name
        with Walker(tiny_model("llama"), plan, workdir=workdir, device="cpu") as walker:
            losses = [walker.step(random_batch(seed=step)).loss for step in range(3)]
            masters = {key: m.clone() for key, m in walker.engine.trained.masters.items()}
            ends.append((losses, masters))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[0][1][key], master) for key, master in ends[1][1].items())


def test_files_help_schema_and_messages_know_it() -> None:
    run = from_mapping({"method": "shelf", "prefetch": 3, "lora": False})
    assert run.plan == method("shelf", prefetch=3)
    assert described("method")[0].endswith("|shelf")
    assert "shelf" in schema()["properties"]["method"]["enum"]
    with refused(ValueError, "method shelve shelf"):
        method("shelve")
