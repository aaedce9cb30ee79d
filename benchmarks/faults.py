"""What a run loses when it is killed, runs out of disk, is damaged, is started twice, or is handed
crafted files: nothing.

    sudo python benchmarks/faults.py [--check] [--json FILE] [--ci]
                                     [--only kills,full,flips,two,foreign,links,locks,pipes,crafted]
                                     [--kills 1000] [--families mebp,plain] [--state FILE]
                                     [--seconds 7200]

Each row harms small runs of every family (see fault_runs.py), lets them go on with
``resume_from_checkpoint: latest``, and compares with the run that nobody disturbed: bits of weights
and ledger, lines of logs, names of files. ``kills`` counts processes that are killed, half of the
times at a uniformly random moment, half before or after the n-th file-system call, n spread over
all of them; a run is killed one to four times, and one that ends before is not counted. With
``--state`` what was counted of every row is kept, and the next call goes on from there; a call
takes at most ``--seconds``, of which kills get half and each other row its share; ``--families`` is
for ``kills``. ``foreign`` kills runs in a folder full of files of others, which a refused run, a
killed one and the one that goes on must leave alone; ``links`` plants links in a run's folder,
whose targets must stay as they are. ``locks`` takes the kernel's locks away, as some network file
systems do; ``pipes`` gives a run output that is full, closed, broken, or never read. ``--ci`` is 60
kills over all families, a flipped bit for each, two runs in one folder, and a few of foreign files,
links, a run without locks, and one with each bad output.

Losses of power are power_loss.py, fuzzing of the readers is fuzz.py, ranks that die or hang
rank_faults.py."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import Bound, finish, machine, parser
from benchmarks.fault_runs import (
    FAMILIES,
    OUTPUTS,
    Place,
    bad_output,
    count_calls,
    dies_at,
    differences,
    latest_step,
    mounted,
    place,
    resize,
    result,
    said,
    start,
    wait_for_orphans,
)

from blockwalk.system import atomic_files

ROWS = ("kills", "full", "flips", "two", "foreign", "links", "locks", "pipes", "crafted")

WRONG = ("bits", "lines", "stray", "hangs", "failed")
"""Kinds of findings that must not be."""


@dataclass
class Count:
    """Findings of one row: how often each kind of thing happened, and the first few of those that
    must not."""

    row: str
    done: dict[str, int] = field(default_factory=dict)
    found: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)

    def add(self, kind: str, about: str = "") -> None:
        self.found[kind] += 1
        if about and len(self.told) < 60:
            self.told.append(f"{kind}: {about}")
            print(f"  {self.row}: {self.told[-1]}", flush=True)

    def lines(self) -> Iterator[str]:
        wrong = {kind: self.found[kind] for kind in WRONG}
        yield f"{self.row:9} {dict(self.found - Counter(wrong))}  wrong: {wrong}"


class Kept:
    """Counts of rows, kept in a file if one is named, so that another call goes on; ``over`` once a
    row has had its time (:meth:`begin`)."""

    def __init__(self, path: Path | None, seconds: float = math.inf) -> None:
        self._path = path
        self._ends = time.monotonic() + seconds
        self._row_ends = self._ends
        self._rows = json.loads(path.read_text()) if path is not None and path.is_file() else {}

    def begin(self, row: str, later: Sequence[str]) -> None:
        """Give a row its share of the seconds that are left, so that no later one goes without:
        kills have as much as all the others together."""
        weight = len(ROWS) - 1 if row == "kills" else 1
        left = self._ends - time.monotonic()
        self._row_ends = time.monotonic() + left * weight / (weight + len(later))

    @property
    def over(self) -> bool:
        return time.monotonic() > self._row_ends

    def count(self, row: str) -> Count:
        kept = self._rows.get(row, {"done": {}, "found": {}, "told": []})
        return Count(row, dict(kept["done"]), Counter(kept["found"]), list(kept["told"]))

    def keep(self, count: Count) -> None:
        self._rows[count.row] = {
            "done": count.done,
            "found": dict(count.found),
            "told": count.told,
            "machine": machine(),
        }
        if self._path is not None:
            atomic_files.write_bytes(self._path, (json.dumps(self._rows, indent=1) + "\n").encode())


class Undisturbed:
    """For each family, what a run that nobody disturbed leaves, its seconds, its file-system calls;
    made when asked for."""

    def __init__(self, where: Place) -> None:
        self.where = where  # type: ignore[var-annotated]
        self._known = {}

    def of(self, family: str) -> tuple[dict[str, Any], float, int]:
        if family not in self._known:
            folder = self.where.folder / f"whole-{family}"
            count_calls(self.where, family, folder)  # caches are filled
            shutil.rmtree(folder)
            calls = count_calls(self.where, family, folder)
            again = folder.with_name(f"timed-{family}")
            began = time.monotonic()
            assert start(self.where, family, again).wait() == 0, said(again)
            self._known[family] = result(folder), time.monotonic() - began, calls
            assert not any(differences(result(again), result(folder)).values()), (
                f"{family} does not repeat itself"
            )
            shutil.rmtree(again)
        return self._known[family]  # type: ignore[no-any-return]


def ends(
    count: Count, where: Place, family: str, folder: Path, expected: dict[str, Any], about: str
) -> None:
    """Let a run go on to its end, and compare."""
    code = start(where, family, folder).wait()
    if code is None:
        count.add("hangs", about=f"{family} {about}")
    elif code:
        count.add("failed", about=f"{family} {about}: exit {code}: {said(folder)[-500:]}")
    else:
        for kind, names in differences(result(folder), expected).items():
            if names:
                count.add(kind, about=f"{family} {about}: {names}")
        count.add("resumed")


def kill(count: Count, whole: Undisturbed, family: str, number: int) -> None:
    """One run that is killed one to four times, or ends before."""
    where = whole.where
    draw = random.Random(f"{family} {number}")
    expected, seconds, calls = whole.of(family)
    folder = where.folder / f"killed-{family}-{number}"
    about = []
    for chance in range(draw.randint(1, 4)):
        done = count.done.setdefault(family, 0)
        if draw.random() < 0.5:
            first = (
                chance == 0
            )  # the one that makes every call: 7 spreads them from the beginning on
            point = 7 * done % calls if first else draw.randrange(calls)
            of_rank = 0 if first else draw.randrange(FAMILIES[family].ranks)
            code = start(where, family, folder, harm=dies_at(point, of_rank)).wait()
            about.append(f"call {point} of rank {of_rank}")
        else:
            pause = draw.uniform(0.0, 1.2 * seconds)
            process = start(where, family, folder)
            time.sleep(pause)
            process.kill()
            code = process.wait()
            wait_for_orphans()
            about.append(f"after {pause:.3f} s")
        if code is None:
            count.add("hangs", about=f"{family} {about}: {said(folder)[-300:]}")
        elif code == 0:
            count.add("too late")
            break
        count.done[family] = done + 1
        count.add("kills")
    ends(count, where, family, folder, expected, f"{number}: {about}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name(f"{folder.name}.said").unlink()


def kills(whole: Undisturbed, kept: Kept, families: list[str], wanted: int) -> Count:
    """Runs that are killed, in each family until so many processes were."""
    count = kept.count("kills")
    while not kept.over and (
        left := [family for family in families if count.done.get(family, 0) < wanted]
    ):
        family = min(left, key=lambda family: count.done.get(family, 0))
        kill(count, whole, family, count.found["kills"] + count.found["too late"])
        kept.keep(count)
    return count


def full(whole: Undisturbed, kept: Kept, sizes: int) -> Count:
    """File systems that are too small from the start, and ones that somebody else fills while the
    run is at work."""
    count = kept.count("full")
    where = whole.where
    for family in FAMILIES:
        expected, _, calls = whole.of(family)
        used = sum(
            path.stat().st_size
            for path in (where.folder / f"whole-{family}").rglob("*")
            if path.is_file()
        )
        for number in range(count.done.get(family, 0), sizes):
            if kept.over:
                return count
            draw = random.Random(f"{family} {number}")
            disk = where.folder / f"disk-{family}-{number}"
            small = number % 2 == 0
            with mounted(disk, int(used * (number + 1) / (sizes + 1)) if small else 64 << 20):
                folder = disk / "run"
                point = draw.randrange(calls)
                room = draw.randrange(used // 2)
                harm = (lambda rank: None) if small else _filled(disk, point, room)
                code = start(where, family, folder, harm=harm).wait()
                text = said(folder)
                lines = [line for line in text.splitlines() if "error" in line or "rank " in line]
                count.add("full")
                if code is None:
                    count.add("hangs", about=f"{family}, {number}")
                elif code and not any(str(disk) in line for line in lines):
                    count.add(
                        "failed",
                        about=f"{family}, {number}: no file is named: {lines[-2:] or text[-300:]}",
                    )
                elif "Traceback" in text or "ESCAPED" in text:
                    count.add("failed", about=f"{family}, {number}: {text[-300:]}")
                resize(disk, 64 << 20)
                (disk / "ballast").unlink(missing_ok=True)
                ends(
                    count,
                    where,
                    family,
                    folder,
                    expected,
                    f"disk {number}, {'small' if small else f'filled at {point}'}",
                )
            count.done[family] = number + 1
            kept.keep(count)
    return count


def _filled(disk: Path, point: int, room: int) -> Callable[[int], None]:
    """Harm: at a file-system call of the first rank all of a disk but ``room`` bytes is taken."""
    from benchmarks.fault_runs import _filesystem_calls

    fallocate = os.posix_fallocate
    opening = os.open

    def when(number: int) -> None:
        if number == point:
            free = shutil.disk_usage(disk).free
            fd = opening(disk / "ballast", os.O_CREAT | os.O_WRONLY)
            fallocate(fd, 0, max(1, free - room))
            os.close(fd)

    return lambda rank: _filesystem_calls(when) if rank == 0 else None


def flips(whole: Undisturbed, kept: Kept, wanted: int) -> Count:
    """One bit of any file of a half-done run, its model and data included: resumed to the same
    bits, or refused by name."""
    count = kept.count("flips")
    where = whole.where
    half: dict[str, Path] = {}
    for number in range(count.found["flips"], wanted):
        if kept.over:
            break
        draw = random.Random(number)
        family = list(FAMILIES)[number % len(FAMILIES)]
        expected, _, _ = whole.of(family)
        if family not in half:
            half[family] = where.folder / f"half-{family}"
            process = start(where, family, half[family])
            while latest_step(half[family]) < 3 and process.poll() is None:
                time.sleep(0.01)
            process.kill()
            process.wait()
        folder = where.folder / f"flipped-{number}"
        shutil.copytree(half[family], folder)
        inputs = [
            where.tiny.model / "model.safetensors",
            where.tiny.model / "tokenizer.json",
            where.tiny.train,
        ]
        path = draw.choice(
            [
                *inputs,
                *(
                    path
                    for path in sorted(folder.rglob("*"))
                    if path.is_file() and path.stat().st_size
                ),
            ]
        )
        before = path.read_bytes()
        data = bytearray(before)
        offset = draw.randrange(len(before))
        data[offset] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        code = start(where, family, folder).wait()
        text = said(folder)
        about = f"{family}: byte {offset} of {path.name} ({path.parent.name})"
        count.add("flips")
        if code is None:
            count.add("hangs", about=about)
        elif code == 0:
            wrong = differences(result(folder), expected)
            wrong["bits"] = [name for name in wrong["bits"] if "checkpoint-" not in name]
            for kind in ("bits", "lines"):
                if wrong[kind]:
                    count.add(kind, about=f"{about}: {wrong[kind]}: {text[-300:]}")
            count.add("resumed")
        else:
            names = (
                path.name,
                path.parent.name,
                str(where.tiny.train),
                str(where.tiny.model),
            )
            named = any(
                name in line
                for name in names
                for line in text.splitlines()
                if "error" in line or "rank " in line
            )
            count.add(
                "refused" if named else "failed", about="" if named else f"{about}: {text[-300:]}"
            )
        if path in inputs:
            path.write_bytes(before)
        shutil.rmtree(folder)
        count.done[family] = count.done.get(family, 0) + 1
        kept.keep(count)
    return count


def two(whole: Undisturbed, kept: Kept, offsets: int) -> Count:
    """A second run in the folder of one that is at work: it is refused, and the first ends as it
    does alone."""
    count = kept.count("two")
    where = whole.where
    for number in range(count.found["two"], offsets):
        if kept.over:
            break
        family = list(FAMILIES)[number % len(FAMILIES)]
        expected, seconds, _ = whole.of(family)
        folder = where.folder / f"two-{number}"
        first = start(where, family, folder)
        time.sleep(random.Random(number).uniform(0.0, seconds))
        over = ["--overwrite_output_dir", "true"] if number % 2 else []
        second = start(where, family, folder, *over)
        codes = second.wait(), first.wait()
        text = said(folder)
        count.add("two")
        if None in codes:
            count.add("hangs", about=f"{family} {number}")
        elif 0 not in codes or "Traceback" in text:
            count.add("failed", about=f"{family} {number}: {codes}: {text[-300:]}")
        elif any(codes) and "is in use by process" not in text:
            count.add("failed", about=f"{family} {number}: {codes}: nobody is named: {text[-300:]}")
        for kind, names in differences(result(folder), expected).items():
            if names:
                count.add(kind, about=f"{family} {number}: {names}")
        shutil.rmtree(folder)
        count.done[family] = count.done.get(family, 0) + 1
        kept.keep(count)
    return count


FOREIGN = (
    "weights-v1/a", "weights-notes.txt", ".mine.partial", ".model.0123abcd.partial/a", "replaced/a",
    "joined-x/a", "scratch/weights-7b/a", "scratch/weights-0123456789ab/a",
    "scratch/joined-abcdefgh/a", "scratch/.mine.partial", "scratch/rank-0/mine",
    "scratch/rank-notes/a", "logs/notes.txt", "checkpoint-old/a", "train.jsonl",
)  # fmt: skip
"""Names of files of others, like those of a run."""


def _others(folder: Path) -> dict[str, bytes]:
    """Files of others, in a folder, which are there afterwards."""
    for name in FOREIGN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}")
    return {name: (folder / name).read_bytes() for name in FOREIGN}


def _touched(folder: Path, before: dict[str, bytes]) -> list[str]:
    """The files of others that are gone, or have other bytes."""
    return [
        name
        for name, data in before.items()
        if not (folder / name).is_file() or (folder / name).read_bytes() != data
    ]


def foreign(whole: Undisturbed, kept: Kept, wanted: int) -> Count:
    """Runs in a folder full of files of others: one is refused, one is killed, and one goes on to
    the same bits."""
    count = kept.count("foreign")
    where = whole.where
    for number in range(count.found["foreign"], wanted):
        if kept.over:
            break
        first = sorted(
            FAMILIES, key=lambda family: family not in ("mebp", "zo2")
        )  # which write packs and weights
        family = first[number % len(first)]
        draw = random.Random(f"foreign {number}")
        expected, seconds, _ = whole.of(family)
        folder = where.folder / f"foreign-{number}"
        before = _others(folder)
        refused = start(where, family, folder, "--budget", "10kB").wait()
        process = start(where, family, folder)
        time.sleep(draw.uniform(0.0, seconds))
        process.kill()
        process.wait()
        wait_for_orphans()
        code = start(where, family, folder).wait()
        count.add("foreign")
        about = f"{family} {number}"
        if refused != 3 or code:
            count.add(
                "hangs" if None in (refused, code) else "failed",
                about=f"{about}: {refused}, {code}: {said(folder)[-300:]}",
            )
        if touched := _touched(folder, before):
            count.add("stray", about=f"{about}: {touched}")
        for name in before:
            (folder / name).unlink(missing_ok=True)
        for kind, names in differences(result(folder), expected).items():
            if names:
                count.add(kind, about=f"{about}: {names}")
        shutil.rmtree(folder)
        count.done[family] = count.done.get(family, 0) + 1
        kept.keep(count)
    return count


def linked(whole: Undisturbed, kept: Kept, wanted: int) -> Count:
    """Links in a run's folder: those that a run would write to are refused, and ``scratch`` may be
    one; their targets stay."""
    count = kept.count("links")
    where = whole.where
    plants = (".lock", "adapter", "model", "config.yaml", "ledger.jsonl", "scratch")
    for number in range(count.found["links"], wanted):
        if kept.over:
            break
        link = plants[number % len(plants)]
        family = ("mebp", "zo2")[number // len(plants) % 2]
        expected, _, _ = whole.of(family)
        folder = where.folder / f"links-{number}"
        target = where.folder / f"target-{number}"
        folder.mkdir()
        before = _others(target) if link in ("adapter", "model", "scratch") else {}
        if not before:
            target.write_text("mine")
        (folder / link).symlink_to(target)
        code = start(where, family, folder).wait()
        result_place = "adapter" if family == "mebp" else "model"
        works = link == "scratch" or (link in ("adapter", "model") and link != result_place)
        about = f"{family}: {link} is a link"
        count.add("links")
        if (code == 0) != works or "Traceback" in said(folder):
            count.add("failed", about=f"{about}: exit {code}: {said(folder)[-300:]}")
        if _touched(target, before) if before else target.read_text() != "mine":
            count.add("stray", about=f"{about}: its target was changed")
        if link == "scratch" and code == 0:
            found = {
                name: value
                for name, value in result(folder).items()
                if not name.startswith("scratch/")
            }
            bits = {
                name: value for name, value in expected.items() if not name.startswith("scratch/")
            }
            for kind, names in differences(found, bits).items():
                if names:
                    count.add(kind, about=f"{about}: {names}")
        shutil.rmtree(folder)
        count.done[link] = count.done.get(link, 0) + 1
        kept.keep(count)
    return count


def locks(whole: Undisturbed, kept: Kept, wanted: int) -> Count:
    """Runs on a file system that has no locks: they end as others do."""
    count = kept.count("locks")
    where = whole.where

    def harm(rank: int) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

        fcntl.flock = refuse

    for number in range(count.found["locks"], wanted):
        if kept.over:
            break
        family = ("mebp", "zo2", *FAMILIES)[number % (len(FAMILIES) + 2)]
        disturbed(count, whole, family, where.folder / f"locks-{number}", harm, "without locks")
        count.add("locks")
        kept.keep(count)
    return count


def pipes(whole: Undisturbed, kept: Kept, wanted: int) -> Count:
    """Runs whose standard output and error are a full device, closed, a pipe without a reader, or
    one that nobody reads."""
    count = kept.count("pipes")
    where = whole.where
    for number in range(count.found["pipes"], wanted):
        if kept.over:
            break
        kind = OUTPUTS[number % len(OUTPUTS)]
        family = list(FAMILIES)[number % len(FAMILIES)]
        disturbed(
            count,
            whole,
            family,
            where.folder / f"pipes-{number}",
            lambda rank, kind=kind: bad_output(kind),
            kind,
        )
        count.add("pipes")
        kept.keep(count)
    return count


def disturbed(
    count: Count,
    whole: Undisturbed,
    family: str,
    folder: Path,
    harm: Callable[[int], None],
    about: str,
) -> None:
    """One run that ends by itself, exit code 0, with the same files as an undisturbed one."""
    expected = whole.of(family)[0]
    code = start(whole.where, family, folder, harm=harm).wait()
    if code is None:
        count.add("hangs", about=f"{family} {about}")
    elif code:
        count.add("failed", about=f"{family} {about}: exit {code}: {said(folder)[-300:]}")
    else:
        for kind, names in differences(result(folder), expected).items():
            if names:
                count.add(kind, about=f"{family} {about}: {names}")
    shutil.rmtree(folder, ignore_errors=True)


def crafted(whole: Undisturbed) -> Count:
    """The tests that plant pickles, tags, paths and false lengths; see
    tests/cli/test_crafted.py."""
    import pytest

    count = Count("crafted")
    process = os.fork()
    if process == 0:
        root = Path(__file__).parents[1]
        os._exit(
            int(
                pytest.main(
                    ["-q", "-p", "no:cacheprovider", str(root / "tests/cli/test_crafted.py")]
                )
            )
        )
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    count.add("failed" if code else "refused", about="tests/cli/test_crafted.py" if code else "")
    return count


def bounds_of(counts: list[Count]) -> list[Bound]:
    """Nothing that must not be."""
    return [
        Bound(f"{count.row}: {kind}", count.found[kind], 0) for count in counts for kind in WRONG
    ]


def figures_of(counts: list[Count]) -> dict[str, Any]:
    return {
        count.row: {"done": count.done, "found": dict(count.found), "told": count.told}
        for count in counts
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ci", action="store_true")
    options.add_argument("--only", default="")
    options.add_argument("--kills", type=int, default=1000)
    options.add_argument("--families", default=",".join(FAMILIES))
    options.add_argument("--state", type=Path)
    options.add_argument("--seconds", type=float, default=7200.0)
    arguments = options.parse_args()
    each = -(-60 // len(FAMILIES)) if arguments.ci else arguments.kills
    counts: list[Count] = []
    began = time.monotonic()
    kept = Kept(arguments.state, arguments.seconds)
    with place() as where:
        whole = Undisturbed(where)
        usual = [row for row in ROWS if row not in ("full", "crafted")] if arguments.ci else ROWS
        rows = arguments.only.split(",") if arguments.only else list(usual)
        for number, row in enumerate(rows, 1):
            kept.begin(row, rows[number:])
            if row == "kills":
                counts.append(kills(whole, kept, arguments.families.split(","), each))
            elif row == "full":
                counts.append(full(whole, kept, 2 if arguments.ci else 20))
            elif row == "flips":
                counts.append(flips(whole, kept, len(FAMILIES) if arguments.ci else 200))
            elif row == "two":
                counts.append(two(whole, kept, 2 if arguments.ci else 50))
            elif row == "foreign":
                counts.append(foreign(whole, kept, 2 if arguments.ci else 40))
            elif row == "links":
                counts.append(linked(whole, kept, 6 if arguments.ci else 12))
            elif row == "locks":
                counts.append(locks(whole, kept, 1 if arguments.ci else 20))
            elif row == "pipes":
                counts.append(pipes(whole, kept, len(OUTPUTS) if arguments.ci else 40))
            elif row == "crafted":
                counts.append(crafted(whole))
            for line in counts[-1].lines():
                print(f"{line}  ({time.monotonic() - began:.0f} s)", flush=True)
    finish(arguments, figures_of(counts), bounds_of(counts))


if __name__ == "__main__":
    main()
