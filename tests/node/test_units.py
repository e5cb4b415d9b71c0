"""The data units of one node: what it asks for, the batches made of them, and what it reports at the end."""

from __future__ import annotations

import threading

import pytest

from zmqtrain.core.errors import ZmqTrainError
from zmqtrain.core.types import LOCAL_UNITS
from zmqtrain.node.units import UnitQueue
from zmqtrain.protocol.messages import WorkRequest, WorkUnit


class Queue(UnitQueue):
    """One whose training thread never waits: `answer` comes, if it comes, when it asks."""

    def __init__(self, answer=None, live=True):
        self.asked, self.answer, self.live = [], answer, live
        super().__init__("pc#1", self, threading.Condition())

    def check(self):
        pass

    def while_idle(self):
        pass

    def ask_for_units(self):
        self.asked.append(self.request())
        if self.answer is not None and self.asked[-1] is not None:
            answer, self.answer = self.answer, None
            self.dealt(answer)


def test_who_has_nothing_asks_and_what_is_done_is_said_with_the_next_request():
    queue = Queue(WorkUnit((3, 4)))
    assert queue.take() == 3
    assert queue.asked == [WorkRequest((), 2, True), WorkRequest((), 1, False)]
    queue.dealt(WorkUnit((5,)))
    queue.done(3)
    assert queue.take() == 4
    assert queue.asked[2:] == [WorkRequest((3,), 1, False)]


def test_who_cannot_wait_is_told_that_there_is_nothing_now_and_asks_again():
    queue = Queue()
    assert queue.take_soon(0.0) is None and not queue.finished and not queue.waiting
    assert queue.asked == [WorkRequest((), 2, True)]
    queue.dealt(WorkUnit((3,)))
    assert queue.take_soon(0.0) == 3 and queue.asked[1:] == [WorkRequest((), 2, False)]
    queue.dealt(WorkUnit((), finished=True))
    assert queue.take_soon(0.0) is None and queue.finished


def test_without_a_broker_a_node_draws_units_of_its_own_and_says_nothing_of_them():
    queue = Queue(live=False)
    unit = queue.take()
    assert unit > LOCAL_UNITS
    queue.done(unit)
    queue.reset()
    assert queue.request().done == ()


def test_the_end_is_drained_once_and_only_who_has_drained_is_idle_and_wants_nothing():
    queue = Queue(WorkUnit((), finished=True))
    assert not queue.drain()
    assert queue.take() is None
    queue.asked.clear()
    assert queue.drain() and queue.drain()
    assert queue.asked == [WorkRequest((), 0, True)]


def test_who_is_told_of_the_end_while_it_waits_does_not_say_that_it_has_drained():
    queue = Queue()

    def the_end_comes_first():
        queue.dealt(WorkUnit((), finished=True))
        queue.asked.append(queue.request())

    queue.done(5)
    queue.ask_for_units = the_end_comes_first
    assert queue.take() is None
    assert queue.asked[0] == WorkRequest((5,), 0, False)


def test_who_has_drained_says_so_again_to_a_hub_that_had_lost_it():
    queue = Queue(WorkUnit((), finished=True))
    queue.take()
    queue.drain()
    queue.reset()
    assert queue.drained and queue.request() == WorkRequest((), 0, True)


@pytest.mark.parametrize("live", [True, False])
def test_what_was_dealt_by_a_lost_broker_is_forgotten(live):
    queue = Queue(live=live)
    queue.dealt(WorkUnit((1, 2)))
    queue.reset()
    assert queue.request() == WorkRequest((), 2, False)


# ---------------------------------------------------------------------- batches


class Dealt(Queue):
    """One to which a broker has dealt units; told: the recorder of its events."""

    def __init__(self, told):
        super().__init__()
        self._events = told

    def ask_for_units(self):
        pass


class Told:
    """A recorder of the units on which training begins."""

    def __init__(self):
        self.units = []

    def began(self, unit):
        self.units.append(unit)


def of_unit(unit):
    return iter([(unit, number) for number in range(3)])


@pytest.fixture
def units(told):
    queue = Dealt(told)
    queue.dealt(WorkUnit((7, 8), finished=True))
    return queue


@pytest.fixture
def told():
    return Told()


def test_all_batches_of_all_units_come_in_their_order(units, told):
    assert list(units.batches(of_unit)) == [(unit, number) for unit in (7, 8) for number in range(3)]
    assert told.units == [7, 8]


def test_a_unit_is_done_when_the_batch_after_its_last_is_asked_for(units):
    coming = units.batches(of_unit)
    for _ in range(3):
        next(coming)
    assert units.request() is None
    next(coming)
    assert units.request().done == (7,)


def test_who_goes_on_from_a_checkpoint_is_given_no_batch_twice(units, told):
    coming = units.batches(of_unit)
    assert [next(coming), next(coming)] == [(7, 0), (7, 1)]
    plain = units.to_plain()
    again = Dealt(told)
    again.restore(plain, exactly=False)
    again.dealt(WorkUnit((7, 8), finished=True))
    assert list(again.batches(of_unit))[:2] == [(7, 2), (8, 0)]


def test_units_in_a_checkpoint_of_version_0_1_are_read_and_written_in_the_same_words(told):
    units = Dealt(told)
    local = units.to_plain()["next_local"]
    units.restore({"held": [6, 7], "passed": [[6, 1 << 30], [7, 2]], "reached": 7, "next_local": local}, exactly=True)
    assert units.to_plain() == {"held": [6, 7], "passed": [[6, 1 << 30], [7, 2]], "reached": 0, "next_local": local}
    units.dealt(WorkUnit((6, 7), finished=True))
    assert next(units.batches(of_unit)) == (7, 2)


def test_while_no_unit_comes_there_is_none_and_the_end_of_the_data_ends_it(told):
    units = Dealt(told)
    coming = units.batches_within(of_unit, 0.0)
    assert next(coming) is None and next(coming) is None
    units.dealt(WorkUnit((4,)))
    assert [next(coming) for _ in range(3)] == [(4, 0), (4, 1), (4, 2)]
    units.finished = True
    assert next(coming, "over") == "over"


def test_who_has_failed_is_given_no_more(units, told):
    def fail():
        raise ZmqTrainError("the disk is gone")

    units.check = fail
    with pytest.raises(ZmqTrainError, match="the disk is gone"):
        next(units.batches(of_unit))
    assert told.units == []


def test_a_run_that_is_ended_cuts_the_unit_short_and_does_not_call_it_done(units):
    coming = units.batches(of_unit)
    assert next(coming) is not None and not units.stopped
    units.stop()
    assert list(coming) == []
    assert units.finished and not units._done
