"""An operator ends a run: its nodes drain and leave, and who cannot, or comes later, is sent away."""

from __future__ import annotations

import pytest

from tests.protocol.hubs import WIRE, attend, contribute, hub_of, in_state, join, live_hub, of, sent
from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.protocol.effects import Disconnect, Reduce
from zmqtrain.protocol.hub import STOP_SECONDS, STOPPED
from zmqtrain.protocol.members import MemberState
from zmqtrain.protocol.messages import (
    Fetch,
    Goodbye,
    Hello,
    Refused,
    Report,
    Stop,
    WorkRequest,
    WorkUnit,
)


def stop(hub, now=0.0):
    hub.receive("op", Hello("op", "observer"), now)
    return hub.receive("op", Stop(), now)


def test_every_node_that_trains_is_told_and_drains_and_then_the_run_is_over():
    hub = live_hub("a", "b", units=100)
    hub.receive("a", WorkRequest((), 2, False), 0.0)
    hub.receive("b", WorkRequest((), 2, True), 0.0)
    assert [peer for peer, _ in sent(stop(hub), Stop)] == ["a", "b"]
    assert hub.units.ledger.finished and hub.roster(1.0).hub["ending"]
    assert sent(hub.receive("a", WorkRequest((0,), 1, False), 1.0), WorkUnit) == [("a", WorkUnit((), finished=True))]
    assert of(Reduce, contribute(hub, "a", 0, 1.0, codec="float32", dense=True)), "what is drained lands"
    assert not sent(hub.receive("a", WorkRequest((), 0, True), 1.0), WorkUnit)
    ends = sent(hub.receive("b", WorkRequest((), 0, True), 2.0), WorkUnit)
    assert ends == [(peer, WorkUnit((), finished=True, end_version=hub.version)) for peer in "ab"]
    for peer in "ab":
        hub.receive(peer, Goodbye(), 3.0)
    assert hub.nodes == 0 and "op" in hub.members, "the operator hears of the end"


def test_to_say_it_twice_is_to_say_it_once():
    hub = live_hub("a")
    assert stop(hub) and hub.receive("op", Stop(), 1.0) == [] and hub.stopped_at == 0.0


@pytest.mark.parametrize("state", [MemberState.FOUNDING, MemberState.WAITING, MemberState.APART, MemberState.LENDING])
def test_a_node_that_does_not_train_on_the_runs_parameters_yet_is_sent_away(state):
    hub = in_state(state)
    effects = stop(hub)
    assert ("x", Refused("stopped", STOPPED)) in sent(effects, Refused)
    assert any(gone.peer == "x" for gone in of(Disconnect, effects)) and "x" not in hub.members


def test_a_node_that_comes_while_a_run_ends_is_refused_and_who_looks_on_is_not():
    hub = live_hub("a")
    stop(hub)
    assert sent(hub.receive("late", Hello("late"), 1.0), Refused) == [("late", Refused("stopped", STOPPED))]
    assert not sent(hub.receive("eye", Hello("eye", "observer"), 1.0), Refused)


def test_a_node_that_does_not_leave_in_time_is_sent_away():
    hub = live_hub("a", "b")
    stop(hub)
    hub.receive("a", Goodbye(), 1.0)
    report = Report(1, 2, 3.0, 4.0, 5.0, 6, 7, 8)
    for second in range(2, int(STOP_SECONDS) - 1, 2):
        attend(hub, second, second - 2)
        hub.receive("b", report, float(second))
    assert hub.nodes == 1
    effects = attend(hub, STOP_SECONDS + 1, STOP_SECONDS - 1)
    assert ("b", Refused("stopped", STOPPED)) in sent(effects, Refused) and hub.nodes == 0


@pytest.mark.parametrize("state", [state for state in MemberState if state is not MemberState.OBSERVER])
def test_nobody_ends_a_run_but_who_looks_on(state):
    hub = in_state(state)
    with pytest.raises(RemoteProtocolError):
        hub.receive("x", Stop(), 0.0)
    assert hub.stopped_at is None


def test_another_shard_than_the_first_sends_on_who_says_it():
    hub = hub_of(shards=2)
    hub.shard, hub.first = 1, "tcp://first:5555"
    (refused,) = sent(stop(hub), Refused)
    assert refused[1].reason == "shard" and "tcp://first:5555" in refused[1].text and hub.stopped_at is None


def test_a_run_that_was_ended_can_be_gone_on_with():
    hub = live_hub("a", units=5)
    stop(hub)
    again = hub_of(units=5)
    again.restore(hub.state())
    assert not again.units.ledger.finished
    join(again, "a")
    assert sent(again.receive("a", WorkRequest((), 1, False), 0.0), WorkUnit) == [("a", WorkUnit((0,)))]


def test_a_run_that_nobody_has_joined_is_over_at_once():
    hub = hub_of()
    stop(hub)
    assert hub.units.ledger.finished and hub.nodes == 0


def test_nodes_that_wait_for_one_that_founds_the_run_are_sent_away_with_it():
    hub = hub_of(start_nodes=1)
    join(hub, "a")
    hub.receive("b", Hello("b"), 0.0)
    hub.receive("b", Fetch(-1, WIRE), 0.0)
    stop(hub)
    assert hub.nodes == 0
