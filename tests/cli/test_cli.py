"""Oracle: the documented exit codes, the interpreter's list of imported modules, and byte counts
worked out by hand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from blockwalk.cli import main
from blockwalk.cli.commands import COMMANDS
from tests.conftest import TinyRun
from tests.support.messages import says

D = 64
M = 128
V = 96
L = 3
HEADS = 4
KV = 2
HEAD = 16
BLOCK = D * HEADS * HEAD * 2 + 2 * D * KV * HEAD + 3 * D * M + 2 * D
PARAMETERS = V * D + L * BLOCK + D


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with nothing but a configuration: a plan touches no weight."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=M,
        num_hidden_layers=L,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=HEAD,
        tie_word_embeddings=True,
        dtype="float32",
    ).save_pretrained(folder)
    return str(folder)


def test_help_imports_no_torch() -> None:
    script = (
        "import contextlib, sys\n"
        "from blockwalk.cli.main import main\n"
        "for argv in (['--help'], ['train', '--help'], ['pack', '--help']):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(argv)\n"
        "heavy = {'torch', 'transformers', 'peft', 'numpy', 'datasets'} & sys.modules.keys()\n"
        "sys.exit(', '.join(heavy) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert re.search(rf"\n    {command.name}\s", done.stdout), command.name
    assert "--optimizer.learning_rate X\n" in done.stdout


def test_python_m_blockwalk() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "blockwalk", "nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    says(done.stderr, "nonsense")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "--optimiser.learning_rate", "1"],
            "optimiser.learning_rate optimizer.learning_rate",
        ),
        (["train", "--bach_size", "1"], "--bach_size batch_size"),
        (["train", "--seed"], "--seed value"),
        (["train", "absent.yaml"], "absent.yaml"),
        (
            ["train", "--model", "m", "--optimizer.learning_rate", "fast"],
            "optimizer.learning_rate fast",
        ),
        (["train"], "model missing"),
        (["train", "--model", "m"], "data.train missing"),
        (["plan"], "model missing"),
        (["plan", "--model", "no/such/folder"], "model: no/such/folder"),
        (["eval", "--model", "m"], "data.eval missing"),
        (["plan", "--model", ".", "--hardware", "here"], "config.json"),
        (
            ["plan", "--model", "m", "--update.flush_every", "4"],
            "update.flush_every 4 update.timing block deferred",
        ),
    ],
)
def test_what_the_user_got_wrong(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("blockwalk: error: ")
    says(error, message)
    assert error.count("\n") == 1, "one line, no traceback"
    monkeypatch.setenv("BLOCKWALK_DEBUG", "1")
    assert main.main(arguments) == 2
    assert "Traceback" in capsys.readouterr().err


def test_what_is_no_model_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the exit code, and the interpreter's list of modules: no torch, so no tokenizer, no
    data and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("gguf/model-q4.gguf", "empty/notes.txt"):
        Path(name).parent.mkdir()
        Path(name).write_bytes(b"")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
    expected = {
        "absent": "absent folder",
        "no-such/model": "no-such/model HF_HUB_OFFLINE cache",
        "gguf/model-q4.gguf": "gguf/model-q4.gguf GGUF",
        "gguf": "model-q4.gguf GGUF",
        "empty": "empty model.safetensors model.safetensors.index.json pytorch_model.bin",
    }
    script = (
        "import sys; from blockwalk.cli.main import main; sys.exit(main(sys.argv[1:]) + 9 *"
        " ('torch' in sys.modules))"
    )
    for name, message in expected.items():
        for arguments in (
            ["train", "--data.train", "d"],
            ["eval", "--data.eval", "d"],
            ["generate", "--prompt", "a"],
        ):
            assert main.main([*arguments, "--model", name]) == 2
            error = capsys.readouterr().err
            says(error, message)
            assert error.count("\n") == 1
    arguments = [
        "train",
        "--data.train",
        "d",
        "--model",
        "gguf",
        "--nproc-per-node",
        "2",
        "--method",
        "fcdp",
    ]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert not Path("runs").exists()


def test_here_is_what_doctor_wrote(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the exit code, in a folder where nothing was written."""
    monkeypatch.chdir(model)
    assert main.main(["plan", "--model", model, "--hardware", "here"]) == 2
    says(capsys.readouterr().err, "blockwalk doctor")


