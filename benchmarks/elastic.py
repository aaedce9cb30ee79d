"""A run whose ranks come and go: two at a time, killed at drawn instants and replaced at once, some stopped for up to 3 s.

    python benchmarks/elastic.py [--check] [--json FILE] [--kills 50] [--stops 10] [--steps 600] [--seed 0]

Oracle: the same run alone. Bounds: no line of its ledger and no byte of its weights may differ, its host and the ranks that
are there at the end must end with exit code 0, and nothing may be left of those that were killed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import Bound, finish, parser

from blockwalk.cli import main as command_line
from tests.conftest import make_tiny_run
from tests.ranks.comers import arguments, disturb, forked

SETTINGS = (
    "--method zo2 --trainable host --lora false --gradient_accumulation_steps 4 --optimizer.learning_rate 1e-4"
    " --mesh.check_every 10 --eval_first false --save_every 200 --log_every 100"
)
OWN = ["--trainable disk", "--trainable host --prefetch 2"]


def main() -> None:
    options = parser(__doc__)
    for name, usual in (("kills", 50), ("stops", 10), ("steps", 600), ("seed", 0)):
        options.add_argument(f"--{name}", type=int, default=usual)
    given = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["BLOCKWALK_CACHE"] = str(folder / "cache")
        tiny, settings = make_tiny_run(folder), f"{SETTINGS} --max_steps {given.steps}"
        began = time.monotonic()
        found = disturb(tiny, folder / "run", settings, OWN, kills=given.kills, stops=given.stops, seed=given.seed)
        seconds = time.monotonic() - began
        alone = forked(lambda: command_line.main(arguments(tiny, folder / "alone", settings)), folder / "alone.said")
        alone.join()
        lines = [(folder / run / "ledger.jsonl").read_bytes().split(b"\n")[1:] for run in ("run", "alone")]
        weights = [(folder / run / "model" / "model.safetensors").read_bytes() for run in ("run", "alone")]
        left = len(list((folder / "run").glob("scratch/joined-*")))
    print(
        f"{given.kills} ranks killed and replaced, {given.stops} stopped for a while, in {seconds:.0f} s;"
        f" {given.steps} steps, {found.shared} of them shared; {found.lost} shares were lost and computed by the host"
    )
    different = sum(a != b for a, b in zip(*lines, strict=False)) + abs(len(lines[0]) - len(lines[1]))
    bounds = [
        Bound("lines of the ledger that differ from the run alone", different, 0),
        Bound("bytes of the weights that differ", sum(a != b for a, b in zip(*weights, strict=True)), 0),
        Bound("exit codes that are not 0", sum(code != 0 for code in found.codes), 0),
        Bound("working folders left by killed ranks", left, 0),
        Bound("lost shares", found.lost, given.kills // 5, at_most=False),
    ]
    finish(given, {**vars(given), **vars(found), "seconds": seconds, "json": ""}, bounds)


if __name__ == "__main__":
    main()
