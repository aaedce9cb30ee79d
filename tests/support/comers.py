"""A run that ranks join, while they are killed and stopped at drawn instants. Not a test: no
oracle."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blockwalk.cli import main
from blockwalk.train import config
from blockwalk.train.callbacks import Event
from blockwalk.train.loop import train
from tests.conftest import TinyRun

_FORK = multiprocessing.get_context("fork")
_PRESENT, _LOST, _LENT, _ENOUGH = range(4)


@dataclass(frozen=True)
class Comers:
    """What became of a run and of the ranks that came to it."""

    lost: int
    """Shares that the host computed itself, for their rank was gone or late."""
    shared: int
    """Steps in which others took part."""
    codes: list[int]
    """Exit codes of the host, and of the ranks that were there at its end."""


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def arguments(tiny: TinyRun, folder: Path, *settings: str) -> list[str]:
    """The command line of a run."""
    return ["train", *tiny.arguments(folder), *" ".join(settings).split()]


def forked(work: Callable[[], int], said: Path) -> Any:
    """A forked process with the exit code that ``work`` answers; what it says goes to the file
    ``said``, which is there from now on."""
    said.touch()

    def do() -> None:
        to = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(to, 1)
        os.dup2(to, 2)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        torch.set_num_threads(1)
        os._exit(work())

    process = _FORK.Process(target=do)
    process.start()
    return process


def disturb(
    host: Callable[[str, Any], int],
    rank: Callable[[str, int], int],
    said: Path,
    *,
    ranks: int = 2,
    kills: int,
    stops: int = 0,
    seed: int,
) -> Comers:
    """Start ``host(address, counts)``, and ``rank(address, number)`` so many times, in processes of
    their own. One rank at a time is killed, and the next one started, or stopped for up to 3 s:
    most within 0.2 s of a moment in which one takes part, the others at any instant. What they say
    goes to files whose names begin with ``said``."""
    draw = random.Random(seed)
    counts = _FORK.Array("i", 4)
    address = free_address()
    faults = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    draw.shuffle(faults)

    def start(number: int) -> tuple[int, Any]:
        return number, forked(lambda: rank(address, number), Path(f"{said}-{number}"))

    host_process = forked(lambda: host(address, counts), Path(f"{said}-host"))
    guests = [start(number) for number in range(ranks)]
    try:
        for fault in faults:
            if draw.random() < 0.7:
                counts[_PRESENT] = 0  # until the next step has been shared
                while not counts[_PRESENT] and host_process.is_alive():
                    time.sleep(0.002)
                time.sleep(draw.uniform(0, 0.2))
            else:
                time.sleep(draw.uniform(0, 2))
            assert host_process.is_alive(), (
                f"the run ended before its ranks were harmed: {Path(f'{said}-host').read_text()}"
            )
            number, process = guests.pop(draw.randrange(ranks))
            os.kill(process.pid, fault)
            if fault == signal.SIGKILL:
                process.join()
                guests.append(start(number))
            else:
                time.sleep(draw.uniform(0, 3))
                os.kill(process.pid, signal.SIGCONT)
                guests.append((number, process))
        counts[_ENOUGH] = 1
        everyone = [host_process, *(process for _, process in guests)]
        for process in everyone:
            process.join(120)
        return Comers(counts[_LOST], counts[_LENT], [process.exitcode for process in everyone])
    finally:
        for process in (host_process, *(process for _, process in guests)):
            process.kill()


def disturb_run(
    tiny: TinyRun,
    folder: Path,
    settings: str,
    own: Sequence[str],
    *,
    kills: int,
    stops: int,
    seed: int,
) -> Comers:
    """Disturb ``blockwalk train`` under ``settings`` in ``folder``, shared with a rank for each of
    ``own``: settings of that rank alone. The host waits a little after each step until the harm is
    done."""

    def rank(there: str, number: int) -> int:
        return main.main(
            arguments(tiny, folder, settings, f"--elastic {there} --join", own[number])
        )

    def host(there: str, counts: Any) -> int:
        def after(event: Event) -> None:
            if event.name == "begin":
                listen(event.walker.sharing, counts)
            elif event.name == "step" and not note(event.walker.sharing, counts):
                time.sleep(0.02)

        command = arguments(tiny, folder, settings, f"--elastic {there}")
        train(config.load(None, config.split_flags(command[1:])[0]), callbacks=[after])
        return 0

    return disturb(host, rank, folder, ranks=len(own), kills=kills, stops=stops, seed=seed)


def listen(ranks: Any, counts: Any) -> None:
    """Count the shares that a host hears to be lost."""
    said = ranks.say

    def say(line: str) -> None:
        counts[_LOST] += "gone" in line
        said(line)

    ranks.say = say


def note(ranks: Any, counts: Any) -> bool:
    """Note, after a step, who takes part; the answer is whether the harm is done."""
    counts[_PRESENT] = len(ranks._paces) - 1
    counts[_LENT] += len(ranks._paces) > 1
    return bool(counts[_ENOUGH])
