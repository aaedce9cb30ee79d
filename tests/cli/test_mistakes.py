"""Oracle: the exit codes that the help promises, and for each of many mistakes the words that name
it and what to change: one line, no traceback, and no folder left behind."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from blockwalk.cli import main
from tests.conftest import TinyRun

SETTINGS: list[tuple[str, str]] = [
    ("--batch_size 0", "batch_size is 0; it must be at least 1"),
    ("--batch_size many", "batch_size is 'many'; it takes a whole number"),
    (
        "--batch_size 6 --gradient_accumulation_steps 4",
        "gradient_accumulation_steps=4 does not divide",
    ),
    ("--epochs 0", "epochs is 0.0; it must be above 0, such as 3 or 0.5"),
    ("--max_steps -1", "Write: --max_steps 0"),
    ("--log_every 0", "log_every is 0"),
    ("--keep_checkpoints 0", "keep_checkpoints is 0"),
    ("--start_timeout 0", "it must be above 0 seconds"),
    ("--data.max_length 1", "data.max_length is 1; it must be at least 2"),
    ("--data.padding_multiple 0", "data.padding_multiple is 0"),
    ("--data.eval_limit -3", "data.eval_limit is -3"),
    ("--data.label_scores best", "data.label_scores is 'best'; it must be mean or sum"),
    ("--data.label_words a,b", "classification needs both data.template and data.label_words"),
    ("--data.train", "--data.train needs a value"),
    ("--data.trian x", "unknown setting 'data.trian'; did you mean 'data.train'?"),
    ("--data=x.jsonl", "Write: --data.train x.jsonl"),
    ("--method lora", "Write: --lora true"),
    ("--method loar", "unknown method 'loar'"),
    ("--method zero4", "did you mean 'zero3'?"),
    ("--micro_batch_size 4", "Write: --batch_size 4"),
    ("--optimizer.name adam", "optimizer.name is 'adam'"),
    ("--optimizer.learning_rate fast", "optimizer.learning_rate is 'fast'; it takes a number"),
    ("--optimizer.learning_rate -1", "optimizer.learning_rate is -1.0; it must be at least 0"),
    ("--optimizer.schedule cosin --max_steps 9", "optimizer.schedule is 'cosin'"),
    ("--optimizer.min_ratio 2 --optimizer.schedule linear", "optimizer.min_ratio is 2"),
    ("--optimizer.betas 0.9", "optimizer.betas is '0.9'"),
    ("--optimizer.warmup_steps -2", "optimizer.warmup_steps"),
    ("--compute_dtype fp8", "compute_dtype is 'fp8'"),
    ("--frozen floppy", "frozen"),
    ("--frozen disk×int3", "frozen"),
    ("--frozen.codec int3", "frozen.codec is 'int3'; it takes one of"),
    (
        "--optimizer_state disk×int8",
        "optimizer_state is disk × int8 × nobody, and is kept in 32 bits",
    ),
    ("--activation disk×bf16", "set activation: disk × raw"),
    ("--prefetch -1", "prefetch"),
    ("--budget lots", "budget is 'lots'; it takes a size, such as 18GB"),
    ("--lora.rank 0", "lora.rank is 0; it must be at least 1"),
    ("--lora.target all", "Write: --lora.target_modules all-linear"),
    ("--lora.options.r 8", "PEFT's name of lora.rank"),
    ("--lora perhaps", "lora is 'perhaps'"),
    ("--lora false --method mebp --frozen disk×int4a", "without adapters every weight is trained"),
    ("--zo.epsilon 0 --method mezo", "zo.epsilon"),
    ("--zo.kind spsa2 --method mezo", "zo.kind is 'spsa2'"),
    ("--zo.queries 0 --method mezo", "zo.queries"),
    ("--method plain --update.timing deferred", "update.timing"),
    ("--method plain --mesh.z3 2", "mesh"),
    ("--cache.tier tape --method fcdp", "cache.tier"),
    ("--seed 1.5", "seed is '1.5'; it takes a whole number"),
    ("--bf16", "Write: --compute_dtype bfloat16"),
    (
        "--data.columns.prompt q",
        "data.columns is one value, such as [prompt=question, completion=answer]",
    ),
    ("--data.columns {prompt:question}", "write [prompt=question, completion=answer]"),
    ("--data.max_length {a:b}", "data.max_length is '{a:b}'; it takes a whole number"),
    ("--bogus", "unknown argument '--bogus'"),
    ("--resume_from_checkpoint nowhere", "nowhere"),
    ("--report_to paper", "report_to"),
]
"""Flags of ``blockwalk train``, and words of the one line that answers them."""

RECORDS: list[tuple[str, str, str]] = [
    ("--data.train none.jsonl", "", "none.jsonl"),
    ("", '{"text": 1}\n', "line 1"),
    ("", '{"text": "a"\n', "line 1"),
    ("", "\n", "no record was found"),
    ("", '{"prompt": "a"}\n', "completion"),
    ("", '{"messages": []}\n', "needs a chat template"),
    ("", '{"words": "a"}\n', "line 1: expected the fields of a format: 'messages'"),
    (
        "--data.template=It:{text}{label} --data.label_words a,b",
        '{"text": "x", "label": "c"}\n',
        "it must be one of",
    ),
    (
        "--data.template={label}It --data.label_words a,b",
        '{"text": "x", "label": "a"}\n',
        "before {label}",
    ),
    ("--data.format poem", '{"text": "x"}\n', "poem"),
]
"""Flags, a data file (empty: none), and words of the answer."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main.main(arguments)
    said = capsys.readouterr().err
    assert (code, words in said) == (2, True), f"exit code {code}: {said}"
    assert said.startswith("blockwalk: error: ")
    assert said.count("\n") == 1
    assert not Path("out").exists(), "nothing was written"


