"""Oracle: a closed form of the bytes that each codec takes, held against a memory that the test
sets; and the settings and losses in a run's own files."""

import json
from pathlib import Path

import pytest
import yaml

from blockwalk import Walker, method
from blockwalk.cli import main
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.engine import frozen_codec
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import Codec
from blockwalk.program.compile import compile
from blockwalk.program.program import Shape, StepKind
from tests.conftest import TinyRun
from tests.support.messages import refused

Capture = pytest.CaptureFixture[str]
PLAN = method("mebp", frozen="disk × auto")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of this machine's memory, as a list of one that a test may change."""
    nbytes = [1 << 40]
    monkeypatch.setattr(frozen_codec, "host_memory", lambda: (nbytes[0], False))
    return nbytes


def test_the_widest_codec_that_fits_is_chosen(
    tiny_run: TinyRun, memory: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a closed form of each codec's bytes: 4 a number, 1 and a scale of 4 a row, 20 a group
    of 32 numbers."""
    module = build_skeleton(tiny_run.model)
    matrices = [param.shape for param in module.parameters() if param.ndim == 2]
    vectors = sum(4 * param.numel() for param in module.parameters() if param.ndim == 1)
    sizes = {
        Codec.RAW: vectors + sum(4 * rows * columns for rows, columns in matrices),
        Codec.INT8: vectors + sum(rows * (columns + 4) for rows, columns in matrices),
        Codec.INT4A: vectors + sum(rows * columns // 32 * 20 for rows, columns in matrices),
    }
    monkeypatch.delattr(frozen_codec, "build_skeleton")  # the files' headers say it
    for codec, nbytes in sizes.items():
        memory[0] = 2 * nbytes
        plan, reason = frozen_codec.chosen(PLAN, tiny_run.model, adapters=True)
        assert plan == method("mebp", frozen=f"disk × {codec}")
        assert "at most half" in reason
    memory[0] = sizes[Codec.INT4A]
    plan, reason = frozen_codec.chosen(PLAN, tiny_run.model, adapters=True)
    assert plan.frozen.codec is Codec.INT4A
    assert "the fewest" in reason
    plan, _ = frozen_codec.chosen(PLAN, tiny_run.model, adapters=False)
    assert plan.frozen.codec is Codec.RAW, "without adapters nothing makes up for rounding"
    assert frozen_codec.chosen(method("mebp"), tiny_run.model, adapters=True) == (
        method("mebp"),
        "",
    )


def test_the_choice_is_printed_and_kept(
    tiny_run: TinyRun, tmp_path: Path, memory: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *tiny_run.arguments(tmp_path / "run"),
        "--method",
        "mebp",
        "--max_steps",
        "2",
        "--batch_size",
        "4",
    ]
    for command in (["plan"], ["train", "--dry-run"], ["train", "--verbose"]):
        assert main.main([*command, *arguments]) == 0
        out = capsys.readouterr().out
        assert out.count("frozen weights are raw (auto: ") == 1
    assert not list((tmp_path / "run" / "scratch").glob("*-int*")), "nothing is packed"
    assert (
        yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["frozen"]
        == "disk × raw × nobody"
    )
    memory[0] = 1
    more = [*arguments, "--max_steps", "4", "--resume_from_checkpoint", "latest"]
    assert main.main(["train", *more]) == 0
    out = capsys.readouterr().out
    assert "frozen weights are raw (auto: as the run began)" in out
    assert "changed since the checkpoint: frozen" not in out


def test_a_run_of_an_earlier_version_goes_on_in_its_codec(
    tiny_run: TinyRun, tmp_path: Path, memory: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its default was int4a, by name in the checkpoint; its adapter is read over the same
    weights."""
    arguments = [*tiny_run.arguments(tmp_path / "run"), "--method", "mebp", "--batch_size", "4"]
    assert main.main(["train", *arguments, "--max_steps", "2", "--frozen", "disk × int4a"]) == 0
    capsys.readouterr()
    resume = ["--max_steps", "4", "--resume_from_checkpoint", "latest"]
    assert main.main(["train", *arguments, *resume, "--dry-run"]) == 0
    assert "frozen weights are int4a (auto: as the run began)" in capsys.readouterr().out
    assert main.main(["train", *arguments, *resume]) == 0
    assert (
        yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["frozen"]
        == "disk × int4a × nobody"
    )
    capsys.readouterr()
    assert (
        main.main(["eval", *arguments, "--adapter", str(tmp_path / "run" / "adapter"), "--json"])
        == 0
    )
    captured = capsys.readouterr()
    assert "over weights in int4a" in captured.err
    last = json.loads((tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()[-1])
    assert json.loads(captured.out)["loss"] == pytest.approx(last["loss"], rel=1e-6)


def test_a_walker_settles_what_its_plan_leaves_open(
    tiny_run: TinyRun, tmp_path: Path, memory: list[int]
) -> None:
    with Walker(tiny_run.model, PLAN, lora={"rank": 2}, workdir=tmp_path, device="cpu") as walker:
        assert walker.plan.frozen.codec is Codec.RAW
    memory[0] = 1
    with Walker(tiny_run.model, PLAN, lora={"rank": 2}, workdir=tmp_path, device="cpu") as walker:
        assert walker.plan.frozen.codec is Codec.INT4A
    with Walker(tiny_run.model, PLAN, training=False, workdir=tmp_path, device="cpu") as walker:
        assert walker.plan.frozen.codec is Codec.RAW, "read, and not trained"


def test_without_weights_a_configuration_says_how_large_they_are(
    tiny_run: TinyRun, tmp_path: Path, memory: list[int]
) -> None:
    """Oracle: the answer for the same model with its weights."""
    (tmp_path / "config.json").write_bytes((tiny_run.model / "config.json").read_bytes())
    for nbytes in (10**9, 400_000, 1):
        memory[0] = nbytes
        assert frozen_codec.chosen(PLAN, tmp_path, adapters=True) == frozen_codec.chosen(
            PLAN, tiny_run.model, adapters=True
        )


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_a_model_in_codes_is_read_as_it_lies(
    tier: str, tiny_run: TinyRun, tmp_path: Path, memory: list[int]
) -> None:
    assert main.main(["pack", str(tiny_run.model), str(tmp_path / "store"), "--codec", "nf4"]) == 0
    memory[0] = 1
    plan, reason = frozen_codec.chosen(
        method("mebp", frozen=f"{tier} × auto"), tmp_path / "store", adapters=True
    )
    assert (plan.frozen.codec, reason) == (Codec.RAW, "")


def test_a_walker_that_reads_rounded_weights_says_so_once(
    tiny_run: TinyRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the lines themselves; none where nothing is rounded, or the model comes rounded,
    whether it is trained or not."""
    assert main.main(["pack", str(tiny_run.model), str(tmp_path / "store"), "--codec", "int8"]) == 0
    for model, plan, lines in (
        (tiny_run.model, method("mebp"), 1),
        (tiny_run.model, method("mebp", frozen="disk"), 0),
        (tmp_path / "store", method("mebp"), 0),
    ):
        for training in (False, True):
            caplog.clear()
            with Walker(
                model,
                plan,
                lora=training,
                training=training,
                workdir=tmp_path / "work",
                device="cpu",
            ):
                said = [
                    record.getMessage()
                    for record in caplog.records
                    if record.levelname == "WARNING"
                ]
            assert len(said) == lines
            assert all(
                "the model is read in int4a, which rounds its weights" in line for line in said
            )


def test_a_walker_says_the_codec_that_it_chose(
    tiny_run: TinyRun, tmp_path: Path, memory: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="blockwalk")
    for nbytes, level, text in (
        (1 << 40, "INFO", "frozen weights are raw (auto: "),
        (1, "WARNING", "the model is read in int4a (auto: "),
    ):
        memory[0] = nbytes
        caplog.clear()
        with Walker(tiny_run.model, PLAN, lora=True, workdir=tmp_path, device="cpu"):
            (record,) = (record for record in caplog.records if "auto" in record.getMessage())
        assert (record.levelname, record.getMessage()[: len(text)]) == (level, text)
    with Walker(
        tiny_run.model, PLAN, lora=False, training=False, workdir=tmp_path, device="cpu"
    ) as walker:
        assert walker.plan.frozen.codec is Codec.RAW, "False is no adapter"


def test_a_run_that_printed_its_codec_logs_no_second_line(
    tiny_run: TinyRun,
    tmp_path: Path,
    memory: list[int],
    caplog: pytest.LogCaptureFixture,
    capsys: Capture,
) -> None:
    memory[0] = 1
    arguments = [
        *tiny_run.arguments(tmp_path / "run"),
        "--method",
        "mebp",
        "--max_steps",
        "1",
        "--batch_size",
        "2",
    ]
    assert main.main(["train", *arguments]) == 0
    assert "frozen weights are int4a (auto: " in capsys.readouterr().out
    assert "rounds its weights" not in caplog.text


@pytest.mark.parametrize("setting", ["trainable", "frozen"])
def test_only_frozen_weights_off_the_device_may_be_left_open(setting: str) -> None:
    with refused(ValueError, setting, "device auto codec"):
        method("plain", **{setting: "device × auto"})


def test_a_program_is_of_a_codec_that_is_known() -> None:
    from tests.golden.specs import MODELS

    spec: ModelSpec = next(iter(MODELS.values()))
    with refused(ValueError, "frozen disk auto nobody codec"):
        compile(PLAN, spec, StepKind.TRAIN, Shape(1, 8))
