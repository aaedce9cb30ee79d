"""Oracle: transformers' own logits for the reference; a run that nobody killed for those that were;
what a user types and what is in the folder afterwards."""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import blockwalk
from blockwalk.cli import main
from blockwalk.plan.methods import method
from tests.conftest import TinyRun
from tests.forked import Forked
from tests.support.messages import refused

LORA = {"rank": 4}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pairs: the answer in capitals is wanted."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    draw = random.Random(1)
    with path.open("w") as file:
        for number in range(12):
            word = draw.choice("abcdefgh") * (1 + number % 5)
            record = {
                "prompt": f"say {word}: ",
                "chosen": word.upper(),
                "rejected": word + draw.choice("xyz"),
            }
            print(json.dumps(record), file=file)
    return path


def run_of(tiny_run: TinyRun, pairs: Path, out: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(tiny_run.model),
        "data": {"train": str(pairs), "show_first": False},
        "objective": {"name": "dpo", "beta": 0.3},
        "output_dir": str(out),
        "batch_size": 2,
        "eval_batches": 1,
        "max_steps": 3,
        "lora": LORA,
        "optimizer": {"learning_rate": 1e-2},
        **more,
    }


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def reference_of(out: Path) -> dict[int, float]:
    """The numbers of ``data.train`` by row."""
    lines = [line for line in lines_of(out / "reference.jsonl") if line.get("set") == "data.train"]
    return {
        row: value for line in lines for row, value in zip(line["rows"], line["sums"], strict=True)
    }


def digest_of(out: Path) -> str:
    """A digest of the adapter, and of losses and margins by step."""
    adapter = (out / "adapter" / "adapter_model.safetensors").read_bytes()
    steps = [
        (line["step"], line["loss"], line.get("margin")) for line in lines_of(out / "metrics.jsonl")
    ]
    return hashlib.sha256(adapter + json.dumps(steps).encode()).hexdigest()


