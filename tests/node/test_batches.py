"""The batches of a node's data units: in their order, from where a checkpoint was, done when they were trained on."""

from __future__ import annotations

import pytest

from zmqtrain.core.errors import ZmqTrainError
from zmqtrain.node.batches import UnitBatches
from zmqtrain.node.units import UnitQueue
from zmqtrain.protocol.messages import WorkUnit


class Told:
    """Who is told of each unit."""

    def __init__(self):
        self.units = []

    def began(self, unit):
        self.units.append(unit)


def of_unit(unit):
    return iter([(unit, number) for number in range(3)])


@pytest.fixture
def units():
    queue = UnitQueue("pc#1", lambda: None, lambda: True)
    queue.dealt(WorkUnit((7, 8), finished=True))
    return queue


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def batches(units, told):
    return UnitBatches(units, lambda: None, told)


def test_all_batches_of_all_units_come_in_their_order(batches, told):
    assert list(batches.each(of_unit)) == [(unit, number) for unit in (7, 8) for number in range(3)]
    assert told.units == [7, 8]


def test_a_unit_is_done_when_the_batch_after_its_last_is_asked_for(batches, units):
    coming = batches.each(of_unit)
    for _ in range(3):
        next(coming)
    assert units.request() is None
    next(coming)
    assert units.request().done == (7,)


def test_who_goes_on_from_a_checkpoint_is_given_no_batch_twice(units, told):
    coming = UnitBatches(units, lambda: None, None).each(of_unit)
    assert [next(coming), next(coming)] == [(7, 0), (7, 1)]
    plain = units.to_plain()
    again = UnitQueue("pc#1", lambda: None, lambda: True)
    again.restore(plain, exactly=False)
    again.dealt(WorkUnit((7, 8), finished=True))
    assert list(UnitBatches(again, lambda: None, told).each(of_unit))[:2] == [(7, 2), (8, 0)]


def test_while_no_unit_comes_there_is_none_and_the_end_of_the_data_ends_it(told):
    units = UnitQueue("pc#1", lambda: None, lambda: True)
    coming = UnitBatches(units, lambda: None, told).as_they_come(of_unit, 0.0)
    assert next(coming) is None and next(coming) is None
    units.dealt(WorkUnit((4,)))
    assert [next(coming) for _ in range(3)] == [(4, 0), (4, 1), (4, 2)]
    units.finish()
    assert next(coming, "over") == "over"


def test_who_has_failed_is_given_no_more(units, told):
    def fail():
        raise ZmqTrainError("the disk is gone")

    with pytest.raises(ZmqTrainError, match="the disk is gone"):
        next(UnitBatches(units, fail, told).each(of_unit))
    assert told.units == []


def test_a_run_that_is_ended_cuts_the_unit_short_and_does_not_call_it_done(batches, units):
    coming = batches.each(of_unit)
    assert next(coming) is not None and not units.stopped
    units.stop()
    assert list(coming) == []
    assert units.finished and not units._done
