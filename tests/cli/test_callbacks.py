"""Oracle: the files that the same run writes, line by line; TensorBoard's event file, read back by
its own protocol buffers; autograd for a loss of the caller's own."""

from __future__ import annotations

import json
import math
import runpy
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import blockwalk
from blockwalk.cli import main
from blockwalk.simulate import hardware
from blockwalk.system.atomic_files import whole_lines
from blockwalk.train import config, preflight
from blockwalk.train.callbacks import tracker_names, trackers
from blockwalk.walk.walker import Walker
from tests.conftest import TinyRun
from tests.models import tiny_model
from tests.support.callback_settings import settings
from tests.support.messages import refused, says


@pytest.fixture(scope="module")
def told(
    tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[blockwalk.Event]]:
    """A run of six steps that a callback ends after four, with a tracker beside it."""
    out = tmp_path_factory.mktemp("run") / "out"
    events = []

    def note(event: blockwalk.Event) -> bool:
        events.append(event)
        return event.name == "step" and event.step == 4

    more = {
        "max_steps": 6,
        "eval_every": 2,
        "save_every": 2,
        "report_to": ["tensorboard"],
        "run_name": "first",
    }
    outcome = blockwalk.train(settings(tiny_run, out, **more), callbacks=[note])
    assert (outcome.steps, outcome.stopped_by, outcome.after is not None) == (4, None, True)
    return out, events


def test_callbacks_are_told_what_the_files_hold(told: tuple[Path, list[blockwalk.Event]]) -> None:
    out, events = told
    names = [event.name for event in events]
    assert (names[0], names[-1]) == ("begin", "end")
    assert events[0].values == json.loads((out / "forecast.json").read_text())
    assert [event.values for event in events if event.name == "step"] == whole_lines(
        out / "metrics.jsonl"
    )
    assert [event.values for event in events if event.name == "evaluation"] == whole_lines(
        out / "evaluations.jsonl"
    )
    assert [event.step for event in events if event.name == "evaluation"] == [0, 2, 4]
    saved = [event.values["saved_to"] for event in events if event.name in ("checkpoint", "end")]
    assert saved == [
        str(out / name) for name in ("checkpoint-000002", "checkpoint-000004", "model")
    ]
    assert all(Path(folder).is_dir() for folder in saved)


