"""Losses of power: for prefixes of everything that a run did to its disk, ``latest`` goes on to the
undisturbed bits.

    sudo python benchmarks/power_loss.py [--check] [--json FILE] [--prefixes 300] [--reordered 60]
                                          [--families mebp,plain] [--state FILE] [--seconds 7200]

A run of each family works on a file system that logs every write, rename and sync
(recorded_disk.py). *prefixes*: the disk as it was after the first k operations, for k spread over
all of them. *reordered*: the same, but of what no sync had made durable by then, any part is lost,
in order or out of it. Where fewer are asked for than there are operations, they are spread over all
and taken in a random order. ``--state`` and ``--seconds`` as in faults.py."""

from __future__ import annotations

import random
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import finish, parser
from benchmarks.fault_runs import FAMILIES, place, start
from benchmarks.faults import Count, Kept, Undisturbed, bounds_of, ends, figures_of
from benchmarks.recorded_disk import CHANGES, Op, recorded, survivors, volume_of


def record(whole: Undisturbed, family: str) -> list[Op]:
    """The log of an undisturbed run, up to the end."""
    folder = whole.where.folder / f"recorded-{family}"
    with recorded(folder) as disk:
        code = start(whole.where, family, folder / "run").wait()
        text = (folder / "run.said").read_text()
    assert code == 0, text
    return disk.log


def lose_power(
    whole: Undisturbed, kept: Kept, families: list[str], prefixes: int, reordered: int
) -> list[Count]:
    """Each family's prefixes, then its reorderings."""
    in_order, shuffled = counts = [kept.count("prefixes"), kept.count("reordered")]
    for family in families:
        if kept.over or (
            in_order.done.get(family, 0) >= prefixes and shuffled.done.get(family, 0) >= reordered
        ):
            continue
        expected, _, _ = whole.of(family)
        log = record(whole, family)
        ends_at = [at + 1 for at, op in enumerate(log) if op[0] in CHANGES]
        print(
            f"  {family}: {len(log)} operations, {len(log) - len(ends_at)} of them syncs",
            flush=True,
        )
        for count, wanted in ((in_order, prefixes), (shuffled, reordered)):
            chosen = (
                [ends_at[n * len(ends_at) // wanted] for n in range(wanted)]
                if wanted < len(ends_at)
                else ends_at
            )
            random.Random(family).shuffle(chosen)
            for number in range(count.done.get(family, 0), len(chosen)):
                if kept.over:
                    break
                stop = chosen[number]
                draw = random.Random(f"{family} {number}")
                left = log[:stop] if count is in_order else survivors(log[:stop], draw)
                top = whole.where.folder / f"lost-{family}-{number}"
                volume_of(left).copy_to(top)
                folder = top / "run"
                about = f"{stop} of {len(log)} ({log[stop - 1][0]}), {number}"
                count.add("losses")
                ends(count, whole.where, family, folder, expected, about)
                shutil.rmtree(top)
                count.done[family] = number + 1
                kept.keep(count)
    return counts


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prefixes", type=int, default=300)
    options.add_argument("--reordered", type=int, default=60)
    options.add_argument("--families", default=",".join(FAMILIES))
    options.add_argument("--state", type=Path)
    options.add_argument("--seconds", type=float, default=7200.0)
    arguments = options.parse_args()
    began = time.monotonic()
    kept = Kept(arguments.state, arguments.seconds)
    with place() as where:
        families = arguments.families.split(",")
        whole = Undisturbed(where)
        counts = lose_power(whole, kept, families, arguments.prefixes, arguments.reordered)
    for count in counts:
        print(*count.lines(), f"({time.monotonic() - began:.0f} s)")
    finish(arguments, figures_of(counts), bounds_of(counts))


if __name__ == "__main__":
    main()
