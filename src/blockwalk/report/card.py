"""The model card of a run: a README.md with the hub's metadata, from the files that the run left;
and the run on the hub. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from blockwalk.checkpoints.ledger import NAME as LEDGER
from blockwalk.checkpoints.marks import MARK
from blockwalk.checkpoints.run_checkpoint import CHANGED, RESULTS
from blockwalk.models import hub
from blockwalk.models.model_source import model_source
from blockwalk.models.places import model_paths, refuse_overlap
from blockwalk.plan.data_source import shown
from blockwalk.plan.parsing import Loader, adapter_settings
from blockwalk.report.html import curves, figures
from blockwalk.system import own_text
from blockwalk.system.atomic_files import whole_lines
from blockwalk.system.links import within
from blockwalk.system.terminal import one_line

COMMENT = "<!-- {} -->"
YAML_COMMENT = "# {}"
"""A comment of Markdown, HTML and SVG; and one of YAML."""


def trained_folder(folder: str | Path) -> Path:
    """Return the folder of what a run trained, where a card may be written.

    Raises:
        ValueError: the run has not ended; a link leads out of its folder; or a card or curve that
            somebody wrote is there.
    """
    run = Path(folder)
    trained = next((run / name for name in RESULTS if (run / name).is_dir()), None)
    if trained is None:
        raise ValueError(f"{run} holds neither adapter nor model: the run has not ended")
    within(run, trained)
    within(run, run / "config.yaml")
    for name in ("README.md", "loss.svg", "config.yaml"):
        own_text.refuse_foreign(trained / name)
    return trained


def write(folder: str | Path) -> Path:
    """Write the card beside what a run trained, with its loss curve; answers the folder, which is
    ready to be uploaded.

    Raises:
        ValueError: as :func:`trained_folder`.
    """
    run = Path(folder)
    trained = trained_folder(folder)
    resolved: dict[str, Any] = yaml.load(
        (run / "config.yaml").read_text(encoding="utf-8"), Loader=Loader
    )
    settings = shareable(resolved)
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    adapter = trained.name == "adapter"
    model = settings["model"]
    data = settings["data"]
    train = data["train"] or data["task"]
    tags = ["blockwalk", settings["method"], *(["lora"] if settings["lora"] else [])]
    library = "peft" if adapter else "transformers"
    head: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    on_hub = model == resolved["model"] and not Path(model).exists()
    if on_hub:
        # of a GGUF file, its repository
        head["base_model"] = "/".join(model_source(model).repository.split("/")[:2])
    elif Path(resolved["model"]).exists():  # a base that was moved is no place to write over
        refuse_overlap(
            trained / "README.md", {"the model": model_paths(resolved["model"])}, "output_dir"
        )
    subject = (
        f"{adapter_settings(settings['lora'] or settings['prefix'])} for"
        if adapter
        else "All parameters of"
    )
    rows = "\n".join(f"| {escaped(name)} | {escaped(value)} |" for name, value in figures(run))
    listed = [train] if isinstance(train, str) else train
    sources = ", ".join(
        code(source["path"] if isinstance(source, Mapping) else source) for source in listed
    )
    fence = "`" * (_longest_ticks(text, least=2) + 1)
    again = f"{_repeatable(run)}\n\n{fence}yaml\n{text.rstrip()}\n{fence}"
    if (run / LEDGER).is_file():
        again += (
            f"\n\n{code(f'blockwalk replay {model} {LEDGER} OUT')} rebuilds the weights from the"
            " ledger, bit for bit."
        )
    body = (
        f"# {escaped(run.name)}\n\n{escaped(subject)} {code(model)}, trained on {sources} by"
        " Blockwalk, method"
    )
    body += f" {code(settings['method'])}.\n\n"
    body += f"| | |\n|---|---|\n{rows}\n\n![loss](loss.svg)\n\n{again}\n"
    card = f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n{body}"
    own_text.write(trained / "loss.svg", curves(run), COMMENT)
    own_text.write(trained / "README.md", card, COMMENT)
    own_text.write(trained / "config.yaml", text, YAML_COMMENT)
    return trained


def escaped(value: object) -> str:
    """Return a value as Markdown that shows it on one line, whatever it holds."""
    return re.sub(r"([\\`*_\[\]<>#!|&~])", r"\\\1", one_line(str(value)))


def code(value: object) -> str:
    """Return a value as Markdown's code on one line; its fence is longer than any run of backticks
    in it."""
    text = one_line(str(value))
    ticks = _longest_ticks(text)
    blank = " " if ticks else ""
    return f"{'`' * (ticks + 1)}{blank}{text}{blank}{'`' * (ticks + 1)}"


def _longest_ticks(text: str, least: int = 0) -> int:
    """Return the length of the longest run of backticks in a text, and ``least`` at least."""
    return max([least, *(len(ticks) for ticks in re.findall("`+", text))])


def shareable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a run's settings without this machine's folders: of a local path its last part stays."""
    data = dict(settings["data"])
    for name in {"train", "eval"} & data.keys():
        data[name] = shown(data[name], _named)
    if template := data.get("chat_template"):
        data["chat_template"] = _named(template) if Path(template).is_file() else template
    shared = {**settings, "model": _named(settings["model"]), "data": data}
    if isinstance(shared.get("lora"), Mapping) and shared["lora"].get("from"):
        shared["lora"] = {**shared["lora"], "from": _named(shared["lora"]["from"])}
    for name in ("output_dir", "resume_from_checkpoint", "overwrite_output_dir"):
        shared.pop(name, None)
    for name in ("lora", "prefix"):
        if isinstance(shared.get(name), str):
            shared[name] = _named(shared[name])
    return shared


def _named(name: str) -> str:
    """Return a name of the hub, or the last part of a local path."""
    path = Path(name).expanduser()
    return path.name if path.exists() or not _on_hub(name) else name


def _on_hub(name: str) -> bool:
    """Return whether a text may be a name of the hub: ``owner/name``, with a revision or a file
    behind it."""
    return "/" in name and not name.startswith(("/", "./", "../", "~")) and "\\" not in name


def _repeatable(run: Path) -> str:
    """Return the sentence on how the run is made again, from the settings below it."""
    changed = whole_lines(run / CHANGED)
    if not changed:
        return "`blockwalk train config.yaml` makes it again, with this file:"
    steps = "; ".join(
        f"after step {line['step']} {', '.join(map(code, line['changes']))}" for line in changed
    )
    return (
        f"Settings were changed as the run went on: {steps}. This file has the last ones, and does"
        " not repeat the run:"
    )


def push(folder: str | Path, repo: str, *, ledger: bool = False) -> str:
    """Upload what a run trained, with its card, curve, configuration and, of zeroth order, its
    ledger; with ``ledger`` all but the weights and the tokenizer. Answers the repository's page.

    Raises:
        ValueError: the run has not ended, has no ledger, has a link that leads out of its folder,
            or the hub refuses.
    """
    run = Path(folder)
    ledgers = [path for path in [within(run, run / LEDGER)] if path.is_file()]
    if ledger and not ledgers:
        raise ValueError(
            f"{run} has no {LEDGER}: its method differentiates, and its weights are needed"
        )
    trained = write(run)
    files_of_result = [trained / name for name in ("README.md", "loss.svg", "config.yaml")]
    if not ledger:
        files_of_result = sorted(
            path for path in trained.rglob("*") if within(run, path).is_file() and path.name != MARK
        )
    files = {path.relative_to(trained).as_posix(): path for path in files_of_result}
    hub.create(repo)
    return hub.upload(repo, {**files, **{path.name: path for path in ledgers}})
