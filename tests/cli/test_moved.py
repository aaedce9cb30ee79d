"""Oracle: the run that never moved: a run resumed under other names has its losses, and one with
other content is refused with the part that the test changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from blockwalk.checkpoints.changed_settings import by_cause, changed_settings
from blockwalk.cli import main
from blockwalk.plan.methods import method
from blockwalk.plan.run_config import RunConfig
from blockwalk.tiers.model_folder.identity import same_weights, weights_digest
from tests.conftest import TinyRun
from tests.support.messages import refused, says
from tests.support.run_folders import losses


class Moved:
    """A run of one step in a folder of its own, from a model and data of its own, to be resumed
    after a change."""

    def __init__(self, tiny_run: TinyRun, folder: Path, *settings: str) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.data = folder / "data.jsonl"
        folder.mkdir()
        shutil.copytree(tiny_run.model, self.model)
        shutil.copyfile(tiny_run.train, self.data)
        self.settings = [*tiny_run.arguments(folder / "run"), "--data.eval", "", *settings]
        assert self.train(1) == 0

    def train(self, steps: int, *changed: str) -> int:
        """The exit code of the run, resumed where it can be."""
        names = [
            "--model",
            str(self.model),
            "--data.train",
            str(self.data),
            "--resume_from_checkpoint",
            "latest",
        ]
        steps_of = ["--max_steps", str(steps), "--optimizer.total_steps", "2"]
        return main.main(["train", *self.settings, *names, *steps_of, *changed])


def model_moved(run: Moved) -> tuple[str, ...]:
    run.model = run.model.rename(run.folder / "elsewhere")
    return ()


def data_moved(run: Moved) -> tuple[str, ...]:
    run.data = run.data.rename(run.folder / "elsewhere.jsonl")
    return ()


def relative(run: Moved) -> tuple[str, ...]:
    run.model, run.data = (Path(os.path.relpath(path)) for path in (run.model, run.data))
    return ()


RENAMED: dict[str, Callable[[Moved], tuple[str, ...]]] = {
    "model moved": model_moved,
    "data moved": data_moved,
    "relative paths": relative,
    "shows nothing": lambda _: ("--data.show_first", "false"),
    "a limit that cuts nothing": lambda _: ("--data.max_length", "100"),
    "shots of an evaluation": lambda _: ("--data.shots", "2"),
}


SETTINGS = ("--method plain --lora.rank 2", "--method zo2 --trainable disk --lora false")


@pytest.fixture(scope="module")
def stayed(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of runs that never moved, by their settings."""
    found = {}
    for settings in SETTINGS:
        run = Moved(tiny_run, tmp_path_factory.mktemp("stayed") / "here", *settings.split())
        assert run.train(2) == 0
        found[settings] = losses(run.folder / "run")
    return found


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        *((SETTINGS[0], change) for change in RENAMED),
        (SETTINGS[1], "model moved"),
        (SETTINGS[1], "data moved"),
    ],
)
def test_a_run_goes_on_under_other_names(
    settings: str, change: str, stayed: dict[str, list[float]], tiny_run: TinyRun, tmp_path: Path
) -> None:
    moved = Moved(tiny_run, tmp_path / "moved", *settings.split())
    assert moved.train(2, *RENAMED[change](moved)) == 0
    assert losses(moved.folder / "run") == stayed[settings]