@pytest.mark.parametrize(("flags", "words"), SETTINGS)
def test_a_wrong_setting(
    flags: str, words: str, place: Path, tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "train",
        "--model",
        str(tiny_run.model),
        "--data.train",
        str(tiny_run.train),
        "--data.format",
        "text",
        "--output_dir",
        "out",
    ]
    refused([*given, *flags.split()], words, capsys)


def test_a_warm_up_without_room_is_refused_by_a_dry_run(
    place: Path, tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "train",
        "--model",
        str(tiny_run.model),
        "--data.train",
        str(tiny_run.train),
        "--data.format",
        "text",
    ]
    flags = [
        "--max_steps",
        "3",
        "--optimizer.schedule",
        "cosine",
        "--optimizer.warmup_steps",
        "10",
        "--dry-run",
    ]
    refused(
        [*given, *flags], "optimizer.warmup_steps is 10, more than the 3 steps of the run", capsys
    )


@pytest.mark.parametrize(
    "shorter", [["--max_steps", "3"], ["--epochs", "0.1", "--batch_size", "4"]]
)
def test_a_run_that_the_command_line_shortens_warms_up_as_long_as_it_lasts(
    shorter: list[str],
    place: Path,
    tiny_run: TinyRun,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the learning rates of the run's log, step by step: i / n of the highest after i of n
    steps."""
    file = Path("run.yaml")
    file.write_text(
        f"{{model: {tiny_run.model}, data: {{train: {tiny_run.train}, format: text}}, method:"
        " plain, batch_size: 4,"
        " output_dir: out, max_steps: 0, epochs: 2, optimizer: {learning_rate: 1, schedule:"
        " cosine, warmup_steps: 10}}"
    )
    code = main.main(["train", str(file), *shorter])
    said = capsys.readouterr().err
    assert code == 0, said
    rates = [
        json.loads(line)["learning_rate"]
        for line in Path("out/metrics.jsonl").read_text().splitlines()
    ]
    assert rates == pytest.approx([step / len(rates) for step in range(len(rates))])
    assert len(rates) < 4
    note = f"note: optimizer.warmup_steps is 10 in run.yaml, and this run has {len(rates)} steps"
    assert said.count(note) == said.count("warmup_steps") == 1
    file.write_text(file.read_text().replace("max_steps: 0", "max_steps: 3"))
    assert main.main(["train", str(file), "--output_dir", "other"]) == 2, "both stand in the file"
    assert "warmup_steps is 10, more than the 3 steps" in capsys.readouterr().err
    assert not Path("other").exists()


def test_a_library_that_misses_kernels_of_its_own_is_not_heard(place: Path) -> None:
    assert main.main(["report", "."]) == 2
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize(("debugs", "heard"), [("", False), ("1", True)])
def test_a_walk_in_python_hears_no_missing_kernels(debugs: str, heard: bool) -> None:
    """Oracle: the level of the library's log in a process of its own that imports the walker."""
    code = (
        "import blockwalk.walk.walker, logging;"
        " print(logging.getLogger('bitsandbytes.backends.cpu.ops').isEnabledFor(30))"
    )
    environment = {**os.environ, "BLOCKWALK_DEBUG": debugs}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == [str(heard)]


def test_a_prompt_of_bytes_that_are_no_text(
    place: Path, tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(
        ["generate", "--model", str(tiny_run.model), "--prompt", "x\udcff"],
        "--prompt holds bytes",
        capsys,
    )


@pytest.mark.parametrize(("flags", "text", "words"), RECORDS)
def test_wrong_data(
    flags: str,
    text: str,
    words: str,
    place: Path,
    tiny_run: TinyRun,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (place / "data.jsonl").write_text(text)
    given = [
        "train",
        "--model",
        str(tiny_run.model),
        "--data.train",
        "data.jsonl",
        "--output_dir",
        "out",
    ]
    refused([*given, *flags.split()], words, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "run.txt"], "run.txt: No such file"),
        (["train", "list.yaml"], "holds list; a mapping of settings is needed"),
        (["train", "twice.yaml"], "'model' is given twice"),
        (["train", "torn.yaml"], "torn.yaml is not valid YAML"),
        (["report", "."], "holds no metrics.jsonl"),
        (["generate", "--model", ".", "--prompt", "a"], "has no config.json"),
        (["train", "braces.yaml"], "in quotes: data.prompt: '{question}'"),
        (["trian", "run.yaml"], "unknown command 'trian'; did you mean 'train'?"),
        (["tune"], "unknown command 'tune'"),
        (["chat", ".", "--prompt", "hi"], "chat reads turns from standard input"),
        (["chat", ".", "--prompt=hi"], "blockwalk generate RUN --chat --prompt TEXT"),
        (["generate", ".", "--prompt", "hi", "--max_length", "9"], "--max_new_tokens N"),
        (["chat", ".", "--max-tokens", "9"], "--max_new_tokens N"),
        (["settings", "lroa"], "no setting's name begins with 'lroa'; did you mean 'lora'?"),
        (["train", "empty.yaml"], "a mapping of settings is needed"),
        (["merge", "absent", "adapter", "out"], "absent"),
        (["replay", "absent", "ledger.jsonl", "out"], "ledger.jsonl"),
    ],
)
def test_a_wrong_file(
    arguments: list[str], words: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "list.yaml").write_text("- model: a\n")
    (place / "twice.yaml").write_text("model: a\nmodel: b\n")
    (place / "empty.yaml").write_text("")
    (place / "braces.yaml").write_text("data: {prompt: {question}}\n")
    (place / "torn.yaml").write_text("model: [a\n")
    refused(arguments, words, capsys)
