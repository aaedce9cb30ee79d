"""Oracle: the names and digests of files that no run made, before runs that are refused, that end,
and that are killed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from blockwalk.checkpoints import marks, run_checkpoint, sweeping
from blockwalk.cli import main
from blockwalk.models import places
from blockwalk.report import card
from blockwalk.system import atomic_files, links, own_text
from tests.conftest import TinyRun
from tests.support.messages import refused, says

LORA = (
    "--method",
    "mebp",
    "--frozen",
    "disk",
    "--lora.rank",
    "4",
    "--optimizer.learning_rate",
    "1e-3",
)
PLAIN = ("--method", "plain", "--optimizer.learning_rate", "1e-3")
ZO2 = ("--method", "zo2", "--trainable", "disk", "--optimizer.learning_rate", "1e-5")
OVER = ("--overwrite_output_dir", "true")
LATEST = ("--resume_from_checkpoint", "latest")

NAMES = (
    "weights-v1/a",
    "weights-0123456789ab/a",
    "weights-notes.txt",
    ".mine.partial",
    ".x.0123abcd.partial/a",
    ".model.0123abcd.partial/a",
    ".adapter.0123abcd.replaced.txt",
    "replaced/a",
    "rank-0/a",
    "joined-x/a",
    "logs/rank-notes/.metrics.jsonl.0123abcd.partial",
    "scratch/weights-7b/a",
    "scratch/weights-0123456789ab/a",
    "scratch/joined-abcdefgh/a",
    "scratch/.mine.partial",
    "scratch/.a.0123abcd.partial/a",
    "scratch/rank-0/mine",
    "scratch/rank-notes/.scratch-abcdefgh.partial",
    "checkpoint-old/a",
    "train.jsonl",
    "notes.txt",
)
"""Names that look like a run's and are somebody's."""


def train(tiny_run: TinyRun, folder: Path, *settings: str) -> int:
    return main.main(
        ["train", *tiny_run.arguments(folder), "--max_steps", "4", "--save_every", "2", *settings]
    )


def fill(folder: Path, *names: str) -> dict[str, str]:
    """Write a file of each name, and answer all that lies in the folder."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"mine: {name}")
    return contents(folder)


def contents(folder: Path) -> dict[str, str]:
    """Every file, folder and link below, with its digest or where it leads."""
    found = {}
    for path in sorted(folder.rglob("*")):
        text = os.readlink(path) if path.is_symlink() else ""
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[str(path.relative_to(folder))] = text or digest
    return found


