"""Oracle: closed forms. Attention takes 4·B·H·Q·K·W FLOPs forward, by the queries' heads, and 2.5
times as many backward: every kernel of it that torch has, on a card's tensors without data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from blockwalk.plan.methods import method
from blockwalk.program.costs import Costs
from blockwalk.program.program import Shape
from blockwalk.report.foresee import uncounted
from blockwalk.walk import meter as metering
from blockwalk.walk import unit_costs
from blockwalk.walk.meter import Meter
from tests.measured.test_costs import config

aten = torch.ops.aten
BATCH, HEADS, GROUPS, QUERIES, KEYS, WIDTH = 2, 8, 2, 48, 80, 64
FORWARD = 4 * BATCH * HEADS * QUERIES * KEYS * WIDTH
LONGEST = {"max_q": QUERIES, "max_k": KEYS, "max_seqlen_q": QUERIES, "max_seqlen_k": KEYS}


@dataclass(frozen=True)
class Ragged:
    """Tensors [S, H, W] of all rows together, or [1, S, H, W], in place of [B, S, H, W]."""

    axes: int = 0


def overloads(name: str) -> list[str]:
    return list(getattr(aten, name).overloads())


def kernels() -> list[str]:
    """Names of the attention kernels that this torch has, but those that take what layers hand on:
    its operators with queries, keys and values."""
    names = []
    for operator in torch._C._dispatch_get_all_op_names():
        name = operator.removeprefix("aten::").partition(".")[0]
        if not operator.startswith("aten::") or "multi_head" in name:
            continue
        if "attention" in name and name not in names and "default" in overloads(name):
            schema = getattr(aten, name).default._schema
            if {"query", "key", "value"} <= {argument.name for argument in schema.arguments}:
                names.append(name)
    return sorted(names)


def arguments(name: str, ragged: Ragged) -> dict[str, Any]:
    """Return a kernel's arguments, tensors of a card without data, by its schema."""
    scaled = "scaled_dot_product" in name

    def tensor(heads: int, length: int) -> Tensor:
        shape = (BATCH, length, heads, WIDTH)
        if scaled:
            shape = (BATCH, heads, length, WIDTH)
        elif ragged.axes:
            shape = (1, BATCH * length, heads, WIDTH)[4 - ragged.axes :]
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    values: dict[str, Any] = {"key": tensor(GROUPS, KEYS), "value": tensor(GROUPS, KEYS)}
    ends = torch.empty(BATCH + 1, dtype=torch.int32, device="cuda")
    for argument in getattr(aten, name).default._schema.arguments:
        kind = str(argument.type)
        if argument.name in values or argument.default_value is not None:
            continue
        if argument.name.startswith(("query", "out", "grad_out")):
            values[argument.name] = tensor(HEADS, QUERIES)
        elif argument.name in LONGEST:
            values[argument.name] = LONGEST[argument.name]
        elif argument.name.startswith(("cum_seq", "cu_seqlens")):
            values[argument.name] = ends if ragged.axes else None
        elif argument.name == "logsumexp":
            values[argument.name] = torch.empty(BATCH, HEADS, QUERIES, device="cuda")
        elif kind.startswith("Optional"):
            values[argument.name] = None
        elif kind == "Tensor":
            values[argument.name] = torch.empty((), dtype=torch.int64, device="cuda")
        elif kind.startswith("List"):
            values[argument.name] = [True, True, True, False]
        else:
            values[argument.name] = {"float": 0.0, "bool": False}.get(kind, 0)
    return values


CASES = [(name, Ragged()) for name in kernels()]
CASES += [(name, Ragged(3)) for name in kernels() if name.startswith("_flash_attention")]
CASES += [(name, Ragged(4)) for name in kernels() if name.startswith("_efficient_attention")]


@pytest.mark.parametrize(("name", "ragged"), CASES, ids=lambda value: str(value))
def test_each_kernel_is_counted_by_the_heads_of_its_queries(name: str, ragged: Ragged) -> None:
    with FakeTensorMode():
        named = arguments(name, ragged)
    operator = getattr(aten, name).default
    in_place = [named.pop(argument.name) for argument in operator._schema.arguments[:1]]
    meter = Meter()
    # the count alone: no kernel of this processor's build is asked for its answer's shapes
    meter._count(operator, set(), in_place, named, None)
    factor = 2.5 if "backward" in name else 1
    assert (meter.attention, meter.products, meter.touched) == (int(factor * FORWARD), 0, 0)
    assert not meter.uncounted


