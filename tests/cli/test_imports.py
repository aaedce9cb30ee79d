"""Oracle: a mark that a module leaves when its code runs, and sha256 by hashlib over its source.
A file that was handed over runs nothing; what a user allowed runs until it changes."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from blockwalk.cli.main import main
from blockwalk.plan.losses import LOSSES
from blockwalk.system import cache, row_modules
from tests.conftest import TinyRun
from tests.support.messages import missing, refused, says
from tests.support.row_modules import new_process

ROWS = """
from pathlib import Path
from blockwalk.estimators.losses import own_loss
from blockwalk.plan.losses import LOSSES, LossFacts, whole_logits
Path(__file__).with_name("mark").open("a").write("x")
LOSSES.register("models_own", LossFacts(own_loss, whole_logits, help="as model"))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "my_rows.py").write_text(ROWS)
    monkeypatch.chdir(work)
    return work


def command(*words: object) -> int:
    """The exit code of a command in a process that knows no rows yet."""
    with new_process():
        return main([str(word) for word in words])


def ran(folder: Path) -> int:
    """Times that the module's code has run."""
    mark = folder / "mark"
    return len(mark.read_text()) if mark.exists() else 0


def run_file(run: TinyRun, folder: Path) -> Path:
    settings = {
        "model": str(run.model),
        "data": {"train": str(run.train), "eval": str(run.train), "format": "text"},
        "lora": {"rank": 2},
        "batch_size": 2,
        "max_steps": 1,
        "loss": "models_own",
        "import": ["my_rows"],
        "output_dir": "out",
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def digest(file: Path) -> str:
    """The digest as the page says it: of name and length of each file, and its content."""
    content = file.read_bytes()
    return hashlib.sha256(f"{file.name} {len(content)}\n".encode() + content).hexdigest()[:16]


def test_a_run_and_its_folder(
    tiny_run: TinyRun, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file alone runs nothing; with the flag it trains; its folder is evaluated without the
    flag, from another working folder too, until the module changes."""
    file = run_file(tiny_run, folder)
    assert command("train", file) == 2
    says(capfd.readouterr().err, "my_rows --import")
    assert ran(folder) == 0

    assert command("train", file, "--import", "my_rows") == 0
    assert ran(folder) == 1
    module = folder / "my_rows.py"
    saved = yaml.safe_load((folder / "out/config.yaml").read_text())
    assert saved["import"] == [f"my_rows@{digest(module)}"]

    other = folder.parent / "other"
    other.mkdir()
    os.chdir(other)
    capfd.readouterr()
    assert command("eval", folder / "out") == 0
    assert ran(folder) == 2
    says(capfd.readouterr().out, "loss")

    os.chdir(folder)
    (folder / "out").rename(folder / "handed")
    assert command("eval", folder / "handed") == 2, "another path is another folder"
    (folder / "handed").rename(folder / "out")
    earlier = digest(module)
    module.write_text(ROWS + "# changed\n")
    capfd.readouterr()
    assert command("eval", "out") == 2
    says(capfd.readouterr().err, earlier, digest(module), "--import my_rows")
    assert ran(folder) == 2

    words = ("train", file, "--import", "my_rows", "--resume_from_checkpoint", "latest")
    assert command(*words, "--max_steps", "2") == 0
    says(capfd.readouterr().out, "import", earlier, digest(module))
    assert command("eval", "out") == 0, "it was allowed again"


def test_a_record_that_others_may_write(folder: Path) -> None:
    """Oracle: file modes. Others may write the record, or the module."""
    with new_process():
        row_modules.load("my_rows")
        row_modules.remember("out")
    record = cache.file_of(row_modules._record("out"))
    record.chmod(0o666)
    with new_process():
        row_modules.load_allowed("out", "my_rows@1234")
        assert row_modules.files() == []
    record.chmod(0o600)
    (folder / "my_rows.py").chmod(0o666)
    with new_process(), refused(ValueError, "my_rows.py others --import"):
        row_modules.load_allowed("out", "my_rows")
    assert ran(folder) == 1
    (folder / "my_rows.py").chmod(0o600)
    with new_process():
        row_modules.load_allowed("out", "my_rows")
        assert ran(folder) == 2


def test_a_module_beside_a_file_is_not_looked_up(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The module lies beside the run's file, and the working folder is another one."""
    (folder / "run.yaml").write_text("model: x\nimport: [my_rows]\n")
    os.chdir(folder.parent)
    assert command("plan", folder / "run.yaml", "--import", "my_rows") == 2
    says(capfd.readouterr().err, "my_rows", folder.parent)
    assert ran(folder) == 0


def test_a_path_a_package_and_a_dotted_name(folder: Path) -> None:
    """Modules of every form are there by their names, once, whatever `__pycache__` holds."""
    package = folder / "rows"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("VALUE = 3\n")
    with new_process():
        assert row_modules.load("./my_rows.py").name == "my_rows"
        assert row_modules.load("my_rows").file == str(folder / "my_rows.py")
        assert row_modules.load("rows.inner").file == str(package / "inner.py")
        assert sys.modules["rows.inner"].VALUE == 3
        assert "my_rows" in sys.modules
        files = row_modules.files()
    assert "my_rows" not in sys.modules
    os.chdir(folder.parent)
    with new_process():
        row_modules.load_all(files)
        assert row_modules.files() == files
    assert ran(folder) == 2


REFUSED = {
    "no_such_module": ("no_such_module", "", ("no_such_module",)),
    "a name of Python's": ("random", "random.py", ("random.py", "Python")),
    "a name of another": ("yaml", "yaml.py", ("yaml.py", "yaml/__init__.py")),
    "no name": ("my-rows.py", "my-rows.py", ("my-rows",)),
    "it fails": ("failing", "failing.py", ("failing.py:2", "ZeroDivisionError")),
    "no Python": ("broken", "broken.py", ("broken.py:1", "SyntaxError")),
    "a row is taken": ("taken", "taken.py", ("taken.py:2", "loss", "chunked", "taken|already")),
}
CONTENT = {
    "failing.py": "x = 1\n1 / 0\n",
    "broken.py": "x = = 1\n",
    "taken.py": "from blockwalk.plan.losses import LOSSES\nLOSSES.register('chunked', None)\n",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2, for a command with settings and for one without."""
    module, file, facts = REFUSED[name]
    if file:
        (folder / file).write_text(CONTENT.get(file, ""))
    for words in (("plan", "--model", "x"), ("settings",)):
        assert command(*words, "--import", module) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1
        assert not missing(error, *facts, "--import"), error


def test_a_list_on_the_command_line_adds_to_that_of_a_file(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A name in the file that the command line lacks is refused by its name."""
    (folder / "second.py").write_text("")
    (folder / "run.yaml").write_text("model: x\nimport: [my_rows, second]\n")
    assert command("plan", "run.yaml", "--import", "my_rows") == 2
    says(capfd.readouterr().err, "second --import")
    assert command("plan", "run.yaml", "--import=my_rows,second") == 2
    assert not missing(capfd.readouterr().err, "model|x"), "it comes as far as the model"
    with new_process(), refused(ValueError, "import second"):
        row_modules.require("second", "import")


def test_an_installed_package_brings_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the metadata of two packages. The first one's rows are there without a flag, and a
    file may name its module; the second one fails, in one line that names it."""
    for name, content in (
        ("good_rows", ROWS.replace("models_own", "packaged")),
        ("bad_rows", "1/0"),
    ):
        information = folder / f"{name}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        (information / "entry_points.txt").write_text(f"[blockwalk.rows]\nmine = {name}\n")
        (folder / f"{name}.py").write_text(content)
    monkeypatch.syspath_prepend(folder)
    with new_process():
        row_modules.load_installed()
        assert "packaged" in LOSSES
        assert row_modules.require("good_rows", "import").file == str(folder / "good_rows.py")
    (message,) = (record.getMessage() for record in caplog.records)
    says(message, "bad_rows ZeroDivisionError")


def test_additions_come_by_entry_points() -> None:
    """Oracle: pyproject.toml, and the imports of every module. Each folder of contrib has an entry
    point; no module outside imports one; an installation without them says so."""
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]["blockwalk.rows"]
    source = root / "src" / "blockwalk"
    additions = {path.parent.name for path in source.glob("contrib/*/__init__.py")}
    assert set(points.values()) == {f"blockwalk.contrib.{name}" for name in additions}
    for path in source.rglob("*.py"):
        if path.is_relative_to(source / "contrib"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("blockwalk.contrib") for name in names), path
    script = (
        "import importlib.metadata; importlib.metadata.entry_points = lambda **_: ();"
        "from blockwalk.plan.noise_kinds import NOISES; print(list(NOISES))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "mezo" not in done.stdout
    says(done.stderr, "blockwalk mezo pip install")
