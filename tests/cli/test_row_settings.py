"""Oracle: the values that went in, and dataclasses that say types, ranges and defaults. One class
of settings is lent to rows of every table; none of these is named in src."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import yaml

from blockwalk.checkpoints.changed_settings import changed_settings
from blockwalk.cli import schema, settings_help
from blockwalk.plan.codecs import CODECS
from blockwalk.plan.losses import LOSSES, LossFacts, whole_logits
from blockwalk.plan.methods import METHODS, method
from blockwalk.plan.noise_kinds import NOISES
from blockwalk.plan.parsing import Loader
from blockwalk.plan.plan import Plan
from blockwalk.plan.row_settings import RowChoice, setting
from blockwalk.plan.schedules import SCHEDULES
from blockwalk.plan.table import Table
from blockwalk.plan.tiers import TIERS
from blockwalk.plan.update_rules import RULES, RuleFacts
from blockwalk.plan.zeroth_order_kinds import KINDS, TARGETS, KindFacts
from blockwalk.train import config
from tests.support.messages import missing, refused

pytestmark = pytest.mark.fast


@dataclasses.dataclass(frozen=True)
class Own:
    """One setting of every type."""

    gamma: float = setting(2.0, least=0, most=5)
    """The power of what the label lacks."""
    count: int = setting(3, above=1)
    way: str = setting("mean", words=("mean", "sum"), help="How tokens are counted.")
    flag: bool = setting(False)
    shares: tuple[float, ...] = setting((0.5,), least=0, below=1)


TABLES: dict[str, tuple[Table[Any], str]] = {
    "loss": (LOSSES, "model"),
    "optimizer.name": (RULES, "sgd"),
    "optimizer.schedule": (SCHEDULES, "linear"),
    "zo.noise": (NOISES, "gaussian"),
    "zo.kind": (KINDS, "spsa"),
    "zo.target": (TARGETS, "weights"),
    "frozen.codec": (CODECS, "fp32"),
    "frozen.tier": (TIERS, "host"),
    "method": (METHODS, "mebp"),
}
"""Each table by the setting that names its rows, and a row to copy."""
VALUES = {"gamma": 4.5, "count": 7, "way": "sum", "flag": True, "shares": [0.25, 0.75]}


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    """A row ``mine`` in every table, with settings."""
    with ExitStack() as stack:
        for table, copied in TABLES.values():
            row = table[copied]
            table.register("mine", lambda own, row=row: row, Own)
            stack.callback(table.unregister, "mine")
        yield


def place(name: str) -> str:
    return name.removesuffix(".name")


def nested(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The settings as a YAML file has them: ``{"zo": {"noise": {"name": "mine", ...}}}``."""
    mapping: dict[str, Any] = {"name": "mine", **values}
    for part in reversed(place(name).split(".")):
        mapping = {part: mapping}
    return mapping


def of(run: config.RunConfig, name: str) -> str:
    """The row's name in a run's plan."""
    value: Any = run.plan
    for part in name.split("."):
        value = getattr(value, part)
    return str(value)


@pytest.mark.parametrize("name", TABLES)
def test_every_table(name: str) -> None:
    """As YAML, dotted, and as flags give them as text; what is saved is read back; the row that the
    table answers was made with the values."""
    expected = {**VALUES, "shares": (0.25, 0.75)}
    dotted = {f"{place(name)}.{key}": value for key, value in VALUES.items()}
    text = {
        key: "0.25,0.75" if key.endswith("shares") else str(value).lower()
        for key, value in dotted.items()
    }
    runs = [
        config.from_mapping(nested(name, VALUES)),
        config.from_mapping({name: "mine", **dotted}),
        config.from_mapping({name: "mine"}, text.items()),
        config.from_mapping(nested(name, {"gamma": 1}), dotted.items()),
    ]
    assert {of(run, name) for run in runs} == {of(runs[0], name)}
    choice = RowChoice(of(runs[0], name))
    assert (choice.name, choice.settings) == ("mine", expected)
    saved = config.dump(runs[0])
    assert config.from_mapping(yaml.load(saved, Loader)) == runs[0]
    assert pickle.loads(pickle.dumps(runs[0].plan)) == runs[0].plan
    assert of(config.from_mapping(nested(name, {})), name) != of(runs[0], name)

    table, copied = TABLES[name]
    seen: list[Own] = []
    table.unregister("mine")
    row = table[copied]
    table.register("mine", lambda own: seen.append(own) or row, Own)  # type: ignore[func-returns-value]
    assert table[of(runs[0], name)] is row
    assert seen == [Own(), Own(**expected)], "as it is described, and as the run has it"


BAD = {
    "out of range": ({"gamma": 9}, "gamma 9 5"),
    "below": ({"count": 1}, "count 1 above"),
    "not finite": ({"gamma": float("nan")}, "gamma nan 5"),
    "a word": ({"way": "max"}, "way max mean sum"),
    "a type": ({"count": 2.5}, "count 2.5 whole"),
    "true": ({"gamma": True}, "gamma True 5"),
    "one of a list": ({"shares": [0.5, 1.0]}, "shares 1.0 below"),
    "unknown": ({"gama": 1}, "gama gamma"),
}


