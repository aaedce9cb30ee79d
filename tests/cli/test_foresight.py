"""Oracle: the program that the run executes, the kernel's refusal of memory, and the exit codes
that the help promises."""

from __future__ import annotations

import json
import mmap
import os
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from blockwalk.cli import main
from blockwalk.data.tokenizer import tokenizer_of
from blockwalk.engine import model_weights
from blockwalk.plan.methods import method
from blockwalk.program.program import OpKind, Pool, Shape, StepKind, human_bytes
from blockwalk.report import html
from blockwalk.report.forecast import Forecast
from blockwalk.report.step_forecast import StepForecast
from blockwalk.simulate import hardware
from blockwalk.system import load
from blockwalk.system.process_memory import process_bytes
from blockwalk.train import config, prepared_run
from blockwalk.train.progress import Progress
from blockwalk.walk import timed_units
from blockwalk.walk.walker import Walker
from tests.conftest import TinyRun
from tests.models import tiny_model
from tests.support.messages import says


def events(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Complete events by process."""
    found: dict[str, list[dict[str, Any]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault(event["pid"], []).append(event)
    return found


def test_the_tokenizer_has_gone_before_the_models_own_code_comes(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a weak reference, when the first skeleton of the model is asked for."""
    read: list[weakref.ref[Any]] = []
    gone: list[bool] = []

    def load(*given: Any) -> Any:
        tokenizer = tokenizer_of(*given)
        read.append(weakref.ref(tokenizer))
        return tokenizer

    monkeypatch.setattr(prepared_run, "tokenizer_of", load)
    require = model_weights.build_skeleton
    monkeypatch.setattr(
        model_weights,
        "build_skeleton",
        lambda *given: gone.append(read[0]() is None) or require(*given),
    )
    arguments = [
        *tiny_run.arguments(tmp_path / "run"),
        "--method",
        "mebp",
        "--max_steps",
        "1",
        "--lora.rank",
        "4",
    ]
    for more in ([], ["--dry-run"]):
        assert main.main(["train", *arguments, *more]) == 0
        assert gone
        assert all(gone)
        read.clear()
        gone.clear()


def test_a_real_step_and_its_forecast_have_the_same_lanes_and_names(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What takes no time in one of the two has no event there; the ops that compute take time in
    both."""
    monkeypatch.chdir(tmp_path)
    hardware.save(hardware.load("laptop"), tmp_path / "hardware.yaml")
    more = [
        "--method",
        "mebp",
        "--max_steps",
        "3",
        "--lora.rank",
        "4",
        "--trace",
        str(tmp_path / "trace.json"),
    ]
    assert main.main(["train", *tiny_run.arguments(tmp_path / "run"), *more]) == 0
    both = events(tmp_path / "trace.json")
    assert both.keys() == {"foreseen", "measured"}
    kinds = ("PROLOGUE", "FORWARD", "LOSS", "BACKWARD", "UPDATE")
    named = {
        pid: [(e["tid"], e["name"]) for e in found if e["cat"] in kinds]
        for pid, found in both.items()
    }
    assert named["foreseen"] == named["measured"]
    assert len(named["measured"]) >= 3 * 2
    assert (tmp_path / "run" / "trace.json").read_bytes() == (tmp_path / "trace.json").read_bytes()
    forecast = json.loads((tmp_path / "run" / "forecast.json").read_text())
    assert forecast["seconds"] > 0
    assert forecast["peaks"]["device"] <= forecast["tensor_bytes"]
    said = capsys.readouterr().out
    assert re.search(r"^memory .*; time .* a step, .* at most; .* in all$", said, re.MULTILINE)
    assert "forecast, time" in said


def test_a_run_is_foreseen_at_the_lengths_of_its_data(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the program's own shapes, by hand from the records' bytes: one of 400 tokens among 31
    of 20. Side by side the first step has 512 tokens, 128 to a row; the seven others gain nothing,
    and are padded to 24."""
    monkeypatch.chdir(tmp_path)
    hardware.save(hardware.load("laptop"), tmp_path / "hardware.yaml")
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": "a" * n}) + "\n" for n in [400, *[20] * 31])
    )
    settings = [
        "--model",
        str(tiny_run.model),
        "--output_dir",
        "run",
        "--data.train",
        "data.jsonl",
        "--batch_size",
        "4",
    ]
    arguments = ["train", *settings, "--method", "mebp", "--max_steps", "8", "--lora.rank", "4"]
    shapes = []
    compiled = StepForecast.of.__func__

    def of(cls: type[StepForecast], *given: Any, **named: Any) -> StepForecast:
        found: StepForecast = compiled(cls, *given, **named)
        assert found.usual is not None
        shapes.append(
            (found.forecast.program.shape, found.usual.program.shape, found.usual.seconds)
        )
        return found

    monkeypatch.setattr(StepForecast, "of", classmethod(of))
    assert main.main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert main.main(arguments) == 0
    ((longest, usual, seconds),) = shapes
    assert (longest, usual) == (Shape(4, 128), Shape(4, (128 + 7 * 24) // 8))
    assert f"; time {seconds:.3g} s a step, " in said
    assert f"; {8 * seconds:.3g} s in all\n" in said


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, 336),
        ({"data.packing": True, "data.max_length": 512}, 408),
        ({"data.eval": "data.jsonl"}, 336),
    ],
)
def test_where_padding_is_walked_it_is_foreseen(
    settings: dict[str, Any],
    tokens: int,
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand, tokens to a row: the examples lie side by side; rows of documents are padded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": "a" * n}) + "\n" for n in [400, *[300] * 31])
    )
    run = {
        "model": str(tiny_run.model),
        "data.train": "data.jsonl",
        "batch_size": 4,
        "output_dir": "run",
    }
    found = prepared_run.prepare(
        config.from_mapping({**run, "method": "mebp", "lora.rank": 4, "max_steps": 8, **settings})
    )
    assert found.foreseen.program.shape == Shape(4, tokens)


