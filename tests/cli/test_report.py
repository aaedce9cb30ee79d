"""Oracle: the run's own metrics, read back by Python's HTML parser; a headless Chromium, where
there is one."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from blockwalk.cli import main
from blockwalk.report import axis, card, html
from blockwalk.simulate import timeline
from tests.support.messages import says
from tests.support.report_page import Page


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a <run>"
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 41):
            line = {"step": step, "loss": 4 / step, "learning_rate": 1e-4, "tokens": 64,
                    "tokens_per_second": 100.0 + step, "seconds": 0.5, "peak_bytes": 3 * 10**8,
                    "bytes_moved": {"fetch": 10**6 * step}}  # fmt: skip
            print(json.dumps(line), file=file)
        file.write('{"step": 41, "lo')  # a line that a kill cut short
    (folder / "config.yaml").write_text("model: <tiny>\n")
    forecast = {"peaks": {"device": 10**7, "mapped": 2 * 10**7}, "process_bytes": 31 * 10**7,
                "average_seconds": 0.4,
                "bytes_moved": {"fetch": 4 * 10**7}, "versions": {"torch": "9.9.9"}}  # fmt: skip
    (folder / "forecast.json").write_text(json.dumps(forecast))
    event = {
        "ph": "X",
        "name": "FORWARD block 1",
        "cat": "FORWARD",
        "pid": "run",
        "tid": 0,
        "ts": 0,
        "dur": 5,
    }
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [event]}))
    return folder


def test_a_tasks_run_says_what_it_was_trained_on(run: Path) -> None:
    """Oracle: the configuration, which names a task of MeZO's in place of files."""
    settings = {
        "model": "m",
        "method": "mezo",
        "lora": False,
        "data": {"train": "", "task": "sst2"},
    }
    (run / "config.yaml").write_text(json.dumps(settings))
    (run / "model").mkdir()
    assert "trained on `sst2` by Blockwalk" in (card.write(run) / "README.md").read_text()
    assert "m · mezo · sst2 · " in html.report(run)


def test_the_page_holds_every_step_and_asks_for_nothing_else(run: Path) -> None:
    page = Page(html.report(run))
    curves = [attrs["points"] or "" for tag, attrs in page.tags if tag == "polyline"]
    assert sorted(len(points.split()) for points in curves) == [2] * 2 + [40] * 6, (
        "two foreseen, six measured"
    )
    level = next(points for points in curves if len(points.split()) == 2).split()
    assert level[0].split(",")[1] == level[1].split(",")[1]
    heights = [float(point.split(",")[1]) for point in curves[0].split()]
    assert heights == sorted(heights), "a falling loss is drawn falling"
    assert sum(tag == "rect" for tag, _ in page.tags) == 1
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & attrs.keys()]
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "iframe")]
    text = "".join(page.words)
    assert "a <run>" in text
    assert "model: <tiny>" in text
    assert "2.0833 → 0.1040" in text, "4 (1 + 1/2 + 1/3 + 1/4) / 4, and of the last four likewise"
    for shown in ("300.0 MB, 310.0 MB foreseen", "0.4 foreseen", "20.0 MB", "40.0 MB", "9.9.9"):
        assert shown in text


def test_the_command_writes_it_beside_the_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["report", str(run)]) == 0
    assert (run / "report.html").read_text(encoding="utf-8").startswith(html.report(run))
    assert main.main(["report", str(run.parent)]) == 2
    says(capsys.readouterr().err, "metrics.jsonl")


def test_evaluations_are_dots_and_axes_have_round_numbers(run: Path) -> None:
    """Closed form: 50 to 96.2 % over two evaluations; ticks are multiples of 1, 2 or 5 times a
    power of ten."""
    with (run / "evaluations.jsonl").open("w") as file:
        for step, accuracy in ((0, 0.5), (40, 0.962)):
            print(json.dumps({"step": step, "loss": 1.0, "accuracy": accuracy}), file=file)
    page = Page(html.report(run))
    assert sum(tag == "circle" for tag, _ in page.tags) == 4, "two losses, two accuracies"
    text = "".join(page.words)
    assert "50.0% → 96.2%" in text
    assert "<tiny> · " in text, "the model, in the header"
    assert "prefers-color-scheme:dark" in text
    assert axis.ticks(0.2, 4.1) == [1.0, 2.0, 3.0, 4.0]
    assert axis.ticks(-0.013, 0.004) == pytest.approx([-0.01, -0.005, 0.0])
    assert axis.ticks(318.0, 341.0) == [320.0, 325.0, 330.0, 335.0, 340.0]
    curves = html.curves(run)
    assert curves.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert curves.count("<polyline") == 2


