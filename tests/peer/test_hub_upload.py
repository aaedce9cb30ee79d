"""Oracle: the files that a server which speaks the hub's protocol was given by huggingface_hub's
client, against those of the run; huggingface_hub, which reads the card; the weights that the ledger
on the hub is replayed to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blockwalk.cli import main
from blockwalk.models import hub as hub_files
from tests.conftest import TinyRun
from tests.support.hub import Hub, serving
from tests.support.messages import says


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    with serving(Hub({}, token="hf_known", root=tmp_path / "hub")) as found:
        url = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # LFS, which is older, and open
        monkeypatch.setenv("HF_TOKEN", "hf_known")
        hub_files.download.cache_clear()
        yield found
    hub_files.download.cache_clear()


def test_a_run_ends_on_the_hub(tiny_run: TinyRun, hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    arguments = [
        *tiny_run.arguments(tmp_path / "out"),
        "--max_steps",
        "2",
        "--push_to_hub",
        "ours/adapter",
    ]
    assert main.main(["train", *arguments]) == 0
    assert hub.private == {"ours/adapter": True}
    given = {path.name: path.read_bytes() for path in (hub.root / "ours/adapter").iterdir()}
    kept = (tmp_path / "out/adapter").iterdir()
    assert given == {path.name: path.read_bytes() for path in kept if path.name != ".blockwalk"}
    assert {
        "adapter_model.safetensors",
        "README.md",
        "loss.svg",
        "tokenizer.json",
        "config.yaml",
    } <= given.keys()
    assert str(tmp_path) not in (given["README.md"] + given["config.yaml"]).decode(), (
        "no folder of this machine"
    )
    card = ModelCard(given["README.md"].decode())
    assert (card.data["library_name"], card.data["pipeline_tag"]) == ("peft", "text-generation")


def test_a_ledger_on_the_hub_is_weights(tiny_run: TinyRun, hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert (
        main.main(["train", *tiny_run.arguments(out), "--method", "mezo", "--max_steps", "3"]) == 0
    )
    assert main.main(["push", str(out), "ours/steps", "--ledger"]) == 0
    given = {path.name for path in (hub.root / "ours/steps").iterdir()}
    assert given == {"README.md", "loss.svg", "config.yaml", "ledger.jsonl"}
    assert main.main(["replay", str(tiny_run.model), "ours/steps", str(tmp_path / "rebuilt")]) == 0
    rebuilt, trained = (
        (path / "model.safetensors").read_bytes() for path in (tmp_path / "rebuilt", out / "model")
    )
    assert rebuilt == trained, "bit for bit"
    assert main.main(["push", str(out), "ours/steps"]) == 0, (
        "a repository that is there already is written to"
    )
    assert (hub.root / "ours/steps/model.safetensors").read_bytes() == trained


@pytest.mark.parametrize(
    ("token", "endpoint", "words"),
    [
        ("", "", "token hf auth login HF_TOKEN"),
        ("hf_other", "", "401"),
        ("hf_known", "http://127.0.0.1:9", "ours/adapter http://127.0.0.1:9"),
    ],
)
def test_nobody_trains_for_a_hub_that_refuses(
    token: str,
    endpoint: str,
    words: str,
    tiny_run: TinyRun,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: no token, another account's, nobody at the address; the folder of the run, which is
    not made."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", token)
    if endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert (
        main.main(["train", *tiny_run.arguments(tmp_path / "out"), "--push_to_hub", "ours/adapter"])
        == 2
    )
    error = capsys.readouterr().err.strip()
    says(error, words)
    assert "\n" not in error
    assert not (tmp_path / "out").exists()
