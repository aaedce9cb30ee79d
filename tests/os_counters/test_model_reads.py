"""Oracle: the interpreter's own audit events of files that are opened, in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"

COUNTING = """
import collections, json, os, sys

opened = collections.Counter()

def count(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
        opened[os.path.realpath(os.fspath(arguments[0]))] += 1

sys.addaudithook(count)
from blockwalk.cli import main

status = main.main(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    json.dump([status, opened], file)
"""


def test_a_run_reads_the_configuration_of_its_model_once_for_each_reader(tmp_path: Path) -> None:
    """Four readers are there: Blockwalk, transformers for the configuration, transformers for the
    tokenizer, and the digest of the weights, which opens it to sync it and to read it."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "a b c"}) + "\n", encoding="utf-8")
    settings = {
        "model": str(TINY_LLAMA),
        "method": "mebp",
        "data": {"train": str(data), "max_length": 16},
        "batch_size": 1,
        "max_steps": 2,
        "lora": {"rank": 2},
        "output_dir": str(tmp_path / "run"),
    }
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(settings), encoding="utf-8")
    counts = tmp_path / "opened.json"
    subprocess.run(
        [sys.executable, "-c", COUNTING, counts, "train", run],
        check=True,
        env={**os.environ, "BLOCKWALK_CACHE": str(tmp_path / "cache")},
        capture_output=True,
    )
    status, opened = json.loads(counts.read_text(encoding="utf-8"))
    assert status == 0
    assert opened[str((TINY_LLAMA / "config.json").resolve())] == 5
