"""Oracle: transformers with PEFT, its greedy answers to what its chat template writes; and the
operating system's signals."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockwalk.cli import main
from blockwalk.cli.chat import COMMANDS
from blockwalk.data.text_stream import TextStream
from tests.conftest import TinyRun

SYSTEM = {"role": "system", "content": "s"}


@pytest.fixture(scope="module")
def trained(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose adapter has learnt a chat, with a checkpoint before its end."""
    folder = tmp_path_factory.mktemp("chat")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
    flags = [
        "--model",
        str(tiny_run.model),
        "--data.train",
        str(folder / "chats.jsonl"),
        "--data.chat_template",
        "chatml",
    ]
    steps = [
        "--batch_size",
        "4",
        "--max_steps",
        "4",
        "--save_every",
        "2",
        "--optimizer.learning_rate",
        "1e-2",
    ]
    more = ["--method", "plain", "--lora.rank", "2", "--output_dir", str(folder / "run")]
    assert main.main(["train", *flags, *steps, *more]) == 0
    return folder / "run"


def theirs(tiny_run: TinyRun, adapter: Path, messages: list[dict[str, str]], count: int) -> str:
    """The answer of transformers and PEFT."""
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_run.model), str(adapter)
    )
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_line_after_training_can_be_pasted(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "a run"
    text = said(
        capsys,
        "train",
        *tiny_run.arguments(out),
        "--method",
        "plain",
        "--lora.rank",
        "2",
        "--max_steps",
        "1",
    )
    (line,) = [line for line in text.splitlines() if line.startswith("try it")]
    program, *command = shlex.split(line.removeprefix("try it"))
    assert program == "blockwalk"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    held_out = json.loads(tiny_run.eval.read_text().splitlines()[0])["text"]
    assert command == ["predict", str(out), "--text", held_out]
    assert json.loads(said(capsys, *command))["label"] in ("good", "bad")


def test_a_run_answers_with_its_adapter_and_a_system_prompt(
    tiny_run: TinyRun, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user = {"role": "user", "content": "hi"}
    expected = theirs(tiny_run, trained / "adapter", [SYSTEM, user], 6)
    asked = ["--system", "s", "--prompt", "hi", "--max_new_tokens", "6"]
    assert said(capsys, "generate", str(trained), *asked) == expected + "\n"
    assert main.main(["generate", str(trained), *asked]) == 0
    assert capsys.readouterr().err.count(str(trained / "adapter")) == 1
    named = ["--model", str(tiny_run.model), "--method", "plain", "--adapter", str(trained)]
    assert said(capsys, "generate", *named, *asked) == expected + "\n"
    moved = shutil.copytree(trained, tmp_path / "moved")
    assert said(capsys, "generate", str(moved), *asked) == expected + "\n"
    history = [user, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "so"}]
    (tmp_path / "m.json").write_text(json.dumps({"messages": history}))
    answer = said(
        capsys,
        "generate",
        str(trained),
        "--messages",
        str(tmp_path / "m.json"),
        "--max_new_tokens",
        "6",
    )
    assert answer == theirs(tiny_run, trained / "adapter", history, 6) + "\n"


def test_a_model_folder_is_a_run_to_generate_with(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--prompt", "fresh", "--max_new_tokens", "4"]
    assert said(capsys, "generate", str(tiny_run.model), *flags) == said(
        capsys, "generate", "--model", str(tiny_run.model), *flags
    )


def test_any_checkpoint_is_an_adapter(
    tiny_run: TinyRun, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: a run that ends at the checkpoint's step, whose adapter is written in the ordinary
    way."""
    settings = [
        "train",
        str(trained / "config.yaml"),
        "--output_dir",
        str(tmp_path / "short"),
        "--max_steps",
        "2",
    ]
    assert main.main(settings) == 0
    checkpoint = str(trained / "checkpoint-000002")
    flags = [
        "--model",
        str(tiny_run.model),
        "--method",
        "plain",
        "--chat",
        "--prompt",
        "hi",
        "--max_new_tokens",
        "5",
    ]
    of_checkpoint = said(capsys, "generate", *flags, "--adapter", checkpoint)
    assert of_checkpoint == said(
        capsys, "generate", *flags, "--adapter", str(tmp_path / "short" / "adapter")
    )
    for adapter, out in ((checkpoint, "one"), (str(tmp_path / "short"), "two")):
        assert main.main(["merge", str(tiny_run.model), adapter, str(tmp_path / out)]) == 0
    for name in ("model.safetensors", "chat_template.jinja"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    evaluation = ["eval", *tiny_run.arguments(tmp_path), "--method", "plain", "--json"]
    figures = [
        said(capsys, *evaluation, "--adapter", str(each))
        for each in (checkpoint, tmp_path / "short")
    ]
    assert figures[0] == figures[1]


@pytest.mark.parametrize(
    ("method", "words"), [("plain", "--resume_from_checkpoint"), ("mezo", "blockwalk replay")]
)
def test_a_checkpoint_without_an_adapter_says_what_gives_its_weights(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, words: str
) -> None:
    out = tmp_path / "run"
    flags = ["--method", method, "--lora", "false", "--max_steps", "1", "--save_every", "1"]
    assert main.main(["train", *tiny_run.arguments(out), *flags]) == 0
    (checkpoint,) = [path for path in out.glob("checkpoint-*") if path.name.endswith("1")]
    assert (
        main.main(
            [
                "generate",
                "--model",
                str(tiny_run.model),
                "--adapter",
                str(checkpoint),
                "--prompt",
                "x",
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert words in error
    match = re.search(r"blockwalk ((train|replay) .*?)( writes them)?\n", error)
    assert match
    command = match[1].replace("OUT", str(tmp_path / "out"))
    assert main.main(shlex.split(command)) == 0
    assert said(capsys, "generate", str(out), "--prompt", "x", "--max_new_tokens", "2")


def test_a_run_that_has_not_ended_names_its_newest_checkpoint(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the folders that are there. What the refusal names can be pasted."""
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(run / "adapter")
    asked = ["generate", str(run), "--chat", "--prompt", "hi", "--max_new_tokens", "3"]
    for more in ([], ["--adapter", str(run)]):
        assert main.main([*asked, *more]) == 2
        assert f"--adapter {run / 'checkpoint-000004'}" in capsys.readouterr().err
    of_checkpoint = said(capsys, *asked, "--adapter", str(run / "checkpoint-000004"))
    assert of_checkpoint == said(capsys, "generate", str(trained), *asked[2:])


def test_positions_are_the_limit(tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the configuration, which has 128 positions, and a tokenizer of bytes."""
    flags = ["generate", str(tiny_run.model), "--prompt", "fresh"]
    assert main.main([*flags, "--max_new_tokens", "124"]) == 2
    error = capsys.readouterr().err
    assert all(number in error for number in ("5 tokens", "124", "128 positions", "123"))


def test_a_chat_without_a_terminal_is_line_in_line_out(
    tiny_run: TinyRun,
    trained: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nso\n/new\nhi\n"))
    lines = said(capsys, "chat", str(trained), "--system", "s", "--max_new_tokens", "4")
    first = theirs(tiny_run, trained / "adapter", [SYSTEM, {"role": "user", "content": "hi"}], 4)
    history = [SYSTEM, *({"role": role, "content": text} for role, text in
               [("user", "hi"), ("assistant", first), ("user", "so")])]  # fmt: skip
    second = theirs(tiny_run, trained / "adapter", history, 4)
    assert lines == f"{first}\n{second}\n{first}\n"


def test_help_lists_what_can_be_typed_and_a_terminal_names_model_and_run(
    tiny_run: TinyRun,
    trained: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the words of the help, also for a line that is no command; the model sees none of
    them, and nothing after the end."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("/help\n/hlep\n/quit\nhi\n"))
    text = said(capsys, "chat", str(trained), "--max_new_tokens", "2")
    assert text.splitlines() == [*COMMANDS, *COMMANDS]
    lines = iter(["/help"])

    def typed(mark: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("blockwalk.cli.chat.is_terminal", lambda stream: True)
    greeting, *others = said(capsys, "chat", str(trained)).splitlines()
    assert str(tiny_run.model) in greeting
    assert str(trained / "adapter") in greeting
    assert others[:-1] == list(COMMANDS)


def test_a_chat_without_a_template_is_refused_before_a_question(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["chat", str(tiny_run.model)]) == 2
    assert "data.chat_template" in capsys.readouterr().err


def test_old_turns_are_left_out_where_positions_end(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n" * 4 + "x" * 200 + "\n"))
    capsys.readouterr()
    assert main.main(["chat", str(trained), "--max_new_tokens", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 4
    assert "128 positions" in captured.err


def test_control_c_ends_an_answer_and_then_the_program(trained: Path) -> None:
    """Oracle: signals of the operating system to a process of its own, while its answer is
    printed."""
    command = [
        sys.executable,
        "-m",
        "blockwalk",
        "chat",
        str(trained),
        "--max_new_tokens",
        "90",
        "--temperature",
        "9",
    ]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    heeds = functools.partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # a test in the background inherits a deaf ear
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, env=environment, bufsize=0, preexec_fn=heeds, **pipes
    ) as process:
        assert process.stdin
        assert process.stdout
        guard = threading.Timer(240, process.kill)
        guard.start()
        process.stdin.write(b"hi\n")
        assert process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        written = b""
        while not written.endswith(b"\n"):
            written += process.stdout.read(1)
        assert process.poll() is None
        for _ in range(
            3
        ):  # the answer may have had a line's end of its own, before the first signal was seen
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
                break
        assert process.wait() == 130
        guard.cancel()


def test_pieces_of_a_stream_are_the_text(tiny_run: TinyRun) -> None:
    """Oracle: the tokenizer, which decodes all tokens at once; here each byte is one, and no piece
    has half a character."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    text = "né 漢字 🙂 end"
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer(text)["input_ids"]]
    assert "".join(pieces) + stream.end() == text == stream.text
    assert not any("\ufffd" in piece for piece in pieces)
