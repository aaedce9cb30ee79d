"""A zeroth-order run whose ranks come and go: two at a time on other tiers, killed at drawn
instants and replaced at once, some stopped for up to 3 s.

    python benchmarks/elastic.py [--check] [--json FILE] [--kills 50] [--stops 10] [--seed 0]

Oracle: as many steps alone. Bounds: no line of the ledger and no weight may differ, the host and
the ranks that are there at the end must end with exit code 0, and some of those that were killed
must have been at work. The same with whole runs of ``blockwalk train``, and few kills, is in
``tests/ranks/test_elastic.py``."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import Bound, finish, parser

from blockwalk import method
from blockwalk.contrib.elastic_ranks.elastic import elastic
from blockwalk.plan.plan import Plan
from blockwalk.train.elastic import compare, follow
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.comers import disturb, listen, note

OWN = [{"trainable": "disk × bf16"}, {"trainable": "host × bf16", "prefetch": 2}]


def plan(**own: Any) -> Plan:
    settings = {
        "trainable": "host × bf16",
        "gradient_accumulation_steps": 4,
        "mesh.check_every": 10,
        **own,
    }
    return method("zo2", **{"zo.queries": 2, "optimizer.learning_rate": 1e-3, **settings})


def rank(there: str, number: int) -> int:
    ranks = elastic(there, 60, joins=True)
    with Walker(tiny_model("llama"), plan(**OWN[number]), device="cpu", sharing=ranks) as walker:
        follow(walker, ranks, lambda place: random_batch(8, seed=place[0]))
    return 0


def host(folder: Path, there: str, counts: Any) -> int:
    """Ten steps more than it takes until the harm is done."""
    ranks = elastic(there, 60, joins=False)
    listen(ranks, counts)
    with Walker(
        tiny_model("llama"), plan(), device="cpu", sharing=ranks, ledger=folder / "shared.jsonl"
    ) as walker:
        ranks.open({}, [])
        left = 10
        while left:
            ranks.position = (walker.steps_done,)
            walker.step(random_batch(8, seed=walker.steps_done))
            compare(walker, ranks)
            left -= note(ranks, counts)
        ranks.announce(ended=True)
        torch.save(walker.state_dict(), folder / "shared.pt")
    return 0


def main() -> None:
    options = parser(__doc__)
    for name, usual in (("kills", 50), ("stops", 10), ("seed", 0)):
        options.add_argument(f"--{name}", type=int, default=usual)
    given = options.parse_args()
    torch.set_num_threads(1)
    tiny_model("llama")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.monotonic()
        found = disturb(
            lambda there, counts: host(folder, there, counts),
            rank,
            folder / "said",
            kills=given.kills,
            stops=given.stops,
            seed=given.seed,
        )
        seconds = time.monotonic() - began
        shared = (folder / "shared.jsonl").read_bytes().split(b"\n")[1:-1]
        weights = torch.load(folder / "shared.pt")
        with Walker(
            tiny_model("llama"), plan(), device="cpu", ledger=folder / "alone.jsonl"
        ) as walker:
            for step in range(len(shared)):
                walker.step(random_batch(8, seed=step))
            expected = walker.state_dict()
        lines_alone = (folder / "alone.jsonl").read_bytes().split(b"\n")[1:-1]
    print(
        f"{given.kills} ranks killed and replaced, {given.stops} stopped for a while, in"
        f" {seconds:.0f} s; {len(shared)} steps,"
        f" {found.shared} of them shared; {found.lost} shares were lost, and computed by the host"
    )
    tensors = [name for name, value in expected.items() if isinstance(value, torch.Tensor)]
    bounds = [
        Bound(
            "lines of the ledger that differ from those alone",
            sum(a != b for a, b in zip(shared, lines_alone, strict=True)),
            0,
        ),
        Bound(
            "tensors that differ",
            sum(not torch.equal(weights[name], expected[name]) for name in tensors),
            0,
        ),
        Bound("exit codes that are not 0", sum(code != 0 for code in found.codes), 0),
        Bound("lost shares", found.lost, given.kills // 5, at_most=False),
    ]
    figures = {
        "kills": given.kills,
        "stops": given.stops,
        "steps": len(shared),
        "tensors": len(tensors),
        **vars(found),
    }
    finish(given, {**figures, "seconds": seconds}, bounds)


if __name__ == "__main__":
    main()