def test_settings_and_other_arguments_may_come_in_any_order(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        ["plan", "--program", "--model", model, "--lora=false", "--method", "plain"],
        ["--model", model, "plan", "--lora=false", "--method", "plain", "--program"],
    ):
        assert main.main(arguments) == 0
        assert "BACKWARD" in capsys.readouterr().out


def plan_rows(out: str) -> dict[str, str]:
    return {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}


def test_plan_counts_every_byte(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        "--model",
        model,
        "--method",
        "plain",
        "--lora",
        "false",
        "--batch_size",
        "2",
    ]
    arguments += ["--data.max_length", "40", "--recompute", "all"]
    assert main.main(arguments) == 0
    rows = plan_rows(capsys.readouterr().out)
    assert f"{4 * PARAMETERS / 1000:.1f} kB   {PARAMETERS:,} parameters" in rows["trainable"]
    assert f"{8 * PARAMETERS / 1000:.1f} kB   adamw" in rows["optimizer"]
    assert f"{4 * PARAMETERS / 1000:.1f} kB" in rows["gradient"]
    assert f" {L * 2 * 40 * D * 4 / 1000:.1f} kB" in rows["activation"]


def test_plan_is_of_one_ranks_part_of_the_batch(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Closed form: 16 sequences cut in 4; FZOO's 9 forwards do not divide over 8 ranks: the mesh is
    printed."""
    few = ["plan", "--model", model, "--method", "distzo2", "--batch_size", "16"]
    assert main.main([*few, "--mesh.world", "4", "--mesh.data", "4"]) == 0
    assert "one step     4 × 512 tokens" in capsys.readouterr().out
    assert main.main([*few, "--mesh.world", "8", "--zo.kind", "fzoo", "--zo.queries", "8"]) == 0
    said = capsys.readouterr().out
    says(said, "8 9 1")


def test_a_plan_that_does_not_fit(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", model, "--method", "plain", "--lora", "false"]
    assert main.main([*arguments, "--budget", "100kB"]) == 3
    says(capsys.readouterr().err, "budget 100.0 kB")
    assert main.main([*arguments, "--budget", "100GB"]) == 0


def test_every_weight_is_not_trained_from_rounded_values(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the exit code for configurations, and the folder that was not made."""
    arguments = [
        "train",
        *tiny_run.arguments(tmp_path / "out"),
        "--method",
        "mebp",
        "--lora",
        "false",
    ]
    assert main.main([*arguments, "--frozen", "disk × int4a"]) == 2
    says(capsys.readouterr().err, "disk int4a adapters")
    assert not (tmp_path / "out").exists()


def test_zeroth_order_says_what_it_means(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", model, "--method", "mezo"]
    assert main.main(arguments) == 0
    out = capsys.readouterr().out
    assert "expect thousands of steps" in out
    assert "learning_rate 1e-07 to 1e-06 with zo.epsilon 0.001" in out
    assert "note:" not in out
    assert main.main([*arguments, "--optimizer.learning_rate", "1e-3"]) == 0
    says(capsys.readouterr().out, "optimizer.learning_rate 0.001")


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    import platform

    import torch

    assert main.main(["env"]) == 0
    out = capsys.readouterr().out
    assert f" {torch.__version__}\n" in out
    assert f" {platform.python_version()}\n" in out


def test_failures_while_running_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that cannot be made, for a file stands in its place: not the configuration's fault
    alone, yet named."""
    (tmp_path / "file").write_text("")
    assert main.main(["pack", str(tmp_path / "absent"), str(tmp_path / "file" / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