@pytest.mark.parametrize("fault", BAD)
@pytest.mark.parametrize("name", TABLES)
def test_one_line_with_name_value_and_range(name: str, fault: str) -> None:
    values, facts = BAD[fault]
    (key,) = values
    with refused(ValueError, facts, f"{place(name)}.{key}") as refusal:
        config.from_mapping(nested(name, values))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", TABLES)
def test_a_setting_of_another_row(name: str) -> None:
    """A row without settings refuses those of ``mine``, and says whose they are."""
    with refused(ValueError, f"{place(name)}.gamma", TABLES[name][1], "mine"):
        config.from_mapping({name: TABLES[name][1], f"{place(name)}.gamma": 1})


def test_one_that_must_be_given() -> None:
    @dataclasses.dataclass(frozen=True)
    class Needs:
        rho: float = setting(0.9, above=0, required=True)

    RULES.register("needy", lambda own: RuleFacts(), Needs)
    try:
        with refused(ValueError, "optimizer.rho missing needy above 0"):
            config.from_mapping({"optimizer.name": "needy"})
        run = config.from_mapping({"optimizer": {"name": "needy", "rho": 0.5}})
        assert run.plan.optimizer.name == "needy(rho=0.5)"
        assert run.to_mapping()["optimizer"]["rho"] == 0.5
    finally:
        RULES.unregister("needy")


@pytest.mark.parametrize("name", TABLES)
def test_help_and_schema(name: str) -> None:
    """Type, range, default and sentence of each of them, once."""
    lines = "\n".join(settings_help.lines("train", f"{place(name)}."))
    for field, facts in (
        ("gamma", ("X", "lacks", "0", "5", "2.0")),
        ("way", ("mean|sum", "tokens")),
        ("flag", ("true", "false")),
    ):
        assert lines.count(f"--{place(name)}.{field} ") == 1
        form, sentence = settings_help.described(f"{place(name)}.{field}")
        assert not missing(f"{form} {sentence}", *facts), sentence
    text = json.dumps(schema.schema())
    assert text.count('"gamma"') >= len(TABLES)


def test_a_resumed_run_says_what_changed() -> None:
    """Oracle: both values."""
    runs = [
        config.from_mapping(
            {**nested("loss", {"gamma": gamma}), **nested("zo.noise", {"count": n})}
        )
        for gamma, n in ((1, 2), (2, 4))
    ]
    saved, now = (run.to_mapping() for run in runs)
    changes = changed_settings(saved, now)
    assert "loss.gamma: 1.0 → 2.0" in changes
    assert "zo.noise.count: 2 → 4" in changes
    first = config.from_mapping({"loss": "chunked"}).to_mapping()
    assert not missing("; ".join(changed_settings(first, now)), "loss", "chunked", "mine")
    assert not missing("; ".join(changed_settings(now, first)), "loss", "chunked", "mine")


def test_equal_plans() -> None:
    """Defaults that are written and those that are not are one plan."""
    assert method("plain", loss="mine") == method("plain", loss={"name": "mine", "gamma": 2})
    assert method("plain", loss="mine") != method("plain", loss={"name": "mine", "gamma": 3})
    assert Plan(loss="mine").loss == Plan(loss="mine(gamma=2)").loss


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("mine(gamma=x)", "mine gamma=x"),
        ("mine(1)", "mine(1)"),
        ("mine(gamma=1", "mine(gamma=1"),
        ("mine(gamma=__import__('os'))", "mine"),
        ("model(gamma=1)", "loss.gamma model mine"),
        ("theirs(gamma=1)", "loss theirs"),
    ],
)
def test_texts_that_are_no_row(text: str, facts: str) -> None:
    with refused(ValueError, *facts.split()):
        config.from_mapping({"loss": text})


def test_classes_that_describe_no_settings() -> None:
    """They are refused where the row is registered, and leave no row behind."""
    thawed = dataclasses.make_dataclass("Thawed", [("a", int, setting(1))])
    untyped = dataclasses.make_dataclass("Untyped", [("a", dict, None)], frozen=True)
    open_ended = dataclasses.make_dataclass("Open", [("a", int)], frozen=True)
    for cls, facts in ((thawed, "frozen"), (untyped, "Untyped.a"), (open_ended, "Open.a default")):
        with refused(ValueError, facts):
            LOSSES.register("bad", lambda own: LossFacts("m:f", whole_logits), cls)
        assert "bad" not in LOSSES
    with refused(ValueError, "optimizer.rho settings"):
        RuleFacts(settings=("rho",))
    with refused(ValueError, "zo.rho settings"):
        KindFacts((1.0,), settings=("rho",))
