"""Ranks as they come: a zeroth-order run whose steps are shared with whichever processes are there.

One process, the *host*, is the run: it has the ledger, the logs, the checkpoints, and a store of
keys (torch's ``TCPStore``). Others join at any time, for their weights are the model's and the
ledger's lines, which the store holds. A step has as many pieces as forwards times micro-batches,
whoever is there. In each *turn* the host tells who computes which; a rank answers with their
losses; what has not come in time the host computes itself. So a rank may end at any instant, and
only the host decides a step. Losses are added up exactly, in the order of the pieces: no bit
depends on who computed what.

    header       facts of the run, and its ledger's header: a rank compares them with its own
    entry/7      the ledger's line of step 7, decided once
    asks         a line for each rank that wants to take part from the next turn on
    turn         the newest turn; turn/9 is there once the ninth has begun
    losses/9/2   the answer of rank 2 in turn 9
    sums/100     checksums of the weights after step 100

Every value is JSON. Nothing here is written to a file.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from blockwalk.plan.mesh import Piece
from blockwalk.plan.parsing import host_and_port
from blockwalk.ranks.forward_sharing import Lent, WalkAgain
from blockwalk.ranks.launch import key_store
from blockwalk.ranks.ranks import digest_of

GRACE = 1.0
"""Seconds that the host waits for a rank beyond twice the time that its share should take."""
_POLL = 0.002


@dataclass(slots=True)
class Elastic:
    """This process among the ranks of an elastic run: its host, number 0, or a rank that joined it
    (a :class:`~blockwalk.ranks.forward_sharing.ForwardSharing`)."""

    store: Any
    """Torch's store of keys, which the host serves."""
    number: int = 0
    durable: bool = False
    position: Sequence[int] = ()
    """The place in the data of the batch to come: epoch, and examples of it given out."""
    say: Callable[[str], object] = lambda _: None
    """Told of ranks that come and go."""
    turn: dict[str, Any] = field(default_factory=dict)
    pace: float | None = None
    """Seconds that a piece last took this rank."""
    _paces: dict[int, float] = field(default_factory=lambda: {0: 1.0})
    """Seconds that a piece takes each rank that takes part, the host first."""
    _awaited: dict[int, list[Piece]] = field(default_factory=dict)
    _known: dict[Piece, list[float]] = field(default_factory=dict)
    """Losses of the step in progress."""
    _own: tuple[Piece, ...] = ()
    _read: float = 0.0
    """A digest of the global batch that this process was given."""
    _began: float = 0.0
    _heard: int = 0
    """Lines of ``asks`` that the host has read."""

    # ---- the host --------------------------------------------------------------------------------

    def open(self, header: Mapping[str, Any], entries: Sequence[Any]) -> None:
        """Let ranks join a run that stands after these entries."""
        self.store.multi_set(
            [f"entry/{e.step}" for e in entries], [json.dumps(asdict(e)) for e in entries]
        )
        self.store.set("asks", "")
        self.announce(step=len(entries) + 1, shares={})
        self.store.set("header", json.dumps(header))

    def announce(self, **values: Any) -> None:
        """Begin a turn; one with ``ended`` is the last."""
        self.turn = {"number": self.turn.get("number", 0) + 1, **values}
        self.store.set("turn", json.dumps(self.turn))
        self.store.set(f"turn/{self.turn['number']}", "")

    def _divide(self, step: int, pieces: Sequence[Piece]) -> None:
        """Begin a turn: consecutive pieces for everybody who asked, as many as each is fast, and
        one for the host at least."""
        lines = self.store.get("asks").decode().splitlines()
        for rank, pace in filter(None, map(_request, lines[self._heard :])):
            if rank not in self._paces:  # it may have asked twice
                self._paces[rank] = pace or self._paces[0]
                self.say(f"rank {rank} takes part from step {step} on")
        self._heard = len(lines)
        speeds = list(itertools.accumulate(1 / pace for pace in self._paces.values()))
        ends = [max(1, round(len(pieces) * speed / speeds[-1])) for speed in speeds]
        shares = dict(zip(self._paces, itertools.pairwise([0, *ends]), strict=True))
        self.announce(step=step, shares=shares, read=self._read, position=self.position)
        self._awaited = {rank: list(pieces[slice(*share)]) for rank, share in shares.items()}
        self._own = tuple(self._awaited.pop(0))

    def _collect(self, step: int, took: float) -> None:
        """Wait for the other ranks' losses; those that do not come are out of the run until they
        ask again."""
        for rank, pieces in self._awaited.items():
            key = f"losses/{self.turn['number']}/{rank}"
            until = self._began + 2 * max(took, self._paces[rank] * len(pieces)) + GRACE
            while pieces and not self.store.check([key]) and time.monotonic() < until:
                time.sleep(_POLL)
            if pieces and self.store.check([key]):
                answer = _answer(
                    self.store.get(key), len(pieces), len(next(iter(self._known.values())))
                )
                self.store.delete_key(key)
                if answer is not None:
                    losses, self._paces[rank] = answer
                    self._known |= zip(pieces, losses, strict=True)
                    continue
            if pieces:
                del self._paces[rank]
                self.say(f"step {step}: rank {rank} is gone, or late: its share is computed here")
        self._awaited = {}

    def confirm(self, step: int, entry: Any, *, wait: bool) -> None:
        """Decide a step. Raises RuntimeError where another host of this store has."""
        line = json.dumps(asdict(entry))
        if (decided := self.store.compare_set(f"entry/{step}", "", line).decode()) != line:
            raise RuntimeError(f"step {step} was decided by another host of this store: {decided}")

    # ---- a rank that joined ----------------------------------------------------------------------

    def header(self) -> dict[str, Any]:
        """Return the facts that :meth:`open` was given, once it was."""
        self._until("header")
        return dict(json.loads(self.store.get("header")))

    def _until(self, key: str) -> None:
        while not self.store.check([key]):
            time.sleep(_POLL)

    def next_turn(self) -> dict[str, Any]:
        """Return the newest turn, once there is one that this rank does not know."""
        self._until(f"turn/{self.turn.get('number', 0) + 1}")
        self.turn = json.loads(self.store.get("turn"))
        return self.turn

    def entries(self, done: int) -> list[dict[str, Any]]:
        """Return the ledger's lines from the step after ``done`` to the one before the turn's."""
        keys = [f"entry/{step}" for step in range(done + 1, self.turn["step"])]
        return [json.loads(line) for line in self.store.multi_get(keys)] if keys else []

    def ask(self) -> None:
        """Ask to take part from the next turn on."""
        self.store.append("asks", json.dumps([self.number, self.pace]) + "\n")

    def compare(self, step: int, sums: Mapping[str, int]) -> None:
        """Tell the checksums of the host's weights after a step, or compare this rank's with them.

        Raises:
            RuntimeError: they differ; this rank ends, and the run goes on without it.
        """
        key = f"sums/{step}"
        if not self.number:
            self.store.set(key, json.dumps(sums))
        elif self.store.check([key]) and (of_host := json.loads(self.store.get(key))) != sums:
            differing = [name for name in sums if sums[name] != of_host.get(name)]
            raise RuntimeError(
                f"step {step}: the weights of {', '.join(differing)} on rank {self.number} differ"
                " from the host's; this rank ends: start it again to make them anew from the"
                " ledger"
            )

    # ---- a step ----------------------------------------------------------------------------------

    def read(self, batch: Mapping[str, Tensor]) -> None:
        """Take note of the global batch of the step to come."""
        self._read = digest_of(batch)

    def share(self, step: int, passes: int, cuts: int) -> tuple[Piece, ...]:
        """Return the pieces that this process walks for now."""
        pieces = list(itertools.product(range(passes), range(cuts)))
        if self.number:
            if self._read != self.turn["read"]:
                raise ValueError(
                    f"step {step}: this rank reads other data than the run that it joined"
                )
            self._own = tuple(pieces[slice(*self.turn["shares"][str(self.number)])])
        elif self._known:
            self._own = tuple(piece for piece in pieces if piece not in self._known)
        else:
            self._divide(step, pieces)
        self._began = time.monotonic()
        return self._own

    def refuse(self, step: int, error: str, passes: int, cuts: int) -> None:
        """Raise ValueError: this rank cannot use a step's batch."""
        raise ValueError(error)

    def first_seed(self, seed: int) -> int:
        """Return the seed: the host alone decides a step."""
        return seed

    def losses(
        self, step: int, own: Sequence[float], counted: Sequence[int], passes: int, rows: int
    ) -> list[list[float]]:
        """Return losses of all pieces, by forward and in the order of the global batch: see
        :meth:`~blockwalk.ranks.forward_sharing.ForwardSharing.losses`.

        Raises:
            WalkAgain: on the host: not all came.
            Lent: on a rank that joined: it has answered.
        """
        took = time.monotonic() - self._began
        of_pieces = [list(own[start : start + rows]) for start in range(0, len(own), rows)]
        self.pace = took / len(self._own)
        if self.number:
            answer = {"pace": self.pace, "losses": of_pieces}
            self.store.set(f"losses/{self.turn['number']}/{self.number}", json.dumps(answer))
            raise Lent
        self._paces[0] = self.pace
        self._known |= zip(self._own, of_pieces, strict=True)
        self._collect(step, took)
        if len(self._known) < passes * len(counted):
            raise WalkAgain
        losses = self._known
        self._known = {}
        cuts = range(len(counted))
        return [[loss for m in cuts for loss in losses[p, m]] for p in range(passes)]