@pytest.mark.parametrize(("batches", "micro_batches"), [(1, 1), (8, 8), (100, 16)])
def test_an_evaluation_is_foreseen_as_it_visits_blocks(
    batches: int,
    micro_batches: int,
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand: padded batches of two, the longest of 400 tokens and its end; a visit has no more
    than there are records."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": "a" * n}) + "\n" for n in [400, *[300] * 31])
    )
    run = {
        "model": str(tiny_run.model),
        "data.train": "data.jsonl",
        "batch_size": 4,
        "output_dir": "run",
    }
    run |= {
        "data.eval": "data.jsonl",
        "eval_batch_size": 2,
        "eval_batches": batches,
        "method": "mebp",
        "lora.rank": 4,
    }
    found = prepared_run.prepare(config.from_mapping({**run, "max_steps": 8})).foreseen
    assert found.visit is not None
    assert (found.visit.shape, found.visit.step_kind) == (Shape(2, 408), StepKind.EVALUATE)
    assert sum(op.kind is OpKind.LOSS for op in found.visit.ops) == micro_batches
    assert (found.fullest is found.visit) == (batches > 1)
    assert ("an evaluation's peak" in str(found)) == (batches > 1)


def test_beside_other_work_seconds_are_those_of_rates_and_a_note_says_so(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a load that is put on by hand, and the step on paper of a machine that is described
    alike and that nothing is timed on. Load that rises between the two shapes is told as well."""
    monkeypatch.chdir(tmp_path)
    laptop = hardware.load("laptop")
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": "a" * n}) + "\n" for n in [400, *[20] * 31])
    )
    run = config.from_mapping(
        {
            "model": str(tiny_run.model),
            "data.train": "data.jsonl",
            "batch_size": 4,
            "output_dir": "run",
            "max_steps": 8,
        }
    )
    hardware.save(laptop, "hardware.yaml")
    by_rates = prepared_run.prepare(run)
    assert by_rates.usual is not None
    source = f"{hardware.MEASURED} a test {tmp_path}"  # what earlier tests kept is of others
    hardware.save(replace(laptop, source=source), "hardware.yaml")
    cores = os.cpu_count() or 1
    monkeypatch.setattr(load, "computing", lambda _: cores)
    busy = prepared_run.prepare(run)
    assert busy.usual is not None
    assert busy.usual.seconds == by_rates.usual.seconds
    (note,) = (note for note in busy.foreseen.notes if "rates alone" in note)
    says(note, f"{cores}.0 {cores} cores")
    assert f"  {note}" in busy.foreseen.lines()

    prologue: timed_units.Timed = (((OpKind.PROLOGUE, "prologue", False), 1000.0),)
    answers: list[timed_units.Timed | ValueError] = [prologue, ValueError("a load of 77.0")]

    def measure(_: timed_units.Request) -> timed_units.Timed:
        answer = answers.pop(0)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    monkeypatch.setattr(timed_units, "measure", measure)
    rising = prepared_run.prepare(run)
    longest = rising.foreseen.simulated()
    assert longest is not None
    assert rising.usual is not None
    assert longest.seconds > 1000 > rising.usual.seconds
    (note,) = (note for note in rising.foreseen.notes if "rates alone" in note)
    says(note, "77.0")


def test_blocks_that_do_not_stay_do_not_stay_in_a_usual_step(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the fetches of the longest step, by whose memory the number of blocks that stay is
    chosen."""
    monkeypatch.chdir(tmp_path)
    hardware.save(hardware.load("laptop"), tmp_path / "hardware.yaml")
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": "a" * n}) + "\n" for n in [400, *[20] * 31])
    )
    run = {
        "model": str(tiny_run.model),
        "data.train": "data.jsonl",
        "batch_size": 4,
        "output_dir": "run",
        "lora": False,
    }
    settings = {**run, "method": "zo2", "frozen": "disk", "trainable": "disk", "max_steps": 8}
    most = prepared_run.prepare(config.from_mapping(settings)).foreseen.program.peaks()[Pool.DEVICE]
    found = prepared_run.prepare(config.from_mapping({**settings, "budget": most}))
    assert found.usual is not None
    fetches = [
        sum(op.kind is OpKind.FETCH for op in each.ops)
        for each in (found.foreseen.program, found.usual.program)
    ]
    assert fetches == [3, 3]


