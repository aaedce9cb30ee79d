"""Command lines and files that a page of documentation shows, and the reasons for which a command
is not run by tests."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

REASONS = frozenset(
    [
        "hub",
        "ollama",
        "llama.cpp",
        "vLLM",
        "SLURM",
        "several machines",
        "another shell",
        "GPU",
        "install",
        "docker",
    ]
)
"""What a command may need that a test has not: ``# needs: hub`` at its line's end."""

PROGRAMS: dict[str, str | None] = {
    "blockwalk": None,
    "python": None,
    "pip": "install",
    "git": "install",
    "make": "install",
    "cd": "install",
    "ollama": "ollama",
    "llama-cli": "llama.cpp",
    "llama-server": "llama.cpp",
    "vllm": "vLLM",
    "hf": "hub",
    "docker": "docker",
    "srun": "SLURM",
    "sbatch": "SLURM",
    "mpirun": "several machines",
    "torchrun": "several machines",
}
"""First words of command lines, with the reason for which a test does not run that program at
all."""

HUB_NAMES = re.compile(
    r"\b(?:Qwen|HuggingFaceTB|meta-llama|google|mistralai|TinyLlama|ibm-granite|allenai|microsoft)/[\w.-]+"
)
"""Models of the hub, in whose place a test puts a folder of that name."""

SHELLS = ("console", "bash", "sh", "shell")


@dataclass(frozen=True)
class Command:
    """One command line of a page, without its comment, and what it needs (None: a test runs it)."""

    line: str
    needs: str | None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)


def shown(path: Path) -> str:
    """Return the name of a page as the tests print it."""
    return str(path.relative_to(ROOT).as_posix()).removeprefix("docs/")


def commands(text: str) -> list[Command]:
    """Return the command lines of indented blocks and of fenced blocks of a shell, in the page's
    order."""
    result = []
    fence = None
    for line in text.replace("\\\n", " ").splitlines():
        mark = re.match(r"\s*```(\w*)", line)
        if mark:
            fence = mark[1] if fence is None else None
            continue
        if fence in SHELLS or (fence is None and re.match(r" {4,}\S", line)):
            code, _, comment = re.sub(r"^\s*(\$ )?", "", line).partition(" #")
            if code.split(" ")[0] in PROGRAMS:
                needs = re.search(r"\bneeds: (.+?)\s*$", comment)
                reason = needs[1] if needs else PROGRAMS[code.split(" ")[0]]
                result.append(
                    Command(
                        " ".join(code.split()) if "'" not in code + '"' else code.strip(), reason
                    )
                )
    return result


def blocks(text: str, language: str) -> list[str]:
    """Return the contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def modules(path: Path) -> dict[str, str]:
    """Return the modules of a page by the names in their first lines."""
    return {
        name[1]: block
        for block in blocks(path.read_text(encoding="utf-8"), "python")
        if (name := re.match(r"# (\w+\.py)\n", block))
    }


def yaml_files(path: Path) -> dict[str, str]:
    """Return the YAML files of a page by the names in their first lines; README's first one without
    a name is run.yaml."""
    files = {}
    for block in blocks(path.read_text(encoding="utf-8"), "yaml"):
        name = re.match(r"# (\S+\.yaml)\n", block)
        if name:
            files[name[1]] = block
        elif path.name == "README.md":
            files.setdefault("run.yaml", block)
    return files
