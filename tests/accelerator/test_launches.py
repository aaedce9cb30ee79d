"""Oracle: the calls of our operators in a real step on the simulated accelerator, each of which is
a launch on a GPU; and, for OPT-13B, whose step nobody can take here, the bound."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from blockwalk.plan.methods import method
from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec
from blockwalk.program.compile import compile
from blockwalk.program.costs import Pending
from blockwalk.program.launches import launches, of_block
from blockwalk.program.placements import Placements
from blockwalk.program.program import OpKind, Shape, StepKind
from blockwalk.walk.walker import Walker
from tests.accelerator.device import Simulated
from tests.models import random_batch, tiny_model


class Counted(TorchDispatchMode):
    """The calls of our own operators while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.namespace == "blockwalk"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("codec", ["raw", "fp8"])
def test_launches_of_blocks_are_those_of_a_real_step(
    micro_batches: int, codec: str, sim: Simulated, tmp_path: Path
) -> None:
    tiny_model("opt", num_hidden_layers=2).save_pretrained(tmp_path / "model")
    settings = {"resident": 1, "gradient_accumulation_steps": micro_batches}
    plan = method("zo2", trainable=f"host × {codec}", **settings)
    found = Counter[tuple[OpKind, int]]()
    with Walker(tmp_path / "model", plan, workdir=tmp_path, device="sim:1") as walker:
        prepare = walker.estimator.prepare

        def counted(op: Any) -> Any:
            work = prepare(op)

            def run() -> None:
                with Counted() as mode:
                    work()
                found[op.kind, op.unit] += mode.calls

            return run

        walker.step(random_batch(seed=0))
        walker.estimator.prepare = counted  # type: ignore[method-assign]
        batch = random_batch(seed=1)
        walker.step(batch)
        program = compile(
            plan,
            walker.spec,
            StepKind.TRAIN,
            Shape(len(batch["input_ids"]) // micro_batches, batch["input_ids"].shape[1]),
            pending=Pending(1, flush=True),
            device="sim",
        )
        places = Placements(plan, walker.spec, "sim")
        expected = Counter[tuple[OpKind, int]]()
        for op in program.ops:
            if 0 < op.unit < places.last:
                expected[op.kind, op.unit] += launches(op, places)
    assert {key: n for key, n in found.items() if n and 0 < key[1] < places.last} == {
        k: n for k, n in expected.items() if n
    }


def opt_13b() -> ModelSpec:
    """OPT-13B in float16: 40 blocks of six matrices and ten vectors."""
    d = 5120

    def params(prefix: str, **shapes: tuple[int, ...]) -> tuple[ParamSpec, ...]:
        return tuple(
            ParamSpec(f"{prefix}{n}", s, "float16", True, len(s) == 2) for n, s in shapes.items()
        )

    square = {f"{n}_proj": (d, d) for n in "qkvo"}
    wide = {"fc1": (4 * d, d), "fc2": (d, 4 * d)}
    vectors = {f"{n}_bias": (s[0],) for n, s in {**square, **wide}.items()} | {
        f"norm{i}": (d,) for i in range(4)
    }
    blocks = tuple(
        UnitSpec(f"{i}", "block", params(f"{i}.", **square, **wide, **vectors)) for i in range(40)
    )
    ends = params("", tokens=(50272, d), positions=(2050, d)), params("", norm=(d,), norm_bias=(d,))
    return ModelSpec(
        "opt", UnitSpec("p", "p", ends[0]), blocks, UnitSpec("e", "e", ends[1]), d, 50272, "float16"
    )


def test_opt_13b_takes_few_launches_a_block() -> None:
    plan = method("zo2")
    model = opt_13b()
    program = compile(
        plan, model, StepKind.TRAIN, Shape(1, 2048), pending=Pending(1, flush=True), device="cuda"
    )
    assert of_block(program, Placements(plan, model, "cuda")) == 2 * (6 + 1) + 1 <= 60
    by_pieces = method("zo2", **{"optimizer.name": "momentum"})
    program = compile(
        by_pieces,
        model,
        StepKind.TRAIN,
        Shape(1, 2048),
        pending=Pending(1, flush=True),
        device="cuda",
    )
    assert of_block(program, Placements(by_pieces, model, "cuda")) > 60