@pytest.fixture(scope="module")
def whole(tiny_run: TinyRun, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with held-out pairs that nobody killed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    blockwalk.train(run_of(tiny_run, pairs, out))
    return out


def test_the_reference_is_the_models_own(tiny_run: TinyRun, pairs: Path, whole: Path) -> None:
    """The log-probability of each answer with its end, by whole logits; the first step's loss is
    that of a margin of 0."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_run.model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    expected = []
    for record in lines_of(pairs):
        prompt = tokenizer(record["prompt"])["input_ids"]
        for name in ("chosen", "rejected"):
            answer = [*tokenizer(record[name])["input_ids"], tokenizer.eos_token_id]
            with torch.no_grad():
                logits_SV = model(torch.tensor([prompt + answer])).logits[0].double()
            logp_SV = logits_SV.log_softmax(-1)[len(prompt) - 1 : -1]
            expected.append(float(logp_SV.gather(1, torch.tensor(answer)[:, None]).sum()))
    sums = reference_of(whole)
    assert [sums[row] for row in range(24)] == pytest.approx(expected, abs=2e-5)
    first, *_, last = lines_of(whole / "metrics.jsonl")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert last["margin"] > 0.05
    assert last["reward_accuracy"] > 0.4


def test_evaluations_say_rewards(
    tiny_run: TinyRun, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the definition, from the margin of a run with one held-out batch. Before the first
    step the loss is log 2; afterwards accuracy and margin have risen with it. ``blockwalk eval``
    measures the same from the reference beside the run, and without it says so."""
    data = {"train": str(pairs), "eval": str(pairs), "show_first": False}
    outcome = blockwalk.train(
        run_of(tiny_run, pairs, tmp_path / "run", data=data, max_steps=6, batch_size=4)
    )
    before, after = outcome.before, outcome.after
    assert before is not None
    assert after is not None
    assert before.loss == pytest.approx(math.log(2), abs=1e-5)
    assert before.margin == pytest.approx(0, abs=1e-5)
    assert after.loss < before.loss
    assert after.reward_accuracy is not None
    assert after.reward_accuracy > 0.5
    assert after.margin is not None
    assert after.margin > 0.05
    assert "reward accuracy" in "\n".join(outcome.lines())
    capsys.readouterr()
    assert main.main(["eval", str(tmp_path / "run"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["loss"] == pytest.approx(after.loss, rel=1e-6)
    assert figures["margin"] == pytest.approx(after.margin, rel=1e-5)
    (tmp_path / "run" / "reference.jsonl").unlink()
    assert main.main(["eval", str(tmp_path / "run"), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["margin"] is None
    assert "reference" in printed.err


@pytest.mark.parametrize(
    ("lines", "number"),
    [(3, signal.SIGKILL), (4, signal.SIGTERM), (12, signal.SIGKILL)],
)
def test_killed_runs_end_as_if_they_had_not_been(
    lines: int, number: signal.Signals, tiny_run: TinyRun, pairs: Path, whole: Path, tmp_path: Path
) -> None:
    """A signal while the reference is evaluated, and while the run steps: what was known of it
    stays."""
    out = tmp_path / "run"
    arguments = (
        f"--model {tiny_run.model} --data.train {pairs} --objective dpo --objective.beta 0.3"
        f" --output_dir {out} --batch_size 2 --eval_batches 1 --max_steps 3 --lora.rank 4"
        " --optimizer.learning_rate 1e-2 --data.show_first false --save_every 1"
        " --resume_from_checkpoint latest"
    ).split()
    process = Forked("train", *arguments)
    path = out / "reference.jsonl"
    ready = out / "checkpoint-000001" if lines == 12 else None

    def reached() -> bool:
        known = path.exists() and path.read_text().count("\n") >= lines
        return known and (ready is None or ready.exists())

    while not reached() and process.poll() is None:
        time.sleep(0.0005)
    process.send_signal(number)
    process.communicate(timeout=300)
    before = path.read_bytes()
    process = Forked("train", *arguments)
    text = "".join(process.communicate(timeout=300))
    assert process.returncode == 0, text
    assert path.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert digest_of(out) == digest_of(whole)


def test_a_reference_by_name_is_as_good(
    tiny_run: TinyRun, pairs: Path, whole: Path, tmp_path: Path
) -> None:
    """The model itself by its path, in place of the run's own."""
    out = tmp_path / "run"
    blockwalk.train(run_of(tiny_run, pairs, out, reference=str(tiny_run.model)))
    assert reference_of(out) == reference_of(whole)
    assert digest_of(out) == digest_of(whole)


def test_zeroth_order(tiny_run: TinyRun, pairs: Path, tmp_path: Path) -> None:
    """Oracle: the loss of a margin of 0, which a small perturbation hardly changes; a resumed run's
    ledger."""
    given = run_of(
        tiny_run, pairs, tmp_path / "run", method="zo2", optimizer={"learning_rate": 1e-6}
    )
    blockwalk.train({**given, "max_steps": 2})
    blockwalk.train({**given, "resume_from_checkpoint": "latest"})
    losses = [line["loss"] for line in lines_of(tmp_path / "run" / "metrics.jsonl")]
    assert losses == pytest.approx([math.log(2)] * 3, abs=1e-2)


def test_kto(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Oracle: the loss at rest: σ(0) for each answer. It falls."""
    path = tmp_path / "judged.jsonl"
    with path.open("w") as file:
        for number in range(8):
            word = "abcdefgh"[number] * 3
            answer = word.upper() if number % 2 else word
            record = {"prompt": f"say {word}: ", "completion": answer, "label": bool(number % 2)}
            print(json.dumps(record), file=file)
    out = tmp_path / "run"
    data = {"train": str(path), "eval": str(path), "show_first": False}
    settings = run_of(tiny_run, path, out, data=data, objective="kto", batch_size=4, max_steps=6)
    outcome = blockwalk.train({**settings, "gradient_accumulation_steps": 2})
    assert outcome.first_loss == pytest.approx(0.5, abs=1e-4)
    assert outcome.before is not None
    assert outcome.after is not None
    assert outcome.after.loss < outcome.before.loss
    sets = {line["set"] for line in lines_of(out / "reference.jsonl")[1:]}
    assert len(sets) == 4


def test_policy_gradient(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Oracle: the loss at rest: minus the mean advantage over tokens. Held out, cross-entropy
    weighed by advantages falls."""
    path = tmp_path / "scored.jsonl"
    advantages = [1.0, -0.5, 1.0, -1.0]
    with path.open("w") as file:
        for number, advantage in enumerate(advantages):
            word = "abcd"[number] * 3
            answer = word.upper() if advantage > 0 else word
            record = {"prompt": f"say {word}: ", "completion": answer, "advantage": advantage}
            print(json.dumps(record), file=file)
    data = {"train": str(path), "eval": str(path), "show_first": False}
    settings = run_of(
        tiny_run, path, tmp_path / "run", data=data, objective="policy_gradient", batch_size=4
    )
    outcome = blockwalk.train({**settings, "max_steps": 4})
    assert outcome.first_loss == pytest.approx(-sum(advantages) / 4, abs=1e-6)
    assert outcome.before is not None
    assert outcome.after is not None
    assert outcome.after.loss < outcome.before.loss


def test_what_is_refused(tiny_run: TinyRun, pairs: Path, whole: Path, tmp_path: Path) -> None:
    """Settings that make no sense, and a reference that is not the run's."""
    out = tmp_path / "run"
    with refused(ValueError, "objective.beta 0"):
        blockwalk.train(run_of(tiny_run, pairs, out, objective={"name": "dpo", "beta": 0}))
    with refused(ValueError, "reference objective sft"):
        blockwalk.train(run_of(tiny_run, pairs, out, objective="sft", reference="elsewhere"))
    with refused(ValueError, "objective dpo loss model chunked"):
        blockwalk.train(run_of(tiny_run, pairs, out, loss="model"))
    with refused(ValueError, "objective dpo mesh.context 2"):
        method("fcdp", objective="dpo", mesh={"world": 2, "context": 2})
    again = {"resume_from_checkpoint": str(whole / "checkpoint-000003"), "max_steps": 4}
    with refused(ValueError, "objective.beta 0.3 0.2"):
        blockwalk.train(
            run_of(tiny_run, pairs, out, objective={"name": "dpo", "beta": 0.2}, **again)
        )
    text = (whole / "reference.jsonl").read_text()
    (tmp_path / "other").mkdir()
    copied = tmp_path / "other" / "checkpoint-000003"
    shutil.copytree(whole / "checkpoint-000003", copied)
    (tmp_path / "other" / "reference.jsonl").write_text(text.replace("1", "2", 40))
    with refused(ValueError, "reference.jsonl"):
        blockwalk.train(
            run_of(tiny_run, pairs, out, resume_from_checkpoint=str(copied), max_steps=4)
        )
    assert not out.exists()
