"""How a node takes its hub for alive or lost, and how the two part."""

from __future__ import annotations

import pytest

from tests.protocol.peers import ROSTER, attend, closed, live
from zmqtrain.protocol.effects import Send
from zmqtrain.protocol.messages import Goodbye, Heartbeat, Hello
from zmqtrain.protocol.peer import Peer, PeerState


def test_heartbeats_go_out_and_give_the_round_trip():
    peer = live()
    assert peer.tick(0.1) == [Send(Heartbeat(0.1))] and peer.tick(0.5) == []
    assert peer.tick(0.6) == [Send(Heartbeat(0.6))]
    peer.receive(Heartbeat(0.6), 0.75)
    assert peer.round_trip_seconds == pytest.approx(0.15)


def test_a_node_that_was_held_up_takes_its_hub_for_lost_only_when_it_could_have_been_heard():
    peer = live(5)
    attend(peer, 2.0)
    peer.tick(60.0)
    peer.saw(60.1)
    attend(peer, 62.5, 60.0)
    assert peer.state is PeerState.LIVE
    peer.tick(62.7)
    assert peer.state is PeerState.CONNECTING


def test_a_silent_hub_is_taken_for_lost_and_hello_is_said_again_at_once():
    peer = live(5, in_flight=(0,))
    peer.saw(2.0)
    attend(peer, 4.5)
    assert peer.state is PeerState.LIVE
    (disconnect,) = peer.tick(4.6)
    assert (disconnect.reason, disconnect.text) == ("lost", "the broker has been silent for 2.6 s")
    assert peer.state is PeerState.CONNECTING and peer.in_flight == {0}
    assert peer.tick(4.6) == [Send(Hello("a", "node", "run-1", 5))]


def test_when_the_hub_says_goodbye_the_node_comes_back_by_itself():
    peer = live(5)
    (disconnect,) = peer.receive(Goodbye("the broker was stopped"), 1.0)
    assert disconnect.text == "the broker said goodbye: the broker was stopped"
    assert peer.tick(1.5) == [] and peer.tick(2.0) == [Send(Hello("a", "node", "run-1", 5))]
    (disconnect,) = live().receive(Goodbye(), 1.0)
    assert disconnect.text == "the broker said goodbye"


def test_what_cannot_be_read_costs_the_connection():
    peer = live(5)
    (disconnect,) = peer.distrust("no msgpack", 1.0)
    assert disconnect.reason == "garbage" and "no msgpack" in disconnect.text
    assert peer.state is PeerState.CONNECTING


def test_leaving_says_goodbye_only_where_somebody_listens():
    assert live().leave("done") == [Send(Goodbye("done"))]
    assert Peer("a#1", "a").leave("done") == [] and closed().leave("done") == []


def test_the_roster_is_kept():
    peer = live()
    peer.receive(ROSTER, 0.0)
    assert peer.roster is ROSTER
