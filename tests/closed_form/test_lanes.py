"""Oracle: the order of beginnings and ends, by hand, of work that blocks until it is let go."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, get_ident

import pytest
import torch

from blockwalk.engine.home import BRIEF_BYTES, Brief, on_bytes
from blockwalk.program.invariants import happens_before
from blockwalk.program.program import Lane, Op, OpKind, Program, Shape, StepKind
from blockwalk.ranks.groups import Completion
from blockwalk.walk.lanes import Lanes

SECONDS = 20.0
"""The longest that anything is waited for, where it would come at once."""


class Exchanges:
    """So many exchanges, each of which ends when it is let go."""

    def __init__(self, count: int) -> None:
        self.order: list[str] = []
        self.begun = [Event() for _ in range(count)]
        self.let_go = [Event() for _ in range(count)]

    def work(self, number: int) -> Callable[[], Completion]:
        def begin() -> Completion:
            self.order.append(f"{number} begins")
            self.begun[number].set()
            return end

        def end() -> None:
            assert self.let_go[number].wait(SECONDS)
            self.order.append(f"{number} ends")

        return begin


def test_between_nodes_one_op_begins_before_the_one_before_it_has_ended() -> None:
    exchanges = Exchanges(3)
    lanes = Lanes(torch.device("cpu"))
    lanes.begin()
    marks = [lanes.submit(Lane.INTER, exchanges.work(number), ()) for number in range(3)]
    assert exchanges.begun[1].wait(SECONDS)
    assert not exchanges.begun[2].wait(0.1)
    exchanges.let_go[1].set()  # its end waits for the first one's
    assert not exchanges.begun[2].wait(0.1)
    assert lanes.finished() == 0
    exchanges.let_go[0].set()
    assert exchanges.begun[2].wait(SECONDS)
    exchanges.let_go[2].set()
    lanes.drain(marks)
    assert lanes.finished() == 3
    lanes.close()
    begins = [text for text in exchanges.order if "begins" in text]
    ends = [text for text in exchanges.order if "ends" in text]
    assert begins == ["0 begins", "1 begins", "2 begins"]
    assert ends == ["0 ends", "1 ends", "2 ends"]
    assert exchanges.order.index("0 ends") < exchanges.order.index("2 begins")


def test_an_op_waits_for_the_end_of_another_and_has_its_error() -> None:
    exchanges = Exchanges(2)
    lanes = Lanes(torch.device("cpu"))
    lanes.begin()
    ran = Event()

    def refuse() -> Completion:
        def end() -> None:
            raise RuntimeError("connection 1 closed")

        return end

    first = lanes.submit(Lane.INTER, exchanges.work(0), ())
    reader = lanes.submit(Lane.STORE, ran.set, (first,))
    assert exchanges.begun[0].wait(SECONDS)
    assert not ran.wait(0.1)
    exchanges.let_go[0].set()
    lanes.drain([reader])
    assert ran.is_set()
    failed = lanes.submit(Lane.INTER, refuse, ())
    behind = lanes.submit(Lane.INTER, exchanges.work(1), ())  # depends on nothing
    unread = Event()
    exchanges.let_go[1].set()
    lanes.drain([behind])
    with pytest.raises(RuntimeError, match="connection 1"):
        lanes.drain([lanes.submit(Lane.STORE, unread.set, (failed,))])
    assert not unread.is_set()
    lanes.close()


@pytest.mark.parametrize(
    ("lane", "done"), [(Lane.INTRA, (True, True)), (Lane.INTER, (False, True))]
)
def test_the_rules_of_programs_count_on_no_more_than_lanes_do(
    lane: Lane, done: tuple[bool, bool]
) -> None:
    """By hand: whether the first and the second neighbour before an op are done when it starts."""
    ops = tuple(Op(number, OpKind.GATHER, number, lane) for number in range(3))
    program = Program(
        "three gathers", StepKind.TRAIN, Shape(1, 1), ("a", "b", "c"), frozenset(), frozenset(), ops
    )
    order = happens_before(program)
    assert (order(1, 2), order(0, 2)) == done


def test_brief_work_is_done_at_once_unless_something_is_before_it() -> None:
    lanes = Lanes(torch.device("cpu"))
    lanes.begin()
    threads: list[int] = []
    go = Event()

    def work() -> None:
        threads.append(get_ident())

    def waits() -> None:
        assert go.wait(SECONDS)

    marks = [lanes.submit(Lane.FETCH, Brief(work), ())]
    assert threads == [get_ident()]
    earlier = lanes.submit(Lane.FETCH, waits, ())
    behind = lanes.submit(Lane.FETCH, Brief(work), ())
    dependent = lanes.submit(Lane.STORE, Brief(work), (earlier,))
    beside = lanes.submit(Lane.INTRA, Brief(work), (marks[0],))
    assert threads == [get_ident()] * 2, "one lane waits for no other"
    go.set()
    marks += [earlier, behind, dependent, beside]
    lanes.drain(marks)
    assert len(threads) == 4
    assert get_ident() not in threads[2:]
    lanes.close()


def test_brief_work_that_fails_stops_what_needs_it_and_nothing_else() -> None:
    lanes = Lanes(torch.device("cpu"))
    lanes.begin()
    ran: list[str] = []

    def fails() -> None:
        raise OSError("no room")

    failed = lanes.submit(Lane.STORE, Brief(fails), ())
    needs = lanes.submit(Lane.FETCH, Brief(lambda: ran.append("needs it")), (failed,))
    other = lanes.submit(Lane.FETCH, Brief(lambda: ran.append("other")), ())
    with pytest.raises(OSError, match="no room"):
        lanes.drain([failed, needs, other])
    assert ran == ["other"]
    lanes.close()


def test_work_is_brief_by_its_bytes() -> None:
    assert isinstance(on_bytes(BRIEF_BYTES, print), Brief)
    assert not isinstance(on_bytes(BRIEF_BYTES + 1, print), Brief)