def test_a_tracker_gets_every_figure(told: tuple[Path, list[blockwalk.Event]]) -> None:
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    out, _ = told
    found: dict[str, dict[int, float]] = {}
    assert [path.name for path in (out / "trackers").iterdir()] == ["first"]
    for path in (out / "trackers").rglob("*tfevents*"):
        data = path.read_bytes()
        at = 0
        while at < len(data):  # length, checksum, event, checksum
            (size,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    for tag, name, file in (
        ("train", "loss", "metrics"),
        ("train", "peak_bytes", "metrics"),
        ("eval", "loss", "evaluations"),
    ):
        expected = {line["step"]: line[name] for line in whole_lines(out / f"{file}.jsonl")}
        assert found[f"{tag}/{name}"] == pytest.approx(expected, rel=1e-6)
    assert found["forecast/tensor_bytes"][0] > 0


@pytest.mark.parametrize(
    ("environment", "project"), [({}, "blockwalk"), ({"WANDB_PROJECT": "mine"}, "mine")]
)
def test_a_tracker_is_told_its_project_and_the_runs_name(
    environment: dict[str, str], project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: accelerate's own tracker, which hands both to wandb.init."""
    from accelerate import PartialState, tracking

    told: dict[str, Any] = {}
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(init=lambda **names: told.update(names))
    )
    PartialState(cpu=True)
    first, arguments = tracker_names("wandb", "my-run", environment)
    tracking.WandBTracker(first, **arguments).start()
    assert told == {"project": project, "name": "my-run"}


def test_none_and_all_are_trackers_as_in_transformers() -> None:
    """Oracle: accelerate's list of the trackers that are installed."""
    from accelerate import tracking

    assert trackers(()) == trackers(("none",)) == []
    assert len(trackers(("all",))) == len(tracking.get_available_trackers())
    with refused(ValueError, "report_to none tensorboard all"):
        trackers(("none", "tensorboard"))
    for name in ("none", "all"):
        assert config.from_mapping({"report_to": name}).report_to == (name,)


def test_a_model_card_is_one_for_the_hub(
    told: tuple[Path, list[blockwalk.Event]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: huggingface_hub, which reads it; the run's own figures and configuration."""
    from huggingface_hub import ModelCard

    from blockwalk.train import config

    out, _ = told
    assert main.main(["report", str(out), "--card"]) == 0
    assert f"blockwalk push {out} OWNER/NAME" in capsys.readouterr().out
    card = ModelCard.load(out / "model" / "README.md")
    assert (card.data["library_name"], card.data["tags"]) == (
        "transformers",
        ["blockwalk", "plain"],
    )
    losses = [line["loss"] for line in whole_lines(out / "metrics.jsonl")]
    tenth = math.ceil(len(losses) / 10)
    first = sum(losses[:tenth]) / tenth
    last = sum(losses[-tenth:]) / tenth
    assert (
        f"| training loss, means of the first and the last tenth | {first:.4f} → {last:.4f} |"
        in card.text
    )
    (out / "again.yaml").write_text(card.text.partition("```yaml\n")[2].partition("```")[0])
    again = config.load(out / "again.yaml")
    run = config.load(out / "config.yaml")
    data = replace(again.data, train=run.data.train, eval=run.data.eval)
    assert replace(again, model=run.model, data=data, output_dir=run.output_dir) == run, (
        "but for this machine's paths"
    )
    assert str(out.parent) not in card.text
    assert (out / "model" / "loss.svg").read_text().startswith("<svg")


def test_a_learning_rate_and_a_loss_of_ones_own() -> None:
    """Autograd through the whole model, for a loss that counts wrong tokens double; rates given in
    the loop."""
    torch.manual_seed(0)
    batch = {
        "input_ids": (ids := torch.randint(0, 64, (2, 9))),
        "labels": ids,
        "attention_mask": torch.ones_like(ids),
    }

    def loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        flat = logits[:, :-1].float().flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        each = torch.nn.functional.cross_entropy(flat, labels, reduction="none")
        return (each * (1 + (flat.argmax(-1) != labels))).mean()

    model = tiny_model("llama").float()
    theirs = tiny_model("llama").float()
    theirs.load_state_dict(model.state_dict())
    loss(theirs(**{k: v for k, v in batch.items() if k != "labels"}).logits, batch).backward()
    plan = blockwalk.method(
        "plain", optimizer={"name": "sgd", "learning_rate": 9.0}, recompute="all"
    )
    with Walker(model, plan, objective=loss, device="cpu") as walker:
        found = walker.gradients(batch)
        losses = [walker.step(batch, learning_rate=rate).loss for rate in (0.0, 0.25, 0.0)]
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)
    assert losses[0] == losses[1] > losses[2], "a step at rate 0 changes nothing"


def test_a_dry_run_says_what_will_happen_and_writes_nothing(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the data file, whose first record is shown with its label word as what is learnt; the
    folder that is not made."""
    arguments = ["train", *tiny_run.arguments(tmp_path / "out"), "--eval_every", "5", "--dry-run"]
    assert main.main([*arguments, "--data.eval", "", "--lora.rank", "5000", "--epochs", "3"]) == 0
    said = capsys.readouterr().out
    first = json.loads(tiny_run.train.read_text().splitlines()[0])
    assert f"{first['text']} It was⟦ {first['label']}⟧" in said
    assert "64 sequences" in said
    assert "48 steps" in said
    says(said, "eval_every 5 data.eval")
    says(said, "lora.rank 5000 64")
    assert said.count("no warm-up") == 1
    titles = [line[:9].rstrip() for line in said.splitlines()[:6]]
    assert titles == ["device", "model", "memory", "data", "held out", "saved to"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"optimizer": {"schedule": "cosine", "warmup_steps": 0.1}},
            "defaults: no clipping; other tools differ",
        ),
        ({"optimizer": {"schedule": "linear", "warmup_steps": 5, "max_grad_norm": 1}}, None),
        ({"optimizer": {"schedule": "constant", "warmup_steps": 0, "max_grad_norm": 0}}, None),
        ({"method": "mezo"}, None),
    ],
)
def test_defaults_that_differ_from_other_tools_are_said_unless_set(
    settings: dict[str, Any], line: str | None
) -> None:
    """Oracle: the settings, by hand; zeroth order has the defaults of its original."""
    lines = list(preflight.usual_elsewhere(config.from_mapping(settings)))
    assert len(lines) == (line is not None)
    assert line is None or lines[0].startswith(line)


def test_sequences_beyond_the_models_positions_are_noted(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the configuration of the model, which was made for 128."""
    assert main.main(["plan", "--model", str(tiny_run.model), "--data.max_length", "129"]) == 0
    says(capsys.readouterr().out, "129 128 positions")
    assert main.main(["plan", "--model", str(tiny_run.model), "--data.max_length", "128"]) == 0
    assert "positions" not in capsys.readouterr().out
    prefixed = ["--prefix.num_virtual_tokens", "5", "--data.max_length"]
    assert main.main(["plan", "--model", str(tiny_run.model), *prefixed, "124"]) == 0
    says((said := capsys.readouterr().out), "129 5 prefix")
    says(said, "data.max_length 123")
    assert main.main(["plan", "--model", str(tiny_run.model), *prefixed, "123"]) == 0
    assert "positions" not in capsys.readouterr().out


@pytest.mark.parametrize("given", [{"data.task": "sst2"}, {"data.eval": "held_out.jsonl"}, {}])
def test_what_is_never_evaluated_is_noted(given: dict[str, str], tiny_run: TinyRun) -> None:
    """Oracle: the settings: a task brings held-out records of its own."""
    run = config.from_mapping({"model": str(tiny_run.model), "eval_every": 5, **given})
    assert any("nothing is evaluated" in note for note in preflight.notes(run, 8)) == (not given)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_best_plan_is_a_file_that_trains_alike(
    steps: int, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the configuration that the printed YAML is read as: the run's own settings, under the
    best plan."""
    given = [
        *tiny_run.arguments(tmp_path / "out"),
        "--max_steps",
        "7",
        "--optimizer.learning_rate",
        "3e-3",
    ]
    given += ["--gradient_accumulation_steps", str(steps), "--update.timing", "step"]
    assert main.main(["plan", *given, "--lora.rank", "4", "--hardware", "laptop"]) == 0
    text = capsys.readouterr().out.partition("as a file (run.yaml):\n\n")[2]
    (tmp_path / "run.yaml").write_text(text)
    found = config.load(tmp_path / "run.yaml")
    assert (found.max_steps, found.lora and found.lora.rank, found.batch_size) == (7, 4, 4)
    assert found.plan.gradient_accumulation_steps == steps
    assert found.plan.optimizer.learning_rate == 3e-3
    assert found.data.template == "{text} It was {label}."
    assert found.model == str(tiny_run.model)


@pytest.mark.parametrize("measured", [True, False])
def test_figures_of_a_machine_that_nobody_measured_are_marked_once(
    measured: bool, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the second line of the ranking, before every figure."""
    source = "measured by blockwalk doctor" if measured else "a datasheet"
    hardware.save(replace(hardware.load("rtx-4090"), source=source), tmp_path / "machine.yaml")
    given = [*tiny_run.arguments(tmp_path / "out"), "--lora.rank", "4", "--largest_batch"]
    given += ["--trace", str(tmp_path / "trace.json"), "--hardware", str(tmp_path / "machine.yaml")]
    assert main.main(["plan", *given]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert len(lines) > 20
    assert printed.count("(simulated)") == (not measured)
    assert lines[1].startswith("(simulated)") == (not measured)
    assert ("a datasheet" in lines[1]) == (not measured)
    assert "× nobody" not in printed


def test_a_larger_step_that_hides_its_link_is_a_file_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the micro-batches of the row in the printed ranking, each of as many sequences as
    were asked for."""
    from blockwalk.train import config

    machine = replace(
        hardware.load("h200").without_host(),  # whose seconds would hide the link's
        name="slow link",
        host_to_device=hardware.Link(5e7),
        noise_rate=5e11,
    )
    hardware.save(machine, tmp_path / "slow.yaml")
    given = [
        "--lora",
        "false",
        "--budget",
        "4200000",
        "--batch_size",
        "1",
        "--data.max_length",
        "16",
    ]
    model = str(Path(__file__).parents[2] / "examples/tiny-llama")
    assert (
        main.main(["plan", "--model", model, *given, "--hardware", str(tmp_path / "slow.yaml")])
        == 0
    )
    ranking, _, text = capsys.readouterr().out.partition(
        "the larger step as a file (run.yaml):\n\n"
    )
    (tmp_path / "run.yaml").write_text(text)
    run = config.load(tmp_path / "run.yaml")
    plan = run.plan
    assert run.batch_size == plan.gradient_accumulation_steps > 1
    assert f"{plan.method}, {plan.trainable.tier} × raw" in ranking
    assert f", {plan.gradient_accumulation_steps} micro-batches" in ranking


def test_the_example_of_a_loop(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: PEFT's file names, and the losses that it prints."""
    monkeypatch.chdir(tmp_path)
    script = Path(__file__).parents[2] / "examples" / "loop.py"
    turns = [
        {"role": role, "content": text}
        for role, text in (("user", "hot or cold?"), ("assistant", "warm."))
    ]
    (tmp_path / "data.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 96)
    monkeypatch.setattr(sys, "argv", [str(script), str(tiny_run.model), "data.jsonl"])
    runpy.run_path(str(script), run_name="__main__")
    found = [
        float(line.rpartition(" ")[2])
        for line in capsys.readouterr().out.splitlines()
        if "held out" in line
    ]
    assert len(found) == 2
    assert found[1] < found[0]
    assert (tmp_path / "loop-adapter" / "adapter_model.safetensors").is_file()
