"""Oracle: the parser of a run's file. The schema takes the examples, and each value of a sample
that the parser refuses, the schema refuses too; a checker of the few keywords of JSON Schema that
it uses reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from blockwalk.cli import main, schema
from blockwalk.plan.methods import METHODS
from blockwalk.plan.parsing import Loader
from blockwalk.train import config
from tests.conftest import TinyRun

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
ANNOTATIONS = {"description", "default", "title", "$schema"}
KINDS = {"string": str, "boolean": bool, "object": dict, "array": list, "null": type(None)}


def is_kind(value: Any, kind: str) -> bool:
    if kind in ("number", "integer"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "number" or float(value).is_integer())
    return isinstance(value, KINDS[kind])


def takes(part: dict[str, Any], value: Any) -> bool:
    """Whether a schema takes a value, by the specification's words for each keyword."""
    for keyword, rule in part.items():
        if keyword in ANNOTATIONS | {"additionalProperties", "patternProperties"}:
            continue
        match keyword:
            case "type":
                good = is_kind(value, rule)
            case "enum":
                good = any(
                    value == word and isinstance(value, bool) == isinstance(word, bool)
                    for word in rule
                )
            case "anyOf":
                good = any(takes(each, value) for each in rule)
            case "minimum":
                good = not is_kind(value, "number") or value >= rule
            case "maximum":
                good = not is_kind(value, "number") or value <= rule
            case "pattern":
                good = not isinstance(value, str) or re.search(rule, value) is not None
            case "items":
                good = not isinstance(value, list) or all(takes(rule, each) for each in value)
            case "minItems":
                good = not isinstance(value, list) or len(value) >= rule
            case "maxItems":
                good = not isinstance(value, list) or len(value) <= rule
            case "properties":
                good = not isinstance(value, dict) or all(
                    known(part, name, each) for name, each in value.items()
                )
            case _:
                raise AssertionError(f"the checker does not know {keyword}")
        if not good:
            return False
    return True


def known(part: dict[str, Any], name: str, value: Any) -> bool:
    if name in part["properties"]:
        return takes(part["properties"][name], value)
    if any(re.search(pattern, name) for pattern in part.get("patternProperties", {})):
        return True
    return part.get("additionalProperties", True) is not False


SCHEMA = schema.schema()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name
)
def test_the_examples_are_valid(path: Path) -> None:
    assert takes(SCHEMA, yaml.load(path.read_text(), Loader=Loader))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_setting_at_its_default_is_valid(method: str) -> None:
    """Oracle: the run's own file, which has every setting."""
    for lora in (True, False):
        if method != "mebp" or lora:
            settings = {"method": method, "lora": lora, "model": "m"}
            text = config.dump(config.from_mapping(settings))
            assert takes(SCHEMA, yaml.load(text, Loader=Loader))


GOOD: tuple[dict[str, Any], ...] = (
    {
        "optimizer": {
            "warmup_steps": 0.03,
            "betas": [0.9, 0.95],
            "learning_rate": 1e-4,
            "schedule": "polynomial",
        }
    },
    {"optimizer.learning_rate": 1e-4, "lora.options.use_dora": True},
    {"lora": {"rank": 4, "options": {"use_rslora": True}, "target_modules": ["q_proj"]}},
    {"lora": "no", "frozen": "disk"},
    {"frozen": "disk x nf4"},
    {"frozen": {"codec": "nf4"}},
    {"budget": "8 GiB", "resident": -1, "seed": 0},
    {
        "data": {
            "train": ["a.jsonl", "b.jsonl"],
            "weights": [1, 2],
            "label_words": ["no", "yes"],
            "template": "{a} {label}",
        }
    },
    {"report_to": "none", "epochs": 0.5, "compute_dtype": "bf16"},
)


@pytest.mark.parametrize("settings", GOOD, ids=str)
def test_what_the_parser_takes_is_valid(settings: dict[str, Any]) -> None:
    config.from_mapping(settings)
    assert takes(SCHEMA, settings)


BAD: tuple[dict[str, Any], ...] = (
    {"batch_sise": 8},
    {"optimizer": {"learning_rat": 1}},
    {"lora": {"rnk": 4}},
    {"batch_size": 0},
    {"batch_size": "many"},
    {"batch_size": 2.5},
    {"batch_size": True},
    {"batch_size": 2**31},
    {"seed": -1},
    {"prefetch": -1},
    {"resident": -2},
    {"model": 7},
    {"recompute": "some"},
    {"method": "mebb"},
    {"estimator": "forward"},
    {"update": {"timing": "never"}},
    {"optimizer": {"name": "adamx"}},
    {"optimizer": {"schedule": "sine"}},
    {"optimizer": {"betas": [0.9]}},
    {"optimizer": {"learning_rate": -1}},
    {"optimizer": 3},
    {"frozen": "disk × int5"},
    {"frozen": "disk × int4 × node × world"},
    {"frozen": {"teir": "disk"}},
    {"data": {"max_length": 1}},
    {"data": {"packing": "perhaps"}},
    {"data": {"label_words": [0, 1]}},
    {"lora": {"options": 3}},
    {"lora": {"rank": 2**17}},
    {"budget": "much"},
    {"mesh": {"data": 0}},
    {"zo": {"kind": "other"}},
)


@pytest.mark.parametrize("settings", BAD, ids=str)
def test_what_the_parser_refuses_the_schema_refuses(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        config.from_mapping(settings)
    assert not takes(SCHEMA, settings)


def test_each_setting_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the list of settings; what the command prints is the schema."""
    assert main.main(["settings", "--schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(SCHEMA))
    for name in config.setting_names():
        if not name.startswith(tuple(f"{place}." for place in config.PLACEMENTS)):
            section, _, field = name.rpartition(".")
            part = printed["properties"][section] if section else printed
            inner = next((each for each in part.get("anyOf", ()) if "properties" in each), part)
            assert len(inner["properties"][field]["description"]) > 10, name


def test_a_new_file_points_to_the_schema_that_lies_beside_it(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["init", str(tiny_run.model), "--train", str(tiny_run.train), "--out"]
    assert main.main([*arguments, "a.yaml"]) == 0
    Path(schema.FILE).write_text(json.dumps(SCHEMA))
    assert main.main([*arguments, "b.yaml"]) == 0
    line = f"# yaml-language-server: $schema={schema.FILE}\n"
    assert line not in Path("a.yaml").read_text()
    assert Path("b.yaml").read_text().startswith(line)
    assert takes(SCHEMA, yaml.load(Path("b.yaml").read_text(), Loader=Loader))
