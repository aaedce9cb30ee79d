"""Pages that are written from the package's own tables: docs/coming-from.md and docs/settings.md.

``python -m dev.pages`` writes them, ``python -m dev.pages --check`` exits with 1 where one of them
is out of date."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from blockwalk.cli import settings_help
from blockwalk.plan.foreign_rows import ROWS, TOOLS, Foreign
from blockwalk.train import config

ROOT = Path(__file__).parent.parent
MADE = "<!-- Written by `python -m dev.pages`; edit {source} instead. -->"


FROM = (
    (
        "airllm",
        "weights come from disk, a layer at a time",
        "models are trained, and the next block is fetched while one computes",
        "it answers on a Mac",
    ),
    (
        "Unsloth",
        "LoRA and QLoRA, chat templates, GGUF files in the end",
        "no GPU is needed, and the model may be larger than memory",
        "a card that holds the model; rollouts and rewards",
    ),
    (
        "axolotl",
        "a YAML file, data formats, packing, LoRA's options",
        "memory; a killed run ends with the same bits",
        "several cards that hold the model; pictures; rewards",
    ),
    (
        "LLaMA-Factory",
        "a YAML file, its register of data sets, templates",
        "memory; a killed run ends with the same bits",
        "a web page; pictures; rewards",
    ),
    (
        "TRL",
        "`SFTConfig` and `DPOConfig`, for `BlockwalkTrainer`; `convert-config` takes the first",
        "memory",
        "rollouts, rewards and further losses of pairs",
    ),
    (
        "mlx-lm",
        "a YAML file, records as JSON lines, LoRA's settings",
        "Linux, and models larger than memory",
        "Apple's GPU",
    ),
)
"""Tools that people come from: what is the same, what is better here, and what is better there."""


def coming_from() -> Iterator[str]:
    """Lines of the page on names of other tools."""
    yield "# Coming from another tool"
    yield ""
    yield MADE.format(source="the table in src/blockwalk/plan/foreign_rows.py")
    yield ""
    yield (
        "Settings have other names here. A name in **bold** means the same: a run takes it, with"
        " a note that says ours."
        " Any other name ends the run before it begins, with the line to write instead."
        " `blockwalk convert-config FILE` converts a file with many of them."
    )
    yield ""
    yield (
        "The command writes `run.yaml` from a YAML or JSON file of axolotl, LLaMA-Factory, TRL"
        " (also a dump of `SFTConfig`), mlx-lm, or Unsloth's arguments. What these tools take where"
        " a file says nothing is written too. What is not followed stands at the end, with the"
        " reason. A file that asks for another objective, such as DPO, is refused."
    )
    yield from ("", "| From | The same | Better here | Better there |", "|---|---|---|---|")
    yield from (f"| {' | '.join(cells)} |" for cells in FROM)
    yield ""
    yield (
        "Three defaults differ from most tools: the learning rate is constant, there is no"
        " warm-up, and no gradient is"
        " clipped. One default is larger: `batch_size` counts the sequences of a whole step."
    )
    known = frozenset(config.setting_names())
    listed: set[str] = set()
    for tool in TOOLS[:-1]:
        yield from ("", f"## {tool}", "", "| There | Here | |", "|---|---|---|")
        yield from _table([row for row in ROWS if row.ours in known], tool, listed)
    yield from ("", "## Without a counterpart", "")
    yield "Such a name ends the run, unless its value switches it off."
    yield from _without_settings([row for row in ROWS if not row.always_idle])
    yield from ("", "## Left out", "")
    yield "Such a name changes nothing that is learnt: it is left out, with a note."
    yield from _without_settings([row for row in ROWS if row.always_idle])
    yield ""
    yield (
        "The table in `src/blockwalk/plan/foreign_rows.py` has more names, those of unsloth,"
        " DeepSpeed and bitsandbytes"
        " among them; dashes for underscores and sections around a name are understood as well."
    )


def _without_settings(rows: list[Foreign]) -> Iterator[str]:
    """Lines of a table of names that no setting does."""
    yield from ("", "| There | |", "|---|---|")
    for row in rows:
        names = [name for tool in TOOLS[:-1] for name in row.names.get(tool, ())]
        if names and not row.ours:
            yield f"| {_code(dict.fromkeys(names[:3]))} | {_cell(row.sentence)} |"


def settings() -> Iterator[str]:
    """Lines of the page on every setting."""
    yield "# Settings"
    yield ""
    yield MADE.format(source="the texts below the fields of src/blockwalk/plan")
    yield ""
    yield (
        "A setting has one name: in a run's YAML file, nested or with dots, and after `--` on the"
        " command line, where it"
        " wins over the file. `blockwalk train --help` says the same in a terminal."
    )
    yield from (
        "",
        "```yaml",
        "optimizer: {learning_rate: 1e-4, schedule: cosine}",
        "data.max_length: 1024",
        "```",
        "",
    )
    yield "```bash"
    yield "blockwalk train run.yaml --optimizer.learning_rate 1e-4"
    yield "blockwalk settings --schema > blockwalk.schema.json"
    yield from ("```", "")
    yield (
        "The last line writes a JSON Schema for editors. A file takes part with a first line"
        " `# yaml-language-server: $schema=blockwalk.schema.json`, which `blockwalk init` writes"
        " where the schema lies."
    )
    yield ""
    yield (
        "Defaults are those of method `mebp`. Names of other tools are on [a page of their"
        " own](coming-from.md)."
    )
    standing = settings_help.defaults()
    for title, names, _ in settings_help.GROUPS:
        yield from (
            "",
            f"## {title[0].upper()}{title[1:]}",
            "",
            "| Setting | Takes | Default | |",
            "|---|---|---|---|",
        )
        for name in settings_help.settings_of(names):
            form, sentence = settings_help.described(name)
            value = standing.get(name)
            default = (
                ""
                if name == "lora" or value in ("", None, [], {})
                else f"`{settings_help.shown(value)}`"
            )
            takes = " ".join(f"`{word}`" for word in form.split("|"))
            yield f"| `{name}` | {takes} | {default} | {_cell(_marked(sentence))} |"


def _marked(sentence: str) -> str:
    """Return a sentence whose settings stand as code."""
    names = sorted(
        (name for name in config.setting_names() if "." in name or "_" in name),
        key=len,
        reverse=True,
    )
    text = re.sub(rf"(?<![\w.`])({'|'.join(map(re.escape, names))})(?![\w.]*\w)", r"`\1`", sentence)
    return re.sub(
        r"(?<!`)(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\[[^\]]*\])(?!`)",
        lambda found: f"`{found[1].replace('`', '')}`",
        text,
    )


def _table(rows: list[Foreign], tool: str, listed: set[str]) -> Iterator[str]:
    """Lines for a tool's names that are not ``listed`` yet; names with one sentence and one setting
    share a line."""
    merged: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        names = [name for name in row.names.get(tool, ()) if name not in listed]
        listed.update(names)
        if names:
            taken = row.same is not None and row.same(row.example)
            texts = [f"**`{name}`**" if taken else f"`{name}`" for name in names]
            merged.setdefault((_here(row, names[0], taken=taken), row.sentence), []).extend(texts)
    for (here, sentence), texts in merged.items():
        yield f"| {', '.join(texts)} | {here} | {_cell(sentence)} |"


def _here(row: Foreign, name: str, *, taken: bool) -> str:
    """Our setting, with the value where the value is another one."""
    pair = (
        None
        if row.line is None or taken or row.ours == "lora.options"
        else row.line(row.example, {name: row.example})
    )
    if pair is None or isinstance(pair[1], list | dict) or pair[1] == row.example:
        return f"`{row.ours}`"
    return f"`{config.as_yaml(dict([pair])).strip()}`"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "docs/coming-from.md": coming_from,
    "docs/settings.md": settings,
}
"""The functions that write the pages' lines, by path."""


def main(arguments: list[str]) -> int:
    """Write every page, or check that each is as it would be written."""
    stale = []
    for path, lines in PAGES.items():
        text = "\n".join(lines()) + "\n"
        if not (ROOT / path).is_file() or (ROOT / path).read_text(encoding="utf-8") != text:
            stale.append(path)
        if "--check" not in arguments:
            (ROOT / path).write_text(text, encoding="utf-8")
    if stale and "--check" in arguments:
        print(f"out of date: {', '.join(stale)}; run python -m dev.pages")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