def test_a_run_opens_with_six_lines_and_with_v_says_the_rest(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the kernel's counters, the files of the run, and the sizes of the model's tensors.
    Without doctor's measurements a run foresees the peak of the whole process, less than twice the
    measured one, and its seconds as a range."""
    monkeypatch.chdir(tmp_path)
    arguments = [*tiny_run.arguments(Path("run")), "--method", "mebp", "--max_steps", "3"]
    assert main.main(["train", *arguments]) == 0
    said = capsys.readouterr().out.splitlines()
    first_step = next(number for number, line in enumerate(said) if line.startswith("step "))
    beside = ("note: ", "evaluation ")
    opening = [line for line in said[:first_step] if not line.startswith(beside)]
    titles = [line[:9].rstrip() for line in opening]
    assert titles == ["device", "model", "memory", "data", "held out", "saved to"]
    assert [line for line in opening if len(line) > 100] == []
    facts = dict(zip(titles, (line[9:] for line in opening), strict=True))
    record = json.loads(tiny_run.train.read_text().splitlines()[0])
    assert facts["device"] == "cpu"
    says(facts["model"], "LoRA rank 8 mebp")
    assert f"⟦ {record['label']}⟧" in facts["data"]
    says(facts["data"], "64 sequences 3 steps")
    says(facts["saved to"], str(Path("run", "adapter")))
    assert Path("run", "adapter").is_dir()
    forecast = json.loads((tmp_path / "run" / "forecast.json").read_text())
    foreseen = forecast["process_bytes"]
    assert facts["memory"].startswith(f"{human_bytes(foreseen)} (whole process); time ")
    says(facts["memory"], "guess doctor")
    metrics = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    measured = max(line["peak_bytes"] for line in metrics)
    assert measured / 2 < foreseen < 2 * measured
    assert any("RSS incl. droppable file pages: " in line for line in said)

    again = ["--overwrite_output_dir", "true", "-v"]
    assert main.main(["train", *arguments, *again]) == 0
    everything = capsys.readouterr().out
    assert "interpreter, libraries, tokenizer, data, the open model" in everything
    assert "as they were elsewhere" in everything
    assert f"{record['text']} It was⟦ {record['label']}⟧" in everything
    kinds = [kind for kind, *_ in forecast["states"]]
    assert kinds == ["frozen", "trainable", "gradient", "optimizer", "activation"]
    assert all(f"\n  {kind} " in everything for kind in kinds)
    elements = sum(
        tensor.numel() for tensor in load_file(tiny_run.model / "model.safetensors").values()
    )
    says(everything, f"{elements:,} parameters")
    assert "Kinds of state" in html.report(tmp_path / "run")


def test_memory_beyond_the_forecast_is_explained_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: a process that holds 10 bytes more in its second step, by hand."""
    with Walker(tiny_model("llama"), method("plain"), device="cpu") as walker:
        programs = (walker.program(StepKind.TRAIN, Shape(2, 10), foresee=True),)
        forecast = StepForecast(Forecast(walker.plan, walker.spec, programs), process_bytes=100)
    figures: dict[str, Any] = {"loss": 1.0, "seconds": 1.0, "tokens_per_second": 1.0}
    progress = Progress(3, done=0, log_every=1, foreseen=100, beyond=forecast.beyond)
    for step, held in ((1, 100), (2, 110), (3, 120)):
        progress.step(step, peak_bytes=held, **figures)
    (note,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("note: "))
    says(note, "110 100 doctor")


def test_what_a_process_holds_beside_the_model_is_foreseen() -> None:
    """Oracle: the size of an allocation, as a tokenizer or a data set would be."""
    with Walker(tiny_model("llama"), method("plain"), device="cpu") as walker:
        before = process_bytes()
        programs = (walker.program(StepKind.TRAIN, Shape(2, 10), foresee=True),)
        forecast = Forecast(walker.plan, walker.spec, programs)
        alone = StepForecast.of(forecast, before=before)
        held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for start in range(0, 64 << 20, 1 << 20):
            held[start : start + (1 << 20)] = b"\1" * (1 << 20)
        beside = StepForecast.of(forecast, before=process_bytes())
        held.close()
    assert alone.process_bytes >= before + alone.tensor_bytes
    assert abs(beside.process_bytes - alone.process_bytes - (64 << 20)) < 8 << 20


def test_a_plan_over_its_budget_names_the_next_one_that_fits(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The plan that is named fits the same budget when it is tried."""
    monkeypatch.chdir(tmp_path)
    settings = [
        *tiny_run.arguments(tmp_path / "run"),
        "--max_steps",
        "1",
        "--budget",
        "3MB",
        "--lora",
        "false",
    ]
    assert main.main(["train", *settings, "--method", "plain"]) == 3
    said = capsys.readouterr().err
    says(said, "method:")
    named = dict(
        part.split(": ") for part in said.partition("fits: ")[2].partition(" (")[0].split(", ")
    )
    flags = [
        part for key, value in named.items() for part in (f"--{key}", value.replace("True", "true"))
    ]
    assert main.main(["train", *settings, *flags]) == 0


def test_a_run_that_is_refused_memory_says_what_was_foreseen_and_measured(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """The kernel refuses: the data segment may not grow once the model is open."""
    code = (
        "import resource, sys\n"
        "from blockwalk.cli import main\n"
        "from blockwalk.walk import walker\n"
        "from blockwalk.system.process_memory import process_bytes\n"
        "step = walker.Walker.step\n"
        "def bounded(self, batch, **more):\n"
        "    used = int(open('/proc/self/status').read().partition('VmData:')[2].split()[0]) *"
        " 1024\n"
        "    resource.setrlimit(resource.RLIMIT_DATA, (used + (128 << 20),) * 2)\n"
        "    return step(self, batch, **more)\n"
        "walker.Walker.step = bounded\n"
        "sys.exit(main.main(sys.argv[1:]))\n"
    )
    (tmp_path / "long.jsonl").write_text(
        "".join(json.dumps({"text": "fresh bread " * 150}) + "\n" for _ in range(8))
    )
    settings = {
        "model": tiny_run.model, "output_dir": tmp_path / "run",
        "data.train": tmp_path / "long.jsonl", "method": "plain", "lora": "false", "batch_size": 8,
        "data.max_length": 2048, "max_steps": 2,
    }  # fmt: skip
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "out of memory after " in done.stderr
    assert "of tensors were foreseen" in done.stderr
    assert "fit" in done.stderr.partition("more was refused")[2]
