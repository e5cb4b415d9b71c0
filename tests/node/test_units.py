"""The data units of one node: what it asks for, and what it says of itself at the end."""

from __future__ import annotations

import pytest

from zmqtrain.core.types import LOCAL_UNITS
from zmqtrain.node.units import UnitQueue
from zmqtrain.protocol.messages import WorkRequest, WorkUnit


class Queue(UnitQueue):
    """One whose training thread never waits: `answer` comes, if it comes, when it asks."""

    def __init__(self, answer=None, live=True):
        self.asked, self.answer = [], answer
        super().__init__("pc#1", self.told, lambda: live)

    def told(self):
        self.asked.append(self.request())
        if self.answer is not None and self.asked[-1] is not None:
            answer, self.answer = self.answer, None
            self.dealt(answer)


def nothing():
    pass


def test_who_has_nothing_asks_and_what_is_done_is_said_with_the_next_request():
    queue = Queue(WorkUnit((3, 4)))
    assert queue.take(nothing) == 3
    assert queue.asked == [WorkRequest((), 2, True), WorkRequest((), 1, False)]
    queue.dealt(WorkUnit((5,)))
    queue.done(3)
    assert queue.take(nothing) == 4
    assert queue.asked[2:] == [WorkRequest((3,), 1, False)]


def test_who_cannot_wait_is_told_that_there_is_nothing_now_and_asks_again():
    queue = Queue()
    assert queue.take_soon(nothing, 0.0) is None and not queue.finished and not queue.waiting
    assert queue.asked == [WorkRequest((), 2, True)]
    queue.dealt(WorkUnit((3,)))
    assert queue.take_soon(nothing, 0.0) == 3 and queue.asked[1:] == [WorkRequest((), 2, False)]
    queue.dealt(WorkUnit((), finished=True))
    assert queue.take_soon(nothing, 0.0) is None and queue.finished


def test_without_a_broker_a_node_draws_units_of_its_own_and_says_nothing_of_them():
    queue = Queue(live=False)
    unit = queue.take(nothing)
    assert unit > LOCAL_UNITS
    queue.done(unit)
    queue.reset()
    assert queue.request().done == ()


def test_the_end_is_drained_once_and_only_who_has_drained_is_idle_and_wants_nothing():
    queue = Queue(WorkUnit((), finished=True))
    assert not queue.drain()
    assert queue.take(nothing) is None
    queue.asked.clear()
    assert queue.drain() and queue.drain()
    assert queue.asked == [WorkRequest((), 0, True)]


def test_who_is_told_of_the_end_while_it_waits_does_not_say_that_it_has_drained():
    queue = Queue()

    def the_end_comes_first():
        queue.dealt(WorkUnit((), finished=True))
        queue.asked.append(queue.request())

    queue.done(5)
    queue._ask = the_end_comes_first
    assert queue.take(nothing) is None
    assert queue.asked[0] == WorkRequest((5,), 0, False)


def test_who_has_drained_says_so_again_to_a_hub_that_had_lost_it():
    queue = Queue(WorkUnit((), finished=True))
    queue.take(nothing)
    queue.drain()
    queue.reset()
    assert queue.drained and queue.request() == WorkRequest((), 0, True)


@pytest.mark.parametrize("live", [True, False])
def test_what_was_dealt_by_a_lost_broker_is_forgotten(live):
    queue = Queue(live=live)
    queue.dealt(WorkUnit((1, 2)))
    queue.reset()
    assert queue.request() == WorkRequest((), 2, False)