def test_the_kernels_of_a_card_are_among_them() -> None:
    families = ("flash", "efficient", "cudnn", "fused")
    named = kernels()
    for family in families:
        both = [name for name in named if name.startswith(f"_scaled_dot_product_{family}")]
        assert sum("backward" in name for name in both) >= 1
        assert sum("backward" not in name for name in both) >= 1
    assert {"_flash_attention_forward", "_efficient_attention_backward"} <= {*named}


@pytest.mark.parametrize("family", ["flash", "efficient", "cudnn"])
def test_a_kernel_that_runs_under_the_meter_is_counted(family: str) -> None:
    with FakeTensorMode():
        query = torch.empty(BATCH, HEADS, QUERIES, WIDTH, dtype=torch.bfloat16, device="cuda")
        key = torch.empty(BATCH, GROUPS, KEYS, WIDTH, dtype=torch.bfloat16, device="cuda")
    rest = () if family == "flash" else (None, True)
    with Meter() as meter:
        getattr(aten, f"_scaled_dot_product_{family}_attention")(query, key, key, *rest)
    assert (meter.attention, meter.products, meter.touched) == (FORWARD, 0, 0)


def test_values_of_another_width_are_multiplied_at_theirs() -> None:
    """The products of scores with values, forward and back, are as wide as these."""
    with FakeTensorMode():
        query = torch.empty(BATCH, HEADS, QUERIES, 192, device="cuda")
        key = torch.empty(BATCH, HEADS, KEYS, 192, device="cuda")
        value = torch.empty(BATCH, HEADS, KEYS, 128, device="cuda")
    meter = Meter()
    operator = aten._scaled_dot_product_efficient_attention.default
    meter._count(operator, set(), (query, key, value, None, True), {}, None)
    assert meter.attention == 2 * BATCH * HEADS * QUERIES * KEYS * (192 + 128)


def refuses(*_: Any, **__: Any) -> Any:
    raise AssertionError("query/key/value shapes are incompatible")


def test_what_cannot_be_counted_moves_bytes_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(metering.flop_registry, aten.mm, refuses)
    with Meter() as meter:
        torch.ones(4, 8) @ torch.ones(8, 4)
    assert meter.products == 0
    assert meter.touched >= (4 * 8 + 8 * 4 + 4 * 4) * 4
    (line,) = uncounted(Costs(uncounted=tuple(meter.uncounted.items())))
    assert "aten.mm" in line
    assert "AssertionError" in line
    assert "incompatible" in line


def test_a_count_that_fails_reaches_the_forecast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path))
    monkeypatch.setitem(metering.flop_registry, aten.mm, refuses)
    costs = unit_costs.UnitCosts(config("llama", "float32"))(method("mezo"), Shape(1, 32))
    assert [name for name, _ in costs.uncounted] == ["aten.mm"]


@pytest.mark.parametrize("error", [AssertionError, AttributeError, TypeError, ValueError])
def test_whatever_fails_on_tensors_without_data_is_said_and_ends_nothing(
    error: Callable[[str], Exception],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path))

    def fails(*_: Any) -> Any:
        raise error("a kernel without shapes")

    monkeypatch.setattr(unit_costs, "measure", fails)
    with caplog.at_level(logging.WARNING):
        costs = unit_costs.UnitCosts(config("llama", "float32"))(method("mezo"), Shape(1, 32))
    assert costs == Costs()
    assert "llama" in caplog.text
    assert "a kernel without shapes" in caplog.text


def test_what_torch_lacks_for_a_gpu_is_measured_as_on_a_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the costs of a machine where torch sees no GPU."""
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path))

    def costs(folder: str) -> Costs:
        monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / folder))
        asked = unit_costs.UnitCosts(config("llama", "float32"), device="cuda")
        return asked(method("mezo"), Shape(1, 32))

    on_processor = costs("without")
    real = unit_costs.measure
    tried = []

    def lacks(*arguments: Any) -> Costs:
        tried.append(arguments[-1])
        if arguments[-1] != "cpu":
            raise NotImplementedError("no fake kernel of this GPU's")
        return real(*arguments)

    monkeypatch.setattr(unit_costs, "measure", lacks)
    monkeypatch.setattr(unit_costs, "stand_ins", lambda device: (device, "cpu"))
    with caplog.at_level(logging.WARNING):
        assert costs("with") == on_processor
    assert tried == ["cuda", "cpu"]
    assert not caplog.text