def test_small_losses_are_told_apart() -> None:
    """Closed form: a hundredth of the first loss and a ten-thousandth lie as far apart as the first
    and the hundredth, and each dot says its value."""
    losses = ((1.0, 2.0), (2.0, 0.02), (3.0, 0.0002))
    page = Page(html.chart("Loss", [html.Series("training", losses)], "ratio"))
    top, middle, foot = (float(attrs["cy"] or 0) for tag, attrs in page.tags if tag == "circle")
    assert middle - top == pytest.approx(foot - middle, abs=0.1)
    text = " ".join(page.words)
    assert "logarithmic" in text
    for shown in ("0.001", "step 3: 0.0002"):
        assert shown in text
    assert axis.decades(0.2, 4.1) == [0.2, 0.5, 1.0, 2.0]
    assert axis.decades(3e-3, 40.0) == [0.01, 0.1, 1.0, 10.0]
    assert len(axis.decades(1e-12, 1e3)) <= axis.MOST_MARKS
    for kind in ("zero", "range"):
        assert not axis.axis([0.0002, 2.0], kind).logarithmic
    assert not axis.axis([0.0, 2.0], "ratio").logarithmic
    assert not axis.axis([1.0, 2.0], "ratio").logarithmic


def test_the_page_says_what_a_resumed_run_changed(run: Path) -> None:
    """Oracle: the run's own changed.jsonl."""
    line = {"step": 8, "changes": ["optimizer.learning_rate: 0.0001 → 0.001"]}
    (run / "changed.jsonl").write_text(json.dumps(line) + "\n")
    text = " ".join(Page(html.report(run)).words)
    assert "step 8" in text
    assert line["changes"][0] in text


def test_a_trace_is_whole_or_as_it_was(tmp_path: Path) -> None:
    """Oracle: the kernel, which lets no file of the child's grow beyond 50 bytes."""
    path = tmp_path / "trace.json"
    timeline.write(path, [])
    before = path.read_bytes()
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
        try:
            timeline.write(path, [{"name": "FORWARD block 1", "ts": 0, "dur": 5}])
        except OSError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert path.read_bytes() == before


def test_lines_that_only_a_ledger_has_are_drawn_too(run: Path) -> None:
    """A kill came before what was measured of a step was written."""
    with (run / "metrics.jsonl").open("w") as file:
        for step in (1, 2):
            print(
                json.dumps({"step": step, "loss": 4 / step, "learning_rate": 1e-4, "tokens": 64}),
                file=file,
            )
    assert "4.0000 → 2.0000" in html.report(run)


def test_chromium_draws_it(run: Path, tmp_path: Path) -> None:
    """At a phone's width, without a network: the picture has the curve's colour, the page no
    error."""
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if browser is None:
        pytest.skip("no Chromium here")
    (tmp_path / "page.html").write_text(html.report(run), encoding="utf-8")
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=390,844",
        "--dump-dom",
    ]
    done = subprocess.run(
        [*command, f"file://{tmp_path}/page.html"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.count("<polyline") == 8


def test_the_names_of_many_lines_stay_on_the_page() -> None:
    """By hand: where the last of six begins."""
    drawn = html.chart(
        "six", [html.Series(f"line {i}", ((0.0, 1.0), (1.0, 2.0))) for i in range(6)]
    )
    places = [
        int(text.partition('"')[0])
        for text in drawn.split('<text x="')[1:]
        if 'class="name"' in text.partition(">")[0]
    ]
    assert len(places) == 6
    assert places[-1] < html.WIDTH - 80
