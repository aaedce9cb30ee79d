"""Oracle: the interpreter's own table of modules, and modules imported in the ordinary way."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.fx.experimental import symbolic_shapes
from transformers import AutoModelForCausalLM, Qwen2Config

from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.system import deferred_imports as module
from blockwalk.system.deferred_imports import deferred_imports

HEAVY = """
MARKED = []

class Thing:
    kind = "real"

def double(number):
    return 2 * number

def mark(function, note=None):
    MARKED.append((function.__name__, note))
    return function
"""
READER = """
import heavy_for_test
import heavy_for_test.part as part
from heavy_for_test import Thing, double

@heavy_for_test.mark
def marked(value: Thing = None):
    return "ran"
"""


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that was imported while the package that it imports was deferred."""
    package = tmp_path / "heavy_for_test"
    package.mkdir()
    (package / "__init__.py").write_text(HEAVY)
    (package / "part.py").write_text("VALUE = 7\n")
    (tmp_path / "reader_for_test.py").write_text(READER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module, "DEFERRED", ("heavy_for_test", "absent_for_test"))
    monkeypatch.setattr(module, "DECORATORS", frozenset({"heavy_for_test.mark"}))
    module._FINDER.waiting.pop("heavy_for_test", None)
    with deferred_imports():
        yield importlib.import_module("reader_for_test")
    for name in ("heavy_for_test.part", "heavy_for_test", "reader_for_test"):
        sys.modules.pop(name, None)


def is_imported(name: str = "heavy_for_test") -> bool:
    """Whether a module has run."""
    return "MARKED" in vars(sys.modules.get(name, object))


def test_nothing_is_imported_before_it_is_used(reader: Any) -> None:
    assert not is_imported()
    assert not isinstance(1, reader.Thing)
    assert reader.marked() == "ran"
    assert not is_imported()


def test_a_call_imports_and_names_hold_the_real_objects(reader: Any) -> None:
    assert reader.double(4) == 8
    real = sys.modules["heavy_for_test"]
    assert is_imported()
    assert reader.Thing is real.Thing
    assert reader.double is real.double
    assert reader.heavy_for_test is real
    assert isinstance(real.Thing(), reader.Thing)


def test_an_attribute_a_subclass_and_a_module_below_are_the_real_ones(reader: Any) -> None:
    assert reader.part.VALUE == 7
    assert 2 * reader.part.VALUE + 1 == 15

    assert isinstance(None, reader.Thing | None)

    class Below(reader.Thing):  # type: ignore[misc,name-defined]
        pass

    assert Below.kind == "real"
    assert Below.__mro__[1] is sys.modules["heavy_for_test"].Thing


def test_an_ordinary_import_gets_the_module_and_decorators_run_then(reader: Any) -> None:
    held = reader.Thing
    module._FINDER.leave()  # as after the block
    try:
        assert "heavy_for_test" not in sys.modules
        real = importlib.import_module("heavy_for_test")
        assert [name for name, _ in real.MARKED] == ["marked"]
        assert reader.Thing is real.Thing
        assert held is not real.Thing
        assert isinstance(real.Thing(), held)
        assert reader.marked() == "ran"
    finally:
        module._FINDER.enter()


def test_a_package_that_is_not_there_is_no_stand_in(reader: Any) -> None:
    with pytest.raises(ModuleNotFoundError, match="absent_for_test"):
        importlib.import_module("absent_for_test")


def test_other_threads_import_meanwhile(reader: Any) -> None:
    """Oracle: the interpreter, which refuses to go through a table that changes."""
    ends = threading.Event()
    interval = sys.getswitchinterval()
    names = [f"other_for_test_{number}" for number in range(1000)]

    def import_others() -> None:
        while not ends.is_set():
            for name in names:
                sys.modules[name] = ModuleType(name)
            for name in names:
                sys.modules.pop(name)

    others = threading.Thread(target=import_others)
    sys.setswitchinterval(1e-4)
    others.start()
    try:
        for _ in range(40):
            module._remove_stand_ins()
    finally:
        ends.set()
        others.join()
        sys.setswitchinterval(interval)


CHILD = """
import json, sys
import torch
from transformers import Qwen2Config
from blockwalk.cutting.adapters import adapt
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.plan.choices import LoraSettings

config = Qwen2Config(hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, vocab_size=512)
adapt(build_skeleton(config), LoraSettings(rank=2))
names = ["bitsandbytes", "scipy", "sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"]
before = [name for name in names if name in sys.modules]

import transformers.loss.loss_for_object_detection as losses
import scipy.optimize
rows, columns = losses.linear_sum_assignment([[4, 1], [2, 9]])
same = losses.linear_sum_assignment is scipy.optimize.linear_sum_assignment
compiled = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))

import torch.distributed.tensor._collective_utils as collectives
from torch.fx.experimental.symbolic_shapes import guard_or_false
print(json.dumps({"before": before, "columns": columns.tolist(), "same": same,
                  "compiled": compiled.tolist(),
                  "guard": collectives.guard_or_false is guard_or_false}))
"""


def test_a_model_with_adapters_needs_none_of_them_and_a_user_gets_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is studied anew, for the cache is empty. scipy's assignment of [[4, 1], [2, 9]] is
    columns 1 and 0: 1 + 2 = 3."""
    pytest.importorskip("scipy")
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path))
    answer = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(answer.splitlines()[-1]) == {
        "before": [],
        "columns": [1, 0],
        "same": True,
        "compiled": [2.0, 2.0],
        "guard": True,
    }


STEPS = """
import json, sys
import torch
from blockwalk import Walker, method
from blockwalk.plan.choices import LoraSettings
from blockwalk.program.program import Shape
from blockwalk.walk.context_check import require_parts
from blockwalk.walk.stages_check import require_stages
from blockwalk.walk.unit_costs import UnitCosts