def test_the_line_says_what_is_equal(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Moved(tiny_run, tmp_path / "run", "--method", "plain", "--lora.rank", "2")
    model_moved(run)
    data_moved(run)
    assert run.train(2) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{run.folder / 'model'} → {run.model}; the same content, by a digest" in printed
    assert f"{run.folder / 'data.jsonl'} → {run.data}; the same examples" in printed


def more_text(run: Moved) -> tuple[str, ...]:
    lines = run.data.read_text().splitlines(keepends=True)
    run.data.write_text("".join([*lines, lines[0]]))
    return ()


def other_text(run: Moved) -> tuple[str, ...]:
    first, second, *rest = run.data.read_text().splitlines(keepends=True)
    other = next(line for line in rest if line != first)
    run.data.write_text("".join([other, second, *rest]))
    return ()


def other_tokenizer(run: Moved) -> tuple[str, ...]:
    file = run.model / "tokenizer.json"
    values = json.loads(file.read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    file.write_text(json.dumps(values))
    return ()


CHANGED: dict[str, tuple[Callable[[Moved], tuple[str, ...]], str]] = {
    "records": (more_text, "records 64 65 data.appended follow"),
    "text": (other_text, "text data.train data.jsonl"),
    "tokenizer": (other_tokenizer, "tokenizer.json"),
    "setting": (lambda _: ("--data.max_length", "17"), "data.max_length 512 17"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_refusal_says_what_changed(
    change: str, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alter, expected = CHANGED[change]
    run = Moved(tiny_run, tmp_path / "run", "--method", "plain", "--lora.rank", "2")
    before = sorted(path.name for path in (run.folder / "run").rglob("*"))
    assert run.train(2, *alter(run)) == 2
    says(capsys.readouterr().err, expected)
    assert sorted(path.name for path in (run.folder / "run").rglob("*")) == before


@pytest.mark.parametrize("settings", SETTINGS)
def test_appended_records_are_followed_by_choice(
    settings: str,
    stayed: dict[str, list[float]],
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They come behind the others: the next batch is that of the run whose data stayed."""
    run = Moved(tiny_run, tmp_path / "run", *settings.split())
    more_text(run)
    assert run.train(2, "--data.appended", "follow") == 0
    says(capsys.readouterr().out, "1 sequence data.train data.appended: follow")
    assert losses(run.folder / "run") == stayed[settings]
    more_text(run)
    assert run.train(2) == 2, "not unless it is chosen"


def test_of_several_sources_the_changed_one_is_named(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Moved(tiny_run, tmp_path / "run", "--method", "plain", "--lora.rank", "2")
    first = run.data.with_name("first.jsonl")
    shutil.copy(run.data, first)
    both = ("--data.train", f"{first},{run.data}")
    anew = ("--overwrite_output_dir", "true", "--resume_from_checkpoint", "")
    assert run.train(1, *both, *anew) == 0
    other_text(run)
    capsys.readouterr()
    assert run.train(2, *both) == 2
    refusal = capsys.readouterr().err
    says(refusal, "text data.train bytes", run.data)
    assert first.name not in refusal


def test_a_chat_template_is_named(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    data = tmp_path / "chat.jsonl"
    shutil.copytree(tiny_run.model, model)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    data.write_text(8 * (json.dumps({"messages": turns}) + "\n"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    names = [
        "--model",
        str(model),
        "--data.train",
        str(data),
        "--output_dir",
        str(tmp_path / "run"),
    ]
    train = ["train", *names, "--method", "plain", "--lora.rank", "2", "--max_steps", "1"]
    assert main.main(train) == 0
    (model / "chat_template.jinja").write_text(template.replace(": ", " = "))
    assert main.main([*train, "--resume_from_checkpoint", "latest"]) == 2
    says(capsys.readouterr().err, "chat template")


def test_words_that_training_ranks_must_stay() -> None:
    """The digest of the examples has the right words alone."""
    saved = {
        "zo": {"objective": "accuracy"},
        "data": {"label_words": ["good", "bad"], "train": "a"},
    }
    now = {**saved, "data": {**saved["data"], "train": "b"}}
    assert changed_settings(saved, now, same_data=True) == ["data.train: a → b; the same examples"]
    now = {**saved, "data": {"label_words": ["good", "worse"], "train": "a"}}
    with refused(ValueError, "data.label_words"):
        changed_settings(saved, now, same_data=True)


def test_many_changes_are_told_in_three_lines_by_cause() -> None:
    """Closed form: what ``method: hzp`` has by its row follows from it; the mesh is a line, and the
    rest is one. No setting is left out."""
    now = RunConfig(plan=method("hzp", mesh={"world": 4, "context": 2})).to_mapping()
    before = RunConfig(plan=method("plain"), max_steps=7, save_every=3).to_mapping()
    changes = changed_settings(before, now, any_method=True)
    assert len(changes) > 6
    method_line, mesh_line, other_line = by_cause(changes, now)
    assert method_line.startswith("method: plain → hzp, and with it ")
    assert "trainable" in method_line
    assert mesh_line.startswith("mesh.")
    assert "mesh.context: 1 → 2" in mesh_line
    assert "mesh.world: 1 → 4" in mesh_line
    assert "max_steps: 7 → " in other_line
    for name in (change.partition(": ")[0] for change in changes):
        assert sum(name in line for line in (method_line, mesh_line, other_line)) >= 1
    assert by_cause(changes[:2], now) == changes[:2]


def test_a_gguf_file_of_another_name_is_the_same_model(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another file of that name is not; a digest with the name in it, as earlier versions made it,
    is known again."""
    pytest.importorskip("gguf")
    settings = [
        *tiny_run.arguments(tmp_path / "run"),
        "--data.eval",
        "",
        "--method",
        "plain",
        "--lora.rank",
        "2",
    ]
    file = tmp_path / "a.gguf"
    renamed = tmp_path / "b.gguf"
    assert main.main(["gguf", str(tiny_run.model), str(file), "--dtype", "f32"]) == 0
    steps = ["--optimizer.total_steps", "2", "--resume_from_checkpoint", "latest"]
    assert main.main(["train", *settings, "--model", str(file), "--max_steps", "1", *steps]) == 0
    file.rename(renamed)
    assert main.main(["train", *settings, "--model", str(renamed), "--max_steps", "2", *steps]) == 0
    content = renamed.read_bytes()
    renamed.write_bytes(content[:-4] + bytes(4))
    capsys.readouterr()
    assert main.main(["train", *settings, "--model", str(renamed), "--max_steps", "3", *steps]) == 2
    assert "holds other weights" in capsys.readouterr().err
    renamed.write_bytes(content)
    named = weights_digest(renamed, by_name=True)
    unnamed = weights_digest(renamed)
    assert named != unnamed
    assert same_weights(renamed, named)
    assert same_weights(renamed, unnamed)
    assert same_weights(tiny_run.model, weights_digest(tiny_run.model, by_name=True))
    assert not same_weights(tiny_run.model, unnamed)
