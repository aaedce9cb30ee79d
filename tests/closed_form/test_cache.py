"""Oracle: the folders that the environment names, as they lie on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockwalk.cli import main
from blockwalk.cutting import calls, verify
from blockwalk.numerics import native
from blockwalk.plan.methods import method
from blockwalk.program.program import Shape
from blockwalk.system import cache, remembered_digests
from blockwalk.walk.unit_costs import UnitCosts
from tests.conftest import TinyRun
from tests.models import tiny_model


def test_the_folder_is_the_first_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed form: BLOCKWALK_CACHE, else XDG_CACHE_HOME, else the home directory; an empty name is
    none."""
    monkeypatch.setenv("HOME", "/home/me")
    for chosen, xdg, folder in (
        ("/chosen", "/xdg", "/chosen"),
        ("", "/xdg", "/xdg/blockwalk"),
        ("", "", "/home/me/.cache/blockwalk"),
    ):
        monkeypatch.setenv("BLOCKWALK_CACHE", chosen)
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert cache.folder() == Path(folder)


def test_all_that_is_kept_lies_below_the_folder(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the files below the folder that is named, and no folder of this name below the other
    two."""
    chosen = tmp_path / "chosen"
    others = (tmp_path / "xdg", tmp_path / "home")
    for name, folder in zip(
        ("BLOCKWALK_CACHE", "XDG_CACHE_HOME", "HOME"), (chosen, *others), strict=True
    ):
        monkeypatch.setenv(name, str(folder))
        folder.mkdir()
    for module in (verify, native):  # what this process found out before
        monkeypatch.setattr(module, "_verdicts" if module is verify else "_loaded", {})
    monkeypatch.setattr(remembered_digests, "_SETTLED", -60.0)
    UnitCosts(tiny_run.model)(method("plain"), Shape(1, 8))
    generate = [
        "generate",
        "--model",
        str(tiny_run.model),
        "--prompt",
        "fresh",
        "--max_new_tokens",
        "1",
    ]
    assert main.main([*generate, "--frozen", "disk × int4a"]) == 0
    native.load("codecs")
    found = {
        path.relative_to(chosen).parts[0].partition("-")[0]
        for path in chosen.rglob("*")
        if path.is_file()
    }
    assert found == {"anatomy", "costs", "digest", "packed"} | (
        {"native"} if native._compiler() else set()
    )
    assert not [path for folder in others for path in folder.rglob("blockwalk")]


def test_an_entry_is_of_the_code_that_this_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the key before; sources that change on the disk meanwhile are not the code that found
    the entry out."""
    model = tiny_model("llama")
    before = verify.key_of(model)
    read = Path.read_bytes
    changed = {Path(verify.__file__), Path(str(calls.__file__))}
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(path) + (b"# newer" if path in changed else b"")
    )
    assert verify.key_of(model) == before
    assert cache.source_key(verify.__file__) != cache.source_key(cache.__file__)


def test_a_folder_that_cannot_be_made_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a file where the folder should be; what is torn counts as not there."""
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("")
    cache.write_sealed("entry", {"a": 1})
    assert cache.read_sealed("entry", dict) is None
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "made" / "now"))
    cache.write_sealed("entry", {"a": [1, "é"]})
    assert cache.read_sealed("entry", dict) == {"a": [1, "é"]}
    assert cache.read_sealed("entry", lambda kept: kept["b"]) is None, "another version wrote it"
    (cache.folder() / "entry.json").write_text('{"a": [1,')
    assert cache.read_sealed("entry", dict) is None