model, name, adapters = sys.argv[1:]
require_parts(model, method("hzp", mesh={"world": 2, "context": 2}))
require_stages(model, method("hzp", mesh={"world": 2, "pipeline": 2}))
lora = LoraSettings(rank=2) if adapters == "lora" else None
plan = method(name)
costs = UnitCosts(model, lora=lora, device="cpu", padded=True)(plan, Shape(1, 16))
ids = torch.randint(3, 512, (1, 16), generator=torch.Generator().manual_seed(0))
batch = {"input_ids": ids, "labels": ids}
with Walker(model, plan, lora=lora, device="cpu") as walker:
    losses = [walker.step(batch).loss for _ in range(2)]
    walker.evaluate(batch)
heavy = ["bitsandbytes", "scipy", "sympy", "torch._dynamo",
         "torch.fx.experimental.symbolic_shapes", "torch.utils._sympy"]
imported = [name for name in heavy if name in sys.modules]

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
with FakeTensorMode(shape_env=ShapeEnv()) as mode:
    rows = torch.empty(mode.shape_env.create_unbacked_symint(), 3)
x = torch.ones(3, requires_grad=True)
(slope,) = torch.autograd.grad(torch.compile(torch.square, backend="eager")(x), x, torch.ones(3))
import torch._dynamo.config as config
print(json.dumps({"imported": imported, "learns": losses[1] < losses[0], "kinds": len(costs.units),
                  "symbols": len(free_unbacked_symbols(rows)), "slope": slope.tolist(),
                  "one": config is torch._dynamo.config}))
"""


@pytest.mark.parametrize(("method", "adapters"), [("mebp", "lora"), ("plain", "full")])
def test_a_step_and_its_forecast_need_none_of_them_and_torch_has_all_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, adapters: str
) -> None:
    """The slope of x² at 1 is 2; a fake tensor of an unknown number of rows has one symbol."""
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    command = [sys.executable, "-c", STEPS, str(tmp_path / "model"), method, adapters]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(answer.splitlines()[-1]) == {
        "imported": [],
        "learns": True,
        "kinds": 3,
        "symbols": 1,
        "slope": [2.0, 2.0, 2.0],
        "one": True,
    }


def plain_arguments() -> list[tuple[str, tuple[Any, ...]]]:
    """Each function that is answered without torch, with arguments of each kind that it takes."""
    truths = [(True,), (False,)]
    pairs = [(True, True), (True, False), (False, False), (True, True, False)]
    shapes = [(2, 3), torch.Size([2, 3]), (2, 4), (2, 3, 1), ()]
    sizes = [(0,), (7,), (-1,)]
    tensors = [(torch.ones(2, 3).t(),), (torch.ones(()),)]
    arguments = {
        "expect_true": [(True,)],
        "guard_or_false": truths,
        "guard_or_true": truths,
        "guard_size_oblivious": truths,
        "statically_known_true": truths,
        "sym_and": truths + pairs,
        "sym_or": truths + pairs,
        "sym_eq": list(itertools.product(shapes, shapes)),
        "guard_int": sizes,
        "has_guarding_hint": sizes,
        "is_nested_int": sizes,
        "free_unbacked_symbols": tensors,
        "has_free_unbacked_symbols": tensors,
        "_iterate_exprs": tensors,
    }
    return [(name, args) for name, cases in arguments.items() for args in cases]


def test_plain_arguments_are_answered_as_torch_answers_them() -> None:
    """Oracle: torch's own functions."""
    for name, args in plain_arguments():
        answer = module._plain_answer(f"{symbolic_shapes.__name__}.{name}", args)
        expected = getattr(symbolic_shapes, name)(*args)
        if isinstance(answer, tuple):
            expected = tuple(expected)
        assert answer == expected, (name, args)
        assert type(answer) is type(expected), (name, args)
    answered = {name.rpartition(".")[2] for name in module.PLAIN_ANSWERS}
    assert answered == {name for name, _ in plain_arguments()} | {"ConstantSource"}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("sym_eq", ((2, 3), [2, 3])),
        ("sym_eq", ((2, True), (2, 1))),
        ("sym_eq", ((2, 3),)),
        ("guard_int", (True,)),
        ("guard_or_false", (1,)),
        ("guard_or_false", ()),
        ("sym_and", (True, 1)),
        ("_iterate_exprs", (torch.ones(2).to_sparse(),)),
        ("_iterate_exprs", ([1],)),
        ("unheard_of", (True,)),
    ],
)
def test_what_is_not_plain_is_left_to_torch(name: str, args: tuple[Any, ...]) -> None:
    whole_name = f"{symbolic_shapes.__name__}.{name}"
    assert module._plain_answer(whole_name, args) is NotImplemented


def test_a_skeleton_draws_nothing_and_its_buffers_are_those_of_a_model() -> None:
    """The model's own constructor, with weights, is the oracle for the buffers."""
    config = Qwen2Config(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    before = torch.get_rng_state()
    skeleton = build_skeleton(config)
    assert torch.equal(torch.get_rng_state(), before)
    whole = type(skeleton)(config)
    buffers = dict(whole.named_buffers())
    assert buffers
    for name, buffer in skeleton.named_buffers():
        assert torch.equal(buffer, buffers[name])
