"""Oracle: the configuration that the file is read as, the planner's own ranking, and a shell that
sources the script."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from blockwalk.cli import main, settings_help
from blockwalk.cli.start import EDITED, _of_little_memory
from blockwalk.plan.methods import method
from blockwalk.plan.parsing import flat, parse_bytes
from blockwalk.plan.plan import Plan
from blockwalk.program.program import Pool
from blockwalk.simulate import planner
from blockwalk.train import config
from blockwalk.train.frozen_codec import settled
from blockwalk.train.progress import Progress
from tests.conftest import TinyRun
from tests.support.messages import says


def test_a_run_file_is_written_for_this_machine(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = iter([str(tiny_run.model), str(tiny_run.train)])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main.main(["init", "--budget", "1GB"]) == 0
    text = Path("run.yaml").read_text()
    run = config.load("run.yaml")
    assert (run.model, run.data.train, run.lora and run.lora.rank) == (
        str(tiny_run.model),
        str(tiny_run.train),
        8,
    )
    assert run.plan.budget == 10**9
    assert capsys.readouterr().out.startswith(f"written to run.yaml ({run.plan.method}, ")
    sentence, _, _ = settings_help.described("method")[1].partition(".")
    assert f"# {sentence}" in text
    assert main.main(["init"]) == 2
    says(capsys.readouterr().err, "run.yaml exists")
    assert Path("run.yaml").read_text() == text


def test_a_method_and_conversations_can_be_asked_for(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the file that is written, read again; the model has no chat template."""
    monkeypatch.chdir(tmp_path)
    chats = Path("chats.jsonl")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    Path("plain.jsonl").write_text('{"text": "a"}\n')
    words = ["init", str(tiny_run.model), "--train"]
    asked = {"mebp": ["--chat", "--out", "a.yaml"], "mezo": ["--out", "b.yaml"]}
    for name, more in asked.items():
        assert main.main([*words, str(chats), "--method", name, *more]) == 0
        run = config.load(more[-1])
        assert run.plan.method == name
        assert run.data.chat_template == ("chatml" if "--chat" in more else "")
    capsys.readouterr()
    for more, facts in {
        ("plain.jsonl", "--chat"): "--chat text plain.jsonl",
        (str(chats), "--method", "meb"): "--method meb mebp",
        (str(chats), "--method", "fcdp"): "--method fcdp",
    }.items():
        assert main.main([*words, *more, "--out", "c.yaml"]) == 2
        says(capsys.readouterr().err, facts)
        assert not Path("c.yaml").exists()


def test_the_settings_that_people_edit_are_in_the_file(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: PyYAML's reading of the file beside the run's defaults; and the planner's own figures
    of memory."""
    monkeypatch.chdir(tmp_path)
    flags = ["--train", str(tiny_run.train), "--eval", str(tiny_run.eval)]
    assert main.main(["init", str(tiny_run.model), *flags]) == 0
    said = capsys.readouterr().out
    text = Path("run.yaml").read_text()
    written = flat(yaml.safe_load(text))
    defaults = flat(config.from_mapping({}).to_mapping())
    for name in EDITED.keys() - {"data.eval_share"}:
        assert written[name] == defaults[name]
        assert f"{name.rpartition('.')[2]}: " in text
        assert f"# {EDITED[name]}" in text
    assert len(EDITED) == 10
    assert "resident" not in written
    assert config.load("run.yaml").data.eval == str(tiny_run.eval)
    run = config.load("run.yaml")
    assert (
        ("method: mebp would take" in said)
        == ("method: mebp would take" in text)
        == (run.plan.method != "mebp")
    )
    assert main.main(["plan", "run.yaml"]) == 0
    # init and plan mean the same by memory, in processes that hold nearly the same
    planned = re.search(r"^memory   (.*) \(whole process\)", capsys.readouterr().out, re.MULTILINE)
    chosen = re.search(r"^# The fastest .*: (.*) \(whole process\)\.$", text, re.MULTILINE)
    assert planned is not None
    assert chosen is not None
    bytes_of_both = [parse_bytes(match[1].replace(" ", "")) for match in (planned, chosen)]
    assert bytes_of_both[0] == pytest.approx(bytes_of_both[1], rel=0.06)


def test_what_little_memory_would_take_is_said_beside_what_was_chosen() -> None:
    """Oracle: two plans whose bytes are given here."""
    few, many = (planner.Candidate(method(name), name, Counter({Pool.DEVICE: nbytes}))
                 for name, nbytes in (("mebp", 4 * 10**8), ("plain", 6 * 10**9)))  # fmt: skip

    def memory(plan: planner.Candidate) -> int:
        return plan.peaks[Pool.DEVICE]

    (line,) = _of_little_memory(planner.Ranking((many, few), (), ()), many, memory)
    assert "mebp would take 400.0 MB instead of 6.0 GB" in line
    assert list(_of_little_memory(planner.Ranking((few, many), (), ()), few, memory)) == []


def test_a_file_names_the_codec_that_its_run_would_not_choose(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the plan that a run of the file has, beside what init says; ``auto`` is raw for a
    tiny model."""
    monkeypatch.chdir(tmp_path)

    def look_at(task: planner.Task, label: str, plan: Plan) -> planner.Candidate:
        """Refuse all but method mebp in the codecs of this test; the one with the fewest bits is
        the fastest."""
        codec = str(plan.frozen.codec)
        found = given(task, label, plan)
        return (
            found
            if plan.method == "mebp" and codec in codecs
            else replace(found, simulation=None, refused="no")
        )

    given = planner.look_at
    monkeypatch.setattr(planner, "look_at", look_at)
    codecs = ["int4a", "int8", "raw"]
    for codec in ("raw", "int4a"):
        assert main.main(["init", str(tiny_run.model), "--train", str(tiny_run.train)]) == 0
        assert f"written to run.yaml (mebp, {codec}" in capsys.readouterr().out
        run, _ = settled(config.load("run.yaml"))
        assert run.plan.frozen.codec == codec
        assert ("frozen" in yaml.safe_load(Path("run.yaml").read_text())) == (codec != "raw")
        Path("run.yaml").unlink()
        codecs[1:] = []


def test_nobody_is_asked_where_nobody_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    assert main.main(["init"]) == 2
    says(capsys.readouterr().err, "model missing folder hub")


def test_a_shell_completes_settings(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main.main(["complete", "bash"]) == 0
    script = capsys.readouterr().out
    ask = (
        "COMP_WORDS=(blockwalk train --optimizer.lea); COMP_CWORD=2; _shtab_blockwalk; echo"
        " ${COMPREPLY[@]}"
    )
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-c", f"{script}\n{ask}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "--optimizer.learning_rate"


def test_a_terminal_shows_memory_beside_its_forecast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: rich, which draws the bar that it is given."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    with Progress(4, done=0, log_every=1, foreseen=300 * 10**6) as progress:
        progress.step(1, loss=2.5, seconds=0.1, tokens_per_second=1234.0, peak_bytes=250 * 10**6)
        found = progress._bar.tasks[0]
    assert (found.completed, found.total) == (1, 4)
    assert found.description == "loss 2.5000  1,234 tokens/s  250.0 MB of 300.0 MB"
    printed = capsys.readouterr().out
    assert "step 1/4  loss 2.5000" in printed, "the line of log_every stays above the bar"
    assert "gone" in printed
    assert "left" in printed
