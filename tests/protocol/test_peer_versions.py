"""What a node publishes and what it believes has landed: aggregates, gaps, and the snapshots that fill them."""

from __future__ import annotations

import pytest

from tests.protocol.peers import IN_STATE, ROSTER, WIRE, aggregate, live, publish, snapshot, welcome
from zmqtrain.core.errors import LocalProtocolError
from zmqtrain.protocol.effects import Deliver, Send, Withdraw
from zmqtrain.protocol.messages import Fetch, Goodbye, Preempt, Refused, replace_fields
from zmqtrain.protocol.peer import PeerState


@pytest.mark.parametrize("state", [state for state in PeerState if state is not PeerState.LIVE])
def test_only_a_live_node_publishes(state):
    with pytest.raises(LocalProtocolError, match=f"a cannot publish while it is {state.value}"):
        IN_STATE[state]().publish(publish(0))


def test_an_aggregate_says_which_of_this_nodes_publishes_are_in_it():
    peer = live(0, in_flight=(0, 1))
    message = aggregate(1, (("b#1", 1), ("a#1", 0), ("a#1", 77)))
    peer.receive(message, 0.0)
    assert peer.received(1) == [Deliver(message, (0,), False)]
    assert peer.in_flight == {1}


def test_a_refused_publish_is_withdrawn_once():
    peer = live(0, in_flight=(0, 1))
    assert peer.receive(Refused("corrupt", "bytes were changed", 0), 0.0) == [
        Withdraw(0, "corrupt", "bytes were changed")
    ]
    assert peer.receive(Refused("corrupt", "bytes were changed", 0), 0.0) == []
    assert peer.in_flight == {1} and peer.state is PeerState.LIVE


def test_a_probe_that_is_refused_is_no_reason_to_leave():
    peer = live()
    assert peer.receive(Refused("probe", "too many"), 0.0) == [] and peer.state is PeerState.LIVE


def test_a_gap_is_filled_by_a_snapshot():
    peer = live(5, in_flight=(0, 1))
    peer.receive(aggregate(6, (("a#1", 0),)), 0.0)
    assert peer.receive(aggregate(8), 0.0) == [Send(Fetch(5, WIRE))]  # 6 has not come whole
    assert peer.state is PeerState.SYNCING
    assert peer.received(6) == [] and peer.receive(aggregate(9), 0.0) == []
    peer.receive(snapshot(9, ((0, 6), (1, 8))), 0.0)
    assert peer.received(1000) == [Deliver(snapshot(9, ((0, 6), (1, 8))), (0, 1), False)]
    assert (peer.version, peer.in_flight) == (9, set())


def test_an_aggregate_that_is_here_already_is_ignored():
    peer = live(5)
    assert peer.receive(aggregate(5), 0.0) == [] and peer.receive(aggregate(4), 0.0) == []
    assert peer.state is PeerState.LIVE


def test_who_dropped_an_aggregate_asks_for_a_whole_snapshot_of_that_very_version():
    peer = live(5)
    peer.receive(aggregate(6), 0.0)
    peer.received(6)
    assert peer.resync() == [Send(Fetch(-1, WIRE))]
    assert peer.resync() == []
    peer.receive(Goodbye(), 0.0)  # and also when the connection is lost before it has come
    assert peer.receive(welcome(6), 1.0) == [Send(Fetch(-1, WIRE))]
    peer.receive(snapshot(6), 1.0)
    assert peer.received(1000) == [Deliver(snapshot(6), (), False)]
    peer.receive(Goodbye(), 2.0)
    assert peer.receive(welcome(6), 3.0) == [Send(Fetch(6, WIRE))]


def test_what_the_hub_dropped_is_fetched_where_no_later_aggregate_shows_the_gap():
    peer = live(5)
    peer.receive(replace_fields(ROSTER, version=6), 0.0)
    fetches = []
    for tenth in range(1, 80):
        peer.saw(tenth / 10)
        fetches += [(tenth, e.message) for e in peer.tick(tenth / 10) if e.message == Fetch(5, WIRE)]
    ((tenth, _),) = fetches
    assert 30 < tenth < 45 and peer.state is PeerState.SYNCING


def test_an_aggregate_that_is_still_on_its_way_is_no_gap():
    peer = live(5)
    for tenth in range(1, 80):
        peer.receive(replace_fields(ROSTER, version=5 + (tenth + 9) // 10), tenth / 10)
        assert [e for e in peer.tick(tenth / 10) if isinstance(e.message, Fetch)] == []
        if tenth % 10 == 0:
            peer.receive(aggregate(5 + tenth // 10), tenth / 10)
            peer.received(5 + tenth // 10)
    assert peer.version == 12


def test_a_preempted_node_takes_the_anchor_and_drops_what_is_pending():
    peer = live(5)
    assert peer.receive(Preempt("a better one was found"), 0.0) == [Send(Fetch(-1, WIRE))]
    peer.receive(snapshot(5), 0.0)
    assert peer.received(1000) == [Deliver(snapshot(5), (), True)]
    peer.receive(aggregate(7), 0.0)
    peer.receive(snapshot(7), 0.0)
    assert peer.received(1000) == [Deliver(snapshot(7), (), False)]


def test_who_finds_while_it_waits_for_a_snapshot_that_an_aggregate_was_lost_asks_again_if_that_brings_nothing():
    peer = live(5)
    peer.receive(aggregate(6), 0.0)
    peer.received(6)
    assert peer.receive(aggregate(8), 0.0) == [Send(Fetch(6, WIRE))]
    assert peer.resync() == []  # 6 was spoiled, which was seen late
    assert peer.receive(replace_fields(snapshot(6), sizes=()), 0.0) == [Send(Fetch(-1, WIRE))]
    peer.receive(snapshot(8), 0.0)
    assert peer.received(1000) == [Deliver(snapshot(8), (), False)]
