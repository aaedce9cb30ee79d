"""Oracle: the same run by `blockwalk.train` in a process that has registered the rows itself, and
the run's own last evaluation. Modules bring rows of every table, which the commands train with,
evaluate, generate with and resume; most are those of this folder."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import blockwalk
from blockwalk.cli.main import main
from blockwalk.system import row_modules
from blockwalk.walk import timed_units
from tests.conftest import TinyRun
from tests.support.messages import says
from tests.support.row_modules import new_process

FIRST_ORDER = '''
"""A method, a codec, a tier, a loss and a rule with settings, and a schedule."""
from dataclasses import dataclass
from blockwalk.estimators.losses import own_loss
from blockwalk.numerics.codecs.matrix_codec import Grid, grid_codec
from blockwalk.plan.codecs import CODECS, CodecFacts
from blockwalk.plan.losses import LOSSES, LossFacts, whole_logits
from blockwalk.plan.methods import METHODS
from blockwalk.plan.placement import Codec, Placement, Tier
from blockwalk.plan.plan import Plan
from blockwalk.plan.row_settings import setting
from blockwalk.plan.schedules import SCHEDULES
from blockwalk.plan.tiers import TIERS, TierFacts
from blockwalk.plan.update_rules import RULES, RuleFacts
from tests.extensions.test_codec import fit, nearest, values
from tests.extensions.test_tier import Compressed

@dataclass(frozen=True)
class Scale:
    scale: float = setting(1.0, above=0)
    """A factor."""

def scaled(own):
    return LossFacts(lambda ending: own_loss(ending) * own.scale, whole_logits)

def steps(own):
    def apply(settings, work, p, g, b, *, step, lr):
        b.mul_(settings.momentum).add_(g)
        p.add_(b, alpha=-lr * own.scale)
    return RuleFacts(states=("velocity",), settings=("momentum",), implementation=apply)

def from_host():
    return Plan(method="from_host", frozen=Placement(Tier.HOST, Codec("ternary")))

TIERS.register("compressed", TierFacts(pool="host", implementation=lambda *_: Compressed()))
CODECS.register("ternary", CodecFacts(bits=4, scales=("float16",), group_sizes=(32,),
    implementation=grid_codec(Grid(fit, nearest, values), limit=65504.0)))
LOSSES.register("scaled", scaled, Scale)
RULES.register("steps", steps, Scale)
METHODS.register("from_host", from_host)
SCHEDULES.register("mine", SCHEDULES["linear"])
'''
ZEROTH_ORDER = '''
"""A noise and a kind."""
import dataclasses
from blockwalk.plan.noise_kinds import NOISES, NoiseFacts
from blockwalk.plan.update_rules import RULES, RuleFacts
from tests.extensions.test_noise import Alternating
from blockwalk.plan.row_settings import setting

@dataclasses.dataclass(frozen=True)
class Rho:
    rho: float = setting(0.5, above=0, required=True)

def signs(own):
    def apply(settings, work, p, g, *, step, lr):
        p.add_(g.sign(), alpha=-lr * own.rho)
    return RuleFacts(implementation=apply)

NOISES.register("alternating",
    NoiseFacts(elementwise=False, implementation=lambda draws, place: Alternating()))
RULES.register("signs", signs, Rho)
'''
ESTIMATOR = '''
"""An estimator."""
from blockwalk.plan.estimators import ESTIMATORS
from tests.extensions.test_estimator import NAME, ROW
ESTIMATORS.register(NAME, ROW)
'''


@dataclass(frozen=True)
class Case:
    source: str
    settings: dict[str, Any]


CASES = {
    "first_order": Case(
        FIRST_ORDER,
        {
            "method": "from_host",
            "activation": "compressed",
            "loss": {"name": "scaled", "scale": 0.5},
            "lora": {"rank": 2},
            "optimizer": {"name": "steps", "scale": 3, "momentum": 0.5, "schedule": "mine"},
        },
    ),
    "zeroth_order": Case(
        ZEROTH_ORDER,
        {
            "method": "zo2",
            "trainable": "host × raw",
            "zo": {"noise": "alternating"},
            "optimizer": {"name": "signs", "rho": 0.25, "learning_rate": 1e-3},
        },
    ),
    "estimator": Case(
        ESTIMATOR, {"method": "plain", "estimator": "antithetic-pairs", "lora": False}
    ),
}


@pytest.fixture(params=CASES)
def case(
    request: pytest.FixtureRequest,
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Case:
    """The working folder has the module and a run's file."""

    def untimed(request: timed_units.Request) -> timed_units.Timed:
        raise ValueError("nothing is timed in a test")

    monkeypatch.setattr(timed_units, "measure", untimed)
    monkeypatch.chdir(tmp_path)
    Path("my_rows.py").write_text(CASES[request.param].source)
    data = {"train": str(tiny_run.train), "eval": str(tiny_run.train), "format": "text"}
    settings = {
        "model": str(tiny_run.model),
        "data": {**data, "max_length": 16, "eval_limit": 4},
        "batch_size": 2,
        "max_steps": 2,
        "output_dir": "out",
        "import": ["my_rows"],
        **CASES[request.param].settings,
    }
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    return CASES[request.param]


def command(*words: object) -> int:
    """The exit code of a command in a process that knows no rows yet."""
    with new_process():
        return main([str(word) for word in words])


def losses(folder: str) -> list[float]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_commands(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    with new_process():
        row_modules.load("my_rows")
        blockwalk.train("run.yaml", output_dir="script")
    flag = ("--import", "my_rows")
    assert command("plan", "run.yaml", *flag) == 0
    assert command("train", "run.yaml", *flag, "--max_steps", 1) == 0
    assert command("train", "run.yaml", *flag, "--resume_from_checkpoint", "latest") == 0
    says(capfd.readouterr().out, "resumed at step 1", "max_steps: 1 → 2")
    assert losses("out") == losses("script")
    evaluations = Path("out/evaluations.jsonl").read_text().splitlines()
    last = json.loads(evaluations[-1])["loss"]
    assert command("eval", "out", "--as-trained", "--data.eval_limit", 4, "--json") == 0
    evaluated = json.loads(capfd.readouterr().out)
    assert evaluated["loss"] == pytest.approx(last, rel=1e-6)
    assert command("generate", "out", "--prompt", "a", "--max_new_tokens", 2) == 0
    saved = yaml.safe_load(Path("out/config.yaml").read_text())
    assert re.fullmatch(r"my_rows@[0-9a-f]{16}", saved["import"][0])
    for name, value in case.settings["optimizer"].items() if "optimizer" in case.settings else ():
        assert saved["optimizer"][name] == value
    if Path("out/ledger.jsonl").is_file():
        replayed(saved["import"], capfd)


def replayed(modules: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """The ledger names the rule with its number, and the module; a replay needs it."""
    header = json.loads(Path("out/ledger.jsonl").read_text().splitlines()[0])
    assert header["rule"]["optimizer"] == "signs(rho=0.25)"
    assert header["modules"] == modules
    base = yaml.safe_load(Path("run.yaml").read_text())["model"]
    capfd.readouterr()
    assert command("replay", base, "out/ledger.jsonl", "again") == 2
    says(capfd.readouterr().err, "my_rows --import")
    assert command("replay", base, "out/ledger.jsonl", "again", "--import", "my_rows") == 0
    (trained,) = Path("out/model").glob("*.safetensors")
    assert (Path("again") / trained.name).read_bytes() == trained.read_bytes()
