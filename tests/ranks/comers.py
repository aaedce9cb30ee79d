"""A run that ranks join, while they are killed and stopped at drawn instants. Not a test: no oracle."""

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
from blockwalk.ranks.elastic import Elastic
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
    """A forked process with the exit code that ``work`` answers; what it says goes to the file ``said``."""

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
    tiny: TinyRun, folder: Path, settings: str, own: Sequence[str], *, kills: int, stops: int = 0, seed: int
) -> Comers:
    """Train under ``settings``, shared with a rank for each of ``own``, the settings that are its own. One of them at a time is
    killed, and the next one started, or stopped for up to 3 s: half of them within 0.2 s of a moment in which one takes part,
    half of them at any instant. The host waits a little after each step until that is done."""
    draw, counts, there = random.Random(seed), _FORK.Array("i", 4), free_address()
    faults = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    draw.shuffle(faults)

    def rank(number: int) -> tuple[int, Any]:
        command = arguments(tiny, folder, settings, f"--elastic {there} --join", own[number])
        return number, forked(lambda: main.main(command), folder.with_suffix(f".rank-{number}"))

    host = forked(
        lambda: _host(arguments(tiny, folder, settings, f"--elastic {there}"), counts), folder.with_suffix(".host")
    )
    ranks = [rank(number) for number in range(len(own))]
    try:
        for fault in faults:
            if draw.random() < 0.5:
                while not counts[_PRESENT] and host.is_alive():
                    time.sleep(0.002)
                time.sleep(draw.uniform(0, 0.2))
            else:
                time.sleep(draw.uniform(0, 2))
            assert host.is_alive(), "the run ended before its ranks were harmed"
            number, process = ranks.pop(draw.randrange(len(ranks)))
            os.kill(process.pid, fault)
            if fault == signal.SIGKILL:
                process.join()
                ranks.append(rank(number))
            else:
                time.sleep(draw.uniform(0, 3))
                os.kill(process.pid, signal.SIGCONT)
                ranks.append((number, process))
        counts[_ENOUGH] = 1
        everyone = [host, *(process for _, process in ranks)]
        for process in everyone:
            process.join(120)
        return Comers(counts[_LOST], counts[_LENT], [process.exitcode for process in everyone])
    finally:
        for process in (host, *(process for _, process in ranks)):
            process.kill()


def _host(command: Sequence[str], counts: Any) -> int:
    """The host of a run, which counts and waits."""

    def count(line: str) -> None:
        counts[_LOST] += "gone" in line

    def after(event: Event) -> None:
        ranks = event.walker.ranks
        assert isinstance(ranks, Elastic)
        if event.name == "begin":
            said = ranks.say
            ranks.say = lambda line: (count(line), said(line))
        elif event.name == "step":
            counts[_PRESENT] = len(ranks._paces) - 1
            counts[_LENT] += len(ranks._paces) > 1
            if not counts[_ENOUGH]:
                time.sleep(0.02)

    train(config.load(None, config.split_flags(list(command[1:]))[0]), callbacks=[after])
    return 0
