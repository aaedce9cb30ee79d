"""The model card of a run: a README.md with the hub's metadata, from the files that the run left; and the run on the hub. No
torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from blockwalk.checkpoints.ledger import NAME as LEDGER
from blockwalk.checkpoints.run_checkpoint import CHANGED
from blockwalk.models import hub
from blockwalk.models.folder import repository
from blockwalk.plan.parsing import Loader, adapter_settings
from blockwalk.report.html import curves, figures
from blockwalk.system import atomic_files
from blockwalk.system.atomic_files import whole_lines


def write(folder: str | Path) -> Path:
    """Write the card beside what a run trained, with its loss curve; answers the folder, which is ready to be uploaded.

    Raises:
        ValueError: the run has not ended.
    """
    run = Path(folder)
    trained = next((run / name for name in ("adapter", "model") if (run / name).is_dir()), None)
    if trained is None:
        raise ValueError(f"{run} holds neither adapter nor model: the run has not ended")
    resolved: dict[str, Any] = yaml.load((run / "config.yaml").read_text(encoding="utf-8"), Loader=Loader)
    settings = shareable(resolved)
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    adapter, model, data = trained.name == "adapter", settings["model"], settings["data"]
    train = data["train"] or data["task"]
    tags = ["blockwalk", settings["method"], *(["lora"] if settings["lora"] else [])]
    library = "peft" if adapter else "transformers"
    head: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": tags}
    if model == resolved["model"] and not Path(model).exists():  # a name that the hub knows
        head["base_model"] = "/".join(repository(model)[0].split("/")[:2])  # a GGUF file's repository
    what = f"{adapter_settings(settings['lora'] or settings['prefix'])} for" if adapter else "All parameters of"
    rows = "\n".join(f"| {name} | {value} |" for name, value in figures(run))
    sources = ", ".join(f"`{source}`" for source in ([train] if isinstance(train, str) else train))
    again = f"{_repeatable(run)}\n\n```yaml\n{text.rstrip()}\n```"
    if (run / LEDGER).is_file():
        again += f"\n\n`blockwalk replay {model} {LEDGER} OUT` rebuilds the weights from the ledger, bit for bit."
    body = f"# {run.name}\n\n{what} `{model}`, trained on {sources} by Blockwalk, method `{settings['method']}`.\n\n"
    body += f"| | |\n|---|---|\n{rows}\n\n![loss](loss.svg)\n\n{again}\n"
    card = f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n{body}"
    atomic_files.write_bytes(trained / "loss.svg", curves(run).encode())
    atomic_files.write_bytes(trained / "README.md", card.encode())
    atomic_files.write_bytes(trained / "config.yaml", text.encode())
    return trained


def shareable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a run's settings without this machine's folders: of a local path its last part stays."""
    data = dict(settings["data"])
    for name in ("train", "eval"):
        sources = data[name]
        data[name] = _named(sources) if isinstance(sources, str) else [_named(source) for source in sources]
    shared = {**settings, "model": _named(settings["model"]), "data": data}
    for name in ("output_dir", "resume_from_checkpoint", "overwrite_output_dir"):
        shared.pop(name, None)
    for name in ("lora", "prefix"):
        if isinstance(shared.get(name), str):
            shared[name] = _named(shared[name])
    return shared


def _named(name: str) -> str:
    """A name of the hub, or the last part of a local path."""
    path = Path(name).expanduser()
    return path.name if path.exists() or not _on_hub(name) else name


def _on_hub(name: str) -> bool:
    """Whether a text may be a name of the hub: ``owner/name``, with a revision or a file behind it."""
    return "/" in name and not name.startswith(("/", "./", "../", "~")) and "\\" not in name


def _repeatable(run: Path) -> str:
    """The sentence on how the run is made again, from the settings below it."""
    changed = whole_lines(run / CHANGED)
    if not changed:
        return "`blockwalk train config.yaml` makes it again, with this file:"
    steps = "; ".join(f"after step {line['step']} {', '.join(line['changes'])}" for line in changed)
    return (
        f"Settings were changed as the run went on: {steps}. This file has the last ones, and does not repeat the run:"
    )


def push(folder: str | Path, repo: str, *, ledger: bool = False) -> str:
    """Upload what a run trained, with its card, curve, configuration and, of zeroth order, its ledger; with ``ledger`` all but
    the weights and the tokenizer. Answers the repository's page.

    Raises:
        ValueError: the run has not ended, has no ledger, or the hub refuses.
    """
    run = Path(folder)
    beside = [path for path in [run / LEDGER] if path.is_file()]
    if ledger and not beside:
        raise ValueError(f"{run} has no {LEDGER}: its method differentiates, and its weights are needed")
    trained = write(run)
    own = [trained / name for name in ("README.md", "loss.svg", "config.yaml")] if ledger else sorted(trained.iterdir())
    hub.create(repo)
    return hub.upload(repo, {path.name: path for path in (*own, *beside)})
