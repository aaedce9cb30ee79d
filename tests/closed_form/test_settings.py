"""Oracle: closed forms. A value changes where its dotted name points and nowhere else; each refusal
names its setting."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from blockwalk.plan.choices import LoraSettings, MeshSettings, PrefixSettings
from blockwalk.plan.methods import METHODS, method
from blockwalk.plan.parsing import adapter_settings, did_you_mean, parse_bytes
from blockwalk.plan.placement import Codec, Placement, Tier
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import DataSettings, RunConfig
from blockwalk.plan.settings import override, own_names, setting_names, tables
from blockwalk.train.config import from_mapping
from tests.support.messages import refused
from tests.support.toy_model import toy

pytestmark = pytest.mark.fast


def changed(before: Plan, after: Plan) -> set[str]:
    """The fields in which two plans differ."""
    return {
        f.name
        for f in dataclasses.fields(Plan)
        if getattr(before, f.name) != getattr(after, f.name)
    }


def test_a_setting_changes_what_its_name_points_to_and_nothing_else() -> None:
    """Dotted, nested, and both at once, over a value that is itself replaced."""
    plan = method("plain")
    for given in ({"optimizer.learning_rate": "2e-4"}, {"optimizer": {"learning_rate": 2e-4}}):
        found = override(plan, given)
        assert changed(plan, found) == {"optimizer"}
        assert found.optimizer == dataclasses.replace(plan.optimizer, learning_rate=2e-4)
    found = override(
        plan,
        {
            "prefetch": "3",
            "trainable": "host × fp32",
            "trainable.codec": "bf16",
            "recompute": "all",
        },
    )
    assert changed(plan, found) == {"prefetch", "trainable", "recompute"}
    assert found.trainable == Placement(Tier.HOST, Codec.BF16)


def test_a_placement_without_a_group_keeps_the_plans() -> None:
    """The rows over ranks: another tier or codec does not gather anything elsewhere."""
    plan = method("zero3", mesh={"world": 4, "ranks_per_node": 2})
    assert plan.frozen.group == "world"
    assert override(plan, {"frozen": "device × int8"}).frozen == Placement(
        Tier.DEVICE, Codec.INT8, "world"
    )
    assert override(plan, {"frozen": plan.frozen}) == plan


@pytest.mark.parametrize("group", ["box", "x", "exaflop", "two x two"])
@pytest.mark.parametrize("divider", [" × ", " x ", "×", "x"])
def test_a_group_whose_name_has_an_x_can_be_named(group: str, divider: str) -> None:
    """Closed form: what was joined is taken apart again, whichever sign of the two divides it."""
    plan = method(
        "hzp",
        mesh={"world": 4, "groups": [f"{group}=2"]},
        trainable=divider.join(("device", "raw", "node")),
    )
    again = override(
        plan, {kind: divider.join(("device", "raw", group)) for kind in ("frozen", "trainable")}
    )
    assert again.trainable == again.frozen == Placement(group=group)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefetc": 1}, "prefetc prefetch"),
        ({"prefetch.depth": 1}, "prefetch depth"),
        ({"optimizer.lr": 1}, "optimizer.lr optimizer.learning_rate"),
        ({"optimizer": 3}, "optimizer optimizer.name 3"),
        ({"prefetch": "deep"}, "prefetch deep"),
        ({"recompute": "some"}, "recompute"),
    ],
)
def test_a_setting_that_is_none_is_refused(given: dict[str, Any], message: str) -> None:
    with refused(ValueError, message):
        override(method("plain"), given)


def test_every_name_that_is_listed_can_be_set() -> None:
    """Of every row: setting a value to what it is changes nothing. Settings that rows have of their
    own are not the plan's (tests/cli/test_row_settings.py)."""
    for row in METHODS.values():
        plan = row()
        of_rows = own_names(tables())
        for name in setting_names(plan):
            if name in of_rows:
                continue
            head, _, part = name.partition(".")
            value = getattr(plan, head)
            assert override(plan, {name: getattr(value, part) if part else value}) == plan, name
    with refused(ValueError, "method mepb mebp zo2"):
        method("mepb")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("18GB", 18 * 10**9),
        ("512MiB", 2**29),
        ("1.5 kb", 1500),
        ("2 TiB", 2**41),
        ("7", 7),
        (7, 7),
        ("3b", 3),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


def test_names_that_were_probably_meant() -> None:
    """The nearest; else what other libraries call it; else the only one that ends so; else
    nothing."""
    known = setting_names()
    assert did_you_mean("lr", known) == "; did you mean 'optimizer.learning_rate'?"
    assert did_you_mean("eps", known) == "; did you mean 'optimizer.eps'?"
    assert did_you_mean("optimizr.name", known) == "; did you mean 'optimizer.name'?"
    assert did_you_mean("betas", known) == "; did you mean 'optimizer.betas'?"
    assert did_you_mean("zzzzzz", known) == ""


