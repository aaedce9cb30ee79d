"""Oracle: closed forms. Each number among the settings is refused by its name where no run could
have it; text that others wrote is inert in Markdown, by its specification's escapes; an address
without its password."""

from __future__ import annotations

from typing import Any

import pytest

from blockwalk.data.records import Template
from blockwalk.models.hub import without_password
from blockwalk.plan.parsing import hints_of
from blockwalk.plan.run_config import RunConfig
from blockwalk.report.card import code, escaped
from blockwalk.train import config
from tests.support.messages import refused

pytestmark = pytest.mark.fast


def numbers() -> list[str]:
    """Names of every setting that is a number."""
    names = []
    values = config.from_mapping({"lora": True, "method": "plain"}).to_mapping()
    for name in config.setting_names():
        head, _, part = name.partition(".")
        value: Any = values[head][part] if part and isinstance(values[head], dict) else values[head]
        if isinstance(value, int | float) and not isinstance(value, bool):
            names.append(name)
    return names


def test_there_are_numbers() -> None:
    assert {
        "max_steps",
        "seed",
        "lora.rank",
        "optimizer.learning_rate",
        "data.max_length",
        "zo.epsilon",
    } <= {*numbers()}
    assert hints_of(RunConfig)["start_timeout"] is float


@pytest.mark.parametrize("name", numbers())
@pytest.mark.parametrize("value", [10**30, -(10**30), ".inf", ".nan", 10**400])
def test_a_number_that_no_run_has_is_refused_by_its_name(name: str, value: Any) -> None:
    with refused(ValueError, name):
        config.from_mapping({"method": "plain", "lora": True, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("start_timeout", 1e300),
        ("lora.rank", 10**6),
        ("optimizer.learning_rate", 1e308),
        ("batch_size", 10**10),
    ],
)
def test_a_number_that_is_too_large_for_its_setting(name: str, value: Any) -> None:
    with refused(ValueError, name):
        config.from_mapping({"method": "plain", name: value})


@pytest.mark.parametrize(
    "text",
    ["{text!r} {label}", "{text:>9999} {label}", "{text} {label:d}", "{text!r:>9999} {label}"],
)
def test_a_template_takes_names_alone(text: str) -> None:
    with refused(ValueError, "name"):
        Template(text, ("a", "b"))


def test_markdown_that_others_wrote_is_inert() -> None:
    assert (
        escaped("<img src=x>\n# [a](b) `c` | *d* &lt;")
        == r"\<img src=x\> \# \[a\](b) \`c\` \| \*d\* \&lt;"
    )
    assert code("a") == "`a`"
    assert code("a`b``c") == "``` a`b``c ```"
    assert "\x1b" not in escaped("\x1b[2J") + code("\x1b[2J")


def test_an_address_is_shown_without_its_password() -> None:
    assert (
        without_password("at http://user:PW@host:9/x, https://b") == "at http://host:9/x, https://b"
    )
    assert without_password("http://user:P@W@host") == "http://host"