def _request(line: str) -> tuple[int, float | None] | None:
    """Return the number of a rank that wants to take part, and the seconds that a piece takes it;
    None for a line of another form."""
    try:
        rank, pace = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    if type(rank) is not int or rank < 1 or not (pace is None or _is_pace(pace)):
        return None
    return rank, pace


def _answer(text: bytes, pieces: int, rows: int) -> tuple[list[list[float]], float] | None:
    """Return the losses of a rank's pieces, ``rows`` each, and the seconds that a piece took it;
    None for an answer of another form, or with a loss that is not finite: the rank counts as
    gone."""
    try:
        answer = json.loads(text)
        losses = answer["losses"]
        pace = answer["pace"]
        complete = (
            len(losses) == pieces and all(len(piece) == rows for piece in losses) and _is_pace(pace)
        )
        finite = all(
            type(loss) is float and math.isfinite(loss) for piece in losses for loss in piece
        )
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return (losses, pace) if complete and finite else None


def _is_pace(pace: Any) -> bool:
    return type(pace) is float and 0 < pace < math.inf


def elastic(address: str, timeout: float, *, joins: bool) -> Elastic:
    """Return the host of an elastic run, which serves the store at ``address`` (``host:port``), or
    a rank that joins it.

    Raises:
        LostRank: the address is taken; or nobody answers there within ``timeout`` seconds.
    """
    host, port = host_and_port(address)
    role = "the rank that joins" if joins else "the run's host"
    store = key_store(host, port, timeout, not joins, role, "the run's host", "elastic")
    return Elastic(store, number=store.add("ranks", 1) if joins else 0)
