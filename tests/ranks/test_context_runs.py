"""Oracle: the same run by one process under `plain`; and the files that a refused run leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyRun
from tests.support.messages import says
from tests.support.processes import run_ranks
from tests.support.rank_runs import _trained, result
from tests.support.sharded_runs import close

COMMON = ["--save_every", "1", "--optimizer.learning_rate", "3e-3", "--optimizer.warmup_steps", "0"]
LEGS = [
    (2, "hzp", 2),
    (1, "plain", 1),
    (4, "fcdp", 4),
    (2, "zero3", 1),
    (2, "mics", 2),
]
"""Ranks, method, and parts of a sequence, each for one step of a run."""
SHORT = {
    "data.max_length": "3",
    "data.allow_truncation": "true",
    "data.padding_multiple": "1",
}


def test_a_run_goes_on_in_other_parts(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Each step under another method, number of ranks and of parts, from the checkpoint before."""
    total = len(LEGS)
    whole = tmp_path / "whole"
    plain = [*COMMON, "--method", "plain", "--max_steps", str(total)]
    run_ranks(1, _trained, 1, [*tiny_run.arguments(whole), *plain], 0)
    folder = tmp_path / "parts"
    for step, (world, name, context) in enumerate(LEGS, 1):
        leg = ["--method", name, "--mesh.context", str(context), "--max_steps", str(step)]
        leg += ["--resume_from_checkpoint", "latest"] if step > 1 else []
        run_ranks(world, _trained, world, [*tiny_run.arguments(folder), *COMMON, *leg], 0)
    (expected, losses), (found, again) = result(whole), result(folder)
    assert again == pytest.approx(losses, rel=1e-5)
    for name, tensor in expected.items():
        assert close(found[name], tensor, 1e-4), name


def _refused(rank: int, arguments: list[str], unlike: list[str]) -> str:
    try:
        _trained(rank, 2, [*arguments, *(unlike if rank else [])], 0)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize(
    ("settings", "unlike", "facts"),
    [
        ({"context.way": "heads"}, {}, "context.way heads 3 mesh.context 2 keys"),
        (SHORT, {}, "3 4 mesh.context 2"),
        ({"method": "zo2", "trainable": "host"}, {}, "mesh.context 2 1 zeroth"),
        ({"loss": "model"}, {}, "loss model mesh.context 2"),
        ({"mesh.data": "3"}, {}, "mesh.data 3 mesh.context 2 6 2"),
        ({}, {"mesh.context": "1"}, "mesh.context 2 1 rank"),
    ],
)
def test_a_run_that_has_no_parts_writes_nothing(
    settings: dict[str, Any], unlike: dict[str, Any], facts: str, tiny_run: TinyRun, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    source = tmp_path / "model"
    config = LlamaConfig.from_pretrained(tiny_run.model)
    config.num_attention_heads = config.num_key_value_heads = 3
    config.hidden_size = 24
    config.head_dim = 8
    LlamaForCausalLM(config).save_pretrained(source)
    for file in Path(tiny_run.model).glob("*token*"):
        (source / file.name).write_bytes(file.read_bytes())
    folder = tmp_path / "run"
    arguments = tiny_run.arguments(folder)
    arguments[1] = str(source)
    given = {"method": "hzp", "mesh.context": "2", "max_steps": "2", **settings}

    def flags(values: dict[str, Any]) -> list[str]:
        return [part for name, value in values.items() for part in (f"--{name}", str(value))]

    messages = run_ranks(2, _refused, [*arguments, *flags(given)], flags(unlike))
    for message in messages:
        says(message, *facts.split())
    assert not list(folder.rglob("*")), "written by a run that was refused"