def refused_line(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> None:
    """Compare the end of a refused run: its exit code, and the words of its one line."""
    said = capsys.readouterr().err
    assert code == 2, said
    line = [line for line in said.splitlines() if line.startswith("blockwalk: error:")][-1]
    says(line, *words)


def test_a_folder_full_of_other_peoples_names(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    method = ZO2
    before = fill(folder, *NAMES)
    assert train(tiny_run, folder, *method, "--budget", "10kB") == 3
    assert contents(folder) == before, "a refused run"
    assert train(tiny_run, folder, *method) == 0, capsys.readouterr().err
    assert train(tiny_run, folder, *method, *LATEST, "--max_steps", "6") == 0, (
        capsys.readouterr().err
    )
    after = contents(folder)
    assert {name: after.get(name) for name in before} == before, "two runs that ended"
    refused_line(capsys, train(tiny_run, folder, *method, *OVER), folder / "replaced", "output_dir")
    shutil.move(folder / "replaced", tmp_path)
    assert train(tiny_run, folder, *method, *OVER) == 0, capsys.readouterr().err
    after = contents(folder)
    left = {name: digest for name, digest in before.items() if not name.startswith("replaced")}
    assert {name: after.get(name) for name in left} == left, "a run that replaces one of ours"


@pytest.mark.parametrize("name", ["adapter/mine", "config.yaml", "metrics.jsonl", "trace.json",
                                  "checkpoint-000004/a", "checkpoint-100000/a", ".blockwalk",
                                  ".lock", "adapter", "checkpoint-000002"])  # fmt: skip
def test_a_name_that_the_run_needs_is_refused(
    name: str, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = fill(tmp_path / "run", name)
    for resume in ((), LATEST):
        taken = tmp_path / "run" / Path(name).parts[0]
        refused_line(capsys, train(tiny_run, tmp_path / "run", *LORA, *resume), str(taken), "move")
        assert contents(tmp_path / "run") == before


def test_a_result_is_replaced_by_its_own_run_or_when_that_is_set(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert train(tiny_run, folder, *LORA) == 0
    first = contents(folder / "adapter")
    assert train(tiny_run, folder, *LORA, *LATEST, "--max_steps", "6") == 0, "its own"
    second = contents(folder / "adapter")
    assert second["adapter_model.safetensors"] != first["adapter_model.safetensors"]
    for checkpoint in run_checkpoint.whole(folder):
        shutil.rmtree(checkpoint)
    for settings in ((), LATEST):
        refused_line(
            capsys,
            train(tiny_run, folder, *LORA, *settings),
            str(folder / "adapter"),
            "overwrite_output_dir",
        )
    assert contents(folder / "adapter") == second
    elsewhere = tmp_path / "other"
    shutil.copytree(folder / "adapter", elsewhere / "adapter")
    refused_line(
        capsys, train(tiny_run, elsewhere, *LORA, *LATEST), str(elsewhere / "adapter"), "output_dir"
    )
    assert train(tiny_run, folder, *LORA, *OVER) == 0
    assert (
        contents(folder / "adapter")["adapter_model.safetensors"]
        == first["adapter_model.safetensors"]
    )


def test_a_source_is_never_written_over(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base model is the result's place, holds it, or lies around it, by any of its names."""
    folder = tmp_path / "q"
    shutil.copytree(tiny_run.model, folder / "model")
    (tmp_path / "name").symlink_to(folder)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/model").symlink_to(folder / "model")
    shutil.copytree(tiny_run.model, tmp_path / "held/model/base")
    (tmp_path / "records").mkdir()
    shutil.copy(tiny_run.train, tmp_path / "records/metrics.jsonl")
    os.link(tmp_path / "records/metrics.jsonl", tmp_path / "records/second.jsonl")
    before = contents(tmp_path)
    for output, settings in (
        (folder, ("--model", str(folder / "model"))),
        (folder, ("--model", str(tmp_path / "name/model"))),
        (tmp_path / "name", ("--model", str(folder / "model"))),
        (tmp_path / "linked", ("--model", str(folder / "model"))),
        (tmp_path / "held", ("--model", str(tmp_path / "held/model/base"))),
        (folder / "model", ("--model", str(folder / "model"))),
        (folder / "model/runs", ("--model", str(folder / "model"))),
        (tmp_path / "records", ("--data.train", str(tmp_path / "records/second.jsonl"))),
        (tmp_path / "records", ("--data.train", str(tmp_path / "records"))),
    ):
        code = train(tiny_run, output, *PLAIN, *settings, *OVER)
        refused_line(capsys, code, str(output), "output_dir")
        assert contents(tmp_path) == before, (output, settings)


def test_places_that_only_the_kernel_knows_to_be_one(tmp_path: Path) -> None:
    """A mounted folder's two names, where this process may mount."""
    (tmp_path / "model").mkdir()
    (tmp_path / "mounted").mkdir()
    if os.geteuid() or os.system(f"mount --bind {tmp_path}/model {tmp_path}/mounted 2> /dev/null"):
        pytest.skip("mounting needs root")
    try:
        for place, verb in (("mounted", "is"), ("mounted/out", "lies in")):
            with refused(ValueError, f"{place} {verb} model"):
                places.refuse_overlap(
                    tmp_path / place, {"the model": [tmp_path / "model"]}, "output"
                )
        with refused(ValueError, "model"):
            places.refuse_overlap(tmp_path, {"the model": [tmp_path / "mounted"]}, "output")
        places.refuse_overlap(
            tmp_path / "elsewhere", {"the model": [tmp_path / "mounted"]}, "output"
        )
    finally:
        assert os.system(f"umount {tmp_path}/mounted") == 0


def test_commands_write_over_nothing(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    model = tmp_path / "model"
    shutil.copytree(tiny_run.model, model)
    assert (
        train(
            tiny_run, run, *ZO2, "--model", str(model), "--trainable", "host", "--save_every", "0"
        )
        == 0
    )
    assert train(tiny_run, tmp_path / "lora", *LORA) == 0
    adapter = tmp_path / "lora/adapter"
    ledger = run / "ledger.jsonl"
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out", "Modelfile", "made.gguf.part")
    fill(adapter, "README.md")
    before = contents(tmp_path)
    for command in (
        ["merge", model, adapter, model / "merged", "--dtype", "float32"],
        ["merge", model, adapter, adapter / "merged"],
        ["merge", model, adapter, tmp_path],
        ["pack", model, model / "packed", "--codec", "int4"],
        ["gguf", model, model / "made.gguf"],
        ["gguf", model, tmp_path / "out/made.gguf"],
        ["replay", model, ledger, model / "out"],
        ["replay", model, ledger, run / "model"],
        ["export", model, ledger, "--ledger", ledger],
        ["export", model, model / "steps", "--ledger", ledger],
        ["report", tmp_path / "lora", "--card"],
    ):
        capsys.readouterr()
        code = main.main([*map(str, command)])
        said = capsys.readouterr()
        assert code == 2, (command, said)
        text = said.err
        assert any(word in text for word in ("choose another", "move")), text
        assert contents(tmp_path) == before, command


def test_a_text_of_ours_is_replaced_until_somebody_changes_it(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    own_text.write(path, "first\n", card.COMMENT)
    own_text.write(path, "second\n", card.COMMENT)
    assert path.read_text().startswith("second\n<!-- written by blockwalk")
    path.write_text(path.read_text().replace("second", "mine"))
    with refused(ValueError, "README.md"):
        own_text.write(path, "third\n", card.COMMENT)
    path.unlink()
    path.symlink_to("elsewhere")
    with refused(ValueError, "link elsewhere"):
        own_text.write(path, "third\n", card.COMMENT)


CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync", "remove")


def killed_at(point: int, work: Callable[[], None]) -> bool:
    """Whether a child that is killed at its ``point``-th call that changes a folder did not come to
    its end."""
    if (child := os.fork()) == 0:
        count = [0]

        def counted(call: Callable[..., object]) -> Callable[..., object]:
            def do(*arguments: object, **options: object) -> object:
                count[0] += 1
                if count[0] == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)

            return do

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_neither_the_old_nor_the_new_folder_is_lost_to_a_kill(tmp_path: Path) -> None:
    """Oracle: SIGKILL before every call in turn; then the sweep of the next run."""
    place = tmp_path / "model"

    def work() -> None:
        with atomic_files.atomic_folder(place, replace=True) as folder:
            marks.write(folder, "0123456789ab")
            (folder / "weights").write_text("new")

    outcomes = set()
    for point in range(1, 100):
        shutil.rmtree(tmp_path)
        place.mkdir(parents=True)
        (place / "weights").write_text("old")
        killed = killed_at(point, work)
        sweeping.sweep(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["model"], point
        outcomes.add((place / "weights").read_text())
        if not killed:
            break
    assert not killed
    assert outcomes == {"old", "new"}


def test_a_folder_of_ours_is_known_until_it_is_gone(tmp_path: Path) -> None:
    """Oracle: SIGKILL before every call of its removal in turn."""
    folder = tmp_path / "replaced"
    killed = True
    point = 0
    while killed and point < 50:
        point += 1
        shutil.rmtree(folder, ignore_errors=True)
        fill(folder, "a", "z", "checkpoint-000002/state.json")
        marks.write(folder, "0123456789ab")
        killed = killed_at(point, lambda: links.remove(folder))
        assert marks.is_ours(folder) or not (killed or folder.exists()), point
    assert not killed
    assert point > 5


def test_links_are_not_followed(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("oauth_token: SECRET\n")
    for name, link in (
        ("a", ".lock"),
        ("b", "adapter"),
        ("c", "config.yaml"),
        ("d", "scratch"),
        ("e", "../loop"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / link).symlink_to(
            "../nowhere" if link in ("scratch", "../loop") else "../secret"
        )
    for name, output in (("a", "a"), ("b", "b"), ("c", "c"), ("d", "d"), ("e", "loop")):
        code = train(tiny_run, tmp_path / output, *LORA)
        refused_line(capsys, code, str(tmp_path / output), "link ../")
        assert (tmp_path / "secret").read_text() == "oauth_token: SECRET\n", name
    (tmp_path / "hard").mkdir()
    os.link(tmp_path / "secret", tmp_path / "hard" / ".lock")
    refused_line(capsys, train(tiny_run, tmp_path / "hard", *LORA), ".lock second")
    for path in ("/dev/null/x", str(tmp_path / "secret"), str(tmp_path / "secret" / "x")):
        refused_line(capsys, train(tiny_run, Path(path), *LORA), "file folder")
    assert (tmp_path / "secret").read_text() == "oauth_token: SECRET\n"
    (tmp_path / "log").symlink_to("secret")
    with refused(ValueError, "link secret"):
        links.append_to(tmp_path / "log")


def test_scratch_and_checkpoints_may_lie_on_another_disk(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    disk = tmp_path / "disk"
    before = fill(disk, "weights-x/a", "joined-x/a", ".x.partial", "weights-0123456789ab/a")
    folder.mkdir()
    (folder / "scratch").symlink_to(disk)
    assert train(tiny_run, folder, *ZO2, "--budget", "10kB") == 3
    assert contents(disk) == before
    assert train(tiny_run, folder, *ZO2) == 0, capsys.readouterr().err
    for checkpoint in run_checkpoint.whole(folder):
        checkpoint.rename(tmp_path / checkpoint.name)
        checkpoint.symlink_to(tmp_path / checkpoint.name)
    kept = contents(tmp_path / "checkpoint-000002")
    assert train(tiny_run, folder, *ZO2, *LATEST, "--max_steps", "8") == 0, capsys.readouterr().err
    assert [path.name for path in run_checkpoint.whole(folder)] == [
        "checkpoint-000006",
        "checkpoint-000008",
    ]
    assert contents(tmp_path / "checkpoint-000002") == kept, "a link goes, and where it leads stays"
    assert train(tiny_run, folder, *PLAIN, *OVER) == 0, capsys.readouterr().err
    assert (folder / "scratch").is_symlink()
    assert contents(disk) == before, "our own weights are gone, all others there"


def test_a_page_and_an_upload_read_no_link_that_leads_out(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = tmp_path / "made"
    sent = []
    monkeypatch.setattr(card.hub, "create", lambda repo: None)
    monkeypatch.setattr(
        card.hub, "upload", lambda repo, files: sent.append(sorted(files)) or "page"
    )
    assert train(tiny_run, made, *LORA) == 0
    (tmp_path / "secret").write_text("oauth_token: SECRET\n")
    (tmp_path / "project").mkdir()
    (tmp_path / "project/README.md").write_text("mine")
    for number, name in enumerate(
        ("config.yaml", "metrics.jsonl", "forecast.json", "trace.json", "evaluations.jsonl")
    ):
        run = tmp_path / f"run {number}"
        shutil.copytree(made, run)
        (run / name).unlink()
        (run / name).symlink_to("../secret")
        refused_line(capsys, main.main(["report", str(run)]), name, "secret")
        assert not (run / "report.html").exists()
    run = tmp_path / "adapter is a link"
    shutil.copytree(made, run)
    shutil.rmtree(run / "adapter")
    (run / "adapter").symlink_to("../project")
    for command in (["report", str(run), "--card"], ["push", str(run), "me/it"]):
        refused_line(capsys, main.main(command), "adapter out")
    assert (tmp_path / "project/README.md").read_text() == "mine"
    (made / "adapter/notes.txt").symlink_to("../../secret")
    refused_line(capsys, main.main(["push", str(made), "me/it"]), "notes.txt out")
    assert sent == []
    (made / "adapter/notes.txt").unlink()
    assert main.main(["push", str(made), "me/it"]) == 0
    assert {"README.md", "adapter_model.safetensors", "config.yaml"} <= set(sent[0])
    assert ".blockwalk" not in sent[0]


def test_held_out_records_that_changed_are_named(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = tmp_path / "ev.jsonl"
    run = tmp_path / "run"
    records = [{"text": f"{word}.", "label": "good"} for word in ("fresh", "kind", "clean")]
    held_out.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = (*LORA, "--data.eval", str(held_out))
    assert train(tiny_run, run, *arguments) == 0
    assert "held-out loss" in capsys.readouterr().out
    assert train(tiny_run, run, *arguments, *LATEST, "--max_steps", "6") == 0
    said = capsys.readouterr().out
    assert "other records" not in said, "the same file"
    assert " → " in next(line for line in said.splitlines() if line.startswith("held-out loss"))
    records[0]["label"] = "bad"
    held_out.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert train(tiny_run, run, *arguments, *LATEST, "--max_steps", "8") == 0
    said = capsys.readouterr().out
    (note,) = [line for line in said.splitlines() if "other records" in line]
    assert str(held_out) in note
    assert "step 6" in note
    assert not [line for line in said.splitlines() if line.startswith("held-out") and " → " in line]
    assert main.main(["report", str(run)]) == 0
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    first = lines[0]["loss"]
    last = lines[-1]["loss"]
    page = (run / "report.html").read_text()
    assert f"{first:.4f} → {last:.4f}" not in page
    assert f"{last:.4f} → {last:.4f}" in page


def test_lost_lines_and_other_names_of_checkpoints_are_told(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(tiny_run, run, *LORA) == 0
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (run / name).unlink()
    capsys.readouterr()
    assert train(tiny_run, run, *LORA, *LATEST, "--max_steps", "6") == 0
    said = capsys.readouterr().out
    says(said, "metrics.jsonl 4")
    says(said, "evaluations.jsonl 0")
    (run / "checkpoint-000006").rename(run / "checkpoint-000009")
    before = contents(run)
    code = train(tiny_run, run, *LORA, *LATEST)
    refused_line(capsys, code, "checkpoint-000009 9 6 name")
    assert contents(run) == before


def test_an_adapter_has_the_mode_that_the_umask_leaves(tiny_run: TinyRun, tmp_path: Path) -> None:
    for mask in (0o022, 0o077):
        before = os.umask(mask)
        try:
            assert train(tiny_run, tmp_path / f"{mask:o}", *LORA, "--max_steps", "1") == 0
        finally:
            os.umask(before)
        for path in (tmp_path / f"{mask:o}" / "adapter").iterdir():
            assert path.stat().st_mode & 0o777 == 0o666 & ~mask, path