def test_adapters_are_read_as_every_other_setting() -> None:
    given = {
        "rank": "8",
        "alpha": 16,
        "target_modules": "q_proj, v_proj",
        "options": {"use_rslora": True},
    }
    wanted = LoraSettings(
        rank=8, alpha=16.0, target_modules=("q_proj", "v_proj"), options={"use_rslora": True}
    )
    assert adapter_settings(given) == wanted
    with refused(ValueError, "lora.rnk lora.rank"):
        adapter_settings({"rnk": 8})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"num_virtual_tokens": 5, "init_weights": "text"},
            "prefix.init_weights text tokens random zero",
        ),
        ({"num_virtual_tokens": 5, "rank": 8}, "prefix.rank"),
        ({"target_modules": []}, "lora.target_modules lora.options"),
    ],
)
def test_adapters_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str) -> None:
    with refused(ValueError, message):
        adapter_settings(wrong)


@pytest.mark.parametrize(
    "given", [{"prefix": {"num_virtual_tokens": 5}}, {"lora": {"rank": 4}}, {}]
)
@pytest.mark.parametrize("name", ["mebp", "mezo"])
def test_what_is_trained(given: dict[str, Any], name: str) -> None:
    """Oracle: the settings themselves; a method whose frozen weights are codes means LoRA unless a
    prefix is given. And a run's own file gives the run again."""
    run = from_mapping({"model": "m", "method": name, **given})
    wanted = {"prefix": PrefixSettings(5), "lora": LoraSettings(4)}
    assert run.adapters == next(
        (wanted[key] for key in given), LoraSettings() if name == "mebp" else None
    )
    assert from_mapping(run.to_mapping()) == run


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({name: -1}, f"{name} -1 0") for name in ("max_steps", "eval_every", "save_every")),
        *(({name: 0}, f"{name} 0 1") for name in ("keep_checkpoints", "log_every")),
        ({"start_timeout": 0.0}, "start_timeout 0.0 0"),
        ({"data": DataSettings(eval_limit=-1)}, "data.eval_limit -1"),
        ({"data": DataSettings(max_length=1)}, "data.max_length 1 2"),
        ({"data": DataSettings(label_scores="max")}, "data.label_scores max mean sum"),
        ({"data": DataSettings(padding_multiple=0)}, "data.padding_multiple 0"),
        ({"prefix": PrefixSettings(-1)}, "prefix.num_virtual_tokens -1 0"),
        ({"prefix": PrefixSettings(5), "lora": LoraSettings()}, "prefix lora"),
        ({"prefix": PrefixSettings(5), "data": DataSettings(packing=True)}, "data.packing prefix"),
        ({"data": DataSettings(label_words=("a", "b"))}, "data.template data.label_words"),
        (
            {"batch_size": 9, "plan": method("plain", gradient_accumulation_steps=2)},
            "gradient_accumulation_steps=2 9",
        ),
        (
            {"batch_size": 6, "plan": method("distzo2", mesh={"world": 4, "data": 4})},
            "mesh.data=4 gradient_accumulation_steps=1",
        ),
    ],
)
def test_a_run_with_one_setting_out_of_range_is_refused(
    wrong: dict[str, Any], message: str
) -> None:
    with refused(ValueError, message):
        RunConfig(**wrong)


def test_ranks_agree_on_all_but_the_places() -> None:
    """Two nodes keep model, data and output elsewhere; any other difference is one."""
    here = RunConfig(
        model="/a/model", data=DataSettings(train="/a/t", eval="/a/e"), output_dir="/a/out"
    )
    there = RunConfig(
        model="/b/model", data=DataSettings(train="/b/t", eval="/b/e"), output_dir="/b/out"
    )
    assert here.shared() == there.shared()
    assert here.to_mapping() != there.to_mapping()
    assert here.shared() != dataclasses.replace(there, batch_size=4).shared()
    assert here.shared() != dataclasses.replace(there, data=DataSettings(max_length=64)).shared()


def test_a_model_as_its_source_stores_it() -> None:
    """Closed form: each parameter has what is known of it; bytes are those of the codec that a
    plan's raw leaves it in."""
    model = toy(2, lora=True, tied=False)
    found = model.as_stored(
        lambda p: dataclasses.replace(p, codec=Codec.Q8_0, group_size=32) if p.quantizable else p
    )
    for unit, before in zip(found.units, model.units, strict=True):
        frozen = [p for p in before.params if not p.trainable]
        codes = sum(p.numel // 32 * 34 for p in frozen if p.quantizable)
        plain = sum(p.nbytes for p in frozen if not p.quantizable)
        assert unit.nbytes(trainable=False) == codes + plain
        assert unit.nbytes(trainable=True) == before.nbytes(trainable=True)
        assert unit.decoded(Codec.RAW) == (before.numel(trainable=False) if codes else 0)
        assert before.decoded(Codec.RAW) == 0


def test_forwards_of_a_step_are_shared_by_the_ranks_that_perturb() -> None:
    """Closed form: world = data × perturb."""
    plan = method("distzo2", mesh={"world": 4})
    assert (plan.mesh.data * plan.mesh.perturb, plan.forward_passes) == (4, 2)
    assert MeshSettings().world == 1
