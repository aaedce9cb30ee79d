"""Oracle: the kernel's count of bytes that a process wrote (``write_bytes`` of ``/proc/self/io``),
and a closed form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from blockwalk.cli import main
from blockwalk.plan.run_config import RunConfig
from blockwalk.program.program import Shape
from blockwalk.report import disk_bytes, disk_wear
from blockwalk.report.forecast import Forecast
from blockwalk.report.foresee import foresee
from blockwalk.train import config
from tests.conftest import TinyRun
from tests.support.messages import says

ZO2 = ("--method", "zo2", "--trainable", "disk", "--save_every", "3")
ADAMW = ("--method", "plain", "--save_every", "3")


def foreseen(arguments: list[str]) -> tuple[RunConfig, Forecast]:
    from blockwalk.walk.unit_costs import of_run

    run = config.load(None, config.split_flags(arguments)[0])
    return run, foresee(run, Shape(run.micro_batch_rows, run.data.max_length), of_run(run))


def test_a_line_of_the_plan_says_what_a_run_writes(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Closed form: float32 parameters and two moments, saved twice in six steps, and the model at
    the end."""
    arguments = [*tiny_run.arguments(tmp_path / "run"), *ADAMW, "--max_steps", "6"]
    run, forecast = foreseen(arguments)
    parameters = forecast.model.numel(trainable=True)
    assert disk_bytes.step_bytes(forecast) == 0
    assert disk_bytes.written_bytes(run, forecast, 6) == 2 * 12 * parameters + 4 * parameters
    assert main.main(["plan", *arguments]) == 0
    says(capsys.readouterr().out, "disk 6 600.0 TB TBW")
    run, forecast = foreseen([*tiny_run.arguments(tmp_path / "run"), *ZO2])
    assert disk_bytes.step_bytes(forecast) == 4 * parameters
    assert disk_bytes.written_bytes(run, forecast, 6) == (1 + 6 + 1) * 4 * parameters
    (line,) = disk_wear.wear(run, forecast, 0)
    says(line, "600.0 TB step")


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(),
    reason="the kernel does not count bytes that a process writes",
)
@pytest.mark.parametrize("method", [ZO2, ADAMW])
def test_a_run_writes_no_more_than_was_said(
    method: tuple[str, ...], tiny_run: TinyRun, tmp_path: Path
) -> None:
    """A page more for each file that is made, and logs, are not part of the figure."""
    arguments = [*tiny_run.arguments(tmp_path / "run"), *method, "--max_steps", "6"]
    run, forecast = foreseen(arguments)
    expected = disk_bytes.written_bytes(run, forecast, 6)
    script = (
        "import sys; from blockwalk.cli.main import main; code = main(sys.argv[1:]);"
        "print(dict(line.split(': ') for line in"
        " open('/proc/self/io').read().splitlines())['write_bytes']); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "train", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    written = int(done.stdout.split()[-1])
    if written == 0:
        pytest.skip(
            "the temporary folder lies on a file system whose writes the kernel does not count"
        )
    assert 0.4 * expected <= written <= 1.2 * expected + (1 << 20)
